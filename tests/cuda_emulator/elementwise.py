"""CuPy's ElementwiseKernel: an operation on each element, given as C++ for one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import ndarray
from .kernels import RawModule

_C_TYPES = {
    "float64": "double",
    "float32": "float",
    "int64": "long long",
    "int32": "int",
    "int16": "short",
    "int8": "signed char",
    "uint64": "unsigned long long",
    "uint32": "unsigned int",
    "uint16": "unsigned short",
    "uint8": "unsigned char",
    "bool": "bool",
}
_PRELUDE = """
struct Indexer { long long n; __device__ long long size() const { return n; } };
template <typename T> struct RawArray {
  T* data;
  long long n;
  __device__ T& operator[](long long i) const { return data[i]; }
  __device__ long long size() const { return n; }
};
"""


@dataclass(frozen=True)
class _Parameter:
    is_raw: bool
    type: str  # a dtype's name, or one letter for any
    name: str
    is_output: bool


def _parameters(text: str, is_output: bool) -> list[_Parameter]:
    words = [part.split() for part in text.split(",") if part.strip()]
    return [_Parameter("raw" in w[:-2], w[-2], w[-1], is_output) for w in words]


class ElementwiseKernel:
    """Call it with arrays and scalars; outputs that are not given are allocated.

    Args:
        in_params: "T x, raw float32 y, S scalar".
        out_params: Likewise.
        operation: C++ in which the parameters stand for one element, raw ones for the array, and `i` for its index.
        name: Of the kernel.
        no_return: Return None.
        return_tuple: Return a tuple even of one output.
        preamble: C++ before the kernel.
        loop_prep: C++ before the loop over elements.
        after_loop: C++ after it.
        options: For the compiler.
    """

    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel",
        reduce_dims: bool = True,
        preamble: str = "",
        no_return: bool = False,
        return_tuple: bool = False,
        loop_prep: str = "",
        after_loop: str = "",
        options: tuple[str, ...] = (),
    ) -> None:
        self.params = _parameters(in_params, False) + _parameters(out_params, True)
        self.nin = sum(not parameter.is_output for parameter in self.params)
        self.operation, self.name, self.preamble, self.options = operation, name, preamble, options
        self.no_return, self.return_tuple = no_return, return_tuple
        self.loop_prep, self.after_loop = loop_prep, after_loop

    def __call__(self, *args: Any, size: int | None = None, block_size: int = 128) -> Any:
        """Queue it on the current stream."""
        if len(args) not in (self.nin, len(self.params)):
            raise TypeError(f"{self.name}: got {len(args)} arguments, expected {self.nin} or {len(self.params)}")
        shape = self._shape(args, size)
        dtypes = self._dtypes(args)
        made = [ndarray(shape, self._dtype(p, dtypes)) for p in self.params[len(args) :]]
        arguments = [*args, *made]
        count = int(np.prod(shape, dtype=np.int64))
        if count:
            module = RawModule(code=self._code(arguments, dtypes), options=self.options)
            grid = (-(-count // block_size),)
            kernel = module.get_function(self.name)
            kernel(grid, (block_size,), (*self._passed(arguments, shape, dtypes), np.int64(count)))
        outputs = tuple(arguments[self.nin :])
        if self.no_return:
            return None
        return outputs[0] if len(outputs) == 1 and not self.return_tuple else outputs

    def _shape(self, args: Sequence[Any], size: int | None) -> tuple[int, ...]:
        pairs = zip(args, self.params, strict=False)
        shapes = [a.shape for a, p in pairs if isinstance(a, ndarray) and not p.is_raw]
        if size is not None:
            if shapes:
                raise ValueError("Specified 'size' can be used only if all of the ndarray are 'raw'.")
            return (int(size),)
        if not shapes:
            raise ValueError("Loop size is undecided.")
        return np.broadcast_shapes(*shapes)

    def _dtypes(self, args: Sequence[Any]) -> dict[str, np.dtype[Any]]:
        """What each letter stands for: an array's dtype before a scalar's."""
        found: dict[str, np.dtype[Any]] = {}
        pairs = [(a, p) for a, p in zip(args, self.params, strict=False) if len(p.type) == 1]
        for argument, parameter in sorted(pairs, key=lambda pair: not isinstance(pair[0], ndarray)):
            dtype = argument.dtype if isinstance(argument, ndarray) else np.asarray(argument).dtype
            found.setdefault(parameter.type, dtype)
        return found

    @staticmethod
    def _dtype(parameter: _Parameter, dtypes: dict[str, np.dtype[Any]]) -> np.dtype[Any]:
        return dtypes[parameter.type] if len(parameter.type) == 1 else np.dtype(parameter.type)

    def _passed(
        self, arguments: Sequence[Any], shape: tuple[int, ...], dtypes: dict[str, np.dtype[Any]]
    ) -> list[npt.NDArray[Any] | np.generic | ndarray]:
        """The kernel's arguments: a raw array's size comes after it."""
        passed: list[Any] = []
        for argument, parameter in zip(arguments, self.params, strict=True):
            dtype = self._dtype(parameter, dtypes)
            if not isinstance(argument, ndarray):
                passed.append(dtype.type(argument))
                continue
            if argument.dtype != dtype:
                raise TypeError(f"{self.name}: {parameter.name} is {argument.dtype}, expected {dtype}")
            if not argument.flags.c_contiguous or (not parameter.is_raw and argument.shape != shape):
                raise NotImplementedError(f"{self.name}: {parameter.name} is strided or broadcast")
            passed.append(argument)
            if parameter.is_raw:
                passed.append(np.int64(argument.size))
        return passed

    def _code(self, arguments: Sequence[Any], dtypes: dict[str, np.dtype[Any]]) -> str:
        declared, before, inside = [], [], []
        for argument, parameter in zip(arguments, self.params, strict=True):
            const = "" if parameter.is_output else "const "
            element, name = _C_TYPES[self._dtype(parameter, dtypes).name], parameter.name
            if not isinstance(argument, ndarray):
                declared.append(f"{const}{element} {name}")
            elif parameter.is_raw:
                declared.append(f"{const}{element}* _data_{name}, long long _size_{name}")
                before.append(f"const RawArray<{const}{element}> {name} = {{_data_{name}, _size_{name}}};")
            else:
                declared.append(f"{const}{element}* _data_{name}")
                inside.append(f"{const}{element}& {name} = _data_{name}[i];")
        types = "".join(f"typedef {_C_TYPES[dtype.name]} {letter};\n" for letter, dtype in dtypes.items())
        return f"""{_PRELUDE}{types}{self.preamble}
extern "C" __global__ void {self.name}({", ".join(declared)}, long long _count) {{
  const Indexer _ind = {{_count}};
  {" ".join(before)}
  {self.loop_prep};
  const long long _threads = (long long)blockDim.x * gridDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < _count; i += _threads) {{
    {" ".join(inside)}
    {self.operation};
  }}
  {self.after_loop};
}}
"""
