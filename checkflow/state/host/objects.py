"""What the user attaches beside models and optimizers: objects with state_dict and load_state_dict, and generators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from checkflow.about import Run
from checkflow.errors import InputError
from checkflow.extra import Extra, Stateful, is_random
from checkflow.state.host.losses import Losses
from checkflow.state.host.passes import with_epochs
from checkflow.state.host.samplers import keep_order
from checkflow.torch_internals import scaler_tensors

_PREPARED = ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")  # have the two methods, and no position
Vouches = tuple[int, int]
"""Numbers of the names and of the content of what ranks have alike, which add up to 0 over ranks that do; the second is
0 where nobody looked."""
_VOUCHES = 64  # iterations, more than are in flight


@dataclass(slots=True)
class Member:
    """Which of a training's processes this one is. `attempt` counts its starts and restores, alike on all of them.

    `vouches`: by iteration, of the last few, what this rank believes others to have as it does.
    """

    rank: int
    size: int
    attempt: int = 0
    vouches: OrderedDict[int, Vouches] = field(default_factory=OrderedDict)

    def vouch(self, iteration: int, vouches: Vouches) -> None:
        """Of the state after so many iterations."""
        self.vouches.pop(iteration, None)  # after a restore it comes again, as the last
        self.vouches[iteration] = vouches
        if len(self.vouches) > _VOUCHES:
            self.vouches.popitem(last=False)


@dataclass(frozen=True, slots=True)
class HostObjects:
    """Named objects and generators whose state a checkpoint holds, the user's own JSON, read at each checkpoint,
    what the run is of, which of its processes this one is, and its losses.

    `objects` are restored in their order; a loader's name begins with "loader".
    """

    objects: Mapping[str, Stateful] = field(default_factory=dict)
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    run: Run | None = None
    member: Member | None = None  # None where there is one process
    losses: Losses = field(default_factory=Losses)

    @classmethod
    def of(
        cls,
        *,
        scheduler: object = None,
        scaler: object = None,
        loader: object = None,
        generators: Mapping[str, torch.Generator] | None = None,
        metadata: Mapping[str, object] | None = None,
        extra: Extra | None = None,
        run: Run | None = None,
        member: Member | None = None,
    ) -> HostObjects:
        """Each of the first three is one object, a sequence of them, or None; of `extra`, the objects are taken.

        The generator that a loader seeds its workers from is taken along as "<loader>.generator". Raises InputError,
        by name, for an object without the two methods, and for a loader whose order cannot be drawn again.
        """
        objects: dict[str, Stateful] = {}
        own = {f"generator.{name}": generator for name, generator in (generators or {}).items()}
        for kind, given in (("scheduler", scheduler), ("scaler", scaler), ("loader", loader)):
            members = _members(given)
            for index, found in enumerate(members):
                name = kind if len(members) == 1 else f"{kind}.{index}"
                objects[name] = _checked(name, found)
                if kind == "loader":
                    keep_order(name, found)
                    objects[name] = with_epochs(objects[name])
                generator = getattr(found, "generator", None)
                if kind == "loader" and isinstance(generator, torch.Generator):
                    own[f"{name}.generator"] = generator
        objects |= extra.objects if extra is not None else {}
        for name, generator in own.items():
            if not isinstance(generator, torch.Generator):
                key = name.removeprefix("generator.")
                advice = f"give it in extra={{{key!r}: ...}}" if is_random(generator) else "give a torch.Generator"
                raise InputError(f"{name}: is a {type(generator).__name__}; {advice}")
        return cls(objects, own, metadata if metadata is not None else {}, run, member)


def _members(given: object) -> list[object]:
    if given is None:
        return []
    if not isinstance(given, Stateful) and isinstance(given, (list, tuple)):
        return list(given)
    return [given]


def _checked(name: str, member: object) -> Stateful:
    if type(member).__name__ in _PREPARED:
        raise InputError(
            f"{name}: was prepared by Accelerate, and its state is no position; attach with "
            "checkflow.integrations.accelerate"
        )
    if type(member).__name__ == "_FabricDataLoader":  # counts its passes, which the order is made of
        raise InputError(
            f"{name}: was set up by Fabric, and gives no state; leave it out of setup_dataloaders and give each "
            "process its part, by checkflow.ResumableLoader or torchdata's StatefulDataLoader"
        )
    if isinstance(member, Stateful):
        return member
    if isinstance(member, torch.utils.data.DataLoader):
        raise InputError(
            f"{name}: a plain DataLoader does not know its position; use checkflow.ResumableLoader or torchdata's "
            "StatefulDataLoader"
        )
    kind = "an iterator" if isinstance(member, Iterable) else f"a {type(member).__name__}"
    raise InputError(
        f"{name}: {kind} without state_dict and load_state_dict cannot be resumed; attach one that has them"
    )


def state_of(member: Stateful) -> dict[str, object]:
    """What it gives as its state, less what no record holds and it has anyway.

    Before torch 2.10 an SWALR lists the function that its constructor chose, also within a SequentialLR.
    """
    state = member.state_dict()
    if isinstance(member, torch.optim.lr_scheduler.LRScheduler):
        return {key: _without_annealing(value) for key, value in state.items() if key != "anneal_func"}
    return state


def _without_annealing(value: object) -> object:
    if type(value) is dict:  # a Counter stays one
        return {key: _without_annealing(each) for key, each in value.items() if key != "anneal_func"}
    return list(map(_without_annealing, value)) if type(value) is list else value


def read_without_waiting(member: Stateful) -> Callable[[], dict[str, object]] | None:
    """For a GradScaler on CUDA: its state as the work queued so far leaves it, to be called later; None for the rest.

    GradScaler's own state_dict waits for the device; this waits only when called.
    """
    if not isinstance(member, torch.amp.GradScaler) or not member.is_enabled():
        return None
    scale, tracker = scaler_tensors(member)
    if scale is None or tracker is None or scale.device.type != "cuda":
        return None
    copies = [torch.empty_like(source, device="cpu", pin_memory=True) for source in (scale, tracker)]
    for copy, source in zip(copies, (scale, tracker), strict=True):
        copy.copy_(source, non_blocking=True)
    done = torch.cuda.current_stream(scale.device).record_event()
    constants: dict[str, object] = {
        "growth_factor": member.get_growth_factor(),
        "backoff_factor": member.get_backoff_factor(),
        "growth_interval": member.get_growth_interval(),
    }

    def state() -> dict[str, object]:
        done.synchronize()
        return {"scale": copies[0].item(), **constants, "_growth_tracker": int(copies[1].item())}

    return state
