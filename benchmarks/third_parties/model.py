"""The model file that `checkflow compile` is given: --set module=hf_transformers --set name=gpt2."""

from __future__ import annotations

import sys
from pathlib import Path

import checkflow

sys.path.insert(0, str(Path(__file__).parent.parent))

from third_parties.case import case


def training(module: str, name: str) -> checkflow.Training:
    return case(module, name).build()
