"""Devices: their profiles and the times these model. measure.py measures the one at hand; it alone needs torch."""

from checkflow.hardware.profile import NAMES, CopyRates, Profile, load_profile, write_profile
from checkflow.hardware.roofline import copy_ns, host_update_ns, link_bytes_per_s, mirror_ns, operator_time_ns, retime

__all__ = [
    "NAMES",
    "CopyRates",
    "Profile",
    "copy_ns",
    "host_update_ns",
    "link_bytes_per_s",
    "load_profile",
    "mirror_ns",
    "operator_time_ns",
    "retime",
    "write_profile",
]
