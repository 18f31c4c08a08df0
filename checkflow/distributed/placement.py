"""On which machine each rank is, and which other one has the mirror of its slots."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Sequence


def machine_here() -> str:
    """As torchrun numbers its agents; where it did not start this process, the host's name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def host_here() -> str:
    """This machine, or container, by the name of its own network."""
    return socket.gethostname()


def unreachable(address: str, host: str) -> str:
    """Why the machine `host` cannot be reached from this one at the address that it says; "" where nothing is known to
    be wrong."""
    try:
        is_own = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_own = address == "localhost"
    if not is_own or host == host_here():
        return ""
    return (
        f"{host} says that it is reached at {address}, which every machine takes for itself; set MASTER_ADDR to the "
        "address of rank 0's machine in the network of all"
    )


def address_here(met_at: tuple[str, int] | None) -> str:
    """This machine's address in the network in which ranks meet: `met_at` is the host and the port of their store."""
    by_name = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
    master, port = met_at or by_name
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it finds the route
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def mirrors(machines: Sequence[str]) -> tuple[int, ...]:
    """For each rank the one that has its mirror, given each one's machine: each has one, on another machine if it can.

    Ranks in the order of their machines, each goes as many places on as the fullest machine has ranks.
    """
    order = sorted(range(len(machines)), key=lambda rank: (machines.index(machines[rank]), rank))
    step = max(Counter(machines).values()) % len(machines) or 1
    found = {rank: order[(place + step) % len(order)] for place, rank in enumerate(order)}
    return tuple(found[rank] for rank in range(len(machines)))
