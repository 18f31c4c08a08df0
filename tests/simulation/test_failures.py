"""Failures against a policy: every nanosecond counted once, closed forms met, and a walk of each iteration agrees."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean, stdev

import pytest
from handmade import TIGHT
from hypothesis import assume, given
from hypothesis import strategies as st
from lived import lived

from checkflow.errors import InputError
from checkflow.schedule import read_schedule
from checkflow.simulation.costs import Costs, costs_of
from checkflow.simulation.failures import Trial, run, spread
from checkflow.simulation.incidents import Incident, Loss, exponential, read_incidents
from checkflow.simulation.life import Life, Lives

SECOND = 10**9
ROOT = Path(__file__).parents[2]


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    """Small numbers, so that all orders of events come up."""
    iteration, interval, base_every = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    few = st.integers(0, 30)
    write = draw(few) if base_every == 1 else draw(st.integers(0, iteration * interval))
    return Costs(
        "drawn", iteration, interval, stall_ns=draw(few), staged_after_ns=draw(few), write_ns=write,
        persist_gap_ns=draw(few) if base_every == 1 else 0, restore_memory_ns=draw(few), restore_disk_ns=draw(few),
        restart_ns=draw(few), replace_ns=draw(few), link_bytes=7, disk_bytes=11, base_every=base_every,
        replay_ns=draw(few), delta_stall_ns=draw(few), delta_write_ns=min(write, draw(few)), delta_link_bytes=3,
        delta_disk_bytes=5, remake_ns=draw(few),
    )  # fmt: skip


def walked(costs: Costs, restored: int, length: int) -> Life:
    """The same life, walked: one iteration after the other, and a disk that looks at what is staged."""
    now, iteration, stalled, ends = 0, restored * costs.interval, 0, dict[int, int]()
    link = disk = 0
    while now + costs.iteration_ns <= length:
        now += costs.iteration_ns
        iteration += 1
        if iteration % costs.interval == 0:
            number = iteration // costs.interval
            ends[number] = now
            base = number % costs.base_every == 0
            link += costs.link_bytes if base else costs.delta_link_bytes
            pause = min(costs.stall_ns if base else costs.delta_stall_ns, length - now)
            stalled += pause
            now += pause
    staged_at = {number: end + costs.staged_after_ns for number, end in ends.items()}
    known = {number: at for number, at in staged_at.items() if at <= length}
    durable, free, due, writing = None, 0, 0, None
    if costs.base_every > 1:
        for number, at in known.items():
            base = number % costs.base_every == 0
            disk += costs.disk_bytes if base else costs.delta_disk_bytes
            end = at + (costs.write_ns if base else costs.delta_write_ns)
            durable = number if end <= length else durable
            writing, free = number, end
    else:
        last = restored
        for moment in range(length + 1):  # a disk that is idle takes the newest staged, once the gap is over
            newest = max((number for number, at in known.items() if at <= moment), default=restored)
            fresh = newest > last and (newest in [n for n, at in known.items() if at == moment] or moment == free)
            if newest > last and moment >= free and moment >= due and (fresh or costs.write_ns > costs.persist_gap_ns):
                disk += costs.disk_bytes
                last, free, due = newest, moment + costs.write_ns, moment + costs.persist_gap_ns
                writing = newest
                durable = newest if free <= length else durable
    left = max(0, free - length)
    staged = max(known, default=restored)
    return Life(iteration, stalled, staged, durable, link, disk, writing if left else None, left)


@given(costs(), st.integers(0, 9), st.integers(0, 200))
def test_a_life_is_what_walking_it_gives(costs: Costs, restored: int, length: int) -> None:
    """No iteration is walked, and yet each is where it would be. Writes are compared where none has a gap to keep."""
    life, walk = Lives(costs).of(restored, length), walked(costs, restored, length)
    assert (life.iterations, life.stall_ns, life.staged) == (walk.iterations, walk.stall_ns, walk.staged)
    assert life.link_bytes == walk.link_bytes
    if costs.write_ns and (costs.base_every > 1 or not costs.persist_gap_ns):
        assert (life.durable, life.disk_bytes) == (walk.durable, walk.disk_bytes)
        assert (life.writing, life.left_ns) == (walk.writing, walk.left_ns)


@given(costs(), st.lists(st.tuples(st.integers(0, 300), st.sampled_from(Loss))), st.integers(1, 400))
def test_each_nanosecond_is_counted_once(costs: Costs, drawn: list[tuple[int, Loss]], span: int) -> None:
    """Whenever what fails: the parts add up to the span, none is negative, and the state is never ahead of its time."""
    outcome = run(costs, [Incident(*each) for each in sorted(drawn)], span)
    spent = outcome.spent
    assert spent.useful_ns + spent.wasted_ns == outcome.span_ns == span
    assert min(spent.useful_ns, spent.stall_ns, spent.redo_ns, spent.restart_ns, spent.restore_ns) >= 0
    assert spent.replay_ns >= 0 and min(outcome.redone.values()) >= 0
    assert outcome.iterations == spent.useful_ns // costs.iteration_ns
    assert sum(outcome.failures.values()) == sum(at < span for at, _ in drawn)


@given(costs(), st.lists(st.tuples(st.integers(0, 300), st.sampled_from(Loss)), max_size=8), st.integers(1, 400))
def test_a_training_amid_failures_is_what_living_it_gives(
    costs: Costs, drawn: list[tuple[int, Loss]], span: int
) -> None:
    """Iterations, bytes and where each nanosecond went, beside a trainer and a saver that go through one by one."""
    assume(costs.write_ns)
    costs, incidents = replace(costs, persist_gap_ns=0), [Incident(*each) for each in sorted(drawn)]
    outcome, reference = run(costs, incidents, span), lived(costs, incidents, span)
    found = {name: getattr(outcome.spent, f"{name}_ns") for name in
             ("useful", "stall", "redo", "restart", "restore", "replay")}  # fmt: skip
    assert found == {name: reference.spent[name] for name in found}
    assert (outcome.iterations, outcome.disk_bytes) == (reference.iterations, reference.disk_bytes)
    assert outcome.redone == {loss: reference.redone[loss] for loss in Loss}


@pytest.mark.parametrize(
    ("write_ns", "failures", "waits_ns", "writes"),
    [
        (90, [(189, Loss.TRAINER)], 1, 1),  # 1 ns of the first one's write is left
        (90, [(195, Loss.TRAINER)], 0, 1),  # all is written
        (120, [(219, Loss.TRAINER)], 121, 2),  # of the first one's 1 ns, and then the second is written
        (120, [(219, Loss.TRAINER), (240, Loss.TRAINER)], 121, 2),  # the saver does not begin anew
        (120, [(219, Loss.TRAINER), (219, Loss.MACHINE)], 0, 1),  # the second's was not begun
    ],
)
def test_a_write_under_way_is_ended(
    write_ns: int, failures: list[tuple[int, Loss]], waits_ns: int, writes: int
) -> None:
    """Only what is left of it is waited for, and its bytes count once; then the newest is written if it is another."""
    policy = Costs("hand", 10, 10, write_ns=write_ns, disk_bytes=1)
    outcome = run(policy, [Incident(*each) for each in failures], failures[0][0] + waits_ns + 99)
    assert (outcome.spent.restart_ns, outcome.disk_bytes) == (waits_ns, writes)


def test_a_machine_that_is_lost_during_a_write_leaves_what_was_written_before() -> None:
    """Of a killed trainer's saver that ended the first one's write, and was at the second's."""
    policy = Costs("hand", 10, 10, write_ns=120)
    for lost_at_ns, kept in ((219, 0), (220, 1), (339, 1), (340, 2)):
        failures = [Incident(219, Loss.TRAINER), Incident(lost_at_ns, Loss.MACHINE)]
        assert run(policy, failures, 341).redone[Loss.MACHINE] == (2 - kept) * 10


def test_parts_are_made_again_at_each_restore() -> None:
    """From memory and from disk; not where nothing is restored."""
    costs = Costs("parts", 10, 2, remake_ns=7, base_every=1)
    assert run(costs, [Incident(5, Loss.TRAINER)], 100).spent.replay_ns == 0
    killed, lost = Incident(45, Loss.TRAINER), Incident(75, Loss.MACHINE)
    assert run(costs, [killed], 100).spent.replay_ns == 7
    assert run(costs, [killed, lost], 200).spent.replay_ns == 14


def runs(costs: Costs, mtbf_s: float, failures: int, machines: float = 1.0, seeds: int = 30) -> list[Trial]:
    span = int(mtbf_s * failures * SECOND)
    return [run(costs, exponential(mtbf_s * SECOND, machines, seed), span) for seed in range(seeds)]


def agrees(expected: float, values: list[float], slack: float = 0.0) -> bool:
    """Within 3.7 standard errors of the mean: of 5000 true ones, one is refused."""
    return abs(fmean(values) - expected) <= 3.7 * stdev(values) / math.sqrt(len(values)) + slack


@pytest.mark.parametrize("interval", [1, 10, 100])
@pytest.mark.parametrize("mtbf_s", [60.0, 600.0])
def test_exponential_failures_cost_what_renewal_theory_says(interval: int, mtbf_s: float) -> None:
    """Exact, not to first order: with rate p and period P, what is kept of a second that training is up.

    Time up between failures is exponential, and so P/(e^(pP) - 1) of each mean 1/p lies in whole periods; the downs
    are memoryless as well: to be up again after D without a failure takes (e^(pD) - 1)/p.
    """
    policy = Costs("daly", SECOND // 2, interval, stall_ns=SECOND, restore_disk_ns=5 * SECOND, replace_ns=9 * SECOND)
    period_s, work_s, rate, down_s = interval / 2 + 1, interval / 2, 1 / mtbf_s, 14
    # The stall follows the iteration whose checkpoint is staged by its end, so the first period of a life has none.
    kept_s = work_s * math.exp(-rate * work_s) / -math.expm1(-rate * period_s)
    expected = kept_s / (mtbf_s + math.expm1(rate * down_s) / rate)
    outcomes = runs(policy, mtbf_s, 3000)
    assert agrees(expected, [outcome.effective for outcome in outcomes], slack=2e-4)


def test_the_best_interval_is_gockpt_s() -> None:
    """N* = sqrt(2 T_ckpt / (p T_step²)) wastes least, and P* = sqrt(2 p T_ckpt) + p T_load of useful time."""
    step_s, save_s, load_s, mtbf_s = 0.4455, 0.988, 4.0, 600.0
    best = round(math.sqrt(2 * save_s * mtbf_s) / step_s)
    assert best == 77  # Table 1: Async-O
    waste = {}
    for interval in (best // 3, best, best * 3):
        policy = Costs("gockpt", int(step_s * SECOND), interval, int(save_s * SECOND),
                       restore_disk_ns=int(load_s * SECOND))  # fmt: skip
        waste[interval] = [o.spent.wasted_ns / o.spent.useful_ns for o in runs(policy, mtbf_s, 2000)]
    assert fmean(waste[best]) < min(fmean(waste[best // 3]), fmean(waste[best * 3]))
    assert agrees(math.sqrt(2 * save_s / mtbf_s) + load_s / mtbf_s, waste[best], slack=0.006)  # it drops higher orders


def test_bases_and_deltas_cost_lowdiff_s_equation() -> None:
    """Eq 8 in seconds: (b/2 + R_F + R_D/2 (1/(f b) - 1))/M + S f/W, to first order in the rate."""
    step_s, batch, bases, load_s, merge_s, save_s, mtbf_s = 0.1, 2, 10, 3.0, 0.5, 0.4, 3600.0
    policy = Costs("lowdiff", int(step_s * SECOND), batch, stall_ns=int(save_s * SECOND), base_every=bases,
                   restore_disk_ns=int(load_s * SECOND), replay_ns=int(merge_s * SECOND))  # fmt: skip
    expected = (batch * step_s / 2 + load_s + merge_s / 2 * (bases - 1)) / mtbf_s + save_s / (batch * bases * step_s)
    wasted = [o.spent.wasted_ns / o.spent.useful_ns for o in runs(policy, mtbf_s, 2000)]
    assert agrees(expected, wasted, slack=0.02 * expected)


def test_a_killed_trainer_loses_what_is_not_staged_a_lost_machine_what_is_not_durable() -> None:
    """Iteration 10 s; staged 5 s later; written in 20 s each 30 s. Killed after 100 s."""
    policy = Costs("hand", 10, 1, staged_after_ns=5, write_ns=20, persist_gap_ns=30, disk_bytes=1)
    killed = run(policy, [Incident(101, Loss.TRAINER)], 200)
    assert killed.redone == {Loss.TRAINER: 1, Loss.MACHINE: 0}  # 10 were completed, 9 staged
    lost = run(policy, [Incident(101, Loss.MACHINE)], 200)
    assert lost.redone == {Loss.TRAINER: 0, Loss.MACHINE: 3}  # written: 1, 4, 7; from 15, 45, 75 on
    both = run(policy, [Incident(101, Loss.TRAINER), Incident(120, Loss.MACHINE)], 200)
    assert both.redone == {Loss.TRAINER: 1, Loss.MACHINE: 2}  # 9 would have been written by 121


@pytest.mark.parametrize("name", ["alexnet-32", "bert-32", "transformer-32"])
def test_costs_follow_from_a_schedule_file(name: str) -> None:
    """Staged not before the link has carried the state, and within the time that the schedule promises."""
    schedule = read_schedule(ROOT / "schedules" / f"{name}.json")
    costs = costs_of(schedule, 2 * 10**9)
    carried_ns = schedule.state_bytes * SECOND / schedule.bandwidth_bytes_per_s
    assert carried_ns <= costs.staged_after_ns <= 2 * schedule.interval * schedule.iteration_time_ns
    assert costs.write_ns == math.ceil(costs.disk_bytes / 2)
    assert costs.persist_gap_ns == 30 * SECOND and costs.stall_ns == 0


def test_failures_are_read_from_files(tmp_path: Path) -> None:
    """Ours, and counts of machines as PCcheck has them: fewer than before is a loss."""
    (tmp_path / "ours.csv").write_text("time_s,loss\n1.5,trainer\n90,machine\n")
    assert read_incidents(tmp_path / "ours.csv") == (
        Incident(1_500_000_000, Loss.TRAINER), Incident(90 * SECOND, Loss.MACHINE),
    )  # fmt: skip
    (tmp_path / "gpus.csv").write_text(",Time,GPUs\n0,1000.5,56\n1,1063.5,36\n2,1126.5,41\n3,1189.5,41\n4,1252.5,0\n")
    assert read_incidents(tmp_path / "gpus.csv") == tuple(Incident(s * SECOND, Loss.MACHINE) for s in (63, 252))


def test_a_spreadsheet_writes_one_too(tmp_path: Path) -> None:
    """With a mark before the first name, spaces around names, and its own ends of lines."""
    (tmp_path / "sheet.csv").write_bytes(b"\xef\xbb\xbftime_s , loss\r\n1.5,trainer\r\n")
    assert read_incidents(tmp_path / "sheet.csv") == (Incident(1_500_000_000, Loss.TRAINER),)


@pytest.mark.parametrize(
    "text", ["", "when,what\n1,2\n", "time_s,loss\nsoon,trainer\n", "time_s,loss\n1,disk\n", "time_s,loss\n1\n",
             "time_s,loss\n2,trainer\n1,trainer\n", "Time,GPUs\n1,many\n", "time_s,loss\nnan,trainer\n",
             'time_s,loss\n3600,"trainer\n', f"time_s,loss\n1,{'x' * 2**18}\n",
             "time_s,loss,loss\n1,trainer,machine\n", "time_s,loss\n1,trainer,machine\n",
             "time_s,loss\n1e300,trainer\n", f"Time,GPUs\n1,{'9' * 5000}\n"],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    """In one line that names it."""
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(InputError, match=r"bad\.csv: .*; "):
        read_incidents(tmp_path / "bad.csv")


def test_more_devices_fail_as_many_times_as_often_and_the_same_seed_fails_the_same() -> None:
    """The mean gap of 20,000 failures is the mean asked for, within four standard errors; so is the share."""
    drawn = list(takewhile(lambda incident: incident.at_ns < 20_000 * 50, exponential(50, 0.25, 3)))
    assert abs(len(drawn) - 20_000) < 4 * math.sqrt(20_000)
    assert abs(fmean(incident.loss is Loss.MACHINE for incident in drawn) - 0.25) < 0.013
    assert drawn[:50] == [incident for incident, _ in zip(exponential(50, 0.25, 3), range(50), strict=False)]


def test_a_spread_holds_the_median() -> None:
    """Of 20 runs the interval is between the 6th and the 15th, which holds the median 95.9% of the time."""
    found = spread(map(float, range(1, 21)))
    assert (found.median, found.low, found.high) == (10.5, 6, 15)


def test_costs_that_make_no_sense_are_refused() -> None:
    """By the field's name."""
    with pytest.raises(InputError, match="interval is 0"):
        Costs("bad", 1, 0)
    with pytest.raises(InputError, match="write_ns is -1"):
        replace(Costs("bad", 1, 1), write_ns=-1)


def test_what_left_before_the_end_keeps_nothing_from_being_staged() -> None:
    """Of a checkpoint in parts only what leaves at its iteration's end is still on the link then."""
    first = TIGHT.actions[0].model_copy(update={"offload": (-2, 1), "snapshot": None, "release": None})
    last = first.model_copy(update={"offload": (0, len(TIGHT.anchors))})
    costs = costs_of(TIGHT.model_copy(update={"actions": (first, last), "interval": 3}), 10**9)
    assert costs.staged_after_ns == -(-last.bytes * 10**9 // TIGHT.bandwidth_bytes_per_s)
    assert costs.link_bytes == first.bytes + last.bytes
