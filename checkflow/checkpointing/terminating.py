"""What SIGTERM has made durable before the process ends, and how long the next step() is worth waiting for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from checkflow.checkpointing.behind import Behind
from checkflow.checkpointing.engine import Engine
from checkflow.checkpointing.voices import to_stderr
from checkflow.errors import StoreError
from checkflow.runtime.terminate import OnTerminate
from checkflow.store.libc import end_by

_TELLING_S = 1.0  # a terminal that is full, or that the main thread holds, is not waited for longer


@contextmanager
def told(kind: type[Exception], notify: Callable[[str], None], store: Path, what: str = "") -> Iterator[None]:
    """What goes wrong inside is told of the store, which is named once, and not raised."""
    try:
        yield
    except kind as problem:
        said = str(problem).removeprefix(f"{store}: ")
        with suppress(FileNotFoundError):  # the working directory was removed since
            said = said.removeprefix(f"{store.absolute()}: ")
        notify(f"{store}: {what}{said}")


def on_terminate(
    engine: Engine, behind: Behind | None, store: Path, deadline_s: float, notify: Callable[[str], None]
) -> OnTerminate:
    """Installed for SIGTERM. `behind`: a bucket, which is to have the last iteration, too."""
    until = partial(_until, engine, deadline_s)
    act = partial(_make_durable, engine, behind, store, notify, until)
    return OnTerminate(act, until, engine.inside, deadline_s, partial(_end, store))


def _end(store: Path) -> None:
    """The main thread is in none of Python's code, and may never be again: the saver goes on alone."""
    line = f"{store}: SIGTERM: training did not come back by the deadline; the saver writes what was staged"
    telling = threading.Thread(target=to_stderr, args=(line,), daemon=True)
    telling.start()
    telling.join(_TELLING_S)
    end_by(signal.SIGTERM)


def _until(engine: Engine, deadline_s: float, deadline: float) -> float:
    """Until when the next step() is waited for; 0: not at all. The rest of the deadline is for writing: half, until it
    is known how long a write takes."""
    if not engine.executor.behind and not _is_void(engine):
        return 0.0
    status = engine.handle.status()
    half_s = deadline_s / 2
    write_s = status.write_ns / 1e9 / status.durable if status.durable else half_s
    return deadline - min(half_s, max(1.0, 2 * write_s))


def _is_void(engine: Engine) -> bool:
    """Whether some rank has no part of the newest checkpoint, nor will have; waits a moment for the others to say."""
    rulings = engine.handle.rulings
    return rulings is not None and rulings.newest_is_void()


def _make_durable(
    engine: Engine, behind: Behind | None, store: Path, notify: Callable[[str], None],
    until: Callable[[float], float], deadline: float, *, at_step: bool, is_last: bool,
) -> float:  # fmt: skip
    def left_s() -> float:
        return max(0.0, deadline - time.monotonic())

    with engine.inside, told(Exception, notify, store, "SIGTERM: "):
        executor, handle = engine.executor, engine.handle
        staged = executor.drain(left_s())  # what is in flight may not be what it should, and is then in no checkpoint
        if at_step and executor.unsaved:
            if not executor.save():
                with told(StoreError, notify, store, "SIGTERM: "):
                    handle.drain(left_s())  # makes a slot free
                executor.save()
            staged = executor.drain(left_s())
        is_durable = handle.drain(left_s()) and staged
        is_void = _is_void(engine)
        if is_void and not is_last and (later := until(deadline)) > time.monotonic():
            return later  # of the next iteration all ranks may have their parts
        if not is_durable or executor.behind or is_void:
            notify(f"{store}: SIGTERM: the last iteration is not durable at the deadline")
        elif behind is not None and not behind.wait(deadline):
            notify(f"{store}: SIGTERM: the last iteration is on disk, and not in the bucket yet")
    return 0.0
