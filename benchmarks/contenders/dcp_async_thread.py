"""torch.distributed.checkpoint, staged and uploaded by threads of the trainer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from contenders import _dcp_async


class Thread(_dcp_async.Asynchronous):
    what: ClassVar[str] = "dcp.async_save in a thread, asynchronous staging into buffers that are kept"
    kind = AsyncCheckpointerType.THREAD
    options = StagingOptions(
        use_pinned_memory=torch.cuda.is_available(),
        use_shared_memory=False,
        use_async_staging=True,
        use_non_blocking_copy=torch.cuda.is_available(),
    )
