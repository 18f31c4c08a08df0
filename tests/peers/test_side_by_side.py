"""benchmarks/policies.py: every policy is measured, and one of ours that another beats is named."""

from __future__ import annotations

from collections.abc import Callable

import benchmarks_path  # noqa: F401
import overhead
import policies
import pytest
import torch

import checkflow
from checkflow import policies as known

ROUNDS, ITERATIONS = 1, 4


def tiny() -> checkflow.Training:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 64)

    def iteration() -> None:
        torch.autograd.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)


def tiny_of(_: str) -> Callable[[], checkflow.Training]:
    return tiny


def test_every_policy_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side; the longer interval moves less and loses more; gradients are less than the state."""
    monkeypatch.setattr(overhead, "factory_of", tiny_of)
    schedules, refused = policies.planned("tiny", 2_000_000_000, [1, 4])
    assert not refused
    plain_s, rows = policies.measured("tiny", schedules, ROUNDS, ITERATIONS, 4)
    found = {(row.policy, row.interval): dict(zip(policies.COSTS, row.costs, strict=True)) for row in rows}
    assert plain_s > 0 and found.keys() == {(name, interval) for name in known.names() for interval in (1, 4)}
    state_mb = schedules[0].state_bytes / 1e6
    for (policy, interval), costs in found.items():
        assert costs["time"].median > 0 and costs["restore s"].median > 0
        assert costs["host MB"].median >= state_mb
        moved = costs["link MB/it"].median * interval
        if (policy, interval) == ("gockpt", 4):
            assert moved >= state_mb  # gradients may come on top
        elif (policy, interval) in (("lowdiff", 1), ("lowdiff_plus", 1)):
            assert moved < state_mb  # gradients alone, each second time or always
        else:
            assert moved == pytest.approx(state_mb, rel=0.01)
        assert costs["lost, machine"].median >= costs["lost, kill"].median
    for policy in known.names():
        assert found[policy, 1]["lost, kill"].median < found[policy, 4]["lost, kill"].median


def test_what_is_beaten_is_told() -> None:
    """Where rounds overlap nothing is said; one figure that is better outweighs all others."""
    row, other = (policies.Row(name, 1, costs) for name, costs in (("a", figures(5, 2)), ("b", figures(5, 1))))
    assert row.is_dominated_by(other) and not other.is_dominated_by(row)
    assert not row.is_dominated_by(policies.Row("c", 1, figures(6, 1)))
    assert not row.is_dominated_by(policies.Row("d", 1, figures(5, 2)))
    wide = policies.Row("e", 1, (policies.Figure(4, 3, 5), policies.Figure(2, 2, 2)))
    assert not row.is_dominated_by(wide)


def figures(*values: float) -> tuple[policies.Figure, ...]:
    return tuple(policies.Figure.of([value]) for value in values)
