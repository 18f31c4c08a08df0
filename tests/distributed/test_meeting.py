"""Where a process meets the others of its training: in its present process group, if there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import checkflow
from checkflow.torch_ranks import meeting_place


@pytest.mark.parametrize("size", ["2", "1"])
def test_one_of_several_that_has_met_nobody_is_told(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": size, "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkflow.attach(model, optimizer, store=tmp_path / "store", notify=told.append, tell=lambda _: None):
        pass
    said = [line for line in told if line.endswith("call init_process_group before attach")]
    assert len(said) == (size == "2")


def test_attached_trainings_are_counted_in_each_process_group(tmp_path: Path) -> None:
    """A process that takes a new one in the place of a lost rank has attached before in another group."""

    def numbers(name: str) -> list[int]:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / name}", rank=0, world_size=1)
        try:
            found = [meeting_place(), meeting_place()]
        finally:
            dist.destroy_process_group()
        return [place.number for place in found if place is not None]

    assert numbers("first") == numbers("second") == [1, 2]
