"""The errors a user can meet, and the exit code of each.

CheckflowError
├── InputError            2   a file, an argument or a field is wrong
│   ├── ModelFileError    2   the model file or its factory
│   ├── TraceError        2   the iteration cannot be traced
│   └── FormatError       2   a graph, schedule or profile that cannot be read
├── SolverError           2   a solver that was asked for cannot run
├── InfeasibleError       1   checkflow.compile: no plan exists
├── StoreError            2   a store or its slots cannot be used, or a checkpoint could not be made durable
│   ├── StoreBusyError    2   another process writes to the store
│   └── CorruptStoreError 1   what was read does not verify
├── PeerError             2   other processes of the same training do not answer, or have failed
├── DeviceError           2   copies to host memory cannot be made
├── AuditError            1   state was written where no guard saw it
└── VerificationError     1   a schedule breaks a promise it makes

Each message is one line: the file or argument, what is wrong, what to do. To the planner and the commands "infeasible"
is an answer, not an error: see plan.Infeasible (exit code 1).
"""

from __future__ import annotations

import errno

from checkflow.text import brief, plain

EXIT_DONE = 0
EXIT_NO = 1
EXIT_BAD_INPUT = 2

# What to do by what the system says: nobody should free space on a disk that is read-only.
_REMEDIES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space below the quota",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EIO: "check the disk",
    errno.EAGAIN: "allow more processes and threads (ulimit -u)",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "allow more open files on this machine",
    errno.ENOMEM: "free memory",
    errno.EROFS: "mount it writable",
}


class CheckflowError(Exception):
    """Base of every error that checkflow raises on purpose. Its message may quote what a file says."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str = "") -> None:
        super().__init__(plain(message))


class InputError(CheckflowError):
    """A file, an argument or a field is wrong."""


class ModelFileError(InputError):
    """The model file or its factory is wrong."""


class TraceError(InputError):
    """The iteration cannot be traced."""


class FormatError(InputError):
    """A graph, schedule or profile that cannot be read."""


class SolverError(CheckflowError):
    """A solver that was asked for cannot run."""


class InfeasibleError(CheckflowError):
    """No plan exists for what `checkflow.compile` was asked; the message says why, and what would do.

    Attributes:
        reason: "deadline", "bandwidth", "chunk", "memory" or, where a policy is chosen, "host memory".
        needed_bandwidth_bytes_per_s: with which, at the same interval, a plan came out; None if none did.
        smallest_interval: with which, at the same bandwidth, a plan came out; None if none did.
    """

    exit_code = EXIT_NO

    def __init__(
        self,
        message: str = "",
        reason: str = "",
        needed_bandwidth_bytes_per_s: int | None = None,
        smallest_interval: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.needed_bandwidth_bytes_per_s = needed_bandwidth_bytes_per_s
        self.smallest_interval = smallest_interval


class StoreError(CheckflowError):
    """A store or its slots cannot be used, or a checkpoint could not be made durable."""


class StoreBusyError(StoreError):
    """Another process writes to the store."""


class CorruptStoreError(StoreError):
    """What was read does not verify."""

    exit_code = EXIT_NO


class PeerError(CheckflowError):
    """Other processes of the same training do not answer, or one of them has failed."""


class DeviceError(CheckflowError):
    """Copies to host memory cannot be made."""


class AuditError(CheckflowError):
    """State was written where no guard saw it: a checkpoint could have been torn."""

    exit_code = EXIT_NO


class VerificationError(CheckflowError):
    """A schedule breaks a promise it makes."""

    exit_code = EXIT_NO


def reason(error: OSError) -> str:
    """What the system said, and of which file, in a line: without Python's number of the error."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"


def remedy(error: OSError, otherwise: str, to: str = "write") -> str:
    """What to do about an error of the system; `otherwise` where the error has no usual one; `to`: what was tried."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"give this user the right to {to} there"
    return _REMEDIES.get(error.errno or 0, otherwise)


def internal(error: Exception) -> str:
    """An error of checkflow's own, as it is told."""
    return f"internal error, please report it ({brief(error)})"


def shown(value: object, most: int = 100) -> str:
    """A value as a message quotes it: so many characters of what Python shows; its type where its own code fails."""
    try:
        return repr(value)[:most]
    except Exception:  # noqa: BLE001 (of anybody's class)
        return f"a {type(value).__name__}"
