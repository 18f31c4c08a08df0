"""What is asked for its state may not have tensors that ranks share: that is said when it is attached, or comes up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import checkflow
from checkflow.errors import InputError

LINE = (
    r"^extra\.ema/weight: ranks share it \(DTensor\), which is not supported in .*; list a module .* \(to_local\(\)\)$"
)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[torch.Tensor]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)
    dist.destroy_process_group()


class Averaged:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def state_dict(self) -> dict[str, object]:
        return {"weight": self.weight}

    def load_state_dict(self, state_dict: dict[str, object]) -> None: ...


@pytest.mark.parametrize("kind", ["dict", "object", "later"])
def test_it_is_named(kind: str, shared: torch.Tensor, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: dict[str, torch.Tensor] = {"weight": shared} if kind == "dict" else {}
    listed = {"ema": Averaged(shared) if kind == "object" else held}
    if kind != "later":
        with pytest.raises(InputError, match=LINE):
            checkflow.attach(model, optimizer, store=tmp_path / "store", extra=listed)
        return
    with (
        pytest.raises(InputError, match=LINE),
        checkflow.attach(model, optimizer, store=tmp_path / "store", extra=listed, tell=lambda _: None) as checkpointer,
    ):
        held["weight"] = shared
        checkpointer.step()
