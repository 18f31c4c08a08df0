"""The slots' states, in every order of what trainer and saver may do, and with either killed at any instant."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_store import SMALL, TINY, fill, record_of, trainer_command

from checkflow.errors import StoreError
from checkflow.store.memory.allowance import Allowance, allowance
from checkflow.store.memory.saver_slots import Taken, give_back, give_up, put_off, recover, take_due, take_last
from checkflow.store.memory.shared_memory import SharedMemory, SlotState, Word
from checkflow.store.memory.trainer_slots import Slot, Slots
from checkflow.store.trainer.waiting import Waiting


@dataclass(frozen=True)
class Staged:
    """What the model of the slots remembers."""

    sequence: int
    iteration: int


class SlotMachine(RuleBasedStateMachine):
    """A trainer and a saver that do anything allowed, in any order; the saver may die while persisting."""

    def __init__(self) -> None:
        super().__init__()
        self.iteration = 0
        self.filling: list[Slot] = []
        self.staged: list[Staged] = []
        self.due: set[int] = set()
        self.keep: set[int] = set()
        self.taken: Taken | None = None
        self.asked_again = False  # for the one that is taken
        self.newest_is_gone = False

    @initialize(slots=st.integers(1, 4), when_full=st.sampled_from(["skip", "wait"]))
    def start(self, slots: int, when_full: str) -> None:
        self.shared = SharedMemory.create([TINY], slots=slots, record_room_bytes=100, config=b"{}")
        self.waits = when_full == "wait"
        self.slots = Slots(self.shared, [TINY], "wait" if self.waits else "skip")

    def teardown(self) -> None:
        if hasattr(self, "shared"):
            self.shared.close()

    @rule()
    def acquire(self) -> None:
        slot = self.slots.try_acquire()
        if slot is not None:
            assert slot.index not in [other.index for other in self.filling]
            assert self.taken is None or slot.index != self.taken.index
            self.filling.append(slot)
            if self.shared.slots == 1:  # what it held was tried
                assert not self.due
                self.newest_is_gone = bool(self.staged)
            fill(slot.data, TINY, 255)  # what was there is gone now

    @precondition(lambda self: self.filling)
    @rule(due=st.booleans())
    def stage(self, due: bool) -> None:
        slot = self.filling.pop(0)
        self.iteration += 1
        fill(slot.data, TINY, self.iteration)
        before = {word.sequence for word in self.shared.words() if word.due and word.state is SlotState.STAGED}
        is_due = self.slots.stage(slot, self.iteration, record_of(self.iteration), due=due)
        sequence = self.slots.newest_sequence
        assert sequence is not None
        given_up = set() if self.waits else before - self.keep
        assert is_due == bool(due or given_up or self.shared.slots == 1)
        self.due -= given_up
        self.due |= {sequence} if is_due else set()
        self.newest_is_gone = False
        self.staged.append(Staged(sequence, self.iteration))

    @precondition(lambda self: self.filling)
    @rule()
    def abandon(self) -> None:
        self.slots.abandon(self.filling.pop())

    @rule(keep=st.booleans())
    def ask(self, keep: bool) -> None:
        sequence = self.slots.ask(keep=keep)
        assert sequence == (self.staged[-1].sequence if self.staged and not self.newest_is_gone else None)
        assert sequence == self.slots.newest_sequence
        if sequence is not None and (self.taken is None or self.taken.sequence != sequence):
            self.due.add(sequence)
        self.asked_again |= self.taken is not None and self.taken.sequence == sequence
        if sequence is not None and keep:
            self.keep.add(sequence)
            self.due.add(sequence)

    @precondition(lambda self: self.taken is None)
    @rule()
    def take(self) -> None:
        self.taken, self.asked_again = take_due(self.shared), False
        assert (self.taken is None) == (not self.due)
        if self.taken is not None:
            assert self.taken.sequence == min(self.due)  # none that is due was overwritten
            self.whole(self.taken)

    def whole(self, taken: Taken) -> None:
        staged = Staged(taken.sequence, taken.iteration)
        assert staged in self.staged
        assert taken.record == record_of(taken.iteration)
        expected = SharedMemory.slot_bytes(self.shared, taken.index)
        place = TINY.find("model.safetensors", "w")
        assert bytes(expected[place.offset_bytes : place.end_bytes]) == bytes([taken.iteration % 251]) * 700

    @precondition(lambda self: self.taken is not None)
    @rule(durable=st.booleans())
    def finish(self, durable: bool) -> None:
        assert self.taken is not None
        self.whole(self.taken)  # nobody wrote to it meanwhile
        (give_back if durable else give_up)(self.shared, self.taken)
        if (durable or not self.asked_again) and (self.taken.keep or self.taken.sequence not in self.keep):
            self.due.discard(self.taken.sequence)
            self.keep.discard(self.taken.sequence)
        self.taken = None

    @precondition(lambda self: self.taken is not None)
    @rule()
    def put_off(self) -> None:
        """The disk refuses: under `skip` the newest is tried in its place, so that a slot is free for the next."""
        assert self.taken is not None
        self.whole(self.taken)
        words = self.shared.words()
        newer = [w.sequence for w in words if w.state is SlotState.STAGED and w.sequence > self.taken.sequence]
        put_off(self.shared, self.taken, newest_wins=not self.waits)
        if newer and not self.waits and self.taken.sequence not in self.keep:
            self.due.discard(self.taken.sequence)
            self.due.add(max(newer))
        self.taken = None

    @precondition(lambda self: self.taken is not None)
    @rule()
    def saver_dies(self) -> None:
        assert self.taken is not None
        recover(self.shared)
        self.taken = None

    @invariant()
    def the_newest_staged_is_there(self) -> None:
        if not self.staged or self.newest_is_gone:
            return
        newest = self.staged[-1]
        (index,) = [i for i, word in enumerate(self.shared.words()) if word.sequence == newest.sequence]
        assert self.shared.word(index).state in (SlotState.STAGED, SlotState.PERSISTING)
        assert self.shared.record(index) == (newest.iteration, record_of(newest.iteration))

    @precondition(lambda self: self.taken is None and self.staged)
    @rule()
    def trainer_dies(self) -> None:
        """Its saver finds the newest staged; then go on as if nothing had happened."""
        last = take_last(self.shared)
        newest = self.staged[-1]
        if last is None:
            assert self.newest_is_gone or self.shared.durable_sequence >= newest.sequence
            return
        assert last.sequence == newest.sequence
        self.whole(last)
        recover(self.shared)
        self.due.add(last.sequence)


def test_what_is_asked_for_while_it_is_tried_is_tried_again() -> None:
    """A try that fails began before, and says nothing of the disk since."""
    machine = SlotMachine()
    machine.start(slots=2, when_full="wait")
    machine.acquire()
    machine.stage(due=True)
    machine.take()
    machine.ask(keep=False)
    machine.finish(durable=False)
    machine.take()
    assert machine.taken is not None and machine.taken.sequence == 1
    machine.finish(durable=False)
    machine.take()
    assert machine.taken is None
    machine.teardown()


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(stateful_step_count=40)


def test_what_a_dead_saver_left_due_is_not_overwritten() -> None:
    """A checkpoint that was being persisted when the saver died stays until the next saver takes it."""
    machine = SlotMachine()
    machine.start(slots=3, when_full="skip")
    machine.acquire()
    machine.stage(due=True)
    machine.take()
    machine.acquire()
    machine.stage(due=False)
    machine.saver_dies()
    for _ in range(3):
        machine.acquire()
    machine.take()
    assert machine.taken is not None and machine.taken.sequence == 1
    machine.teardown()


FILLER = """
import os
from small_store import *
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.memory.trainer_slots import Slots
slots = Slots(SharedMemory.attach(int(sys.argv[1])), [SMALL], "skip")
for iteration in range(1, 100_000):
    slot = slots.try_acquire()
    fill(slot.data, SMALL, iteration)
    slots.stage(slot, iteration, record_of(iteration), due=iteration % 3 == 0)
    os.write(1, b"%d\\n" % iteration)
"""


def test_a_trainer_killed_at_any_instant_leaves_a_whole_newest_checkpoint() -> None:
    """Its last word is at most one staged checkpoint old, and every byte of what is found is of one iteration."""
    choose = random.Random(0)
    for _ in range(12):
        shared = SharedMemory.create([SMALL], slots=choose.choice([2, 3]), record_room_bytes=100, config=b"{}")
        command = trainer_command(FILLER, shared.fd)
        with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(shared.fd,)) as trainer:
            assert trainer.stdout is not None
            said = trainer.stdout.readline()
            time.sleep(choose.random() * 0.02)
            trainer.send_signal(signal.SIGKILL)
            said += trainer.stdout.read()
        last_said = int(said.split(b"\n")[-2])
        taken = take_last(shared)
        assert taken is not None
        assert last_said <= taken.iteration <= last_said + 1
        assert taken.record == record_of(taken.iteration)
        data = shared.slot_bytes(taken.index)
        for file in SMALL.files:
            for tensor in file.tensors:
                value = bytes(data[tensor.offset_bytes : tensor.end_bytes])
                assert value == bytes([taken.iteration % 251]) * len(value)
        shared.close()


def test_two_processes_never_have_the_same_slot() -> None:
    """A trainer reuses staged slots while this process takes them: what is taken stays as it is until given back."""
    shared = SharedMemory.create([SMALL], slots=3, record_room_bytes=100, config=b"{}")
    taken_count = 0
    with subprocess.Popen(
        trainer_command(FILLER, shared.fd), stdout=subprocess.DEVNULL, pass_fds=(shared.fd,)
    ) as trainer:
        while taken_count < 300:
            taken = take_due(shared)
            if taken is None:
                continue
            taken_count += 1
            data = shared.slot_bytes(taken.index)
            assert taken.record == record_of(taken.iteration)
            for tensor in SMALL.files[0].tensors:
                value = bytes(data[tensor.offset_bytes : tensor.end_bytes])
                assert value == bytes([taken.iteration % 251]) * len(value)
            give_back(shared, taken)
        trainer.kill()
    shared.close()


def test_a_process_that_is_stopped_in_a_change_blocks_nobody() -> None:
    """The other gives up after its timeout and says so."""
    shared = SharedMemory.create([TINY], slots=2, record_room_bytes=100, config=b"{}")
    script = (
        "import os, fcntl, time\n"
        "fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)\n"
        "os.write(1, b'locked\\n')\ntime.sleep(600)"
    )
    with subprocess.Popen(trainer_command(script, shared.fd), stdout=subprocess.PIPE, pass_fds=(shared.fd,)) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with shared.locked(timeout_s=0.01) as held:
            assert not held
        other.kill()
    with shared.locked(timeout_s=10.0) as held:
        assert held  # the kernel dropped the dead one's lock
    shared.close()


def test_words_pack_into_eight_bytes() -> None:
    """A state is one aligned store, for any sequence number that a run can reach."""
    for state in SlotState:
        for due in (False, True):
            for keep in (False, True):
                word = Word(state, 2**50, due=due, keep=keep)
                assert Word.unpack(word.pack()) == word
                assert word.pack() < 2**64


def test_memory_without_a_magic_number_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 8192)
    with pytest.raises(StoreError, match="is not checkflow's"):
        SharedMemory.attach(fd)
    os.close(fd)


@pytest.mark.parametrize("slots", [0, 57])
def test_the_number_of_slots_is_bounded(slots: int) -> None:
    with pytest.raises(StoreError, match="use 1 to 56"):
        SharedMemory.create([TINY], slots=slots, record_room_bytes=100, config=b"{}")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    """The machine, and each control group from the process's own up to the root, in both versions."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert allowance(proc, groups) is None
    write(proc / "meminfo", "MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    write(proc / "self" / "cgroup", "0::/job/step\n")
    assert allowance(proc, groups) == Allowance(65536, "the machine's available memory")
    for group, limit, usage in (("job/step", "max", 10), ("job", "50000", 30000)):
        write(groups / group / "memory.max", f"{limit}\n")
        write(groups / group / "memory.current", f"{usage}\n")
    write(groups / "job" / "memory.stat", "anon 5\ninactive_file 4000\n")
    found = allowance(proc, groups)
    assert found is not None and found.free_bytes == 24000 and "job/memory.max" in found.limit
    write(proc / "self" / "cgroup", "4:cpu:/x\n3:memory:/box\n")
    write(groups / "memory" / "memory.limit_in_bytes", "1000\n")
    write(groups / "memory" / "memory.usage_in_bytes", "3000\n")
    found = allowance(proc, groups)
    assert found is not None and found.free_bytes == 0 and "memory.limit_in_bytes" in found.limit


def test_this_machine_has_a_limit() -> None:
    found = allowance()
    assert found is not None and found.free_bytes > 2**20


STRAY = """
import ctypes
from small_store import *
from checkflow.store.memory.room import LARGE_BYTES
layout = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (LARGE_BYTES,)),)),))
shared = SharedMemory.create([layout], slots=2, record_room_bytes=100, config=b"{}")
while shared.pages.wait_for_more():
    pass
slots = Slots(shared, [layout], "skip")
for iteration in range(1, 6):  # each slot more than once
    slot = slots.try_acquire()
    slot.view("model.safetensors", "w")[:] = bytes([iteration]) * LARGE_BYTES
    slots.stage(slot, iteration, record_of(iteration), due=False)
taken = take_due(shared) or slots.ask(keep=False) and take_due(shared)
assert taken.iteration == 5
os.write(1, b"staged\\n")
if sys.argv[1] == "pinned":
    shared.pinned = True
    shared.unseal(slot.index)
ctypes.memset(slot.address + int(sys.argv[2]), 9, 1)
os.write(1, b"written\\n")
"""


@pytest.mark.parametrize(
    ("kind", "place", "said"),
    [
        ("plain", 0, "staged\n"),
        ("plain", 2**24 + 5, "staged\n"),
        ("plain", 2**25 + 4096, "staged\n"),
        ("pinned", 0, "staged\nwritten\n"),
    ],
)
def test_a_stray_write_to_a_staged_slot_ends_the_writer(kind: str, place: int, said: str) -> None:
    """Its first byte, the middle, the last tensor's end; and not where a device has the slots, which ignores this."""
    done = subprocess.run(trainer_command(STRAY, kind, place), capture_output=True, text=True, check=False)
    assert done.stdout == said, done.stderr
    assert done.returncode == (0 if kind == "pinned" else -signal.SIGSEGV)


def test_what_is_interrupted_shares_no_number_and_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after a slot is seen as staged, and another after one was taken that nobody knows of."""
    shared = SharedMemory.create([TINY], slots=3, record_room_bytes=100, config=b"{}")
    slots, set_word = Slots(shared, [TINY], "wait"), shared.set_word
    first, lost = slots.try_acquire(), slots.try_acquire()
    assert first is not None and lost is not None

    def interrupted(index: int, word: Word) -> None:
        set_word(index, word)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shared, "set_word", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slots.stage(first, 1, record_of(1), due=False)
    kept = slots.try_acquire()
    assert kept is not None
    slots.reclaim([kept.index])
    slots.stage(kept, 2, record_of(2), due=False)
    words = shared.words()
    assert words[lost.index].state is SlotState.FREE
    assert words[first.index].sequence < words[kept.index].sequence
    shared.close()


@pytest.mark.parametrize("who", ["pending", "awaits_replica", "awaits_agreement"])
def test_what_is_freed_while_it_is_looked_for_is_waited_for(who: str) -> None:
    """By the saver, by what brings a replica on, or by what ranks agree on: between the look and the question."""

    class Freed:
        looks = 0
        pending = awaits_replica = awaits_agreement = False

        def try_acquire(self, _lane: int) -> str | None:
            self.looks += 1
            setattr(self, who, False)
            return "slot" if self.looks > 1 else None

    slots: Any = Freed()
    setattr(slots, who, True)
    quiet: Any = SimpleNamespace(
        pages=SimpleNamespace(refused=False), is_lost=False, hangs=False, wait=lambda _s: None, blocked_ns=0
    )
    found: Any = Waiting(quiet, slots, quiet, quiet, None).for_slot(0, None, lambda: None)
    assert found == "slot"
    with pytest.raises(StoreError, match="all are being filled"):
        slots.looks = -1
        Waiting(quiet, slots, quiet, quiet, None).for_slot(0, None, lambda: None)
