"""Where ranks of a test meet."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """One that the kernel gives to no connection of its own accord between now and its use."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return port
