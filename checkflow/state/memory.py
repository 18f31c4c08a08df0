"""How a tensor lies in memory."""

from __future__ import annotations

import torch


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its dimensions as they lie in memory, outermost first; None unless its elements lie densely, each once."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    shape, strides = tensor.shape, tensor.stride()
    dims = list(range(len(shape)))
    dims.sort(key=lambda dim: (shape[dim] == 1, -strides[dim]))
    expected = 1
    for dim in reversed(dims):
        if shape[dim] != 1:
            if strides[dim] != expected:
                return None
            expected *= shape[dim]
    return tuple(dims)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Two tensors that have elements, with the same one, are the same memory, read the same way."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether its memory is NumPy's, another process's or anybody's in the host, who may write there uncounted."""
    if tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return storage.is_shared() or not storage.resizable()


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of its storage's words of eight bytes, and of the bytes after the last one: shape (2,), int64; no copy is made.

    Where the bytes change, so do these, but for changes that cancel each other out.
    """
    storage = tensor.untyped_storage()
    words, rest = divmod(storage.nbytes(), 8)
    with torch.no_grad():
        whole = torch.empty(0, dtype=torch.int64, device=tensor.device).set_(storage, 0, (words,), (1,))
        end = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, words * 8, (rest,), (1,))
        return torch.stack([whole.sum(), end.sum()])
