"""What decides the last bits of results, beside the program: torch, its settings, the processor, its threads.

It is the process's own, and no restore changes it. A job that was moved to another machine may have other ones.
"""

from __future__ import annotations

import torch

from checkflow.state.live import parameters_of
from checkflow.state.refused import device_of
from checkflow.training import Training


def computed_by(training: Training) -> dict[str, str]:
    """As it is now, by name. Of the host nothing where state lies on a CUDA device."""
    device = device_of(parameter for _, parameter in parameters_of(training))
    found = {
        "torch": str(torch.__version__),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return found | {"processor": capability, "threads": str(torch.get_num_threads())}
    return found | {
        "cuda": str(torch.version.cuda),
        "device": torch.cuda.get_device_name(device),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
    }
