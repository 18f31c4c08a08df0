"""checkflow list: the checkpoints of a store, or of the bucket behind one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.text import Text

from checkflow.about import About, about_in
from checkflow.cli import _console
from checkflow.cli._buckets import is_url, opened
from checkflow.cli._options import GivenPath, json_option
from checkflow.errors import EXIT_DONE, CorruptStoreError
from checkflow.report.columns import Column, Columns
from checkflow.store.both.lock import check_is_store
from checkflow.store.bucket.names import BucketContents, has_ranks, iteration_of, read_manifest
from checkflow.store.bucket.objects import Objects
from checkflow.store.format.manifest import RECORD, Manifest
from checkflow.store.format.ranks import ranks_have, ranks_in
from checkflow.store.format.reader import Checkpoint, list_checkpoints, nothing_is_scarce, read_file
from checkflow.text import plain
from checkflow.units import format_bytes

MOST_IN_CELL = 300  # characters


@click.command()
@click.argument("store", type=GivenPath())
@json_option
def command(store: str, as_json: bool) -> int:
    """List the checkpoints of STORE, newest first. Manifests and records are read; `checkflow check` reads the rest.

    Of a training in several processes those are listed of which any has a part, with how many have. STORE may be the
    URL of a bucket, s3://bucket/prefix: then its manifests are read.
    """
    return _of_bucket(store, as_json=as_json) if is_url(store) else _of_store(Path(store), as_json=as_json)


def _of_store(store: Path, *, as_json: bool) -> int:
    if ranks_in(store):
        return _of_ranks(store, as_json=as_json)
    found = list_checkpoints(store)
    if not found:
        check_is_store(store)
    if as_json:
        rows = [
            {
                "name": checkpoint.path.name,
                "iteration": checkpoint.iteration,
                "size_bytes": checkpoint.manifest.size_bytes,
                "created": checkpoint.manifest.created,
                "keep": checkpoint.kept,
                **_told(checkpoint),
            }
            if isinstance(checkpoint, Checkpoint)
            else {"name": checkpoint.path.name, "iteration": checkpoint.iteration, "wrong": checkpoint.reason}
            for checkpoint in found
        ]
        click.echo(json.dumps({"store": str(store), "checkpoints": rows}))
        return EXIT_DONE
    if not found:
        _console.say(f"{store}: no checkpoint yet")
        return EXIT_DONE
    told: list[Sequence[str]] = []
    for checkpoint in found:
        if isinstance(checkpoint, Checkpoint):
            manifest = checkpoint.manifest
            note = "retained for good" if checkpoint.kept else ""
            cells = (format_bytes(manifest.size_bytes), manifest.created, _words(_read(checkpoint)[0]), note)
        else:
            cells = ("", "", "", checkpoint.reason)
        told.append((checkpoint.path.name, str(checkpoint.iteration), *cells))
    _show(("checkpoint", "iteration", "size", "created", "of", ""), told)
    return EXIT_DONE


@dataclass(frozen=True, slots=True)
class _Parts:
    """A checkpoint of several processes: the sizes in bytes of the parts that there are, by rank."""

    iteration: int
    attempt: int
    processes: int
    sizes_bytes: Mapping[int, int]
    created: str  # the last of them


def _of_ranks(store: Path, *, as_json: bool) -> int:
    from checkflow.distributed.parts import gathered_in  # which needs torch

    found = []
    for each in gathered_in(store):
        manifests = {rank: part.checkpoint.manifest for rank, part in each.ranks.items()}
        found.append(_parts(each.mark.attempt, each.size, manifests))
    return _tell_parts(str(store), found, as_json=as_json)


def _parts(attempt: int, processes: int, manifests: Mapping[int, Manifest]) -> _Parts:
    sizes_bytes = {rank: manifest.size_bytes for rank, manifest in sorted(manifests.items())}
    created = max(manifest.created for manifest in manifests.values())
    iteration = next(iter(manifests.values())).iteration
    return _Parts(iteration, attempt, processes, sizes_bytes, created)


def _tell_parts(store: str, found: Sequence[_Parts], *, as_json: bool) -> int:
    if as_json:
        rows = [
            {
                "iteration": each.iteration,
                "attempt": each.attempt,
                "processes": each.processes,
                "ranks": list(each.sizes_bytes),
                "size_bytes": sum(each.sizes_bytes.values()),
                "created": each.created,
            }
            for each in found
        ]
        click.echo(json.dumps({"store": store, "checkpoints": rows}))
        return EXIT_DONE
    if not found:
        _console.say(f"{store}: no checkpoint yet")
        return EXIT_DONE
    told: list[Sequence[str]] = []
    for each in found:
        missing = sorted(set(range(each.processes)) - each.sizes_bytes.keys())
        note = f"{ranks_have(missing)} no part of it" if missing else ""
        numbers = (str(each.iteration), str(each.attempt), str(each.processes))
        told.append((*numbers, format_bytes(sum(each.sizes_bytes.values())), each.created, note))
    _show(("iteration", "attempt", "processes", "size", "created", ""), told)
    return EXIT_DONE


def _of_bucket(url: str, *, as_json: bool) -> int:
    with opened(url) as objects:
        sizes = objects.sizes()
        if has_ranks(sizes):
            return _tell_parts(url, _parts_in(objects, sizes), as_json=as_json)
        contents = BucketContents.of(sizes)
        found = [(name, _manifest(objects, name, contents)) for name in contents.newest_first]
    rows = [
        {
            "name": name,
            "iteration": manifest.iteration,
            "size_bytes": manifest.size_bytes,
            "created": manifest.created,
            "keep": manifest.keep or contents.is_kept(name),
        }
        if isinstance(manifest, Manifest)
        else {"name": name, "iteration": iteration_of(name), "wrong": manifest}
        for name, manifest in found
    ]
    if as_json:
        click.echo(json.dumps({"store": url, "checkpoints": rows}))
        return EXIT_DONE
    if not rows:
        _console.say(f"{url}: no checkpoint yet")
        return EXIT_DONE
    told: list[Sequence[str]] = []
    for row, (_, manifest) in zip(rows, found, strict=True):
        size = format_bytes(manifest.size_bytes) if isinstance(manifest, Manifest) else ""
        note = row.get("wrong") or ("retained for good" if row["keep"] else "")
        told.append([str(cell) for cell in (row["name"], row["iteration"], size, row.get("created", ""), note)])
    _show(("checkpoint", "iteration", "size", "created", ""), told)
    return EXIT_DONE


def _parts_in(objects: Objects, sizes: Mapping[str, int]) -> list[_Parts]:
    """Newest first; what is no part of anything is told."""
    from checkflow.distributed.stored import parts_in  # which needs torch

    return [
        _parts(each.mark.attempt, each.processes, {rank: part.manifest for rank, part in each.ranks.items()})
        for each in parts_in(objects, sizes, _console.tell)
    ]


def _manifest(objects: Objects, name: str, contents: BucketContents) -> Manifest | str:
    """Or what is wrong with it."""
    try:
        return read_manifest(objects, name, contents.checkpoints[name])
    except CorruptStoreError as error:
        return str(error)


def _read(checkpoint: Checkpoint) -> tuple[About, dict[str, str]]:
    """Nothing where the record does not verify: that is for `checkflow check` to say."""
    try:
        with nothing_is_scarce(checkpoint.path):
            return about_in(bytes(read_file(checkpoint, RECORD)))
    except (CorruptStoreError, ValueError):
        return About(), {}


def _told(checkpoint: Checkpoint) -> dict[str, object]:
    about, versions = _read(checkpoint)
    return {**about.model_dump(mode="json"), "versions": versions}


def _words(about: About) -> str:
    """ "epoch 3, git 0123456789ab, config 89abcdef, imagenet, on node7"."""
    parts = [
        f"epoch {about.epoch}" if about.epoch is not None else "",
        f"git {about.git}" if about.git else "",
        f"config {about.config_digest.removeprefix('sha256:')[:8]}" if about.config_digest else "",
        about.dataset or "",
        f"on {about.host}" if about.host else "",
    ]
    return ", ".join(filter(None, parts))


def _show(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A string in a cell would be read as markup."""
    texts = [[Text(plain(cell, MOST_IN_CELL)) for cell in row] for row in rows]
    columns = [Column(name, each) for name, each in zip(headers, zip(*texts, strict=True), strict=True)]
    _console.out.print(Columns(columns[:1], [each for each in columns[1:] if each.name or any(each.texts)]))
