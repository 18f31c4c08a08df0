"""Progress on standard error: what goes on, and that it still does."""

from __future__ import annotations

import time

import pytest

from checkflow.cli import _console


def test_what_takes_long_is_told_again_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_console, "_QUIET_S", 0.02)
    said: list[str] = []
    monkeypatch.setattr(_console, "tell", said.append)
    with _console.progress() as progress:
        progress("solving")
        deadline = time.monotonic() + 10
        while len(said) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        progress("verifying")
    assert said[:3] == ["checkflow: solving", "checkflow: solving, for 0 s", "checkflow: solving, for 0 s"]
    assert "checkflow: verifying" in said
