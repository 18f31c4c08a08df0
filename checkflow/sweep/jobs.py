"""What a sweep's worker processes are told to do, and how they do it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checkflow import hardware
from checkflow.errors import ModelFileError
from checkflow.sweep.cells import Answer, Cell, Question, Row
from checkflow.sweep.evaluate import complaint, evaluate, failure
from checkflow.sweep.feasibility_edge import edge_of
from checkflow.sweep.isolated import isolated
from checkflow.sweep.traces import Files, Settings, TracedModel, is_graph, trace


@dataclass(frozen=True, eq=False)
class Trace:
    """Job: trace a model once. The only reply is a Traced or a Broken."""

    model: str
    settings: Settings

    @property
    def replies(self) -> int:
        """How many there will be."""
        return 1


@dataclass(frozen=True, eq=False)
class Ask:
    """Job: answer each question. The replies are an Answered for each, in order."""

    questions: tuple[Question, ...]
    profiles: tuple[hardware.Profile | None, ...]  # of each question's device
    traced: TracedModel | None  # None: searches over the batch size, which trace by themselves

    @property
    def replies(self) -> int:
        """How many there will be."""
        return len(self.questions)


@dataclass(frozen=True)
class Broken:
    """A model that could not be traced."""

    message: str


@dataclass(frozen=True)
class Answered:
    answer: Answer
    files: Files  # of the user's, on which it depends


Job = Trace | Ask
Reply = TracedModel | Broken | Answered


def replies(job: Job) -> Iterator[Reply]:
    """Do a job. Nothing that a model or a planner raises gets out: it is in the reply."""
    if isinstance(job, Trace):
        yield _trace(job)
        return
    known: dict[Settings, TracedModel | Broken] = {}  # of this job's one model
    for question, profile in zip(job.questions, job.profiles, strict=True):
        yield _answer(question, profile, job.traced, known)


def _trace(job: Trace) -> TracedModel | Broken:
    """A model in a process of its own: what it changes of torch's settings, or imports, is no other model's."""
    if is_graph(job.model):
        return _traced(job)
    from checkflow.torch_internals import import_compiler

    import_compiler()  # tracing does, which takes longer than all else of it: here once, and not in each
    try:
        return isolated(lambda: _traced(job), job.model)
    except ModelFileError as error:
        return Broken(complaint(error))


def _traced(job: Trace) -> TracedModel | Broken:
    try:
        return trace(job.model, job.settings)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a model does is the answer for its cells)
        return Broken(complaint(error))


def _answer(
    question: Question,
    profile: hardware.Profile | None,
    traced: TracedModel | None,
    known: dict[Settings, TracedModel | Broken],
) -> Answered:
    used: dict[str, str] = {}

    def row_of(cell: Cell) -> Row:
        found = traced or known.get(cell.settings)
        if found is None:
            found = known[cell.settings] = _trace(Trace(cell.model, cell.settings))
        if isinstance(found, Broken):
            return failure(cell, found.message)
        used.update(found.files)
        return _row(cell, found, profile)

    if isinstance(question, Cell):
        answer: Answer = row_of(question)
    else:
        answer = edge_of(question, hardware.link_bytes_per_s(profile) if profile else None, row_of)
    return Answered(answer, tuple(sorted(used.items())))


def _row(cell: Cell, traced: TracedModel, profile: hardware.Profile | None) -> Row:
    graph = traced.graph
    try:
        if profile is not None and (cell.device is not None or not is_graph(cell.model)):
            graph = hardware.retime(graph, profile)
        return evaluate(cell, graph, profile)
    except Exception as error:  # noqa: BLE001 (one cell's trouble does not stop the others)
        return failure(cell, complaint(error))
