"""At which address a machine is reached by the others of its training, and who is told where that is none."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from ports import free_port
from test_group import groups, together

from checkflow.checkpointing import held_for_others
from checkflow.checkpointing.together import Together
from checkflow.distributed import adopting, placement
from checkflow.distributed.adopting import Places, adopt
from checkflow.distributed.group import Group
from checkflow.distributed.marks import Mark
from checkflow.distributed.placement import address_here, unreachable
from checkflow.errors import InputError, PeerError
from checkflow.torch_ranks import meeting_place

MARK = Mark(3, 7)
HINT = "; set MASTER_ADDR to the address of rank 0's machine in the network of all"


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank runs on one of its own, and meets the others at an address that leads to itself."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    names = threading.local()

    def host_here() -> str:
        if not hasattr(names, "own"):
            names.own = f"machine of {threading.current_thread().name}"
        return str(names.own)

    for module in (placement, adopting, held_for_others):
        monkeypatch.setattr(module, "host_here", host_here)


def test_it_is_the_one_by_which_ranks_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of MASTER_ADDR, which init_process_group(init_method="tcp://...") does not need."""
    port = free_port()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        met = meeting_place()
    finally:
        dist.destroy_process_group()
    assert met is not None and met.address == ("127.0.0.1", port)
    monkeypatch.setattr(socket, "gethostname", lambda: "by name")
    monkeypatch.setenv("MASTER_ADDR", "no.such.machine.invalid")
    assert address_here(met.address) == "127.0.0.1"
    assert address_here(None) == "by name"


def test_where_ranks_met_without_an_address_there_is_none(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'met'}", rank=0, world_size=1)
    try:
        met = meeting_place()
    finally:
        dist.destroy_process_group()
    assert met is not None and met.address is None


def test_what_every_machine_takes_for_itself_is_no_address_of_another() -> None:
    here = placement.host_here()
    for own in ("127.0.0.1", "::1", "localhost"):
        assert unreachable(own, "another").endswith(HINT)
        assert not unreachable(own, here)
    assert not unreachable("192.0.2.7", "another") and not unreachable("a name", "another")


@pytest.mark.usefixtures("machines")
def test_a_part_is_not_asked_for_there(tmp_path: Path) -> None:
    own = (frozenset({MARK}), frozenset[Mark]())
    places = Places(own, ({1: frozenset({MARK})}, {}), (frozenset(), frozenset()))

    def bring(group: Group) -> list[str]:
        return adopt(group, {1: tmp_path} if group.rank else {}, MARK, places, {})

    (first, second) = together(groups(2), bring)
    assert first == second and isinstance(first, list)
    assert first[0] == "" and first[1].startswith("from rank 0: machine of ") and first[1].endswith(HINT)


@pytest.mark.usefixtures("machines")
def test_a_mirror_is_refused(tmp_path: Path) -> None:
    address = SimpleNamespace(host="127.0.0.1", port=1, key="key")
    handle = SimpleNamespace(start_mirror=lambda _: SimpleNamespace(address=address))

    def mirror(group: Group) -> None:
        Together(group, tmp_path, print).mirror(handle)  # type: ignore[arg-type]

    errors = together(groups(2), mirror)
    assert any(isinstance(error, InputError) for error in errors)
    for error in errors:
        assert isinstance(error, (InputError, PeerError))
        assert "replicate: rank " in str(error) and str(error).endswith(HINT)
