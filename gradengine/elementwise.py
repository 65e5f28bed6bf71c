"""Operations on single arrays and pointers (add, scale, fill, cast), each one ElementwiseKernel on a GPU.

They are for tensors outside of a layout, one contiguous tensor at a time, in fp32, fp16 or bf16. They accept no strided
or broadcast operands. Arithmetic is in fp32, and each operation rounds once, with the same bits on CPU and GPU. The
fused kernels do the same for a whole gradient set in one launch.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gradengine.arguments import as_number, said
from gradengine.arrays.buffer import Buffer
from gradengine.arrays.device import device_of
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.kernels import Contribution, CudaKernels, DeviceLike, FoldPass, Kernels, kernels_for
from gradengine.kernels.operands import producers_of
from gradengine.kernels.toolchain import arithmetic
from gradengine.layout.slots import Span

__all__ = ["add", "cast", "fill", "scale"]


def add(
    target: object,
    source: object,
    weight: float = 1.0,
    *,
    device: DeviceLike | None = None,
    stream: object | None = None,
) -> None:
    """Add in place, target += weight * source, with the product rounded to fp32, then the sum.

    Args:
        target: A writable fp32 array or `RawBuffer`.
        source: An array or `RawBuffer` with as many elements, in fp32, fp16 or bf16.
        weight: The factor, rounded to fp32. Exactly 1 multiplies nothing.
        device: The buffers' device, by default that of `target`.
        stream: A GPU's stream, by default the current CuPy stream.

    Raises:
        BufferRefused: A buffer's dtype, device, strides or memory is not supported, or the two overlap in part.
        LayoutMismatch: The numbers of elements differ.
        CallerError: The weight is not a number.

    Example:
        >>> total = np.array([1, 2], np.float32)
        >>> add(total, np.array([10, 20], np.float16), 0.5)
        >>> total
        array([ 6., 12.], dtype=float32)
    """
    kernels, by = kernels_for(device_of(target) if device is None else device), _fp32("weight", weight)
    with kernels.device.on(stream):
        to, of = _pair(kernels, target, source)
        if to.dtype != "float32":
            raise BufferRefused("'target' accumulates and must be fp32", got=to.dtype, expected="float32")
        if isinstance(kernels, CudaKernels):
            term = _converted("widened", "source", of)
            value = f"gradengine::add(target, weight == 1.0f ? {term} : gradengine::multiply(weight, {term}))"
            _run(kernels, "add", value, to, of, weight=by)
        else:
            slots = Span.at([0])
            fold = FoldPass(slots, np.zeros(1, np.bool_), [Contribution.of(slots, [of])], [by])
            kernels.accumulate(kernels.arena([to]), fold)


def scale(buffer: object, factor: float, *, device: DeviceLike | None = None, stream: object | None = None) -> None:
    """Multiply in place, `buffer *= factor`, with the product rounded to fp32, then to the buffer's dtype.

    Args:
        buffer: A writable array or `RawBuffer` in fp32, fp16 or bf16.
        factor: The factor, rounded to fp32. Exactly 1 writes nothing.
        device: The buffer's device, by default the one that the buffer names.
        stream: A GPU's stream, by default the current CuPy stream.

    Raises:
        BufferRefused: The buffer cannot be written in place.
        CallerError: The factor is not a number.

    Example:
        >>> gradient = np.array([1, 2], np.float16)
        >>> scale(gradient, 0.5)
        >>> gradient
        array([0.5, 1. ], dtype=float16)
    """
    kernels, by = kernels_for(device_of(buffer) if device is None else device), _fp32("factor", factor)
    with kernels.device.on(stream):
        to = kernels.device.writable_view(buffer, "buffer")
        if not isinstance(kernels, CudaKernels):
            kernels.scale([to], by, [to])
        elif by != 1:
            element = f"gradengine::multiply({_converted('widened', 'target', to)}, factor)"
            _run(kernels, "scale", element, to, factor=by)


def fill(buffer: object, value: float, *, device: DeviceLike | None = None, stream: object | None = None) -> None:
    """Set every element to `value`, rounded to fp32 and then to the buffer's dtype.

    Args:
        buffer: A writable array or `RawBuffer` in fp32, fp16 or bf16.
        value: The number that is written.
        device: The buffer's device, by default the one that the buffer names.
        stream: A GPU's stream, by default the current CuPy stream.

    Raises:
        BufferRefused: The buffer cannot be written in place.
        CallerError: The value is not a number.

    Example:
        >>> gradient = np.empty(2, np.float32)
        >>> fill(gradient, 3.0)
        >>> gradient
        array([3., 3.], dtype=float32)
    """
    kernels, constant = kernels_for(device_of(buffer) if device is None else device), _fp32("value", value)
    with kernels.device.on(stream):
        to = kernels.device.writable_view(buffer, "buffer")
        if isinstance(kernels, CudaKernels):
            _run(kernels, "fill", "value", to, value=constant)
        elif to.size:
            one = kernels.device.view(np.full(1, constant), "value")
            kernels.scale([one], np.float32(1), [to.part(0, 1)])
            to.data.fill(to.data[0])


def cast(
    source: object, destination: object, *, device: DeviceLike | None = None, stream: object | None = None
) -> None:
    """Copy source to destination in the destination's dtype, widened exactly or rounded to nearest, ties to even.

    NaN stays NaN, also a signalling NaN. In bf16 it is 0x7fc0. In fp16 and fp32 its sign and payload depend on the
    device.

    Args:
        source: An array or `RawBuffer` in fp32, fp16 or bf16.
        destination: A writable array or `RawBuffer` with as many elements, in fp32, fp16 or bf16.
        device: The buffers' device, by default that of `destination`.
        stream: A GPU's stream, by default the current CuPy stream.

    Raises:
        BufferRefused: A buffer's dtype, device, strides or memory is not supported, or the two overlap in part.
        LayoutMismatch: The numbers of elements differ.

    Example:
        >>> short = np.empty(2, np.float16)
        >>> cast(np.array([1, 2049], np.float32), short)
        >>> short
        array([1.000e+00, 2.048e+03], dtype=float16)
    """
    kernels = kernels_for(device_of(destination) if device is None else device)
    with kernels.device.on(stream):
        to, of = _pair(kernels, destination, source)
        if isinstance(kernels, CudaKernels):
            _run(kernels, "cast", _converted("widened", "source", of), to, of)
        else:
            kernels.scale([of], np.float32(1), [to])


def _converted(how: str, value: str, buffer: Buffer) -> str:
    """Return the code of a value that is "widened" from a buffer's dtype to fp32, or "rounded" to it."""
    is_fp32 = buffer.dtype == "float32"
    return value if is_fp32 else f"gradengine::{how}({value}, gradengine::{buffer.dtype.upper()})"


def _fp32(name: str, value: float) -> np.float32:
    """Return the number rounded to fp32, which may be infinity or NaN."""
    number = as_number(value)
    if number is None:
        raise CallerError(f"{name} is not a number", got=said(value), expected="a number")
    with np.errstate(over="ignore"):
        rounded: np.float32 = np.float32(number)
    return rounded


def _pair(kernels: Kernels, destination: object, source: object) -> tuple[Buffer, Buffer]:
    to, of = kernels.device.writable_view(destination, "destination"), kernels.device.view(source, "source")
    if to.size != of.size:
        raise LayoutMismatch("source and destination differ in size", got=of.size, expected=to.size)
    if to.overlaps(of) and not (to.pointer == of.pointer and to.dtype == of.dtype):
        raise BufferRefused("source and destination overlap in memory", do="pass a copy")
    return to, of


def _run(
    kernels: CudaKernels, name: str, element: str, target: Buffer, source: Buffer | None = None, **scalars: np.float32
) -> None:
    """Run target[i] = element, an expression of the source's element and of the scalars by their names."""
    if not target.size:
        return
    read = [] if source is None else [source]
    *sources, there = [kernels.device.storage_array(buffer) for buffer in (*read, target)]
    inputs = ", ".join([*(f"{array.dtype} source" for array in sources), *(f"float32 {scalar}" for scalar in scalars)])
    operation = f"target = {_converted('rounded', element, target)}"
    with kernels.device.active():
        kernel = _kernel(kernels.xp, name, inputs, f"{there.dtype} target", operation)
        kernel(*sources, *scalars.values(), there)
    kernels.device.give_back(producers_of([target, *read]), [target, *read])


@functools.cache
def _kernel(xp: Any, name: str, inputs: str, output: str, operation: str) -> Any:
    return xp.ElementwiseKernel(inputs, output, operation, f"gradengine_{name}", preamble=arithmetic(), no_return=True)
