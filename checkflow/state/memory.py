"""How a tensor lies in memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
import xxhash


def has_storage(tensor: torch.Tensor) -> bool:
    """Sparse and opaque tensors have none, nor have nested ones that are not jagged."""
    return tensor.layout == torch.jagged or (tensor.layout == torch.strided and not tensor.is_nested)


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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in logical order: its own memory where they lie so, else a copy. One dimension may have strides that
    `reshape` keeps, and a single element any; `view` refuses both."""
    plain = tensor.detach().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Two tensors that have elements, with the same one, are the same memory, read the same way."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


def is_lent(tensor: torch.Tensor) -> bool:
    """Whether its memory is NumPy's, another process's or anybody's in the host, who may write there uncounted."""
    if tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return storage.is_shared() or not storage.resizable()


def unusual_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its memory order, if that is not the one in which dimensions are counted; None, too, where it is not dense.

    Dimensions of one element have the place that their stride says, by which torch knows `channels_last`.
    """
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def laid(value: torch.Tensor, order: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """Another tensor of the same elements, which lie in memory in this order of its dimensions."""
    lying = torch.empty([value.shape[dim] for dim in order], dtype=value.dtype, device=device or value.device)
    return lying.permute(sorted(range(len(order)), key=order.__getitem__)).copy_(value)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Of all bytes of its storage, on its device: another one where they are others. Nothing is copied.

    On the host it is a hash. Elsewhere it is made of sums over each 1021st word and each 1024th: changes of two words
    that cancel each other out are never in the same two sums, unless a million words lie in between.
    """
    storage = tensor.untyped_storage()
    if tensor.device.type != "cpu":
        return _of_sums(storage)
    size_bytes = storage.nbytes()
    data = (ctypes.c_char * size_bytes).from_address(storage.data_ptr()) if size_bytes else b""
    return torch.tensor(xxhash.xxh3_64_intdigest(data) - (1 << 63), device="cpu")


def differing(before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> list[bool]:
    """Which of these fingerprints differ, all of one device. Waits for the device once."""
    differ = torch.stack(list(now)) != torch.stack(list(before))
    found: list[bool] = differ.reshape(len(now), -1).any(1).tolist()
    return found


def _of_sums(storage: torch.UntypedStorage) -> torch.Tensor:
    size = 4 if storage.data_ptr() % 4 == 0 else 1
    words, rest = divmod(storage.nbytes(), size)
    with torch.no_grad():
        whole = torch.empty(0, dtype=torch.int32 if size == 4 else torch.uint8, device=storage.device)
        whole.set_(storage, 0, (words,), (1,))
        end = torch.empty(0, dtype=torch.uint8, device=storage.device)
        end.set_(storage, words * size, (rest,), (1,))
        return torch.stack([_mixed(whole, 1021), _mixed(whole, 1024), end.sum()])


def _mixed(words: torch.Tensor, width: int) -> torch.Tensor:
    """The sum of each `width`th word, and the words that are left, each times an odd number of its own."""
    rows = words.numel() // width
    sums = words[: rows * width].view(rows, width).sum(0, dtype=torch.int64)
    found = torch.cat([sums, words[rows * width :].to(torch.int64)])
    return (found * _odd(str(words.device))[: found.numel()]).sum()


@functools.cache
def _odd(device: str) -> torch.Tensor:
    """One for each sum and each word that is left, of which there are fewer than twice 1024."""
    made = torch.randint(-(1 << 62), 1 << 62, (2048,), generator=torch.Generator().manual_seed(0), device="cpu")
    return (2 * made + 1).to(device)
