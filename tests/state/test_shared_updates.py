"""An update made again of a parameter that ranks share: of this rank's part, and kept as the optimizer keeps it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from checkflow.state.restore.files import FileTensor
from checkflow.state.restore.optimizers import OptimizerPlan
from checkflow.state.restore.replay import Replay, UpdatePlan
from checkflow.trace import World, in_place_of


def test_what_an_update_makes_anew_is_shared_as_its_parameter_is() -> None:
    """The parameter was saved before its first update, so that there was no momentum yet."""
    with in_place_of(World(2)):
        mesh = init_device_mesh("cpu", (2,))
        part = torch.ones(2, 3)
        parameter = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
        optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
        plan = OptimizerPlan(optimizer, ({},), {}, {})
        gradient = FileTensor(torch.float32, (2, 3), memoryview(bytearray(torch.full((2, 3), 2.0).numpy().tobytes())))
        values = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        update = UpdatePlan(optimizer, 0, (values,), {parameter: gradient}, {}, 1)
        Replay({parameter: 1}, {parameter: {optimizer: plan}}, (update,)).run()
        made = optimizer.state[parameter]["momentum_buffer"]
        assert isinstance(made, DTensor) and made.shape == parameter.shape == (4, 3)
        assert torch.equal(made.to_local(), torch.full((2, 3), 2.0))
        assert torch.equal(part, torch.zeros(2, 3)) and parameter.grad is None


class Own(torch.nn.Parameter):
    """A type that torch's optimizers do not know."""


@pytest.mark.parametrize(("kind", "chosen"), [("shared", "_multi_tensor_sgd"), ("own", "_single_tensor_sgd")])
def test_an_update_is_made_again_in_the_way_that_its_optimizer_chose(
    kind: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where foreach functions are a device's default, as on CUDA; other bits may come of the other way."""
    ways, sgd = list[str](), import_module("torch.optim.sgd")

    def noting(name: str) -> Callable[..., None]:
        way = getattr(sgd, name)

        def noted(*args: object, **kwargs: object) -> None:
            ways.append(name)
            way(*args, **kwargs)

        return noted

    for name in ("_single_tensor_sgd", "_multi_tensor_sgd"):
        monkeypatch.setattr(sgd, name, noting(name))
    monkeypatch.setattr(
        import_module("torch.optim.optimizer"), "_get_foreach_kernels_supported_devices", lambda: ["cpu"]
    )
    with in_place_of(World(2)):
        part, ones = torch.ones(2, 3), torch.ones(2, 3)
        if kind == "shared":
            shards = init_device_mesh("cpu", (2,)), [Shard(0)]
            parameter = torch.nn.Parameter(DTensor.from_local(part, *shards, run_check=False))
            parameter.grad = DTensor.from_local(ones, *shards, run_check=False)
        else:
            parameter = Own(part)
            parameter.grad = ones
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        optimizer.step()
        plan = OptimizerPlan(optimizer, ({},), {}, {})
        gradient = FileTensor(torch.float32, (2, 3), memoryview(bytearray(ones.numpy().tobytes())))
        values = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        update = UpdatePlan(optimizer, 0, (values,), {parameter: gradient}, {}, 1)
        Replay({parameter: 1}, {parameter: {optimizer: plan}}, (update,)).run()
    assert ways == [chosen, chosen]
    assert torch.equal(part, torch.zeros(2, 3))
