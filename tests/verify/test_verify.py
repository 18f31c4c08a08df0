"""The verifier on figures worked out on paper, and on everything that can be wrong with a schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from handmade import ANCHORS, EASY, FROZEN, GRAPH, PAUSED, STATE, TIGHT, X
from pydantic import BaseModel

from checkflow.errors import VerificationError
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.graphfile import graph_fingerprint, state_fingerprint
from checkflow.schedule import ActionRow, AnchorRow, Schedule, StateRow, ViewRow, sealed
from checkflow.verify import VerifiedSchedule, verify
from checkflow.verify.terms import first_from, last_to

OTHER_DIGEST = "sha256:" + "0" * 64
Change = Callable[[Schedule], Schedule]


def header(**fields: object) -> Change:
    """Other values in the header."""
    return lambda schedule: schedule.model_copy(update=fields)


def claim(**fields: object) -> Change:
    """Other values in the certificate."""
    return lambda s: s.model_copy(update={"certificate": s.certificate.model_copy(update=fields)})


def rows(table: str, change: Callable[[list[BaseModel]], object]) -> Change:
    """A table changed in place."""

    def changed(schedule: Schedule) -> Schedule:
        found = list(getattr(schedule, table))
        change(found)
        return schedule.model_copy(update={table: tuple(found)})

    return changed


def row(table: str, number: int, **fields: object) -> Change:
    """Other values in one row."""

    def change(found: list[BaseModel]) -> None:
        found[number] = found[number].model_copy(update=fields)

    return rows(table, change)


def drop(table: str, number: int) -> Change:
    return rows(table, lambda found: found.pop(number))


def repeat(table: str, number: int) -> Change:
    return rows(table, lambda found: found.append(found[number]))


def swap(table: str, number: int) -> Change:
    def change(found: list[BaseModel]) -> None:
        found[number], found[number + 1] = found[number + 1], found[number]

    return rows(table, change)


def test_easy_schedule_needs_no_snapshot() -> None:
    """At 10 GB/s the peak is training's own."""
    assert verify(EASY, GRAPH) == VerifiedSchedule(664, 664, 664, 664, 0, 0, 0)


def test_tight_schedule_needs_what_paper_says() -> None:
    """At 4 GB/s and interval 2 it meets the bound of its anchors, 804; with more of them 714 would do."""
    assert verify(TIGHT, GRAPH) == VerifiedSchedule(664, 804, 804, 714, 210, 0, 0)


def test_paused_schedule_needs_what_paper_says() -> None:
    """At 4 GB/s training stands still for 55 ns at position 2, and b's copy is held until then."""
    assert verify(PAUSED, GRAPH) == VerifiedSchedule(664, 714, 664, 664, 150, 55, 0)


STILL_VALID: dict[str, Change] = {
    "the same": header(),
    "another interval that carries as much": header(interval=3),
    "a memory limit that it keeps to": header(memory_limit_bytes=804),
    "chunks as large as allowed": header(chunk_bytes=90),
    "transfers by which the plan was found": header(transfers="packed"),
    "another solver": claim(solver="highs", solver_why="asked for"),
    "what version 1 did not say": claim(lower_bound_bytes=None, ideal_peak_bytes=None, gap=None),
    "an offload issued at the same position under another name": row("actions", 2, offload=(1, 1)),
    "a snapshot released later where there is room": row("actions", 3, release=(2, 3)),
}


@pytest.mark.parametrize("change", STILL_VALID.values(), ids=STILL_VALID)
def test_change_that_breaks_nothing_passes(change: Change) -> None:
    """The verifier refuses broken promises only."""
    verify(sealed(change(TIGHT)), GRAPH)


BROKEN: dict[str, tuple[Change, str]] = {
    "graph fingerprint": (header(graph_fingerprint=OTHER_DIGEST), "graph_fingerprint: the schedule was made for"),
    "state fingerprint": (header(state_fingerprint=OTHER_DIGEST), "state_fingerprint: "),
    "model": (header(model="other"), "model: the schedule has 'other', its graph 'handmade'"),
    "arguments": (header(arguments=(("batch_size", "4"),)), "arguments: "),
    "device": (header(device="other"), "device: "),
    "traced on": (header(traced_on="cuda"), "traced_on: "),
    "steps": (header(steps=5), "steps: the schedule has 5, its graph 4"),
    "iteration time": (header(iteration_time_ns=41), "iteration_time_ns: "),
    "state bytes": (header(state_bytes=364), "state_bytes: "),
    "static state bytes": (header(static_state_bytes=0), "static_state_bytes: "),
    "state row missing": (header(state=STATE[:3]), "state: the schedule has 3, its graph 4"),
    "state row's size": (row("state", 0, bytes=99), "state row 0: model/a: bytes: the schedule has 99, its graph 100$"),
    "state row's writes": (
        row("state", 0, written=False),
        "state row 0: model/a: written: the schedule has False, its graph True$",
    ),
    "state row's name": (
        row("state", 3, views=STATE[0].views),
        r"state row 3: model/a: views: the schedule has model/a uint8 \[100\], its graph model/frozen uint8 \[64\]$",
    ),
    "anchor missing": (header(anchors=ANCHORS[1:]), "anchors: the schedule has 2, its graph 3"),
    "anchor moved": (
        row("anchors", 1, position=3),
        "anchors row 1: gradient model/a: position: the schedule has 3, its graph 2$",
    ),
    "paper's formulation": (header(formulation="paper"), "transfers: formulation paper is always packed"),
    "paper's formulation, packed": (header(formulation="paper", transfers="packed"), "actions row 0: .*Eq 2"),
    "compact formulation, packed": (header(formulation="compact", transfers="packed"), "actions row 0: .*Eq 2"),
    "interval too short": (header(interval=1), "actions: 300 bytes do not fit the 160 that the link carries"),
    "bandwidth raised": (
        header(bandwidth_bytes_per_s=5_000_000_000),
        "certificate.lower_bound_bytes: 804 is claimed, 764 is found",
    ),
    "bandwidth lowered": (
        header(bandwidth_bytes_per_s=3_800_000_000),
        "actions row 0 .*4 bytes still to move at its deadline, position 0",
    ),
    "bandwidth nothing": (header(bandwidth_bytes_per_s=1, slack_ppm=1), "bandwidth_bytes_per_s: 0 is not positive"),
    "slack": (header(slack_ppm=50_000), "actions: 300 bytes do not fit the 273"),
    "largest chunk": (header(chunk_bytes=89), "actions row 3 .*90 bytes are more than the largest chunk, 89"),
    "granule": (header(granule_bytes=20), "actions row 3 .*offset is not a multiple of the granule, 20"),
    "memory limit": (header(memory_limit_bytes=803), "peak_bytes: 804 is over the memory limit, 803"),
    "training peak": (claim(training_peak_bytes=663), "certificate.training_peak_bytes: 663 is claimed, 664 is found"),
    "peak a byte low": (claim(peak_bytes=803), "certificate.peak_bytes: 803 is claimed, 804 is found"),
    "peak a byte high": (claim(peak_bytes=805), "certificate.peak_bytes: 805 is claimed, 804 is found"),
    "snapshot bytes": (claim(snapshot_bytes=211), "certificate.snapshot_bytes: 211 is claimed, 210 is found"),
    "gap": (claim(gap=1e-9), "certificate.gap: 1e-09 is claimed, 0.0 is found"),
    "bound a byte low": (claim(lower_bound_bytes=803, gap=1 / 803), "lower_bound_bytes: 803 is claimed, 804 is"),
    "bound a byte high": (claim(lower_bound_bytes=805), "certificate.lower_bound_bytes: 805 is claimed, 804 is found"),
    "ideal peak a byte low": (claim(ideal_peak_bytes=713), "ideal_peak_bytes: 713 is claimed, 714 is found"),
    "ideal peak a byte high": (claim(ideal_peak_bytes=715), "ideal_peak_bytes: 715 is claimed, 714 is found"),
    "no actions": (header(actions=()), "actions: model/a has 100 bytes, of which the rows cover 0"),
    "unwritten state in an action": (row("actions", 0, tensor=FROZEN), "actions row 0: tensor 3 is not state"),
    "activation in an action": (row("actions", 0, tensor=X), "actions row 0: tensor 4 is not state that"),
    "action larger than a chunk": (header(chunk_bytes=120, actions=EASY.actions), "actions row 0 .*largest chunk"),
    "anchor that is not there": (row("actions", 4, release=(1, 4)), "actions row 4 .*anchor 4, but the last is 3"),
    "snapshot at an anchor after the write": (row("actions", 3, snapshot=(1, 3)), "actions row 3 .*window, 0..2"),
    "snapshot at an anchor before the release": (row("actions", 3, snapshot=(0, 2)), "actions row 3 .*window, 0..2"),
    "snapshot at the anchor after the offload's": (row("actions", 1, snapshot=(1, 1)), "actions row 1 .*comes before"),
    "offload before its snapshot": (row("actions", 3, offload=(0, 3)), "actions row 3 .*comes before its snapshot"),
    "direct issued too early": (
        row("actions", 0, offload=(0, 1)),
        "actions row 0 .*is before its tensor's release, -2",
    ),
    "direct issued too late": (row("actions", 2, offload=(1, 2)), "actions row 2 .*10 bytes still to move"),
    "direct in an action past the deadline": (
        row("actions", 3, snapshot=None, release=None),
        "actions row 3 .*90 bytes still to move at its deadline, position 2",
    ),
    "released before the transfer's end": (
        row("actions", 3, release=(2, 1)),
        "actions row 3 .*released at position 4 with 10 bytes still to move",
    ),
    "released at the same anchor": (row("actions", 1, release=(0, 3)), "actions row 1 .*with 70 bytes still to move"),
    "never released": (row("actions", 1, release=None), "actions row 1 .*stand together"),
    "released without a snapshot": (row("actions", 1, snapshot=None), "actions row 1 .*stand together"),
    "released later where there is no room": (
        row("actions", 1, release=(2, 1)),
        "certificate.peak_bytes: 804 is claimed, 874 is found",
    ),
    "last offload after the next checkpoint's first": (
        row("actions", 4, offload=(2, 3), release=(3, 3)),
        "actions row 4 .*comes after the next checkpoint's first",
    ),
    "actions of another bandwidth": (header(actions=EASY.actions, certificate=EASY.certificate), "actions row 0"),
}
for number in range(5):
    one, where = TIGHT.actions[number], f"actions row {number}"
    BROKEN |= {
        f"{where} dropped": (drop("actions", number), "actions.*cover"),
        f"{where} twice": (repeat("actions", number), "actions row .*covered twice"),
        f"{where} a byte short": (row("actions", number, bytes=one.bytes - 1), "actions.*cover"),
        f"{where} a byte long": (row("actions", number, bytes=one.bytes + 1), "actions.*cover"),
        f"{where} shifted": (row("actions", number, offset=one.offset + 10), "actions.*cover"),
        f"{where} shifted by half a granule": (row("actions", number, offset=one.offset + 5), f"{where} .*granule"),
    }
for number in (0, 2):
    BROKEN[f"actions rows {number} and {number + 1} swapped"] = (swap("actions", number), "actions row")


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_promise_is_refused(change: Change, message: str) -> None:
    """Each rule, header field and claim, broken by a little under a digest that is right, is named in one line."""
    with pytest.raises(VerificationError, match=message) as raised:
        verify(sealed(change(TIGHT)), GRAPH)
    assert "\n" not in str(raised.value)


PAUSED_STILL_VALID: dict[str, Change] = {
    "another policy's": header(policy="synchronous"),
    "every second iteration": header(interval=2),
    "at the iteration's end": lambda s: claim(pause_ns=75)(header(pause=(0, 3))(s)),
    "where the next checkpoint begins": lambda s: claim(pause_ns=35, snapshot_bytes=300, peak_bytes=964, gap=300 / 664)(
        header(
            pause=(1, 3),
            actions=tuple(one.model_copy(update={"snapshot": (0, 3), "release": (1, 3)}) for one in s.actions),
        )(s)
    ),
}


@pytest.mark.parametrize("change", PAUSED_STILL_VALID.values(), ids=PAUSED_STILL_VALID)
def test_another_sound_pause_passes(change: Change) -> None:
    """What only moves the pause is judged by how long it takes there."""
    verify(sealed(change(PAUSED)), GRAPH)


PAUSED_BROKEN: dict[str, tuple[Change, str]] = {
    "no pause": (header(pause=None), "actions: 300 bytes do not fit the 160 that the link carries"),
    "a ns short": (claim(pause_ns=54), "certificate.pause_ns: 54 is claimed, 55 is found"),
    "a ns long": (claim(pause_ns=56), "certificate.pause_ns: 56 is claimed, 55 is found"),
    "claimed without one": (lambda _: claim(pause_ns=55)(TIGHT), "certificate.pause_ns: 55 is claimed, 0 is found"),
    "earlier": (header(pause=(0, 3)), "certificate.pause_ns: 55 is claimed, 75 is found"),
    "after a deadline": (header(pause=(1, 3)), "actions row 0 .*released at position 2 with 70 bytes still to move"),
    "after a live tensor's deadline": (
        lambda s: row("actions", 0, release=(1, 3))(header(pause=(1, 3))(s)),
        "actions row 1 .*170 bytes still to move at its deadline, position 2",
    ),
    "a live tensor due before it": (
        row("actions", 0, snapshot=None, release=None),
        "actions row 0 .*150 bytes still to move at its deadline, position 0",
    ),
    "before the iteration's end": (header(pause=(0, 2)), "pause: .*before the iteration's end"),
    "before the last offload": (row("actions", 2, offload=(1, 3)), "pause: .* or the last offload"),
    "after the next checkpoint's first offload": (header(pause=(2, 1)), "pause: .*next checkpoint's first offload"),
    "at an anchor that is not there": (header(pause=(1, 4)), "pause: at anchor 4, but the last is 3"),
    "released before it": (row("actions", 0, release=(1, 1)), "released at position 0 with 150 bytes still to move"),
    "a bound of what does not pause": (claim(lower_bound_bytes=714, gap=0.0), "lower_bound_bytes: 714 is claimed, 664"),
    "nothing to wait for": (header(actions=()), "actions: model/a has 100 bytes, of which the rows cover 0"),
}


@pytest.mark.parametrize(("change", "message"), PAUSED_BROKEN.values(), ids=PAUSED_BROKEN)
def test_broken_promise_of_a_pause_is_refused(change: Change, message: str) -> None:
    """Where it stands, what it waits for and how long that takes."""
    with pytest.raises(VerificationError, match=message) as raised:
        verify(sealed(change(PAUSED)), GRAPH)
    assert "\n" not in str(raised.value)


def test_swapped_actions_of_different_tensors_are_judged_by_what_they_do() -> None:
    """Offloads issued at one anchor may change places: a at 0..10 and b at 10..80; c at 80..130 and a at 130..220."""
    verify(sealed(swap("actions", 1)(TIGHT)), GRAPH)
    earlier = row("actions", 4, release=(2, 1))  # at 160
    with pytest.raises(VerificationError, match=r"actions row 4 .*released at position 4 with 60 bytes still to move"):
        verify(sealed(earlier(TIGHT)), GRAPH)
    verify(sealed(swap("actions", 3)(earlier(TIGHT))), GRAPH)


def test_schedule_changed_after_sealing_is_refused() -> None:
    """The digest covers every field."""
    with pytest.raises(VerificationError, match="digest"):
        verify(TIGHT.model_copy(update={"model": "other"}), GRAPH)


def test_schedule_of_another_graph_is_refused() -> None:
    """A nanosecond more in one operator makes another graph."""
    with pytest.raises(VerificationError, match=r"graph_fingerprint.*; iteration_time_ns: 40 there, 41 here$"):
        verify(TIGHT, GRAPH.retimed("paper", [10, 10, 10, 11]))
    with pytest.raises(VerificationError, match=r"graph_fingerprint.*'handmade'; device: paper there, silk here$"):
        verify(TIGHT, GRAPH.retimed("silk", [10, 10, 10, 11]))


def test_slack_is_taken_off_times_and_bandwidth() -> None:
    """A schedule of the derated link passes on the unslowed graph only with its slack in the header."""
    graph = GRAPH.retimed("paper", [20, 20, 20, 20])
    schedule = sealed(
        EASY.model_copy(
            update={
                "graph_fingerprint": graph_fingerprint(graph),
                "bandwidth_bytes_per_s": 20_000_000_000,
                "slack_ppm": 500_000,
                "iteration_time_ns": 80,
            }
        )
    )
    verify(schedule, graph)
    with pytest.raises(VerificationError, match="actions: 300 bytes do not fit the 256"):
        verify(sealed(schedule.model_copy(update={"slack_ppm": 600_000})), graph)


def test_offloads_are_issued_in_the_order_of_the_rows() -> None:
    """Two anchors at one position still fire one after the other: what comes first in the list is issued first."""
    later = row("actions", 2, offload=(1, 1))
    verify(sealed(later(EASY)), GRAPH)
    with pytest.raises(VerificationError, match=r"actions row 2 .*comes before the previous row's at \(1, 1\)"):
        verify(sealed(swap("actions", 1)(later(EASY))), GRAPH)


def test_last_offload_may_share_the_next_checkpoints_first_anchor() -> None:
    """c snapshot at position 2 moves at 200..250, and b, issued at -200, waits until -150; 50 are held at 3 and 4."""
    held = row("actions", 2, snapshot=(1, 2), offload=(1, 2), release=(1, 3))
    schedule = claim(peak_bytes=714, gap=50 / 664, snapshot_bytes=50)(held(EASY))
    assert verify(sealed(schedule), GRAPH).peak_bytes == 714


def test_direct_read_that_ends_after_the_last_anchor_before_the_write_is_refused() -> None:
    """c would move at 200..250 and is written at 300, but no hook runs after 200 that could hold the write back."""
    with pytest.raises(VerificationError, match=r"actions row 2 .*50 bytes still to move at its deadline, position 2"):
        verify(sealed(row("actions", 2, offload=(1, 2))(EASY)), GRAPH)


def test_release_a_tick_before_the_transfers_end_is_refused() -> None:
    """At 20 GB/s 20 bytes take just the nanosecond between two anchors, at a byte a second less a tick more."""
    graph = Graph(
        model="tick", arguments=(), device="d", traced_on="cpu",
        ops=(Op("write", (), (0,), 0, 0, "", 1), Op("write", (), (0,), 0, 0, "", 1)),
        tensors=(Tensor("s", Role.PARAMETER, 20, 0, 2, (View("s", "uint8", (20,)),)),),
        anchors=(Anchor(AnchorKind.GRADIENT, "s", 1, 1), Anchor(AnchorKind.ITERATION_END, "", 1, 2)),
    )  # fmt: skip

    short = header(
        graph_fingerprint=graph_fingerprint(graph),
        state_fingerprint=state_fingerprint(graph),
        model="tick",
        arguments=(),
        device="d",
        steps=2,
        iteration_time_ns=2,
        state_bytes=20,
        static_state_bytes=0,
        state=(StateRow(id=0, bytes=20, written=True, views=(ViewRow(name="s", dtype="uint8", shape=(20,)),)),),
        anchors=(
            AnchorRow(kind="gradient", subject="s", occurrence=1, position=1),
            AnchorRow(kind="iteration_end", subject="", occurrence=1, position=2),
        ),
        actions=(ActionRow(tensor=0, offset=0, bytes=20, snapshot=(0, 2), offload=(0, 2), release=(1, 1)),),
    )
    needs = claim(
        training_peak_bytes=20,
        peak_bytes=40,
        lower_bound_bytes=40,
        ideal_peak_bytes=40,
        snapshot_bytes=20,
    )

    def schedule(bandwidth_bytes_per_s: int) -> Schedule:
        return sealed(header(bandwidth_bytes_per_s=bandwidth_bytes_per_s)(needs(short(EASY))))

    verify(schedule(20 * 10**9), graph)
    with pytest.raises(VerificationError, match=r"actions row 0 .*released at position 1 with 1 bytes still to move"):
        verify(schedule(20 * 10**9 - 1), graph)


@pytest.mark.parametrize(
    ("position", "first", "last"),
    [(-5, -4, -6), (-4, -4, -4), (-3, -2, -4), (0, 0, 0), (1, 2, 0), (2, 2, 2), (3, 4, 2), (4, 4, 4), (5, 6, 4)],
)
def test_anchors_around_a_position_are_found_across_iterations(position: int, first: int, last: int) -> None:
    """With anchors at 2 and 4 of 4 steps, position 0 is the previous iteration's end."""
    assert (first_from(position, [2, 4], 4), last_to(position, [2, 4], 4)) == (first, last)
