"""make gpu: what only a machine with a GPU can show, in nine minutes, as one JSON and one table.

    python benchmarks/gpu.py                             # on CUDA; -> benchmarks/reports/DAY-gpu.json, DAY-gpu.md
    python benchmarks/gpu.py --parts peaks,iterations
    python benchmarks/gpu.py --device host --tiny        # the same code on tiny trainings: shows that it works

Each part runs in a process of its own until its time is over; each figure is in the report as soon as it is known, so
that a run that is killed keeps what it has. What cannot be measured is a row without a figure that says why. A target
is met or missed on CUDA alone: figures of a host are the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from gpu_parts import ALL_S, PARTS, ROOT, Here, Row

REPORTS = ROOT / "benchmarks" / "reports"


def machine(here: Here) -> Mapping[str, object]:
    """What the figures are of."""
    import torch
    from peering.machine import describe

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    return {"device": here.device, "tiny": here.tiny, "machine": describe(), "versions": versions}


def write(stem: Path, head: Mapping[str, object], parts: Mapping[str, object], rows: list[Row]) -> None:
    """Both files anew, each complete at any moment."""
    body = {**head, "parts": parts, "rows": [asdict(row) | {"outcome": row.outcome} for row in rows]}
    for path, text in ((stem.with_suffix(".json"), json.dumps(body, indent=1) + "\n"),
                       (stem.with_suffix(".md"), markdown(head, parts, rows))):  # fmt: skip
        beside = path.with_name(f"{path.name}.new")
        beside.write_text(text)
        beside.replace(path)


def markdown(head: Mapping[str, object], parts: Mapping[str, object], rows: list[Row]) -> str:
    tiny = ", tiny trainings: its figures say nothing" if head["tiny"] else ""
    lines = [f"{head['date']}, device {head['device']}{tiny}: {head['machine']}, {head['versions']}", ""]
    lines += ["| part | of | figure | value | unit | target | | note |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        value = "not measured" if row.value is None else f"{row.value:.4g}"
        target = " ".join(
            f"{sign} {bound:g}" for sign, bound in (("≤", row.most), ("≥", row.least)) if bound is not None
        )
        cells = row.part, row.subject, row.figure, value, row.unit, target, row.outcome, row.note.replace("|", "/")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{name}: {said}" for name, said in parts.items())]) + "\n"


def run_part(name: str, here: Here, limit_s: float, heard: Callable[[list[Row]], None]) -> str:
    """Run a part in a process of its own; `heard` is told its rows whenever there are more. Says how it ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-part-") as folder:
        rows, log = Path(folder, "rows"), Path(folder, "log")
        rows.touch()
        command = [sys.executable, __file__, "--device", here.device, "--rows", str(rows), "--parts", name]
        hidden = {} if here.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        with log.open("w") as file:
            process = subprocess.Popen(
                [*command, "--limit", str(limit_s), *(["--tiny"] if here.tiny else [])], env=os.environ | hidden,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
            try:
                while process.poll() is None and time.monotonic() < began + limit_s:
                    heard(_read(rows))
                    time.sleep(0.1)
            finally:
                over = process.poll() is None
                if over:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                heard(_read(rows))
        if over:
            return f"stopped after its {limit_s:.3g} s"
        if process.returncode:
            return f"failed: {(log.read_text().strip() or 'it said nothing').splitlines()[-1]}"
    return f"done in {time.monotonic() - began:.0f} s"


def _read(path: Path) -> list[Row]:
    """Complete lines alone: the last may be being written."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def run_here(names: list[str], here: Here, path: Path) -> None:
    """As the process of a part: its rows as lines of JSON."""
    if here.tiny:
        import torch

        torch.set_num_threads(1)  # more would only wait for each other
    with path.open("a") as file:
        for name in names:
            for row in PARTS[name].run(here):
                limits = here.target(**{k: v for k, v in (("most", row.most), ("least", row.least)) if v is not None})
                kept = replace(row, part=name, most=limits.get("most"), least=limits.get("least"))
                file.write(json.dumps(asdict(kept)) + "\n")
                file.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny trainings and few turns: shows that it works")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--limit", type=float, help="seconds for each part (default: each part's own)")
    parser.add_argument("-o", "--output", type=Path, default=REPORTS, help="folder of the report")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names, here = given.parts.split(","), Here(given.device, given.tiny, given.limit or ALL_S)
    for name in names:
        if name not in PARTS:
            parser.error(f"--parts: {name!r} is not known; choose from {', '.join(PARTS)}")
    if given.rows is not None:
        run_here(names, here, given.rows)
        return 0
    import torch

    if here.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: this machine has no CUDA device; --device host --tiny shows that the code works")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part that runs is ended, too
    given.output.mkdir(parents=True, exist_ok=True)
    day = datetime.now(UTC).date().isoformat()
    stem = given.output / f"{day}-{'gpu' if here.device == 'cuda' else 'host'}"
    head, parts, rows = {"date": day, **machine(here)}, dict.fromkeys(names, "not run"), list[Row]()
    began = time.monotonic()
    for name in names:
        before = tuple(rows)
        parts[name] = "running, or killed with this run"

        def heard(found: list[Row], before: tuple[Row, ...] = before) -> None:
            if len(before) + len(found) != len(rows) or not found:
                rows[:] = [*before, *found]
                write(stem, head, parts, rows)

        sys.stderr.write(f"{name} ...\n")
        left_s = ALL_S - (time.monotonic() - began)
        parts[name] = run_part(name, here, given.limit or min(PARTS[name].limit_s, left_s), heard)
        write(stem, head, parts, rows)
    print(stem.with_suffix(".md").read_text())
    missed = any(row.outcome == "MISSED" for row in rows) or not all(said.startswith("done") for said in parts.values())
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
