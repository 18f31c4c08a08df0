"""Execute notebooks from a clean kernel, and write them with their outputs, or check what is committed.

    python notebooks/execute.py [NOTEBOOK...]           execute and write in place; without names, every notebook here
    python notebooks/execute.py --check [NOTEBOOK...]   execute, write nothing, and tell what is wrong

A notebook is written without times of execution and without what the machine is called, so that a diff shows what
changed. Outputs of cells tagged "deterministic" are the same on every machine: --check compares their text. Every
notebook has to name no folder of the machine that executed it, and to stay small. Exit code 1: something is wrong.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from nbformat import NotebookNode
except ImportError as error:
    sys.stderr.write(f"notebooks: needs {error.name}; pip install 'checkflow[notebooks]'\n")
    sys.exit(2)

HERE = Path(__file__).parent
DETERMINISTIC = "deterministic"  # the tag
LARGEST_BYTES = 500_000
CELL_LIMIT_S = 300
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--check", action="store_true", help="compare with what is committed; write nothing")
    chosen = parser.parse_args()
    wrong = 0
    for path in chosen.notebooks or sorted(HERE.glob("*.ipynb")):
        try:
            found = list(check(path) if chosen.check else write(path))
        except CellExecutionError as error:
            found = [f"a cell failed: {error}"]
        for problem in found:
            print(f"{path.name}: {problem}")
        print(f"{path.name}: {'not as it should be' if found else 'checked' if chosen.check else 'written'}")
        wrong += len(found)
    return 1 if wrong else 0


def write(path: Path) -> Iterator[str]:
    """Execute a notebook in place; yields what is wrong with the result."""
    executed = execute(nbformat.read(path, as_version=4))
    nbformat.write(executed, path)
    yield from complaints(executed)


def check(path: Path) -> Iterator[str]:
    """Yields what is wrong with the committed outputs, and where an execution now gives others."""
    committed = nbformat.read(path, as_version=4)
    yield from complaints(committed)
    executed = execute(committed)
    for number, (before, now) in enumerate(zip(_code(committed), _code(executed), strict=True), start=1):
        if DETERMINISTIC in before.metadata.get("tags", []) and printed(before) != printed(now):
            yield f"code cell {number}: is committed with {printed(before)!r} and now gives {printed(now)!r}"


def execute(notebook: NotebookNode) -> NotebookNode:
    """The notebook with the outputs of a clean kernel, in a folder of its own, from which `evaluation` can be imported.

    Raises CellExecutionError.
    """
    fresh = copy.deepcopy(notebook)
    fresh.metadata = NotebookNode(kernelspec=KERNEL, source_sha256=source_sha256(notebook))
    for cell in _code(fresh):
        cell.execution_count, cell.outputs = None, []
    found = (str(HERE.resolve()), os.environ.get("PYTHONPATH", ""))
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            fresh,
            timeout=CELL_LIMIT_S,
            kernel_name=KERNEL["name"],
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))})
    fresh.metadata.pop("language_info", None)  # says which Python it was
    return fresh


def complaints(notebook: NotebookNode) -> Iterator[str]:
    """What a committed notebook must not be: unexecuted, changed since, of one machine, or large."""
    counts = [cell.execution_count for cell in _code(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"its cells were not executed in order from a clean kernel ({counts}); run make notebooks"
    if notebook.metadata.get("source_sha256") != source_sha256(notebook):
        yield "its code was changed after it was executed; run make notebooks"
    for number, cell in enumerate(_code(notebook), start=1):
        if folder := next((name for name in _machine_folders() if name in text_of(cell)), None):
            yield f"code cell {number}: its output names {folder}, a folder of this machine; print a relative path"
    size_bytes = len(nbformat.writes(notebook).encode())
    if size_bytes > LARGEST_BYTES:
        yield f"is {size_bytes} bytes with its outputs; keep it under {LARGEST_BYTES}"


def source_sha256(notebook: NotebookNode) -> str:
    """Of the code, so that outputs are known to be of this code and of no other."""
    return hashlib.sha256("\0".join(cell.source for cell in _code(notebook)).encode()).hexdigest()


def printed(cell: NotebookNode) -> str:
    """Without standard error: progress is told there, with times, and from more than one thread."""
    return text_of(NotebookNode(outputs=[output for output in cell.outputs if output.get("name") != "stderr"]))


def text_of(cell: NotebookNode) -> str:
    """What a code cell printed and what its last expression is, as text."""
    parts = [
        output.text if "text" in output else output.get("data", {}).get("text/plain", "") for output in cell.outputs
    ]
    return re.sub(r"[ \t]+$", "", "".join(parts), flags=re.MULTILINE)


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _machine_folders() -> set[str]:
    """Folders whose names are nobody else's: those of files, of the user, of Python and of temporary files."""
    found = {tempfile.gettempdir(), sys.prefix, sys.base_prefix, str(HERE.resolve().parent), str(Path.home())}
    return {name + "/" for name in found if name not in ("/", "/usr")}


if __name__ == "__main__":
    sys.exit(main())
