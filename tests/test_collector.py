"""The collector rests where it has nothing to find, and is as before after it, whatever happens there."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

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


def test_what_is_imported_for_good_is_looked_at_no_more() -> None:
    """What is made later is."""
    told = _told(
        """
        with lasting_imports():
            assert not gc.isenabled()
            kept = []
        assert gc.isenabled() and gc.get_freeze_count()
        made = []
        found = {id(each) for each in gc.get_objects()}
        print(id(kept) in found, id(made) in found)
        """
    )
    assert told == "False True\n"


def test_a_process_ends_as_ever_without_a_last_collection() -> None:
    """What it has printed is written, its threads are waited for, and what it registered runs."""
    told = _told(
        """
        import atexit, threading, time
        gc.callbacks.append(lambda *_: print("collects"))
        atexit.register(print, "registered")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("done")
        process_ends()
        """
    )
    assert told == "done\nthread\nregistered\n"


@pytest.mark.parametrize("module", ["checkflow", "checkflow.learning"])
def test_a_command_and_the_planner_end_without_one(module: str) -> None:
    """Also a planner that was asked nothing."""
    program = f"""
import atexit, gc, runpy, sys
atexit.register(lambda: gc.callbacks.append(lambda *_: print("collects")))
sys.argv = ["checkflow", "list", "nowhere"]
runpy.run_module({module!r}, run_name="__main__")
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "collects" not in done.stdout + done.stderr


def _told(body: str) -> str:
    """What a process prints that runs this; without torch, which freezes nothing itself."""
    program = "import gc\nfrom checkflow.collector import lasting_imports, process_ends\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
