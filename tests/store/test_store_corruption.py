"""Whatever happens to a checkpoint's bytes is seen: nothing of it is loaded, nothing crashes, no memory is taken."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from small_store import TINY, InProcess, newest_whole, trainer_command

from checkflow.errors import CorruptStoreError, StoreError
from checkflow.jsonfile import digest_of
from checkflow.store.both.messages import VerifiedReport
from checkflow.store.format import blocks
from checkflow.store.format.layout import Layout
from checkflow.store.format.manifest import HASH_HEX, Manifest, parse_directory_name
from checkflow.store.format.reader import (
    Checkpoint,
    SkippedCheckpoint,
    list_checkpoints,
    load,
    load_newest,
    newest,
    read_file,
    verify,
)
from checkflow.store.format.writer import hash_blocks
from checkflow.store.memory.saver_slots import take_due

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


@pytest.fixture
def store(memory_path: Path) -> Path:
    """Two checkpoints, of iterations 1 and 2."""
    saver = InProcess(memory_path / "store", TINY)
    saver.persist(1)
    saver.persist(2)
    saver.close()
    return memory_path / "store"


def latest(store: Path) -> Path:
    return list_checkpoints(store)[0].path


def assert_skipped(store: Path) -> str:
    """The newest is skipped, for the reason returned, and the older one restored."""
    found = load_newest(store)
    assert found.loaded is not None
    assert found.loaded.checkpoint.iteration == 1
    (skipped,) = found.skipped
    return skipped.reason


def refused(store: Path) -> str:
    """Why the newest is refused; the quick way, for thousands of times."""
    found = list_checkpoints(store)[0]
    if isinstance(found, SkippedCheckpoint):
        return found.reason
    with pytest.raises(CorruptStoreError) as raised:
        load(found)
    return str(raised.value)


def skipped_with_little_memory(store: Path) -> str:
    """As assert_skipped, in a process that may take no more than 512 MiB of addresses."""
    script = (
        "import resource, sys, pathlib\n"
        "from checkflow.store.format.reader import load_newest\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n"
        "found = load_newest(pathlib.Path(sys.argv[1]))\n"
        "assert found.loaded.checkpoint.iteration == 1\n"
        "sys.stdout.write(found.skipped[0].reason)"
    )
    done = subprocess.run(trainer_command(script, store), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_flipped_byte_is_seen(store: Path) -> None:
    """Each byte of each file in turn, manifest included; every bit of it nightly."""
    choose = random.Random(0)
    flips = 0
    for path in sorted(latest(store).iterdir()):
        original = path.read_bytes()
        with path.open("r+b", buffering=0) as file:
            for position, byte in enumerate(original):
                for bit in range(8) if NIGHTLY else [choose.randrange(8)]:
                    os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                    assert path.name in refused(store), (path.name, position, bit)
                    flips += 1
                os.pwrite(file.fileno(), bytes([byte]), position)
    assert flips >= 4096 + 700
    assert newest_whole(store, TINY) == 2


def test_readers_beside_each_other_see_it_too(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large checkpoints are read by several threads; here these small ones are."""
    monkeypatch.setattr(blocks, "PARALLEL_BYTES", 0)
    assert newest_whole(store, TINY) == 2
    for path in sorted(latest(store).iterdir()):
        original = path.read_bytes()
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        assert path.name in refused(store)
        path.write_bytes(original)
    assert newest_whole(store, TINY) == 2


def test_readers_share_a_descriptor_that_proves_not_to_be_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two direct reads are refused at once: the other reader has switched to buffered ones when ours comes back."""
    read = os.preadv
    refused_once: set[int] = set()

    def flags(fd: int, command: int, _value: int = 0) -> int:
        return os.O_DIRECT if command == fcntl.F_GETFL and fd not in refused_once else 0

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd not in refused_once:
            refused_once.add(fd)  # from here on the flags are the other reader's
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return read(fd, buffers, offset)

    saver = InProcess(tmp_path / "store", TINY)
    saver.persist(1)
    saver.close()
    (found,) = list_checkpoints(tmp_path / "store")
    assert isinstance(found, Checkpoint)
    monkeypatch.setattr(fcntl, "fcntl", flags)
    monkeypatch.setattr(os, "preadv", preadv)
    verify(found)
    assert refused_once


def test_files_without_a_byte_verify(tmp_path: Path) -> None:
    """There is nothing to read of them."""
    saver = InProcess(tmp_path / "store", Layout.of(()))
    slot = saver.slots.try_acquire()
    assert slot is not None
    saver.slots.stage(slot, 1, b"", due=True)
    taken = take_due(saver.shared)
    assert taken is not None
    written = saver.persister.write(taken)
    assert written is not None
    saver.persister.settle((written,))
    assert isinstance(saver.reports[-1], VerifiedReport)
    saver.close()


def test_every_truncation_is_seen(store: Path) -> None:
    """Each file cut at each length, and made longer."""
    for path in sorted(latest(store).iterdir()):
        original = path.read_bytes()
        for length in range(len(original)):
            path.write_bytes(original[:length])
            assert path.name in refused(store)
        path.write_bytes(original + b"\0")
        assert path.name in assert_skipped(store)
        path.write_bytes(original)
    assert newest_whole(store, TINY) == 2


def test_swapped_files_are_seen(store: Path) -> None:
    """A file of another checkpoint, of the same size, is no file of this one."""
    older, newer = list_checkpoints(store)[1].path, latest(store)
    for name in ("model.safetensors", "commit.json", "manifest.json"):
        shutil.copy(newer / name, store / "kept")
        shutil.copy(older / name, newer / name)
        assert assert_skipped(store)
        shutil.copy(store / "kept", newer / name)
    assert newest_whole(store, TINY) == 2


def test_a_renamed_checkpoint_is_no_newer_one(store: Path) -> None:
    """The manifest says which directory it belongs to."""
    shutil.copytree(list_checkpoints(store)[1].path, store / "00000009-iteration-9")
    found = load_newest(store)
    assert found.loaded is not None and found.loaded.checkpoint.iteration == 2
    assert "belongs to 00000001-iteration-1" in found.skipped[0].reason


@pytest.mark.parametrize("name", ["model.safetensors", "commit.json", "manifest.json"])
def test_a_missing_file_is_seen(store: Path, name: str) -> None:
    (latest(store) / name).unlink()
    assert "missing" in assert_skipped(store)


@pytest.mark.parametrize("name", ["model.safetensors", "commit.json", "manifest.json"])
def test_links_and_pipes_are_not_followed(store: Path, name: str) -> None:
    """A link is refused though its target has the right bytes; a pipe does not hold the reader up."""
    path = latest(store) / name
    path.rename(store / "elsewhere")
    path.symlink_to(store / "elsewhere")
    assert "link" in assert_skipped(store)
    path.unlink()
    os.mkfifo(path)
    assert "no regular file" in assert_skipped(store)
    path.unlink()
    path.mkdir()
    assert path.name in assert_skipped(store)


def test_a_linked_checkpoint_is_not_followed(store: Path) -> None:
    path = latest(store)
    path.rename(store / "elsewhere")
    path.symlink_to(store / "elsewhere")
    assert assert_skipped(store) == "is no directory that can be read (it is a link)"


Edit = Callable[[dict[str, object]], object]


def files(document: dict[str, object]) -> list[dict[str, object]]:
    found = document["files"]
    assert isinstance(found, list)
    return found


HOSTILE: dict[str, Edit] = {
    "leaves the directory": lambda d: files(d)[0].update(name="../../secret"),
    "absolute": lambda d: files(d)[0].update(name="/etc/passwd"),
    "the manifest itself": lambda d: files(d)[0].update(name="Manifest.json"),
    "hidden": lambda d: files(d)[0].update(name=".model"),
    "empty name": lambda d: files(d)[0].update(name=""),
    "a zero byte": lambda d: files(d)[0].update(name="a\0b"),
    "a newline": lambda d: files(d)[0].update(name="model.safetensors\n"),
    "negative size": lambda d: files(d)[0].update(size_bytes=-1, blocks=""),
    "huge size": lambda d: files(d)[0].update(size_bytes=2**53),
    "absurd size": lambda d: files(d)[0].update(size_bytes=10**100),
    "size as text": lambda d: files(d)[0].update(size_bytes="4796"),
    "size as float": lambda d: files(d)[0].update(size_bytes=4796.0),
    "size true": lambda d: files(d)[0].update(size_bytes=True),
    "no hashes": lambda d: files(d)[0].update(blocks=""),
    "a hash too many": lambda d: files(d)[0].update(blocks=str(files(d)[0]["blocks"]) + "0" * HASH_HEX),
    "hashes no digits": lambda d: files(d)[0].update(blocks="g" * HASH_HEX),
    "hashes upper case": lambda d: files(d)[0].update(blocks=str(files(d)[0]["blocks"]).upper()),
    "wrong hash": lambda d: files(d)[0].update(blocks="0" * HASH_HEX),
    "a file twice": lambda d: files(d).append(files(d)[0]),
    "a file twice by case": lambda d: files(d).append(files(d)[0] | {"name": "MODEL.safetensors"}),
    "a file that is not there": lambda d: files(d).append(files(d)[0] | {"name": "more.safetensors"}),
    "no record": lambda d: d.update(files=files(d)[:1]),
    "no files": lambda d: d.update(files=[]),
    "files no list": lambda d: d.update(files={}),
    "many files": lambda d: d.update(files=[{"name": f"f{n}", "size_bytes": 0, "blocks": ""} for n in range(500)]),
    "unknown field": lambda d: d.update(more=1),
    "missing field": lambda d: d.pop("serial"),
    "other serial": lambda d: d.update(serial=7),
    "other iteration": lambda d: d.update(iteration=7),
    "negative iteration": lambda d: d.update(iteration=-2),
    "other format": lambda d: d.update(format="other"),
    "other version": lambda d: d.update(version=2),
    "version true": lambda d: d.update(version=True),
    "other block size": lambda d: d.update(block_bytes=1),
    "other hash": lambda d: d.update(block_hash="crc"),
    "created without a zone": lambda d: d.update(created="2026-01-31T12:00:00"),
    "created in another zone": lambda d: d.update(created="2026-01-31T12:00:00+01:00"),
    "created in other words": lambda d: d.update(created="2026-01-31T12:00:00Z"),
    "created with a blank": lambda d: d.update(created="2026-01-31 12:00:00+00:00"),
    "created to less than a second": lambda d: d.update(created="2026-01-31T12:00:00.500000+00:00"),
    "created on no day": lambda d: d.update(created="2026-02-31T12:00:00+00:00"),
    "created at the end of time": lambda d: d.update(created="9999-12-31T23:59:59+00:00"),
    "created no time": lambda d: d.update(created=""),
    "versions no strings": lambda d: d.update(versions={"a": {"b": []}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_with_a_right_digest_is_refused(store: Path, name: str) -> None:
    """The digest protects from accidents only: every field is checked against what is there."""
    path = latest(store) / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["digest"]
    HOSTILE[name](document)
    lines = [f' "{key}": {json.dumps(value)}' for key, value in document.items() if key != "files"]
    rows = document.get("files")
    text = ",\n".join("  " + json.dumps(row) for row in rows) if isinstance(rows, list) else ""
    lines += [f' "files": [\n{text}\n ]', f' "digest": "{digest_of(document)}"']
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert_skipped(store)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"[" * 60_000,
        b'{"a":' * 12_000,
        b"9" * 60_000,
        b'{"format": NaN}',
        b'{"format": "checkflow-checkpoint", "version": 1, "serial": 1e999}',
        b'{"format": 1, "format": 2}',
        b"{" + b",".join(b'"%d":0' % n for n in range(6000)) + b"}",
    ],
    ids=lambda text: str(text[:12]),
)
def test_what_is_no_manifest_is_refused(store: Path, text: bytes) -> None:
    (latest(store) / "manifest.json").write_bytes(text)
    assert_skipped(store)


def test_a_billion_entries_take_no_memory(store: Path) -> None:
    """A manifest longer than its files can need is refused before it is read; so is a directory of many names."""
    path = latest(store) / "manifest.json"
    with path.open("wb") as file:
        file.write(b'{"format":"checkflow-checkpoint","version":1,"files":[')
        file.truncate(30 * 10**9)  # what 10^9 entries would take; sparse
    assert "more than its files can need" in skipped_with_little_memory(store)


def test_a_claimed_size_takes_no_memory(store: Path) -> None:
    """A manifest of a huge file is compared with the file before memory is taken."""
    path = latest(store) / "manifest.json"
    document = json.loads(path.read_bytes())
    size = 4 * 2**20 * 1000
    document["files"][0] |= {"size_bytes": size, "blocks": "0" * HASH_HEX * 1000}
    del document["digest"]
    path.write_bytes(Manifest.model_validate_json(json.dumps(document)).render())
    assert f"not {size}" in skipped_with_little_memory(store)


def test_a_record_longer_than_any_is_refused(store: Path) -> None:
    """A sparse commit record of 10 GB with right hashes would have to be read into memory."""
    folder = latest(store)
    with (folder / "commit.json").open("wb") as file:
        file.truncate(10**10)
    document = json.loads((folder / "manifest.json").read_bytes())
    del document["digest"]
    blocks = -(-(10**10) // (4 * 2**20))
    document["files"][1] |= {"size_bytes": 10**10, "blocks": hash_blocks(memoryview(bytes(4 * 2**20))) * blocks}
    (folder / "manifest.json").write_bytes(Manifest.model_validate_json(json.dumps(document)).render())
    assert "longer than any" in skipped_with_little_memory(store)


def test_nothing_verifies_is_an_error(store: Path) -> None:
    """Not an empty start; the message names what was wrong with each."""
    for checkpoint in list_checkpoints(store):
        (checkpoint.path / "model.safetensors").write_bytes(b"rot")
    for attempt in (newest, load_newest):
        with pytest.raises(
            CorruptStoreError, match=r"no checkpoint verifies \(00000002-iteration-2: model.safetensors"
        ):
            attempt(store)


def test_an_empty_store_is_an_empty_start(tmp_path: Path) -> None:
    """What a killed saver left half-written is no checkpoint."""
    (tmp_path / ".incomplete-00000001-iteration-1-9-9").mkdir()
    (tmp_path / "lock").touch()
    assert load_newest(tmp_path).loaded is None
    assert newest(tmp_path).checkpoint is None


def test_what_is_no_store_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is no store"):
        newest(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is no store"):
        newest(tmp_path / "file")


def test_an_iteration_can_be_chosen(store: Path) -> None:
    """The older one if asked for; one that is not there names those that are."""
    found = newest(store, iteration=1)
    assert found.checkpoint is not None and found.checkpoint.iteration == 1
    with pytest.raises(StoreError, match="no checkpoint of iteration 3; it has 1, 2"):
        newest(store, iteration=3)


def test_single_files_are_verified_too(store: Path) -> None:
    """read_file gives the file's bytes, or none."""
    (checkpoint, *_) = list_checkpoints(store)
    assert isinstance(checkpoint, Checkpoint)
    assert bytes(read_file(checkpoint, "commit.json")) == b'{"iteration": 2}'
    (checkpoint.path / "commit.json").write_bytes(b'{"iteration": 3}')
    with pytest.raises(CorruptStoreError, match="not what was written"):
        read_file(checkpoint, "commit.json")
    for attempt in (verify, load):
        with pytest.raises(CorruptStoreError, match=r"commit\.json"):
            attempt(checkpoint)


def test_a_given_buffer_is_used_and_must_suffice(store: Path) -> None:
    """As in a slot: the files at multiples of 4096."""
    (checkpoint, *_) = list_checkpoints(store)
    assert isinstance(checkpoint, Checkpoint)
    saver = InProcess(store, TINY)
    buffer = saver.shared.slot_bytes(0)
    loaded = load(checkpoint, buffer)
    assert buffer[: len(loaded.files["model.safetensors"])] == loaded.files["model.safetensors"]
    with pytest.raises(StoreError, match="give a larger one"):
        load(checkpoint, buffer[:100])
    saver.close()


@pytest.mark.parametrize(
    "name",
    [
        "1-iteration-1",
        "00000001-iteration-01",
        "00000001-iteration--1",
        "00000001-iteration-1x",
        "\u0660" * 7 + "1-iteration-1",
        "0" * 9999,
    ],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert parse_directory_name(name) is None


def test_a_checkpoint_that_is_pruned_meanwhile_is_not_listed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running trainer removes old ones while somebody lists them."""

    def gone(path: Path) -> Manifest:
        shutil.rmtree(path)
        raise CorruptStoreError("is no directory that can be read")

    monkeypatch.setattr("checkflow.store.format.reader._read_manifest", gone)
    assert list_checkpoints(store) == ()
