"""What a sweep is asked and what it answers: a Cell has a Row, a Search has an Edge."""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from checkflow.counts import Count, Positive, PositiveAmount, Total
from checkflow.plan import Formulation, Reason

BATCH_SIZE = "batch_size"  # the factory argument that --find batch_size searches
CHECKFLOW = "checkflow"  # the policy that plans, and so the only one with formulations


class Outcome(StrEnum):
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    FAILED = "failed"  # no answer: the model is wrong, memory ran out, a bug


class Axis(StrEnum):
    """What --find looks for the least of."""

    BANDWIDTH = "bandwidth"
    BATCH_SIZE = "batch_size"
    INTERVAL = "interval"


class Strict(BaseModel):
    """What crosses a file boundary."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Cell(Strict):
    """One point of a grid."""

    model: str  # as on the command line: a file, a file with :factory, a bundled name, or a graph file
    settings: tuple[tuple[str, str], ...] = ()  # of the factory, sorted by name
    device: str | None = None  # a bundled name or a profile's file; None: rtx3090, or the times that a graph has
    bandwidth_bytes_per_s: PositiveAmount | None = None  # None: the device's link
    policy: str = CHECKFLOW
    formulation: Formulation | None = Formulation.DIRECT  # None where the policy is not checkflow
    interval: PositiveAmount | None = 1  # None: the smallest that works
    chunk_bytes: PositiveAmount | None = None
    slack_ppm: Count = 0


class Search(Strict):
    """The least value of one axis for which a cell is feasible. The cell leaves that axis at its default."""

    cell: Cell
    axis: Axis
    up_to: Positive = 4096  # largest batch that is tried; no limit on the other axes


class Row(Strict):
    """What a cell is like. Figures that its outcome does not have are None."""

    cell: Cell
    outcome: Outcome
    reason: Reason | None = None  # why it is infeasible
    message: str = ""  # one line: why it is infeasible and what would do, or what failed
    device: str | None = None  # whose times the operators have
    device_memory_bytes: Total | None = None
    bandwidth_bytes_per_s: Total | None = None
    interval: Total | None = None  # k
    steps: Total | None = None  # T
    iteration_time_ns: Total | None = None
    state_bytes: Total | None = None  # that each checkpoint carries
    training_peak_bytes: Total | None = None
    peak_bytes: Total | None = None  # as proven of its schedule
    packed_peak_bytes: Total | None = None  # of a packed plan itself, before it goes to anchors
    lower_bound_bytes: Total | None = None  # of a packed plan its own, else of what runs
    checkfreq_peak_bytes: Total | None = None  # of CheckFreq at the same interval
    snapshot_bytes: Total | None = None  # copied within the device, as executed
    copy_ns: Total | None = None  # what these copies take
    pause_ns: Total | None = None  # for which a checkpoint stops the training
    overhead: float | None = None  # (pause_ns + copy_ns) / (k T), a fraction of training alone; copies of K lanes: / K
    saving: float | None = None  # of the peak against CheckFreq's, a fraction of CheckFreq's
    disk_bytes_per_s: Total | None = None  # needed to persist every checkpoint: state bytes / (k T)
    needed_bandwidth_bytes_per_s: Total | None = None  # that would make an infeasible cell feasible
    smallest_interval: Total | None = None  # that would
    plan_s: float | None = None

    @property
    def feasible(self) -> bool:
        return self.outcome is Outcome.FEASIBLE

    @property
    def failed(self) -> bool:
        return self.outcome is Outcome.FAILED

    @property
    def largest_bytes(self) -> int | None:
        """The peak, of training alone where there is no plan."""
        return self.peak_bytes or self.training_peak_bytes

    @property
    def exceeds_memory(self) -> bool:
        """Whether the peak is more than the device has."""
        largest = self.largest_bytes
        return largest is not None and self.device_memory_bytes is not None and largest > self.device_memory_bytes


class Edge(Strict):
    """Where a cell becomes feasible: the least value found to be, and the next smaller one tried, which is not.

    Nothing below `fails` was tried, and feasibility need not be monotone in the batch size.
    """

    search: Search
    found: Row | None = None  # None: no value that was tried is feasible
    fails: Row | None = None  # None: the least value there is is feasible
    tried: Count = 0
    message: str = ""  # where either is None, why

    @property
    def failed(self) -> bool:
        return self.found is None and self.fails is not None and self.fails.failed


Question = Cell | Search
Answer = Row | Edge


def cell_of(question: Question) -> Cell:
    """The cell itself, or the one that a search moves along its axis."""
    return question if isinstance(question, Cell) else question.cell


def question_of(answer: Answer) -> Question:
    return answer.cell if isinstance(answer, Row) else answer.search


class Grid(Strict):
    """The product of its axes; the model varies slowest, the bandwidth fastest."""

    models: Annotated[tuple[str, ...], Field(min_length=1)]
    settings: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name and values of each factory argument
    devices: tuple[str | None, ...] = (None,)
    policies: tuple[str, ...] = (CHECKFLOW,)
    formulations: tuple[Formulation, ...] = (Formulation.DIRECT,)  # of policy checkflow
    chunks_bytes: tuple[PositiveAmount | None, ...] = (None,)
    slacks_ppm: tuple[Count, ...] = (0,)
    intervals: tuple[PositiveAmount | None, ...] = (1,)
    bandwidths_bytes_per_s: tuple[PositiveAmount | None, ...] = (None,)

    def cells(self) -> tuple[Cell, ...]:
        """Each point once."""
        axes = product(
            self.models,
            product(*([(name, value) for value in values] for name, values in sorted(self.settings))),
            self.devices,
            self.policies,
            self.formulations,
            self.chunks_bytes,
            self.slacks_ppm,
            self.intervals,
            self.bandwidths_bytes_per_s,
        )
        found = (
            Cell(
                model=model,
                settings=settings,
                device=device,
                bandwidth_bytes_per_s=bandwidth,
                policy=policy,
                formulation=formulation if policy == CHECKFLOW else None,
                interval=interval,
                chunk_bytes=chunk,
                slack_ppm=slack,
            )
            for model, settings, device, policy, formulation, chunk, slack, interval, bandwidth in axes
        )
        return tuple(dict.fromkeys(found))

    def searches(self, axis: Axis, up_to: int = 4096) -> tuple[Search, ...]:
        """A search along one axis for each point of the others."""
        return tuple(Search(cell=cell, axis=axis, up_to=up_to) for cell in self.cells())
