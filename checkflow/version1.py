"""Schedule files of version 1, as those of today: what they do not say of their actions is None."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, TypeAdapter

from checkflow.counts import Total
from checkflow.errors import FormatError
from checkflow.jsonfile import validate

_SINCE = {"ideal_peak_bytes", "pause_ns", "replay_ns"}  # fields of a certificate that version 1 did not have


class _Version1(BaseModel):
    """What version 1 certified: a plan with actions at any position, of which only `executed` was ever carried out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    training_peak_bytes: Total
    peak_bytes: Total
    executed_peak_bytes: Total
    lower_bound_bytes: Total
    gap: float
    proven_by: str
    solver: str
    solver_why: str
    snapshot_bytes: Total
    executed_snapshot_bytes: Total
    constructive_peak_bytes: Total | None


def of_version_1(document: Mapping[str, object], source: str) -> dict[str, object]:
    """The same in version 2, without a digest: the actions, and what is known of them. Raises FormatError."""
    certificate = document.get("certificate")
    if isinstance(certificate, dict) and not _SINCE.isdisjoint(certificate):
        raise FormatError(f"{source}: field version: says 1, and its certificate is of version 2; compile it again")
    claims = validate(TypeAdapter(_Version1), certificate, f"{source}: field certificate")
    streaming = document.get("transfers") == "streaming"  # its bound is that of every position; others had their own
    kept = {name: value for name, value in document.items() if name != "plan"}
    return kept | {
        "version": 2,
        "digest": "",
        "certificate": {
            "training_peak_bytes": claims.training_peak_bytes,
            "peak_bytes": claims.executed_peak_bytes,
            "lower_bound_bytes": None,
            "ideal_peak_bytes": claims.lower_bound_bytes if streaming else None,
            "gap": None,
            "snapshot_bytes": claims.executed_snapshot_bytes,
            "solver": claims.solver,
            "solver_why": claims.solver_why,
        },
    }
