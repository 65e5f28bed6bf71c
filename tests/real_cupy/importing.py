"""What `import cupy` finds in an environment that `build` has made. Every Python there imports this when it starts.

So it imports nothing else until somebody imports CuPy.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

BUILT = Path(sys.prefix) / "real_cupy"  # the folder of the libraries
RUNTIME = "cupy_backends.cuda.api.runtime"


def install() -> None:
    """From now on, in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        os.environ["CUPY_COMPILE_WITH_PTX"] = "1"  # the driver reads PTX
        os.environ["CUPY_ACCELERATORS"] = ""  # CUB's modules have NVIDIA's runtime in them
        os.environ["CUPY_CACHE_DIR"] = str(BUILT / "kernels")
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == RUNTIME:
            importlib.import_module("real_cupy.running")  # loads the driver, which the module is linked with
            return _spec_of_file(name, BUILT / f"runtime{importlib.machinery.EXTENSION_SUFFIXES[0]}")
        if name == "cupy.cuda.compiler":
            return _spec_with(name, path, importlib.import_module("real_cupy.compiling").carry_sources)
        if name == "cupy":
            return _spec_with(name, path, lambda _: importlib.import_module("real_cupy.pools").install())
        return None


def _spec_of_file(name: str, file: Path) -> importlib.machinery.ModuleSpec | None:
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    return importlib.util.spec_from_file_location(name, file, loader=loader)


def _spec_with(
    name: str, path: Sequence[str] | None, then: Callable[[ModuleType], object]
) -> importlib.machinery.ModuleSpec | None:
    """What would be found without us, and something to be done once it is imported."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return spec
    execute = spec.loader.exec_module

    def execute_then(module: ModuleType) -> None:
        execute(module)
        then(module)

    spec.loader.exec_module = execute_then  # type: ignore[method-assign]
    return spec
