"""Stores as an accident, a person or an enemy may leave them, each made of a copy of a good one, and what reads them.

    python hostile_stores.py GOOD SCHEDULE FOLDER

makes each in FOLDER and runs every reader on it, in a process of its own, with its output in FOLDER/NAME.READER.out and
its exit code in FOLDER/NAME.READER.code ("hangs" where it had to be killed).
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch
import torch._dynamo  # what follows is imported here once, and not by each forked reader
from test_attach import EVERY, small

import checkflow
import checkflow.checkpointing.attach
import checkflow.cli.check
import checkflow.cli.export
import checkflow.cli.list
from checkflow.cli import run
from checkflow.errors import CheckflowError
from checkflow.jsonfile import digest_of, render
from checkflow.store.format.writer import hash_blocks

GENEROUS_S = 120.0
NEWEST = "00000003-iteration-3"
NASTY = "[bold red]x[nothing]\x1b[31m\x07\x9b2J\r\n\u202e"
LONG = "A" * 50_000
Attack = Callable[[Path], object]


def dump(document: dict[str, object], path: Path) -> None:
    path.write_text(json.dumps(document))


def resign(store: Path, change: Callable[[dict[str, object]], object] = lambda _: None, *names: str) -> None:
    """Make the newest checkpoint's manifest right for its files as they are now, and `change` it."""
    folder = store / NEWEST
    document = json.loads((folder / "manifest.json").read_bytes())
    del document["digest"]
    document["files"] += [{"name": name} for name in names]
    for file in document["files"]:
        data = (folder / str(file["name"])).read_bytes()
        file |= {"size_bytes": len(data), "blocks": hash_blocks(memoryview(data))}
    change(document)
    (folder / "manifest.json").write_text(render(document | {"digest": digest_of(document)}))


def manifest(**fields: object) -> Attack:
    return lambda store: resign(store, lambda document: document.update(fields))


def tensors(header: bytes, body: bytes = b"") -> Attack:
    """A model file with this header, its hashes right."""

    def attack(store: Path) -> None:
        (store / NEWEST / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
        resign(store)

    return attack


def record(change: Callable[[dict[str, dict[str, dict[str, object]]]], object]) -> Attack:
    """A commit record, its hash right."""

    def attack(store: Path) -> None:
        path = store / NEWEST / "commit.json"
        document = json.loads(path.read_bytes())
        change(document)
        dump(document, path)
        resign(store)

    return attack


def in_record(data: bytes) -> Attack:
    def attack(store: Path) -> None:
        (store / NEWEST / "commit.json").write_bytes(data)
        resign(store)

    return attack


def more(name: str, data: bytes) -> Attack:
    """A listed file that no training wrote."""

    def attack(store: Path) -> None:
        (store / NEWEST / name).write_bytes(data)
        resign(store, lambda _: None, name)

    return attack


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    """A socket. Its path may be longer than a socket's address."""
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def folder(path: Path) -> None:
    (path / "deep").mkdir(parents=True)


def linked(path: Path) -> None:
    """A link out of the store, to a file that must stay as it is."""
    path.symlink_to(os.environ["OUTSIDE"])


def loop(path: Path) -> None:
    path.symlink_to(path)


def unreadable(path: Path) -> None:
    path.touch()
    path.chmod(0)


def text(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def at(name: str, put: Callable[[Path], object]) -> Attack:
    """Something else in a name's place."""

    def attack(store: Path) -> None:
        path = store / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        put(path)

    return attack


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": pipe, "a socket": bound, "a folder": folder, "a link": linked, "a loop": loop, "unreadable": unreadable,
}  # fmt: skip
PLACES = {
    "log": "saver.log", "lock": "lock", "checkpoint": "00000009-iteration-9", "leftover": ".incomplete-x",
    "manifest": f"{NEWEST}/manifest.json",
}  # fmt: skip
ATTACKS: dict[str, Attack] = {
    f"{place} is {kind}": at(name, put) for place, name in PLACES.items() for kind, put in KINDS.items()
} | {
    "nasty leftover": at(f".incomplete-{NASTY}", folder),
    "nasty pruned file": at(f".pruned-{NASTY}", Path.touch),
    "bytes that are no UTF-8": at(os.fsdecode(b".incomplete-\xff\xfe"), folder),
    "a name with a line break": at("00000009-iteration-9\n", folder),
    "a serial beyond any": at("99999999999999999-iteration-3", folder),
    "the last serial": at("1000000000000000-iteration-3", folder),
    "an iteration beyond any": at(f"00000009-iteration-{'9' * 30}", folder),
    "a log with escapes": at("saver.log", text(NASTY.encode() * 100 + b"\xff\xfe")),
    "a log of many lines": at("saver.log", text(b"x\n" * 30_000)),
    "a log of one line": at("saver.log", text(b"x" * 10**6)),
    "a lock with escapes": at("lock", text(json.dumps({"host": NASTY, "trainer_pid": 1}).encode())),
    "a lock with a huge process": at("lock", text(b'{"host": "h", "trainer_pid": 1' + b"0" * 100 + b"}")),
    "a lock of nonsense": at("lock", text(b"\xff" * 10**6)),
    "created with escapes": manifest(created=NASTY),
    "created long": manifest(created=LONG),
    "versions with escapes": manifest(versions={NASTY: NASTY, LONG: "1"}),
    "a field with escapes": manifest(**{NASTY: 1}),
    "a long field": manifest(**{LONG: 1}),
    "files with escapes": manifest(files=[{"name": NASTY, "size_bytes": 0, "blocks": ""}]),
    "files with a long name": manifest(files=[{"name": LONG, "size_bytes": 0, "blocks": ""}]),
    "a file that is text": more("notes.txt", b"hello"),
    "a file with escapes": more("notes.safetensors", NASTY.encode()),
    "tensors: nothing": at(f"{NEWEST}/model.safetensors", text(b"")),
    "tensors: no JSON": tensors(b"x" * 100),
    "tensors: nested": tensors(b"[" * 100_000),
    "tensors: an odd name": tensors(
        json.dumps({NASTY: {"dtype": "F99", "shape": [], "data_offsets": [0, 0]}}).encode()
    ),
    "tensors: a long name": tensors(json.dumps({LONG * 2: {"dtype": "F99", "shape": []}}).encode()),
    "tensors: a long good name": tensors(
        json.dumps({LONG * 2 + NASTY: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode(), b"x"
    ),
    "tensors: a dtype that safetensors' reader lacks": tensors(
        json.dumps({"x": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode(), b"xy"
    ),
    "tensors: many dimensions": tensors(
        json.dumps({"x": {"dtype": "U8", "shape": [1] * 1000, "data_offsets": [0, 1]}}).encode(), b"x"
    ),
    "record: no JSON": in_record(NASTY.encode()),
    "record: nested": in_record(b'{"a":' * 100_000),
    "record: not UTF-8": in_record(b"\xff\xfe" * 1000),
    "record: an odd type": record(lambda found: found["optimizers"][0].update(type=NASTY)),  # type: ignore[index]
    "record: a long type": record(lambda found: found["optimizers"][0].update(type=LONG * 2)),  # type: ignore[index]
    "record: an odd name": record(lambda found: found["models"][0].update(name=NASTY + LONG)),  # type: ignore[index]
    "record: an odd field": record(lambda found: found.update({NASTY + LONG: {}})),
}


def tell(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")


def attach(store: Path, schedule: Path) -> int:
    """Attach, restore, train on and save, as a user does, telling all that is told."""
    torch.set_num_threads(1)
    training = small()
    try:
        with checkflow.attach(
            training.model, training.optimizer, schedule=schedule, store=store, persist_every=EVERY,
            notify=lambda line: tell(sys.stderr, line),
        ) as ckpt:  # fmt: skip
            tell(sys.stdout, f"restored {ckpt.restore()}")
            training.iteration()
            ckpt.step()
            ckpt.save()
            tell(sys.stdout, "saved")
    except CheckflowError as error:
        tell(sys.stderr, str(error))
        return error.exit_code
    return 0


def readers(store: Path, schedule: Path) -> dict[str, Callable[[], int]]:
    """In this order, on the same store."""
    output = store.with_name(store.name + ".exported")
    export = ["export", str(store), "-o"]
    return {
        "list": lambda: run(["list", str(store)]),
        "json": lambda: run(["list", str(store), "--json"]),
        "check": lambda: run(["check", str(store)]),
        "safetensors": lambda: run([*export, f"{output}.files", "--to", "safetensors"]),
        "torch": lambda: run([*export, f"{output}.pt", "--to", "torch"]),
        "attach": lambda: attach(store, schedule),
        "repair": lambda: run(["check", str(store), "--repair"]),
    }


def apart(reader: Callable[[], int], output: Path) -> str:
    """Run it in a forked process; its exit code, or what became of it."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            fd = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            code = reader()
        except BaseException:  # noqa: BLE001 (the code tells)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + GENEROUS_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return str(os.waitstatus_to_exitcode(status))
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.002)


def main(good: Path, schedule: Path, where: Path) -> None:
    gc.freeze()  # so that no reader's collection copies the pages of all that was imported
    for name, attack in ATTACKS.items():
        store = where / name
        shutil.copytree(good, store)
        attack(store)
        for reader, run_it in readers(store, schedule).items():
            code = apart(run_it, where / f"{name}.{reader}.out")
            (where / f"{name}.{reader}.code").write_text(code)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
