"""The torch.fx program of one iteration, built while it runs; and the names that it gives to storages.

The names are the nodes', so that nodes are made whether or not the program is kept; what they are called with, and
constants' values, only where it is.

Values are tensors and generators. Placeholders are what existed before; node.meta["source"] is the name by which a
replay finds them. The output node lists the gradients that are left, named in node.meta["gradients"]. Calls that ran
with gradients enabled have node.meta["grad_enabled"].
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.fx.node import Argument
from torch.utils.weak import WeakIdKeyDictionary

from checkflow.torch_internals import OpOverload, generator_id, without_modes
from checkflow.trace.replaced import replaced
from checkflow.trace.storages import Ledger, Storage, is_fake
from checkflow.trace.writes import tensors_in

UNREACHABLE = ""  # source of an input that no name leads to


@dataclass(frozen=True, slots=True)
class _Value:
    node: torch.fx.Node
    identity: int  # of the storage it had


class FxProgram:
    """Maps tensors to fx nodes by object identity, which autograd preserves."""

    def __init__(
        self, ledger: Ledger, sources: Mapping[str, torch.Tensor | torch.Generator], *, kept: bool = True
    ) -> None:
        self.graph = torch.fx.Graph()
        self.kept = kept
        self._ledger = ledger
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._bases: dict[Storage, torch.fx.Node] = {}
        self._constants: dict[str, torch.Tensor | None] = {}
        self._sources: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._generators: dict[int, str] = {}
        self._seeded: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
        self._last_placeholder: torch.fx.Node | None = None
        for name, value in reversed(list(sources.items())):
            if isinstance(value, torch.Tensor):
                self._sources[value] = name
            else:
                self._generators[_key(value)] = name

    def call(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> torch.fx.Node:
        """Record a call that is about to run."""
        node = self._node(
            func,
            tuple(self._argument(value) for value in args),
            {name: self._argument(value) for name, value in kwargs.items()},
        )
        node.meta["grad_enabled"] = torch.is_grad_enabled()  # some kernels ask
        return node

    def generated(self, generator: object) -> None:
        """A recorded call has drawn from this generator."""
        if isinstance(generator, torch.Generator) and _key(generator) in self._seeded:
            self._seeded[_key(generator)] = (self._seeded[_key(generator)][0], generator.get_state())

    @contextmanager
    def recording_random_state(self) -> Iterator[None]:
        """While active, reading and setting the default generators' state is recorded too (checkpointing does)."""
        with ExitStack() as stack:
            for module, name in _RANDOM_STATE:
                original = getattr(module, name)
                stack.enter_context(replaced(module, name, self._recorded(original)))
            yield

    def _recorded(self, original: Callable[..., object]) -> Callable[..., object]:
        def record(*args: object) -> object:
            node = self._node(original, tuple(self._argument(value) for value in args))
            result = original(*args)
            if isinstance(result, torch.Tensor) and self._ledger.find(result) is None:
                self._ledger.add(result, scalar=True)  # a generator's state: on the host, whatever the device
            self.results(node, result)
            return result

        return record

    def lift(self, constant: torch.Tensor, lifted: torch.Tensor) -> None:
        """Record lift_fresh, by which torch.tensor(...) hands over what it made: each iteration has a fresh one."""
        node = self._node(torch.ops.aten.clone.default, (self._constant(constant),))
        self.bind(lifted, node)

    def results(self, node: torch.fx.Node, result: object) -> None:
        """Bind what a recorded call returned."""
        if isinstance(result, torch.Tensor):
            self.bind(result, node)
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor) or (
                    isinstance(item, (list, tuple)) and next(tensors_in(item), None) is not None
                ):
                    self.results(self._node(operator.getitem, (node, index)), item)

    def bind(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        storage = self._ledger.see(tensor)
        self._values[tensor] = _Value(node, storage.identity)
        if storage not in self._bases:
            self._bases[storage] = node
        storage.name = storage.name or f"%{node.name}"

    def finish(self, gradients: Mapping[str, torch.Tensor]) -> torch.fx.GraphModule:
        """The program that was kept, once the iteration has run."""
        output = self.graph.output(tuple(self.node_of(gradient) for gradient in gradients.values()))
        output.meta["gradients"] = tuple(gradients)
        return torch.fx.GraphModule(self._constants, self.graph, class_name="Iteration")

    def node_of(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node whose value is this tensor; a new placeholder or constant for one that was never seen."""
        value = self._values.get(tensor)  # type: ignore[no-untyped-call]
        storage = self._ledger.see(tensor)
        if value is not None and value.identity == storage.identity:
            node: torch.fx.Node = value.node
            return node
        base = self._bases.get(storage)
        if base is not None:
            return self._view(tensor, base)
        node = self._input(tensor)
        self.bind(tensor, node)
        return node

    def _view(self, tensor: torch.Tensor, base: torch.fx.Node) -> torch.fx.Node:
        """A view that no operator made, of a storage that is known."""
        node = self._node(
            torch.ops.aten.as_strided.default,
            (base, list(tensor.shape), list(tensor.stride()), int(tensor.storage_offset())),
        )
        self.bind(tensor, node)
        return node

    def _input(self, tensor: torch.Tensor) -> torch.fx.Node:
        source: str = self._sources.get(tensor, UNREACHABLE)  # type: ignore[no-untyped-call]
        if source == UNREACHABLE and not is_fake(tensor):
            return self._constant(tensor)
        return self._placeholder(source)

    def _placeholder(self, source: str) -> torch.fx.Node:
        name = re.sub(r"\W+", "_", source.removeprefix("iteration.")).strip("_") or "unreachable"
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            if self._last_placeholder is not None:
                with self.graph.inserting_after(self._last_placeholder):
                    node = self.graph.placeholder(name)
            else:
                node = self.graph.placeholder(name)
        node.meta["source"] = source
        self._last_placeholder = node
        return node

    def _constant(self, tensor: torch.Tensor) -> torch.fx.Node:
        name = f"_constant{len(self._constants)}"
        self._constants[name] = None
        if self.kept:
            with without_modes():
                self._constants[name] = tensor.detach().clone()
        # Constants stand where they are used; the graph's owner is made last, so fx cannot look them up yet.
        return self.graph.create_node("get_attr", name)

    def _node(
        self, func: Callable[..., object], args: tuple[Argument, ...], kwargs: dict[str, Argument] | None = None
    ) -> torch.fx.Node:
        return self.graph.call_function(func, args, kwargs) if self.kept else self.graph.call_function(func)

    def _argument(self, value: object) -> Argument:
        if isinstance(value, torch.Tensor):
            return value.item() if self._is_number(value) else self.node_of(value)
        if isinstance(value, (list, tuple)):
            return [self._argument(item) for item in value]
        if isinstance(value, torch.Generator):
            return self._generator(value)
        return value  # type: ignore[return-value]

    def _is_number(self, tensor: torch.Tensor) -> bool:
        """A Python number that C++ wrapped: it takes part in type promotion as a number, so it has to stay one."""
        if is_fake(tensor) or tensor.dim() or tensor.device.type != "cpu" or tensor in self._values:
            return False
        narrow = {torch.float64: torch.float32, torch.int64: torch.int32}.get(tensor.dtype)
        if narrow is None:
            return False
        with without_modes():
            return torch.result_type(torch.zeros((), dtype=narrow), tensor) == narrow

    def _generator(self, generator: torch.Generator) -> torch.fx.Node:
        """A generator's node. Its state is set anew where code between operators changed it."""
        state = generator.get_state()
        known = self._seeded.get(_key(generator))
        if known is None:
            source = self._generators.get(_key(generator), UNREACHABLE)
            node = self._placeholder(source) if source else self._node(_new_generator, (self._constant(state),))
        else:
            node, before = known
            with without_modes():
                reseeded = not torch.equal(before, state)
            if reseeded:
                node = self._node(_reseed, (node, self._constant(state)))
        self._seeded[_key(generator)] = (node, state)
        return node


def _key(generator: torch.Generator) -> int:
    """Operators are handed other objects for the same generator."""
    return generator_id(generator)


def _new_generator(state: torch.Tensor) -> torch.Generator:
    return _reseed(torch.Generator(), state)


def _reseed(generator: torch.Generator, state: torch.Tensor) -> torch.Generator:
    generator.set_state(state)
    return generator


_RANDOM_STATE = tuple(
    (module, name)
    for module in (torch, torch.random, torch.cuda)
    for name in ("get_rng_state", "set_rng_state", "manual_seed")
)
