"""The dtypes of tensors that a checkpoint's files can hold: torch's names, safetensors' codes, bytes of an element.

Nothing here imports torch: the saver reads it.
"""

from __future__ import annotations

_DTYPES = (
    ("bool", "BOOL", 1), ("uint8", "U8", 1), ("int8", "I8", 1),
    ("float8_e4m3fn", "F8_E4M3", 1), ("float8_e5m2", "F8_E5M2", 1), ("float8_e8m0fnu", "F8_E8M0", 1),
    ("uint16", "U16", 2), ("int16", "I16", 2), ("float16", "F16", 2), ("bfloat16", "BF16", 2),
    ("uint32", "U32", 4), ("int32", "I32", 4), ("float32", "F32", 4),
    ("uint64", "U64", 8), ("int64", "I64", 8), ("float64", "F64", 8), ("complex64", "C64", 8),
)  # fmt: skip

CODES = {name: code for name, code, _ in _DTYPES}
ITEM_BYTES = {code: size_bytes for _, code, size_bytes in _DTYPES}


def name_of(dtype: object) -> str:
    """torch's name of one of its dtypes: "float32"."""
    return str(dtype).removeprefix("torch.")
