"""What is not there: packages that checkflow needs, and what a user's code asks for. A line says what to do."""

from __future__ import annotations

import os
import traceback

from checkflow.spelling import option
from checkflow.text import said

# By the module that is imported; a test compares them with pyproject.toml, as an installation's own need not be there.
REQUIREMENTS = {
    "torch": "torch>=2.9",
    "numpy": "numpy>=1.26",
    "scipy": "scipy>=1.12",
    "highspy": "highspy>=1.10",
    "gurobipy": "gurobipy>=12",
    "pulp": "pulp>=2.9,<4",
    "networkx": "networkx>=3.2",
    "yaml": "pyyaml>=6",
    "pydantic": "pydantic>=2.7",
    "xxhash": "xxhash>=3.4",
    "rich": "rich>=13.7",
    "click": "click>=8.1",
}


def not_installed(error: BaseException) -> str | None:
    """What to install where one of these could not be found; None of another error or module, or one that is broken."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in REQUIREMENTS:
        return None
    return f"{error.name} is not installed: pip install '{REQUIREMENTS[error.name]}'"


_NO_CUDA = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available")
_NO_GROUP = (
    "environment variable RANK expected",
    "environment variable WORLD_SIZE expected",
    "environment variable MASTER_ADDR expected",
    "Default process group has not been initialized",
)


def asked_for(error: BaseException, where: str) -> str | None:
    """What code that was right asked for, at this place, and what to do; None of an error that is another."""
    if any(text in said(error) for text in _NO_CUDA):
        return (
            f"{where}: asks for CUDA, which this machine does not have; choose the device with "
            "torch.cuda.is_available(), or compile on the machine that trains"
        )
    if any(text in said(error) for text in _NO_GROUP):
        return f"{where}: asks for torch.distributed's processes; give {option('world_size')}"
    code = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, KeyError) and code[-1:] == [type(os.environ).__getitem__.__code__]:
        return (
            f"{where}: asks for the environment variable {error.args[0]}, which is not set; set it, or let it have a "
            "default"
        )
    return None
