"""What somebody may have put into a store: nothing hangs, one plain line is said, nothing outside changes."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from forked import Forked

import checkflow.cli.check
import checkflow.cli.export
import checkflow.cli.list  # noqa: F401
from checkflow.cli import run as command_line
from checkflow.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_NO
from torturing.bench import HANG_S, Bench
from torturing.results import Outcome

RUNS = (1, 1)
SHORT = 5  # of the things, drawn
COMMAND_S = 30.0
LONGEST = 2000  # characters of a line to a person
SPARSE = 2**40


def run(bench: Bench, chance: Random, number: int) -> Iterator[Outcome]:
    """A store of three iterations, each time with one hostile thing more: commands, then a training."""
    wrong = bench.finish(replace(bench.plan(), more=3))
    if wrong:
        yield Outcome("first life", identical=False, wrong=wrong)
        return
    sound = bench.folder / "sound"
    bench.store.rename(sound)
    outside = bench.folder / "outside"
    names = chance.sample(list(HOSTILE), SHORT if bench.short else len(HOSTILE))
    for name in names:
        shutil.copytree(sound, bench.store)
        outside.mkdir(exist_ok=True)
        (outside / "mine").write_text("mine")
        held = HOSTILE[name](bench.store, outside)
        problems = _commands(bench, number)
        training = _training(bench)
        if (outside / "mine").read_text() != "mine" or len(list(outside.iterdir())) != 1:
            problems.append("something outside of the store was changed")
        if held is not None:
            os.close(held)
        wrong = "; ".join([*problems, *([training] if training else [])])
        yield Outcome(name, identical=not training, wrong=wrong)
        shutil.rmtree(bench.store)


def _commands(bench: Bench, number: int) -> list[str]:
    """list, check and export on it: what they did that no command may do."""
    problems = []
    target = bench.folder / f"exported-{number}"
    store = str(bench.store)
    for words in (["list", store], ["check", store], ["export", store, "--to", "safetensors", "-o", str(target)]):
        forked = Forked(lambda words=words: command_line(words), bench.folder / "command")  # type: ignore[misc]
        code = forked.wait(COMMAND_S)
        forked.end()
        text = forked.complaint() + "\n".join(forked.said())
        if code is None:
            problems.append(f"{words[0]} hangs")
        elif code not in (EXIT_DONE, EXIT_NO, EXIT_BAD_INPUT):
            problems.append(f"{words[0]} ended with {code}: {forked.complaint().strip()[-300:]}")
        if any(len(line) > LONGEST for line in text.splitlines()):
            problems.append(f"{words[0]} wrote a line of {max(map(len, text.splitlines()))} characters")
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f\x9b]", text):
            problems.append(f"{words[0]} wrote control characters")
        shutil.rmtree(bench.folder / "command")
        if target.is_dir():
            shutil.rmtree(target)
    return problems


def _training(bench: Bench) -> str:
    """It goes on from iteration 3, or is refused in one line."""
    life = bench.live(replace(bench.plan(), more=2))
    code = life.forked.wait(HANG_S)
    phase = life.phase
    life.forked.end()
    bench.alone()
    line, internal = life.trouble()
    if code is None:
        return f"a training hangs while {phase.name.lower()}"
    if code == 0:
        return bench.differs(life) or ("" if life.said()[0][0] == 3 else f"restored {life.said()[0][0]}, not 3")
    refused = code in (EXIT_NO, EXIT_BAD_INPUT) and line.startswith("checkflow: ")
    return "" if refused else f"a training ended with {code}: {internal or line}"


def _checkpoint(store: Path) -> Path:
    return next(path for path in sorted(store.iterdir()) if path.is_dir())


def _fifo(name: str) -> Callable[[Path, Path], None]:
    def make(store: Path, _: Path) -> None:
        (store / name).unlink(missing_ok=True)
        os.mkfifo(store / name)

    return make


def _folder(name: str) -> Callable[[Path, Path], None]:
    def make(store: Path, _: Path) -> None:
        (store / name).unlink(missing_ok=True)
        (store / name).mkdir()

    return make


def _newer(name: str) -> Callable[[Path, Path], None]:
    """A copy of the checkpoint under another name."""

    def make(store: Path, _: Path) -> None:
        shutil.copytree(_checkpoint(store), store / os.fsdecode(os.fsencode(name)))

    return make


def _link(name: str) -> Callable[[Path, Path], None]:
    """To a file that is somebody's."""

    def make(store: Path, outside: Path) -> None:
        (store / name).unlink(missing_ok=True)
        (store / name).symlink_to(outside / "mine")

    return make


def _linked_folders(store: Path, outside: Path) -> None:
    for name in (".incomplete-00000009-iteration-9-0-0", ".pruned-00000009-iteration-9", "00000009-iteration-9"):
        (store / name).symlink_to(outside)


def _sparse(name: str) -> Callable[[Path, Path], None]:
    def make(store: Path, _: Path) -> None:
        newer = store / "00000099-iteration-99"
        shutil.copytree(_checkpoint(store), newer)
        os.truncate(newer / name, SPARSE)

    return make


def _nested(store: Path, _: Path) -> None:
    newer = store / "00000099-iteration-99"
    shutil.copytree(_checkpoint(store), newer)
    (newer / "manifest.json").write_text("[" * 50_000 + "]" * 50_000)


def _many(store: Path, _: Path) -> None:
    for number in range(3000):
        (store / f"{number + 100:08d}-iteration-{number}").mkdir()


def _held(store: Path, _: Path) -> int:
    """Somebody else has a lock on the file, over all of it."""
    fd = os.open(store / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    return fd


def _fifo_in_checkpoint(store: Path, _: Path) -> None:
    newer = store / "00000099-iteration-99"
    newer.mkdir()
    os.mkfifo(newer / "manifest.json")


def _log(content: bytes) -> Callable[[Path, Path], None]:
    def make(store: Path, _: Path) -> None:
        (store / "saver.log").write_bytes(content)

    return make


HOSTILE: dict[str, Callable[[Path, Path], int | None]] = {
    "a FIFO named saver.log": _fifo("saver.log"),
    "a FIFO named lock": _fifo("lock"),
    "a folder named lock": _folder("lock"),
    "a folder named saver.log": _folder("saver.log"),
    "a link named saver.log": _link("saver.log"),
    "a link named lock": _link("lock"),
    "links named as checkpoints and leftovers": _linked_folders,
    "a serial number of 17 digits": _newer("99999999999999999-iteration-3"),
    "a serial number of 200 digits": _newer("9" * 200 + "-iteration-3"),
    "an iteration of 200 digits": _newer("00000099-iteration-" + "9" * 200),
    "a name with escapes": _newer("00000099-iteration-3\x1b[31m\x07"),
    "a name with markup": _newer("00000099-iteration-[red]3"),
    "a name that is not UTF-8": _newer("00000099-iteration-3\udcff"),
    "a name with a line's end": _newer("00000099-iteration-3\nchecked: all is well"),
    "a manifest of 1 TiB": _sparse("manifest.json"),
    "a model of 1 TiB": _sparse("model.safetensors"),
    "a commit record of 1 TiB": _sparse("commit.json"),
    "a manifest of nested lists": _nested,
    "a FIFO named manifest.json": _fifo_in_checkpoint,
    "3000 empty checkpoints": _many,
    "a lock that is held": _held,
    "a log of escapes": _log(b"\x1b[2J\x07[red]ruin\xff\xfe\n" * 10),
    "a log of 1 MB in one line": _log(b"x" * 10**6),
}
