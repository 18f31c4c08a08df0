"""What users import from checkflow itself, frozen: a name that goes breaks them."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkflow

ERRORS = {
    "AuditError", "CheckflowError", "CorruptStoreError", "DeviceError", "FormatError", "InfeasibleError", "InputError",
    "ModelFileError", "PeerError", "SolverError", "StoreBusyError", "StoreError", "TraceError", "VerificationError",
}  # fmt: skip
EVENTS = {
    "Continued",
    "Doubted",
    "Durable",
    "Event",
    "Failed",
    "Learned",
    "Mirrored",
    "Paced",
    "Resumed",
    "Skipped",
    "Staged",
    "Stalled",
    "Uploaded",
    "Verified",
}
SURFACE = ERRORS | EVENTS | {
    "Checkpointer", "PersistEvery", "ResumableLoader", "Retention", "Schedule", "Stateful", "Stats", "Status",
    "StoreReader", "StoreWriter",
    "Training", "Variables", "__version__", "attach", "compile",
}  # fmt: skip


def test_the_surface_is_what_users_know() -> None:
    """These names and no others, each of which is there, listed by dir() and explained where it is defined."""
    assert set(checkflow.__all__) == SURFACE and list(checkflow.__all__) == sorted(checkflow.__all__)
    assert set(dir(checkflow)) >= SURFACE
    for name in SURFACE - {"__version__"}:
        explained = inspect.getdoc(getattr(checkflow, name))
        assert explained and not explained.startswith(f"{name}("), f"{name}: a dataclass's own signature says nothing"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = checkflow.nothing  # type: ignore[attr-defined]


def test_every_error_is_on_the_surface() -> None:
    """Nobody has to know in which module it is defined to catch it."""
    from checkflow import errors

    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == ERRORS
    assert all(issubclass(getattr(checkflow, name), checkflow.CheckflowError) for name in ERRORS)


def test_types_and_names_come_from_the_same_modules() -> None:
    """What a type checker reads is what the first use imports."""
    tree = ast.parse(Path(checkflow.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == checkflow._HOME
    assert set(seen) | {"__version__"} == SURFACE


def test_the_version_is_the_package_s() -> None:
    assert checkflow.__version__ == importlib.metadata.version("checkflow")


def test_importing_it_imports_nothing_else() -> None:
    """The saver's process and `checkflow --help` begin with it."""
    told = "import sys; before = set(sys.modules); import checkflow; print(*set(sys.modules) - before)"
    process = subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True)
    assert process.stdout.split() == ["checkflow"]


def test_what_keeps_its_own_state_is_stateful() -> None:
    """attach says which protocol it takes, and schedulers, scalers and loaders have it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight]), 1)
    loader: checkflow.ResumableLoader[torch.Tensor] = checkflow.ResumableLoader(
        torch.utils.data.TensorDataset(torch.zeros(2))  # type: ignore[arg-type]
    )
    stateful: list[checkflow.Stateful] = [scheduler, torch.amp.GradScaler("cpu"), loader]
    assert all(isinstance(one, checkflow.Stateful) for one in stateful)
    parameters = inspect.signature(checkflow.attach).parameters
    for name in ("scheduler", "scaler", "loader"):
        assert "Stateful" in str(parameters[name].annotation)
