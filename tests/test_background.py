"""What is left of processes in the background."""

from __future__ import annotations

import threading
from pathlib import Path

from checkflow.background import remove_written


def test_a_folder_that_is_written_to_is_removed(tmp_path: Path) -> None:
    """Each time, whatever the writer is at; it finds none then."""
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        began = threading.Event()

        def write(folder: Path = folder, began: threading.Event = began) -> None:
            try:
                for count in range(10**6):
                    (folder / f"{count % 20}.part").write_bytes(b"")
                    (folder / f"{count % 20}.part").replace(folder / f"{count % 20}")
                    began.set()
            except FileNotFoundError:
                return

        writer = threading.Thread(target=write)
        writer.start()
        began.wait()
        remove_written(folder)
        writer.join()
        assert not folder.exists()


def test_what_is_not_there_is_removed(tmp_path: Path) -> None:
    remove_written(tmp_path / "none")
