"""What an iteration hands on to the next that is no state of a model or optimizer: a moving average, a hidden state.

A storage is carried if what it held when the iteration began is read before it is wholly overwritten, and it is written
anew or gives way to another. What is only read (a batch that is used again, a cache) is a constant, what is overwritten
first (a static input) is scratch, what nothing reads later (the last loss) is a result, and what nobody can name and is
cleared in the end tells nothing.

A gradient is carried if it is read as the iteration before left it, and the iteration leaves one again that is not
cleared: where `step()` stands between the gradient and its update, or gradients are damped and not dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from checkflow.graph import Role
from checkflow.state.live import asked_state, parameters_of
from checkflow.state.names import StateName
from checkflow.state.shards import local
from checkflow.torch_internals import MODULE_DICTS, SCALER_TENSORS, OpOverload, schema_of, storage_id
from checkflow.trace.execution import user_line
from checkflow.trace.reachable import Reached, reach
from checkflow.trace.storages import Ledger, Storage, has_storage
from checkflow.trace.writes import traits
from checkflow.training import Training
from checkflow.unlisted import GRADIENT, Unlisted

_SCALERS = tuple(f".{name}" for name in SCALER_TENSORS)
Part = tuple[Storage, int, int]  # of a storage: from which element on, and how many bytes
_DEVICES_OWN = frozenset(("aten::_cudnn_rnn", "aten::_cudnn_init_dropout_state"))  # random state within cuDNN


class Watch:
    """The accesses of one iteration, as they happen. A storage's first one tells whether what it held counts."""

    def __init__(self, ledger: Ledger, reached: Mapping[str, Reached], training: Training) -> None:
        self.before = frozenset(ledger.alive.values())
        self.gradients = _gradients(training, ledger)  # that the iteration before left
        self.paths = _paths(reached)
        self.wrote: dict[Storage, str] = {}  # with the user's line
        self.made: set[Storage] = set()  # which may have the identity of one that was freed
        self.needed: dict[Storage, bool] = {}  # whether the first access read, or wrote a part
        self.cleared: set[Storage] = set()  # in whole, by the last write
        self.read: dict[Part, bool] = {}  # whether the first access to just this part read it
        self.zeroed: set[Part] = set()  # by the last write to just this part
        self._ledger = ledger

    def existed(self, storage: Storage) -> bool:
        """Whether it did when the iteration began."""
        return storage in self.before or (storage.identity in self.paths and storage not in self.made)

    def saw(
        self,
        func: OpOverload,
        given: Sequence[tuple[str, Sequence[torch.Tensor]]],
        changed: frozenset[str],
        fresh: Sequence[torch.Tensor],
        *,
        clears: bool = False,
    ) -> None:
        """An operator has run: on these arguments, of which it changed some (to zeros, if it `clears`), and allocated
        these."""
        if func.is_view or schema_of(func).name in _DEVICES_OWN:
            return
        unread = traits(func).unread
        for name, group in given:
            for tensor in group:
                storage = self._ledger.see(tensor)
                whole = tensor.numel() * tensor.element_size() >= storage.size_bytes
                if name not in unread:
                    self.needed.setdefault(storage, True)
                elif name in changed:
                    self.needed.setdefault(storage, not whole)
                self._saw_part(_part(tensor, storage), reads=name not in unread, writes=name in changed, clears=clears)
                if name in changed and not _is_state(storage):
                    self.wrote[storage] = user_line()
                    self.cleared.discard(storage)
                    if whole and clears:
                        self.cleared.add(storage)
        if fresh:
            line = user_line()
            storages = [self._ledger.see(tensor) for tensor in fresh]
            self.made.update(storages)
            self.wrote.update(dict.fromkeys(storages, line))

    def _saw_part(self, part: Part, *, reads: bool, writes: bool, clears: bool) -> None:
        if reads or writes:
            self.read.setdefault(part, reads)
        if writes and clears:
            self.zeroed.add(part)
        elif writes:
            self.zeroed.discard(part)


def unlisted(
    training: Training,
    first: Watch,
    second: Watch,
    state: set[Storage],
    ledger: Ledger,
    reached: Mapping[str, Reached],
) -> tuple[Unlisted, ...]:
    """What the second of two iterations took over from the first and hands on.

    `state` and `reached` are as they are at its end: its state, and what code can reach then, by name.
    """
    paths = _paths(reached)
    by_path = {path: identity for identity, path in paths.items()}
    listed = {storage_id(tensor.untyped_storage()) for tensor in _tensors_of_objects(training)}
    found: dict[Storage, Unlisted] = {}

    def add(storage: Storage) -> None:
        path = paths.get(storage.identity, "")
        known = _is_listed(storage) or storage in state or storage.identity in listed or path.endswith(".grad")
        # DistributedDataParallel clears its map of the parameters that were used.
        known |= not path and storage in second.cleared
        if storage.size_bytes and not known and storage not in found:
            where = second.wrote.get(storage, "")
            found[storage] = Unlisted(_shown(path), storage.size_bytes, where, path.endswith(_SCALERS))

    gone: list[Storage] = []
    for storage, needed in second.needed.items():
        if not needed or not second.existed(storage) or _is_listed(storage):
            continue
        if storage in second.wrote and storage.freed is None:
            add(storage)
        elif storage.freed is not None or by_path.get(second.paths.get(storage.identity, "")) != storage.identity:
            gone += [] if first.existed(storage) else [storage]  # made by the iteration before, not by the factory
    new = [s for s in ledger.alive.values() if not second.existed(s) and not _is_listed(s) and s not in state]
    for old in gone:
        path = second.paths.get(old.identity)
        heir = ledger.alive.get(by_path.get(path, 0)) if path is not None else None
        if heir is None:
            heir = next((s for s in new if s.size_bytes == old.size_bytes and s not in found), None)
        if heir is not None and heir is not old:
            add(heir)
    return (*found.values(), *_carried_gradients(training, second, ledger))


def _carried_gradients(training: Training, watch: Watch, ledger: Ledger) -> Iterator[Unlisted]:
    for name, part in _gradients(training, ledger).items():
        before = watch.gradients.get(name)
        if before is not None and watch.read.get(before) and part not in watch.zeroed:
            yield Unlisted(name.inside(GRADIENT), part[2], watch.wrote.get(part[0], ""))


def _gradients(training: Training, ledger: Ledger) -> dict[StateName, Part]:
    """Where each parameter's gradient lies that is there."""
    found: dict[StateName, Part] = {}
    for name, parameter in parameters_of(training):
        gradient = None if parameter.grad is None else local(parameter.grad)
        if gradient is not None and has_storage(gradient) and gradient.numel():
            found[name] = _part(gradient, ledger.see(gradient))
    return found


def _part(tensor: torch.Tensor, storage: Storage) -> Part:
    return storage, int(tensor.storage_offset()), tensor.numel() * tensor.element_size()


def _is_listed(storage: Storage) -> bool:
    return _is_state(storage) or storage.role is Role.GRADIENT


def _is_state(storage: Storage) -> bool:
    return storage.role is not None and storage.role.is_state


def _paths(reached: Mapping[str, Reached]) -> dict[int, str]:
    """Identity of a storage -> the first way that leads to it."""
    found: dict[int, str] = {}
    for path, value in reached.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and has_storage(value):
            found.setdefault(storage_id(value.untyped_storage()), path)
    return found


def _tensors_of_objects(training: Training) -> Iterator[torch.Tensor]:
    """What objects give when they are asked; where that are copies, what they have that is like them."""
    for holder, member in training.listed.objects.items():
        given = [tensor for _, tensor in asked_state({holder: member}) if has_storage(tensor)]
        yield from given
        found = reach([(holder, member)], None).values()
        own = [value for value in found if isinstance(value, torch.Tensor) and has_storage(value)]
        kept = {storage_id(tensor.untyped_storage()) for tensor in own}
        copies = Counter(_like(tensor) for tensor in given if storage_id(tensor.untyped_storage()) not in kept)
        for tensor in own:
            if copies[_like(tensor)]:
                copies[_like(tensor)] -= 1
                yield tensor


def _like(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _shown(path: str) -> str:
    """As code would have it: what the walk begins with and where modules keep things is left out."""
    return ".".join(part for part in path.split(".") if part not in MODULE_DICTS).removeprefix("iteration.")
