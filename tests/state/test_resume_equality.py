"""A resumed run ends as one that was never interrupted, bit for bit."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from resume_memory import Saved, host_state, load, save
from torch import nn
from trainings_to_resume import TRAININGS, Make, Run, adamw, channels_last, simple

from checkflow.state.live import live_state
from checkflow.state.restore import Restored

LENGTH = 7


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bytes]:
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), data


def final(run: Run) -> dict[str, object]:
    """Everything a run leaves: every tensor's bits, hyperparameters, objects' states, and the next random numbers."""
    found: dict[str, object] = {live.name: bits(live.tensor) for live in live_state(run.training)}
    for number, optimizer in enumerate(run.training.optimizers):
        found[f"groups {number}"] = repr(optimizer.state_dict()["param_groups"])
        found[f"state {number}"] = repr(optimizer.state_dict()["state"])
    for model in run.training.models:
        for path, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                found[path] = module.get_extra_state()
    found |= {name: repr(member.state_dict()) for name, member in run.objects.objects.items()}
    found |= {name: bits(generator.get_state()) for name, generator in run.objects.generators.items()}
    found["random"] = (random.random(), np.random.random(), np.random.standard_normal(), torch.rand(()).item())
    found["seen"] = [bits(value) for value in run.seen[-2:]]
    return found


def advance(run: Run, iterations: int) -> None:
    for _ in range(iterations):
        next(run.steps)


def resumed(make: Make, at: int) -> tuple[Run, Restored]:
    """Run to iteration `at`, checkpoint, let another life begin from other numbers, and restore there."""
    seed(1)
    run = make()
    advance(run, at)
    saved = save(run.training, run.objects, at)
    advance(run, 1)  # the old run goes on: what was saved must not change with it
    seed(2)
    other = make()
    return other, load(saved, other.training, other.objects)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_resumed_run_ends_as_one_never_interrupted(name: str, at: int) -> None:
    """New objects from other seeds, restored, end with the same bits; also before the optimizer has any state."""
    make = TRAININGS[name]
    seed(1)
    whole = make()
    advance(whole, LENGTH)
    expected = final(whole)
    other, restored = resumed(make, at)
    assert restored.iteration == at
    advance(other, LENGTH - at)
    assert final(other) == expected


@pytest.mark.parametrize("name", ["adamw foreach", "tied", "scheduler onecycle", "several", "scaler", "counted"])
def test_a_run_can_be_taken_back(name: str) -> None:
    """Restoring into a training that has run already changes its tensors in place and its state back."""
    make = TRAININGS[name]
    seed(1)
    run = make()
    advance(run, 2)
    saved = save(run.training, run.objects, 2)
    advance(run, 3)
    expected = final(run)
    before = {live.name: live.tensor.data_ptr() for live in live_state(run.training)}
    load(saved, run.training, run.objects)
    assert {live.name: live.tensor.data_ptr() for live in live_state(run.training)} == before
    advance(run, 3)
    assert final(run) == expected


def test_gradients_are_there_again_as_zeros_in_the_memory_that_they_have() -> None:
    """Of a record that does not say which there were, they stay as they are."""
    run = TRAININGS["in turns, zeroed last"]()
    layers = run.training.models[0]
    advance(run, 1)
    saved = save(run.training, run.objects, 1)
    before = {name: None if p.grad is None else p.grad.data_ptr() for name, p in layers.named_parameters()}
    advance(run, 3)
    expected = final(run)
    for parameter in layers.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(1.0)
    record = json.loads(saved.record)
    assert record.pop("gradients") == [f"model/{name}" for name, at in before.items() if at is not None]
    older = Saved(
        {name: memoryview(bytearray(data)) for name, data in saved.files.items()}, json.dumps(record).encode()
    )
    load(older, run.training, run.objects)
    assert [p.grad is not None and bool(p.grad.all()) for p in layers.parameters()] == [True] * 8
    load(saved, run.training, run.objects)
    after = {name: None if p.grad is None else p.grad.data_ptr() for name, p in layers.named_parameters()}
    assert after == before and not any(p.grad is not None and p.grad.any() for p in layers.parameters())
    advance(run, 3)
    assert final(run) == expected


def test_a_new_optimizer_gets_no_state_that_was_not_there() -> None:
    """Taken back to before the first update, an optimizer has no state at all."""
    run = TRAININGS["adamw foreach"]()
    saved = save(run.training, run.objects, 0)
    advance(run, 1)
    load(saved, run.training, run.objects)
    assert len(run.training.optimizers[0].state) == 0


def test_state_that_did_not_exist_is_what_was_read() -> None:
    """Not a copy of it, which would need as much memory again; what existed stays where it is."""
    run = TRAININGS["adamw foreach"]()
    advance(run, 1)
    saved = save(run.training, run.objects, 1)
    read = torch.frombuffer(saved.files["optimizer.safetensors"], dtype=torch.uint8)
    span = range(read.data_ptr(), read.data_ptr() + read.numel())
    before = addresses(run)
    load(saved, run.training, run.objects)
    assert addresses(run) == before
    other = TRAININGS["adamw foreach"]()
    load(saved, other.training, other.objects)
    assert before.keys() == addresses(other).keys() and all(at in span for at in addresses(other).values())


def test_one_tensor_that_lies_otherwise_has_all_state_copied() -> None:
    """Else the others would keep the bytes of all of it in memory."""
    run = simple(adamw(), model=channels_last)
    advance(run, 1)
    saved = save(run.training, run.objects, 1)
    read = torch.frombuffer(saved.files["optimizer.safetensors"], dtype=torch.uint8)
    span = range(read.data_ptr(), read.data_ptr() + read.numel())
    other = simple(adamw(), model=channels_last)
    load(saved, other.training, other.objects)
    assert not any(at in span for at in addresses(other).values())


def test_a_step_that_changes_its_dtype_in_place_is_saved_as_it_is() -> None:
    """The object is the same, and what was known of it is not."""
    run = TRAININGS["adamw foreach"]()
    advance(run, 1)
    state = host_state(run.training, run.objects)
    state.capture(1).record()
    for values in run.training.optimizers[0].state.values():
        values["step"].data = values["step"].data.double() + 4
    saved = Saved(save(run.training, run.objects, 1).files, state.capture(1).record())
    other = TRAININGS["adamw foreach"]()
    load(saved, other.training, other.objects)
    for values in other.training.optimizers[0].state.values():
        assert (values["step"].dtype, values["step"].item()) == (torch.float64, 5)


def addresses(run: Run) -> dict[tuple[int, str], int]:
    """Of the first optimizer's averages."""
    optimizer = run.training.optimizers[0]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        (number, slot): value.data_ptr()
        for number, parameter in enumerate(parameters)
        for slot, value in optimizer.state[parameter].items()
        if slot != "step"
    }
