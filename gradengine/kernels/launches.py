"""A device's compiled kernels, and what travels with a launch: a table of what it works on, addresses, arguments.

Grids are one thread block for each chunk of each component (`Table.rows`), so that the work of a launch is spread
evenly whatever the tensors' sizes are: 12,190 blocks for the 350M layout, 6 to 84 for a LoRA block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.kernels.addresses import CAPACITIES, Addresses
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.tables import Entry, Table, Tables
from gradengine.kernels.toolchain import compiled, takes_large_arguments

__all__ = ["Launches"]

_THREADS = 256  # as the .cu files say; 512 for finalise
_FINALISE_THREADS = 512
_FILES = ("accumulate", "measure", "finalise", "hand_back")


@final
class Launches:
    """The kernels of one device, ready to be launched on its current stream.

    Args:
        device: The device; its kernels are compiled here, or come from CuPy's cache.

    Raises:
        DeviceUnavailable: NVRTC or its headers are missing.
    """

    def __init__(self, device: CudaRuntime) -> None:
        self._device = device
        takes_32_kb = takes_large_arguments(device.xp)
        capacities = CAPACITIES if takes_32_kb else {"small": CAPACITIES["small"]}
        with device.active():
            modules = {file: compiled(device.xp, file, large_arguments=takes_32_kb) for file in _FILES}
        functions = [(name, modules[file]) for file in _FILES for name in _functions_of(file, (*capacities, "table"))]
        self._functions = {name: module.get_function(name) for name, module in functions}
        self._tables = Tables(device.upload, device.kept.dropped)
        self._addresses = Addresses(device, capacities)

    def table(self, entries: Sequence[Entry], chunk: int) -> Table:
        """The table of these entries, made at the first call."""
        return self._tables.of(entries, chunk, self._device.giving_stream().ptr)

    def over(
        self,
        table: Table,
        function: str,
        arguments: tuple[Any, ...],
        addresses: npt.NDArray[np.uint64],
        weights: Sequence[np.float32] = (),
    ) -> None:
        """Launch a kernel over a table's rows.

        Args:
            table: What it works on.
            function: Its name, without the size of what carries the addresses.
            arguments: What stands between the table and the addresses.
            addresses: As the kernel reads them, flat.
            weights: What travels beside them.
        """
        if not table.blocks:  # CuPy makes a grid of one block out of an empty one
            return
        size, carried = self._addresses.arguments(addresses, weights)
        self._run(f"{function}_{size}", table.blocks, _THREADS, (table.rows, table.targets, *arguments, *carried))
        self._device.used(table.uses, table.born)

    def finalise(self, arguments: tuple[Any, ...]) -> None:
        """Launch K2: one thread block."""
        self._run("finalise", 1, _FINALISE_THREADS, arguments)

    def _run(self, function: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        self._device.keep(arguments)
        with self._device.active():
            self._functions[function]((blocks,), (threads,), arguments)


def _functions_of(file: str, sizes: Sequence[str]) -> list[str]:
    if file == "finalise":
        return [file]
    names = ("accumulate_1", "accumulate_4") if file == "accumulate" else (file,)
    return [f"{name}_{size}" for name in names for size in sizes]
