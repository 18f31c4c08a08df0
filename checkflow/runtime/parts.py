"""Several iterations for one checkpoint: gradients go along, and what would make a part no longer exact ends it.

A parameter and its entries may be saved as they were some iterations before, for the updates since then are made again
when the checkpoint is restored. That is exact only while nothing else writes them. So their version counters are
compared between updates, and a few of their bytes (sampled.py); what an update consumes must stay as it was until it
has left, which counters and a few of its elements tell; and the first checkpoint of a training is proven: its updates
are made again beside it, and compared byte for byte. So is one now and then, for no counter tells of every write. Where
any of this fails it is told once, and each checkpoint is read as a whole when its iteration ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from checkflow.errors import CheckflowError
from checkflow.runtime.binding import BoundStorage
from checkflow.runtime.bound import Bound
from checkflow.runtime.counters import Cause
from checkflow.runtime.factors import FactorHooks
from checkflow.runtime.in_flight import InFlight, Leaving
from checkflow.runtime.pipeline import Pipeline
from checkflow.runtime.sampled import Glance, Sampled, TakenGradient, few_of
from checkflow.schedule import Schedule
from checkflow.state.groups import IMPLEMENTATION
from checkflow.state.host.updates import Updates
from checkflow.state.live import parameter_names
from checkflow.state.memory import as_bytes, is_lent
from checkflow.state.names import gradient_name
from checkflow.state.shards import are_shared_alike, local
from checkflow.torch_internals import grad_scale_of, versions
from checkflow.training import Training
from checkflow.wrapped import is_torchs_own, updater

PROVEN_AGAIN_S = 600.0  # after the last proof
_DENORMAL = 5e-324


class HostTexts(Protocol):
    """What is read of the host's state for the updates that are to be made again."""

    def part(self) -> str: ...
    def update(self, number: int, gradients: tuple[str, ...], factor_rows: Mapping[str, int]) -> str: ...


class Prove(Protocol):
    """Tells why a checkpoint whose bytes are all there is not exact; "" where it is."""

    def __call__(self, replay: str, filled: Mapping[int, InFlight], backs: Sequence[int]) -> str:
        """`replay`: a ReplayRecord's JSON; `filled`: by lane, each saved so many iterations `backs`."""


class Parts:
    """Of one executor whose schedule has parts.

    Args:
        schedule: what is followed.
        training: the live one.
        host: texts for the record.
        prove: compares a first checkpoint with what is live.
        tell: told, once, why checkpoints are read as a whole.
        others_every: the greatest number of iterations in which any rank would read one so, or 0.
    """

    def __init__(
        self,
        schedule: Schedule,
        training: Training,
        bound: Bound,
        pipeline: Pipeline,
        host: HostTexts,
        prove: Prove,
        tell: Callable[[str], None],
        others_every: Callable[[], int],
    ) -> None:
        self.refused = ""  # why no checkpoint has parts any more
        self._bound = bound
        self._pipeline = pipeline
        self._host = host
        self._prove = prove
        self._tell = tell
        self._others_every = others_every
        self._proven = False
        self._proven_s = 0.0  # time.monotonic, when that was last found
        self._names = {id_: str(name) for id_, name in parameter_names(training).items()}
        self._parts = pipeline.timetable.parts
        self._rows = {row.parameter.name: row.id for row in schedule.gradients}
        self._row_bytes = {row.parameter.name: row.bytes for row in schedule.gradients}
        self._written_again = {row.parameter.name for row in schedule.gradients if row.until is not None}
        self.factors = FactorHooks(row.parameter.name for row in schedule.gradients if row.factor_rows)
        self._optimizers = training.optimizers
        self._after: dict[int, dict[BoundStorage, list[int]]] = {}  # by optimizer: versions after its last update
        self._scalars: dict[int, list[object]] = {}  # likewise, of what its state has beside what is bound
        self._groups: dict[int, list[object]] = {}  # likewise, whose parameters its groups have, and how they compute
        self._sampled = Sampled()
        self._turn = 0  # of iterations: which elements of gradients are looked at
        self._made_of: dict[str, TakenGradient] = {}  # gradients whose factors left, and that no update consumed yet
        pipeline.vouched_by.append(self._vouch)
        self._is_making = False  # an update has begun, and is recorded
        self.overtaken = False  # a hook that was registered since the last iteration ended runs after `consumes`
        self._prepare(schedule)

    def _prepare(self, schedule: Schedule) -> None:
        """Of what iteration each parameter is saved."""
        self._earlier = {row.tensor: row.back for row in schedule.actions if row.tensor not in self._rows.values()}
        saved = {view.name: self._earlier.get(row.id, 0) for row in schedule.state for view in row.views}
        self._of: dict[int, tuple[str, ...]] = {  # by how many iterations before the checkpoint's
            back: tuple(name for name in self._rows if saved[name] == back) for back in set(saved.values()) if back
        }
        self._back_of = {name: back for back, names in self._of.items() for name in names}

    def consumes(self, running: int, number: int, arguments: tuple[object, ...]) -> None:
        """Optimizer `number` is about to make an update, and no other hook runs before it."""
        if self._compare(number):
            self._pipeline.doubt()  # it may have been written before it was read
        self._check_made()
        checkpoint = self._pipeline.parted
        if checkpoint is None:
            return
        back = checkpoint.iteration - running
        optimizer = self._optimizers[number]
        self._is_making = True
        if not is_torchs_own(optimizer):  # one parameter's update may depend on the others', now and then
            self.refuse(f"updates of {type(optimizer).__name__} are none of torch's own")
        elif self.overtaken:
            self.refuse("a hook of an optimizer's step() was registered in the middle of an iteration")
        elif any(argument is not None for argument in arguments):
            self.refuse("an update was given a closure, which computes its gradients within")
        elif _flushes_denormals() and _any_on_host(optimizer):
            self.refuse("torch.set_flush_denormal is on, which holds for some threads and not for others")
        elif grad_scale_of(optimizer) is not None:
            self.refuse("a scaler has a fused optimizer unscale its gradients within the update")
        elif self._pipeline.parted is not None and (wanted := self._wanted(running, back)):
            self._consume(checkpoint, back, number, optimizer, wanted)

    def _wanted(self, _running: int, back: int) -> frozenset[str]:
        """Parameters whose gradients of then a restore may need."""
        return frozenset(name for name, its in self._back_of.items() if its > back)

    def _consume(
        self, checkpoint: InFlight, back: int, number: int, optimizer: torch.optim.Optimizer, wanted: frozenset[str]
    ) -> None:
        found: dict[int, Leaving] = {}
        live: list[TakenGradient] = []
        names: list[str] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter), "")
                row, gradient = self._rows.get(name), parameter.grad
                if row is None or gradient is None or name not in wanted:
                    continue
                names.append(name)
                if name in self.factors.names:
                    if not (self.factors.are_exact(name, parameter) and checkpoint.consumed(back, row)):
                        self._refuse_product(name)
                        return
                    live.append(replace(self._made_of[name], consumed=few_of(as_bytes(gradient), self._turn)))
                    continue
                order = self._bound.binding.targets[gradient_name(back, name)].order
                part = local(gradient)
                if not _is_like(gradient, parameter, order):
                    self.refuse(f"the gradient of {name} is no dense tensor of its parameter's kind and memory order")
                    return
                lying = part.detach().permute(order)
                lying = lying.clone() if is_lent(lying) else lying
                pieces = (as_bytes(lying),)
                if lying.data_ptr() != part.data_ptr():  # it was copied
                    found[row] = Leaving(pieces, ())
                    continue
                counted = dict.fromkeys((gradient, part))  # some writes count in the one alone
                shares = name in self._written_again or lying.untyped_storage().nbytes() > part.nbytes
                found[row] = Leaving(pieces, tuple(counted), shares)
                few = few_of(pieces[0], self._turn)
                live.append(TakenGradient(name, few, checkpoint.arrives(gradient_name(back, name), pieces)))
        if live and not self._looked(checkpoint, Glance(live, self._turn)):
            return
        try:
            text = self._host.update(number, tuple(names), self.factors.rows(names))
        except CheckflowError as error:
            self.refuse(str(error))
            return
        self._texts(checkpoint).add_update(checkpoint.iteration - back, text)
        if not checkpoint.consume(back, found):
            self.refuse("an optimizer makes several updates in one iteration")

    def _looked(self, checkpoint: InFlight, glance: Glance) -> bool:
        """False where it is known already that a gradient is no product."""
        checkpoint.glances.append(glance)
        name = glance.no_product() if glance.is_here else ""
        if name:
            self._refuse_product(name)
        return not name

    def _refuse_product(self, name: str) -> None:
        self.refuse(f"the gradient of {name} is not the product of its factors")

    def _vouch(self) -> None:
        """Its copies have ended, and it is staged next: it has what its updates consumed."""
        checkpoint = self._pipeline.waiting[0]
        glances, checkpoint.glances = checkpoint.glances, []
        for glance in () if checkpoint.written_unseen else glances:
            if not (name := glance.no_product()) and glance.has_arrived():
                continue
            self._pipeline.doubt()
            if name:
                self._refuse_product(name)
            else:
                self.refuse("gradients or their factors are written before they have left")
            return

    def factored(
        self, running: int, name: str, gradient: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """A gradient was made, of these factors, and no update has consumed it. More than planned are not taken."""
        checkpoint = self._pipeline.parted
        if checkpoint is not None and name in self._wanted(running, checkpoint.iteration - running):
            back, pieces = checkpoint.iteration - running, tuple(map(as_bytes, factors))
            if sum(piece.numel() for piece in pieces) <= self._row_bytes[name]:
                made = few_of(as_bytes(gradient), self._turn)
                few = torch.cat([made, *(few_of(piece, self._turn) for piece in pieces)])  # a copy
                arrives = checkpoint.arrives(gradient_name(back, name), pieces)
                self._made_of[name] = TakenGradient(name, few[made.numel() :], arrives, made=few[: made.numel()])
                checkpoint.consume(back, {self._rows[name]: Leaving(pieces, factors)})

    def _texts(self, checkpoint: InFlight) -> Updates:
        assert checkpoint.updates is not None
        return checkpoint.updates

    def _check_made(self) -> None:
        if self._is_making:
            self.refuse("an update was begun, and raised")
        self._is_making = False

    def made(self, number: int) -> None:
        """It has made the update, and no other hook has run since."""
        self._is_making = False
        if self._pipeline.parted is not None and not self._pipeline.parted.unchanged():
            self.refuse("gradients or their factors are written before they have left")
        if self.refused:
            return
        storages = self._bound.binding.optimizer_storages[number]
        self._after[number] = {s: versions(s.counted) for s in storages if self._earlier.get(s.id, 0)}
        self._sampled.made(number, [*self._after[number]])
        self._scalars[number] = self._scalars_of(self._optimizers[number])
        self._groups[number] = _groups_of(self._optimizers[number])

    def _scalars_of(self, optimizer: torch.optim.Optimizer) -> list[object]:
        """Of the parameters that are rebuilt: each scalar, as what it is and how often it was written."""
        state = updater(optimizer).state
        return [
            (id(value), *versions([value])) if isinstance(value, torch.Tensor) else value
            for group in optimizer.param_groups
            for parameter in group["params"]
            if self._names.get(id(parameter)) in self._rows
            for value in state.get(parameter, {}).values()
            if not isinstance(value, torch.Tensor) or (value.dim() == 0 and value.device.type == "cpu")
        ]

    def part_ended(self, completed: int) -> None:
        """An iteration has ended within a checkpoint, or with one."""
        self._iteration_ended()
        checkpoint = self._pipeline.parted
        if checkpoint is None:
            return
        back = checkpoint.iteration - completed
        if back > 0:
            checkpoint.part_ended()
            if (text := self._part_text()) is not None:
                self._texts(checkpoint).add_part(completed, self._of.get(back, ()), text)

    def _iteration_ended(self) -> None:
        self._check_made()
        self._next_turn()
        for number in tuple(self._after):
            self._compare(number)

    def _part_text(self) -> str | None:
        try:
            return self._host.part()
        except CheckflowError as error:
            self.refuse(str(error))
            return None

    def resumed(self) -> None:
        """The state is another iteration's: what restoring has written is no update's to have left."""
        self._next_turn()
        self._after.clear()
        self._sampled.forget()
        self._is_making = False

    def _next_turn(self) -> None:
        self.factors.forget()
        self._made_of.clear()
        self._turn += 1

    def prove(self) -> bool:
        """A checkpoint has begun: the first one is proven, and one now and then, which training waits for.

        False where it is not exact.
        """
        checkpoint = self._pipeline.newest
        if checkpoint is None or checkpoint.updates is None or (self._proven and not self._is_due_again()):
            return True
        again, self._proven = self._proven, True
        return self._holds(checkpoint.updates.text(checkpoint.iteration), {0: checkpoint}, (), again=again)

    def _is_due_again(self) -> bool:
        """Whether what was proven is to be proven once more."""
        return not self.refused and time.monotonic() - self._proven_s > PROVEN_AGAIN_S

    def _holds(self, replay: str, filled: Mapping[int, InFlight], backs: Sequence[int], *, again: bool) -> bool:
        with self._pipeline.counters.stalling(Cause.PROOF):
            self._pipeline.complete()
            why = self._prove(replay, filled, backs)
        now, before = time.monotonic(), self._proven_s
        self._proven_s = now
        if why:
            since = f"; it was, {now - before:.0f} s ago, and checkpoints since then may be wrong" if again else ""
            self._pipeline.doubt()
            self.refuse(f"{why}{since}")
        return not why

    def refuse(self, why: str) -> None:
        """No checkpoint is saved in parts from now on."""
        self._pipeline.drop_open()
        self._after.clear()
        self._sampled.forget()
        self._pipeline.parts_allowed = False
        if not self.refused:
            self.refused = why
            every = self.whole_every()
            on_host, in_parts = "the host makes no updates beside the training:", "checkpoints are not saved in parts:"
            what = on_host if self._pipeline.replica else in_parts
            line = f"{what} {why}; each is read as a whole when its iteration ends"
            self._tell(line + (f", every {every} iterations" if every > 1 else ""))

    def whole_every(self) -> int:
        """Iterations from one checkpoint that is read as a whole to the next: the same on all ranks, for a checkpoint
        counts where each has its part, and no oftener than the slowest link carries."""
        return max(self._pipeline.timetable.whole_every, self._others_every())

    def _compare(self, number: int) -> bool:
        """With what an update left: nothing else may have written it. Whether something has."""
        if number not in self._after:
            return False
        optimizer, written = self._optimizers[number], "is written by something else than its optimizer's update"
        why = next((f"{s.name} {written}" for s, v in self._after[number].items() if versions(s.counted) != v), "")
        if not why and self._sampled.is_written(number):
            why = f"what {type(optimizer).__name__} updates is written by something else, and counted nowhere"
        is_written = bool(why)
        if not why and _groups_of(optimizer) != self._groups[number]:
            why = f"the parameter groups of {type(optimizer).__name__} are not what they were"
        elif not why and self._scalars_of(optimizer) != self._scalars[number]:
            why = f"a scalar of {type(optimizer).__name__}'s state {written}"
        if why:
            self.refuse(why)
        return is_written


def _flushes_denormals() -> bool:
    return _DENORMAL * 1.0 == 0.0


def _any_on_host(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.device.type == "cpu" for group in optimizer.param_groups for parameter in group["params"])


def _is_like(gradient: torch.Tensor, parameter: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Whether it is what an update made again is given: of the parameter's type, lying in this order of dimensions.

    Kernels may add up in another order where memory lies otherwise.
    """
    part = local(gradient)
    return (
        part.layout is torch.strided
        and part.dtype == parameter.dtype
        and are_shared_alike(gradient, parameter)
        and part.permute(order).is_contiguous()
    )


def _groups_of(optimizer: torch.optim.Optimizer) -> list[object]:
    """Whose parameters are in which, and what may give an update other bits."""
    groups = optimizer.param_groups
    return [[*map(id, group["params"]), *(group.get(key) for key in IMPLEMENTATION)] for group in groups]
