"""The closed form of what failures cost is what simulated failures tend to."""

from __future__ import annotations

import math
import random
from decimal import Decimal, localcontext
from statistics import fmean, stdev

import pytest

from checkflow.errors import InputError
from checkflow.simulation.costs import Costs, costs_at
from checkflow.simulation.expected import expected
from checkflow.simulation.failures import Trial, run
from checkflow.simulation.incidents import Loss, exponential

SECOND = 10**9


def drawn(seed: int) -> tuple[Costs, float, float]:
    """Costs, the mean between failures in s, and the share of lost machines: disks that are idle and that never are."""
    source = random.Random(seed)

    def seconds(most: float) -> int:
        return int(source.uniform(0, most) * SECOND)

    iteration_s = source.uniform(0.05, 2)
    costs = Costs(
        "drawn",
        int(iteration_s * SECOND),
        source.choice((1, 2, 7, 40)),
        stall_ns=source.choice((0, seconds(3))),
        staged_after_ns=seconds(3),
        write_ns=seconds(source.choice((1, 20))),
        persist_gap_ns=source.choice((0, seconds(30))),
        restore_memory_ns=seconds(5),
        restore_disk_ns=seconds(20),
        restart_ns=seconds(30),
        replace_ns=seconds(60),
        remake_ns=seconds(3),
    )
    return costs, source.uniform(100, 2000), source.choice((0.0, 0.3, 1.0))


@pytest.mark.parametrize("seed", range(24))
def test_it_is_what_many_failures_cost(seed: int) -> None:
    """Waste, stalls and what is done again, within 3.7 standard errors and what the closed form takes for granted."""
    costs, mtbf_s, machines = drawn(seed)
    claimed = expected(costs, mtbf_s * SECOND, machines)
    span = int(mtbf_s * 1500 * SECOND)
    runs = [run(costs, exponential(mtbf_s * SECOND, machines, each), span) for each in range(12)]

    def agrees(claim: float, values: list[float], slack: float) -> bool:
        return abs(fmean(values) - claim) <= 3.7 * stdev(values) / math.sqrt(len(values)) + slack

    assert agrees(claimed.wasted, [each.wasted for each in runs], 0.01 * claimed.wasted)
    assert agrees(claimed.stall, [each.spent.stall_ns / each.span_ns for each in runs], 0.01 * claimed.stall + 1e-6)
    shares = {Loss.TRAINER: 1 - machines, Loss.MACHINE: machines}
    again = sum(shares[loss] * claimed.redone[loss] for loss in Loss) * costs.iteration_ns

    def redo_ns(trial: Trial) -> float:
        return trial.spent.redo_ns / sum(trial.failures.values())

    # Failures that come before training is up again are counted in the run, and do nothing again.
    down = sum(shares[loss] * _down_ns(costs)[loss] for loss in Loss) / SECOND / mtbf_s
    assert agrees(again, [redo_ns(each) for each in runs], again * (0.02 + down))


@pytest.mark.parametrize("machines", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("interval", "write_s", "gap_s", "restart_s", "mtbf_s"),
    [
        (5, 20, 600, 0, 60),  # the disk is idle, and the next trainer waits for the whole write
        (500, 150, 600, 30, 60),  # a write takes three periods, and the gap more
        (500, 150, 0, 0, 60),  # three periods, one write after the other
        (500, 130, 0, 30, 90),  # any part of a period
        (10, 20, 30, 30, 60),  # shorter than a restart
    ],
)
def test_what_is_waited_for_goes_on_when_it_fails_again(
    interval: int, write_s: int, gap_s: int, restart_s: int, mtbf_s: int, machines: float
) -> None:
    """Writes that take about as long as it is between failures: a further kill restarts, and the saver goes on."""
    costs = Costs("waits", SECOND // 10, interval, write_ns=write_s * SECOND, persist_gap_ns=gap_s * SECOND,
                  restore_memory_ns=SECOND, restore_disk_ns=10 * SECOND, restart_ns=restart_s * SECOND,
                  replace_ns=60 * SECOND, remake_ns=SECOND)  # fmt: skip
    claimed = expected(costs, mtbf_s * SECOND, machines)
    runs = [
        run(costs, exponential(mtbf_s * SECOND, machines, each), mtbf_s * 2500 * SECOND).wasted for each in range(8)
    ]
    assert abs(fmean(runs) - claimed.wasted) <= 3.7 * stdev(runs) / math.sqrt(len(runs)) + 0.003


def exactly(costs: Costs, mtbf_ns: int) -> dict[Loss, Decimal]:
    """What is redone, as what is left of a life without stalls and kept checkpoints: with digits enough for that."""
    with localcontext(prec=120):
        rate, work, period = 1 / Decimal(mtbf_ns), costs.interval * costs.iteration_ns, Decimal(costs.period_ns)
        first = work + costs.staged_after_ns
        every = -(-max(costs.write_ns, costs.persist_gap_ns) // costs.period_ns) * costs.period_ns

        def each(first_ns: int, every_ns: Decimal) -> Decimal:
            return (-rate * first_ns).exp() / (1 - (-rate * every_ns).exp())

        stalls = (1 - (-rate * costs.stall_ns).exp()) / rate * each(work, period)
        durable = each(first + costs.write_ns + every, Decimal(every)) * every / costs.period_ns
        kept = {Loss.TRAINER: each(first, period), Loss.MACHINE: (-rate * (first + costs.write_ns)).exp() + durable}
        return {loss: (mtbf_ns - stalls - kept[loss] * work) / costs.iteration_ns for loss in Loss}


@pytest.mark.parametrize("mtbf_ns", [10**3, 10**8, 10**11, 10**13, 10**16, 86_400 * 10**18])
@pytest.mark.parametrize("staged_after_ns", [0, SECOND // 3])
def test_what_is_redone_has_all_its_digits(staged_after_ns: int, mtbf_ns: int) -> None:
    """A mean time between failures of up to 10^9 days: no loss is what is left of nearly all."""
    costs = Costs("any", SECOND // 10, 7, stall_ns=SECOND // 20, staged_after_ns=staged_after_ns, write_ns=SECOND,
                  persist_gap_ns=30 * SECOND)  # fmt: skip
    exact, found = exactly(costs, mtbf_ns), expected(costs, mtbf_ns, 0.5).redone
    for loss in Loss:
        assert found[loss] == pytest.approx(float(exact[loss]), rel=1e-9)


@pytest.mark.parametrize("machines", [0.0, 1e-9, 0.5, 1.0])
@pytest.mark.parametrize("write_s", [0.01, 3.0])
def test_what_is_wasted_falls_as_failures_do(write_s: float, machines: float) -> None:
    """A policy without overhead wastes so much for each failure; what wastes is a share at any mean between them."""
    costs = costs_at("free", SECOND // 10, 1, int(write_s * SECOND), SECOND, SECOND, restart_ns=30 * SECOND,
                     replace_ns=300 * SECOND, persist_gap_ns=0)  # fmt: skip
    hours = [10**power for power in range(3, 10)]
    products = [expected(costs, 3600 * SECOND * each, machines).wasted * each for each in hours]
    assert products[-1] > 0 and products == pytest.approx([products[-1]] * len(products), rel=1e-3)
    assert products[3:] == pytest.approx([products[-1]] * 4, rel=2e-6)
    days = [24 * 3600 * SECOND * 10**power for power in range(10)]
    shares = [expected(costs, mtbf_ns, machines).wasted for mtbf_ns in (*(10**power for power in range(14)), *days)]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1 and shares[-1] > 0


def _down_ns(costs: Costs) -> dict[Loss, int]:
    return {
        Loss.TRAINER: costs.restart_ns + costs.write_ns + costs.restore_memory_ns + costs.remake_ns,
        Loss.MACHINE: costs.replace_ns + costs.restore_disk_ns + costs.remake_ns,
    }


def test_what_never_comes_up_wastes_all() -> None:
    """A restore that takes far longer than the mean between failures."""
    assert expected(Costs("slow", 1, 1, restore_disk_ns=10**6), 1, 1.0).wasted == 1


def test_deltas_have_no_closed_form() -> None:
    """They are simulated."""
    with pytest.raises(InputError, match="simulate it"):
        expected(Costs("deltas", 1, 1, base_every=2), 1, 0.5)
