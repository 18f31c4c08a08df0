"""torch.distributed.checkpoint, staged into pinned shared memory and uploaded by a process of its own."""

from __future__ import annotations

import os
import socket
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import checkflow
from contenders import Job, _dcp_async


class Process(_dcp_async.Asynchronous):
    what: ClassVar[str] = "dcp.async_save in a process, staged into pinned shared memory that is kept"
    kind = AsyncCheckpointerType.PROCESS
    options = StagingOptions(
        use_pinned_memory=torch.cuda.is_available(),
        use_shared_memory=True,
        use_async_staging=True,
        use_non_blocking_copy=torch.cuda.is_available(),
    )

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        if not dist.is_initialized():  # its process asks for the ranks
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        super().__init__(job, training)
