"""The updates that the host makes, too: whether they are the training's, and what its process is held to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from checkflow.state.live import live_state, parameter_names
from checkflow.state.memory import as_bytes
from checkflow.state.names import StateName, holder_of
from checkflow.state.restore.files import FileTensor
from checkflow.state.restore.replay import Replay
from checkflow.store.memory.replica_slots import digest, only_in_whole
from checkflow.store.trainer.handle import StoreHandle
from checkflow.training import Training


class UpdatesOnHost:
    """Of one training. `handle`: the store's, as it is now; `approximate`: the last bits may differ, which `tell` is
    told.
    """

    def __init__(
        self, training: Training, handle: Callable[[], StoreHandle], approximate: bool, tell: Callable[[str], None]
    ) -> None:
        self._training = training
        self._handle = handle
        self._approximate = approximate
        self._tell = tell
        self._far = 0.0

    def refusal(self, again: Replay, saved: Callable[[torch.Tensor], FileTensor]) -> str:
        """Makes updates here as the process would, and says why it may not; "" where it may."""
        other, self._far = again.furthest(saved)
        if other is None or (self._approximate and self._far < math.inf):
            return ""
        name = parameter_names(self._training)[id(other)]
        advice = "" if self._far == math.inf else f" ({self._far:.2g} off; approximate=True takes that)"
        return f"{name} is not the same, to the bit, when they are made here{advice}"

    def lost(self) -> str:
        return self._handle().replica_lost

    def far(self) -> float:
        if self._far:
            self._tell(
                f"checkpoints are approximate: the host's first update is {self._far:.2g} off the training's, in units "
                "of the largest number in a tensor"
            )
        return self._far

    def digest(self) -> str:
        return digest(self._state())

    def confirmed(self) -> bool:
        return self._handle().shared.confirmed > 0

    def _state(self) -> Iterator[memoryview]:
        """What deltas rebuild, as it lies in a whole slot."""
        lives = {live.name: live.tensor for live in live_state(self._training)}
        for file, place in only_in_whole(self._handle().layouts):
            tensor = lives[StateName.of(holder_of(file), place.spec.name)].detach()
            lying = tensor.permute(place.spec.order or tuple(range(tensor.dim())))
            yield memoryview(as_bytes(lying.cpu()).numpy())  # type: ignore[arg-type]
