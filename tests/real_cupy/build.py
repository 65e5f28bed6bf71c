"""Builds what real CuPy needs to work without a GPU, and has an environment use it: `python -m real_cupy.build`.

Run by the environment's own Python, which has CuPy's wheel, NVRTC and CUDA's headers, Cython and setuptools. All goes
into <environment>/real_cupy, but for one line in its site-packages that imports `real_cupy.importing` at each start.
The sdist of the same CuPy comes from the package registry; one module of it is compiled: under a minute in all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distributions
from pathlib import Path

from real_cupy.importing import BUILT

_HERE = Path(__file__).parent
_WHEELS = ("cupy-cuda12x", "cupy-cuda13x")

# As CuPy builds its own extensions (install/cupy_builder/_command.py in its sdist), for one of them.
_CYTHONIZE = """
import Cython, sys
from Cython.Build import cythonize
from setuptools import Extension

name = "cupy_backends.cuda.api.runtime"
cythonize(
    [Extension(name, ["cupy_backends/cuda/api/runtime.pyx"], language="c++")],
    language_level=3,
    compiler_directives={
        "embedsignature": True,
        "c_api_binop_methods": True,
        "binding": False,
        "warn.deprecated.IF": False,
        "freethreading_compatible": True,
    },
    compile_time_env={
        "CUPY_USE_CUDA_PYTHON": False,
        "CUPY_CUFFT_STATIC": False,
        "CUPY_HIP_VERSION": 0,
        "CUPY_CYTHON_VERSION": Cython.__version__,
        "CUPY_CUDA_VERSION": int(sys.argv[1]),
    },
)
"""
# What CuPy includes and the runtime's wheel lacks, as far as it is needed.
_HEADERS = {
    "cuda_runtime.h": "#pragma once\n#include <cuda_runtime_api.h>\n#include <driver_functions.h>\n",
    "cuda_profiler_api.h": (
        "#pragma once\n#include <cuda_runtime_api.h>\n"
        'extern "C" cudaError_t cudaProfilerStart(void);\nextern "C" cudaError_t cudaProfilerStop(void);\n'
    ),
}


def run(*command: str, folder: Path | None = None, **environment: str) -> str:
    """Run a command; what it says goes to standard error if it fails."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def installed_wheel() -> tuple[str, str]:
    """Name and version of the CuPy that is installed."""
    found = [wheel for wheel in distributions() if wheel.name in _WHEELS]
    if not found:
        sys.exit(f"none of {', '.join(_WHEELS)} is installed for {sys.executable}")
    return found[0].name, found[0].version


def sources(release: str, folder: Path) -> Path:
    """CuPy's own source of that release, in a folder."""
    found = BUILT / f"cupy-{release}.tar.gz"
    if not found.exists():
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
        only_its_source = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
        # Without the variable, what pip asks the sdist for its metadata looks for a toolkit.
        run(*pip, *only_its_source, "--dest", str(BUILT), f"cupy=={release}", CUPY_INSTALL_USE_STUB="1")
    with tarfile.open(found) as archive:
        wanted = [m for m in archive if m.isfile() and m.name.startswith(f"cupy-{release}/cupy_backends/")]
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # type: ignore[assignment]
        archive.extractall(folder, wanted)
    return folder / f"cupy-{release}"


def include_folders() -> list[Path]:
    """Where CUDA's headers lie: in the wheels of the runtime, and of the compiler (crt/host_defines.h)."""
    site = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = sorted({path.parent for path in site.glob("**/include/cuda.h")})
    crt = sorted({path.parent.parent for path in site.glob("**/include/crt/host_defines.h")})
    if not found or not crt:
        sys.exit(f"CUDA's headers are not in {site}: cuda.h in {found}, crt/host_defines.h in {crt}")
    return [found[0], crt[0]]


def cuda_version(wheel: str, headers: Path) -> int:
    """What the wheel was built for, as CUDA counts: 12090. The headers must be of the same major version."""
    code = "from cupy_backends.cuda.api import driver; print(driver.get_build_version())"
    built_for = int(run(sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"))
    found = re.search(r"#define CUDA_VERSION (\d+)", (headers / "cuda.h").read_text())
    assert found is not None
    if int(found[1]) // 1000 != built_for // 1000:
        sys.exit(f"{wheel} is for CUDA {built_for}, the headers in {headers} are of CUDA {found[1]}")
    return built_for


def build_driver(includes: Sequence[str]) -> None:
    """libcuda.so.1, from the files in driver/."""
    text = "".join(f'#include "{path.name}"\n' for path in sorted((_HERE / "driver").glob("*.cpp")))
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        whole, new = Path(folder) / "driver.cpp", Path(folder) / "libcuda.so.1"
        whole.write_text(text)
        flags = ("-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror")
        run("g++", *flags, f"-I{_HERE / 'driver'}", *includes, str(whole), "-Wl,-soname,libcuda.so.1", "-o", str(new))
        new.replace(BUILT / new.name)  # a process that has the old one keeps it


def build_module(source: Path, cuda: int, includes: Sequence[str]) -> None:
    """CuPy's runtime module, linked with the driver."""
    run(sys.executable, "-c", _CYTHONIZE, str(cuda), folder=source)
    flags = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", '-DCYTHON_EXTERN_C=extern "C"')
    python = f"-I{sysconfig.get_path('include')}"
    linked = (f"-L{BUILT}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN")
    code = "cupy_backends/cuda/api/runtime.cpp"
    out = ("-o", str(BUILT / f"runtime{EXTENSION_SUFFIXES[0]}"))
    run("g++", *flags, *includes, "-Icupy_backends", python, code, *linked, *out, folder=source)


def use_from_now_on() -> None:
    """Every Python of the environment finds our CuPy from its next start on."""
    line = f"{_HERE.parent}\nimport real_cupy.importing as it; it.install()\n"
    (Path(sysconfig.get_path("purelib")) / "real_cupy.pth").write_text(line)


def main() -> None:
    """Build all, and use it."""
    if sys.prefix == sys.base_prefix:
        sys.exit("this changes what `import cupy` means: only in a virtual environment of its own")
    BUILT.mkdir(exist_ok=True)
    wheel, release = installed_wheel()
    headers = include_folders()
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        for name, text in _HEADERS.items():
            (Path(folder) / name).write_text(text)
        includes = [f"-I{path}" for path in (folder, *headers)]
        build_driver(includes)
        build_module(sources(release, Path(folder)), cuda_version(wheel, headers[0]), includes)
    use_from_now_on()
    print(f"{wheel} {release} works without a GPU in {sys.prefix}")


if __name__ == "__main__":
    main()
