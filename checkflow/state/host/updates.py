"""What a record says of state that was saved some iterations before the others: how its updates are made again.

    {"parts": [what each part was when it was saved], "updates": [each update since, in order]}

Bytes of gradients are in files of their own, "gradient.2.safetensors" for those of two iterations before.
"""

from __future__ import annotations


class Updates:
    """Texts of a checkpoint that is being filled, to be added to its record."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._updates: list[str] = []

    def add_part(self, text: str) -> None:
        """A PartRecord's JSON."""
        self._parts.append(text)

    def add_update(self, text: str) -> None:
        """An UpdateRecord's."""
        self._updates.append(text)

    def text(self) -> str:
        """A ReplayRecord's JSON, in ASCII."""
        return f'{{"parts":[{",".join(self._parts)}],"updates":[{",".join(self._updates)}]}}'

    def added_to(self, record: bytes) -> bytes:
        """A record that says all this, too."""
        return record[:-1] + f',"replay":{self.text()}}}'.encode("ascii")
