"""What a rank holds of another one's checkpoints: in its mirror's memory while they train, on its disk once they ended.

So with `replicate` each rank's part of the newest checkpoint that counted is on two machines, whether or not any runs.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from functools import partial
from pathlib import Path

from checkflow.checkpointing.voices import Hearers
from checkflow.distributed.adopting import seen_in
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark
from checkflow.distributed.placement import address_here, host_here, machine_here, mirrors, unreachable
from checkflow.errors import InputError
from checkflow.store.format.ranks import COPIES, ranks_have
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.mirror_process import MirrorAddress, MirrorProcess
from checkflow.store.trainer.sender import MirrorTarget


class HeldForOthers:
    """Of one rank, which writes to `store`."""

    def __init__(self, group: Group, store: Path, hearers: Hearers) -> None:
        self._group = group
        self._copies = store / COPIES  # what mirrors wrote down when their training ended
        self._hearers = hearers
        self._mirror: MirrorProcess | None = None
        self._removing: threading.Thread | None = None
        self._counted = False  # some checkpoint of this run has, so that mirrors have it

    def start(self, handle: StoreHandle) -> None:
        """Each rank's checkpoints go to the memory of another one's machine, too; every rank calls this.

        Raises StoreError, PeerError, InputError where that machine says no address at which this one reaches it.
        """
        self._mirror = handle.start_mirror(address_here(self._group.met_at))
        address = self._mirror.address
        said = self._group.gather("attach()", [machine_here(), address.host, address.port, address.key, host_here()])
        everyone = [each for each in said if isinstance(each, list)]
        machines = [str(each[0]) for each in everyone]
        if self._group.rank == 0 and len(set(machines)) == 1:
            self._hearers.notify(
                "replicate: all ranks run on one machine, which is lost with what they hold of each other"
            )
        rank = mirrors(machines)[self._group.rank]
        _, host, port, key, name = everyone[rank]
        if why := unreachable(str(host), str(name)):
            raise InputError(f"replicate: rank {rank} cannot have the mirror of rank {self._group.rank}: {why}")
        target = MirrorTarget(self._group.rank, self._group.size, rank, MirrorAddress(str(host), int(port), str(key)))
        handle.mirror_at(target)

    def restored(self) -> None:
        """Every rank has its part of what is restored on its own disk, all that is promised without mirrors."""
        if self._mirror is None:
            self.drop_copies()

    def counted(self) -> None:
        """Called whenever a checkpoint counts, which mirrors have by then."""
        self._counted = True
        self.drop_copies()

    def lacks_copies(self, root: Path, mark: Mark) -> bool:
        """Whether of what was restored some rank's part is on no other one's disk, as the one that held it was lost;
        that is told. Every rank calls this, and hears the same."""
        if self._mirror is None or self._counted:
            return False
        rank, size = self._group.rank, self._group.size
        seen = seen_in(root, size, set(range(size)) - {rank})
        said = self._group.gather("restore()", [other for other, parts in seen.items() if mark in parts])
        held = {other for each in said if isinstance(each, list) for other in each}
        if (alone := [each for each in range(size) if each not in held]) and rank == 0:
            self._hearers.notify(
                f"{root}: replicate: no other rank's disk has what {ranks_have(alone)} of iteration {mark.iteration}; "
                "it goes to the mirrors now, and until it is there a machine that is lost with it costs all"
            )
        return bool(alone)

    def drop_copies(self) -> None:
        """A later checkpoint is where these were for, or nobody needs them. In a thread, for who agrees has no time for
        a slow disk. What is left where that is cut does not verify."""
        if self._removing is None and self._copies.is_dir():
            remove = partial(shutil.rmtree, self._copies, ignore_errors=True)
            removing = threading.Thread(target=remove, name="checkflow-copies", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is to be had; a later run does it
                removing.start()
                self._removing = removing

    def close(self, *, orderly: bool) -> None:
        """`orderly`: every rank has the same last checkpoint on its disk, and waits until another one's disk has it,
        too. Else the mirror writes down all it holds, and is not waited for."""
        if self._removing is not None:
            self._removing.join()  # it would remove what is written next
        if self._mirror is not None and orderly:
            self._mirror.end(self._hearers.notify, self._hearers.tell)
        elif self._mirror is not None:
            self._mirror.let_go()
