"""What it costs to seal a staged slot, beside the copy that fills it and beside hashing it in the trainer.

    python benchmarks/seal.py --size 64MiB --rounds 50

Medians over rounds, in microseconds for one checkpoint. A slot is sealed when it is staged and unsealed when it is
filled again; "copy, after" is the copy into a slot that was sealed before, which may have to map its pages anew.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import xxhash
from rich.console import Console

from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.memory import room
from checkflow.store.memory.shared_memory import SharedMemory
from checkflow.units import parse_bytes


def took_us(action: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - started) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="64MiB")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    size = parse_bytes(options.size, "--size")
    room.LARGE_BYTES = min(room.LARGE_BYTES, size)  # to see what smaller ones would cost
    layout = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "U8", (size,)),)),))
    memory = SharedMemory.create([layout], slots=3, record_room_bytes=2**17, config=b"{}")
    while memory.pages.wait_for_more():
        pass
    torch.set_num_threads(1)
    source = torch.ones(size, dtype=torch.uint8)
    place = layout.find("model.safetensors", "w")
    times: dict[str, list[float]] = {}
    for number in range(options.rounds + 3):  # the first maps each slot's pages
        slot = number % 3
        data = memory.slot_bytes(slot)[place.offset_bytes : place.end_bytes]
        target = torch.frombuffer(data, dtype=torch.uint8)
        actions: dict[str, Callable[[], object]] = {
            "copy": partial(target.copy_, source),
            "seal": partial(memory.seal, slot),
            "unseal": partial(memory.unseal, slot),
            "copy, after": partial(target.copy_, source),
            "hash": partial(xxhash.xxh3_128_digest, data),
        }
        for name, action in actions.items():
            times.setdefault(name, []).append(took_us(action))
    for name, found in times.items():
        Console().print(f"{name:12} {statistics.median(found[3:]):12.0f}")
    del target, data
    memory.close()


if __name__ == "__main__":
    main()
