"""make matrix: a sample of the suite under each Python and torch that checkflow supports.

    python tests/matrix.py [3.11/2.9 3.12/2.13 ...] [--frameworks] [--keep]

A cell is a Python and a torch, with the newest of everything else; 3.11/2.13/lightning==2.6.0 is one with a framework,
whose integration's tests run in it, and --frameworks is each at its oldest and its newest version. A cell's environment
is build/matrix/CELL, removed when
the cell is done; beside it stay its .log and its .json. The table, build/matrix/table.md, is of all cells that ever ran
there. Pythons are those on the path and pyenv's; a cell that cannot be set up says why. Exit code 1: a cell failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
HERE = ROOT / "build" / "matrix"
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.9", "2.10", "2.11", "2.12", "2.13")
CELLS = tuple(f"{python}/{torch}" for python in PYTHONS for torch in TORCHES)
NEEDED = ("pytest", "hypothesis", "jsonschema", "matplotlib", "safetensors", "torchdata")  # by the sample
# What touches torch: its private names, traces of networks and features, resumed trainings, captured bytes, attach.
SAMPLE = (
    "tests/test_torch_internals.py", "tests/test_public.py", "tests/test_foreach.py", "tests/trace/test_replay.py",
    "tests/trace/test_errors.py", "tests/trace/test_lifetimes.py", "tests/trace/test_anchors.py",
    "tests/trace/test_writes.py", "tests/trace/test_unlisted.py", "tests/state/test_resume_equality.py",
    "tests/state/test_resume_extra.py", "tests/state/test_factors.py",
    "tests/state/test_resume_codec.py", "tests/runtime/test_torn.py",
    "tests/runtime/test_executor.py", "tests/checkpointing/test_attach.py",
)  # fmt: skip
# An integration's framework, at the oldest version that its extra takes and the newest that was there.
FRAMEWORKS = {
    "accelerate": ("1.9", "1.15"),
    "lightning": ("2.6.0", "2.6.6"),
    "torchtitan": ("0.3", "0.3"),
    "transformers": ("5.5", "5.24"),
}
FRAMEWORK_CELLS = tuple(
    f"3.11/2.13/{name}=={version}" for name, versions in FRAMEWORKS.items() for version in dict.fromkeys(versions)
)
TEST_LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a cell."""

    cell: str
    python: str
    torch: str
    day: str
    passed: int
    failed: int
    skipped: int
    took_s: int
    why: str  # it failed or could not be set up; empty if all passed
    framework: str = ""  # with its version

    def line(self) -> str:
        framework = self.framework or "".join(self.cell.split("/")[2:])
        outcome = f"{framework} | {self.passed} | {self.failed} | {self.skipped} | {self.took_s}"
        return f"| {self.python} | {self.torch} | {outcome} | {self.day} | {self.why.replace('|', '/')} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="PYTHON/TORCH", help=f"default: {' '.join(CELLS)}")
    parser.add_argument("--frameworks", action="store_true", help=" ".join(FRAMEWORK_CELLS))
    parser.add_argument("--keep", action="store_true", help="environments, some GB each where torch is a CUDA build")
    chosen = parser.parse_args()
    for cell in chosen.cells:
        if not re.fullmatch(rf"3\.\d+/\d+(\.\d+)+(/({'|'.join(FRAMEWORKS)})==\d+(\.\d+)*)?", cell):
            parser.error(f"{cell!r}: a cell is PYTHON/TORCH, like 3.11/2.9, or PYTHON/TORCH/FRAMEWORK==VERSION")
    HERE.mkdir(parents=True, exist_ok=True)
    rows = []
    for cell in (*chosen.cells, *(FRAMEWORK_CELLS if chosen.frameworks else ())) or CELLS:
        sys.stderr.write(f"{cell} ...\n")
        rows.append(run(cell, chosen.keep))
        _stem(cell).with_suffix(".json").write_text(json.dumps(asdict(rows[-1]), indent=1) + "\n")
        (HERE / "table.md").write_text(table())
        sys.stderr.write(f"{rows[-1].line()}\n")
    sys.stdout.write(table())
    return int(any(row.why for row in rows))


def _stem(cell: str) -> Path:
    """Of a cell's files; a version's point is not a suffix's."""
    return HERE / cell.replace("/", "-").replace(".", "_").replace("==", "-")


def table() -> str:
    head = "| Python | torch | with | passed | failed | skipped | seconds | day | why |\n" + "|---" * 9 + "|\n"
    rows = [Row(**json.loads(path.read_text())) for path in HERE.glob("*.json")]
    ordered = sorted(rows, key=lambda row: [_ordinal(part) for part in row.cell.split("/")])
    return head + "".join(f"{row.line()}\n" for row in ordered)


def _ordinal(part: str) -> tuple[str, list[int]]:
    """3.9 comes before 3.11."""
    name, equals, version = part.partition("==")
    return (name if equals else "", [int(number) for number in (version or part).split(".")])


def run(cell: str, keep: bool) -> Row:
    """Set a cell up, run the sample in it, remove it."""
    python, torch, *_ = cell.split("/")
    day = datetime.now(UTC).date().isoformat()
    interpreter = find_python(python)
    if interpreter is None:
        return Row(cell, python, torch, day, 0, 0, 0, 0, f"no python{python} here")
    venv = _stem(cell)
    try:
        with venv.with_suffix(".log").open("w") as log:
            return _run(cell, interpreter, venv, log.fileno(), day)
    finally:
        if not keep:
            shutil.rmtree(venv, ignore_errors=True)


def _run(cell: str, interpreter: str, venv: Path, log: int, day: str) -> Row:
    python, torch, *framework = cell.split("/")
    name, _, pinned = (framework or [""])[0].partition("==")
    bin_python = str(venv / "bin" / "python")
    version = [_any_patch("torch", torch), *([_any_patch(name, pinned)] if name else [])]
    here = f"{ROOT}[{name}]" if name else str(ROOT)
    pip = [bin_python, "-m", "pip", "install", "--disable-pip-version-check"]
    for command in (
        [interpreter, "-m", "venv", "--clear", str(venv)],
        [*pip, *version, *NEEDED],
        [*pip, *version, "--editable", here],
    ):
        if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode:
            said = venv.with_suffix(".log").read_text().strip().splitlines()
            errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["the command said nothing"]
            return Row(cell, python, torch, day, 0, 0, 0, 0, f"not set up: {errors[0].removeprefix('ERROR: '):.160}")
    asked = "import platform, torch; print(platform.python_version(), torch.__version__)"
    if name:
        asked += f"; import importlib.metadata; print('{name}', importlib.metadata.version('{name}'))"
    found = subprocess.run([bin_python, "-c", asked], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        return Row(cell, python, torch, day, 0, 0, 0, 0, f"not imported: {found.stderr.strip().splitlines()[-1]}")
    python, torch, *framework = found.stdout.split(maxsplit=2)
    sample = sorted(map(str, (ROOT / "tests/integrations").glob(f"test_{name}*.py"))) if name else SAMPLE
    began = time.monotonic()
    tests = [bin_python, "-m", "pytest", "-p", "no:cacheprovider", "-rf", "--color=no", *sample]
    environment = os.environ | {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    try:
        ran = subprocess.run(
            tests, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            text=True, timeout=TEST_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Row(cell, python, torch, day, 0, 0, 0, TEST_LIMIT_S, f"took over {TEST_LIMIT_S} s")
    os.write(log, ran.stdout.encode())
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", _last(ran))}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    why = ""
    if ran.returncode:
        names = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", ran.stdout, re.MULTILINE)
        why = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or _last(ran)
    took_s = round(time.monotonic() - began)
    if not counts.get("passed"):
        why = why or "no test passed"  # a framework that cannot be imported is skipped
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    return Row(cell, python, torch, day, passed, failed, skipped, took_s, why, "".join(framework).strip())


def _any_patch(name: str, version: str) -> str:
    """A requirement; of a version of two numbers the newest of its patches."""
    return f"{name}=={version}" + (".*" if version.count(".") == 1 else "")


def _last(ran: subprocess.CompletedProcess[str]) -> str:
    return next((line for line in reversed(ran.stdout.splitlines()) if line.strip()), "pytest said nothing")


def find_python(version: str) -> str | None:
    """One that runs: pyenv leaves names on the path that only say what to install."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    named = shutil.which(f"python{version}")
    for candidate in (*([named] if named else []), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))):
        asked = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([candidate, "-c", asked], capture_output=True, text=True)
        if said.returncode == 0 and said.stdout.strip() == version:
            return candidate
    return None


if __name__ == "__main__":
    sys.exit(main())
