"""Training loops of Hugging Face's Accelerate, resumed to the bit where their prepared loaders stood.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with attach(accelerator, model, optimizer, loader=loader, scheduler=scheduler, store="checkpoints") as ckpt:
        ckpt.restore()
        for epoch in range(loader.iteration, epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                if accelerator.sync_gradients:
                    ckpt.step()

A prepared loader's own state is no position: it has neither the number of the pass, of which the seed of its order is
made, nor what the order was drawn with, and at a pass's last batch it says that another one is to begin. So its base
loader is watched instead. That is asked for one batch more than the loop has, to see the end, and what a dataset drew
for it has to be drawn again. After a resume the batch before is therefore loaded once more and let go: so the order is
drawn as it was, and the draws for the next batch, and those of training, go on from the states that each had.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from checkflow.checkpointing.attach import attach as attach_to
from checkflow.checkpointing.checkpointer import Checkpointer
from checkflow.errors import InputError
from checkflow.integrations._drawn import Generators
from checkflow.torch_internals import loader_iterator

try:
    from accelerate import Accelerator, skip_first_batches
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        f"checkflow.integrations.accelerate needs accelerate ({error}); pip install 'checkflow[accelerate]'"
    ) from None

if tuple(map(int, version("accelerate").split(".")[:2])) < (1, 9):  # a pass without batches gave one, which was None
    raise ImportError(
        f"checkflow.integrations.accelerate needs accelerate >= 1.9, this is {version('accelerate')}; "
        "pip install 'checkflow[accelerate]'"
    )

__all__ = ["attach"]

_KEY = "accelerate"  # of what the Accelerator keeps, in extra
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)  # have the state elsewhere


def attach(
    accelerator: Accelerator,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    store: str | Path,
    loader: object = None,
    scheduler: object = None,
    extra: Mapping[str, object] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    **options: Any,
) -> Checkpointer:
    """As checkflow.attach, for what `accelerator.prepare` gave. An iteration ends where `accelerator.sync_gradients`.

    Args:
        accelerator: its scaler, its count of accumulated batches and what was registered for checkpointing go along.
        model: prepared, or several; likewise `optimizer`, `scheduler` and `loader`: those whose order counts.
        store: directory of the checkpoints.
        extra: what else the training carries; likewise `generators`.
        options: the others of checkflow.attach: schedule, interval, retention, metadata, start_over, ...

    Of a training in several processes each calls it. Raises InputError for what cannot be resumed, and what
    checkflow.attach raises.
    """
    if (kind := accelerator.distributed_type) in _REFUSED:
        raise InputError(f"accelerator: {kind.value} is not supported; use DistributedDataParallel or FSDP2")
    if "scaler" in options:
        raise InputError("scaler: is the Accelerator's own, and taken along; leave it out")
    if _KEY in (extra or {}):
        raise InputError(f"extra: {_KEY!r} is what the Accelerator keeps; take another name")
    loaders = {name: _followed(name, one) for name, one in _named("loader", loader).items()}
    others = _watched(accelerator, _named("loader", loader).values())
    drawn = {f"{name}.{own}": generator for name, one in loaders.items() for own, generator in _generators(one).items()}
    registered = {f"{_KEY}-{number}": one for number, one in enumerate(accelerator._custom_objects)}
    schedulers = [getattr(one, "scheduler", one) for one in _named("scheduler", scheduler).values()]
    return attach_to(
        model,
        optimizer,
        store=store,
        loader=cast(Any, tuple(loaders.values())),
        scheduler=cast(Any, tuple(schedulers)),
        scaler=accelerator.scaler,
        extra={**(extra or {}), _KEY: _Accumulation(accelerator, _named("optimizer", optimizer), others), **registered},
        generators={**(generators or {}), **drawn},
        **options,
    )


def _named(kind: str, given: object) -> dict[str, Any]:
    members = list(given) if isinstance(given, (list, tuple)) else [given] if given is not None else []
    return {kind if len(members) == 1 else f"{kind}.{number}": one for number, one in enumerate(members)}


def _generators(loader: object) -> dict[str, torch.Generator]:
    return loader.generators if isinstance(loader, PreparedLoader) else {}


def _followed(name: str, loader: Any) -> object:
    if isinstance(loader, DataLoaderShard) and loader.batch_sampler is not None:
        return PreparedLoader(name, loader)
    if isinstance(loader, DataLoaderDispatcher) and not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise InputError(
            f"{name}: gets its batches from the first process, and has no position on the others; prepare it without "
            "dispatch_batches"
        )
    if isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        raise InputError(
            f"{name}: a prepared loader without a batch sampler has no positions; leave torchdata's StatefulDataLoader "
            "out of prepare(), or give the dataset a length"
        )
    return loader


def _sampler_of_all(loader: Any) -> Any:
    """Of several processes, which all draw one order: under the batch sampler that picks this one's part."""
    return getattr(getattr(loader.batch_sampler, "batch_sampler", None), "sampler", None)


def _watched(accelerator: Accelerator, listed: Collection[Any]) -> list[_Drawing]:
    """The loaders that are prepared and not listed: their order does not count, and what they draw does."""
    watched = []
    for one in accelerator._dataloaders:
        if isinstance(one, (DataLoaderShard, DataLoaderDispatcher)) and not any(one is each for each in listed):
            one.base_dataloader = _Drawing(one.base_dataloader)
            watched.append(one.base_dataloader)
    return watched


class _Accumulation:  # checkpoints have this name as its type
    """The count of batches since an update; where one is being made up there is nothing to resume from.

    And which of the loaders that are not listed have been used. It is asked for at each checkpoint, and sees what the
    Accelerator was given since it was attached.
    """

    def __init__(self, accelerator: Accelerator, optimizers: Mapping[str, Any], others: Sequence[_Drawing]) -> None:
        self._accelerator = accelerator
        self._others = others
        self._optimizers = [getattr(one, "optimizer", one) for one in optimizers.values()]
        self._registered = len(accelerator._custom_objects)
        self._schedulers = len(accelerator._schedulers)

    def state_dict(self) -> dict[str, object]:
        if not self._accelerator.sync_gradients:
            raise InputError("step: gradients are being accumulated; call it where accelerator.sync_gradients")
        if len(self._accelerator._custom_objects) != self._registered:
            raise InputError(
                "register_for_checkpointing: was called after attach(), and no checkpoint has what it was given; call "
                "it before"
            )
        for added in self._accelerator._schedulers[self._schedulers :]:
            if any(added.scheduler.optimizer is one for one in self._optimizers):
                raise InputError(
                    "prepare: was given a scheduler after attach(), and no checkpoint has it; call it before, and "
                    "attach(scheduler=...) what it gives"
                )
        return {"step": self._accelerator.step, "used": [one.used for one in self._others]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]
        for one, used in zip(self._others, state_dict.get("used", ()), strict=False):  # older stores do not say
            one.resume(used)


class PreparedLoader:  # checkpoints have this name as its type
    """Where a prepared loader stands, counted in batches that its loop was given."""

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader
        sampler = loader.get_sampler() or _sampler_of_all(loader)
        self._seeded = sampler if isinstance(sampler, SeedableRandomSampler) else None
        own = {"workers": loader.generator, "order": None if self._seeded else getattr(sampler, "generator", None)}
        if own["order"] is own["workers"]:
            del own["order"]
        self.generators = {key: value for key, value in own.items() if isinstance(value, torch.Generator)}
        rng = Generators(name, self.generators)
        order = None
        if sampler is not None:
            order = _Order(sampler.sampler if type(sampler) is _Order else sampler, rng)
            loader.set_sampler(order)
        self._base = loader.base_dataloader = _Base(name, loader.base_dataloader, loader, order, rng)

    def state_dict(self) -> dict[str, object]:
        """The pass that goes on: how many batches of it the loop was given, and what it takes to go on there."""
        loader = self._loader
        state: dict[str, object] = {"epoch": loader.iteration, "length": len(loader), "used": self._base.used}
        if self._seeded is not None:
            state["seed"] = self._seeded.initial_seed
        return state | self._base.position()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next `for` goes on there."""
        if state_dict["length"] != (length := len(self._loader)):
            raise InputError(
                f"{self._name}: has {length} batches, {state_dict['length']} in the checkpoint; use the same data"
            )
        if ("seed" in state_dict) != (self._seeded is not None):
            raise InputError(f"{self._name}: use_seedable_sampler differs from the checkpoint's; prepare it as it was")
        if self._seeded is not None:
            self._seeded.initial_seed = state_dict["seed"]
        self._loader.set_epoch(state_dict["epoch"])
        self._base.resumed = state_dict if "batches" in state_dict else None
        self._base.resume(state_dict["used"])


class _Order:
    """A sampler, which notes what its order is drawn with."""

    def __init__(self, sampler: Any, rng: Generators) -> None:
        self.sampler = sampler
        self._rng = rng
        self.begun = ""  # states when the pass that goes on asked for its first index
        self.resumed: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self.resumed is not None:
            self._rng.set(self.resumed)
            self.resumed = None
        self.begun = self._rng.read()
        yield from self.sampler


class _Drawing:
    """A prepared loader's base loader, whose passes draw for their iterators what an uninterrupted run's do.

    A StatefulDataLoader makes its first iterator, and draws for it, when it is prepared; one with workers that persist
    makes no other. Both would differ in a run that resumes, whose first pass is a later one.
    """

    def __init__(self, base: Any) -> None:
        again = issubclass(type(base), _Drawing)  # of an attach before this one
        self.base = base.base if again else base
        self.used = again and base.used  # a pass has begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Accelerate takes a prepared loader for what its base loader is."""
        return self.base.__class__

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    def resume(self, used: bool) -> None:
        self.used = used
        if used:
            self.anew()

    def anew(self) -> None:
        """The next pass makes its own iterator."""
        if hasattr(self.base, "load_state_dict"):
            self.base.load_state_dict({})

    def _begin(self) -> Iterator[Any]:
        base, used, self.used = self.base, self.used, True
        if not (used and base.num_workers and base.persistent_workers and loader_iterator(base) is None):
            return iter(base)
        own, base.generator = base.generator, torch.Generator()  # workers' seeds, which the run before has drawn
        base.generator.set_state(torch.get_rng_state() if own is None else own.get_state())
        try:
            return iter(base)
        finally:
            base.generator = own


class _Base(_Drawing):
    """Of a loader that is listed: counts, and begins a resumed pass where that was."""

    def __init__(self, name: str, base: Any, loader: Any, order: _Order | None, rng: Generators) -> None:
        super().__init__(base)
        self._name = name
        self._loader = loader
        self._order = order
        self._rng = rng
        self.resumed: dict[str, Any] | None = None
        self._pass: int | None = None  # the loader's number of the pass that goes on, or has just ended
        self._batches = 0  # asked for in it; the loop has one less, but for the last
        self._ahead = ""  # states before the batch was loaded that the loop has not got yet
        self._states: tuple[Any, Any] = (None, None)  # StatefulDataLoader's, before the last two batches
        if base.num_workers:
            self.anew()  # workers have the beginning of an order since it was prepared

    def position(self) -> dict[str, object]:
        if self._pass is None or self._pass != self._loader.iteration:
            return {}
        if self._loader.end_of_dataloader:
            return {"batches": self._batches, "ended": True}
        begun = {} if self._order is None else {"order": self._order.begun}
        stateful = {} if self._states[0] is None else {"stateful": self._states[0]}
        return {"batches": self._batches - 1, "ended": False, "ahead": self._ahead} | begun | stateful

    def __iter__(self) -> Iterator[Any]:
        resumed, self.resumed = self.resumed, None
        self._pass, self._batches, self._states = self._loader.iteration, 0, (None, None)
        if resumed is not None and resumed["ended"]:
            self._loader.iteration += 1  # it counts only passes that had a batch
            return
        left = True
        try:
            if resumed is None:
                yield from self._rest(self._begin())
            else:
                yield from self._resumed(resumed)
            left = False
        finally:
            if left:  # by a break: the next pass begins anew
                self._pass = None

    def _rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            if self._batches and hasattr(self.base, "state_dict"):
                self._states = (self._states[1], self.base.state_dict())
            ahead = "" if self.base.num_workers else self._rng.read()  # workers have generators of their own
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._ahead = ahead
            self._batches += 1
            yield batch

    def _resumed(self, resumed: dict[str, Any]) -> Iterator[Any]:
        now = self._rng.read()
        if self._order is not None:
            self._order.resumed = resumed["order"]
        done = resumed["batches"]
        if done > 1 and "stateful" in resumed:
            self.base.load_state_dict(resumed["stateful"])
        again = done > 1 and "stateful" not in resumed
        batches = iter(skip_first_batches(self.base, done - 1) if again else self.base)
        self._next(batches)
        if hasattr(self.base, "state_dict"):
            self._states = (resumed.get("stateful"), self.base.state_dict())
        if resumed["ahead"]:
            self._rng.set(resumed["ahead"])
        batch = self._next(batches)
        self._rng.set(now)
        self._ahead, self._batches = resumed["ahead"], done + 1
        yield batch
        yield from self._rest(batches)

    def _next(self, batches: Iterator[Any]) -> Any:
        for batch in batches:
            return batch
        raise InputError(f"{self._name}: ends before where the checkpoint stands; use the same data")
