"""How an operator runs during a trace: on fake tensors, except that scalars on the host stay real.

Looped and foreach optimizers read their `step` on the host. Fake tensors have no values, so scalars that are made from
nothing but host scalars are computed for real; a scalar that a fake operator wrote is stale, and reading it makes the
trace start again on real tensors.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes

from checkflow.errors import ModelFileError
from checkflow.trace.storages import Ledger, is_fake, is_scalar
from checkflow.trace.writes import traits

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    sys.prefix + "/lib",
    sys.base_prefix + "/lib",
)


class DataDependent(BaseException):
    """An operator needs values that fake tensors do not have. No Exception, so that no user code swallows it."""

    def __init__(self, operator: str, where: str) -> None:
        super().__init__(f"{operator} at {where}")
        self.operator, self.where = operator, where


def execute(
    func: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    tensors: Sequence[torch.Tensor],
    changed: Sequence[torch.Tensor],
    ledger: Ledger,
    fake: FakeTensorMode | None,
) -> object:
    """Run one operator, of whose tensor arguments it changes some. Raises DataDependent."""
    check_device(kwargs.get("device"))
    if fake is None:
        return func(*args, **kwargs)
    if _stays_real(func, args, kwargs, tensors, ledger):
        with _disable_current_modes():
            return func(*args, **kwargs)
    try:
        if any(not is_fake(t) and not t.is_leaf for t in tensors):
            with warnings.catch_warnings():  # making such a tensor fake looks at its gradient
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise DataDependent(str(func), user_line()) from None
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):  # a real draw changes its state, so that setting it anew can be seen
        with _disable_current_modes():
            torch.rand((), generator=generator, device=generator.device)
    for tensor in changed:
        if not is_fake(tensor):
            ledger.see(tensor).stale = True
    if traits(func).returns_first and not is_fake(args[0]):  # type: ignore[arg-type]
        return args[0]
    return result


def _stays_real(
    func: torch._ops.OpOverload,
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
    return (empty_size or func._schema.name == "aten::scalar_tensor") and (
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
    """ "file.py:12" of the innermost frame that is neither torch's, checkflow's nor the standard library's."""
    found: FrameType | None = sys._getframe()
    while found is not None and _is_library(found.f_code.co_filename):
        found = found.f_back
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found is not None else "an unknown place"


def raised_at(trace: TracebackType | None) -> str:
    """The innermost user line of a traceback."""
    lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(trace) if not _is_library(f.filename)]
    return lines[-1] if lines else "an unknown place"


def _is_library(filename: str) -> bool:
    return filename.startswith(("<", *_LIBRARIES))
