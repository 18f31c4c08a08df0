"""A machine is lost, with all its processes and its disk: another one has what it had."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from job_of_ranks import Job
from processes import children, command, runs, until
from test_group import groups

from checkflow.checkpointing.saving import save_last
from checkflow.checkpointing.together import Together
from checkflow.distributed import adopting
from checkflow.distributed.marks import Mark, common
from checkflow.distributed.parts import marks_in
from checkflow.distributed.placement import mirrors
from checkflow.store.both.beside import socket_ends
from checkflow.store.both.config import SaverConfig
from checkflow.store.both.connections import Patient, accepted, connected, prove
from checkflow.store.both.messages import FailedReport, Message
from checkflow.store.both.mirroring import Answer, Begin, Commit, Hello, blocks_of, hear, say
from checkflow.store.both.saver_log import take_log
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.ranks import COPIES, copy_of, directory_of
from checkflow.store.format.reader import list_checkpoints
from checkflow.store.format.retention import Retention
from checkflow.store.memory.saver_slots import is_whole
from checkflow.store.memory.shared_memory import NOT_YET_WHOLE, SharedMemory, SlotState, Word
from checkflow.store.mirror.__main__ import Mirror
from checkflow.store.mirror.slots import MirroredSlots, greeted
from checkflow.store.saver import persister as persister_module
from checkflow.store.trainer import mirror_process
from checkflow.store.trainer import sender as sender_module
from checkflow.store.trainer.mirror_process import MirrorAddress, MirrorProcess
from checkflow.store.trainer.rulings import Rulings
from checkflow.store.trainer.sender import MirrorTarget, Sender

NO_END = 1_000_000
PAUSE_S = 0.02
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
KILLS = 5 if NIGHTLY else 1
EVERY = [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("hsdp", 4), ("both", 4), ("zero", 2)]
POLICIES = {"whole": [], "rolling": ["policy=rolling", "link=0.5"], "lowdiff": ["policy=lowdiff", "link=0.7"]}
KINDS = (
    [(kind, size, policy) for kind, size in EVERY for policy in POLICIES if kind != "zero" or policy == "whole"]
    if NIGHTLY
    else [("ddp", 2, "whole"), ("fsdp", 2, "whole"), ("fsdp", 2, "rolling")]
)


def mirrors_of(job: Job, rank: int) -> list[int]:
    return [pid for pid in children(job.ranks[rank].pid) if "checkflow.store.mirror" in command(pid)]


def end(job: Job, lost: int) -> None:
    """Of one machine all processes at once, of the others the trainers, as their collectives fail."""
    job.lose([lost])
    time.sleep(0.3)
    job.kill()
    job.wait()


def copied(root: Path, size: int) -> dict[int, list[int]]:
    """Of each rank the iterations, oldest first, of which others' disks have its part."""
    places = {rank: sorted(root.rglob(str(copy_of(rank, size)))) for rank in range(size)}
    return {
        rank: [e.iteration for place in held for e in list_checkpoints(place)] for rank, held in places.items() if held
    }


def mirrored(job: Job, least: int = 1) -> None:
    """Wait until each rank has said so of this iteration, or a later one."""
    while job.common("mirrored") < least:
        job.reach(min(map(job.iteration, job.ranks)) + 1)


@pytest.mark.parametrize("disks", ["one", "each"])
@pytest.mark.parametrize(("kind", "size", "policy"), KINDS)
def test_a_lost_machine_costs_what_a_killed_process_does(
    kind: str, size: int, policy: str, disks: str, tmp_path: Path
) -> None:
    """Nothing but the first checkpoint of a schedule is on any disk by then."""
    draw, how = random.Random(f"{kind} {size} {policy} {disks}"), POLICIES[policy]
    store, resumed = tmp_path / ("store" if disks == "one" else "disk-{rank}"), 0
    for _ in range(KILLS):
        with Job(size, kind, store, NO_END, PAUSE_S, "persist_every=1000000", "replicate=1", *how) as job:
            if how and not resumed:  # later it is kept
                job.learned()
            mirrored(job, 1 + max(map(job.iteration, job.ranks)))
            job.reach(max(map(job.iteration, job.ranks)) + draw.randint(1, 5))
            lost = draw.randrange(size)
            end(job, lost)
            begun, promised = job.begun(), job.common("mirrored")
        shutil.rmtree(Path(str(store).format(rank=lost)) / directory_of(lost, size))
        with Job(size, kind, store, begun + 1, 0, "replicate=1", *how) as job:
            found = job.done()
        (now,) = {iteration for iteration, _ in found.values()}
        assert resumed < promised <= now <= begun
        resumed = begun + 1
    assert {rank: held[-1:] for rank, held in copied(tmp_path, size).items()} == {
        rank: [resumed] for rank in range(size)
    }
    ends = []
    for place in (store, tmp_path / "uninterrupted"):
        with Job(size, kind, place, resumed + 3, 0) as job:
            ends.append({rank: digest for rank, (_, digest) in job.done().items()})
    assert ends[0] == ends[1]
    assert not copied(tmp_path, size), "without mirrors they are needed for nothing once each rank has its own"


@pytest.mark.parametrize("size", [2, 3])
def test_who_ends_as_it_should_leaves_each_part_on_two_machines(size: int, tmp_path: Path) -> None:
    """A disk may be lost while nothing runs; and of the copies of the run before none is taken for a newer one."""
    store, every = tmp_path / "disk-{rank}", ("persist_every=5", "when_full=wait", "replicate=1")
    for iterations in (7, 9):
        with Job(size, "ddp", store, iterations, 0, *every) as job:
            found = job.done()
        assert {resumed for resumed, _ in found.values()} == {0 if iterations == 7 else 7}
        assert copied(tmp_path, size) == {rank: [iterations] for rank in range(size)}
        shutil.rmtree(tmp_path / "disk-1")
    with Job(size, "ddp", store, 0, 0, *every) as job:
        assert {rank: (9, digest) for rank, (_, digest) in found.items()} == job.done()


@pytest.mark.parametrize("policy", ["whole", "rolling"])
def test_what_is_in_one_place_after_a_restart_is_told_and_goes_to_mirrors(policy: str, tmp_path: Path) -> None:
    """The machine that was lost held the part of another one, too. So the next one may be lost before anything was
    trained. Where nothing was lost nothing is told."""
    store, every = tmp_path / "disk-{rank}", ["persist_every=5", "when_full=wait", "replicate=1", *POLICIES[policy]]
    told, found = [], []
    for iterations in (7, 7, 7, 7, 9):
        with Job(2, "fsdp", store, iterations, 0, *every) as job:
            found.append(job.done())
            told.append([line for line in job.errors[0] if "no other rank's disk" in line])
        if len(told) in (2, 3):
            shutil.rmtree(tmp_path / f"disk-{3 - len(told)}")
    assert [len(lines) for lines in told] == [0, 0, 1, 1, 0]
    assert "has what rank 0 has of iteration 7; it goes to the mirrors now" in told[2][0]
    assert [{iteration for iteration, _ in each.values()} for each in found] == [{0}, {7}, {7}, {7}, {7}]
    assert found[1] == found[2] == found[3]


def test_copies_go_once_a_checkpoint_of_this_run_is_on_every_disk(tmp_path: Path) -> None:
    """Also where it starts over, and restores nothing."""
    first, _ = groups(2)
    together = Together(first, tmp_path, print)
    held = together.store / COPIES / directory_of(1, 2)
    held.mkdir(parents=True)
    together.agreement.attempt = 3
    together.agreement.on_whole(Mark(2, 7), 1)
    together._held.close(orderly=True)
    assert held.is_dir()
    together.agreement.on_whole(Mark(3, 1), 2)
    together._held.close(orderly=True)
    assert not (together.store / COPIES).exists()


def test_copies_stay_until_a_mirror_has_others(tmp_path: Path) -> None:
    """A machine is lost right after the job went on from what was on another one: nothing was trained since."""
    store, lost = tmp_path / "disk-{rank}", tmp_path / "disk-1" / directory_of(1, 2)
    with Job(2, "ddp", store, NO_END, PAUSE_S, "persist_every=1000000", "replicate=1") as job:
        mirrored(job, 4)
        end(job, 1)
        promised = job.common("mirrored")
    found = []
    for iterations in (0, 0, promised + 20):
        shutil.rmtree(lost)
        with Job(2, "ddp", store, iterations, 0, "replicate=1") as job:
            found.append({iteration for iteration, _ in job.done().values()})
    assert found[0] == found[1] == found[2] and min(found[0]) >= promised
    assert copied(tmp_path, 2) == {rank: [promised + 20] for rank in range(2)}, "and no older ones"


def test_a_copy_that_does_not_verify_is_missed_by_all(tmp_path: Path) -> None:
    every = ("persist_every=1", "when_full=wait")  # so that the two newest are where they are looked for
    with Job(2, "ddp", tmp_path, NO_END, PAUSE_S, *every, "replicate=1") as job:
        mirrored(job, 4)
        writing = children(job.ranks[0].pid)
        end(job, 1)
    while any(map(runs, writing)):
        time.sleep(0.01)
    shutil.rmtree(tmp_path / directory_of(1, 2))
    copies = marks_in(tmp_path / directory_of(0, 2) / copy_of(1, 2))
    newest, older = common([copies, marks_in(tmp_path / directory_of(0, 2))])[:2]
    file = copies[newest].checkpoint.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    with Job(2, "ddp", tmp_path, newest.iteration + 1, 0) as job:
        assert {resumed for resumed, _ in job.done().values()} == {older.iteration}
        said = "\n".join(line for lines in job.errors.values() for line in lines)
    assert f"iteration {newest.iteration} of attempt {newest.attempt}: rank 1: from rank 0: model.safetensors" in said


def test_ranks_that_are_numbered_otherwise_find_their_parts(tmp_path: Path) -> None:
    """On machines with a disk each, what was one rank's lies where another one runs now."""
    store = tmp_path / "disk-{rank}"
    with Job(3, "ddp", store, 4, 0) as job:
        job.done()
    disks = [tmp_path / f"disk-{rank}" for rank in range(3)]
    aside = tmp_path / "aside"
    renamed = [(disks[0], aside), (disks[1], disks[0]), (disks[2], disks[1]), (aside, disks[2])]
    for old, new in renamed:
        old.rename(new)
    ends = []
    for found in (store, tmp_path / "uninterrupted"):
        with Job(3, "ddp", found, 7, 0) as job:
            ends.append(job.done())
    assert {resumed for resumed, _ in ends[0].values()} == {4}
    assert [digest for _, digest in ends[0].values()] == [digest for _, digest in ends[1].values()]
    for old, new in reversed(renamed):  # each finds what it had at first, and others' newer parts beside it
        new.rename(old)
    with Job(3, "ddp", store, 8, 0) as job:
        assert {resumed for resumed, _ in job.done().values()} == {7}


def test_ranks_that_had_one_disk_find_their_shares_on_others(tmp_path: Path) -> None:
    """They have divided what they have alike; then each goes on where it has its own directory alone."""
    with Job(3, "ddp", tmp_path / "store", 4, 0) as job:
        job.done()
    for rank in range(3):
        disk = tmp_path / f"disk-{rank}"
        disk.mkdir()
        (tmp_path / "store" / directory_of(rank, 3)).rename(disk / directory_of(rank, 3))
    ends = []
    for found in (tmp_path / "disk-{rank}", tmp_path / "uninterrupted"):
        with Job(3, "ddp", found, 6, 0) as job:
            ends.append(job.done())
    assert {resumed for resumed, _ in ends[0].values()} == {4}
    assert [digest for _, digest in ends[0].values()] == [digest for _, digest in ends[1].values()]
    left = [path.name for rank in range(3) for path in sorted((tmp_path / f"disk-{rank}").iterdir())]
    assert left == [directory_of(rank, 3) for rank in range(3)], "what was brought is gone, and nobody's own"


def test_what_does_not_arrive_whole_is_asked_for_in_the_next_place(tmp_path: Path) -> None:
    store = tmp_path / "disk-{rank}"
    with Job(3, "ddp", store, 4, 0, "persist_every=1", "when_full=wait") as job:
        job.done()
    lost = tmp_path / "disk-1"
    for holder in (0, 2):
        place = tmp_path / f"disk-{holder}" / directory_of(holder, 3) / copy_of(1, 3)
        shutil.copytree(lost / directory_of(1, 3), place)
        if holder == 0:  # which is asked first
            file = marks_in(place)[max(marks_in(place))].checkpoint.path / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    shutil.rmtree(lost)
    with Job(3, "ddp", store, 6, 0) as job:
        assert {resumed for resumed, _ in job.done().values()} == {4}


def test_a_mirror_that_died_is_told_of(tmp_path: Path) -> None:
    with Job(2, "ddp", tmp_path, NO_END, PAUSE_S, "replicate=1") as job:
        mirrored(job)
        for pid in mirrors_of(job, 0):
            os.kill(pid, signal.SIGKILL)
        assert set(job.wait().values()) == {1}
        assert any("replicate: rank 0 holds no copies of this rank's checkpoints any more" in s for s in job.errors[1])


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=9))
def test_each_has_one_mirror_on_another_machine(machines: list[str]) -> None:
    found = mirrors(machines)
    assert sorted(found) == list(range(len(machines)))
    assert all(rank != other for rank, other in enumerate(found))
    if 2 * max(Counter(machines).values()) <= len(machines):
        assert all(machines[rank] != machines[other] for rank, other in enumerate(found))


SPEC = FileSpec("model.safetensors", (TensorSpec("weight", "F32", (3_000_000,)),))


class Rank(NamedTuple):
    """One end of a connection, and what receives at the other."""

    end: Connection
    slots: MirroredSlots


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    """It has greeted its mirror, which receives whatever comes. `param`: lanes."""
    lanes = getattr(request, "param", 1)
    ours, theirs = Pipe()
    made: list[MirroredSlots] = []
    greeting = threading.Event()

    def receive() -> None:
        made.append(greeted(theirs))
        greeting.set()
        with pytest.raises(OSError, match=r"gone|closed"):
            while True:
                made[0].receive(theirs)

    thread = threading.Thread(target=receive)
    thread.start()
    config = SaverConfig(Path("/store"), ((SPEC,),) * lanes, Retention(), {}, grouped=True).dump()
    say(ours, Hello(rank=1, size=2, slots=2 * lanes, record_room_bytes=4096))
    ours.send_bytes(config)
    assert hear(ours, Answer).why_not == ""
    greeting.wait()
    yield Rank(ours, made[0])
    ours.close()
    thread.join()
    made[0].close()


def sent(
    rank: Rank, iteration: int, *, whole: bool = True, wrong: bool = False, needs: int = 0, agreed: bool = False
) -> str:
    """Why the mirror has not got it: each iteration stages a slot."""
    layout = Layout.of((SPEC,))
    data = bytearray(layout.size_bytes)
    data[: len(layout.files[0].header)] = layout.files[0].header
    slot = (iteration - 1) % rank.slots._shared.slots
    say(rank.end, Begin(slot=slot, sequence=iteration, iteration=iteration, needs=needs, agreed=agreed))
    rank.end.send_bytes(b"{}")
    hashes = [xxhash.xxh3_128_hexdigest(block) for block in blocks_of(memoryview(data))]
    if wrong:
        data[-1] ^= 1
    for block in blocks_of(memoryview(data)):
        rank.end.send_bytes(block)
    say(rank.end, Commit(whole=whole, blocks="".join(hashes), record=xxhash.xxh3_128_hexdigest(b"{}")))
    return hear(rank.end, Answer).why_not


def test_what_arrives_otherwise_is_not_kept(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reports: list[Message] = []
    assert sent(rank, 1) == ""
    assert sent(rank, 2, wrong=True) == "did not arrive as it was sent"
    assert sent(rank, 4, whole=False) == "was given up"
    rank.slots.write_down(tmp_path, reports.append)
    assert [found.iteration for found in list_checkpoints(tmp_path / copy_of(1, 2))] == [1]
    assert not [report for report in reports if isinstance(report, FailedReport)]


def test_what_memory_has_lost_is_not_written(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is good for nothing that nobody can tell from what was sent."""
    monkeypatch.chdir(tmp_path)
    reports: list[Message] = []
    assert [sent(rank, 1), sent(rank, 2)] == ["", ""]
    rank.slots._shared.unseal(1)
    rank.slots._shared.slot_bytes(1)[5_000_000] ^= 1
    rank.slots.write_down(tmp_path, reports.append)
    assert [found.iteration for found in list_checkpoints(tmp_path / copy_of(1, 2))] == [1]
    (said,) = [report.message for report in reports if isinstance(report, FailedReport)]
    assert said == f"{tmp_path}: the copy of rank 1's iteration 2 is not what was received, and is not written"


@pytest.mark.parametrize("rank", [2], indirect=True)
def test_what_came_without_its_other_parts_is_not_kept(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of lanes each slot completes a checkpoint with the one before it, which has to be as it was received."""
    monkeypatch.chdir(tmp_path)
    assert sent(rank, 1, needs=1) == "came without others of its checkpoint's slots"
    assert [sent(rank, 1, needs=NOT_YET_WHOLE), sent(rank, 2, needs=1), sent(rank, 3, needs=1)] == ["", "", ""]
    assert sent(rank, 4, needs=1, wrong=True) == "did not arrive as it was sent"
    assert sent(rank, 5, needs=1) == "came without others of its checkpoint's slots"
    assert [sent(rank, 4, needs=1), sent(rank, 5, needs=1), sent(rank, 6, needs=1)] == ["", "", ""]  # in 1's and 2's
    reports: list[Message] = []
    shared = rank.slots._shared
    shared.unseal(3)
    shared.slot_bytes(3)[5_000_000] ^= 1
    rank.slots.write_down(tmp_path, reports.append)
    assert [found.iteration for found in list_checkpoints(tmp_path / copy_of(1, 2))] == [6]
    said = [report.message for report in reports if isinstance(report, FailedReport)]
    assert said == [
        f"{tmp_path}: the copy of rank 1's iteration {lost} is not what was received, and is not written"
        for lost in (4, 5)
    ]


def test_what_was_filled_again_before_it_was_sent_breaks_no_mirror() -> None:
    """It was of checkpoints alone that count no more; those that need no part of it are whole there again."""
    layout = Layout.of((SPEC,))
    config = SaverConfig(Path("/store"), ((SPEC,),) * 2, Retention(), {}, grouped=True).dump()
    shared = SharedMemory.create([layout] * 2, slots=6, record_room_bytes=4096, config=config)
    while shared.pages.wait_for_more():
        pass
    with socket.create_server(("localhost", 0)) as listener:
        mirror, port = Mirror(listener, "key"), listener.getsockname()[1]
        threading.Thread(target=mirror.receive, daemon=True).start()
        sender = Sender(shared, MirrorTarget(1, 2, 0, MirrorAddress("localhost", port, "key")))
        told = list[int]()

        def stage(sequence: int, slot: int, needs: int, *, lost: bool = False) -> None:
            shared.put_record(slot, sequence, sequence, b"{}", needs)
            shared.set_word(slot, Word(SlotState.FREE if lost else SlotState.STAGED, sequence))
            sender.send(slot, sequence, sequence, None if needs == NOT_YET_WHOLE else lambda: told.append(sequence))

        stage(1, 0, NOT_YET_WHOLE)
        stage(2, 1, 1)
        stage(3, 2, 1, lost=True)
        for sequence in range(4, 7):
            stage(sequence, sequence - 1, 1)
        until(lambda: len(told) == 5)
        sender.close()
    assert told == [2, 3, 4, 5, 6] and not sender.trouble
    assert [sent.iteration for sent in sender.sent] == [2, 5, 6]
    (slots,) = mirror._slots
    assert [is_whole(slots._shared, slot) for slot in range(6)] == [False, True, False, False, True, True]
    shared.close()


@pytest.mark.parametrize(("agreed", "written"), [(False, [1, 3]), (True, [3, 4])])
def test_the_slots_before_are_kept_until_all_have_a_checkpoint_in_those_that_follow(
    agreed: bool, written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they hold is on the rank's disk, which is lost with it."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("localhost", 0)) as listener:
        mirror, port = Mirror(listener, "key"), listener.getsockname()[1]
        threading.Thread(target=mirror.receive, daemon=True).start()

        def begin(lanes: int) -> Rank:
            before = len(mirror._slots)
            config = SaverConfig(Path("/store"), ((SPEC,),) * lanes, Retention(), {}, grouped=True).dump()
            end = connected("localhost", port, "key", 60.0)
            say(end, Hello(rank=1, size=2, slots=2 * lanes, record_room_bytes=4096))
            end.send_bytes(config)
            assert hear(end, Answer).why_not == ""
            until(lambda: len(mirror._slots) > before)
            return Rank(end, mirror._slots[-1])

        first = begin(1)
        assert sent(first, 1) == ""
        first.end.close()
        rank = begin(2)
        assert sent(rank, 2, needs=NOT_YET_WHOLE) == sent(rank, 3, needs=1) == ""
        assert len(mirror._slots) == 2
        if agreed:
            assert sent(rank, 4, needs=1, agreed=True) == ""
            until(lambda: len(mirror._slots) == 1)
        directory = os.open(tmp_path, os.O_RDONLY)
        mirror.write_down(directory)
        os.close(directory)
        rank.end.close()
    assert sorted(found.iteration for found in list_checkpoints(tmp_path / copy_of(1, 2))) == written


def shared_of(slots: int) -> SharedMemory:
    config = SaverConfig(Path("/store"), ((SPEC,),), Retention(), {}, grouped=True).dump()
    made = SharedMemory.create([Layout.of((SPEC,))], slots=slots, record_room_bytes=4096, config=config)
    while made.pages.wait_for_more():
        pass
    return made


@contextlib.contextmanager
def mirror_that_stops() -> Iterator[tuple[Sender, list[int]]]:
    """As one whose machine did: the kernel takes what is sent, for as long as its buffers have room. Two are sent."""
    shared = shared_of(3)
    with socket.create_server(("localhost", 0)) as listener:
        address = MirrorAddress("localhost", listener.getsockname()[1], "key")
        held: list[Patient] = []

        def stops() -> None:
            connection = accepted(listener, 60.0)
            prove(connection, "key")
            hear(connection, Hello)
            connection.recv_bytes()
            say(connection, Answer())
            held.append(connection)

        threading.Thread(target=stops, daemon=True).start()
        sender, told = Sender(shared, MirrorTarget(1, 2, 0, address)), list[int]()
        for sequence in (1, 2):
            shared.put_record(sequence, sequence, sequence, b"{}")
            shared.set_word(sequence, Word(SlotState.STAGED, sequence))
            sender.send(sequence, sequence, sequence, partial(told.append, sequence))
        until(lambda: bool(held))
        yield sender, told
        sender.close()
        held.pop().close()
    shared.close()


def test_an_orderly_end_waits_until_a_mirror_has_the_last_checkpoint(tmp_path: Path) -> None:
    """However long that takes; where it has nothing at all, nobody waits."""
    with mirror_that_stops() as (sender, _):
        rulings, waits = Rulings.__new__(Rulings), list[bool]()
        rulings._sender = None
        rulings.await_mirror(600.0)
        rulings._sender = sender

        def wait(_: float) -> None:
            waits.append(sender.pending)
            if len(waits) == 3:
                assert sender._connection is not None
                sender._connection.hang_up()  # what was not sent never will be

        rulings._saver = SimpleNamespace(wait=wait)  # type: ignore[assignment]
        rulings.await_mirror(600.0)
        assert waits[:3] == [True] * 3 and not sender.pending
    executor, asked = SimpleNamespace(unsaved=False, drain=lambda: True), list[float]()
    handle = SimpleNamespace(drain=lambda _: True, rulings=SimpleNamespace(await_mirror=asked.append))
    save_last(SimpleNamespace(executor=executor, handle=handle), pytest.fail, tmp_path, ranks=True)  # type: ignore[arg-type]
    assert len(asked) == 1


def test_who_waits_for_a_mirror_to_write_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mirror_process, "let_through", interrupted)
    mirror = MirrorProcess.__new__(MirrorProcess)
    mirror._end, theirs = socket_ends()
    with theirs, pytest.raises(KeyboardInterrupt):
        mirror.end(pytest.fail, pytest.fail)
    assert mirror._end.fileno() == -1


def test_a_mirror_that_does_not_answer_is_an_error_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "ANSWER_S", 0.2)
    with mirror_that_stops() as (sender, told):
        until(lambda: told == [1, 2])
        (trouble,) = sender.trouble
        assert "holds no copies of this rank's checkpoints any more (it does not answer within 0.2 s)" in trouble


def test_who_ends_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its thread go on with a descriptor that is somebody else's by then."""
    monkeypatch.setattr(sender_module, "CLOSE_S", 1.0)
    with mirror_that_stops() as (sender, told):
        began = time.monotonic()
        sender.close()
        assert time.monotonic() < began + 30 and not sender._thread.is_alive()
        assert told == [1] and not sender.trouble


def test_whoever_comes_to_a_mirror_and_says_nothing_keeps_nobody_waiting() -> None:
    """Anything on the network may: a scan, or a rank whose machine was lost."""
    shared = shared_of(2)
    with socket.create_server(("localhost", 0)) as listener:
        mirror, port = Mirror(listener, "key"), listener.getsockname()[1]
        threading.Thread(target=mirror.receive, daemon=True).start()
        with socket.create_connection(("localhost", port)), socket.create_connection(("localhost", port)):
            sender, told = Sender(shared, MirrorTarget(1, 2, 0, MirrorAddress("localhost", port, "key"))), list[int]()
            shared.put_record(0, 1, 1, b"{}")
            shared.set_word(0, Word(SlotState.STAGED, 1))
            sender.send(0, 1, 1, lambda: told.append(1))
            until(lambda: told == [1])
            assert not sender.trouble and len(sender.sent) == 1
            sender.close()
    shared.close()


def test_nor_does_who_comes_to_a_rank_that_hands_out_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopting, "address_here", lambda _: "localhost")
    began = time.monotonic()
    with (
        adopting._serving({}, 60.0, None) as (host, port, key),
        socket.create_connection((host, port)),
        connected(host, port, key, 60.0) as asking,
    ):
        asking.send_bytes(b"0 0 7")
        with pytest.raises(EOFError):  # it has no such part
            asking.recv_bytes()
    assert time.monotonic() < began + 30


@pytest.mark.parametrize("listens", [True, False])
def test_where_all_ranks_ended_the_last_checkpoint_alone_is_written_and_the_trainer_hears_of_it(
    listens: bool, rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not hear, because it is gone since, the next one is told."""
    monkeypatch.chdir(tmp_path)
    assert [sent(rank, 1), sent(rank, 2)] == ["", ""]
    with socket.create_server(("localhost", 0)) as listener:
        mirror, heard = Mirror(listener, "key"), list[str]()
        mirror._add(rank.slots)

    def hears(line: str) -> bool:
        heard.append(line)
        return listens

    directory = os.open(tmp_path, os.O_RDONLY)
    mirror.write_down(directory, hears)
    assert [found.iteration for found in list_checkpoints(tmp_path / copy_of(1, 2))] == [2]
    rank.slots._shared.durable_sequence = 0
    rank.slots._shared.unseal(1)
    rank.slots._shared.slot_bytes(1)[5_000_000] ^= 1
    mirror.write_down(directory, hears)
    log = take_log(tmp_path, directory)
    os.close(directory)
    (line,) = heard
    assert "the copy of rank 1's iteration 2 is not what was received" in line
    assert [line in each for each in log] == ([] if listens else [True])


def test_a_bug_in_writing_down_is_told_to_the_next_trainer(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror has nobody else to tell, and goes on with what other slots hold."""

    def fails(*_: object, **_named: object) -> None:
        raise TypeError("not foreseen")

    monkeypatch.chdir(tmp_path)
    assert [sent(rank, 1), sent(rank, 2)] == ["", ""]
    with socket.create_server(("localhost", 0)) as listener:
        mirror = Mirror(listener, "key")
        mirror._add(rank.slots)
    monkeypatch.setattr(persister_module, "next_serial", fails)
    directory = os.open(tmp_path, os.O_RDONLY)
    mirror.write_down(directory)
    monkeypatch.setattr(rank.slots, "write_down", fails)
    mirror.write_down(directory)
    lines = take_log(tmp_path, directory)
    os.close(directory)
    assert ["TypeError: not foreseen" in line and "internal error" in line for line in lines] == [True] * 3
    assert "iteration 1 cannot be made durable" in lines[0] and "iteration 2" in lines[1]
    assert "the copies of rank 1 cannot be written" in lines[2]
