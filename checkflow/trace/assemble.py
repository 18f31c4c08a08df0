"""A recording as a Graph, and the promises a Graph makes, checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkflow.dtypes import name_of
from checkflow.errors import TraceError
from checkflow.graph import Anchor, Graph, Op, Role, Tensor, View
from checkflow.spelling import option
from checkflow.trace.recorder import RecordedOperator
from checkflow.trace.state import TracedState
from checkflow.trace.storages import Ledger, Storage
from checkflow.units import format_bytes


class NoUpdateError(TraceError):
    """The iteration writes no parameter. Another one may, of a training that runs."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """State that has another storage when the iteration ends than when it began."""

    name: str
    before: Storage
    after: Storage


def notes_of(replaced: Sequence[Replaced]) -> list[str]:
    """For a person."""
    if not replaced:
        return []
    more = f" and {len(replaced) - 1} more" if len(replaced) > 1 else ""
    size = format_bytes(sum(found.before.size_bytes for found in replaced))
    return [
        f"{replaced[0].name}{more} ({size}): replaced in each iteration, not updated in place; read when the iteration "
        "has ended, and memory holds the old beside the new until then"
    ]


def assemble(
    *,
    model: str,
    arguments: tuple[tuple[str, str], ...],
    states: Sequence[tuple[TracedState, Storage]],
    replaced: Sequence[Replaced] = (),
    operators: Sequence[RecordedOperator],
    anchors: tuple[Anchor, ...],
    ledger: Ledger,
) -> Graph:
    """The Graph of a recorded iteration of len(operators) steps. Raises NoUpdateError where no parameter is written.

    Replaced state is written by who writes its new storage, and by the last operator: until the iteration has ended the
    runtime knows, and keeps, the old one. The new one stands beside it as what it is until then, no state. What another
    rank saves is no state here, but an input.
    """
    steps = len(operators)
    written_too: dict[Storage, list[Storage]] = {}
    for found in replaced:
        written_too.setdefault(found.after, []).append(found.before)
    last = tuple(found.before for found in replaced)
    views: dict[Storage, list[View]] = {}
    names: Counter[Storage] = Counter()  # another rank's among them
    for state, storage in states:
        shape, dtype = tuple(state.tensor.shape), name_of(state.tensor.dtype)
        found_views = views.setdefault(storage, [])
        if not state.elsewhere:
            found_views.append(View(str(state.name), dtype, shape))
        names[storage] += 1
        storage.of = state.of if names[storage] == len(found_views) == 1 else ""
    host_state_bytes = sum(storage.size_bytes for storage in views if ledger.is_host(storage))
    # State of which this rank has no element is there all the same: another rank's part may have some.
    kept = [s for s in _in_graph(views, operators, ledger) if not ledger.is_host(s) and (s.size_bytes or s in views)]
    tensors: list[Tensor] = []
    indices: dict[Storage, range] = {}
    for storage in kept:
        first = len(tensors)
        tensors += _tensors(storage, tuple(views.get(storage, ())), first, steps)
        indices[storage] = range(first, len(tensors))
    graph = Graph(
        model=model,
        arguments=arguments,
        device="",
        traced_on="cuda" if ledger.on_cuda else "cpu",
        ops=tuple(
            Op(
                name=op.name,
                reads=tuple(index for s in op.reads for index in indices.get(s, ())),
                writes=tuple(
                    dict.fromkeys(
                        index
                        for s in (
                            *op.writes,
                            *(old for new in op.writes for old in written_too.get(new, ())),
                            *(last if step == steps else ()),
                        )
                        for index in indices.get(s, ())
                    )
                ),
                flops=op.flops,
                traffic_bytes=op.traffic_bytes,
                dtype=op.dtype,
                time_ns=0,
                collective=op.collective,
            )
            for step, op in enumerate(operators, start=1)
        ),
        tensors=tuple(tensors),
        anchors=anchors,
        host_state_bytes=host_state_bytes,
    )
    if not any(tensors[i].role is Role.PARAMETER for i in graph.writes):
        if not any(math.prod(view.shape) for t in graph.tensors if t.role is Role.PARAMETER for view in t.views):
            raise NoUpdateError(
                f"{model}: no parameter has an element; give its layers a size, or, where ranks share them, another "
                f"{option('rank')}"
            )
        raise NoUpdateError(
            f"{model}: the iteration writes no parameter; let it call optimizer.step() after backward(), and where the "
            "optimizer's first updates change none, make them in the factory"
        )
    check_graph(graph)
    return graph


def _in_graph(views: Iterable[Storage], operators: Sequence[RecordedOperator], ledger: Ledger) -> Iterable[Storage]:
    """State, what operators use, gradients, and what the iteration frees; in order of birth, state first.

    Tensors that exist before, and that the iteration neither uses nor frees, are not its concern.
    """
    used = dict.fromkeys(s for op in operators for s in (*op.reads, *op.writes))
    gradients = [s for s in ledger.alive.values() if s.role is Role.GRADIENT]
    others = dict.fromkeys((*ledger.freed, *gradients, *used))
    return dict.fromkeys((*views, *sorted(others, key=lambda storage: storage.born)))


def _tensors(storage: Storage, views: tuple[View, ...], number: int, steps: int) -> list[Tensor]:
    """A storage as tensors of the graph: one, or where it has the gradients of several parameters each of them."""
    role = storage.role or (Role.ACTIVATION if storage.born else Role.INPUT)
    role = Role.INPUT if role.is_state and not views else role
    freed = steps if storage.freed is None else max(storage.freed, storage.last_use, storage.born)
    name = views[0].name if views else storage.name or f"%unused_{number}"
    freed = steps if role.is_state else freed
    if role is Role.GRADIENT and (pieces := _pieces(storage)):
        names = [name, *(f"{name}.{piece}" for piece in range(1, len(pieces)))]
        return [
            Tensor(own, role, size_bytes, storage.born, freed, views, of)
            for own, (of, size_bytes) in zip(names, pieces, strict=True)
        ]
    of = storage.of if role is Role.OPTIMIZER else ""
    return [Tensor(name, role, storage.size_bytes, storage.born, freed, views, of)]


def _pieces(storage: Storage) -> list[tuple[str, int]]:
    """The parameters whose gradients a storage has, and the bytes of each; "" for bytes that are of none. Nothing where
    some are of two, or of one parameter there is more than its gradient."""
    if len(storage.gradients) == 1 and (0, storage.size_bytes) not in storage.gradients.values():
        return []
    found: list[tuple[str, int]] = []
    end = 0
    for name, (start, stop) in sorted(storage.gradients.items(), key=lambda one: one[1]):
        if start < end:
            return []
        found += [("", start - end)] if start > end else []
        found.append((name, stop - start))
        end = stop
    return found + ([("", storage.size_bytes - end)] if storage.size_bytes > end else [])


def check_graph(graph: Graph) -> None:
    """Raises AssertionError, a bug of this package, unless the graph keeps the promises of checkflow.graph."""
    names = [tensor.name for tensor in graph.tensors]
    assert len(set(names)) == len(names), "two tensors have one name"
    for tensor in graph.tensors:
        assert 0 <= tensor.born <= graph.steps and tensor.freed <= graph.steps, f"{tensor.name} lives outside"
        assert tensor.role.is_state == bool(tensor.views) and (tensor.views or tensor.size_bytes), tensor.name
        assert not tensor.role.is_state or (tensor.born, tensor.freed) == (0, graph.steps), tensor.name
    for step, op in enumerate(graph.ops, start=1):
        for i in (*op.reads, *op.writes):
            tensor = graph.tensors[i]
            assert max(tensor.born, 1) <= step <= tensor.freed, f"step {step} uses {tensor.name} while it is not there"
    for i, tensor in enumerate(graph.tensors):
        assert not tensor.born or i in graph.ops[tensor.born - 1].writes, f"{tensor.name} is born of nothing"
    positions = [anchor.position for anchor in graph.anchors]
    assert positions == sorted(set(positions)) and positions[-1] == graph.steps, "anchors are out of order"
