"""What code can reach is looked at, whatever else is there."""

from __future__ import annotations

import sys

import torch

from checkflow.trace.reachable import reach, reachable_from, shown
from checkflow.training import Training


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


def test_variables_of_one_name_in_functions_that_call_each_other_are_both_found() -> None:
    model = torch.nn.Linear(2, 2)
    training = Training(model, torch.optim.SGD(model.parameters()), lambda: None)

    def called() -> list[torch.Tensor]:
        mean = torch.zeros(3)
        found = reachable_from(training, sys._getframe())
        assert {shown(name) for name, each in found.items() if each is mean} == {"mean"}
        return [each for name, each in found.items() if shown(name) == "mean" and isinstance(each, torch.Tensor)]

    mean = torch.ones(2)
    assert sorted(map(len, called())) == [len(mean), 3]
