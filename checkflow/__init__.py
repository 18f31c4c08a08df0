"""checkflow: checkpoint PyTorch training every iteration, at a memory cost that is proven before a plan is followed.

All that a training needs is here: `compile` a schedule, `attach` it, restore. Each name is imported on its first use.
"""

TYPE_CHECKING = False  # typing's own takes longer to import than all of this
if TYPE_CHECKING:
    from checkflow.checkpointing.attach import attach
    from checkflow.checkpointing.checkpointer import Checkpointer
    from checkflow.data import ResumableLoader
    from checkflow.distributed.dcp import StoreReader
    from checkflow.distributed.dcp_writer import StoreWriter
    from checkflow.errors import (
        AuditError,
        CheckflowError,
        CorruptStoreError,
        DeviceError,
        FormatError,
        InfeasibleError,
        InputError,
        ModelFileError,
        PeerError,
        SolverError,
        StoreBusyError,
        StoreError,
        TraceError,
        VerificationError,
    )
    from checkflow.events import (
        Continued,
        Doubted,
        Durable,
        Event,
        Failed,
        Learned,
        Mirrored,
        Paced,
        Resumed,
        Skipped,
        Staged,
        Stalled,
        Uploaded,
        Verified,
    )
    from checkflow.extra import Stateful, Variables
    from checkflow.frontend import compile
    from checkflow.runtime.stats import Stats
    from checkflow.schedule import Schedule
    from checkflow.store.format.retention import Retention
    from checkflow.store.trainer.persist_every import PersistEvery
    from checkflow.store.trainer.status import Status
    from checkflow.training import Training

    __version__: str

__all__ = [
    "AuditError",
    "CheckflowError",
    "Checkpointer",
    "Continued",
    "CorruptStoreError",
    "DeviceError",
    "Doubted",
    "Durable",
    "Event",
    "Failed",
    "FormatError",
    "InfeasibleError",
    "InputError",
    "Learned",
    "Mirrored",
    "ModelFileError",
    "Paced",
    "PeerError",
    "PersistEvery",
    "ResumableLoader",
    "Resumed",
    "Retention",
    "Schedule",
    "Skipped",
    "SolverError",
    "Staged",
    "Stalled",
    "Stateful",
    "Stats",
    "Status",
    "StoreBusyError",
    "StoreError",
    "StoreReader",
    "StoreWriter",
    "TraceError",
    "Training",
    "Uploaded",
    "Variables",
    "VerificationError",
    "Verified",
    "__version__",
    "attach",
    "compile",
]

_EVENTS = (
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
)
_HOME = {
    "Checkpointer": "checkflow.checkpointing.checkpointer",
    "PersistEvery": "checkflow.store.trainer.persist_every",
    "ResumableLoader": "checkflow.data",
    "Retention": "checkflow.store.format.retention",
    "Schedule": "checkflow.schedule",
    "Stateful": "checkflow.extra",
    "Stats": "checkflow.runtime.stats",
    "Status": "checkflow.store.trainer.status",
    "StoreReader": "checkflow.distributed.dcp",
    "StoreWriter": "checkflow.distributed.dcp_writer",
    "Training": "checkflow.training",
    "Variables": "checkflow.extra",
    "attach": "checkflow.checkpointing.attach",
    "compile": "checkflow.frontend",
}
_HOME |= {name: "checkflow.errors" for name in __all__ if name.endswith("Error")}  # as above; a test compares the two
_HOME |= dict.fromkeys(_EVENTS, "checkflow.events")


if not TYPE_CHECKING:  # to a type checker a name that is not above is a mistake

    def __getattr__(name: str) -> object:
        """Import on first use: the saver process and `checkflow --help` do without torch."""
        import importlib

        if name == "__version__":
            import importlib.metadata

            found: object = importlib.metadata.version("checkflow")
        elif name in _HOME:
            found = getattr(importlib.import_module(_HOME[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
