"""How a plain loop and the same loop attached differ, in lines."""

from __future__ import annotations

import difflib
from pathlib import Path


def changed_lines(plain: Path, attached: Path) -> int:
    """Lines that are added, removed or another; one that becomes another counts once. White space counts."""
    before, after = plain.read_text().splitlines(), attached.read_text().splitlines()
    opcodes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in opcodes if kind != "equal")


def diff(plain: Path, attached: Path) -> str:
    """The same as a patch of no context."""
    before, after = plain.read_text().splitlines(), attached.read_text().splitlines()
    return "\n".join(difflib.unified_diff(before, after, plain.name, attached.name, lineterm="", n=0))
