"""One delta after the other, in the order in which they were staged."""

from __future__ import annotations

import select
import socket
import time

from checkflow.errors import CheckflowError
from checkflow.replica.update import Replica, warm_up
from checkflow.store.both.messages import send
from checkflow.store.memory.replica_slots import clear_unfinished, deltas_in, made, next_step
from checkflow.store.memory.shared_memory import SharedMemory

LEAST_LOOK_S, MOST_LOOK_S = 0.2e-3, 20e-3  # from one look at the slots to the next, where there is nothing to do
LOOKS = 20  # between two deltas
LONGER = 1.02  # than the last, where there was nothing
ORPHAN_S = 120.0  # without a change once the trainer is gone, and nobody will write what is in the way
MAX_TEXT = 1000


def run(shared: SharedMemory, end: socket.socket) -> None:
    """Until the other end is closed and no delta is left, or one cannot be made anything of, which is said there."""
    try:
        _run(shared, end)
    except CheckflowError as error:
        send(end, str(error)[:MAX_TEXT].encode())
    except Exception as error:
        send(end, f"{type(error).__name__}: {error}"[:MAX_TEXT].encode())
        raise


def _run(shared: SharedMemory, end: socket.socket) -> None:
    warm_up()
    clear_unfinished(shared)
    replica, look_s, last_s = Replica(shared), MOST_LOOK_S, time.monotonic()
    seen, since_s = shared.words(), time.monotonic()
    while True:
        step = next_step(shared) if deltas_in(shared.words()) else None
        now_s = time.monotonic()
        if step is not None:
            made(shared, step, *replica.advance(step))
            look_s, last_s = min(max((now_s - last_s) / LOOKS, LEAST_LOOK_S), MOST_LOOK_S), now_s
            continue
        if _is_closed(end, look_s):
            words = shared.words()
            seen, since_s = (seen, since_s) if words == seen else (words, now_s)
            if not deltas_in(words) or now_s > since_s + ORPHAN_S:
                return
            time.sleep(look_s)  # until the saver has written one of the slots
        look_s = min(look_s * LONGER, MOST_LOOK_S)


def _is_closed(end: socket.socket, wait_s: float) -> bool:
    """Whether the trainer has closed its end, or closes it in this time. It says nothing."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))
