"""Updates made again: state that was saved some iterations before its checkpoint, brought to it by its gradients.

Each update is made by the training's own optimizer class, with its groups as they were, of the parameters that were
saved before it and had a gradient; torch's optimizers leave the others alone. Nothing else runs: no hook, and nothing
that a scheduler put in the place of step(). Of a parameter that ranks share the update is made of this rank's part.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from checkflow.errors import FormatError, InputError
from checkflow.state.groups import IMPLEMENTATION
from checkflow.state.host.decode import decode
from checkflow.state.host.record import GroupRecord, ReplayRecord, UpdateRecord
from checkflow.state.memory import as_bytes
from checkflow.state.names import StateName, file_of, gradient_name
from checkflow.state.restore.files import FileTensor, TensorFile, Tied
from checkflow.state.restore.of_some import state_of_some
from checkflow.state.restore.optimizers import OptimizerPlan, match_optimizer, shared_entry
from checkflow.state.shards import local
from checkflow.torch_internals import are_looped, unhooked_step

_ADVICE = "take another checkpoint"
ELSEWHERE = "restore() it in its training and save(), or choose another iteration"
_PROVEN_AT_A_TIME_BYTES = 2**26
ROUNDINGS = 16  # of the largest number in a tensor: what one update may differ by where another device makes it


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """One update: values of each of the groups, and gradients by parameter."""

    optimizer: torch.optim.Optimizer
    back: int
    groups: tuple[Mapping[str, object], ...]
    gradients: Mapping[torch.Tensor, FileTensor]
    factor_rows: Mapping[torch.Tensor, int]  # of those that are factors
    threads: int  # that made it; 0: not known


@dataclass(frozen=True, slots=True)
class Replay:
    """What is to be made again. `back`: of each parameter that is saved before the others, how many iterations."""

    back: Mapping[torch.Tensor, int]
    then: Mapping[torch.Tensor, Mapping[torch.optim.Optimizer, OptimizerPlan]]  # by parameter, as it was saved
    updates: tuple[UpdatePlan, ...]  # in order

    def begun(self, plan: OptimizerPlan) -> OptimizerPlan:
        """An optimizer's plan with the state that each parameter had when it was saved."""
        states, apart = dict(plan.states), dict(plan.apart)
        for parameter in self.back:
            then = self.then[parameter][plan.optimizer]
            for now, earlier in ((states, then.states), (apart, then.apart)):
                now.pop(parameter, None)
                if parameter in earlier:
                    now[parameter] = earlier[parameter]  # type: ignore[assignment]
        return OptimizerPlan(plan.optimizer, plan.groups, states, apart, plan.own)

    def run(self) -> None:
        """Live parameters and state are as they were saved; afterwards they are the checkpoint's. Raises InputError
        where the optimizer's code does not make the updates here, as one may not that needs another device."""
        parts = {parameter: local(parameter) for parameter in self.back}
        states = {update.optimizer: _state_of(update.optimizer, parts) for update in self.updates}
        try:
            for update in self.updates:
                self._make(update, parts, states[update.optimizer])
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise InputError(f"its updates cannot be made again on this host ({first:.200}); {ELSEWHERE}") from None
        for optimizer, state in states.items():
            for parameter, part in parts.items():
                if part in state:
                    _put_back(state[part], optimizer.state[parameter], parameter)

    def timed(self) -> float:
        """`run`, and how long it took, the device's work with it, in seconds."""
        devices = {parameter.device for parameter in self.back if parameter.is_cuda}
        for device in devices:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        self.run()
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def differs(self, saved: Callable[[torch.Tensor], FileTensor]) -> torch.Tensor | None:
        """A parameter that is not as it is now, to the bit, when its updates are made again beside it; None: all are.

        `saved`: a parameter as it was saved. Takes device memory for a few parameters at a time.
        """
        made = self._made_again(saved, on_host=False)
        return next((parameter for parameter, now, again in made if not same(now, again)), None)

    def furthest(self, saved: Callable[[torch.Tensor], FileTensor]) -> tuple[torch.Tensor | None, float]:
        """How far the host's updates lead from what is there now, and of which parameter; infinite where too far.

        In units of the largest number in the same tensor. A few roundings in each number are not too far.
        """
        found: tuple[torch.Tensor | None, float] = None, 0.0
        for parameter, now, again in self._made_again(saved, on_host=True):
            if not same(now, again):
                far = _distance(now, again)
                found = max(found, (parameter, far), key=lambda one: one[1])
        return found

    def _made_again(
        self, saved: Callable[[torch.Tensor], FileTensor], on_host: bool
    ) -> Iterator[tuple[torch.Tensor, object, object]]:
        """Each parameter with what it is now and what updates make of what was saved; and with each of its entries."""
        with torch.random.fork_rng(sorted({p.device.index for p in self.back if p.device.type == "cuda"})):
            for some in self._some_at_a_time():
                copies = {p: _copy(local(p), saved(p), p.device if not on_host else torch.device("cpu")) for p in some}
                states: dict[torch.optim.Optimizer, dict[torch.Tensor, dict[str, object]]] = {}
                for optimizer in {update.optimizer for update in self.updates}:
                    state: dict[torch.Tensor, dict[str, object]] = defaultdict(dict)
                    states[optimizer] = state
                    for parameter, copy in copies.items():
                        then = self.then[parameter][optimizer]
                        if parameter in then.states:
                            state[copy] = then.made(parameter, copy)
                for update in self.updates:
                    self._make(update, copies, states[update.optimizer])
                for parameter, copy in copies.items():
                    yield parameter, local(parameter), copy
                    for optimizer, made in states.items():
                        now, again = optimizer.state.get(parameter, {}), made.get(copy, {})
                        yield parameter, set(now), set(again)
                        for entry in now.keys() & again.keys():
                            yield parameter, _part(now[entry]), again[entry]

    def _some_at_a_time(self) -> Iterator[list[torch.Tensor]]:
        some: list[torch.Tensor] = []
        size_bytes = 0
        for parameter in self.back:
            part_bytes = local(parameter).nbytes
            if some and size_bytes + part_bytes > _PROVEN_AT_A_TIME_BYTES:
                yield some
                some, size_bytes = [], 0
            some.append(parameter)
            size_bytes += part_bytes
        if some:
            yield some

    def _make(
        self,
        update: UpdatePlan,
        parameters: Mapping[torch.Tensor, torch.Tensor],
        state: Mapping[torch.Tensor, dict[str, object]],
    ) -> None:
        """One update of those of the parameters (each with what stands for it) that were saved before it."""
        found = {p: g for p, g in update.gradients.items() if p in parameters and self.back[p] > update.back}
        if not found:
            return
        optimizer = update.optimizer
        groups: list[dict[str, object]] = []
        for group, values in zip(optimizer.param_groups, update.groups, strict=True):
            updated = [parameters[p] for p in group["params"] if p in found]
            if updated:
                # What stands for a parameter is a plain tensor, which might be updated otherwise.
                loops = values.get("foreach", False) is None and are_looped(group["params"])
                groups.append({**values, **({"foreach": False} if loops else {}), "params": updated})
        before = {p: parameters[p].grad for p in found}
        again = object.__new__(type(optimizer))
        again.__dict__.update(optimizer.__dict__)
        again.__dict__ |= {"param_groups": groups, "state": state}
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(update.threads or threads)
            for parameter, gradient in found.items():
                rows = update.factor_rows.get(parameter)
                parameters[parameter].grad = (
                    _copy(parameters[parameter], gradient)
                    if rows is None
                    else _product(parameters[parameter], gradient, rows)
                )
            unhooked_step(again)
        finally:
            torch.set_num_threads(threads)
            for parameter, gradient_before in before.items():
                parameters[parameter].grad = gradient_before


def match_replay(
    record: ReplayRecord,
    files: Mapping[str, TensorFile],
    optimizers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[int, StateName],
) -> Replay:
    """What to do, checked. Raises FormatError for what no checkpoint has, InputError where the training is another."""
    parameters = {
        str(names[id(p)]): p for found in optimizers.values() for group in found.param_groups for p in group["params"]
    }
    back: dict[torch.Tensor, int] = {}
    then: dict[torch.Tensor, Mapping[torch.optim.Optimizer, OptimizerPlan]] = {}
    empty = TensorFile({}, {})
    for part in record.parts:
        for name in part.parameters:
            if name not in parameters or parameters[name] in back:
                raise FormatError(f"replay: {name!r:.200} is not once a parameter; {_ADVICE}")
            back[parameters[name]] = part.back
        if [found.name for found in part.optimizers] != list(optimizers):
            raise FormatError(f"replay: a part has other optimizers than the checkpoint; {_ADVICE}")
        its = [state_of_some(found, part.parameters) for found in part.optimizers]
        plans = {
            optimizers[found.name]: match_optimizer(optimizers[found.name], names, found, files.get(found.file, empty))
            for found in its
        }
        then |= {parameters[name]: plans for name in part.parameters}
        for plan in plans.values():
            if tied := [parameter for parameter, state in plan.states.items() if _ties(state)]:
                raise FormatError(f"replay: state of {names[id(tied[0])]} is tied to other state; {_ADVICE}")
    updates: list[UpdatePlan] = []
    for update in record.updates:
        if update.optimizer not in optimizers:
            raise FormatError(f"replay: an update is of {update.optimizer!r:.80}, which there is not; {_ADVICE}")
        if updates and update.back > updates[-1].back:
            raise FormatError(f"replay: its updates are not in order; {_ADVICE}")
        optimizer = optimizers[update.optimizer]
        if len(update.groups) != len(optimizer.param_groups):
            raise FormatError(f"replay: an update has {len(update.groups)} groups; {_ADVICE}")
        for number, (group, saved) in enumerate(zip(optimizer.param_groups, update.groups, strict=True)):
            _check_implementation(f"{update.optimizer}.param_groups[{number}]", group, saved)
        gradients = {parameters[name]: _gradient(name, update, files, parameters) for name in update.gradients}
        if not update.factor_rows.keys() <= set(update.gradients):
            raise FormatError(f"replay: an update has factors of what it has no gradient of; {_ADVICE}")
        groups = tuple(map(_values, update.groups))
        rows = {parameters[name]: rows for name, rows in update.factor_rows.items()}
        updates.append(UpdatePlan(optimizer, update.back, groups, gradients, rows, update.threads))
    return Replay(back, then, tuple(updates))


def gradient_files(record: ReplayRecord) -> list[str]:
    """Names of the files that it needs."""
    return sorted({file_of(gradient_name(found.back, "").holder) for found in record.updates if found.gradients})


def _check_implementation(where: str, group: Mapping[str, object], then: GroupRecord) -> None:
    """Another way to compute an update may give other bits."""
    for key in IMPLEMENTATION:
        if key in then.values and then.values[key] != group.get(key):
            raise InputError(
                f"{where}: {key} is {group.get(key)}, and {then.values[key]} in the checkpoint, whose updates have to "
                "be made again as they were; restore into the optimizer that was saved"
            )


def _ties(state: Mapping[str, object]) -> bool:
    return any(isinstance(value, Tied) for value in state.values())


def _values(group: GroupRecord) -> Mapping[str, object]:
    if group.stored:
        raise FormatError(f"replay: an update's {group.stored[0]!r:.80} is in no file; {_ADVICE}")
    return {key: decode(value, f"replay: {key}") for key, value in group.values.items()}


def _gradient(
    name: str, update: UpdateRecord, files: Mapping[str, TensorFile], parameters: Mapping[str, torch.Tensor]
) -> FileTensor:
    where = gradient_name(update.back, name)
    file = files.get(file_of(where.holder))
    found = None if file is None or name not in parameters else file.tensors.get(where.path)
    if found is None:
        raise FormatError(f"replay: no file has the gradient of {name!r:.200}; {_ADVICE}")
    parameter = local(parameters[name])
    rows, shape = update.factor_rows.get(name), tuple(parameter.shape)
    fits = found.shape == shape
    if rows is not None:
        fits = len(shape) == 2 and len(found.shape) == 1 and found.shape[0] >= rows * sum(shape)
    if found.dtype != parameter.dtype or not fits:
        raise FormatError(f"replay: the gradient of {name!r:.200} is not like its parameter; {_ADVICE}")
    return found


def _product(parameter: torch.Tensor, source: FileTensor, rows: int) -> torch.Tensor:
    """The gradient as the backward pass made it of the factors in the file."""
    sides, others = parameter.shape
    factors = source.view()[: rows * (sides + others)].to(parameter.device)
    left, right = factors[: rows * sides].view(rows, sides), factors[rows * sides :].view(rows, others)
    return left.t().mm(right)


def _state_of(
    optimizer: torch.optim.Optimizer, parts: Mapping[torch.Tensor, torch.Tensor]
) -> dict[torch.Tensor, dict[str, object]]:
    """An optimizer's state by this rank's parts, of the same memory."""
    found: dict[torch.Tensor, dict[str, object]] = defaultdict(dict)
    for parameter, part in parts.items():
        if parameter in optimizer.state:
            found[part] = {entry: _part(value) for entry, value in optimizer.state[parameter].items()}
    return found


def _put_back(made: Mapping[str, object], state: dict[str, object], parameter: torch.Tensor) -> None:
    """What an update of this rank's part has made of a parameter's state."""
    held = {entry: state[entry] for entry, value in made.items() if entry in state and _part(state[entry]) is value}
    state.clear()
    state.update({entry: held.get(entry, shared_entry(value, entry, parameter)) for entry, value in made.items()})


def _part(value: object) -> object:
    return local(value) if isinstance(value, torch.Tensor) else value


def _copy(parameter: torch.Tensor, source: FileTensor, device: torch.device | None = None) -> torch.Tensor:
    """On the parameter's device, unless on another one, and as it lies in memory."""
    with torch.no_grad():
        return torch.empty_like(parameter, requires_grad=False, device=device).copy_(source.view())


def _distance(now: object, again: object) -> float:
    """Between two tensors of the same kind, in units of the largest number in the first; infinite where far."""
    if not isinstance(now, torch.Tensor) or not isinstance(again, torch.Tensor) or not now.is_floating_point():
        return math.inf
    if now.shape != again.shape or now.dtype != again.dtype:
        return math.inf
    first, second = now.detach().cpu().double(), again.detach().cpu().double()
    far = float((first - second).abs().max() / first.abs().max())
    return far if far <= ROUNDINGS * torch.finfo(now.dtype).eps else math.inf


def same(one: object, other: object) -> bool:
    """To the bit."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = map(as_bytes, (one, other))
    return torch.equal(first, second.to(first.device))
