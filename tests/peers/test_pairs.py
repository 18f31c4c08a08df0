"""What pairs.py says of a contender whose cost is known, on a machine whose speed drifts and stumbles."""

from __future__ import annotations

from pathlib import Path

import benchmarks_path  # noqa: F401 (makes the next ones importable)
import pytest
from contenders import Job, Tier
from peering import pairs
from peering.orders import Attach, Done, Order, Train, Turn

ITERATION_S, SAVE_S, BLOCKED_S = 0.010, 0.030, 0.002


class Machine:
    """Its speed changes by a few percent from turn to turn, by a factor of two in all."""

    def __init__(self) -> None:
        self.turns = 0

    @property
    def factor(self) -> float:
        return 1.0 + self.turns / 60


class Worker:
    """As processes.Process: trains in no time and says how long it took."""

    def __init__(self, machine: Machine, interval: int | None, stumbles_at: int = -1) -> None:
        self._machine = machine
        self._interval = interval
        self._stumbles_at = stumbles_at
        self._completed = 0
        self._frozen = True
        self._answer: Turn | None = None

    def thaw(self) -> None:
        self._frozen = False

    def freeze(self) -> None:
        self._frozen = True

    def tell(self, order: Order) -> None:
        assert isinstance(order, Train) and not self._frozen
        self._machine.turns += 1
        times, blocked = [], []
        for _ in range(order.iterations):
            self._completed += 1
            saves = self._interval is not None and self._completed % self._interval == 0
            time_s = (ITERATION_S + (SAVE_S if saves else 0.0)) * self._machine.factor
            times.append(time_s + (1.0 if self._completed == self._stumbles_at else 0.0))
            blocked.append(BLOCKED_S if saves else 0.0)
        self._answer = Turn(tuple(times), tuple(blocked), 0)

    def hear(self, _kind: type[Turn]) -> Turn:
        assert self._answer is not None
        return self._answer

    def ask(self, order: Order, kind: type[Turn]) -> Turn | Done:
        if isinstance(order, Attach):
            return Done()
        self.tell(order)
        return self.hear(kind)

    def answered(self, _timeout_s: float) -> bool:
        return self._answer is not None

    def memory_bytes(self) -> int:
        return 5000 if self._interval else 3000

    def written_bytes(self) -> int:
        return 100 * (self._completed // self._interval) if self._interval else 0


@pytest.mark.parametrize(("interval", "stumbles_at"), [(1, -1), (5, -1), (5, 23), (10, -1)])
def test_a_known_cost_is_found(interval: int, stumbles_at: int, tmp_path: Path) -> None:
    """To a percent, though the machine becomes twice as slow meanwhile and once stops for a second."""
    machine = Machine()
    none, tool = Worker(machine, None), Worker(machine, interval, stumbles_at)
    job = Job(tmp_path, interval, Tier.DISK, "tiny", tmp_path)
    plan = pairs.Plan(turn=10, piece=5, baseline=5, pairs=7, warm=10)
    samples = pairs.measure(none, tool, job, plan, save_in_memory=False)  # type: ignore[arg-type]
    found = pairs.overhead(job, "tool", plan, [samples])
    slowdown = 1 + SAVE_S / (interval * ITERATION_S)
    assert found.loss == pytest.approx(1 - 1 / slowdown, abs=0.01)
    assert found.blocked_save_ms == pytest.approx(BLOCKED_S * 1e3)
    assert found.blocked_ms == pytest.approx(BLOCKED_S * 1e3 / interval)
    assert found.extra_host_bytes == 2000
    assert found.written_bytes == pytest.approx(100)
    assert (found.mean_loss > found.loss + 0.1) == (stumbles_at > 0)  # the stumble is shown, apart
