"""What a trace on the CPU assumes of CUDA, said in notes for a person."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import torch
from torch.optim import Optimizer

from checkflow.torch_internals import lets_torch_choose_foreach
from checkflow.training import Training
from checkflow.wrapped import updater

ON_CPU = "traced on the CPU: other attention, dropout and batch norm operators than CUDA's may stand in the graph"
_RESERVE = "cuDNN keeps a reserve for their backward pass that is not in the graph"
_DISABLING = re.compile(r".*CUDA is not available.*Disabling", re.DOTALL)  # what autocast and GradScaler warn


def unlike_cuda(training: Training) -> tuple[str, ...]:
    """Layers whose memory on CUDA a trace on the CPU cannot tell, named."""
    layers = {type(m).__name__ for model in training.models for m in model.modules() if isinstance(m, torch.nn.RNNBase)}
    return (f"{', '.join(sorted(layers))}: {_RESERVE}; trace on the machine that trains",) if layers else ()


def assume_cuda_defaults(training: Training) -> tuple[str, ...]:
    """Optimizers that leave it open use their foreach form, where their code lets torch choose: on CUDA it does."""
    changed: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for optimizer in training.optimizers:
        kind = type(updater(optimizer))
        for group in optimizer.param_groups:
            chosen = group.get("differentiable") or group.get("fused") is not None
            lr_on_device = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
            if "foreach" not in group or group["foreach"] is not None or chosen or lr_on_device:
                continue
            if lets_torch_choose_foreach(kind):
                group["foreach"] = True
                changed[kind.__name__] = None
            elif not _is_of_torch(kind):
                unknown[kind.__name__] = None
    assumed = (f"{', '.join(changed)}: foreach=True assumed, the default on CUDA",) if changed else ()
    own = f"{', '.join(unknown)}: foreach is unset and nothing assumed of it; set it to what it is on CUDA"
    return assumed + ((own,) if unknown else ())


def _is_of_torch(kind: type) -> bool:
    """Whether an optimizer's class is one of torch.optim's, or derives from one."""
    return any(getattr(torch.optim, each.__name__, None) is each for each in kind.__mro__ if each is not Optimizer)


@contextmanager
def noting_disabled(notes: list[str]) -> Iterator[None]:
    """Turn the warnings that CUDA's autocast or GradScaler do nothing on a CPU into notes."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not _DISABLING.match(str(message)):
                shown(message, category, filename, lineno, file, line)
                return
            note = f"{filename}:{lineno}: {' '.join(str(message).split())} The graph is without it"
            if note not in notes:
                notes.append(note)

        warnings.filterwarnings("always", message=_DISABLING.pattern)
        warnings.showwarning = show
        yield
