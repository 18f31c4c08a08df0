"""CheckFreq: its Algorithm 1, and what follows from it for Tables 5 and 6 and Figure 8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from evaluation.table import Table

TABLE_5 = {"isolated": (0.05, 14), "static": (0.35, 14), "adaptive": (0.05, 19)}  # overhead, iterations
BUDGET = 0.05
PER_EPOCH = {"ResNet18": 147, "ResNet50": 125, "ResNext101": 238, "VGG16": 83, "BERT": 100}  # Table 4, checkpoints
TABLE_6B = {  # seconds of recovery: from epochs, from CheckFreq's checkpoints
    "ResNet18": (180, 3), "ResNet50": (540, 8), "ResNext101": (1680, 14), "VGG16": (1320, 31), "BERT": (4500, 43),
}  # fmt: skip


class Mode(StrEnum):
    """Where a snapshot is made."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True)
class Profile:
    """What CheckFreq measures. Times in any one unit."""

    iteration: float  # T_i
    update: float  # T_w
    gpu_copy: float  # T_g
    cpu_copy: float  # T_c
    write: float  # T_s
    has_room: bool  # for a copy of the state in GPU memory


def frequency(profile: Profile, budget: float) -> tuple[int, Mode]:
    """Algorithm 1: iterations from one checkpoint to the next, and where the snapshot is made."""
    on_cpu = max(0.0, profile.cpu_copy - (profile.iteration - profile.update))
    mode = Mode.GPU if profile.has_room and profile.gpu_copy <= on_cpu else Mode.CPU
    overhead = profile.gpu_copy if mode is Mode.GPU else on_cpu
    waits = _iterations((profile.cpu_copy + profile.write - overhead) / profile.iteration)
    return max(1, waits, _iterations(overhead / (budget * profile.iteration))), mode


def _iterations(share: float) -> int:
    """Rounded up, but for what floats add."""
    return math.ceil(share - 1e-9)


@dataclass(frozen=True, slots=True)
class Contended:
    """What Table 5 says of one checkpoint, in iterations."""

    stall: float  # T_o, which each checkpoint costs
    under_way: float  # from its iteration on, while another job writes; the next one waits for it

    def overhead(self, interval: int) -> float:
        return (self.stall + max(0.0, self.under_way - interval)) / interval

    @property
    def interval(self) -> int:
        """Algorithm 1's, for these."""
        return max(_iterations(self.under_way), _iterations(self.stall / BUDGET))


def contended() -> Contended:
    """Solved from the first two columns: what isolated stalls, and how much longer than 14 iterations a write takes."""
    (isolated, interval), (static, _) = TABLE_5["isolated"], TABLE_5["static"]
    stall = isolated * interval
    return Contended(stall, interval + static * interval - stall)


def table_5() -> Table:
    found = contended()
    rows = [
        ("isolated", "5% at 14", "given"),
        ("static", "35% at 14", f"given: a checkpoint is under way for {found.under_way:.1f} iterations"),
        ("adaptive", "5% at 19", f"{found.overhead(found.interval):.1%} at {found.interval}"),
    ]
    return Table(("setting", "the paper", "Algorithm 1"), tuple(rows), left=3)


def table_6() -> Table:
    """Recovery of 8 GPUs: half an epoch; of CheckFreq, half an interval or a whole one, of as many in an epoch."""
    rows = []
    for name, (epoch_s, paper_s) in TABLE_6B.items():
        interval_s = 2 * epoch_s / PER_EPOCH[name]
        rows.append((name, f"{epoch_s}", f"{paper_s}", f"{interval_s / 2:.1f}", f"{interval_s:.1f}"))
    return Table(("network", "epochs, s", "CheckFreq, s", "half an interval, s", "an interval, s"), tuple(rows))


def kept(epoch_h: float, mtbf_h: float) -> float:
    """Share of the time that checkpoints at an epoch's end keep, with exponential failures (renewal theory)."""
    return epoch_h / mtbf_h / math.expm1(epoch_h / mtbf_h)


def epoch_for(kept_share: float, mtbf_h: float) -> float:
    """How long an epoch is of which so much is kept, in hours."""
    low, high = 0.0, 100 * mtbf_h
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle == 0 or kept(middle, mtbf_h) > kept_share else (low, middle)
    return low
