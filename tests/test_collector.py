"""The collector rests in the body and is as before after it, whatever happens there."""

from __future__ import annotations

import gc
import os

import pytest

from checkflow.collector import paused_collector


@pytest.mark.parametrize("before", [True, False])
def test_no_collection_begins_in_the_body(before: bool) -> None:
    """Where a user switched it off it stays off."""
    if not before:
        gc.disable()
    try:
        with pytest.raises(KeyError), paused_collector():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is before
    finally:
        gc.enable()


def test_what_the_body_forks_collects_as_ever() -> None:
    """A loader's workers live longer than it."""
    with paused_collector():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
