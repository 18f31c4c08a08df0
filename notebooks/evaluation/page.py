"""What every notebook begins with, and how it shows a picture."""

from __future__ import annotations

import atexit
import io
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 100  # of a terminal that a page has room for


def begin() -> None:
    """Move to a folder of its own, which goes when the notebook's kernel ends, and make `checkflow` a command there."""
    folder = tempfile.TemporaryDirectory(prefix="checkflow-notebook-")
    atexit.register(folder.cleanup)
    os.chdir(folder.name)
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    os.environ["COLUMNS"] = str(COLUMNS)
    os.environ.pop("FORCE_COLOR", None)  # which the kernel sets; a page shows text


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that a notebook shows: the bytes of a .png."""

    png: bytes = field(repr=False)

    @classmethod
    def of(cls, figure: Figure) -> Picture:
        """A figure as it is drawn, in 256 colours, a third of the bytes; the same figure gives the same bytes."""
        from PIL import Image

        drawn, png = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png")
        Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(png, format="png", optimize=True)
        return cls(png.getvalue())

    @classmethod
    def read(cls, path: str | Path) -> Picture:
        """A picture that a command wrote (`checkflow compile --report timeline.png`)."""
        return cls(Path(path).read_bytes())

    def _repr_png_(self) -> bytes:
        return self.png
