"""The uninterrupted run: what the state is after each iteration, in a process of its own and as far as is asked."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import trainer_to_kill

ITERATIONS = 1_000_000  # of the learning rate's schedule; no run gets so far


class Oracle:
    """Digests by iteration."""

    def __init__(self) -> None:
        context = get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._ours), daemon=True)
        self._process.start()
        theirs.close()
        self._known: dict[int, str] = {}

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def digest(self, iteration: int) -> str:
        if iteration not in self._known:
            self._ours.send(iteration)
            self._known[iteration] = self._ours.recv()
        return self._known[iteration]

    def close(self) -> None:
        self._ours.close()
        self._process.join()


def _serve(asked: Connection, other_end: Connection) -> None:
    other_end.close()  # else the end of who asks is not seen
    torch.set_num_threads(1)
    model, optimizer = trainer_to_kill.build()
    loader = trainer_to_kill.batches()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ITERATIONS)
    batches = trainer_to_kill.endless(loader)
    digests = [trainer_to_kill.digest(model, optimizer, scheduler)]
    while True:
        try:
            iteration = asked.recv()
        except EOFError:
            return
        while len(digests) <= iteration:
            trainer_to_kill.train(model, optimizer, *next(batches))
            scheduler.step()
            digests.append(trainer_to_kill.digest(model, optimizer, scheduler))
        asked.send(digests[iteration])
