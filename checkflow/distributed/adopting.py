"""A rank without its part of a checkpoint gets it from one that can read it: in a directory on its disk, or a copy."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from pathlib import Path

from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark
from checkflow.distributed.parts import marks_in
from checkflow.distributed.placement import address_here, host_here, unreachable
from checkflow.errors import CorruptStoreError
from checkflow.store.both.connections import Patient, answer, connected, prove
from checkflow.store.format.manifest import BLOCK_BYTES, MANIFEST
from checkflow.store.format.ranks import COPIES, directory_of, ranks_in
from checkflow.store.format.reader import Checkpoint
from checkflow.store.format.received import receive_checkpoint

Seen = Mapping[int, Mapping[Mark, Checkpoint]]
"""Of each rank the parts that can be read here."""


def seen_in(root: Path, size: int, strange: Collection[int]) -> dict[int, dict[Mark, Checkpoint]]:
    """In the directories of the ranks that are `strange`, and in the copies that any holds of others."""
    found: dict[int, dict[Mark, Checkpoint]] = {}
    places = [(rank, root) for rank in ranks_in(root).get(size, ()) if rank in strange]
    places += [(rank, held) for held in _held(root, size) for rank in ranks_in(held).get(size, ())]
    for rank, place in places:
        parts = marks_in(place / directory_of(rank, size))
        found[rank] = {mark: part.checkpoint for mark, part in parts.items()} | found.get(rank, {})
    return found


def _held(root: Path, size: int) -> Iterator[Path]:
    held = (root / directory_of(rank, size) / COPIES for rank in ranks_in(root).get(size, ()))
    return (path for path in held if path.is_dir())


@dataclass(frozen=True, slots=True)
class Places:
    """Who can read what: by rank its own parts, and by rank those of each that it sees; and what is stored elsewhere of
    each rank's, which that one can have from there."""

    own: tuple[frozenset[Mark], ...]
    seen: tuple[Mapping[int, frozenset[Mark]], ...]
    stored: tuple[frozenset[Mark], ...]

    def everywhere(self) -> set[Mark]:
        """The checkpoints of which every rank's part can be read by some rank."""
        found = {mark for marks in (*self.own, *self.stored) for mark in marks} | {
            mark for seen in self.seen for marks in seen.values() for mark in marks
        }
        return {mark for mark in found if all(self._is_anywhere(rank, mark) for rank in range(len(self.own)))}

    def _is_anywhere(self, rank: int, mark: Mark) -> bool:
        return mark in self.own[rank] or mark in self.stored[rank] or bool(self.of(rank, mark))

    def of(self, rank: int, mark: Mark) -> list[int]:
        """The ranks that can read a rank's part, itself first."""
        viewers = [viewer for viewer, seen in enumerate(self.seen) if mark in seen.get(rank, ())]
        return sorted(viewers, key=lambda viewer: (viewer != rank, viewer))

    def with_own(self, mark: Mark) -> Places:
        """The same once every rank has its own part of it, and hands that out, too."""
        seen = ({**each, rank: each.get(rank, frozenset()) | {mark}} for rank, each in enumerate(self.seen))
        return Places(self.own, tuple(seen), self.stored)

    def lacking(self, mark: Mark) -> list[int]:
        """Ranks that have no part of it in their own directory."""
        return [rank for rank, own in enumerate(self.own) if mark not in own]


def adopt(
    group: Group,
    wanted: Mapping[int, Path],
    mark: Mark,
    places: Places,
    seen: Seen,
    fetch: Callable[[Mark], str] = lambda _: "",
) -> list[str]:
    """Bring the parts of the ranks that are `wanted` here into these directories; every rank calls this. Why a rank has
    not all that it wants, by rank.

    A part that does not arrive as it was written is asked for in the next place, the last of which is what `fetch` has
    stored of this rank's own; it returns what is wrong with it.
    """
    with _serving(seen, group.deadline_s, group.met_at) as own:
        addresses = group.gather("restore()", [*own, host_here()])
        whys: list[str] = []
        for rank, store in wanted.items():
            viewers = places.of(rank, mark)
            why = _adopted(group, rank, store, mark, [(viewer, addresses[viewer]) for viewer in viewers])
            if (why or not viewers) and rank == group.rank and mark in places.stored[rank]:
                why = fetch(mark)
            whys += [why] if why else []
        return [str(said) for said in group.gather("restore()", "; ".join(whys))]


def _adopted(group: Group, rank: int, store: Path, mark: Mark, places: Sequence[tuple[int, object]]) -> str:
    """From the first of these ranks, with their addresses, that has it whole; why from none."""
    why = ""
    for viewer, said in places:
        host, port, key, machine = _address(said)
        if why := unreachable(host, machine):
            why = f"from rank {viewer}: {why}"
            continue
        try:
            store.mkdir(parents=True, exist_ok=True)
            with connected(host, port, key, group.deadline_s) as connection:
                _fetch(connection, rank, store, mark)
        except (OSError, EOFError, AuthenticationError, CorruptStoreError) as error:
            why = f"from rank {viewer}: {error or type(error).__name__}"
        else:
            return ""
    return why


def _address(said: object) -> tuple[str, int, str, str]:
    assert isinstance(said, list)
    host, port, key, machine = said
    return str(host), int(port), str(key), str(machine)


def _fetch(connection: Patient, rank: int, store: Path, mark: Mark) -> None:
    connection.send_bytes(f"{rank} {mark.attempt} {mark.iteration}".encode())
    receive_checkpoint(store, connection.recv_bytes(), iter(connection.recv_bytes, None))


@contextlib.contextmanager
def _serving(seen: Seen, limit_s: float, met_at: tuple[str, int] | None) -> Iterator[tuple[str, int, str]]:
    """Hand out what can be read here, to who knows the key. Yields host, port, key."""
    host, key = address_here(met_at), secrets.token_hex(16)
    listener = socket.create_server((host, 0), backlog=128)
    port = int(listener.getsockname()[1])
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            answer(listener, limit_s, lambda connection: _hand_out(connection, key, seen))

    thread = threading.Thread(target=serve, name="checkflow-adopting", daemon=True)
    thread.start()
    try:
        yield host, port, key
    finally:
        ending.set()
        with contextlib.suppress(OSError), socket.create_connection((host, port), limit_s):  # so that it sees that
            pass
        thread.join(limit_s)
        listener.close()


def _hand_out(connection: Patient, key: str, seen: Seen) -> None:
    with contextlib.suppress(OSError, EOFError, AuthenticationError), connection:
        prove(connection, key)
        rank, attempt, iteration = map(int, connection.recv_bytes(256).split())
        checkpoint = seen.get(rank, {}).get(Mark(attempt, iteration))
        if checkpoint is None:
            return
        connection.send_bytes((checkpoint.path / MANIFEST).read_bytes())
        for entry in checkpoint.manifest.files:
            with (checkpoint.path / entry.name).open("rb") as file:
                for block in iter(lambda: file.read(BLOCK_BYTES), b""):
                    connection.send_bytes(block)
