"""torch.distributed.checkpoint in the background: staged beside the next forward and backward, then uploaded.

The stager is kept from save to save, as its documentation says, so its buffers must not be staged to before the upload
that reads them has ended.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

import checkflow
from contenders import Job, _dcp
from contenders._state import place, prune


class Asynchronous(_dcp.DCP):
    kind: ClassVar[AsyncCheckpointerType]
    options: ClassVar[StagingOptions]

    def __init__(self, job: Job, training: checkflow.Training) -> None:
        super().__init__(job, training)
        self._stager = DefaultStager(self.options)
        self._staging: Future[None] | None = None
        self._upload: Future[None] | None = None
        self._path = Path()

    def before_update(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def after_iteration(self, iteration: int) -> None:
        if not self.job.due(iteration):
            return
        self.wait()
        self._path = place(self.job.folder, iteration)
        response = async_save(
            _dcp.state_of(self.training, iteration),
            storage_writer=_dcp.writer(self._path, self.job.tier),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
            no_dist=self.kind is AsyncCheckpointerType.THREAD,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._staging, self._upload = response.staging_completion, response.upload_completion

    def wait(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            self.before_update()
            upload.result()
            _dcp.published(self._path, self.job.tier)
            prune(self.job.folder)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._stager.close()
