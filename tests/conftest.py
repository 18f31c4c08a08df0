"""Hypothesis profiles: HYPOTHESIS_PROFILE=nightly tries ten times as many instances as ci, the default."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)  # a solver's start-up is not the test's fault
settings.register_profile("ci", max_examples=100, deadline=None, suppress_health_check=SLOW, print_blob=True)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=SLOW, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
