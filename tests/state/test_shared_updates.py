"""An update made again of a parameter that ranks share: of this rank's part, and kept as the optimizer keeps it."""

from __future__ import annotations

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
        Replay({parameter: 1}, {1: {optimizer: plan}}, (update,)).run()
        made = optimizer.state[parameter]["momentum_buffer"]
        assert isinstance(made, DTensor) and made.shape == parameter.shape == (4, 3)
        assert torch.equal(made.to_local(), torch.full((2, 3), 2.0))
        assert torch.equal(part, torch.zeros(2, 3)) and parameter.grad is None
