"""NVRTC and nvdisasm from their wheels: the kernels compiled and read as a GPU gets them, where there is none.

NVRTC needs no driver, and seven of its functions suffice, so they are called through ctypes: no binding to install.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gradengine.kernels import toolchain

MAJORS = (12, 13)  # one for each extra that brings CuPy
_OF_BOTH = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
ARCHITECTURES = {12: _OF_BOTH, 13: (*_OF_BOTH[:-2], "sm_110", *_OF_BOTH[-2:])}  # what each can compile for

# What CuPy 14 passes for our RawModule, in its order. It also names folders of headers; the kernels include none.
CUPY_OPTIONS = ("--std=c++17", "-ftz=true", "-arch={architecture}", "--device-as-default-execution-space")
VERBOSE = "--ptxas-options=-v"  # registers, stack and spills go to the log; the code stays the same


class CompileError(Exception):
    """NVRTC refused a source; its log."""


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of one kernel.

    Attributes:
        name: As the launcher calls it.
        registers: Of each thread.
        shared: Bytes of static shared memory.
        arguments: Bytes of all arguments, those by value included.
        code: Bytes of instructions.
        stack: Bytes of each thread's stack frame; more than 0 is memory traffic that the source does not show.
        spill_stores: Bytes that went to memory because registers ran out.
        spill_loads: The same on the way back.
    """

    name: str
    registers: int
    shared: int
    arguments: int
    code: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Compiled:
    """One .cu file for one architecture."""

    cubin: bytes
    ptx: str
    log: str
    kernels: dict[str, Kernel]


def names() -> list[str]:
    """The .cu files."""
    folder = resources.files("gradengine.kernels")
    return sorted(path.name.removesuffix(".cu") for path in folder.iterdir() if path.name.endswith(".cu"))


def kernels_of(name: str) -> list[str]:
    """The kernels that a .cu file defines, by its text: `extern "C"` functions, and what macros make such of."""
    text = re.sub(r"//.*", "", toolchain.source(name)).replace("\\\n", " ")
    macros = re.findall(r'^#define (\w+)\(.*extern "C"', text, re.MULTILINE)
    text = re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    kernels = re.findall(r'extern "C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(', text)
    for macro in macros:
        kernels += re.findall(rf"^{macro}\((\w+)", text, re.MULTILINE)
    return kernels


# ---- the compiler ----


@functools.cache
def library(major: int) -> ctypes.CDLL | None:
    """NVRTC of a major version of CUDA: from its wheel, or from where the system keeps its libraries."""
    file = f"libnvrtc.so.{major}"
    candidates = [*map(str, _in_packages(f"nvidia/*/lib/{file}")), file]
    return next(filter(None, map(_loaded, candidates)), None)


def _loaded(path: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(path)
    except OSError:
        return None


@functools.cache
def compiled(major: int, name: str, architecture: str) -> Compiled:
    """One .cu file, compiled as CuPy would on that architecture; see `compiled_text`."""
    return compiled_text(major, toolchain.source(name), name, architecture)


def compiled_text(major: int, text: str, name: str, architecture: str) -> Compiled:
    """A source of that name, compiled as CuPy would on that architecture.

    Raises:
        CompileError: The source is refused, by the compiler or by the assembler.
    """
    nvrtc = library(major)
    if nvrtc is None:
        raise FileNotFoundError(f"NVRTC {major} is not installed")
    options = [option.format(architecture=architecture).encode() for option in (*CUPY_OPTIONS, VERBOSE)]
    program = ctypes.c_void_p()
    file = f"{name}.cu".encode()
    _succeed(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file, 0, None, None))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _text(nvrtc, "ProgramLog", program).rstrip(b"\0").decode()
        if status:
            raise CompileError(f"{name}.cu for {architecture}:\n{log}")
        cubin, ptx = _text(nvrtc, "CUBIN", program), _text(nvrtc, "PTX", program).rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Compiled(cubin, ptx, log, _kernels(cubin, log))


def _succeed(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(nvrtc.nvrtcGetErrorString(status).decode())


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _succeed(nvrtc, nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _succeed(nvrtc, nvrtc[f"nvrtcGet{what}"](program, text))
    return text.raw


def _in_packages(pattern: str) -> Iterator[Path]:
    for folder in sys.path:
        yield from sorted(Path(folder or ".").glob(pattern))


# ---- what it says, and what it made ----

_PROPERTIES = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_PARAMETERS_SIZE = 0x19  # EIATTR_CBANK_PARAM_SIZE, as `cuobjdump -elf` calls it
_WITH_DATA = 4  # EIFMT_SVAL: the attribute's half word is the length of what follows; else it is the value itself


def _kernels(cubin: bytes, log: str) -> dict[str, Kernel]:
    sections = dict(_sections(cubin))
    found = {}
    for match in _PROPERTIES.finditer(log):
        name, shared = match["name"], re.search(r"(\d+) bytes smem", match["rest"])
        found[name] = Kernel(
            name,
            registers=int(match["registers"]),
            shared=int(shared[1]) if shared else 0,
            arguments=_attribute(sections[f".nv.info.{name}"], _PARAMETERS_SIZE),
            code=len(sections[f".text.{name}"]),
            stack=int(match["stack"]),
            spill_stores=int(match["stores"]),
            spill_loads=int(match["loads"]),
        )
    return found


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an ELF file's sections, those that lie in the file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    # name, kind, offset and length: words 0, 1, 6 and 8 (offset and length take two each)
    headers = [struct.unpack_from("<2I16x2Q", cubin, table + size * i) for i in range(count)]
    strings = headers[of_names][2]
    for name, kind, offset, length in headers:
        start = strings + name
        if kind != 8:  # SHT_NOBITS: shared memory
            yield cubin[start : cubin.index(b"\0", start)].decode(), cubin[offset : offset + length]


def _attribute(info: bytes, wanted: int) -> int:
    at = 0
    while at < len(info):
        kind, number, value = struct.unpack_from("<2BH", info, at)
        if number == wanted:
            return int(value)
        at += 4 + (value if kind == _WITH_DATA else 0)
    raise LookupError(f"the cubin has no attribute {wanted:#x}")


# ---- the instructions ----

_RESULTS = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?((?:add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt|cvt|cvta|neg|min|max|ex2|lg2|sin|cos|tanh)"
    r"[.\w]*\.b?f(?:16|16x2|32|64)(?:\.\w+)*)\b",
    re.MULTILINE,
)


def float_arithmetic(ptx: str) -> set[str]:
    """The PTX instructions with a result that may be rounded or flushed, such as `add.rn.f32`."""
    return set(_RESULTS.findall(ptx))


@functools.cache
def disassembler() -> str | None:
    """Where nvdisasm is: from its wheel, from triton's, or on PATH."""
    candidates = [*_in_packages("nvidia/*/bin/nvdisasm"), *_in_packages("triton/backends/nvidia/bin/nvdisasm")]
    return str(candidates[0]) if candidates else shutil.which("nvdisasm")


@functools.cache
def instructions(major: int, name: str, architecture: str) -> dict[str, list[str]]:
    """Opcodes with their modifiers, such as `LDG.E.128`, in the order of the code, for each kernel of a .cu file."""
    return {
        kernel: [found["opcode"] for found in _INSTRUCTION.finditer(code)]
        for kernel, code in listings(compiled(major, name, architecture).cubin).items()
    }


_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;\n]*)", re.MULTILINE
)
_LABEL = re.compile(r"^\.L\w+:", re.MULTILINE)
_REGISTER = re.compile(r"\bR(\d+)")
_GO_ELSEWHERE = {"BRA", "BRX", "JMP", "CALL", "RET", "EXIT"}


def runs_of_loads(code: str, bits: int = 128) -> Iterator[int]:
    """How many loads of so many bits are issued before what one of them brings is used, run by run as the code goes.

    Only straight code counts: a branch, or a label that one may go to, ends a run.
    """
    for block in _LABEL.split(code):
        loads, arriving = 0, set[int]()  # the registers that they fill
        for found in _INSTRUCTION.finditer(block):
            touched = [int(register) for register in _REGISTER.findall(found["operands"])]
            opcode, *modifiers = found["opcode"].split(".")
            if loads and (arriving.intersection(touched) or opcode in _GO_ELSEWHERE):
                yield loads
                loads, arriving = 0, set()
            if opcode == "LDG" and str(bits) in modifiers:
                loads, arriving = loads + 1, arriving | {*range(touched[0], touched[0] + bits // 32)}
        if loads:
            yield loads


def listings(cubin: bytes) -> dict[str, str]:
    """Each kernel's code, as nvdisasm writes it."""
    tool = disassembler()
    if tool is None:
        raise FileNotFoundError("nvdisasm is not installed")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--print-code", "--no-dataflow", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.split(r"^\.text\.(\w+):$", listing, flags=re.MULTILINE)[1:]
    return dict(zip(functions[::2], functions[1::2], strict=True))
