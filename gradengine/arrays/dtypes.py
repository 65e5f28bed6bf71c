"""Table of the gradient dtypes. The row of a dtype has all that other files need.

A new dtype needs a row here, and conversions in `kernels/host.py`, `kernels/arithmetic.cuh` (one element) and
`kernels/common.cuh` (16 bytes at a time).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from gradengine.errors import BufferRefused

_MODULES_OF_DTYPES = ("torch.", "mlx.core.", "paddle.")
# Names of tinygrad that are C's. Its other names are the same as NumPy's.
_TINYGRAD = {"dtypes.float": "float32", "dtypes.half": "float16", "dtypes.double": "float64"}


class DType(NamedTuple):
    """One gradient dtype. Its name is the one that NumPy, ml_dtypes, torch and JAX use."""

    name: str
    itemsize: int
    storage: np.dtype[Any]  # NumPy's dtype, or an unsigned integer of the same width that the host kernels widen
    dlpack: tuple[int, int]  # type code, bits
    tag: int  # number in kernels/arithmetic.cuh, at most 15 since an address has 4 bits for it


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        DType("float32", 4, np.dtype("<f4"), (2, 32), tag=0),
        DType("float16", 2, np.dtype("<f2"), (2, 16), tag=1),
        DType("bfloat16", 2, np.dtype("<u2"), (4, 16), tag=2),
    )
}


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype given as text, as a NumPy scalar type or as any framework's dtype.

    >>> dtype_name("torch.float32"), dtype_name(np.float16), dtype_name(np.dtype(">f4"))
    ('float32', 'float16', 'float32 in foreign byte order')
    """
    if isinstance(dtype, np.dtype):
        return f"{dtype.name}{'' if dtype.isnative else ' in foreign byte order'}"
    text = str(dtype)
    if text.startswith("dtypes."):
        return _TINYGRAD.get(text, text.removeprefix("dtypes."))
    if text.startswith(_MODULES_OF_DTYPES):  # Paddle's attribute `name` is in capitals.
        return text.rpartition(".")[2]
    return str(next((getattr(dtype, word) for word in ("name", "__name__") if hasattr(dtype, word)), dtype))


@functools.lru_cache(maxsize=32)  # NumPy's attribute `name` takes 0.5 us.
def supported_name(dtype: Any) -> str | None:
    """Return the name of a framework's dtype if it is in the table, otherwise None."""
    name = dtype_name(dtype)
    return name if name in DTYPES else None


def by_dlpack_code(code: int, bits: int) -> str | None:
    """Return the name of a supported dtype by DLPack's type code and width in bits, or None."""
    for dtype in DTYPES.values():  # The loop takes 0.4 us, next(...) takes 0.8.
        if dtype.dlpack == (code, bits):
            return dtype.name
    return None


def unsupported_dtype(component: str, dtype: Any) -> BufferRefused:
    """Return the error for a component whose dtype is not in the table."""
    *names, last = DTYPES
    return BufferRefused(
        f"component '{component}' has an unsupported dtype",
        got=dtype_name(dtype),
        expected=f"{', '.join(names)} or {last}",
        do="cast it, for example to float32 (dequantise a quantised array, take the real view of a complex one)",
    )
