"""Solvers: the same answers, honest statuses, one line for what cannot be done."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from processes import children, runs

from checkflow.errors import SolverError
from checkflow.plan.packed.backends import _highs_process, highs
from checkflow.plan.packed.backends.gurobi import FREE_LIMIT, licence
from checkflow.plan.packed.program import Program, Solution, SolverStatus, choose, solvers

LONG_S = 120.0


def knapsack(columns: int, rows: int = 5, seed: int = 1) -> Program:
    """Random integer knapsacks with a few shared capacities."""
    random = np.random.default_rng(seed)
    weights = random.integers(1, 50, (rows, columns)).astype(np.float64)
    return Program(
        objective=-random.integers(1, 50, columns).astype(np.float64),
        lower=np.zeros(columns),
        upper=np.full(columns, 3.0),
        integral=np.ones(columns, dtype=np.bool_),
        matrix=sp.csr_array(weights),
        row_lower=np.full(rows, -np.inf),
        row_upper=np.full(rows, float(weights.sum()) / (2 * rows)),
    )


def with_licence(name: str, program: Program) -> None:
    """Skip the test where Gurobi's licence does not cover the program; the other solvers need none."""
    try:
        choose(program, name)
    except SolverError as refused:
        if name != "gurobi":
            raise
        pytest.skip(f"gurobi's licence: {refused}")


def test_every_file_in_backends_is_a_solver() -> None:
    """The registry is the folder."""
    assert solvers() == ("cbc", "gurobi", "highs")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("gurobipy", "gurobipy is not installed: pip install 'gurobipy>=12'"),
        ("gurobipy._core", "cannot be imported (ModuleNotFoundError: "),  # it is there, and broken
    ],
)
def test_a_solver_that_cannot_be_imported_is_not_there_for_auto(
    module: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one without a licence: the next takes the program, and says why. Asked for by name it is refused."""
    (tmp_path / "gurobipy.py").write_text(f"raise ModuleNotFoundError('not here', name={module!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "gurobipy" or name.endswith("backends.gurobi")]:
        monkeypatch.delitem(sys.modules, name)
    chosen = choose(knapsack(6))
    assert chosen.name == "highs" and chosen.why.startswith(f"gurobi: {why}")
    with pytest.raises(SolverError, match=f"^solver gurobi: {re.escape(why)}.*; choose another or auto$"):
        choose(knapsack(6), "gurobi")


@pytest.mark.parametrize("name", solvers())
def test_solvers_agree_with_enumeration(name: str) -> None:
    """The optimum of a small knapsack is that of all 4^6 points, and the bound meets it."""
    program = knapsack(6)
    with_licence(name, program)
    points = np.array(np.meshgrid(*[np.arange(4.0)] * 6)).reshape(6, -1)
    allowed = points[:, np.all(program.matrix @ points <= program.row_upper[:, None], axis=0)]
    best = float((program.objective @ allowed).min())
    solution = choose(program, name).backend.solve(program, time_limit_s=60, warm_start=None, log=None)
    assert solution.status is SolverStatus.OPTIMAL
    assert solution.objective == best
    assert solution.bound == pytest.approx(best, abs=1e-5)
    assert solution.x is not None and program.admits(solution.x)


@pytest.mark.parametrize("name", solvers())
def test_infeasible_is_said_of_what_is_infeasible(name: str) -> None:
    """A row that no point satisfies gives infeasible, with no point."""
    program = knapsack(6)
    with_licence(name, program)
    impossible = replace(program, row_lower=np.full(5, 1e4), row_upper=np.full(5, np.inf))
    solution = choose(impossible, name).backend.solve(impossible, time_limit_s=60, warm_start=None, log=None)
    assert (solution.status, solution.x) == (SolverStatus.INFEASIBLE, None)


@pytest.mark.parametrize("name", solvers())
def test_a_range_row_holds_on_both_sides(name: str) -> None:
    """A row with two different finite sides keeps both."""
    program = knapsack(6)
    with_licence(name, program)
    ranged = replace(program, objective=-program.objective, row_lower=np.full(5, 200.0), row_upper=np.full(5, 260.0))
    solution = choose(ranged, name).backend.solve(ranged, time_limit_s=60, warm_start=None, log=None)
    assert solution.status is SolverStatus.OPTIMAL and solution.x is not None
    activity = program.matrix @ solution.x
    assert np.all((activity >= 200 - 1e-6) & (activity <= 260 + 1e-6))


@pytest.mark.parametrize("name", solvers())
def test_a_search_cut_short_is_not_called_optimal(name: str) -> None:
    """With hardly any time a hard model is feasible or timed out, and its bound is below the start's objective."""
    program = knapsack(400, rows=40)
    with_licence(name, program)
    start = np.zeros(400)
    solution = choose(program, name).backend.solve(program, time_limit_s=0.3, warm_start=start, log=None)
    assert solution.status in (SolverStatus.FEASIBLE, SolverStatus.TIMED_OUT)
    assert solution.bound < solution.objective


def found(solve: Callable[[float], Solution], limit_s: float) -> Solution:
    """In this time, or where a busy machine has let the solver find nothing at all, in twice as much, and so on."""
    solution = solve(limit_s)
    return solution if solution.x is not None or limit_s > LONG_S else found(solve, 2 * limit_s)


@pytest.mark.parametrize("name", solvers())
def test_a_warm_start_is_used(name: str) -> None:
    """Given a good start and no time to speak of, the answer is at least as good as the start."""
    program = knapsack(400, rows=40)
    with_licence(name, program)
    backend, lines = choose(program, name).backend, list[str]()
    good = found(lambda limit_s: backend.solve(program, time_limit_s=limit_s, warm_start=None, log=None), 2.0)
    again = found(
        lambda limit_s: backend.solve(program, time_limit_s=limit_s, warm_start=good.x, log=lines.append), 0.5
    )
    assert again.objective <= good.objective
    said = {"highs": "MIP start solution is feasible", "gurobi": "MIP start", "cbc": "MIPStart"}[name]
    assert any(said in line for line in lines)


@pytest.mark.parametrize("name", solvers())
def test_solvers_are_silent(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """No banner, licence or log reaches the terminal unless it is asked for."""
    program = knapsack(6)
    with_licence(name, program)
    choose(program, name).backend.solve(program, time_limit_s=60, warm_start=None, log=None)
    assert capfd.readouterr() == ("", "")


def test_large_models_go_to_a_process_with_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS in a process of its own says what HiGHS on a thread does."""
    program, lines = knapsack(30), list[str]()
    here = choose(program, "highs").backend.solve(program, time_limit_s=60, warm_start=None, log=None)
    monkeypatch.setattr(highs, "SMALL_NONZEROS", 0)
    there = choose(program, "highs").backend.solve(program, time_limit_s=60, warm_start=here.x, log=lines.append)
    assert (there.status, there.objective) == (here.status, here.objective)
    assert any("Running HiGHS" in line for line in lines)


def test_a_process_that_overruns_is_killed_and_its_best_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that does not come back in time leaves the incumbent and bound it had, as feasible."""
    program = knapsack(400, rows=40)
    monkeypatch.setattr(highs, "SMALL_NONZEROS", 0)
    monkeypatch.setattr(_highs_process, "OVERRUN", -1e9)  # no patience but OVERRUN_S, whatever the limit is
    monkeypatch.setattr(_highs_process, "OVERRUN_S", 1e9 * 60 + 8.0)
    solution = choose(program, "highs").backend.solve(program, time_limit_s=60, warm_start=None, log=None)
    assert solution.status is SolverStatus.FEASIBLE
    assert solution.x is not None and program.admits(solution.x)
    assert solution.bound <= solution.objective and solution.wall_s < 30


def test_auto_says_why_gurobi_was_left_out() -> None:
    """A model beyond the free licence goes to HiGHS, and the reason names the licence and the model's size."""
    refusal, covers_all = licence()
    if refusal is not None or covers_all:
        pytest.skip(f"needs Gurobi's free licence: {refusal or 'this one covers every model'}")
    choice = choose(knapsack(FREE_LIMIT + 1))
    assert choice.name == "highs"
    assert "2000" in choice.why and "2001" in choice.why
    assert choose(knapsack(FREE_LIMIT)).name == "gurobi"


def test_a_solver_asked_for_by_name_is_never_replaced() -> None:
    """Beyond its licence Gurobi is an error, not a silent fallback."""
    refusal, covers_all = licence()
    if refusal is None and covers_all:
        pytest.skip("needs a Gurobi licence that does not cover every model")
    with pytest.raises(SolverError, match="gurobi"):
        choose(knapsack(FREE_LIMIT + 1), "gurobi")


def test_an_unknown_solver_is_one_line() -> None:
    """The message names the ones there are."""
    with pytest.raises(SolverError, match="choose auto, cbc, gurobi, highs"):
        choose(knapsack(6), "cplex")


@pytest.mark.parametrize("name", solvers())
def test_ctrl_c_stops_the_solver(name: str) -> None:
    """An interrupt during the search propagates as KeyboardInterrupt."""
    program = knapsack(400, rows=40)
    with_licence(name, program)
    timer = threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            choose(program, name).backend.solve(program, time_limit_s=60, warm_start=None, log=None)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 30


HARD = """
from test_program import knapsack
from checkflow.plan.packed.backends._highs_process import solve_in_process
print("begins", flush=True)
solve_in_process(knapsack(400, rows=40), None, None, None)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_solvers_process_ends_with_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    """However the parent ends, nothing goes on computing and the temporary folder goes."""
    arguments = [sys.executable, "-c", HARD]
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"begins\n"
        logs: list[Path] = []
        while not any(log.read_text() for log in logs):  # the child is at work
            logs = list(tmp_path.glob("checkflow-highs-*/log"))
            assert parent.poll() is None
            time.sleep(0.05)
        solvers = children(parent.pid)
        parent.send_signal(how)
    deadline = time.monotonic() + 30
    while list(tmp_path.iterdir()) or any(map(runs, solvers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert solvers


def test_a_model_too_large_for_its_time_is_not_handed_over() -> None:
    """Time that passed before the solver begins is over; nothing is known then, and no folder is left."""
    solution = _highs_process.solve_in_process(knapsack(400, rows=40), -1.0, None, None)
    assert (solution.status, solution.x) == (SolverStatus.TIMED_OUT, None)
