"""How an operator runs during a trace: on fake tensors, except that scalars on the host stay real.

Looped and foreach optimizers read their `step` on the host. Fake tensors have no values, so scalars that are made from
nothing but host scalars are computed for real; a scalar that a fake operator wrote is stale. Reading what is stale, or
a fake tensor whose value is not known, makes the trace start again.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch

from checkflow.errors import ModelFileError
from checkflow.state.memory import has_storage
from checkflow.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    schema_of,
    tree_map,
    without_modes,
)
from checkflow.trace.storages import Ledger, is_fake, is_scalar
from checkflow.trace.values import Values
from checkflow.trace.workspaces import Workspaces, resize, resized_by_kernel
from checkflow.trace.writes import aten, tensors_in, traits

_CALLER = str(Path(__file__).parents[1] / "sources.py")  # of the factory
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), _CALLER)
_LIBRARIES = (*_OURS, sys.prefix + "/lib", sys.base_prefix + "/lib")
_NOT_AS_FAKED = aten("quantize_per_tensor quantize_per_tensor_dynamic")  # their fake results are float32
_INSTALLED = ("/site-packages/", "/dist-packages/")


class DataDependent(BaseException):
    """An operator needs values that fake tensors do not have. No Exception, so that no user code swallows it."""

    def __init__(self, operator: str, where: str) -> None:
        super().__init__(f"{operator} {where}")
        self.operator, self.where = operator, where


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """What an operator returned, and that on values where those are known."""

    result: object
    known: tuple[object] | None = None


def execute(
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    tensors: Sequence[torch.Tensor],
    changed: Sequence[torch.Tensor],
    ledger: Ledger,
    fake: FakeTensorMode | None,
    values: Values,
    workspaces: Workspaces,
) -> OperatorResult:
    """Run one operator, of whose tensor arguments it changes some. Raises DataDependent."""
    check_device(kwargs.get("device"))
    if fake is None:
        return OperatorResult(func(*args, **kwargs))
    if _stays_real(func, args, kwargs, tensors, ledger):
        with without_modes():
            return OperatorResult(func(*args, **kwargs))
    if schema_of(func).name in _NOT_AS_FAKED:
        raise DataDependent(str(func), reader())
    resize(*resized_by_kernel(func, args, kwargs, values), ledger)
    try:
        if any(not is_fake(t) and not t.is_leaf for t in tensors):
            with warnings.catch_warnings():  # making such a tensor fake looks at its gradient
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        result = workspaces.corrected(func, args, kwargs, result)
    except (DataDependentOutputException, DynamicOutputShapeException):
        known = values.run(func, args, kwargs, tensors, changed, 0)
        if known is None:
            raise DataDependent(str(func), reader()) from None
        return OperatorResult(tree_map(_fake_like, known[0]), known)
    stored = filter(has_storage, tensors_in(result))
    fresh_bytes = sum(t.untyped_storage().nbytes() for t in stored if ledger.find(t) is None)
    known = None
    if fresh_bytes or changed:
        known = values.run(func, args, kwargs, tensors, changed, fresh_bytes)
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):  # a real draw changes its state, so that setting it anew can be seen
        with without_modes():
            torch.rand((), generator=generator, device=generator.device)
    for tensor in changed:
        if not is_fake(tensor):
            ledger.see(tensor).stale = True
    if traits(func).returns_first and not is_fake(args[0]):  # type: ignore[arg-type]
        return OperatorResult(args[0])
    return OperatorResult(result, known)


def _fake_like(value: object) -> object:
    """Where the active mode is fake: a fake tensor of a real one's layout."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _stays_real(
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    tensors: Sequence[torch.Tensor],
    ledger: Ledger,
) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if tensors:
        if not all(not is_fake(t) and is_scalar(t) for t in tensors):
            return False
        return func.is_view or not any(ledger.see(t).stale for t in tensors)
    device = kwargs.get("device")
    empty_size = bool(args) and isinstance(args[0], (list, tuple)) and not args[0]
    return (empty_size or schema_of(func).name == "aten::scalar_tensor") and (
        device is None or torch.device(str(device)).type == "cpu"
    )


def check_device(device: object) -> None:
    """Raises ModelFileError where the code asks for a CUDA device and there is none."""
    if isinstance(device, torch.device) and device.type == "cuda" and not torch.cuda.is_available():
        raise ModelFileError(
            f"{user_line()}: asks for CUDA, which this machine does not have; choose the device with "
            "torch.cuda.is_available(), or compile on the machine that trains"
        )


def user_line() -> str:
    """ "file.py:12" of the innermost frame that is neither torch's, checkflow's nor of an installed library."""
    found: FrameType | None = sys._getframe()
    while found is not None and is_library(found.f_code.co_filename):
        found = found.f_back
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found is not None else "an unknown place"


def reader() -> str:
    """Where an operator was called: "at file.py:12", by a library "in function at its.py:3, called at file.py:12"."""
    frames = traceback.extract_stack(sys._getframe(1))
    return _told([frame for frame in frames if not frame.filename.startswith(("<", *_OURS))])


def raised_at(trace: TracebackType | None) -> str:
    """The innermost user line of a traceback."""
    lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(trace) if not is_library(f.filename)]
    return lines[-1] if lines else "an unknown place"


def failed_at(trace: TracebackType | None) -> str:
    """Where a traceback ends, a library's function included, as `reader` says it."""
    return _told([frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(("<", *_OURS))])


def _told(frames: Sequence[traceback.FrameSummary]) -> str:
    library = ""
    for frame in reversed(frames):
        if not is_library(frame.filename):
            return f"{library}{'called ' if library else ''}at {frame.filename}:{frame.lineno}"
        if not library and any(part in frame.filename for part in _INSTALLED):
            library = f"in {frame.name} at {frame.filename}:{frame.lineno}, "
    return library.removesuffix(", ") or "at an unknown place"


def is_library(filename: str) -> bool:
    """Whether a file is torch's, checkflow's trace's or what calls factories, or of Python or an installed package."""
    return filename.startswith(("<", *_LIBRARIES)) or any(part in filename for part in _INSTALLED)
