"""checkflow check: read every byte of a store's checkpoints and compare it with what was written."""

from __future__ import annotations

import json
from pathlib import Path

import click

from checkflow.cli import _console
from checkflow.cli._buckets import compared, is_url
from checkflow.cli._options import json_option
from checkflow.errors import EXIT_DONE, EXIT_NO, InputError
from checkflow.store.format.ranks import directory_of, ranks_in
from checkflow.store.format.reader import checkpoint_names
from checkflow.store.repair import Checked, check_store, repair_store


@click.command()
@click.argument("store", type=click.Path())
@click.option("--repair", is_flag=True, help="Remove what does not verify, saying so first. Nobody may be training.")
@json_option
def command(store: str, repair: bool, as_json: bool) -> int:
    """Verify every checkpoint of STORE. Exit code 1 if one is not what was written, unless --repair removed it.

    Of a training in several processes each one's directory is a store, and checked as one. STORE may be the URL of a
    bucket, s3://bucket/prefix: then every byte in it is read.
    """
    if not is_url(store):
        return _of_store(Path(store), repair=repair, as_json=as_json)
    if repair:
        raise InputError(f"--repair: {store} is a bucket, from which nothing is removed; leave the option out")
    with _console.progress() as progress:
        found = list(compared(store, progress))
    wrong = [{"name": name, "reason": reason} for name, reason in found if reason is not None]
    if as_json:
        verified = [name for name, reason in found if reason is None]
        click.echo(
            json.dumps({"store": store, "verified": verified, "wrong": wrong, "leftovers": [], "removed": False})
        )
    else:
        for line in [f"{name}: {reason or 'verified'}" for name, reason in found] or [f"{store}: no checkpoint yet"]:
            _console.say(line)
    return EXIT_NO if wrong else EXIT_DONE


def _of_store(store: Path, *, repair: bool, as_json: bool) -> int:
    ranks = [directory_of(rank, size) for size, found in ranks_in(store).items() for rank in found]
    stores = [store / name for name in ranks if checkpoint_names(store / name)] or [store]
    found: dict[Path, Checked] = {}
    with _console.progress() as progress:
        for each in stores:
            found[each] = repair_store(each, _console.tell, progress) if repair else check_store(each, progress)
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
    return EXIT_NO if any(checked.wrong for checked in found.values()) and not repair else EXIT_DONE


def _print(store: Path, checked: Checked, *, removed: bool, within: bool) -> None:
    before = f"{store.name}/" if within else ""
    lines = [f"{checkpoint.path.name}: verified" for checkpoint in checked.verified]
    lines += [f"{wrong}{' (removed)' if removed else ''}" for wrong in checked.wrong]
    lines += [
        f"{path.name}: {'removed' if removed else 'left by a killed saver; harmless'}" for path in checked.leftovers
    ]
    for line in lines or [f"{store}: no checkpoint yet"]:
        _console.say(before + line)
