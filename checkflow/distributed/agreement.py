"""What ranks agree on while they train, in a thread of its own: nobody waits for it.

    every rank:         counts itself under the matter's name, or leaves there that it is void
    the last to count:  rules, and leaves the ruling there
    every rank:         finds it

So each rank hears the same ruling, whoever made it, and there is none while a rank has not come to it. What a rank has
not heard yet it has to act on as if there were none. A matter is forgotten by the last rank that was through with it:
some may come to it long after others, for what they have staged is on its way to another machine.

A rank may say one thing twice, as what it has verified again: it counts once, is through once, and hears one ruling.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from checkflow import strictjson
from checkflow.distributed.group import Group, reached
from checkflow.distributed.marks import Mark
from checkflow.distributed.pulse import Pulse
from checkflow.errors import PeerError
from checkflow.state.host.objects import Vouches

_PAUSE_S = (0.001, 0.02)  # between looks, at first and at most
_SLOW = ("uploads", "uploaded")  # kinds of matters for which ranks take minutes
_SLOW_S = 0.5  # between looks at those
_KNOWN = 1000  # of a kind, names that a rank knows the ruling of; it says each once
_LISTENED = 64  # of a kind, matters whose ruling is listened for: more than there are slots
_CLOSE_S = 30.0  # for a store that does not answer
_VOID = "null"  # a ruling is JSON, and none of them rules nothing
_NO_RULING = "?"  # no JSON
_LAG = "lag"  # the greatest that any rank ever had; "lag/3": rank 3's
_WHOLE_EVERY = "whole every"  # the greatest that any rank ever had
_PARTED = "parted"  # a ruling: what one rank saves for others some rank lacks
_OWN = "attach what DistributedDataParallel wraps (ddp.module), so that each rank saves all of its own"
_WHY_PARTED = (
    "ranks that train the same parameters keep other optimizer state of them, as where they divide an optimizer's work "
    f"by hand, so that no checkpoint has all of it; {_OWN}"
)
_WHY_DIFFER = (
    "ranks that train the same parameters have other values of them, of which a checkpoint takes one rank's, so that a "
    "resumed run will differ: gradients that are not summed (no_sync() around the last backward pass, a layer that was "
    "frozen when it was wrapped), updates that only some ranks make (Join, where some have fewer batches), step() left "
    f"out on a rank, or within Join, do that; {_OWN}"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Matter:
    kind: str
    name: str
    rules: Callable[[], object]
    agreed: Callable[[object], None]  # with None where it is void
    staged: Mark | None = None  # what every rank has to stage
    vouches: Vouches = (0, 0)
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Void:
    """Of this matter there will be no ruling but that it is void."""

    kind: str
    name: str


class Agreement:
    """Of one group. `attempt` is part of what checkpoints are called: a restore begins anew.

    `on_whole`: called in the thread with each checkpoint that every rank has verified, and this one's serial of it.
    `on_counted`: called in the thread whenever one counts, since every rank has staged its part.
    """

    def __init__(self, group: Group, tell: Callable[[str], None] = lambda _: None) -> None:
        """`tell`: called in the thread with what a person should know though training stands still."""
        self.attempt = 0
        self.vouches: Mapping[int, Vouches] = {}  # by iteration
        self.on_whole: Callable[[Mark, int], None] = lambda _mark, _serial: None
        self.on_counted: Callable[[], None] = lambda: None
        self._group = group
        self._pulse = Pulse(group, tell)
        self._said: queue.SimpleQueue[_Matter | _Void | None] = queue.SimpleQueue()
        self._waiting: dict[str, list[_Matter]] = {}  # by kind
        self._counted: dict[str, OrderedDict[str, object]] = {}  # by kind: what this rank has counted itself under
        self._past: dict[str, OrderedDict[str, object]] = {}  # by kind: what this rank is through with, and rulings
        self._trouble: str | None = None
        self._failure: str | None = None
        self._ended_by = ""  # what ended the thread
        self._is_told = False
        self._differed = False  # which was told
        self._next_slow_s = 0.0  # time.monotonic
        self._is_late = False  # some rank is, and that was told
        self._thread: threading.Thread | None = None  # until there is something to say
        self._starting = threading.Lock()

    @property
    def deadline_s(self) -> float:
        """See store.trainer.peers.Peers."""
        return self._group.deadline_s

    def lags(self, iterations: int) -> None:
        """See there."""
        with reached():
            self._group.values.set(f"{_LAG}/{self._group.rank}", str(iterations))
        self._at_least(_LAG, iterations)

    def any_lags_more(self, iterations: int) -> bool:
        """See there. Ranks are asked one by one only where some rank ever was as late."""
        if self._read(_LAG) <= iterations:
            return False
        return any(self._read(f"{_LAG}/{rank}") > iterations for rank in range(self._group.size))

    def reads_whole(self, every: int) -> None:
        """See there."""
        self._at_least(_WHOLE_EVERY, every)

    def whole_every(self) -> int:
        """See there."""
        return self._read(_WHOLE_EVERY)

    def _at_least(self, name: str, number: int) -> None:
        """From now on a number that all ranks set is no less than this."""
        before = self._read(name)
        with reached():
            while before < number:
                before = int(self._group.values.compare_set(name, str(before) if before else "", str(number)))

    def _read(self, name: str) -> int:
        """A number that ranks have set, or 0."""
        with reached():
            return int(self._group.values.compare_set(name, "0", "0"))

    def staging(
        self, iteration: int, rules: Callable[[], bool], agreed: Callable[[bool | None], None]
    ) -> Callable[[], None]:
        """See there."""

        def ruled(ruling: object) -> None:
            if ruling == _PARTED:
                self._failure, ruling = _WHY_PARTED, None
            elif isinstance(ruling, list):
                self._trouble = self._trouble if self._differed else _WHY_DIFFER
                self._differed, ruling = True, ruling[0]
            agreed(None if ruling is None else bool(ruling))
            if ruling is not None:
                self.on_counted()

        mark, vouches = Mark(self.attempt, iteration), self.vouches.get(iteration, (0, 0))
        return partial(self._put, _Matter("staged", _name(mark), rules, ruled, mark, vouches))

    def skipped(self, iteration: int) -> None:
        """See there."""
        self._put(_Void("staged", _name(Mark(self.attempt, iteration))))

    def verified(self, attempt: int, iteration: int, serial: int, agreed: Callable[[], None]) -> None:
        """See there."""
        mark = Mark(attempt, iteration)

        def all_have(_ruling: object) -> None:
            self.on_whole(mark, serial)
            agreed()

        self._put(_Matter("verified", _name(mark), lambda: True, all_have))

    def choosing(self, turn: int, wanted: Mark, chosen: Callable[[Mark | None], None]) -> None:
        """This rank is free for this turn of uploading, in which it would upload that one; the last rank that is free
        chooses. `chosen` is called in the thread: with None where some rank will never be free again."""

        def ruled(ruling: object) -> None:
            chosen(Mark(*ruling) if isinstance(ruling, list) else None)

        self._put(_Matter("uploads", f"{turn}", lambda: wanted, ruled))

    def choosing_no_more(self, turn: int) -> None:
        """This rank will never be free for it, nor for a later one."""
        self._put(_Void("uploads", f"{turn}"))

    def uploaded(self, mark: Mark, ruled: Callable[[bool], None]) -> None:
        """The bucket has this rank's part; `ruled` is called in the thread: whether it has every rank's, or never
        will."""
        self._put(_Matter("uploaded", _name(mark), lambda: True, lambda ruling: ruled(ruling is not None)))

    def not_uploaded(self, mark: Mark) -> None:
        """The bucket will never have this rank's part."""
        self._put(_Void("uploaded", _name(mark)))

    def trouble(self) -> str | None:
        """See there."""
        found, self._trouble = self._trouble, None
        return found

    def failure(self) -> str | None:
        """See there."""
        found, self._failure = self._failure, None
        return found

    def close(self, *, orderly: bool = False, left: str = "") -> None:
        """Agree on nothing more. What was said and not agreed on stays open. `orderly`: others need not look for it;
        `left`: how it leaves them before the end, which they are told where they wait for it."""
        if self._thread is not None:
            self._said.put(None)
            self._thread.join(_CLOSE_S)  # an interpreter that ends while it is in the store's code would abort
        if (orderly or left) and (self._thread is None or not self._thread.is_alive()):
            with contextlib.suppress(PeerError):  # nobody is left to hear it
                self._pulse.ends(left)

    def _put(self, matter: _Matter | _Void) -> None:
        if self._ended_by:  # nobody takes it; that training goes on without checkpoints is an error
            if matter.kind == "staged" and not self._is_told:
                self._failure, self._is_told = self._ended_by, True
            return
        self._said.put(matter)
        with self._starting:  # several threads say something
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkflow-agreement", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause_s = _PAUSE_S[1]
        try:
            while True:
                try:
                    matter = self._said.get(timeout=self._pause_s(pause_s))
                    if matter is None:
                        return
                    self._pulse.moves()
                    self._say(matter)
                    pause_s = _PAUSE_S[0]
                except queue.Empty:
                    pause_s = min(2 * pause_s, _PAUSE_S[1])
                self._hear()
                self._pulse.beat()
                self._look_for_who_is_late()
        except Exception as error:  # noqa: BLE001 (nobody else would hear of it)
            why = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
            self._trouble = self._ended_by = (
                f"nothing more is agreed on with the other ranks, so nothing more is made durable or pruned: {why}"
            )

    def _say(self, matter: _Matter | _Void) -> None:
        values, name = self._group.more, f"{matter.kind}/{matter.name}"
        past = self._past.setdefault(matter.kind, OrderedDict())
        if name in past:  # this rank has said so before
            if isinstance(matter, _Matter):
                matter.agreed(past[name])
            return
        with reached():
            if isinstance(matter, _Void):
                self._is_through(matter.kind, name, strictjson.loads(values.compare_set(_ruling(name), "", _VOID)))
                return
            self._waiting.setdefault(matter.kind, []).append(matter)
            counted = self._counted.setdefault(matter.kind, OrderedDict())
            if name not in counted:
                _remember(counted, name, None)
                for key, number in zip(_sums(name), matter.vouches, strict=True):
                    if number:
                        values.add(key, number)
                if values.add(name, 1) == self._group.size:
                    values.compare_set(_ruling(name), "", json.dumps(self._ruled(matter, name)))

    def _ruled(self, matter: _Matter, name: str) -> object:
        """By the last rank to count."""
        if matter.staged is None:
            return matter.rules()
        names, content = (self._group.more.add(key, 0) for key in _sums(name))
        return _PARTED if names else [matter.rules()] if content else matter.rules()

    def _is_through(self, kind: str, name: str, ruling: object) -> None:
        """This rank needs no more of it; the last one forgets it. What some rank never comes to stays in the store."""
        values = self._group.more
        _remember(self._past[kind], name, ruling)
        if values.add(_through(name), 1) == self._group.size:
            for key in (name, _ruling(name), _through(name), *(_sums(name) if kind == "staged" else ())):
                values.delete_key(key)

    def _pause_s(self, pause_s: float) -> float:
        """Uploads take their time, and nothing waits for them."""
        if any(waiting for kind, waiting in self._waiting.items() if kind not in _SLOW):
            return pause_s
        return _SLOW_S if any(self._waiting.values()) else self._pulse.pause_s

    def _hear(self) -> None:
        is_slow_too = time.monotonic() >= self._next_slow_s
        if is_slow_too:
            self._next_slow_s = time.monotonic() + _SLOW_S
        for kind, waiting in self._waiting.items():
            for matter in tuple(waiting) if is_slow_too or kind not in _SLOW else ():
                name, past = f"{kind}/{matter.name}", self._past[kind]
                if name not in past and (ruling := self._asked_for(matter, name)) != _NO_RULING.encode():
                    with reached():
                        self._is_through(kind, name, strictjson.loads(ruling))
                if name in past:
                    waiting.remove(matter)
                    matter.agreed(past[name])
            del waiting[:-_LISTENED]  # not every rank comes to every one

    def _asked_for(self, matter: _Matter, name: str) -> bytes:
        """The ruling that the store has, if any: `get` would wait for one.

        What not every rank has staged of an attempt that a restore has ended is void: some rank never will.
        """
        is_over = matter.staged is not None and matter.staged.attempt < self.attempt
        with reached():
            if is_over:
                return self._group.more.compare_set(_ruling(name), "", _VOID)
            return self._group.more.compare_set(_ruling(name), _NO_RULING, _NO_RULING)

    def _look_for_who_is_late(self) -> None:
        now = time.monotonic()
        staged = self._waiting.get("staged", ())
        late = [each.staged.iteration for each in staged if each.staged and now - each.since > self.deadline_s]
        if late and not self._is_late:
            self._trouble = (
                f"iteration {late[0]} has no part of every rank after {self.deadline_s:g} s, and counts once it has; "
                "call step() on every rank, and see whether all run"
            )
        self._is_late = bool(late)


def _remember(names: OrderedDict[str, object], name: str, ruling: object) -> None:
    names[name] = ruling
    if len(names) > _KNOWN:
        names.popitem(last=False)


def _name(mark: Mark) -> str:
    return f"{mark.attempt}/{mark.iteration}"


def _ruling(name: str) -> str:
    return f"{name}/ruling"


def _through(name: str) -> str:
    return f"{name}/through"


def _sums(name: str) -> tuple[str, str]:
    """Of what ranks vouch for: names, content."""
    return f"{name}/names", f"{name}/content"
