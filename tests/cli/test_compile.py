"""checkflow compile from end to end: what it prints, writes and returns."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import checkflow
from checkflow import policies
from checkflow.cli import run
from checkflow.errors import EXIT_DONE, EXIT_NO
from checkflow.hardware import measure
from checkflow.schedule import read_schedule
from checkflow.units import format_ns

FEASIBLE = {
    "feasible", "model", "device", "world_size", "bandwidth_bytes_per_s", "interval", "steps", "state_tensors",
    "state_bytes", "chunks", "iteration_time_ns", "training_peak_bytes", "peak_bytes", "ideal_peak_bytes",
    "lower_bound_bytes", "snapshot_bytes", "gap", "proven_by", "checkfreq_peak_bytes", "formulation", "transfers",
    "solver", "trace_s", "plan_s", "schedule",
}  # fmt: skip
INFEASIBLE = {
    "feasible", "reason", "needed_bandwidth_bytes_per_s", "smallest_interval", "snapshot_bytes_at_that_interval",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _json(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = EXIT_DONE) -> dict[str, object]:
    capfd.readouterr()
    assert run([*arguments, "--json"]) == code
    printed = json.loads(capfd.readouterr().out)
    assert isinstance(printed, dict)
    return printed


def test_compile_prints_its_figures_and_writes_a_schedule_that_verifies(capfd: pytest.CaptureFixture[str]) -> None:
    """The JSON has every documented figure, agrees with the schedule, and the schedule verifies against its graph."""
    assert run(["trace", "alexnet", "--batch-size", "32", "-o", "graph.json"]) == EXIT_DONE
    figures = _json(capfd, "compile", "graph.json", "--bandwidth", "63GB/s", "-o", "s.json")
    assert figures.keys() >= FEASIBLE
    schedule = read_schedule(Path("s.json"))
    assert figures["peak_bytes"] == schedule.certificate.peak_bytes == figures["training_peak_bytes"]
    assert (figures["gap"], figures["proven_by"], figures["state_bytes"]) == (0.0, "bound", 61_100_840 * 4)
    verified = _json(capfd, "verify", "s.json", "graph.json")
    assert verified["peak_bytes"] == figures["peak_bytes"]


def test_a_graph_is_one_whatever_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "alexnet", "--batch-size", "32", "--set", "small=true", "-o", "small.graph"]) == EXIT_DONE
    assert _json(capfd, "compile", "small.graph", "-o", "s.json")["interval"]
    assert run(["verify", "s.json", "small.graph"]) == EXIT_DONE


PLANNED = ("checkflow", "gockpt", "lowdiff", "lowdiff_plus", "rolling")  # never pause


@pytest.mark.parametrize("policy", policies.names())
def test_every_policy_is_compiled_verified_shown_and_drawn(policy: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its schedule says whose it is and where training stands still; reports have the pause as time of its own."""
    assert run(["trace", "alexnet", "--batch-size", "32", "--set", "small=true", "-o", "graph.json"]) == EXIT_DONE
    slow = ("--bandwidth", "300MB/s" if policy not in PLANNED else "63GB/s", "--interval", "1")
    arguments = ("compile", "graph.json", "--policy", policy, *slow, "-o", "s.json")
    figures = _json(capfd, *arguments, "--trace-out", "t.json", "--report", "r.html")
    schedule = read_schedule(Path("s.json"))
    assert figures["policy"] == schedule.policy == policy
    pause_ns = schedule.certificate.pause_ns
    assert figures["pause_ns"] == pause_ns and (pause_ns > 0) == (policy not in PLANNED)
    assert _json(capfd, "verify", "s.json", "graph.json")["pause_ns"] == pause_ns
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    paused = [event["dur"] for event in events if event["name"] == "pause"]
    assert paused == ([pause_ns / 1e3] if pause_ns else [])
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(
        (schedule.iteration_time_ns + pause_ns) / 1e3, rel=1e-3
    ) or policy in (*PLANNED, "checkfreq")  # whose bytes may move on into the next period
    assert run([*arguments]) == run(["inspect", "s.json"]) == run(["verify", "s.json", "graph.json"]) == EXIT_DONE
    assert capfd.readouterr().out.count("stands still") == (2 if pause_ns else 0)


def test_parts_are_shown_and_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    """How many there are, how many bytes of gradients go along, and of which iteration each transfer is."""
    cell = ("alexnet", "--batch-size", "1", "--set", "optimizer=adamw", "--bandwidth", "63GB/s")
    arguments = ("compile", *cell, "--policy", "gockpt", "-o", "s.json")
    for picture in ("r.html", "r.png"):
        assert run([*arguments, "--trace-out", "t.json", "--report", picture]) == EXIT_DONE
    out = capfd.readouterr().out
    assert "2, each as it is in another iteration" in out and "MiB of gradients go along" in out
    assert "no added byte" in out
    assert run(["inspect", "s.json"]) == EXIT_DONE
    assert "gradient of model/" in capfd.readouterr().out
    whole = _json(capfd, "compile", *cell, "--interval", "2")
    assert whole["peak_bytes"] != whole["training_peak_bytes"]


@pytest.mark.parametrize(("policy", "interval"), [("checkfreq", 8), ("checkfreq_cpu", 1), ("synchronous", 1)])
def test_auto_is_the_interval_at_which_a_rule_pauses_least(
    policy: str, interval: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A copy in GPU memory may leave during many iterations; what is read live has to leave in the next one."""
    arguments = ("compile", "alexnet", "--batch-size", "32", "--set", "small=true", "--bandwidth", "300MB/s")
    figures = _json(capfd, *arguments, "--policy", policy)
    state, time_ns = figures["state_bytes"], figures["iteration_time_ns"]
    assert isinstance(state, int) and isinstance(time_ns, int)
    assert figures["interval"] == (-(-state * 10**9 // (300_000_000 * time_ns)) if interval > 1 else 1)
    assert (figures["pause_ns"] == 0) == (policy == "checkfreq")


def test_factors_are_left_out_where_that_is_asked_for() -> None:
    """Gradients of plain SGD are as large as the state, which this link does not carry."""
    graph = str(Path(__file__).parents[2] / "graphs" / "alexnet-1.json")
    arguments = ["compile", graph, "--bandwidth", "63GB/s", "--interval", "1", "--policy", "rolling", "-o", "s.json"]
    assert run(arguments) == EXIT_DONE
    assert any(row.factor_rows for row in read_schedule(Path("s.json")).gradients)
    assert run([*arguments, "--no-factors"]) == EXIT_NO
    with pytest.raises(checkflow.InfeasibleError):
        checkflow.compile(graph, bandwidth="63GB/s", interval=1, policy="rolling", factors=False)


def test_infeasible_says_why_and_what_would_do(capfd: pytest.CaptureFixture[str]) -> None:
    """A link that is too slow gives exit code 1, the reason, and figures that then work."""
    arguments = ("compile", "alexnet", "--batch-size", "1", "--set", "small=true")
    figures = _json(capfd, *arguments, "--bandwidth", "1MB/s", "--interval", "1", code=EXIT_NO)
    assert figures.keys() >= INFEASIBLE
    assert figures["feasible"] is False and figures["reason"] == "bandwidth"
    assert not list(Path().glob("*.json"))
    with_bandwidth = _json(capfd, *arguments, "--bandwidth", str(figures["needed_bandwidth_bytes_per_s"]))
    assert with_bandwidth["interval"] == 1
    with_interval = _json(capfd, *arguments, "--bandwidth", "1MB/s", "--interval", "auto")
    assert with_interval["interval"] == figures["smallest_interval"]
    assert with_interval["snapshot_bytes"] == figures["snapshot_bytes_at_that_interval"]


@pytest.mark.parametrize("formulation", ["paper", "compact", "direct"])
def test_every_formulation_compiles_to_a_verified_schedule(formulation: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each formulation plans a small network; direct never needs more than the others, and they agree."""
    figures = _json(
        capfd, "compile", "transformer", "--set", "small=true", "--batch-size", "2", "--formulation", formulation
    )
    direct = _json(capfd, "compile", "transformer", "--set", "small=true", "--batch-size", "2", "-o", "direct.json")
    assert direct["peak_bytes"] <= figures["peak_bytes"]  # type: ignore[operator]


def test_memory_limit_and_its_relaxation(capfd: pytest.CaptureFixture[str]) -> None:
    """A limit below the training peak is infeasible; relaxed, it grows until a plan keeps to it."""
    arguments = ("compile", "alexnet", "--set", "small=true", "--batch-size", "2", "--memory-limit", "100kB")
    assert _json(capfd, *arguments, code=EXIT_NO)["reason"] == "memory"
    relaxed = _json(capfd, *arguments, "--relax-memory")
    limit, peak = relaxed["memory_limit_bytes"], relaxed["peak_bytes"]
    assert isinstance(limit, int) and isinstance(peak, int)
    assert limit / 1.06 < peak <= limit


LOOPED = """
from checkflow import models

def training():
    made = models.factory("alexnet")(batch_size=32, optimizer="adamw")
    for group in made.optimizers[0].param_groups:
        group["foreach"] = False
    return made
"""


def test_memory_limit_bounds_what_is_executed(capfd: pytest.CaptureFixture[str]) -> None:
    """A limit that would do with an anchor between any two operators, and not at those there are; the advice works.

    A looped update has no anchor inside.
    """
    Path("looped.py").write_text(LOOPED)
    arguments = ("compile", "looped.py", "--memory-limit", "1.3GiB")
    figures = _json(capfd, *arguments, "--bandwidth", "63GB/s", code=EXIT_NO)
    assert figures["reason"] == "memory" and "over the limit" in str(figures["message"])
    found = _json(capfd, *arguments, "--bandwidth", str(figures["needed_bandwidth_bytes_per_s"]))
    executed, ideal = found["peak_bytes"], found["ideal_peak_bytes"]
    assert isinstance(executed, int) and isinstance(ideal, int) and ideal <= executed <= 1.3 * 2**30
    loose = _json(capfd, "compile", "looped.py", "--bandwidth", "63GB/s")
    assert int(str(loose["ideal_peak_bytes"])) <= 1.3 * 2**30 < int(str(loose["peak_bytes"]))


def test_the_interval_is_as_short_as_the_link_allows(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to ask for it; why every iteration was too often is said, in units."""
    monkeypatch.delenv("COLUMNS", raising=False)  # who sets it asks for that width
    arguments = ("compile", "alexnet", "--batch-size", "32", "--bandwidth", "5GB/s")
    figures = _json(capfd, *arguments)
    interval, why = figures["interval"], figures["why_not_each"]
    assert isinstance(interval, int) and interval > 1 and isinstance(why, str)
    assert why == "233 MiB of state do not fit the link, which moves 36.4 MiB from one checkpoint to the next"
    assert run([*arguments]) == EXIT_DONE
    printed = capfd.readouterr().out
    assert f"{interval}: every iteration is too often; {why}" in printed, "one line, however long"
    each = _json(capfd, *arguments, "--interval", "1", code=EXIT_NO)
    assert "233 MiB of state do not fit the link" in str(each["message"])


def test_one_of_several_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """A bundled model is divided among ranks that are not there; of its graph, too, a schedule verifies."""
    ranks = ("llama_8b", "--set", "small=true", "--set", "sharded=true", "--set", "optimizer=adamw",
             "--world-size", "4", "--device", "h100")  # fmt: skip
    figures = _json(capfd, "compile", *ranks, "--rank", "3", "-o", "s.json")
    assert figures["world_size"] == 4 and figures["bandwidth_bytes_per_s"] == 50_412_000_000
    assert run(["trace", *ranks, "-o", "graph.json"]) == EXIT_DONE
    assert run(["verify", "s.json", "graph.json"]) == EXIT_DONE  # rank 0's: all hold as much
    capfd.readouterr()
    assert run(["compile", *ranks, "-o", "s.json"]) == EXIT_DONE
    out = capfd.readouterr().out
    assert "one of 4 ranks" in out and "each of the 4 ranks holds as much" in out
    assert figures["mirror_ns"] is None and "replicate" not in out, "there is no other machine"
    several = [*ranks[:-3], "16", *ranks[-2:]]
    schedule = read_schedule(Path("s.json"))
    found = _json(capfd, "compile", *several, "-o", "s.json")
    sent_bytes = read_schedule(Path("s.json")).sent_bytes()
    assert found["mirror_ns"] == -(-sent_bytes // 50) and 3 * sent_bytes < schedule.sent_bytes() <= 4 * sent_bytes
    assert run(["compile", *several, "-o", "s.json"]) == EXIT_DONE
    assert re.search(
        r"replicate=1 +sends another machine [\d.]+ \w+ an iteration, .* of the network: ", capfd.readouterr().out
    )


def test_every_figure_for_a_person_has_a_unit(capfd: pytest.CaptureFixture[str]) -> None:
    """A limit, and what is over it."""
    arguments = ("compile", "alexnet", "--set", "small=true", "--batch-size", "2", "--memory-limit", "100kB")
    assert run([*arguments]) == EXIT_NO
    printed = capfd.readouterr().err
    assert re.search(r"less than \d+ KiB, \d+ KiB over the limit", printed) and " bytes" not in printed


def test_summary_and_pictures(capfd: pytest.CaptureFixture[str]) -> None:
    """The summary names what a person looks for, and each picture is of its kind."""
    pictures = ["--report", "r.html", "--trace-out", "t.json"]
    assert run(["compile", "alexnet", "--set", "small=true", *pictures]) == EXIT_DONE
    assert run(["compile", "alexnet", "--set", "small=true", "--report", "r.png"]) == EXIT_DONE
    printed = capfd.readouterr().out
    for word in ("iteration", "state", "link", "training peak", "\npeak ", "CheckFreq", "certificate"):
        assert word in printed
    assert "<svg" in Path("r.html").read_text() and "http" not in Path("r.html").read_text().split("<svg")[0]
    assert Path("r.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "C"}


def test_measured_times(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--device measure runs the iteration on this machine and times its operators; each figure of it for a moment."""
    monkeypatch.setattr(measure, "RUN_S", 0.01)
    figures = _json(capfd, "compile", "transformer", "--set", "small=true", "--device", "measure", "--interval", "auto")
    assert figures["device"] == "measured"
    time_ns = figures["iteration_time_ns"]
    assert isinstance(time_ns, int) and time_ns > 0


# A shell that starts a job in the background has it ignore SIGINT, and a test run inherits that.
HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


def test_interrupt_leaves_no_file_behind(tmp_path: Path) -> None:
    """Ctrl-C while it works ends it with one line, and nothing is left in the folder."""
    code = f"{HEARS_CTRL_C}; from checkflow.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "compile", "bert", "-o", "s.json"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "iteration 1" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "interrupted" in rest and "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


def test_what_user_code_prints_is_no_part_of_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output holds one JSON object, and the schedule of each factory has a name of its own."""
    Path("nets.py").write_text(
        "import checkflow, torch\n"
        "print('importing')\n"
        "def small() -> checkflow.Training:\n"
        "    print('building')\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    def iteration():\n"
        "        print('running')\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "    return checkflow.Training(model, optimizer, iteration)\n"
        "other = small\n"
    )
    assert _json(capfd, "compile", "nets.py:small")["schedule"] == "nets-small.schedule.json"
    assert _json(capfd, "trace", "nets.py:other")["graph"] == "nets-other.graph.json"
    assert _json(capfd, "compile", "nets-other.graph.json")["schedule"] == "nets-other.schedule.json"


def test_a_plan_without_room_says_what_leaves_some(capfd: pytest.CaptureFixture[str]) -> None:
    """What leaves directly is cut to end at its deadline; one that was planned with slack has room."""
    graph = Path(__file__).parents[2] / "graphs" / "alexnet-32.json"
    command = ["compile", str(graph), "--interval", "3", "--bandwidth", "12GB/s"]
    said = "the link may be 0.0% slower, or operators faster, before anything waits: cut to end at deadlines"
    assert run(command) == EXIT_DONE
    assert said in capfd.readouterr().out
    assert run([*command, "--slack", "0.02"]) == EXIT_DONE
    assert "cut to end" not in capfd.readouterr().out


def test_the_report_says_what_a_restore_of_parts_takes(capfd: pytest.CaptureFixture[str]) -> None:
    """An AdamW that gradients rebuild over four iterations."""
    command = ["compile", "bert", "--batch-size", "1", "--set", "optimizer=adamw_foreach", "--policy", "gockpt"]
    assert run([*command, "--interval", "4", "--bandwidth", "40GB/s", "-o", "parts.json"]) == EXIT_DONE
    said = capfd.readouterr().out
    replay_ns = read_schedule(Path("parts.json")).certificate.replay_ns
    assert replay_ns > 0
    assert f"reads, then makes updates again for {format_ns(replay_ns)}" in said


def test_auto_shows_what_it_chose_from_and_writes_the_best(capfd: pytest.CaptureFixture[str]) -> None:
    """Every policy is in the table or says why not; the schedule is that of the first line, and it verifies."""
    assert run(["trace", "alexnet", "--batch-size", "32", "-o", "graph.json"]) == EXIT_DONE
    asked = ["compile", "graph.json", "--bandwidth", "20GB/s", "--policy", "auto", "--mtbf", "3h", "-o", "s.json"]
    figures = _json(capfd, *asked)
    choice = figures["choice"]
    assert isinstance(choice, dict)
    options = choice["options"]
    assert {each["policy"] for each in options} | set(choice["refused"]) == set(policies.names())
    assert 0 < options[0]["wasted"] <= 1.01 * min(each["wasted"] for each in options)
    schedule = read_schedule(Path("s.json"))
    assert (schedule.policy, schedule.interval) == (options[0]["policy"], options[0]["interval"])
    assert run(["verify", "s.json", "graph.json"]) == EXIT_DONE
    capfd.readouterr()
    assert run(asked) == EXIT_DONE
    out = capfd.readouterr().out
    assert all(name in out for name in policies.names()) and "redone by a kill" in out


def test_auto_says_why_nobody_can(capfd: pytest.CaptureFixture[str]) -> None:
    """Where no policy keeps to the limit: one line, and no file."""
    asked = ["compile", "alexnet", "--bandwidth", "99GB/s", "--policy", "auto", "--mtbf", "3h", "-o", "s.json"]
    assert run([*asked, "--memory-limit", "100MiB"]) == EXIT_NO
    assert "infeasible (memory)" in capfd.readouterr().err.splitlines()[-1]
    assert run([*asked, "--host-memory", "1MiB"]) == EXIT_NO
    assert "infeasible (host memory)" in capfd.readouterr().err.splitlines()[-1]
    assert not Path("s.json").exists()
