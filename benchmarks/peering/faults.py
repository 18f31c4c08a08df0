"""What becomes of a flipped bit in a checkpoint, and of a write that fails."""

from __future__ import annotations

import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from contenders import Job

from .orders import Attach, Detach, Done, Restore, Restored, Saved, SaveOne
from .processes import NoAnswerError, Process, ToolError, tree, worker
from .results import Fault

FLIPS = 16
PATIENCE_S = 60.0


def flipped_bit(contender: str, job: Job, log: Path) -> Fault:
    """Two checkpoints; a bit of the newer one's largest file flipped, at places spread over it, one at a time."""
    pristine = job.folder.with_name("pristine")
    with worker(job.workload, contender, log) as saver:
        saver.ask(Attach(job), Done)
        saved = [saver.ask(SaveOne(), Saved) for _ in range(2)]
    shutil.copytree(job.folder, pristine)  # keeps the times of files, which tell the newer
    target = _newest_large_file(pristine).relative_to(pristine)
    outcomes: Counter[str] = Counter()
    said = ""
    reader = Process(job.workload, contender, log)
    for offset in _spread(pristine / target):
        shutil.rmtree(job.folder)
        shutil.copytree(pristine, job.folder)
        _flip(job.folder / target, offset)
        try:
            reader.ask(Attach(job), Done)
            outcomes[_judge(reader.ask(Restore(), Restored), saved)] += 1
            reader.ask(Detach(), Done)
        except ToolError as error:
            outcomes["process crashed" if reader.ended else "refused"] += 1
            said = str(error)
            reader.end()
            reader = Process(job.workload, contender, log)
    reader.end()
    shutil.rmtree(pristine)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return Fault(contender, "flipped bit", f"of {FLIPS}: {counted}", said[:200])


def failed_write(contender: str, job: Job, log: Path) -> Fault:
    """Two good checkpoints; then no file may grow beyond half of what the largest needs (EFBIG, as a full disk)."""
    reported, hangs = "", False
    with worker(job.workload, contender, log) as saver:
        saver.ask(Attach(job), Done)
        saved = [saver.ask(SaveOne(), Saved) for _ in range(2)]
        _limit(saver, _newest_large_file(job.folder).stat().st_size // 2)
        for order, answer in ((SaveOne(), Saved), (SaveOne(), Saved), (Detach(), Done)):
            try:
                saver.ask(order, answer, PATIENCE_S)
            except NoAnswerError as error:
                reported, hangs = str(error), True
                saver.kill_trainer()  # its answer must not be taken for the next one's
                break
            except ToolError as error:
                reported = reported or str(error)
    try:
        with worker(job.workload, contender, log) as fresh:
            fresh.ask(Attach(job), Done)
            restored = fresh.ask(Restore(), Restored)
        good = [each.iteration for each in saved if each.digest == restored.digest]
        after = f"iteration {restored.iteration} restored" if good else "something else restored"
    except ToolError as error:
        after = f"nothing restored ({error})"
    outcome = "hangs" if hangs else "reported" if reported else "reported as success"
    return Fault(contender, "failed write", f"{outcome}; {after[:80]}", reported[:200])


def _judge(restored: Restored, saved: list[Saved]) -> str:
    is_one_of = [(restored.iteration, restored.digest) == (each.iteration, each.digest) for each in saved]
    if is_one_of[-1]:
        return "harmless"
    if any(is_one_of):
        return "detected, older one restored"
    return "loaded silently" if restored.iteration else "nothing restored, nothing said"


def _newest_large_file(folder: Path) -> Path:
    """Of the files that hold much, the one written last."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(path.stat().st_size for path in files)
    return max((path for path in files if path.stat().st_size > largest / 2), key=lambda path: path.stat().st_mtime_ns)


def _spread(path: Path) -> Iterator[int]:
    """Offsets in the middle of as many equal parts."""
    size = path.stat().st_size
    return ((2 * part + 1) * size // (2 * FLIPS) for part in range(FLIPS))


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def _limit(process: Process, size_bytes: int) -> None:
    for pid in tree(process.pid):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
