"""A worker whose sender is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def test_a_worker_removes_the_sweeps_folder_and_nothing_else(tmp_path: Path) -> None:
    """Also where another worker was faster, so that the temporary directory is another one."""
    others = tmp_path / "others"
    others.mkdir()
    (others / "precious").touch()
    folder = tmp_path / "sweep"
    for there in (True, False):
        if there:
            folder.mkdir()
            (folder / "left").touch()
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "checkflow.sweep.worker", str(theirs.fileno()), str(folder)],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=os.environ | {"TMPDIR": str(folder), "TEMP": str(others)},
            )
        ours.close()
        process.wait()
        assert not folder.exists()
        assert (others / "precious").exists()
