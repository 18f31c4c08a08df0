"""What code can reach is looked at, whatever else is there."""

from __future__ import annotations

import torch

from checkflow.trace.reachable import reach


class Unbound:
    """As a web framework's proxy outside of a request: whatever is asked of it raises."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("outside of a request")

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise RuntimeError("outside of a request")


def test_what_raises_when_it_is_looked_at_hides_nothing_else() -> None:
    tensor = torch.ones(2)
    assert reach([("loop", {"first": Unbound(), "second": [Unbound(), tensor]})], None) == {"loop.second.1": tensor}
