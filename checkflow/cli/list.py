"""checkflow list: the checkpoints of a store."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from checkflow.cli import _console
from checkflow.cli._options import json_option
from checkflow.errors import EXIT_DONE
from checkflow.store.format.reader import Checkpoint, list_checkpoints
from checkflow.text import plain
from checkflow.units import format_bytes

MOST_IN_CELL = 300  # characters


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@json_option
def command(store: Path, as_json: bool) -> int:
    """List the checkpoints of STORE, newest first. Manifests are read, data are not: `checkflow check` does that."""
    found = list_checkpoints(store)
    if as_json:
        rows = [
            {
                "name": checkpoint.path.name,
                "iteration": checkpoint.iteration,
                "size_bytes": checkpoint.manifest.size_bytes,
                "created": checkpoint.manifest.created,
                "keep": checkpoint.kept,
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
    table = Table("checkpoint", "iteration", "size", "created", "", box=None, pad_edge=False)
    for checkpoint in found:
        if isinstance(checkpoint, Checkpoint):
            manifest = checkpoint.manifest
            note = "retained for good" if checkpoint.kept else ""
            cells = (format_bytes(manifest.size_bytes), manifest.created, note)
        else:
            cells = ("", "", checkpoint.reason)
        row = (checkpoint.path.name, str(checkpoint.iteration), *cells)
        table.add_row(*(Text(plain(cell, MOST_IN_CELL)) for cell in row))  # a string would be read as markup
    _console.out.print(table)
    return EXIT_DONE
