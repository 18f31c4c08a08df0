"""What is surprising in a training that was just restored, though every byte of it verified. A line for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from checkflow.about import About, Run, changes, other_values
from checkflow.checkpointing.restoring import Found
from checkflow.data import ResumableLoader
from checkflow.events import Continued, Doubted, Resumed
from checkflow.state.host.capture import versions
from checkflow.state.host.losses import Compared
from checkflow.state.host.modes import mode_in, modes_of, noted
from checkflow.state.host.objects import HostObjects
from checkflow.state.host.record import Record
from checkflow.state.live import parameters_of
from checkflow.state.restore.match import Restored
from checkflow.training import Training
from checkflow.wrapped import updater

GIT_S = 1.0  # that a restore waits for git, to compare


def doubts(iteration: int, training: Training, objects: HostObjects) -> tuple[str, ...]:
    """Of optimizers' state, learning rates and loaders' positions. Each may be meant; none is refused."""
    return (*_of_optimizers(training), *_of_schedulers(objects), *_of_loaders(iteration, objects))


def event_of(
    restored: Restored, found: Found, seconds: float, run: Run | None, computed_by: Mapping[str, str]
) -> Resumed:
    """What to tell of a restore that took so long. `computed_by`: what this process is."""
    about = About() if run is None else run.about(wait_s=GIT_S)
    return Resumed(
        restored.iteration,
        found.checkpoint.path.name,
        seconds,
        tuple(map(str, found.skipped)),
        changes(restored.about, about, restored.versions, {**versions(), **computed_by}),
        restored.replay_seconds,
    )


def remarks(restored: Restored, now: Mapping[str, str]) -> Iterator[str]:
    """What a checkpoint lacks, or has otherwise than training had it. `now`: what this process is computed by."""
    for name in restored.missing:
        yield f"{name} is not in this checkpoint; it stays as it is"
    for name in restored.sets_otherwise:
        yield (
            f"{name}: a set in it has its members in another order than when it was saved; where the loop walks it, "
            "let it walk sorted(...), or keep a dict instead, dict.fromkeys(...)"
        )
    if (about := restored.approximate) is not None:
        yield (
            f"iteration {restored.iteration} is approximate: the host made its last {about.updates} updates, the first "
            f"of them {about.each:.2g} off the training's"
        )
    if others := tuple(other_values(restored.versions, now)):
        yield (
            f"{', '.join(others)} since iteration {restored.iteration} was saved: the last bits of results may be "
            "others from here on than without the interruption"
        )


class Switches:
    """Which parameters require gradients, and which modules are in training mode, is the script's to say: a resume that
    comes after what changed it may have missed that. Told is what is otherwise when it is restored, and still is where
    each of two iterations has ended: a loop may change it within each, or in turns."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._each = (
            _Switch(
                lambda: _frozen(training),
                {True: "frozen", False: "trained"},
                "what sets requires_grad in the course of training has to be done again after a resume",
            ),
            _Switch(
                lambda: _modes(training),
                {True: "in training mode", False: "in evaluation mode"},
                "what calls its train() or eval() in the course of training has to be done again after a resume",
            ),
        )

    def resumed(self, record: Record) -> None:
        """This was restored. What an older record does not say is not compared."""
        frozen, modes = self._each
        names = _frozen(self._training)
        known = frozenset(record.frozen or ())
        frozen.resumed({} if record.frozen is None else {name: name in known for name in names})
        now = modes_of(self._training)
        saved = {subject: mode_in(record.modes or {}, subject) for subject in now}
        modes.resumed({subject: mode for subject, mode in saved.items() if mode is not None})

    def ended(self) -> Iterator[str]:
        """What is otherwise, once two iterations have ended since."""
        for each in self._each:
            yield from each.ended()


class _Switch:
    """Of one kind. `now`: how each is set, and nothing of what is not known; `words`: what that is called."""

    def __init__(self, now: Callable[[], Mapping[str, bool]], words: Mapping[bool, str], advice: str) -> None:
        self._now = now
        self._words = words
        self._advice = advice
        self._saved: Mapping[str, bool] = {}  # as it was set when what was restored was saved
        self._differ: Sequence[str] = ()  # ever since it was restored
        self._left = 0  # iterations

    def resumed(self, saved: Mapping[str, bool]) -> None:
        now = self._now()
        self._differ = [name for name, was in saved.items() if now.get(name) is not was]
        self._saved, self._left = saved, 2

    def ended(self) -> Iterator[str]:
        if not self._differ:
            return
        now = self._now()
        self._differ = [name for name in self._differ if now.get(name) is (not self._saved[name])]
        self._left -= 1
        if self._left:
            return
        differ, self._differ = self._differ, ()
        for was, word in self._words.items():
            names = sorted(name for name in differ if self._saved[name] is was)
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                since = self._words[not was]
                yield f"{names[0]}{more}: {word} when what was restored was saved, and {since} since; {self._advice}"


def _frozen(training: Training) -> dict[str, bool]:
    return {str(name): not each.requires_grad for name, each in parameters_of(training)}


def _modes(training: Training) -> dict[str, bool]:
    """Of a model that is in evaluation as a whole nothing: it was evaluated, or is not trained yet."""
    now = modes_of(training)
    known = noted(now)
    return {subject: mode for subject, mode in now.items() if mode_in(known, subject) is not None}


def of_losses(iteration: int, compared: Compared) -> Continued | Doubted:
    """What they say two iterations after a resume."""
    if compared.goes_on:
        return Continued(iteration, compared.before, compared.after)
    before, after = compared.before, ", ".join(f"{loss:.4g}" for loss in compared.after)
    return Doubted(
        iteration,
        f"the loss is {after} after the resume, and was {min(before):.4g} to {max(before):.4g} in the "
        f"{len(before)} iterations before it; see that data and configuration are the same",
    )


def _of_optimizers(training: Training) -> Iterator[str]:
    for number, optimizer in enumerate(training.optimizers):
        for place, group in enumerate(optimizer.param_groups):
            alike: dict[torch.Size, list[Mapping[str, object]]] = {}  # an optimizer may go by shape
            for parameter in group["params"]:
                state = updater(optimizer).state.get(parameter, {})
                if "step" in state:
                    alike.setdefault(parameter.shape, []).append(state)
            lacking = [frozenset().union(*states) - state.keys() for states in alike.values() for state in states]
            if missing := frozenset().union(*lacking):
                yield (
                    f"optimizer {number}, group {place}: {sum(map(bool, lacking))} parameters have taken steps but "
                    f"have no {', '.join(sorted(missing))}, as others of their shape have"
                )


def _of_schedulers(objects: HostObjects) -> Iterator[str]:
    """Of several on one optimizer the last one to step has set the rates."""
    left: dict[int, list[tuple[str, list[float], list[float]]]] = {}
    for name, member in objects.objects.items():
        optimizer, rates = getattr(member, "optimizer", None), getattr(member, "_last_lr", None)
        if isinstance(optimizer, torch.optim.Optimizer) and isinstance(rates, list):
            now = [float(group["lr"]) for group in optimizer.param_groups]
            left.setdefault(id(optimizer), []).append((name, [float(rate) for rate in rates], now))
    for found in left.values():
        if all(rates != now for _, rates, now in found):
            name, rates, now = found[-1]
            yield f"{name}: left the learning rates {_listed(rates)}, the optimizer has {_listed(now)}"


def _of_loaders(iteration: int, objects: HostObjects) -> Iterator[str]:
    """An iteration takes at least an item, of one of them: another may be what is evaluated with."""
    short = []
    for name, member in objects.objects.items():
        if not isinstance(member, ResumableLoader):  # to ask another one may draw random numbers
            continue
        state = member.state_dict()
        epoch, items, size = (state.get(key) for key in ("epoch", "items", "size"))
        if isinstance(epoch, int) and isinstance(items, int) and isinstance(size, int):
            if epoch * size + items >= iteration:
                return
            short.append(
                f"{name}: stands at item {items} of epoch {epoch} after {iteration} iterations, which have taken "
                "more; batches are repeated if they came from it"
            )
    yield from short


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates[:4]) + (", ..." if len(rates) > 4 else "")
