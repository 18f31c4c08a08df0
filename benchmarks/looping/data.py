"""What the loops are trained on: made here, so that nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

TOKENS = {"train": 20_000, "val": 4_000}
PAIRS = {"train": 160, "val": 32}
IMAGES = 80


def write(folder: Path) -> None:
    """{train,val}.{bin,txt,jsonl} and images.npy."""
    drawn = np.random.default_rng(0)
    for split in ("train", "val"):
        walk = np.cumsum(drawn.integers(-2, 3, TOKENS[split])) % 256
        (folder / f"{split}.bin").write_bytes(walk.astype(np.uint16).tobytes())
        (folder / f"{split}.txt").write_bytes(walk.astype(np.uint8).tobytes())
        (folder / f"{split}.jsonl").write_text("".join(_pair(drawn) for _ in range(PAIRS[split])))
    np.save(folder / "images.npy", drawn.integers(0, 256, (IMAGES, 16, 16, 3), dtype=np.uint8))


def _pair(drawn: np.random.Generator) -> str:
    """Two words of other lengths each time; alike where they begin with the same letter."""
    first, second = ("".join(map(chr, drawn.integers(97, 105, drawn.integers(4, 20)))) for _ in range(2))
    return json.dumps({"sentence1": first, "sentence2": second, "label": int(first[0] == second[0])}) + "\n"
