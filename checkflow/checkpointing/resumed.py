"""What is surprising in a training that was just restored, though every byte of it verified. A line for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from checkflow.data import ResumableLoader
from checkflow.events import Continued, Doubted
from checkflow.state.host.losses import Compared
from checkflow.state.host.objects import HostObjects
from checkflow.state.live import parameters_of
from checkflow.state.restore.match import Restored
from checkflow.training import Training
from checkflow.wrapped import updater


def doubts(iteration: int, training: Training, objects: HostObjects) -> tuple[str, ...]:
    """Of optimizers' state, learning rates and loaders' positions. Each may be meant; none is refused."""
    return (*_of_optimizers(training), *_of_schedulers(objects), *_of_loaders(iteration, objects))


def remarks(restored: Restored) -> Iterator[str]:
    """What a checkpoint lacks, or has otherwise than training had it."""
    for name in restored.missing:
        yield f"{name} is not in this checkpoint; it stays as it is"
    if (about := restored.approximate) is not None:
        yield (
            f"iteration {restored.iteration} is approximate: the host made its last {about.updates} updates, the first "
            f"of them {about.each:.2g} off the training's"
        )


class Freezing:
    """Which parameters require gradients is the script's to say: a resume that comes after what changed it may have
    missed that. Told is what is otherwise when it is restored, and still is where each of two iterations has ended: a
    loop may change it within each, or in turns."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._saved: frozenset[str] = frozenset()  # frozen when what was restored was saved
        self._differ: frozenset[str] = frozenset()  # ever since
        self._left = 0  # iterations

    def resumed(self, frozen: Iterable[str] | None) -> None:
        """These were frozen then; None where that is not known."""
        self._saved = frozenset(() if frozen is None else frozen)
        self._differ = frozenset() if frozen is None else self._now() ^ self._saved
        self._left = 2

    def ended(self) -> Iterator[str]:
        """What is otherwise, once two iterations have ended since."""
        if not self._differ:
            return
        self._differ &= self._now() ^ self._saved
        self._left -= 1
        if self._left:
            return
        differ, self._differ = sorted(self._differ), frozenset()
        for was, now, names in (
            ("trained", "frozen", [name for name in differ if name not in self._saved]),
            ("frozen", "trained", [name for name in differ if name in self._saved]),
        ):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                yield (
                    f"{names[0]}{more}: {was} when what was restored was saved, and {now} since; what sets "
                    "requires_grad in the course of training has to be done again after a resume"
                )

    def _now(self) -> frozenset[str]:
        """What is frozen."""
        return frozenset(str(name) for name, each in parameters_of(self._training) if not each.requires_grad)


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
