"""Damage to a store's files: no wrong byte is restored, what is sound is, and what was skipped is said."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import xxhash

from checkflow.errors import CorruptStoreError
from checkflow.store.format.reader import list_checkpoints, load_newest
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.persist_every import PersistEvery
from torturing.bench import HANG_S, Bench
from torturing.results import Outcome
from torturing.settings import Setting

RUNS = (1, 6)
DAMAGES = {True: 40, False: 80}  # to copies of one store, by whether it is short
RESTORED = 10  # each so many-th is also restored by a training
EACH = Setting("slots=3 wait, persist each", 3, "wait", PersistEvery(iterations=1))
KEPT = Retention().last

Files = dict[str, int]


def run(bench: Bench, chance: Random, _: int) -> Iterator[Outcome]:
    """One store, many copies, a few damages to each."""
    life = bench.live(replace(bench.plan(EACH), more=chance.randrange(KEPT + 1, 20)))
    life.forked.wait(HANG_S)
    life.forked.end()
    bench.alone()
    sound = bench.folder / "sound"
    bench.store.rename(sound)
    contents = {found.path.name: _files(found.path) for found in list_checkpoints(sound)}
    for number in range(DAMAGES[bench.short]):
        shutil.copytree(sound, bench.store)
        names = [_damage(bench.store, chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
        wrong, newest = _read(bench.store, contents)
        rough = ""
        if not wrong and number % RESTORED == 0:
            wrong = _trained(bench, newest)
        yield Outcome(", ".join(names), identical=not wrong, wrong=wrong, rough=rough)
        shutil.rmtree(bench.store)


def _read(store: Path, contents: dict[str, Files]) -> tuple[str, int | None]:
    """What is wrong with what a reader gets, and the iteration; None where it refuses."""
    try:
        loaded = load_newest(store).loaded
    except CorruptStoreError as error:
        left = [found for found in store.iterdir() if _intact(found, contents)]
        return (f"refused, though {left[0].name} is intact: {error}" if left else ""), None
    if loaded is None:
        left = [found for found in store.iterdir() if _intact(found, contents)]
        return (f"taken for empty, though {left[0].name} is intact" if left else ""), 0
    iteration = loaded.checkpoint.iteration
    for name, content in loaded.files.items():
        if contents.get(loaded.checkpoint.path.name, {}).get(name) != xxhash.xxh3_64_intdigest(content):
            return f"wrong bytes of {name} of iteration {iteration} were given out", iteration
    return "", iteration


def _trained(bench: Bench, newest: int | None) -> str:
    """A training restores that, or refuses in one line."""
    if newest is not None:
        return bench.finish(replace(bench.plan(), more=2))
    life = bench.live(replace(bench.plan(), more=2))
    code = life.forked.wait(HANG_S)
    life.forked.end()
    bench.alone()
    line, internal = life.trouble()
    return "" if code in (1, 2) and line and not internal else f"a store that is refused ended with {code}: {internal}"


def _files(checkpoint: Path) -> Files:
    return {path.name: xxhash.xxh3_64_intdigest(path.read_bytes()) for path in checkpoint.iterdir()}


def _intact(path: Path, contents: dict[str, Files]) -> bool:
    """Whether this is one of the checkpoints as it was."""
    wanted = contents.get(path.name)
    if wanted is None or any(file.is_symlink() for file in path.iterdir()):
        return False
    found = _files(path)
    return all(found.get(name) == value for name, value in wanted.items())


def _damage(store: Path, chance: Random) -> str:
    """One kind of damage to one file of one checkpoint; says which."""
    checkpoints = [path for path in store.iterdir() if path.is_dir()]
    files = [path for folder in checkpoints for path in sorted(folder.iterdir()) if path.is_file()]
    if not files:
        return "nothing left"
    name, path = chance.choice(list(KINDS)), chance.choice(files)
    KINDS[name](path, files, chance)
    return f"{name} {path.name}"


def _flip(path: Path, _: list[Path], chance: Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def _zero(path: Path, _: list[Path], chance: Random) -> None:
    """A block that the device lost."""
    content = bytearray(path.read_bytes())
    at = chance.randrange(0, len(content), 4096) if content else 0
    content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    path.write_bytes(content)


def _shuffle(path: Path, _: list[Path], chance: Random) -> None:
    """Two blocks in each other's place."""
    content = bytearray(path.read_bytes())
    first, second = (chance.randrange(0, max(1, len(content) - 4096), 512) for _ in range(2))
    one, other = content[first : first + 512], content[second : second + 512]
    content[first : first + 512], content[second : second + 512] = other, one
    path.write_bytes(content)


def _truncate(path: Path, _: list[Path], chance: Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


def _grow(path: Path, _: list[Path], chance: Random) -> None:
    with path.open("ab") as file:
        file.write(bytes(chance.randrange(1, 5000)))


def _remove(path: Path, _: list[Path], __: Random) -> None:
    path.unlink()


def _swap(path: Path, files: list[Path], chance: Random) -> None:
    """With any other file, most often that of the same name in another checkpoint."""
    alike = [other for other in files if other.name == path.name and other != path]
    other = chance.choice(alike if alike and chance.random() < 0.7 else files)
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _rename(path: Path, _: list[Path], chance: Random) -> None:
    """The checkpoint gets another number."""
    number = chance.randrange(1, 200)
    target = path.parent.with_name(f"{number:08d}-iteration-{chance.randrange(1, 60)}")
    if not target.exists():
        path.parent.rename(target)


def _copy(path: Path, _: list[Path], chance: Random) -> None:
    """The checkpoint is there twice, once under a newer serial number."""
    serial, iteration = path.parent.name.split("-iteration-")
    target = path.parent.with_name(f"{int(serial) + chance.randrange(1, 90):08d}-iteration-{iteration}")
    if not target.exists():
        shutil.copytree(path.parent, target)


def _link(path: Path, _: list[Path], __: Random) -> None:
    """The file is somewhere else, and a link to it in its place."""
    moved = path.parent.parent / f"moved-{path.parent.name}-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


KINDS: dict[str, Callable[[Path, list[Path], Random], None]] = {
    "flipped bit in": _flip, "zeroed block in": _zero, "shuffled blocks in": _shuffle, "truncated": _truncate,
    "grown": _grow, "removed": _remove, "swapped": _swap, "renamed with": _rename, "copied with": _copy,
    "linked": _link,
}  # fmt: skip
