"""The torture of a checkflow that forgets: sabotaged.py ARGUMENTS OF torture.py. Lives are forked and forget, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import torture
from torch.optim.lr_scheduler import LRScheduler

if __name__ == "__main__":
    LRScheduler.load_state_dict = lambda *_: None  # type: ignore[method-assign]
    torture.main()
