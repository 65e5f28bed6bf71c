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
from gradengine.kernels.device import CudaDevice
from gradengine.kernels.tables import Entry, Table, Tables
from gradengine.kernels.toolkit import compiled

__all__ = ["Launches"]

_THREADS = 256  # as the .cu files say; 512 for finalise
_FINALISE_THREADS = 512
_SIZES = (*CAPACITIES, "table")
_FUNCTIONS = {
    "accumulate": [f"accumulate_{sources}_{size}" for sources in (1, 4) for size in _SIZES],
    "measure": [f"measure_{size}" for size in _SIZES],
    "finalise": ["finalise"],
    "hand_back": [f"hand_back_{size}" for size in _SIZES],
}


@final
class Launches:
    """The kernels of one device, ready to be launched on its current stream.

    Args:
        device: The device; its kernels are compiled here, or come from CuPy's cache.

    Raises:
        DeviceUnavailable: NVRTC or its headers are missing.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.active():
            modules = {name: compiled(device.xp, name) for name in _FUNCTIONS}
        functions = [(name, modules[file]) for file, names in _FUNCTIONS.items() for name in names]
        self._functions = {name: module.get_function(name) for name, module in functions}
        self._tables = Tables(device.upload)
        self._addresses = Addresses(device)

    def table(self, entries: Sequence[Entry], chunk: int) -> Table:
        """The table of these entries, made at the first call."""
        return self._tables.of(entries, chunk)

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
        with self._addresses.turn:
            size, carried = self._addresses.arguments(addresses, weights)
            self._run(f"{function}_{size}", table.blocks, _THREADS, (table.rows, table.targets, *arguments, *carried))

    def finalise(self, arguments: tuple[Any, ...]) -> None:
        """Launch K2: one thread block."""
        self._run("finalise", 1, _FINALISE_THREADS, arguments)

    def _run(self, function: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        self._device.keep(arguments)
        with self._device.active():
            self._functions[function]((blocks,), (threads,), arguments)
