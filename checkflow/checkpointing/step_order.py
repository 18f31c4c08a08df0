"""Whether `step()` is the last of what an iteration does: what it should have had, and what follows it, is told of.

An update that comes after it uses a gradient that is as it was at `step()`, and in no checkpoint. Of a scheduler or an
average that follows it, each checkpoint has what it was one iteration before: it changes between `step()` and the next
update. Where it changed likewise before the very first update, an iteration begins with it, and so does a resume.

What optimizer.step() changes itself, in a subclass or a user's hook, is of the update: the looks are taken before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial

import torch

from checkflow.extra import Holder, Variables, with_leaves
from checkflow.state.host.encode import encode
from checkflow.state.host.json_values import dump
from checkflow.state.host.objects import HostObjects
from checkflow.state.live import parameters_of
from checkflow.state.names import is_of_kind
from checkflow.state.shards import gradient_of
from checkflow.torch_internals import freed_since, step_post_hooks, step_pre_hooks, versions
from checkflow.training import Training
from checkflow.wrapped import is_hookable

_Seen = Mapping[str, Hashable]  # what tells whether something is as it was, by name
_Left = tuple[torch.nn.Parameter, str, Callable[[], bool]]  # what its gradient is like; whether that is gone


class StepOrder:
    """Looks on for two iterations, from the beginning and from each restore on; then it costs nothing."""

    def __init__(self, training: Training, objects: HostObjects) -> None:
        self._training = training
        self._objects = objects
        self._before: _Seen | None = (
            None  # as it was when the last iteration ended, or all began; None once an update began
        )
        self._usual: frozenset[str] | None = None  # what changes before the first update
        self._late: frozenset[str] | None = None  # what changes before the second, but not before the first
        self._left: dict[
            int, _Left
        ] = {}  # one gradient, not of zeros, of each when the last iteration ended, by number
        self._used = ""  # whose gradient an update used that was there before
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begins(self) -> None:
        """The training is as it begins, or was restored."""
        self.remove()
        self._usual, self._late, self._left, self._used = None, None, {}, ""
        self._before = self._now()
        for number, optimizer in enumerate(self._training.optimizers):
            if is_hookable(optimizer):  # a user's hooks may write what is looked at: both come before them
                before = optimizer.register_step_pre_hook(self._updates)
                step_pre_hooks(optimizer).move_to_end(before.id, last=False)
                after = optimizer.register_step_post_hook(partial(self._updated, number))
                step_post_hooks(optimizer).move_to_end(after.id, last=False)
                self._hooks += [before, after]

    def ended(self) -> Iterator[str]:
        """An iteration has ended. What to say, once."""
        if not self._hooks:
            return
        self._before, self._left = self._now(), dict(self._gradients())
        if self._late is None:
            return
        self.remove()
        if self._used:
            yield (
                f"{self._used}: the update used the gradient that was there at the last step(); no checkpoint has "
                "gradients, and a resume goes on without that update: call step() after it"
            )
        if self._late:
            names = sorted(self._late)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield (
                f"{names[0]}{more}: changed after step() and before the next update, so each resume would be one step "
                "behind; call step() last, after scheduler.step() and moving averages (nothing is wrong where the loop "
                "does it again after a resume, as at an epoch's end)"
            )

    def remove(self) -> None:
        """Look on no longer."""
        self._left = {}
        while self._hooks:
            self._hooks.pop().remove()

    def _updates(self, *_: object) -> None:
        """An optimizer begins an update. The first of any since an iteration ended counts."""
        if self._before is None or torch.compiler.is_compiling():
            return
        now = self._now()
        changed = frozenset(name for name, seen in self._before.items() if now.get(name, seen) != seen)
        self._before = None
        if self._usual is None:
            self._usual = changed
        elif self._late is None:
            self._late = changed - self._usual

    def _updated(self, number: int, *_: object) -> None:
        """An optimizer has made an update, whose closure may have made the gradient, too."""
        if number not in self._left or torch.compiler.is_compiling():
            return
        parameter, before, gone = self._left.pop(number)
        gradient = gradient_of(parameter)
        if gradient is not None and not gone() and _of_tensors([gradient]) == before:
            names = (str(name) for name, each in parameters_of(self._training) if each is parameter)
            self._used = next(names, "a parameter")

    def _gradients(self) -> Iterator[tuple[int, _Left]]:
        for number, optimizer in enumerate(self._training.optimizers):
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            gradients = ((each, gradient_of(each)) for each in parameters)
            for parameter, gradient in gradients:
                if gradient is not None and bool(gradient.any()):  # one of zeros is there after a restore, too
                    yield number, (parameter, _of_tensors([gradient]), freed_since(gradient))
                    break

    def _now(self) -> _Seen:
        """Of schedulers, scalers and what was listed as modules, tensors and objects with state of their own."""
        listed = self._training.listed
        found: dict[str, Hashable] = {holder: _of_tensors([tensor]) for holder, tensor in listed.tensors.items()}
        for holder, module in listed.modules.items():
            found[holder] = _of_tensors([*module.parameters(), *module.buffers()])
        for holder, member in self._objects.objects.items():
            if not is_of_kind(holder, "loader") and not isinstance(member, (Holder, Variables)):
                try:
                    state = with_leaves(member.state_dict(), (torch.Tensor,), _of_tensor)
                    found[holder] = dump(encode(state, holder))
                except Exception:  # noqa: BLE001 (it is asked again when a checkpoint is made, which says so)
                    continue
        return found


def _of_tensor(_path: str, tensor: object) -> str:
    assert isinstance(tensor, torch.Tensor)
    return _of_tensors([tensor])


def _of_tensors(tensors: list[torch.Tensor]) -> str:
    """Where they lie, and how often they were written."""
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    return f"{[tensor.data_ptr() for tensor in tensors]} {versions(counted)}"
