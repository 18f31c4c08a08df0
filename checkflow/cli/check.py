"""checkflow check: read every byte of a store's checkpoints and compare it with what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path

import click

from checkflow.cli import _console
from checkflow.cli._buckets import compared, is_url
from checkflow.cli._options import GivenPath, json_option
from checkflow.errors import EXIT_DONE, EXIT_NO, InputError, StoreError
from checkflow.store.both.lock import check_is_store
from checkflow.store.format.ranks import directory_of, ranks_have, ranks_in
from checkflow.store.format.reader import checkpoint_names
from checkflow.store.repair import Checked, check_store, repair_store


@click.command()
@click.argument("store", type=GivenPath())
@click.option("--repair", is_flag=True, help="Remove what does not verify, saying so first. Nobody may be training.")
@json_option
def command(store: str, repair: bool, as_json: bool) -> int:
    """Verify every checkpoint of STORE. Exit code 1 if one is not what was written, unless --repair removed it.

    Of a training in several processes each one's directory is a store, and checked as one; and there has to be a
    checkpoint of which every one has its part; a newer one of which each once had is told. STORE may be the URL of a
    bucket, s3://bucket/prefix: then every byte in it is read.
    """
    if not is_url(store):
        return _of_store(Path(store), repair=repair, as_json=as_json)
    if repair:
        raise InputError(f"--repair: {store} is a bucket, from which nothing is removed; leave the option out")
    return _of_bucket(store, as_json=as_json)


def _of_bucket(url: str, *, as_json: bool) -> int:
    with _console.progress() as progress:
        found, whole = compared(url, progress)
    wrong = [{"name": name, "reason": reason} for name, reason in found.items() if reason is not None]
    if as_json:
        verified = [name for name, reason in found.items() if reason is None]
        click.echo(json.dumps({"store": url, "verified": verified, "wrong": wrong, "leftovers": [], "removed": False}))
    else:
        lines = [f"{name}: {reason or 'verified'}" for name, reason in found.items()]
        for line in lines or [f"{url}: no checkpoint yet"]:
            _console.say(line)
    _tell_whole(url, whole, as_json=as_json)
    return EXIT_NO if wrong or whole == [] else EXIT_DONE


def _of_store(store: Path, *, repair: bool, as_json: bool) -> int:
    of_ranks = bool(ranks_in(store))
    noted = _noted(store) if of_ranks else set()  # first: a trainer that runs makes more whole meanwhile
    ranks = [directory_of(rank, size) for size, found in ranks_in(store).items() for rank in found]
    stores = [store / name for name in ranks if checkpoint_names(store / name)]
    stores += [store] if checkpoint_names(store) or not stores else []
    found: dict[Path, Checked] = {}
    with _console.progress() as progress:
        for each in stores:
            found[each] = repair_store(each, _console.tell, progress) if repair else check_store(each, progress)
    failed = [line for checked in found.values() for line in checked.failed]
    if failed:
        for line in failed:
            _console.tell(f"cannot be removed: {line}")
        raise StoreError(f"{store}: {len(failed)} could not be removed; remove what is in the way, and repeat this")
    if not of_ranks and not any(each.verified or each.wrong or each.leftovers for each in found.values()):
        check_is_store(store)
    wrong = {skipped.path for checked in found.values() for skipped in checked.wrong}
    verified = {checkpoint.path for checked in found.values() for checkpoint in checked.verified}
    whole, lost = _whole(store, verified, wrong, noted) if verified and of_ranks else (None, {})
    if as_json:
        for each, checked in found.items():
            figures = {
                "store": str(each),
                "verified": [checkpoint.path.name for checkpoint in checked.verified],
                "wrong": [{"name": wrong.path.name, "reason": wrong.reason} for wrong in checked.wrong],
                "leftovers": [path.name for path in checked.leftovers],
                "removed": repair,
            }
            click.echo(json.dumps(figures))
    else:
        for each, checked in found.items():
            _print(each, checked, removed=repair, within=each != store)
    _tell_whole(str(store), whole, lost, as_json=as_json)
    return EXIT_NO if (wrong and not repair) or whole == [] else EXIT_DONE


def _noted(store: Path) -> Set[tuple[object, int]]:
    """Checkpoints of several processes of which each once had its part on disk, with how many there were."""
    from checkflow.distributed.parts import noted_in  # which needs torch

    return noted_in(store).keys()


def _whole(
    store: Path, verified: Set[Path], wrong: Set[Path], noted: Set[tuple[object, int]]
) -> tuple[list[int], dict[int, list[int]]]:
    """Iterations, newest first, of which each of several processes has a part that verifies; and newer ones that each
    once had on disk, with the ranks that have none now, or one that is wrong."""
    from checkflow.distributed.parts import gathered_in  # which needs torch

    whole: list[int] = []
    lost: dict[int, list[int]] = {}
    is_newer = True  # than any that has all its parts, read or not
    for each in gathered_in(store):
        sound = {rank for rank, part in each.ranks.items() if part.checkpoint.path not in wrong}
        lacking = sorted(set(range(each.size)) - sound)
        is_newer = is_newer and bool(lacking)
        if is_newer and (each.mark, each.size) in noted:
            lost.setdefault(each.mark.iteration, lacking)
        if not lacking and all(part.checkpoint.path in verified for part in each.ranks.values()):
            whole.append(each.mark.iteration)
    return whole, lost


def _tell_whole(
    store: str, whole: list[int] | None, lost: Mapping[int, list[int]] | None = None, *, as_json: bool
) -> None:
    """Of several processes. `lost`: None where it is not known."""
    if whole is None:
        return
    if as_json:
        rows = [{"iteration": iteration, "ranks": ranks} for iteration, ranks in (lost or {}).items()]
        click.echo(json.dumps({"store": store, "whole": whole} | ({} if lost is None else {"lost": rows})))
        return
    for iteration, ranks in (lost or {}).items():
        _console.say(f"{store}: iteration {iteration} was whole, and {ranks_have(ranks)} no sound part of it any more")
    if whole:
        _console.say(f"{store}: the newest of which every rank's part verifies is of iteration {whole[0]}")
    else:
        _console.say(f"{store}: no checkpoint of which every rank has a part that verifies; one is missing, or damaged")


def _print(store: Path, checked: Checked, *, removed: bool, within: bool) -> None:
    before = f"{store.name}/" if within else ""
    lines = [f"{checkpoint.path.name}: verified" for checkpoint in checked.verified]
    lines += [f"{wrong}{' (removed)' if removed else ''}" for wrong in checked.wrong]
    lines += [
        f"{path.name}: {'removed' if removed else 'unfinished, of a saver that was killed or runs; harmless'}"
        for path in checked.leftovers
    ]
    for line in lines or [f"{store}: no checkpoint yet"]:
        _console.say(before + line)
