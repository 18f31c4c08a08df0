"""Two trainings that list things by the same names do not hide them from each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_attach_learning import Loop, attached
from test_forgotten import lacking
from torch.utils.data import TensorDataset

import checkflow
from checkflow.learning import forgotten


def test_two_trainings_may_name_what_they_list_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgotten, "_SHARE", 1e9)  # it looks whenever it is due
    told = list[str]()
    pairs: list[tuple[Callable[[int], None], Any]] = []
    for side in ("left", "right"):
        loop, noise, draws = Loop(), torch.Generator(), np.random.default_rng(0)
        loader = checkflow.ResumableLoader(TensorDataset(torch.arange(400)), batch_size=2)
        given: dict[str, Any] = {"generators": {"noise": noise}, "extra": {"draws": draws}, "loader": loader}
        batches = iter(loader)

        def iterate(
            number: int,
            loop: Loop = loop,
            noise: torch.Generator = noise,
            draws: np.random.Generator = draws,
            batches: Any = batches,
        ) -> None:
            next(batches)
            torch.randn(3, generator=noise)
            draws.random()
            loop.iterate(number)

        pairs.append((iterate, attached(loop, tmp_path / side, told, **given)))
    for number in range(12):
        for one, ckpt in pairs:
            one(number)
            ckpt.step()
    for _, ckpt in pairs:
        ckpt.close()
    assert not lacking(told), told
