"""The one walk over live tensors: what state_dict has is found, once for each name, where it is held."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkflow.errors import InputError, TraceError
from checkflow.state.live import live_state, parameters_of, walk
from checkflow.trace.state import state_of
from checkflow.training import Training


class Tied(nn.Module):
    """Two names of one parameter, a buffer that is state and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("built", torch.zeros(2), persistent=False)


def trained(*, several: bool = False, **settings: object) -> Training:
    """After one update; `several`: two models in one optimizer, and state that is listed."""
    torch.manual_seed(0)
    models = [Tied(), Tied()] if several else [Tied()]
    optimizer = torch.optim.Adam([p for model in models for p in model.parameters()], **settings)  # type: ignore[arg-type]
    for model in models:
        torch.autograd.backward(model.second(model.first(torch.ones(1, 3))).sum())
    optimizer.step()
    extra = {"ema": Tied(), "hidden": torch.ones(4), "batch": {"x": torch.ones(2)}} if several else {}
    return Training(models if several else models[0], optimizer, lambda: None, extra)


@pytest.mark.parametrize("several", [False, True])
def test_the_walk_finds_what_state_dict_has(several: bool) -> None:
    """Under state_dict's own keys, and, of an optimizer, by parameter and slot."""
    training = trained(several=several)
    expected = {
        f"{f'model.{index}' if several else 'model'}/{key}": value.data_ptr()
        for index, model in enumerate(training.models)
        for key, value in model.state_dict().items()
    }
    names = {id(parameter): name for name, parameter in parameters_of(training)}
    (optimizer,) = training.optimizers
    for parameter, slots in optimizer.state.items():
        name = names[id(parameter)]
        stem = name if several else name.removeprefix("model/")  # two models have each of these paths
        expected |= {f"optimizer/{stem}.{slot}": value.data_ptr() for slot, value in slots.items()}
    if several:
        ema = training.extra["ema"]
        assert isinstance(ema, nn.Module)
        expected |= {f"extra.ema/{key}": value.data_ptr() for key, value in ema.state_dict().items()}
        hidden = training.extra["hidden"]
        assert isinstance(hidden, torch.Tensor)
        expected["extra.hidden/tensor"] = hidden.data_ptr()
    found = list(walk(training))
    assert len(found) == len(expected)
    assert {live.name: live.tensor.data_ptr() for live in found} == expected
    assert not any(live.moved for live in found)


@pytest.mark.parametrize("several", [False, True])
def test_graphs_have_the_walks_tensors_and_those_of_dicts(several: bool) -> None:
    training = trained(several=several)
    more = ["extra.batch/x"] if several else []
    assert [state.name for state in state_of(training, "m")] == [live.name for live in walk(training)] + more


def test_a_group_s_tensor_is_found_under_its_key() -> None:
    training = trained(lr=torch.tensor(0.1))
    assert "optimizer/param_groups.0.lr" in {live.name for live in walk(training)}


def test_a_tensor_that_was_replaced_is_known_to_have_moved() -> None:
    training = trained()
    (kept,) = [live for live in walk(training) if live.name == "model/kept"]
    training.models[0].kept = torch.ones(2)
    assert kept.moved


@pytest.mark.parametrize(("fused", "anywhere"), [(False, True), (True, False)])
def test_steps_on_the_cpu_are_the_hosts(fused: bool, anywhere: bool) -> None:
    """A kernel that reads them on CUDA has them there, so that a schedule may have them."""
    for live in walk(trained(fused=fused)):
        is_step = live.name.endswith(".step")
        assert live.is_host_scalar == is_step
        assert live.is_host_scalar_anywhere == (is_step and anywhere)


def test_an_optimizer_from_before_its_model_was_divided_is_told_so() -> None:
    """Its parameters belonged to the model: to give the module too would be of no use."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(
            InputError,
            match=r"^optimizer updates parameter 0 of group 0, shape \(2, 3\), which its model had before it was "
            r"divided \(fully_shard, parallelize_module\); divide the model, then make the optimizer and attach$",
        ):
            live_state(Training(model, optimizer, lambda: None))
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)
        with pytest.raises(InputError, match=r"shape \(4,\), which belongs to no model; give its module too"):
            live_state(Training(model, optimizer, lambda: None))
    finally:
        torch.distributed.destroy_process_group()


def test_one_refusal_serves_tracing_and_attaching() -> None:
    """State that no model leads to, and state without a slot's name."""
    training = trained()
    (optimizer,) = training.optimizers
    bias = training.models[0].get_parameter("first.bias")
    optimizer.state[bias] = [torch.ones(3)]
    with pytest.raises(InputError, match=r"^optimizer/first\.bias: its state is a list; keep it in a dict, by name"):
        live_state(training)
    optimizer.state[bias] = torch.ones(3)
    with pytest.raises(InputError, match=r"^optimizer/first\.bias: its state is a bare tensor"):
        live_state(training)
    with pytest.raises(TraceError, match=r"^m: optimizer/first\.bias: its state is a bare tensor"):
        state_of(training, "m")
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    del optimizer.state[bias]
    with pytest.raises(
        InputError, match=r"^optimizer updates parameter 0 of group 1, shape \(4,\), which belongs to no"
    ):
        live_state(training)
