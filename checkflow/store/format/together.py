"""A checkpoint in lanes as one without, for other tools: where each lane is of the checkpoint's own iteration."""

from __future__ import annotations

from checkflow.dtypes import ITEM_BYTES
from checkflow.lanes import lane_of
from checkflow.safetensorsfile import header_of
from checkflow.store.format.layout import ALIGN_BYTES
from checkflow.store.format.reader import Loaded
from checkflow.store.format.tensor_file import contents_of


def without_lanes(loaded: Loaded) -> Loaded:
    """Files put together from those of all lanes, as they would have been written. Gradients are left out.

    Raises CorruptStoreError for a file that has no tensors.
    """
    whole, of_lanes = dict[str, memoryview](), dict[str, list[str]]()
    for name, data in loaded.files.items():
        lane = lane_of(name)
        if lane is None:
            whole[name] = data
        elif not lane[1].startswith("gradient."):
            of_lanes.setdefault(lane[1], []).append(name)
    for own, names in of_lanes.items():
        parts = [contents_of(name, loaded.files[name]) for name in names]
        tensors = {key: tensor for part in parts for key, tensor in part.tensors.items()}
        aliases = {alias: tied for part in parts for alias, tied in part.aliases.items()}
        ordered = sorted(tensors.values(), key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
        header = header_of(((each.name, each.dtype, each.shape) for each in ordered), aliases.items(), ALIGN_BYTES)
        whole[own] = memoryview(bytearray().join([header, *(each.data for each in ordered)]))
    return Loaded(loaded.checkpoint, whole, loaded.record)
