"""Bad input gets one line that names the file or argument and the fix, and exit code 2; never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from checkflow.cli import run
from checkflow.errors import EXIT_BAD_INPUT, EXIT_NO, InputError
from checkflow.sweep.traces import file_of

GOOD = """
import checkflow, torch
def training(batch_size: int = 2) -> checkflow.Training:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def iteration():
        model(torch.ones(batch_size, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkflow.Training(model, optimizer, iteration)
"""

PROFILE = """
name: mine
description: a profile
peak_flops_per_s: {float32: 1000000000, float16: 1000000000, bfloat16: 1000000000, float64: 1000000000}
memory_bandwidth_bytes_per_s: 1000000000
memory_bytes: 1000000000
launch_latency_ns: 1000
link_bandwidth_bytes_per_s: 1000000000
efficiency: {compute: 1.0, memory: 1.0, link: 1.0}
source: made up
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a good model, profile, graph and schedule."""
    monkeypatch.chdir(tmp_path)
    Path("good.py").write_text(GOOD)
    Path("mine.yaml").write_text(PROFILE)
    return tmp_path


Complaint = Callable[..., str]


@pytest.fixture
def complaint(capfd: pytest.CaptureFixture[str]) -> Complaint:
    """Run a command line that has to fail with one line, and return that line."""

    def check(*arguments: str, code: int = EXIT_BAD_INPUT) -> str:
        capfd.readouterr()
        assert run(list(arguments)) == code
        captured = capfd.readouterr()
        lines = [line for line in captured.err.splitlines() if not _is_progress(line)]
        assert captured.out == ""
        assert len(lines) == 1, captured.err
        assert "Traceback" not in lines[0] and "internal error" not in lines[0]
        return lines[0]

    return check


def _is_progress(line: str) -> bool:
    return line.split(": ")[1:2] != [] and line.split(": ", 1)[1].startswith(
        ("building", "iteration 1", "iteration 2", "planning", "moving", "verifying", "writing", "again", "measuring")
    )


MODELS = {
    "missing": (None, "no such file"),
    "empty": ("x = 1\n", "has no function 'training'"),
    "syntax": ("def training(:\n", "syntax error"),
    "raises": ("1 / 0\n", "ZeroDivisionError"),
    "exits": ("raise SystemExit(3)\n", "SystemExit"),
    "nulls": ("x = 1\0\n", "null bytes"),
    "not_callable": ("training = 3\n", "is not a function"),
    "factory_raises": ("def training():\n    raise KeyError('weights')\n", "KeyError"),
    "returns_none": ("def training():\n    pass\n", "returned NoneType"),
    "needs_argument": ("def training(depth: int):\n    pass\n", "give --set depth=VALUE"),
    "no_update": (GOOD.replace("        optimizer.step()\n", ""), "writes no parameter"),
    "iteration_raises": (GOOD.replace("optimizer.step()", "raise OSError('disk')"), "OSError"),
    "cuda": (GOOD.replace("Linear(4, 4)", "Linear(4, 4, device='cuda')"), "CUDA"),
    "not_a_module": (GOOD.replace("Training(model,", "Training(None,"), "model is NoneType"),
    "rankless": (
        GOOD.replace("(model, o", "(torch.nn.parallel.DistributedDataParallel(model), o"),
        "give --world-size",
    ),
    "not_to_step": (GOOD.replace("Training(model, optimizer,", "Training(model, 3,"), "optimizer is int"),
    "not_to_call": (GOOD.replace("optimizer, iteration)", "optimizer, 3)"), "iteration is int"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_that_is_wrong(name: str, complaint: Complaint) -> None:
    """Each kind of wrong model file is named, with what is wrong."""
    text, expected = MODELS[name]
    if text is not None:
        Path(f"{name}.py").write_text(text)
    line = complaint("compile", f"{name}.py")
    assert name in line
    assert expected.lower() in line.lower()
    assert not list(Path().glob("*.json"))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (".", ".: is no file, but a directory or a device; give a file or a bundled model (alexnet,"),
        ("/dev/null", "/dev/null: is no file, but a directory or a device; give a file"),
        ("cells.ipynb", "cells.ipynb: is a notebook; give its training() in a .py file"),
    ],
)
def test_what_is_no_model_file(model: str, expected: str, complaint: Complaint) -> None:
    """It is there, and something else."""
    Path("cells.ipynb").write_text('{"cells": []}')
    assert expected in complaint("compile", model)


LOOP = "cannot be read (Too many levels of symbolic links)"
LONG = "cannot be read (File name too long)"
NO_NAME = {
    "a link that leads to itself": (["compile", "loop"], LOOP),
    "one with a factory": (["trace", "loop:training"], LOOP),
    "one among a grid's": (["sweep", "loop", "--device", "h100", "--jobs", "1"], LOOP),
    "one of a device": (["compile", "alexnet", "--device", "loop"], LOOP),
    "a long name": (["compile", "n" * 256, "-o", "s.json"], LONG),
    "one of a device's": (["compile", "alexnet", "--device", "n" * 256], LONG),
}


@pytest.mark.parametrize("name", NO_NAME)
def test_what_cannot_be_looked_for_is_told(name: str, complaint: Complaint) -> None:
    """That no file has the name is not so."""
    Path("loop").symlink_to("loop")
    arguments, expected = NO_NAME[name]
    assert expected in complaint(*arguments)


def test_a_factory_of_a_file_with_a_long_name_is_found(complaint: Complaint) -> None:
    """With the factory's name it is longer than any file's."""
    file = "n" * 252 + ".py"
    Path(file).write_text("small = 3\n")
    assert "'small' is not a function" in complaint("compile", f"{file}:small", "-o", "s.json")
    assert file_of(f"{file}:small") == Path(file).resolve()


def test_a_directory_that_was_removed(tmp_path: Path, complaint: Complaint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's libraries say of it sends people to install torch anew."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert (
        complaint("compile", "alexnet") == "checkflow: the working directory was removed; change to one that is there"
    )


ARGUMENTS = {
    "device": (["--device", "rtx9999"], "rtx9999"),
    "bandwidth_word": (["--bandwidth", "fast"], "--bandwidth"),
    "bandwidth_negative": (["--bandwidth", "-3GB/s"], "--bandwidth"),
    "bandwidth_zero": (["--bandwidth", "0GB/s"], "--bandwidth"),
    "bandwidth_nan": (["--bandwidth", "nan"], "--bandwidth"),
    "bandwidth_unit": (["--bandwidth", "63 parsecs"], "--bandwidth"),
    "memory_limit": (["--memory-limit", "8GB/s"], "--memory-limit"),
    "chunk": (["--chunk", "0"], "--chunk"),
    "chunk_tiny": (["--chunk", "3"], "chunk"),
    "interval": (["--interval", "0"], "--interval"),
    "interval_word": (["--interval", "often"], "--interval"),
    "slack": (["--slack", "1"], "--slack"),
    "slack_negative": (["--slack", "-0.1"], "--slack"),
    "slack_nan": (["--slack", "nan"], "--slack"),
    "formulation": (["--formulation", "magic"], "--formulation"),
    "transfers": (["--formulation", "paper", "--transfers", "streaming"], "--transfers"),
    "solver": (["--solver", "abacus"], "--solver"),
    "policy": (["--policy", "checkfrq"], "--policy"),
    "policy_formulation": (["--policy", "checkfreq", "--formulation", "paper"], "--policy checkfreq"),
    "policy_transfers": (["--policy", "synchronous", "--transfers", "packed"], "--policy synchronous"),
    "policy_solver": (["--policy", "checkfreq_cpu", "--solver", "highs"], "--policy checkfreq_cpu"),
    "auto_alone": (["--policy", "auto"], "--mtbf"),
    "auto_never_up": (["--policy", "auto", "--mtbf", "0s"], "not positive"),
    "auto_time": (["--policy", "auto", "--mtbf", "often"], "--mtbf"),
    "auto_lost": (["--policy", "auto", "--mtbf", "3h", "--lost-machines", "1.5"], "1.5"),
    "auto_disk": (["--policy", "auto", "--mtbf", "3h", "--disk", "fast"], "--disk"),
    "auto_formulation": (["--policy", "auto", "--mtbf", "3h", "--formulation", "paper"], "--policy auto"),
    "mtbf_alone": (["--mtbf", "3h"], "--policy auto"),
    "ranks_none": (["--world-size", "0", "--device", "h100"], "--world-size 0"),
    "ranks_beyond": (["--world-size", "4", "--rank", "4", "--device", "h100"], "give one from 0 to 3"),
    "ranks_beyond_all": (["--world-size", "9" * 20, "--device", "h100"], "give one from 1 to 1048576"),
    "ranks_of_how_many": (["--rank", "1"], "give --world-size"),
    "ranks_word": (["--world-size", "all"], "--world-size"),
    "ranks_network": (["--world-size", "4", "--device", "rtx3090"], "has no network"),
    "ranks_measured": (["--world-size", "4", "--device", "measure"], "--device measure"),
    "time_limit": (["--time-limit", "0"], "--time-limit"),
    "unknown_argument": (["--set", "width=3"], "width"),
    "wrong_type": (["--batch-size", "many"], "batch_size"),
    "batch_zero": (["--batch-size", "0"], "batch_size"),
    "batch_float": (["--set", "batch_size=1.5"], "batch_size"),
    "no_equals": (["--set", "batch_size"], "NAME=VALUE"),
    "twice": (["--set", "batch_size=1", "--batch-size", "2"], "twice"),
    "unwritable": (["-o", "/proc/nowhere/schedule.json"], "/proc/nowhere/schedule.json"),
    "report_suffix": (["--report", "picture.bmp"], "picture.bmp"),
    "report_unwritable": (["--report", "/proc/nowhere/report.html"], "/proc/nowhere/report.html"),
    "trace_out_suffix": (["--trace-out", "trace.txt"], "trace.txt"),
    "bandwidth_huge": (["--bandwidth", "1e400"], "--bandwidth: '1e400' is out of range"),
    "bandwidth_digits": (["--bandwidth", "9" * 5000], "--bandwidth"),
    "bandwidth_other_digits": (["--bandwidth", "\u0665GB/s"], "--bandwidth"),
    "interval_digits": (["--interval", "9" * 5000], "--interval"),
    "interval_huge": (
        ["--interval", "1000000001"],
        "--interval 1000000001: is more than 1000000000; write it like 1, or auto",
    ),
    "interval_unplanned": (
        ["--interval", "65537"],
        "--interval 65537: is more than 65536, the longest that is planned",
    ),
    "interval_other_digits": (["--interval", "\u0665"], "--interval"),
    "solver_of_no_use": (["--solver", "cbc"], "--solver cbc: streaming transfers need none"),
    "factors_of_no_use": (["--policy", "checkfreq", "--no-factors"], "--no-factors: policy checkfreq sends no"),
    "factors_of_a_plan": (["--no-factors"], "--no-factors: policy checkflow sends no gradients"),
    "relaxed_nothing": (["--relax-memory"], "--relax-memory: there is no limit to raise; give --memory-limit"),
    "time_limit_nan": (["--time-limit", "nan"], "--time-limit nan"),
    "unknown_option": (["--colour"], "--colour"),
}


@pytest.mark.parametrize("command", [["compile", "good.py"], ["trace", "good.py"], ["profile"]])
@pytest.mark.parametrize(("output", "why"), [(".", "is a directory"), ("nowhere/file", "cannot be written")])
def test_an_output_that_cannot_be_written_is_told_before_any_work(
    command: list[str], output: str, why: str, complaint: Complaint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in ("compile.compile_model", "trace.traced", "profile.measure_profile"):
        monkeypatch.delattr(f"checkflow.cli.{work}")
    assert complaint(*command, "-o", output).startswith(f"checkflow: {output}: {why}")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_makes_no_sense(name: str, complaint: Complaint) -> None:
    """Each kind of wrong argument is named."""
    arguments, expected = ARGUMENTS[name]
    assert expected in complaint("compile", "good.py", *arguments)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("memory_bytes: 1000000000\n", ""), "memory_bytes"),
        (("launch_latency_ns: 1000", "launch_latency_ns: -5"), "launch_latency_ns"),
        (("name: mine", "name: [mine"), "mine.yaml"),
        (("source: made up", "source: made up\ncolour: red"), "colour"),
        (("link: 1.0", "link: 1.5"), "link"),
        (("link_bandwidth_bytes_per_s: 1", "link_bandwidth_bytes_per_s: 1" + "0" * 400), "link_bandwidth_bytes_per_s"),
        (("link_bandwidth_bytes_per_s: 1", "link_bandwidth_bytes_per_s: 1" + "0" * 5000), "mine.yaml"),
    ],
)
def test_a_profile_that_is_wrong(change: tuple[str, str], expected: str, complaint: Complaint) -> None:
    """A missing, negative or unknown field of a device profile is named."""
    Path("mine.yaml").write_text(PROFILE.replace(*change))
    line = complaint("compile", "good.py", "--device", "mine.yaml")
    assert "mine.yaml" in line and expected in line


def _made(kind: str) -> Path:
    graph, schedule = Path("good.graph.json"), Path("good.schedule.json")
    assert run(["trace", "good.py", "--device", "mine.yaml", "-o", str(graph)]) == 0
    assert (
        run(["compile", str(graph), "--bandwidth", "1GB/s", "--interval", "auto", "-o", str(schedule), "--json"]) == 0
    )
    return {"graph": graph, "schedule": schedule}[kind]


def _broken(text: str, how: str) -> str:
    document = json.loads(text)
    match how:
        case "truncated":
            return text[: len(text) // 2]
        case "not_json":
            return "hello"
        case "empty":
            return ""
        case "array":
            return "[]"
        case "version":
            return json.dumps(document | {"version": 99})
        case "unknown_field":
            return json.dumps(document | {"colour": "red"})
        case "missing_field":
            del document["model"]
        case "wrong_type":
            document["model"] = 7
        case "changed":
            document["device"] = "other"
    return json.dumps(document)


BROKEN = (
    "truncated",
    "not_json",
    "empty",
    "array",
    "version",
    "unknown_field",
    "missing_field",
    "wrong_type",
    "changed",
)


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("kind", ["graph", "schedule"])
def test_a_graph_or_schedule_that_is_damaged(kind: str, how: str, complaint: Complaint) -> None:
    """Truncated, not JSON, of a wrong version, with wrong fields or changed content: refused, file named."""
    path = _made(kind)
    path.write_text(_broken(path.read_text(), how))
    line = complaint("verify", "good.schedule.json", "good.graph.json")
    assert path.name in line


def test_a_graph_with_a_cycle(complaint: Complaint) -> None:
    """An operator that reads what only a later one makes is a cycle, and is named."""
    path = _made("graph")
    document = json.loads(path.read_text())
    born = {number: row["born"] for number, row in enumerate(document["tensors"]) if row.get("born", 0) > 1}
    number, step = next(iter(born.items()))
    document["ops"][0]["reads"] = [number]
    path.write_text(json.dumps(document))
    line = complaint("verify", "good.schedule.json", "good.graph.json")
    assert "cycle" in line, (line, step)


def test_a_schedule_of_another_graph(complaint: Complaint) -> None:
    """A schedule that was made for another graph fails verification, with exit code 1."""
    _made("schedule")
    assert run(["trace", "good.py", "--batch-size", "3", "--device", "mine.yaml", "-o", "other.json"]) == 0
    line = complaint("verify", "good.schedule.json", "other.json", code=EXIT_NO)
    assert "graph" in line and "good.schedule.json" in line and "other.json" in line and "compile that very" in line


def test_a_schedule_of_another_graph_is_told_what_differs(complaint: Complaint) -> None:
    """What a person can change, not the digest of all of it; and for whose times it is."""
    _made("schedule")
    assert run(["trace", "good.py", "--batch-size", "3", "--device", "mine.yaml", "-o", "other.json"]) == 0
    line = complaint("verify", "good.schedule.json", "other.json", code=EXIT_NO)
    assert "arguments: none there, batch_size=3 here" in line
    assert run(["trace", "good.py", "-o", "elsewhere.json"]) == 0
    line = complaint("verify", "good.schedule.json", "elsewhere.json", code=EXIT_NO)
    assert (
        "there, rtx3090 here; where a YAML file is the profile of 'mine', give it with --device; or trace with" in line
    )


def test_a_schedule_compiled_for_another_device_verifies_with_that_graph(capfd: pytest.CaptureFixture[str]) -> None:
    """`compile` takes the graph for any device, and so does `verify`; also one that was traced beside it."""
    _made("graph")
    assert run(["compile", "good.graph.json", "--device", "h100", "-o", "one.json"]) == 0
    assert run(["compile", "good.py", "--device", "v100s", "-o", "two.json"]) == 0
    capfd.readouterr()
    assert run(["verify", "one.json", "good.graph.json"]) == 0
    assert capfd.readouterr().out.startswith("one.json: verified, with times of h100; peak ")
    assert run(["verify", "two.json", "good.graph.json", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["verified"] is True
    assert run(["verify", "one.json", "good.graph.json", "--device", "v100s"]) == EXIT_NO
    assert "device: h100 there, v100s here; leave --device out" in capfd.readouterr().err


def test_a_schedule_compiled_with_a_profiles_file_verifies_with_that(
    complaint: Complaint, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says only the profile's name; another file of that name, or a device of another, is not what it is for."""
    assert run(["trace", "good.py", "-o", "good.json"]) == 0
    assert run(["compile", "good.json", "--device", "mine.yaml", "--interval", "auto", "-o", "mine.json"]) == 0
    capfd.readouterr()
    assert run(["verify", "mine.json", "good.json", "--device", "mine.yaml"]) == 0
    assert capfd.readouterr().out.startswith("mine.json: verified, with times of mine; peak ")
    for device in ([], ["--device", "h100"]):
        line = complaint("verify", "mine.json", "good.json", *device, code=EXIT_NO)
        assert "where a YAML file is the profile of 'mine', give it with --device" in line
    Path("mine.yaml").write_text(PROFILE.replace("launch_latency_ns: 1000", "launch_latency_ns: 2000"))
    line = complaint("verify", "mine.json", "good.json", "--device", "mine.yaml", code=EXIT_NO)
    assert "with times of mine: graph_fingerprint: " in line and "iteration_time_ns: " in line
    assert "none.yaml: cannot be read" in complaint("verify", "mine.json", "good.json", "--device", "none.yaml")


def test_a_verification_that_fails_is_an_object_too(capfd: pytest.CaptureFixture[str]) -> None:
    _made("schedule")
    assert run(["trace", "good.py", "--batch-size", "3", "--device", "mine.yaml", "-o", "other.json"]) == 0
    capfd.readouterr()
    assert run(["verify", "good.schedule.json", "other.json", "--json"]) == EXIT_NO
    said = json.loads(capfd.readouterr().out)
    assert said["verified"] is False and "another graph" in said["message"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mtbf", "0s"), "--mtbf 0s: is not positive; write it like 3h"),
        (("--mtbf", "1h", "--lost-machines", "1.5"), "--lost-machines 1.5: is not in [0, 1]"),
    ],
)
def test_a_figure_out_of_range_names_its_option(arguments: tuple[str, ...], says: str, complaint: Complaint) -> None:
    assert says in complaint("compile", "good.py", "--policy", "auto", *arguments)


def test_a_report_that_fails_says_that_the_schedule_is_there(
    complaint: Complaint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it went wrong is only known once it is written, as with a disk that fills."""

    def full(path: Path, _: object) -> None:
        raise InputError(f"{path}: cannot be written (No space left on device); choose another output")

    monkeypatch.setattr("checkflow.report.perfetto.write", full)
    line = complaint("compile", "good.py", "--device", "mine.yaml", "-o", "s.json", "--trace-out", "t.json")
    assert line.startswith("checkflow: t.json: cannot be written")
    assert line.endswith("; the schedule is written: s.json")
    assert Path("s.json").exists()


EMPTY = {  # where a word is, the variable is
    "STORE": ("check _", "list _", "export _ --to torch -o x.pt"),
    "SCHEDULE": ("verify _ g.json", "simulate _ --mtbf 1h"),
    "GRAPH": ("verify s.json _",),
    "FILE": ("inspect _",),
    "MODEL": ("compile _", "trace _", "sweep _"),
    "--device": ("compile good.py --device _", "trace good.py --device _", "verify s.json g.json --device _"),
    "--output": (
        "export store --to torch -o _", "compile good.py -o _", "trace good.py -o _", "inspect s.json -o _",
        "profile -o _", "sweep good.py -o _",
    ),
    "--failures": ("simulate s.json --failures _",),
    "--figure": ("simulate s.json --mtbf 1h --figure _",),
    "--report": ("compile good.py --report _",),
    "--trace-out": ("compile good.py --trace-out _",),
    "--journal": ("sweep good.py --journal _",),
}  # fmt: skip


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in EMPTY.items() for line in lines])
def test_a_variable_that_is_not_set_is_no_path(name: str, line: str, complaint: Complaint) -> None:
    """Nor the working directory, where there are other files than those that were meant."""
    words = ["" if word == "_" else word for word in line.split()]
    assert complaint(*words).startswith(f"checkflow: {name}: is empty; give a")


def test_a_missing_command_and_an_unknown_one(complaint: Complaint) -> None:
    """An unknown command is named."""
    assert "juggle" in complaint("juggle")
