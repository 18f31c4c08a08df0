"""Parts of a model in wrappers that leave themselves out of state_dict: checkpoints have the names that it has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.checkpoint.state_dict_loader import load

import checkflow
from checkflow.checkpointing.earlier import of_now
from checkflow.cli import run as command
from checkflow.state.host import modes
from checkflow.state.live import walk
from checkflow.state.names import in_state_dict
from checkflow.training import Training

DONE, LENGTH = 3, 6
IN_FILES = "_checkpoint_wrapped_module"  # of a name, as earlier versions wrote it
READS_NAMES = (
    "checkflow.state.live", "checkflow.state.holders", "checkflow.runtime.hook", "checkflow.checkpointing.earlier",
    "checkflow.state.host.earlier", "checkflow.state.restore.files",
)  # fmt: skip

Wrap = Callable[[nn.Module], nn.Module]


class Counts(nn.Linear):
    """A layer with extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def get_extra_state(self) -> object:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Run:
    """A block with buffers and extra state, wrapped or not; to compute it twice writes nothing else."""

    def __init__(self, *, wrapped: bool, fresh: int = 0) -> None:
        torch.manual_seed(fresh)
        block = nn.Sequential(Counts(), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()))
        self.model = nn.Sequential(block, nn.Tanh(), nn.Linear(4, 2))
        if wrapped:
            block[2] = checkpoint_wrapper(block[2])
            self.model[0] = checkpoint_wrapper(block)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        counts = block[0]
        assert isinstance(counts, Counts)
        self.counts: Counts = counts

    def iterate(self) -> None:
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def training(self) -> Training:
        return Training(self.model, self.optimizer, self.iterate)

    def train(self, store: Path, until: int, schedule: checkflow.Schedule | None = None) -> int:
        """Which iteration it went on from."""
        with checkflow.attach(
            self.model, self.optimizer, store=store, schedule=schedule, notify=lambda _: None, tell=lambda _: None
        ) as ckpt:
            begun = ckpt.restore()
            for _ in range(begun, until):
                self.counts.calls += 1
                self.iterate()
                ckpt.step()
        return begun

    def state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """As Python's numbers, which have each bit."""
        moments = [{key: value.tolist() for key, value in each.items()} for each in self.optimizer.state.values()]
        tensors = {
            key: getattr(value, "tolist", lambda value=value: value)() for key, value in self.model.state_dict().items()
        }
        return tensors, moments


def newest(store: Path, file: str) -> dict[str, torch.Tensor]:
    return load_file(max(store.glob("*-iteration-*")) / file)


def as_earlier(patch: pytest.MonkeyPatch) -> None:
    """Names are written as they were before wrappers left themselves out of them."""
    for module in READS_NAMES:
        patch.setattr(f"{module}.in_state_dict", str)


@pytest.mark.parametrize(
    "wrap",
    [checkpoint_wrapper, offload_wrapper, lambda part: checkpoint_wrapper(checkpoint_wrapper(part))],
    ids=["checkpoint", "offload", "twice"],
)
@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the whole model"])
def test_names_are_those_of_state_dict(wrap: Wrap, whole: bool) -> None:
    model: nn.Module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    if whole:
        model = wrap(model)
    else:
        model[0] = wrap(model[0])  # type: ignore[index, operator]
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    training = Training(model, optimizer, lambda: None)
    names = {str(live.name) for live in walk(training)}
    weights = {f"optimizer/{path}.momentum_buffer" for path in ("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias")}
    assert names == {f"model/{key}" for key in model.state_dict()} | weights
    assert set(modes.modes_of(training)) == {"model", "model/0", "model/0.0", "model/0.1"}


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped, then plain", "plain, then wrapped"])
def test_a_training_goes_on_with_its_parts_wrapped_otherwise(wrapped: bool, tmp_path: Path) -> None:
    """To the bit, from the random numbers on."""
    whole = Run(wrapped=wrapped)
    whole.train(tmp_path / "whole", LENGTH)
    Run(wrapped=wrapped).train(tmp_path / "store", DONE)
    other = Run(wrapped=not wrapped, fresh=1)
    assert other.train(tmp_path / "store", LENGTH) == DONE
    assert other.state() == whole.state()
    assert other.counts.calls == LENGTH


def test_other_tools_find_what_state_dict_has(tmp_path: Path) -> None:
    made = Run(wrapped=True)
    made.train(tmp_path / "store", DONE)
    assert command(["export", str(tmp_path / "store"), "--to", "torch", "-o", str(tmp_path / "out.pt")]) == 0
    exported = torch.load(tmp_path / "out.pt", weights_only=True)
    assert "0.0.weight.exp_avg" in exported["optimizer"]
    for wrapped in (True, False):
        model = Run(wrapped=wrapped, fresh=1).model
        extra = {key: value for key, value in model.state_dict().items() if key.endswith("_extra_state")}
        model.load_state_dict(exported["model"] | extra)
        state = {
            key: value for key, value in Run(wrapped=wrapped, fresh=2).model.state_dict().items() if key not in extra
        }
        with warnings.catch_warnings(action="ignore"):  # that one process is no group
            load({"model": state}, storage_reader=checkflow.StoreReader(tmp_path / "store"))
        for key, tensor in made.model.state_dict().items():
            assert key in extra or (torch.equal(state[key], tensor) and torch.equal(model.state_dict()[key], tensor))


@pytest.mark.parametrize("wrapped", [True, False])
def test_checkpoints_with_the_names_of_wrappers_are_restored(wrapped: bool, tmp_path: Path) -> None:
    whole = Run(wrapped=True)
    whole.train(tmp_path / "whole", LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        as_earlier(patch)
        Run(wrapped=True).train(tmp_path / "store", DONE)
    assert f"0.{IN_FILES}.0.weight" in newest(tmp_path / "store", "model.safetensors")
    assert f"0.{IN_FILES}.2.{IN_FILES}.0.weight.exp_avg" in newest(tmp_path / "store", "optimizer.safetensors")
    state = {"0.0.weight": torch.zeros(4, 4)}
    with warnings.catch_warnings(action="ignore"):
        load({"model": state}, storage_reader=checkflow.StoreReader(tmp_path / "store"))
    assert torch.equal(state["0.0.weight"], newest(tmp_path / "store", "model.safetensors")[f"0.{IN_FILES}.0.weight"])
    other = Run(wrapped=wrapped, fresh=1)
    assert other.train(tmp_path / "store", LENGTH) == DONE
    assert other.state() == whole.state()
    assert other.counts.calls == LENGTH
    assert not any(IN_FILES in name for name in newest(tmp_path / "store", "model.safetensors"))


@pytest.mark.parametrize("policy", [None, "rolling"])
def test_schedules_with_the_names_of_wrappers_are_attached(policy: str | None, tmp_path: Path) -> None:
    """With "rolling", checkpoints are in parts: gradients have names, too. So have the checkpoints' records."""
    options: dict[str, Any] = {} if policy is None else {"policy": policy}
    made = []
    for earlier in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if earlier:
                as_earlier(patch)
            made.append(
                checkflow.compile(
                    lambda: Run(wrapped=True).training(),
                    device="h100",
                    bandwidth="10MB/s" if policy is None else "3MB/s",
                    interval=1,
                    **options,
                )
            )
    old, new = made
    assert any(IN_FILES in view.name for row in old.state for view in row.views)
    assert any(IN_FILES in row.parameter.name for row in old.gradients) == (policy is not None)
    now = of_now(old, Run(wrapped=True).training())
    assert (now.state, now.gradients, now.anchors) == (new.state, new.gradients, new.anchors)
    whole = Run(wrapped=True)
    whole.train(tmp_path / "whole", LENGTH)
    with pytest.MonkeyPatch.context() as patch:
        as_earlier(patch)
        Run(wrapped=True).train(tmp_path / "store", DONE, old)
    run = Run(wrapped=True, fresh=1)
    assert run.train(tmp_path / "store", LENGTH - 1, old) == DONE
    run = Run(wrapped=True, fresh=2)
    assert run.train(tmp_path / "store", LENGTH, new) == LENGTH - 1
    assert run.state() == whole.state()


def test_what_a_user_or_an_optimizer_calls_so_keeps_its_name(tmp_path: Path) -> None:
    """Keys of a listed dict and of an optimizer's own state are no paths of state_dict."""
    for begins in (0, 1):
        run = Run(wrapped=True, fresh=begins)
        given = {name: torch.full((2,), 1.0 - begins) for name, _ in run.model.named_parameters()}
        assert any(IN_FILES in name for name in given)
        own = {name: torch.full((2,), 2.0 - begins) for name in given}
        run.optimizer.state["averages"] = own  # type: ignore[index]
        with checkflow.attach(
            run.model, run.optimizer, store=tmp_path, extra={"given": given}, tell=lambda _: None
        ) as ckpt:
            assert ckpt.restore() == begins
            assert {each.mean().item() for each in given.values()} == {1.0}
            kept = run.optimizer.state["averages"]  # type: ignore[index]
            assert {name: each.mean().item() for name, each in kept.items()} == dict.fromkeys(given, 2.0)
            run.optimizer.state.pop("averages")  # type: ignore[call-overload]
            if not begins:
                run.optimizer.state["averages"] = own  # type: ignore[index]
                run.iterate()
                ckpt.step()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    part = nn.Linear(2, 2)
    model = nn.Sequential(checkpoint_wrapper(part))
    model[0].register_buffer("late", torch.ones(1))
    part.register_buffer("late", torch.ones(2))
    with pytest.raises(checkflow.InputError, match=r"^model/0\.late: two tensors of this training have that name"):
        checkflow.attach(model, torch.optim.SGD(model.parameters()), store=tmp_path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"0.{IN_FILES}.weight", "0.weight"),
        (f"{IN_FILES}.{IN_FILES}.weight", "weight"),
        (f"model.1/0.{IN_FILES}", "model.1/0"),
        (f"model/{IN_FILES}", "model"),
        (IN_FILES, ""),
        (f"optimizer/model.1/{IN_FILES}.weight.exp_avg", "optimizer/model.1/weight.exp_avg"),
        (f"0.my{IN_FILES}.weight", f"0.my{IN_FILES}.weight"),
        (f"0.{IN_FILES}s.weight", f"0.{IN_FILES}s.weight"),
        (f"optimizer/.state.0.{IN_FILES}.weight", f"optimizer/.state.0.{IN_FILES}.weight"),
    ],
)
def test_a_wrapper_is_a_whole_part_of_a_path(path: str, expected: str) -> None:
    assert in_state_dict(path) == expected
