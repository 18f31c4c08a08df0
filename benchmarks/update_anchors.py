"""Ways to run code inside an optimizer's update, side by side: what each adds to a step, and what it does to memory.

    python benchmarks/update_anchors.py [--parameters 150] [--elements 65536] [--rounds 60]

wrapped: the foreach functions that the update calls, as `checkflow.foreach` does it. dispatch mode: active only in
`optimizer.step()`, it sees every operator. buckets: the update runs on some parameters at a time, as if each bucket had
an optimizer of its own; bytes are compared with those of the whole. Steps of all ways take turns, so that a clock that
drifts slows all of them; reported are medians. Memory is the traced peak of the update alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from checkflow.foreach import Look
from checkflow.trace import trace_training
from checkflow.training import Training
from checkflow.units import format_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ITERATION_US = 20_000  # what the cost is held against
BUCKETS = (2, 4, 8)


class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator and runs it."""

    seen = 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


class Update:
    """Parameters with gradients and AdamW, in one or more buckets."""

    def __init__(self, count: int, elements: int, buckets: int = 1, device: str = DEVICE) -> None:
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(count)]
        for parameter in self.parameters:
            parameter.grad = torch.randn(elements, device=device)
        size = -(-count // buckets)
        self.optimizers = [
            torch.optim.AdamW(self.parameters[first : first + size], foreach=True) for first in range(0, count, size)
        ]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def bytes(self) -> list[torch.Tensor]:
        state = (value for o in self.optimizers for slots in o.state.values() for value in slots.values())
        return [tensor.detach().cpu() for tensor in (*self.parameters, *state)]


def looked_at(step: Callable[[], None], seen: list[str]) -> None:
    look = Look(lambda name, _: seen.append(name), 0)
    look.open()
    try:
        step()
    finally:
        look.close()


def peak_bytes(count: int, elements: int, buckets: int) -> int:
    """Of one update, beyond parameters, gradients and state."""

    def factory() -> Training:
        update = Update(count, elements, buckets, "cpu")
        module = torch.nn.Module()
        module.weights = torch.nn.ParameterList(update.parameters)

        def iterate() -> None:
            for parameter in update.parameters:
                parameter.grad = torch.ones_like(parameter)
            update.step()

        return Training(module, update.optimizers, iterate)

    graph = trace_training(factory, model="update").graph
    return graph.training_peak_bytes - graph.resident_bytes[0]


def timed_us(step: Callable[[], None]) -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter_ns()
    step()
    ended = time.perf_counter_ns()  # the host's time: what an anchor costs is Python, whatever the device still does
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (ended - began) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=150)
    parser.add_argument("--elements", type=int, default=65536, help="of each parameter")
    parser.add_argument("--rounds", type=int, default=60)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    make = partial(Update, chosen.parameters, chosen.elements)
    names: list[str] = []
    mode = Seeing()  # type: ignore[no-untyped-call]

    def under_mode() -> None:
        with mode:
            moded.step()

    plain, wrapped, moded = make(), make(), make()
    bucketed = {count: make(buckets=count) for count in BUCKETS}
    ways: dict[str, tuple[Callable[[], None], Update]] = {
        "nothing": (plain.step, plain),
        "wrapped": (partial(looked_at, wrapped.step, names), wrapped),
        "dispatch mode": (under_mode, moded),
        **{f"{count} buckets": (update.step, update) for count, update in bucketed.items()},
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(chosen.rounds + 2):
        for way, (step, _) in ways.items():
            took = timed_us(step)
            if number >= 2:
                times[way].append(took)
    base = times["nothing"]
    table = Table("way", "step us", "added us", "of 20 ms", "anchors inside", "update's own memory", "bytes", box=None)
    steps = chosen.rounds + 2
    anchors = {"wrapped": len(names) // steps, "dispatch mode": mode.seen // steps}
    expected = large_first(plain.bytes())
    for way, (_, update) in ways.items():
        added = statistics.median(one - other for one, other in zip(times[way], base, strict=True))
        buckets = len(update.optimizers)
        same = all(map(torch.equal, large_first(update.bytes()), expected))
        table.add_row(
            way,
            f"{statistics.median(times[way]):.0f}",
            f"{added:+.0f}",
            f"{added / ITERATION_US:+.2%}",
            str(anchors.get(way, buckets - 1)),
            format_bytes(peak_bytes(chosen.parameters, chosen.elements, buckets)),
            "equal" if same else "DIFFER",
        )
    Console(width=140).print(f"AdamW, foreach, {chosen.parameters} parameters of {chosen.elements} on {DEVICE}", table)


def large_first(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """In the order they came in: step counters stand between moments."""
    return sorted(tensors, key=lambda tensor: -tensor.numel())


if __name__ == "__main__":
    main()
