"""What a record says of state that was saved some iterations before the others: how its updates are made again.

    {"parts": [what each part was when it was saved], "updates": [each update since, in order]}

Bytes of gradients are in files of their own, "gradient.2.safetensors" for those of two iterations before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping


class Updates:
    """Texts of iterations, for the records of checkpoints that need them."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[tuple[str, ...], str]] = {}
        self._updates: list[tuple[int, str]] = []

    def add_part(self, iteration: int, parameters: tuple[str, ...], text: str) -> None:
        """What `HostState.part` gave when it ended; these parameters were saved then."""
        self._parts[iteration] = parameters, text

    def add_update(self, iteration: int, text: str) -> None:
        """What `HostState.update` gave while it ran."""
        self._updates.append((iteration, text))

    def forget_before(self, iteration: int) -> None:
        """No checkpoint will need what is older."""
        self._parts = {of: part for of, part in self._parts.items() if of >= iteration}
        self._updates = [(of, text) for of, text in self._updates if of > iteration]

    def text(self, checkpoint: int, saved: Mapping[int, tuple[str, ...]] | None = None) -> str:
        """A ReplayRecord's JSON, in ASCII, of the checkpoint of an iteration.

        `saved`: the parameters that it has of each earlier iteration, where that is not what `add_part` was told.
        """
        named = saved if saved is not None else {of: names for of, (names, _) in self._parts.items()}
        parts = (
            f'{{"back":{checkpoint - of},"parameters":{json.dumps(list(names))},{self._parts[of][1]}}}'
            for of, names in sorted(named.items())
        )
        first = min(named, default=checkpoint)
        updates = (
            f'{{"back":{checkpoint - of},{text}}}'
            for of, text in self._updates
            if saved is None or first < of <= checkpoint
        )
        return f'{{"parts":[{",".join(parts)}],"updates":[{",".join(updates)}]}}'

    def field(self, checkpoint: int, saved: Mapping[int, tuple[str, ...]] | None = None) -> str:
        """The field of a record that says all this."""
        return f',"replay":{self.text(checkpoint, saved)}'


def with_fields(record: bytes, fields: str) -> bytes:
    """A record that has more fields, in ASCII, each after a comma."""
    return record[:-1] + fields.encode("ascii") + b"}"
