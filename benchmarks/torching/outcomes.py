"""One file of torch's tests, in a process of its own: what became of each test, and why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SUBSTITUTED = Path(__file__).parent / "substituted"
_ERROR = re.compile(r"^(?:E +)?(?:[\w.]*\.)?(\w*(?:Error|Exception|Failed|Refused)\w*)(?:: (.*))?$")


@dataclass(frozen=True, slots=True)
class Outcomes:
    """By test's name "passed", "skipped", or why it failed; `wrong`: why there is none. How many of ours were made."""

    tests: Mapping[str, str]
    wrong: str
    readers: int
    writers: int
    seconds: float = 0.0


def run(file: Path, classes: str, limit_s: float, *, on_cpu: bool = False) -> Outcomes:
    """With "ours" in the place of "torchs". What has not ended by then is ended. `on_cpu`: tests for GPUs, too."""
    with tempfile.TemporaryDirectory() as folder:
        report, told = Path(folder) / "report.xml", Path(folder) / "told"
        told.touch()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(SUBSTITUTED), os.environ.get("PYTHONPATH", "")]),
            "CHECKFLOW_CLASSES": classes, "CHECKFLOW_ON_CPU": "1" if on_cpu else "", "CHECKFLOW_TOLD": str(told),
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": folder,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest", "-c",
            os.devnull, f"--rootdir={folder}", f"--junitxml={report}", "--tb=short", "-W", "ignore", str(file),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=file.parent, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit_s)
            wrong = "" if report.exists() else _last_line(said)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            wrong = f"did not end within {limit_s:g} s"
        made = told.read_text().split()
        tests, seconds = _tests(report) if report.exists() and not wrong else ({}, 0.0)
    return Outcomes(tests, wrong, made.count("reader"), made.count("writer"), seconds)


def _tests(report: Path) -> tuple[dict[str, str], float]:
    found: dict[str, str] = {}
    seconds = 0.0
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        seconds += float(case.get("time", "0"))
        found[name] = "passed"
        for child in case:
            if child.tag == "skipped":
                found[name] = "skipped"
            elif child.tag in ("failure", "error"):
                found[name] = _reason(f"{child.text or ''}\n{child.get('message') or ''}")
    return found, seconds


def _reason(said: str) -> str:
    """The innermost error of a traceback, in a line: what wraps it is torch's."""
    errors = [" ".join(filter(None, match.groups())) for line in said.splitlines() if (match := _ERROR.match(line))]
    own = [error for error in errors if not error.startswith(("CheckpointException", "RuntimeError Process"))]
    chosen = (own or errors or [_last_line(said)])[0]
    return re.sub(r"/\S*/(?=[\w.-]+)", "", chosen)[:300]


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "said nothing"
