"""What the order of data is drawn with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from checkflow.state.host.rng import RngReader, RngRecord, match_rng


class Generators:
    """All generators that loading may draw from, everybody's and a loader's own, as text."""

    def __init__(self, name: str, own: Mapping[str, torch.Generator]) -> None:
        self.own = {f"{name}.{key}": value for key, value in own.items()}
        self._reader = RngReader()

    def read(self) -> str:
        return self._reader.read(self.own)

    def set(self, text: str) -> None:
        match_rng(RngRecord.model_validate_json(text), self.own).restore()

    def set_host(self, text: str) -> None:
        """But for CUDA's, which no order is drawn from."""
        record = RngRecord.model_validate_json(text)
        match_rng(record.model_copy(update={"cuda": ()}), self.own).restore()
