"""Python imports this first, in each process that a test starts, and it changes what tests find there.

With CHECKFLOW_CLASSES=ours names of torch's reader and writer are those of ours. What torch's are told of how files lie
(threads, files, syncs, extensions) a store has no use for. Each of ours that is made leaves a line in the file that
CHECKFLOW_TOLD names. With CHECKFLOW_ON_CPU tests that skip themselves for want of GPUs run, and what is to move to one
stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def substitute() -> None:
    import torch.distributed.checkpoint.format_utils
    import torch.distributed.checkpoint.hf_storage  # noqa: F401 (made of torch's classes before these are replaced)
    from torch.distributed.checkpoint import filesystem

    import checkflow

    def tell(kind: str) -> None:
        with open(os.environ["CHECKFLOW_TOLD"], "a") as file:  # noqa: PTH123 (one line at a time, of many processes)
            file.write(f"{kind}\n")

    class Reader(checkflow.StoreReader):
        def __init__(self, path: str | os.PathLike[str], *_: object, **__: object) -> None:
            super().__init__(path)
            tell("reader")

    class Writer(checkflow.StoreWriter):
        def __init__(self, path: str | os.PathLike[str], *_: object, **__: object) -> None:
            super().__init__(path)
            tell("writer")

    ours = {filesystem.FileSystemReader: Reader, filesystem.FileSystemWriter: Writer}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.checkpoint"):
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value in ours:
                    setattr(module, key, ours[value])


def stay_on_cpu() -> None:
    import torch
    from torch.testing._internal import common_distributed

    def runs(_count: int, **_: object) -> Callable[[Any], Any]:
        return lambda test: test

    def stays(self: Any, *_: object, **__: object) -> Any:
        return self

    setattr(common_distributed, "skip_if_lt_x_gpu", runs)  # noqa: B010
    for kind in (torch.Tensor, torch.nn.Module):
        setattr(kind, "cuda", stays)  # noqa: B010


if os.environ.get("CHECKFLOW_CLASSES", "ours") == "ours":
    substitute()
if os.environ.get("CHECKFLOW_ON_CPU"):
    stay_on_cpu()
