"""Table of the gradient dtypes: a dtype's row has all that other files must know of it.

A new dtype is a new row here, and its conversions in `kernels/host.py`, `kernels/arithmetic.cuh` (one element) and
`kernels/common.cuh` (16 bytes at a time).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from gradengine.errors import BufferRefused

_MODULES_OF_DTYPES = ("torch.", "mlx.core.", "paddle.")
_TINYGRAD = {"dtypes.float": "float32", "dtypes.half": "float16", "dtypes.double": "float64"}  # C's names; else as ours


class DType(NamedTuple):
    """One gradient dtype; its name is the one that NumPy, ml_dtypes, torch and JAX use."""

    name: str
    itemsize: int
    storage: np.dtype[Any]  # NumPy's, or an unsigned integer of the same bits, which the host's kernels widen
    dlpack: tuple[int, int]  # type code, bits
    tag: int  # in kernels/arithmetic.cuh; at most 15, since an address has 4 bits for it


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("float32", 4, np.dtype("<f4"), (2, 32), tag=0),
        DType("float16", 2, np.dtype("<f2"), (2, 16), tag=1),
        DType("bfloat16", 2, np.dtype("<u2"), (4, 16), tag=2),
    )
}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as text, as a NumPy scalar type or as any framework's dtype.

    >>> dtype_name("torch.float32"), dtype_name(np.float16), dtype_name(np.dtype(">f4"))
    ('float32', 'float16', 'float32 in foreign byte order')
    """
    if isinstance(dtype, np.dtype):
        return f"{dtype.name}{'' if dtype.isnative else ' in foreign byte order'}"
    text = str(dtype)
    if text.startswith("dtypes."):
        return _TINYGRAD.get(text, text.removeprefix("dtypes."))
    if text.startswith(_MODULES_OF_DTYPES):  # Paddle's `name` is in capitals
        return text.rpartition(".")[2]
    return str(next((getattr(dtype, word) for word in ("name", "__name__") if hasattr(dtype, word)), dtype))


@functools.lru_cache(maxsize=32)  # NumPy's own .name takes 0.5 us
def supported_name(dtype: Any) -> str | None:
    """The name of a framework's dtype if it is in the table, else None."""
    name = dtype_name(dtype)
    return name if name in DTYPES else None


def by_dlpack_code(code: int, bits: int) -> str | None:
    """The name of a supported dtype by DLPack's type code and width; None for any other."""
    for dtype in DTYPES.values():  # not next(...): 0.8 us instead of 0.4
        if dtype.dlpack == (code, bits):
            return dtype.name
    return None


def unsupported_dtype(component: str, dtype: Any) -> BufferRefused:
    """The error for a component whose dtype is not in the table."""
    *names, last = DTYPES
    return BufferRefused(
        f"component '{component}' has an unsupported dtype",
        got=dtype_name(dtype),
        expected=f"{', '.join(names)} or {last}",
        do="cast it first, for example to float32 (quantised: dequantise it; complex: take its real view)",
    )
