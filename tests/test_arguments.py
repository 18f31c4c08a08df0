"""Whatever is wrong with an argument is one line that names it, and nothing is done."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import checkflow
from checkflow.cli import run
from checkflow.errors import EXIT_BAD_INPUT


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"x"


WRONG: dict[str, object] = {
    "object()": object(), "text": "zz", "1.5": 1.5, "-1": -1, "0": 0, "2.0": 2.0, "bytes": b"x", "[]": [], "{}": {},
    "nan": float("nan"), "inf": float("inf"), "10**400": 10**400, "10**5000": 10**5000, "-10**400": -(10**400),
    "True": True, "None": None, "class": int, "a zero byte": "a\0b", "nothing": "", "home": "~/x",
    "a path of bytes": BytesPath(), "complex": 1j, "False as text": "False", "pairs": [("batch_size", 4)],
    "numpy's": np.True_, "tensor": torch.ones(2),
}  # fmt: skip


def training() -> checkflow.Training:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def iteration() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


class Reached(BaseException):
    """The work would have begun: the arguments were taken."""


def work(*_: object, **__: object) -> None:
    raise Reached


def attached() -> dict[str, Any]:
    made = training()
    return {"model": made.model, "optimizer": made.optimizer, "store": "store"}


def empty() -> dict[str, Any]:
    return {}


# What users make or call: what is given beside the wrong argument, and what begins the work, once all were looked at.
CALLED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "attach": (attached, "checkflow.checkpointing.attach.Inside"),
    "compile": (lambda: {"model": training}, "checkflow.frontend.compile_model"),
    "PersistEvery": (empty, ""),
    "ResumableLoader": (lambda: {"dataset": [1, 2, 3], "batch_size": 2}, ""),
    "Retention": (empty, ""),
    "StoreReader": (lambda: {"store": "store"}, ""),
    "StoreWriter": (lambda: {"store": "store"}, ""),
}
APART = {"Training", "Variables", "Checkpointer"}  # below
READ = {"Schedule", "Stateful", "Stats", "Status", "Event", "__version__"}  # nobody calls them

TEXTS = {"text", "False as text"}
CONTAINERS = {"[]", "{}", "pairs"}
SIZES = {"None", "1.5", "2.0"}
# Which of the values above are right. A parameter that is not here takes none of them.
RIGHT: dict[str, set[str]] = {
    "attach.optimizer": {"[]", "{}"},
    "attach.store": TEXTS,
    "attach.config": {
        "10**400",
        "-10**400",
        "a zero byte",
        *TEXTS,
        "1.5",
        "-1",
        "0",
        "2.0",
        "[]",
        "{}",
        "True",
        "None",
        "pairs",
        "nothing",
        "home",
    },
    "attach.dataset": {*TEXTS, "a zero byte", "None", "nothing", "home"},
    "attach.metadata": {"None", "{}"},
    "attach.extra": {"None", "{}"},
    "attach.generators": {"None", "{}"},
    "attach.retry_s": {"0", "1.5", "2.0", "inf"},
    "attach.sigterm_deadline_s": {"0", "1.5", "2.0", "None"},
    "attach.peers_deadline_s": {"1.5", "2.0"},
    "attach.slots": {"-1", "0"},  # refused with a StoreError, where they are made
    "attach.replicate": {"0"},
    "attach.start_over": {"True"},
    "attach.audit": {"True"},
    "attach.notify": {"class"},
    "attach.tell": {"class"},
    "compile.model": set(WRONG),  # what begins the work reads it
    "compile.arguments": {"{}", "None"},
    "compile.device": {*TEXTS, "None"},
    "compile.real": {"True"},
    "compile.factors": {"True"},
    "compile.world_size": {"2.0", "None"},
    "compile.bandwidth": SIZES,
    "compile.memory_limit": SIZES,
    "compile.chunk": SIZES,
    "compile.slack": {"0"},
    "compile.time_limit_s": {"1.5", "2.0", "inf"},
    "compile.output": {*TEXTS, "None"},
    "compile.progress": {"class"},
    "PersistEvery.iterations": {"2.0", "None"},
    "PersistEvery.seconds": {"0", "1.5", "2.0", "inf", "None"},
    "ResumableLoader.dataset": {*TEXTS, *CONTAINERS, "bytes", "a zero byte", "nothing", "home", "tensor"},
    "ResumableLoader.batch_size": {"2.0"},
    "ResumableLoader.shuffle": {"True"},
    "ResumableLoader.seed": {"0", "2.0"},
    "ResumableLoader.drop_last": {"True"},
    "ResumableLoader.batch_sampler": {*CONTAINERS, "None"},
    "ResumableLoader.num_workers": {"0", "2.0"},
    "ResumableLoader.collate_fn": {"class", "None"},
    "ResumableLoader.pin_memory": {"True"},
    "ResumableLoader.timeout": {"0"},  # of workers, and there are none
    "ResumableLoader.worker_init_fn": {"class", "None"},
    "ResumableLoader.multiprocessing_context": {"None"},
    "ResumableLoader.prefetch_factor": {"None"},
    "Retention.last": {"2.0"},
    "Retention.every": {"2.0", "None"},
    "StoreReader.store": TEXTS,
    "StoreReader.iteration": {"0", "None"},
    "StoreWriter.store": TEXTS,
    "StoreWriter.iteration": {"0", "None"},
}
for name in ("bucket", "schedule", "scheduler", "scaler", "loader", "policy", "interval", "overhead", "on_event"):
    RIGHT[f"attach.{name}"] = {"None"}
for name in ("scheduler", "scaler", "loader"):
    RIGHT[f"attach.{name}"] |= {"[]"}
RIGHT["attach.on_event"] |= {"class"}
for name in ("rank", "lanes", "mtbf", "disk", "lost_machines", "host_memory", "transfers"):
    RIGHT[f"compile.{name}"] = {"None"}
PARAMETERS = [
    f"{name}.{parameter}" for name in CALLED for parameter in inspect.signature(getattr(checkflow, name)).parameters
]


def taken(call: Callable[[object], object]) -> set[str]:
    """By name, the values that a call does not refuse. Any other error than checkflow's own is raised."""
    found = set[str]()
    for name, value in WRONG.items():
        try:
            call(value)
        except Reached:
            found.add(name)
        except checkflow.CheckflowError as error:
            assert str(error) and "\n" not in str(error)
        else:
            found.add(name)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_name_that_can_be_called_is_here() -> None:
    errors = {name for name in checkflow.__all__ if name.endswith("Error")}
    public = {name: getattr(checkflow, name) for name in set(checkflow.__all__) - errors - READ}
    events = {n for n, each in public.items() if isinstance(each, type) and issubclass(each, checkflow.Event)}
    assert set(public) - events == set(CALLED) | APART


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_what_is_wrong_is_refused(parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, argument = parameter.partition(".")
    given, begins = CALLED[name]
    if begins:
        monkeypatch.setattr(begins, work)
    assert taken(lambda value: getattr(checkflow, name)(**given() | {argument: value})) == RIGHT.get(parameter, set())
    assert not list(Path().iterdir())


def test_a_training_is_looked_at_where_it_is_used() -> None:
    made = training()
    right = {"model": set(), "optimizer": set(), "iteration": set(), "extra": {"{}"}}
    for argument, expected in right.items():
        given = {"model": made.model, "optimizer": made.optimizer, "iteration": made.iteration}
        call = lambda value, argument=argument, given=given: checkflow.compile(  # noqa: E731
            checkflow.Training(**given | {argument: value}), device="h100"
        )
        assert taken(call) == expected, argument


def test_variables_are_of_a_namespace_and_have_names() -> None:
    assert not taken(lambda value: checkflow.Variables(value, "held"))  # type: ignore[arg-type]
    assert not taken(lambda value: checkflow.Variables({"held": 1}, value))  # type: ignore[arg-type]


def test_what_is_attached_refuses_it_too() -> None:
    """And goes on: nothing was done."""
    made = training()
    with checkflow.attach(made.model, made.optimizer, store="store", tell=lambda _: None) as ckpt:
        made.iteration()
        ckpt.step()
        assert taken(lambda value: ckpt.restore(value)) == {"None"}  # type: ignore[arg-type]
        assert taken(lambda value: ckpt.save(keep=value)) == {"True"}  # type: ignore[arg-type]
        before = ckpt.stats()
        for loss in (object(), "zz", b"x", [], 10**400, -(10**5000), 1j, torch.ones(2), torch.ones(1, device="meta")):
            with pytest.raises(
                checkflow.InputError, match=r"^step: loss is .*; give a number or a tensor of one element"
            ):
                ckpt.step(loss=loss)  # type: ignore[arg-type]
        assert ckpt.stats() == before


@pytest.mark.parametrize("argument", ["start_over", "audit", "approximate"])
def test_no_text_is_a_flag(argument: str) -> None:
    """ "False" is true."""
    expected = f"^{argument}: 'False' is of type str; give True or False$"
    with pytest.raises(checkflow.InputError, match=expected):
        checkflow.attach(**attached() | {argument: "False"})


def test_home_is_the_shell_s(capfd: pytest.CaptureFixture[str]) -> None:
    """No directory of that name is made, from Python or a command line; and one that is there can be named."""
    said = "~/x: only a shell knows ~; give the whole path, or ./~/x for what is called so"
    for call in (
        lambda: checkflow.attach(**attached() | {"store": "~/x"}),
        lambda: checkflow.StoreWriter("~/x"),
    ):
        with pytest.raises(checkflow.InputError, match=f"^store: {said}$"):
            call()
    with pytest.raises(checkflow.InputError, match=r"bucket: file://~/x names no directory"):
        checkflow.attach(**attached() | {"bucket": "file://~/x"})
    assert run(["compile", "alexnet", "-o", "~/x"]) == EXIT_BAD_INPUT
    assert capfd.readouterr().err == f"checkflow: --output: {said}\n"
    assert not list(Path().iterdir())
    assert checkflow.StoreWriter("./~/x").checkpoint_id == Path.cwd() / "~/x"


def test_a_relative_store_stays_where_it_was(tmp_path: Path) -> None:
    """Whoever changes the working directory between making a reader or a writer and its use."""
    writer, reader = checkflow.StoreWriter("store"), checkflow.StoreReader("store")
    os.chdir("/")
    assert writer.checkpoint_id == reader.checkpoint_id == tmp_path / "store"
