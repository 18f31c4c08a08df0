"""Everything that can happen to a training and its store, at random, against a run to which nothing happened.

kinds/      one file a kind of torture, found by its name: run() is one run of it    strikes.py   who is killed, and how
trainer.py  the training that is tortured, in a forked process                       settings.py  what is promised
oracle.py   the digests of the uninterrupted run                                     bench.py     what a run works with
results.py  outcomes, as tables and as JSON
"""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent.parent / "tests"
sys.path[:0] = [str(_TESTS / "checkpointing"), str(_TESTS / "store")]  # trainer_to_kill, small_store: written once
