"""What a certificate says, in one line."""

from __future__ import annotations

from checkflow.schedule import Certificate
from checkflow.units import format_bytes


def certified(certificate: Certificate) -> str:
    """How far the peak is from what no schedule can do without, and what missing anchors cost."""
    peak, bound, ideal = certificate.peak_bytes, certificate.lower_bound_bytes, certificate.ideal_peak_bytes
    if bound is None or ideal is None or certificate.gap is None:
        return "no bound is known: version 1 of the file proved that of a plan which did not run"
    words = "optimal: no schedule needs less"
    if peak > bound:
        words = f"within {certificate.gap:.2e} of {format_bytes(bound)}, which no schedule can do without"
    if bound == ideal:
        return words
    return f"{words}; with an anchor between any two operators it could be {format_bytes(ideal)}"
