"""Devices: their profiles, the times these model, and measuring the one at hand."""

from checkflow.hardware.measure import measure_profile
from checkflow.hardware.profile import NAMES, Profile, load_profile, write_profile
from checkflow.hardware.roofline import copy_ns, link_bytes_per_s, operator_time_ns, retime

__all__ = [
    "NAMES",
    "Profile",
    "copy_ns",
    "link_bytes_per_s",
    "load_profile",
    "measure_profile",
    "operator_time_ns",
    "retime",
    "write_profile",
]
