"""Gradients without a framework, which the engine reads and writes by their addresses.

Shows `RawBuffer`, which holds an address, the number of elements, their dtype and the owner of the memory. The engine
keeps the owner alive with the `RawBuffer`, and does not check whether the memory was freed. On the CPU the memory is
shared memory, which a different process may write. On a GPU it is allocated by cudaMalloc.

Install in a clone ('.[cuda12]' or '.[cuda13]' for --device cuda) and run:

    pip install .
    python examples/raw_pointers.py [--device cuda]

The example checks itself against NumPy. Norm and factor must agree to 1e-6. The written values, in fp32 and bf16, must
have the bits of NumPy's sum times the factor. Otherwise it exits with 1.
"""

import argparse
import ctypes
import math
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from gradengine import GradientEngine, GradientLayout, RawBuffer

SHAPES = {"w": (64, 48), "b": (64,)}
DTYPES = {"w": "float32", "b": "bfloat16"}
BITS = {"w": np.uint32, "b": np.uint16}  # dtypes of the bits, since NumPy has no bf16
WEIGHTS = (3.0, 5.0)  # weights of the two micro-batches
MAX_NORM = 1.0

Copy = Callable[[int, int, int], object]  # destination, source, bytes


class DeviceMemory:
    """Memory of a GPU, allocated by cudaMalloc."""

    def __init__(self, runtime: Any, nbytes: int) -> None:
        self._runtime = runtime
        self.pointer = int(runtime.malloc(nbytes))

    def close(self) -> None:
        """Free the memory."""
        self._runtime.free(self.pointer)


def on_gpu(stack: ExitStack) -> tuple[Callable[[int], tuple[int, object]], Copy]:
    """Return a function that allocates (address, owner), and a function that copies after all queued work is done."""
    from cupy.cuda import runtime  # noqa: PLC0415  (only --device cuda needs it)

    def allocate(nbytes: int) -> tuple[int, object]:
        memory = DeviceMemory(runtime, nbytes)
        stack.callback(memory.close)
        return memory.pointer, memory

    def copy(destination: int, source: int, nbytes: int) -> None:
        runtime.deviceSynchronize()
        runtime.memcpy(destination, source, nbytes, runtime.memcpyDefault)

    return allocate, copy


def on_cpu(stack: ExitStack) -> tuple[Callable[[int], tuple[int, object]], Copy]:
    """Return the same two functions for memory that processes share."""

    def allocate(nbytes: int) -> tuple[int, object]:
        memory = SharedMemory(create=True, size=nbytes)
        stack.callback(memory.unlink)
        stack.callback(memory.close)  # runs first and releases memory.buf
        owner: Any = memory.buf
        return ctypes.addressof(ctypes.c_char.from_buffer(owner)), owner

    return allocate, ctypes.memmove


def step(device: str, batches: list[dict[str, Any]]) -> tuple[float, float, dict[str, Any]]:
    """Make a step by addresses alone. Return the norm, the factor and the written bits."""
    engine = GradientEngine(GradientLayout.of(SHAPES), device, max_norm=MAX_NORM)
    with ExitStack() as stack:
        allocate, copy = (on_gpu if device == "cuda" else on_cpu)(stack)

        def allocated(name: str) -> RawBuffer:
            size = math.prod(SHAPES[name])
            pointer, owner = allocate(size * np.dtype(BITS[name]).itemsize)
            return RawBuffer(pointer, size, DTYPES[name], device, owner)

        gradients = {name: allocated(name) for name in SHAPES}
        destinations = {name: allocated(name) for name in SHAPES}
        for weight, batch in zip(WEIGHTS, batches, strict=True):
            for name, bits in batch.items():
                copy(gradients[name].pointer, bits.ctypes.data, bits.nbytes)
            engine.add(gradients, weight)
        result = engine.step(out=destinations)
        written = {name: np.empty_like(bits) for name, bits in batches[0].items()}
        for name, bits in written.items():
            copy(bits.ctypes.data, destinations[name].pointer, bits.nbytes)
        return float(result.norm), float(result.factor), written


def to_bits(values: Any, name: str) -> Any:
    """Return the bits of fp32 values in the component's dtype, rounded to nearest, ties to even."""
    # bf16 is the upper half of fp32.
    bits = values.astype(np.float32).view(np.uint32)
    return bits if DTYPES[name] == "float32" else ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_values(bits: Any) -> Any:
    """Return the fp32 values of such bits."""
    return (bits if bits.itemsize == 4 else bits.astype(np.uint32) << 16).view(np.float32)


def main() -> None:
    """Make a step and compare."""
    parser = argparse.ArgumentParser(description="Gradients by their addresses, checked against NumPy.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device, rng = parser.parse_args().device, np.random.default_rng(0)
    batches = [{name: to_bits(rng.standard_normal(shape), name) for name, shape in SHAPES.items()} for _ in WEIGHTS]
    norm, factor, written = step(device, batches)

    first, second = map(np.float32, WEIGHTS)
    sums = {name: first * to_values(batches[0][name]) + second * to_values(batches[1][name]) for name in SHAPES}
    expected = math.sqrt(sum(float(np.sum(np.float64(total) ** 2)) for total in sums.values())) / sum(WEIGHTS)
    expected_factor = min(1, MAX_NORM / expected) / sum(WEIGHTS)  # one factor for clip and average
    print(f"norm {norm:.7f}, by NumPy {expected:.7f}; factor {factor:.9f}, by NumPy {expected_factor:.9f}")
    if not (math.isclose(norm, expected, rel_tol=1e-6) and math.isclose(factor, expected_factor, rel_tol=1e-6)):
        raise SystemExit("the norm or the factor differs")
    for name, total in sums.items():
        different = np.count_nonzero(written[name] != to_bits(total * np.float32(factor), name))
        print(f"{name}: {total.size} elements in {DTYPES[name]} written on {device}, {different} differ from NumPy's")
        if different:
            raise SystemExit(f"'{name}' differs")


if __name__ == "__main__":
    main()
