"""Runs a sweep: what the journal has is taken from it, the rest is shared out over the processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkflow.sweep.cells import Answer, Axis, Cell, Edge, Grid, Question, Row, Search, cell_of, question_of
from checkflow.sweep.check import check
from checkflow.sweep.evaluate import failure
from checkflow.sweep.jobs import Answered, Ask, Broken, Job, Trace
from checkflow.sweep.journal import Journal, Profiles, read_journal
from checkflow.sweep.pool import Died, Pool
from checkflow.sweep.traces import Settings, TracedModel

TELL_EVERY_S = 0.5
AT_ONCE = 4  # questions in a job: a few, so that all cores end at about the same time

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Given:
    """An answer, and whether it was in the journal."""

    answer: Answer
    reused: bool


def run(
    grid: Grid, *, jobs: int | None = None, journal: Path | None = None, progress: Progress = lambda _: None
) -> tuple[Row, ...]:
    """Each cell's row, in the grid's order. See `answers`."""
    found = answers(grid.cells(), jobs, journal, progress)
    return tuple(row for row in in_order(grid.cells(), found) if isinstance(row, Row))


def find(
    grid: Grid,
    axis: Axis,
    *,
    up_to: int = 4096,
    jobs: int | None = None,
    journal: Path | None = None,
    progress: Progress = lambda _: None,
) -> tuple[Edge, ...]:
    """The feasibility edge along an axis, which the grid leaves out, for each of its cells. See `answers`."""
    searches = grid.searches(axis, up_to)
    found = answers(searches, jobs, journal, progress)
    return tuple(edge for edge in in_order(searches, found) if isinstance(edge, Edge))


def in_order(questions: Sequence[Question], given: Iterable[Given]) -> tuple[Answer, ...]:
    """The answers in the order of their questions."""
    found = {question_of(each.answer): each.answer for each in given}
    return tuple(found[question] for question in questions)


def answers(
    questions: Sequence[Question], jobs: int | None, journal: Path | None, progress: Progress
) -> Generator[Given, None, None]:
    """Each question's answer, as it comes.

    Args:
        questions: Cells, Searches, or both.
        jobs: worker processes; None: one for each core that may be used.
        journal: where answers are kept, and taken from if nothing that they depend on has changed.
        progress: told what goes on, in a few words.

    Raises:
        InputError: before any work, a model, argument, device, policy or journal that is wrong.
    """
    profiles = check(questions)
    known = {} if journal is None else read_journal(journal, questions, profiles)
    yield from (Given(answer, reused=True) for answer in known.values())
    missing = [question for question in questions if question not in known]
    if not missing:
        return
    told = -TELL_EVERY_S
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(Journal(journal)) if journal else None
        pool = stack.enter_context(Pool(jobs or len(os.sched_getaffinity(0))))
        for count, found in enumerate(_computed(pool, missing, profiles, progress), start=len(known) + 1):
            question = question_of(found.answer)
            if kept is not None:
                kept.keep(found.answer, profiles[question], found.files)
            yield Given(found.answer, reused=False)
            if time.monotonic() - told > TELL_EVERY_S or count == len(questions):
                progress(f"{count} of {len(questions)}: {name_of(cell_of(question))}")
                told = time.monotonic()


def _computed(pool: Pool, questions: Sequence[Question], profiles: Profiles, progress: Progress) -> Iterator[Answered]:
    """Answers as the workers give them. A model is traced once, and its cells are planned by whoever is free."""
    left: dict[Job, list[Question]] = {}  # of each job, the questions that are not answered

    def submit(group: list[Question], traced: TracedModel | None, *, first: bool = False) -> None:
        job = Ask(tuple(group), tuple(profiles[question] for question in group), traced)
        left[job] = group
        pool.submit(job, first=first)

    for (model, settings, traces_by_itself), group in _groups(questions).items():
        if traces_by_itself:
            submit(group, None)
        else:
            job = Trace(model, settings)
            left[job] = group
            pool.submit(job)
    progress(f"{len(questions)} to compute, in {len(left)} traces")
    for event in pool.events():
        group = left[event.job]
        if isinstance(event, Died) or event.last:
            del left[event.job]
        if isinstance(event, Died):
            failed, again = (group[:1], group[1:]) if isinstance(event.job, Ask) else (group, [])
            yield from _failed(failed, f"its process ended: {event.how}")
            if again and isinstance(event.job, Ask):
                submit(again, event.job.traced)
        elif isinstance(event.reply, Broken):
            yield from _failed(group, event.reply.message)
        elif isinstance(event.reply, TracedModel):
            for start in range(0, len(group), AT_ONCE):
                submit(group[start : start + AT_ONCE], event.reply, first=True)
        elif isinstance(event.reply, Answered):
            group.remove(question_of(event.reply.answer))
            yield event.reply


def _groups(questions: Sequence[Question]) -> dict[tuple[str, Settings, bool], list[Question]]:
    """Questions that share a trace, or, where they look for a batch size, traces."""
    groups: dict[tuple[str, Settings, bool], list[Question]] = {}
    for question in questions:
        cell = cell_of(question)
        by_itself = isinstance(question, Search) and question.axis is Axis.BATCH_SIZE
        groups.setdefault((cell.model, cell.settings, by_itself), []).append(question)
    return groups


def _failed(questions: Sequence[Question], message: str) -> Iterator[Answered]:
    for question in questions:
        row = failure(cell_of(question), message)
        failed = row if isinstance(question, Cell) else Edge(search=question, fails=row, message=message)
        yield Answered(failed, ())


def name_of(cell: Cell) -> str:
    """Which trace a cell is of, for a person."""
    return " ".join((cell.model, *(f"{name}={value}" for name, value in cell.settings)))
