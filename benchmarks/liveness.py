"""Training peaks two ways: freed after the last use in the graph, and as eager PyTorch really frees.

For AlexNet at batch 32 with plain SGD, MODeL's README gives 0.5618 GB (2^30) by the first. Beside both: what eager
holds at its peak that nothing uses any more.

    python benchmarks/liveness.py [--networks ...] [--batches 32] [--optimizers ...]
"""

from __future__ import annotations

from cells import Cell, arguments, cells
from rich.console import Console
from rich.table import Table

from checkflow.units import format_bytes

MODEL_GIB = 0.5618


def main() -> None:
    chosen = arguments(__doc__ or "").parse_args()
    table = Table(
        "cell", "last use GiB", "eager GiB", "eager / last use", "held at eager's peak after the last use", box=None
    )
    for cell in cells(chosen):
        liveness, eager = max(cell.graph.liveness_bytes), cell.graph.training_peak_bytes
        table.add_row(
            str(cell), f"{liveness / 2**30:.4f}", f"{eager / 2**30:.4f}", f"{eager / liveness:.4f}", _held(cell)
        )
        if str(cell) == "alexnet/32 sgd":
            difference = liveness / 2**30 / MODEL_GIB - 1
            print(f"{cell}: {liveness / 2**30:.4f} GiB by last use, MODeL's {MODEL_GIB}: {difference:+.2%}")
    Console(width=160).print(table)


def _held(cell: Cell) -> str:
    """The largest storages that are resident at eager's peak and used no more, with the operator that made each."""
    graph = cell.graph
    peak = graph.resident_bytes.index(graph.training_peak_bytes) + 1
    used_later = {i for op in graph.ops[peak - 1 :] for i in (*op.reads, *op.writes)}
    held = [
        tensor
        for index, tensor in enumerate(graph.tensors)
        if not tensor.role.is_state and tensor.born <= peak <= tensor.freed and index not in used_later
    ]
    total = sum(tensor.size_bytes for tensor in held)
    by_role: dict[str, int] = {}
    for tensor in held:
        made = graph.ops[tensor.born - 1].name if tensor.born else "before the iteration"
        key = f"{tensor.role} of {made}"
        by_role[key] = by_role.get(key, 0) + tensor.size_bytes
    largest = sorted(by_role.items(), key=lambda item: -item[1])[:2]
    return f"{format_bytes(total)}" + (": " + ", ".join(f"{k} {format_bytes(v)}" for k, v in largest) if held else "")


if __name__ == "__main__":
    main()
