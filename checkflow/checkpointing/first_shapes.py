"""State that the first iteration gives another shape than it had at attach, where each new process begins again.

Observers of a training that quantizes do so. A restore writes into the tensors that are there, and refuses others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from checkflow.state.live import Live, in_models
from checkflow.state.names import StateName
from checkflow.training import Training

Shape = tuple[int, ...]


class FirstShapes:
    """Knows the shapes of parameters and buffers since it was made; tells once of those that are others."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._before: Mapping[StateName, Shape] = _shapes(training)

    def ended(self) -> Iterator[str]:
        """Of the first iteration: which are others."""
        before, self._before = self._before, {}
        if not before:
            return
        now = _shapes(self._training)
        found = [name for name, shape in before.items() if now.get(name, shape) != shape]
        if found:
            first, more = found[0], f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield (
                f"{first}{more}: had shape {before[first]} at attach, and has {now[first]} since the first iteration; "
                "no restore takes these checkpoints into a model that is as it was: run one forward pass before attach"
            )


def _shapes(training: Training) -> dict[StateName, Shape]:
    """Not of what ranks share, which a forward pass may leave gathered."""
    return {live.name: tuple(live.tensor.shape) for live in in_models(training) if _is_whole(live)}


def _is_whole(live: Live) -> bool:
    return live.tensor is live.held
