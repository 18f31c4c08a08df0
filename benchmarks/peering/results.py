"""What was measured, as it goes into the JSON file. Plain frozen data; names say the unit."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tool:
    """A contender, why it did not run where it did not, and how long it prepared each workload, once."""

    name: str
    what: str
    version: str
    durable: bool
    verifies: bool
    missing: str | None = None
    prepared_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Overhead:
    """One contender on one workload: iterations against those without a checkpoint, in pairs of neighbouring turns.

    `curve` is the median over turns of each iteration's time, relative to none; `loss` is the part of throughput that
    its mean loses, `mean_loss` counts each
    iteration of each turn, what happened to it by chance too, and `low` and `high` are the extremes over single turns.
    """

    workload: str
    contender: str
    tier: str
    interval: int
    turn: int  # iterations in a turn
    pairs: int
    none_ms: float
    loss: float
    mean_loss: float  # by the mean of all iterations of all turns, outliers of the machine included
    low: float
    high: float
    median_ratio: float
    p99_ratio: float
    blocked_ms: float  # of an iteration, on average
    blocked_save_ms: float  # for each save
    extra_host_bytes: int
    extra_gpu_bytes: int
    written_bytes: float  # for each save
    curve: tuple[float, ...]
    spread: bool = False  # measured at a shorter interval, each save's cost divided by this one


@dataclass(frozen=True, slots=True)
class Save:
    """One save that nothing overlaps: what it blocks, how soon the tool calls it complete, and at what rate."""

    workload: str
    contender: str
    tier: str
    state_bytes: int
    blocked_ms: float
    complete_ms: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Restore:
    """A new process's way to the restored model: `start_s` for Python, torch and the model, then the tool's.

    Of several repeats the one of median time in the tool.
    """

    workload: str
    contender: str
    tier: str
    case: str  # cold, warm, killed
    start_s: float
    attach_s: float
    restore_s: float
    iteration: int
    expected: int  # iteration; of a killed trainer the last one completed
    exact: bool | None  # the same bytes as were saved, every time; None where that is not known
    repeats_s: tuple[float, ...] = ()  # in the tool, of each, ascending

    @property
    def tool_s(self) -> float:
        return self.attach_s + self.restore_s

    @property
    def span(self) -> str:
        return f"{self.repeats_s[0]:.2f} to {self.repeats_s[-1]:.2f}" if self.repeats_s else ""


@dataclass(frozen=True, slots=True)
class Kills:
    """Iterations lost at SIGKILL, a checkpoint each iteration. MEMORY: the trainer dies; DISK: all its processes."""

    contender: str
    tier: str
    lost: tuple[int, ...]  # completed and not restored, without the one in flight
    completed: tuple[int, ...]  # in that life
    refused: int  # lives that restored nothing although there was something, or could not save again
    workload: str = "tiny"  # what reports mean that do not say it


@dataclass(frozen=True, slots=True)
class Fault:
    """What a tool makes of a fault: `outcome` is one word or two, `detail` what it said."""

    contender: str
    fault: str  # flipped bit, failed write
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """A run."""

    machine: str
    date: str
    command: str
    seconds: float
    load: float  # average over the run's last minute and its first
    versions: dict[str, str]
    tools: tuple[Tool, ...]
    workloads: dict[str, str]
    skipped: dict[str, str]  # workloads that could not run, and why
    overheads: list[Overhead] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    kills: list[Kills] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
