"""checkflow.compile: what the command does, from Python."""

from __future__ import annotations

import os
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import checkflow
from checkflow.cli import run
from checkflow.errors import EXIT_NO
from checkflow.graphfile import read_graph
from checkflow.schedule import read_schedule

SCRIPT = """
import torch
import checkflow

def training(batch_size: int = 4, bias: bool = True) -> checkflow.Training:
    print("built")
    model = torch.nn.Linear(64, 64, bias=bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def iteration():
        model(torch.randn(batch_size, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkflow.Training(model, optimizer, iteration)
"""


def training(batch_size: int = 4, bias: bool = True) -> checkflow.Training:
    model = nn.Linear(64, 64, bias=bias)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def iteration() -> None:
        model(torch.randn(batch_size, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)


def test_the_schedule_is_the_command_s(capfd: pytest.CaptureFixture[str]) -> None:
    """From a path, with the same choices, to the same digest; and `output` writes what the command writes."""
    assert run(["compile", "train.py", "--batch-size", "8", "--device", "h100", "--slack", "0.1", "-o", "a.json"]) == 0
    assert "built" not in capfd.readouterr().out, "what the user's code prints is no part of the command's answer"
    made = checkflow.compile(Path("train.py"), arguments={"batch_size": 8}, device="h100", slack=0.1, output="b.json")
    assert made == read_schedule(Path("a.json")) == read_schedule(Path("b.json"))
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_a_factory_a_path_and_a_graph_give_the_same_plan() -> None:
    """Three ways to say what to compile; arguments are bound by the same rule."""
    arguments = {"batch_size": 8, "bias": False}
    assert run(["trace", "train.py", "--set", "batch_size=8", "--set", "bias=false", "-o", "graph.json"]) == 0
    graph = read_graph(Path("graph.json"))
    made = [
        checkflow.compile("train.py", arguments=arguments),
        checkflow.compile("train.py:training", arguments={"batch_size": "8", "bias": "false"}),
        checkflow.compile(training, arguments=arguments),
        checkflow.compile(partial(training, batch_size=8), arguments={"bias": False}),
        checkflow.compile(graph),
        checkflow.compile("graph.json"),
    ]
    assert len({(one.state_fingerprint, one.certificate.peak_bytes, one.actions) for one in made}) == 1


def test_sizes_rates_and_intervals_are_numbers_or_text() -> None:
    one = checkflow.compile(training, bandwidth="1GB/s", memory_limit="1GiB", chunk="8KiB", interval=3)
    two = checkflow.compile(training, bandwidth=10**9, memory_limit=2**30, chunk=8192, interval=3)
    assert one == two
    assert (one.bandwidth_bytes_per_s, one.memory_limit_bytes, one.chunk_bytes, one.interval) == (10**9, 2**30, 8192, 3)


def test_infeasible_is_one_error_with_the_command_s_advice(capfd: pytest.CaptureFixture[str]) -> None:
    """The same line, with options as each is asked; and its figures, with which a plan comes out."""
    assert run(["compile", "train.py", "--bandwidth", "1MB/s", "--interval", "1"]) == EXIT_NO
    line = capfd.readouterr().err.splitlines()[-1]
    with pytest.raises(checkflow.InfeasibleError) as raised:
        checkflow.compile("train.py", bandwidth="1MB/s", interval=1)
    error = raised.value
    asked = re.sub(r"--(\w+) (\d+)\b(?!\.)", r"\1=\2", line)  # a number, and else a text
    asked = re.sub(r"--(\w+) ([^ ,]+)", r"\1='\2'", asked)
    assert asked == f"checkflow: {error}" and "what would do: --bandwidth" in line
    assert (error.reason, error.exit_code) == ("bandwidth", EXIT_NO)
    needed, longer = error.needed_bandwidth_bytes_per_s, error.smallest_interval
    assert needed is not None and longer is not None and longer > 1
    assert checkflow.compile("train.py", bandwidth=needed, interval=1).interval == 1
    assert checkflow.compile("train.py", bandwidth="1MB/s", interval=longer).interval == longer


def test_compiling_leaves_the_process_as_it_was() -> None:
    """A script that compiles and then trains draws the same numbers as one that does not compile."""

    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    alone = draws()
    seed()
    checkflow.compile(training)
    assert draws() == alone
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


@pytest.mark.parametrize("real", [False, True])
def test_a_training_that_goes_on_is_not_touched(real: bool) -> None:
    """Tracing would leave fake tensors in its optimizer, or train it: it is refused, a part of it too."""
    made = training()
    backbone, optimizer = made.models[0], made.optimizers[0]

    def around() -> checkflow.Training:
        model = nn.Sequential(backbone, nn.ReLU())
        return checkflow.Training(model, torch.optim.SGD(model.parameters()), made.iteration)

    def anew() -> checkflow.Training:
        model = nn.Linear(64, 64)
        return checkflow.Training(model, optimizer, made.iteration)

    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    for given, kind in ((lambda: made, "Linear"), (around, "Linear"), (anew, "SGD")):
        with pytest.raises(checkflow.InputError, match=f"returns a {kind} that was there before"):
            checkflow.compile(given, real=real)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    assert not optimizer.state


BAD: dict[str, tuple[dict[str, object], str]] = {
    "training": ({"model": training(), "arguments": {"bias": False}}, "arguments: a Training takes none"),
    "nothing": ({"model": None}, "model: is a NoneType; give the function"),
    "no such file": ({"model": "absent.py"}, "absent.py: no such file"),
    "no name": ({"model": ""}, r"model: is empty; give a file or a bundled model \(alexnet,"),
    "returns nothing": ({"model": lambda: None}, "its factory returned NoneType"),
    "argument": (
        {"arguments": {"size": 3}},
        r"arguments\['size'\]: training has no argument 'size'; it takes batch_size, bias",
    ),
    "type": ({"arguments": {"batch_size": "many"}}, "'many' is not of type int"),
    "object": ({"arguments": {"batch_size": [3]}}, "a list is no plain value; bind it to the factory"),
    "graph": ({"model": "graph.json", "real": True}, "graph.json: is a traced graph"),
    "device": ({"device": "abacus"}, "abacus"),
    "bandwidth": ({"bandwidth": "fast"}, "bandwidth: 'fast' is not a rate; write it like 63GB/s"),
    "negative": ({"bandwidth": -1}, "bandwidth: '-1' is not a rate"),
    "memory": ({"memory_limit": "4GB/s"}, "memory_limit: '4GB/s' is not a size"),
    "chunk": ({"chunk": 0}, "chunk: '0' is not positive"),
    "interval": ({"interval": 0}, "interval: 0 is neither a positive whole number nor 'auto'"),
    "slack": ({"slack": 1.0}, r"slack 1.0: is not in \[0, 1\)"),
    "formulation": ({"formulation": "guess"}, "formulation: 'guess' is not known; use paper, compact, direct"),
    "transfers": ({"transfers": "pigeon"}, "transfers: 'pigeon' is not known; use packed, streaming"),
    "paper": ({"formulation": "paper", "transfers": "streaming"}, "the paper formulation is packed"),
    "solver": ({"solver": "abacus"}, "solver: 'abacus' is not known; use auto, cbc, gurobi, highs"),
    "time": ({"time_limit_s": 0}, "time_limit_s: 0.0 is not positive"),
    "no time": ({"time_limit_s": float("nan")}, "time_limit_s: nan is no number"),
    "no use of a solver": (
        {"solver": "cbc"},
        "solver='cbc': streaming transfers need none; leave it out, or use transfers='packed'",
    ),
    "no factors": ({"factors": False}, "factors=False: policy checkflow sends no gradients"),
    "no limit": ({"relax_memory": True}, "relax_memory=True: there is no limit to raise; give memory_limit, too"),
    "lanes": ({"lanes": 3}, "lanes=3: policy checkflow has no lanes; use policy='rolling' or lowdiff"),
    "ranks": ({"rank": 1}, "rank=1: of how many is not said; give world_size, too"),
    "no choice": ({"mtbf": "3h"}, "mtbf, disk, lost_machines, .*: a choice needs them; give policy='auto', too"),
    "output": ({"output": "absent/s.json"}, "absent/s.json"),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(given: dict[str, object], message: str) -> None:
    """The argument as it is written here, what is wrong, what to do."""
    keywords = {"model": training} | given
    with pytest.raises(checkflow.InputError, match=message) as raised:
        checkflow.compile(**keywords)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value) and "--" not in str(raised.value)


def test_what_is_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
                                     "from test_frontend import training\n")  # fmt: skip
    script = (tmp_path / "net.py").read_bytes()
    for model in (tmp_path / "net.py", f"{tmp_path}/net.py:training"):
        with pytest.raises(checkflow.InputError, match=r"net\.py: is read, and would be overwritten"):
            checkflow.compile(model, output=tmp_path / "net.py")
    assert (tmp_path / "net.py").read_bytes() == script


def test_a_training_that_is_there_is_run_and_planned() -> None:
    """The plan is the factory's."""
    live = training()
    ran = checkflow.compile(live, device="rtx3090")
    ahead = checkflow.compile(training, device="rtx3090")
    assert ran.certificate == ahead.certificate
    assert ran.actions == ahead.actions


def test_the_working_directory_is_as_it_was(tmp_path: Path) -> None:
    """Whatever the function, or a Training's iteration, changes to: `output` lies where it was asked for."""
    (tmp_path / "elsewhere").mkdir()
    live = training()

    def moving() -> checkflow.Training:
        os.chdir("elsewhere")
        return training()

    def iteration() -> None:
        os.chdir(tmp_path / "elsewhere")
        live.iteration()

    for model in (moving, checkflow.Training(live.model, live.optimizer, iteration)):
        checkflow.compile(model, device="rtx3090", output="s.json")
        assert Path.cwd() == tmp_path
        (tmp_path / "s.json").unlink()
    assert not list((tmp_path / "elsewhere").iterdir())
