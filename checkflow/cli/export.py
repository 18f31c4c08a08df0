"""checkflow export: a verified checkpoint, for other tools."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from checkflow import strictjson
from checkflow.cli import _console
from checkflow.cli._buckets import fetched, is_url
from checkflow.cli._options import GivenPath, OutputPath, json_option
from checkflow.dtypes import CODES
from checkflow.errors import EXIT_DONE, FormatError, InputError, StoreError, remedy
from checkflow.jsonfile import folder_beside, is_there
from checkflow.lanes import lane_of
from checkflow.store.both.lock import check_is_store
from checkflow.store.format.manifest import RECORD
from checkflow.store.format.ranks import ranks_in
from checkflow.store.format.reader import Loaded, SkippedCheckpoint, load_newest
from checkflow.store.format.tensor_file import contents_of

if TYPE_CHECKING:
    import torch


@click.command()
@click.argument("store", type=GivenPath())
@click.option("--to", "target", type=click.Choice(["safetensors", "torch", "dcp"]), required=True)
@click.option("-o", "--output", type=OutputPath(), required=True, help="A file for torch, else a directory.")
@click.option("--iteration", type=int, help="Which checkpoint  [default: the newest that verifies]")
@json_option
def command(store: str, target: str, output: Path, iteration: int | None, as_json: bool) -> int:
    """Write a checkpoint of STORE for other tools.

    safetensors: the files as they are. torch: one file for torch.load(weights_only=True), a dictionary of each file's
    tensors by name, with the commit record as "commit": "model" is what load_state_dict() of the model takes,
    "optimizer" is by parameter and entry. dcp: the same for torch.distributed.checkpoint. The parts of a training in
    several processes are put together, with the parameters of all that any of them had; state that differs by rank
    (generators, loader) is taken from rank 0. STORE may be the URL of a bucket, s3://bucket/prefix: the checkpoint then
    lies beside the output for a while, too.
    """
    _check_new(output)
    if not os.path.isdir(output.parent):  # noqa: PTH112 (never raises)
        raise InputError(f"--output {output}: there is no directory {output.parent}; make it first")
    with _console.progress() as progress:
        progress(f"reading {store}")
        if is_url(store):
            with fetched(store, iteration, output, progress) as copy:
                loaded = _loaded(copy, store, iteration, progress)
        else:
            loaded = _loaded(Path(store), store, iteration, progress)
        progress(f"writing {output}")
        _write(target, loaded, output)
    checkpoint = loaded.checkpoint
    if as_json:
        figures = {"checkpoint": checkpoint.path.name, "iteration": checkpoint.iteration, "output": str(output)}
        click.echo(json.dumps(figures))
    else:
        _console.say(f"{output}: {checkpoint.path.name}, verified, as {target}")
    return EXIT_DONE


def _check_new(output: Path) -> None:
    try:
        if is_there(output, follow_symlinks=False):
            raise InputError(f"--output {output}: exists; choose a new name, nothing is overwritten")
    except OSError as error:
        raise InputError(f"--output {output}: cannot be written ({error.strerror}); choose another") from None


def _write(target: str, loaded: Loaded, output: Path) -> None:
    """Whole and durable, or not at all. Raises InputError where that cannot be done."""
    try:
        with folder_beside(output) as folder:  # whoever exports beside this has one of another name
            whole = Path(folder) / output.name
            _WRITERS[target](loaded, whole)
            _sync(whole)
            _check_new(output)
            whole.rename(output)
        _sync_one(output.parent)
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(
            f"--output {output}: cannot be written ({why}); {remedy(error, 'check the folder')}, or choose another"
        ) from None
    except RuntimeError as error:  # of torch's own writers
        why = "the disk may be full" if "inline_container" in str(error) else str(error)
        raise InputError(f"--output {output}: cannot be written ({why}); free space, or choose another") from None


def _sync(path: Path) -> None:
    """All below it, too."""
    for each in path.iterdir() if path.is_dir() else ():
        _sync(each)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _loaded(store: Path, called: str, iteration: int | None, progress: Callable[[str], None]) -> Loaded:
    """The newest that verifies. `called`: the store, as it was given."""
    return _of_ranks(store, called, iteration) if ranks_in(store) else _of_one(store, called, iteration, progress)


def _of_ranks(store: Path, called: str, iteration: int | None) -> Loaded:
    """The newest that verifies, as one whole."""
    from checkflow.distributed.resharding import consolidated  # which needs torch

    try:
        found = consolidated(store, iteration)
    except (InputError, FormatError) as error:
        raise type(error)(f"{called}: {error}") from None
    _tell_skipped(found.skipped)
    _tell_made(found.loaded, found.updates, found.differs)
    return found.loaded


def _of_one(store: Path, called: str, iteration: int | None, progress: Callable[[str], None]) -> Loaded:
    """The newest that verifies."""
    found = load_newest(store, iteration)
    if found.loaded is None:
        check_is_store(store)
        raise StoreError(f"{store}: no checkpoint yet; nothing to export")
    _tell_skipped(found.skipped)
    return _whole(called, found.loaded, progress)


def _tell_skipped(skipped: Iterable[SkippedCheckpoint]) -> None:
    for each in skipped:
        _console.tell(f"checkflow: skipped {each}")


def _whole(called: str, loaded: Loaded, progress: Callable[[str], None]) -> Loaded:
    """Files of several iterations are no state until the updates are made again that lead to one.

    Raises InputError for one of several processes: it has what it saves, and no more.
    """
    try:
        record = strictjson.loads(loaded.record)
    except (ValueError, RecursionError):
        return loaded  # it is exported as it is
    if not isinstance(record, dict):
        return loaded
    member = record.get("member")
    if isinstance(member, dict) and isinstance(size := member.get("size"), int) and size > 1:
        raise InputError(
            f"{called}: has rank {member.get('rank')}'s part of a training in {size} processes; "
            "export the directory that has all their directories"
        )
    if not any(lane_of(name) or name.startswith("gradient.") for name in loaded.files):
        return loaded
    from checkflow.state.restore.rebuild import whole  # torch is not needed for a copy

    name = loaded.checkpoint.path.name
    progress(f"bringing {name} together")
    try:
        found = whole(loaded.files, loaded.record)
    except (InputError, FormatError) as error:
        raise type(error)(f"{called}: {name}: {error}") from None
    _tell_made(loaded, found.updates, found.differs)
    return Loaded(loaded.checkpoint, dict(found.files), found.record)


def _tell_made(loaded: Loaded, updates: int, differs: str) -> None:
    if updates:
        made = f"checkflow: {loaded.checkpoint.path.name} was saved in parts; {updates} updates were made again here"
        if differs:
            made += f"; their last bits may differ from the training's: {differs}"
        _console.tell(made)


def _safetensors(loaded: Loaded, path: Path) -> None:
    path.mkdir()
    for name, data in loaded.files.items():
        (path / name).write_bytes(data)
    (path / RECORD).write_bytes(loaded.record)


def _torch(loaded: Loaded, path: Path) -> None:
    import torch

    torch.save(_state(loaded), path)


def _dcp(loaded: Loaded, path: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    state: dict[str, object] = dict(_state(loaded))
    with warnings.catch_warnings(action="ignore"):  # that nothing is distributed is what no_dist says
        try:
            save(state, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:  # no Exception, and its text is tracebacks
            why = next(iter(error.failures.values()))[0]
            raise why if isinstance(why, OSError) else RuntimeError(str(why)) from None


def _state(loaded: Loaded) -> dict[str, dict[str, torch.Tensor] | str]:
    """{"model": tensors by name, tied names too, "optimizer": ..., "commit": the record's text}."""
    import torch

    dtypes = {code: getattr(torch, name) for name, code in CODES.items()}
    state: dict[str, dict[str, torch.Tensor] | str] = {"commit": loaded.record.decode(errors="replace")}
    for name, data in loaded.files.items():
        contents = contents_of(name, data)
        tensors = {}
        for key, stored in contents.tensors.items():  # safetensors' own reader lacks some dtypes, and copies
            flat = (
                torch.frombuffer(stored.data, dtype=torch.uint8)
                if len(stored.data)
                else torch.empty(0, dtype=torch.uint8)
            )
            tensors[key] = flat.view(dtypes[stored.dtype]).reshape(stored.shape)
        for alias, target in contents.aliases.items():
            tensors[alias] = tensors[target]
        state[name.removesuffix(".safetensors")] = tensors
    return state


_WRITERS = {"safetensors": _safetensors, "torch": _torch, "dcp": _dcp}
