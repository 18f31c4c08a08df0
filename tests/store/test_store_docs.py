"""docs/store.md says what the code does, byte by byte."""

from __future__ import annotations

import os
from pathlib import Path

from small_store import SMALL, InProcess, record_of

from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.manifest import BLOCK_BYTES, FileEntry, Manifest, max_manifest_bytes
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.store.memory.trainer_slots import Slots

TEXT = (Path(__file__).parent.parent.parent / "docs" / "store.md").read_text()


def test_the_example_of_a_file() -> None:
    """The header that the page shows, and as many spaces as it says."""
    layout = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "F32", (2, 3)),), (("v", "w"),)),))
    header = layout.files[0].header
    text = header[8:].rstrip(b" ")
    assert header[:8].hex(" ") in TEXT
    assert f"    {text.decode()}\n    {len(header) - 8 - len(text)} spaces\n" in TEXT


def test_every_field_of_the_manifest() -> None:
    """In the order of the table."""
    names = [*Manifest.model_fields, "digest"]
    rows = [line for line in TEXT.splitlines() if line.startswith("| `")][: len(names)]
    found = [name for row in rows for name in row.split("|")[1].replace("`", "").split(", ") for name in [name.strip()]]
    assert found == names
    for field in FileEntry.model_fields:
        assert f"`{field}`" in TEXT
    assert max_manifest_bytes(0, 0) == 64 * 1024
    assert max_manifest_bytes(BLOCK_BYTES, 1) == 64 * 1024 + 512 + 2 * 40


def test_the_words_of_the_control_page() -> None:
    """Read from the memfd at the offsets that the page gives."""
    shared = SharedMemory.create([SMALL], slots=3, record_room_bytes=100, config=b"configuration")
    slots = Slots(shared, [SMALL], "skip")
    slot = slots.try_acquire()
    assert slot is not None
    slots.stage(slot, 7, record_of(7), due=True)
    page = os.pread(shared.fd, 4096, 0)

    def word(offset: int) -> int:
        return int.from_bytes(page[offset : offset + 8], "little")

    assert page[:8] == b"chkflow1"
    assert [word(offset) for offset in (8, 16, 24, 32, 40)] == [3, SMALL.size_bytes, 4096, 13, 0]
    at = 512 + 64 * slot.index
    assert word(at) == 1 << 8 | 1 << 4 | 2
    assert (word(at + 8), word(at + 16)) == (7, len(record_of(7)))
    start = 8192 + slot.index * (SMALL.size_bytes + 4096)
    assert os.pread(shared.fd, 13, 4096) == b"configuration"
    assert os.pread(shared.fd, 8, start) == SMALL.files[0].header[:8]
    assert os.pread(shared.fd, len(record_of(7)), start + SMALL.size_bytes) == record_of(7)
    shared.close()


def test_the_names_of_a_store(tmp_path: Path) -> None:
    saver = InProcess(tmp_path / "store")
    saver.persist(340)
    saver.close()
    (path,) = (tmp_path / "store").iterdir()
    assert path.name == "00000001-iteration-340"
    assert all(f"        {entry.name}" in TEXT for entry in path.iterdir())
