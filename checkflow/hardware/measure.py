"""Measures the machine at hand into a profile, in a few seconds."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

from checkflow.errors import InputError
from checkflow.hardware.profile import NAMES, CopyRates, Efficiency, PeakFlops, Profile

COPY_BYTES = 256 * 2**20  # past the caches
LARGEST_SIDE = 8192  # of the matrices, if the device is fast enough
LEAST_PRODUCT_S = 0.05  # short parallel products measure the scheduler rather than arithmetic
RUN_S = 0.3  # for each figure; it is the median of the runs that fit


def measure_profile(name: str, device: str = "cpu", progress: Callable[[str], None] = lambda _message: None) -> Profile:
    """Measure a device ("cpu" or "cuda") as PyTorch drives it. All efficiencies are 1: the figures were reached.

    On the CPU the link is a copy by one thread into another buffer, as the CPU runtime makes it; on CUDA a copy into
    pinned host memory. `progress` is told what is being measured. Raises InputError for a device that is not there.
    """
    if not name:
        raise InputError("name: is empty; give the profile a name")
    if name in NAMES:
        raise InputError(f"name: {name!r} is a bundled device's; give the profile a name of its own")
    if device not in ("cpu", "cuda"):
        raise InputError(f"device: {device!r} cannot be measured; choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device: this machine has no CUDA device; choose cpu")
    peak: dict[torch.dtype, int] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        progress(f"measuring matrix products in {str(dtype).removeprefix('torch.')}")
        peak[dtype] = _product_flops_per_s(device, dtype)
    copies = measure_copies(device, progress)
    progress("measuring launch latency")
    latency = _launch_latency_ns(device)
    return Profile(
        name=name,
        description=_describe(device),
        peak_flops_per_s=PeakFlops(
            float32=peak[torch.float32],
            float16=peak[torch.float16],
            bfloat16=peak[torch.bfloat16],
            float64=peak[torch.float64],
        ),
        memory_bandwidth_bytes_per_s=copies.memory_bytes_per_s,
        memory_bytes=copies.memory_bytes,
        launch_latency_ns=latency,
        link_bandwidth_bytes_per_s=copies.link_bytes_per_s,
        efficiency=Efficiency(compute=1.0, memory=1.0, link=1.0),
        source=f"measured by checkflow profile with PyTorch {torch.__version__}",
    )


def measure_copies(device: str, progress: Callable[[str], None]) -> CopyRates:
    """Of a device that is there, "cpu" or "cuda": all that a plan needs where each operator's time was measured."""
    progress("measuring memory bandwidth")
    memory = _copy_bytes_per_s(device, device, torch.get_num_threads())
    progress("measuring the link")
    link = _copy_bytes_per_s(device, "cpu", threads=1)
    return CopyRates(
        link_bytes_per_s=link,
        memory_bytes_per_s=2 * memory,  # a copy reads each byte and writes it
        memory_bytes=_memory_bytes(device),
    )


def _median_s(run: Callable[[], object], threads: int) -> float:
    """Median time of one call; the timer warms up, and waits for CUDA around each block of calls."""
    timer = Timer("run()", globals={"run": run}, num_threads=threads)
    return float(timer.blocked_autorange(min_run_time=RUN_S).median)


def _product_flops_per_s(device: str, dtype: torch.dtype) -> int:
    """Rate of the square product whose side is doubled until it takes LEAST_PRODUCT_S."""
    threads, side = torch.get_num_threads(), 256
    while True:
        left, right = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty(side, side, device=device, dtype=dtype)

        def product(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> None:
            torch.mm(left, right, out=out)

        product()  # the first call loads and tunes kernels
        once = float(Timer("run()", globals={"run": product}, num_threads=threads).timeit(1).median)
        if once >= LEAST_PRODUCT_S or side >= LARGEST_SIDE:
            return max(1, round(2 * side**3 / _median_s(product, threads)))
        side *= 2


def _copy_bytes_per_s(source: str, target: str, threads: int) -> int:
    """Rate of one large copy, each byte counted once. A copy from CUDA to the CPU goes into pinned memory."""
    data = torch.ones(COPY_BYTES, dtype=torch.uint8, device=source)
    buffer = torch.empty(COPY_BYTES, dtype=torch.uint8, device=target, pin_memory=source != target)
    seconds = _median_s(lambda: buffer.copy_(data, non_blocking=True), threads)
    return max(1, round(COPY_BYTES / seconds))


def _launch_latency_ns(device: str) -> int:
    """Time of one operator on a single number, when such operators follow each other."""
    number = torch.zeros(1, device=device)
    return max(1, round(_median_s(lambda: number.add_(1), torch.get_num_threads()) * 1e9))


def _memory_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _describe(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
