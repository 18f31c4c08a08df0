"""The judge of other people's trainings has teeth: what does not resume, and what hangs, is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("judged.py")


def test_four_trainings_get_the_verdicts_that_they_earn(tmp_path: Path) -> None:
    """In a process of its own, since it forks."""
    done = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert verdicts["sound"] == ["worked", "", True]
    assert verdicts["forgetful"][0] == "wrong"
    assert "differs" in verdicts["forgetful"][1]
    assert verdicts["refused"][0] == "refused"
    assert verdicts["endless"][:2] == ["wrong", "compile has not ended after 5 s"]
    assert verdicts["sound, learned"] == ["worked", "", True]
    assert verdicts["forgetful, learned"][0] == "wrong"
    assert "differs" in verdicts["forgetful, learned"][1]
