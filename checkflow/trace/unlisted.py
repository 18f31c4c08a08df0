"""What an iteration hands on to the next that is no state of a model or optimizer: a moving average, a hidden state.

A storage is carried if what it held when the iteration began is read before it is wholly overwritten, and it is written
anew or gives way to another. What is only read (a batch that is used again, a cache) is a constant, unless the
iteration before put it into a deque; what is overwritten first (a static input) is scratch, what nothing reads later
(the last loss) is a result, and what nobody can name and is cleared in the end tells nothing.

A gradient is carried if it is read as the iteration before left it, and the iteration leaves one again that is not
cleared: where `step()` stands between the gradient and its update, or gradients are damped and not dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from checkflow.graph import Role
from checkflow.state.live import parameters_of
from checkflow.state.memory import has_storage
from checkflow.state.names import StateName
from checkflow.state.shards import local
from checkflow.torch_internals import SCALER_TENSORS, OpOverload, schema_of, storage_id
from checkflow.trace.execution import user_line
from checkflow.trace.held import storages_held
from checkflow.trace.reachable import Reached, is_queued, shown, to_list
from checkflow.trace.storages import Ledger, Storage
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
        self.ways = _ways(reached)
        self.listed = storages_held(training, own=False)  # when it began
        self.wrote: dict[Storage, str] = {}  # with the user's line
        self.made: set[Storage] = set()  # which may have the identity of one that was freed
        self.needed: dict[Storage, bool] = {}  # whether the first access read, or wrote a part
        self.cleared: set[Storage] = set()  # in whole, by the last write
        self.read: dict[Part, bool] = {}  # whether the first access to just this part read it
        self.zeroed: set[Part] = set()  # by the last write to just this part
        self._ledger = ledger

    def existed(self, storage: Storage) -> bool:
        """Whether it did when the iteration began."""
        return storage in self.before or (storage.identity in self.ways and storage not in self.made)

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

    def constants(self) -> frozenset[int]:
        """Identities of what was there when the iteration began, was read as it was, and was not written."""
        return frozenset(
            storage.identity
            for storage, needed in self.needed.items()
            if needed and self.existed(storage) and storage not in self.wrote
        )


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
    paths = _ways(reached)
    by_path = {path: identity for identity, all_of_it in paths.items() for path in all_of_it}
    listed = storages_held(training, own=False)
    found: dict[Storage, Unlisted] = {}
    queued: dict[Storage, Unlisted] = {}  # which a variable may hand on as well

    def add(storage: Storage, path: str = "") -> None:
        path = path or next(iter(paths.get(storage.identity, ())), "")
        known = _is_listed(storage) or storage in state or storage.identity in listed or path.endswith(".grad")
        # DistributedDataParallel clears its map of the parameters that were used.
        known |= not path and storage in second.cleared
        into = queued if is_queued(path) else found
        if storage.size_bytes and not known and storage not in into:
            where = second.wrote.get(storage, "")
            into[storage] = Unlisted(shown(to_list(path)), storage.size_bytes, where, path.endswith(_SCALERS))

    gone: list[tuple[Storage, list[str]]] = []  # with the ways that lead elsewhere now
    for storage, needed in second.needed.items():
        if not needed or not second.existed(storage) or _is_listed(storage):
            continue
        ways = second.ways.get(storage.identity, [])
        elsewhere = [way for way in ways if by_path.get(way) != storage.identity]
        if storage in second.wrote and storage.freed is None:
            add(storage)
        elif not first.existed(storage) and storage.identity not in second.listed:
            # Made by the iteration before, not by the factory. What a listed object gave it replaces by what it will
            # give, which may come from a thread that nobody records.
            if storage.freed is not None or elsewhere or not ways:
                gone.append((storage, elsewhere))
            if storage.freed is None and (path := next(filter(is_queued, paths.get(storage.identity, ())), "")):
                add(storage, path)
    new = [s for s in ledger.alive.values() if not second.existed(s) and not _is_listed(s) and s not in state]
    for old, elsewhere in gone:
        heirs = [(ledger.alive.get(by_path.get(way, 0)), way) for way in sorted(elsewhere, key=is_queued)]
        heir, path = next(((each, way) for each, way in heirs if each is not None and each is not old), (None, ""))
        if heir is None and len(elsewhere) == len(second.ways.get(old.identity, ())):  # no way leads to it any more
            heir = next((s for s in new if s.size_bytes == old.size_bytes and s not in found), None)
        if heir is not None and heir is not old:
            add(heir, path)
    return (*found.values(), *queued.values(), *_carried_gradients(training, second, ledger))


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


def _ways(reached: Mapping[str, Reached]) -> dict[int, list[str]]:
    """Identity of a storage -> the ways that lead to it."""
    found: dict[int, list[str]] = {}
    for path, value in reached.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and has_storage(value):
            found.setdefault(storage_id(value.untyped_storage()), []).append(path)
    return found
