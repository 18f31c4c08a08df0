"""Files of several lanes as those of one checkpoint.

Each lane has its files, "lane-2.model.safetensors", as they were some iterations before the checkpoint's. What
several have is that of the newest. Gradients that a lane has were consumed in its own iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checkflow.lanes import lane_of
from checkflow.state.names import file_of, gradient_name
from checkflow.state.restore.files import FileTensor, TensorFile

_GRADIENTS = file_of(gradient_name(0, "").holder)


def gathered(backs: Sequence[int], files: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """The files of a checkpoint from those of its lanes, saved so many iterations before."""
    tensors: dict[str, dict[str, FileTensor]] = {}
    aliases: dict[str, dict[str, str]] = {}
    for lane, back in sorted(enumerate(backs), key=lambda one: -one[1]):
        for name in files:
            if (found := lane_of(name)) is not None and found[0] == lane:
                own = found[1]
                whole = file_of(gradient_name(back, "").holder) if own == _GRADIENTS else own
                tensors.setdefault(whole, {}).update(files[name].tensors)
                aliases.setdefault(whole, {}).update(files[name].aliases)
    return {name: TensorFile(found, aliases[name]) for name, found in tensors.items()}
