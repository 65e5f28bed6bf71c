"""Every kernel as a GPU will get it, without one: compiled with CuPy's flags for each architecture, then read.

`make compile-check` brings the compilers of CUDA 12 and 13 and the disassembler, and lets none of these tests skip.
"""

import contextlib
import os
import re
from collections import Counter

import numpy as np
import nvrtc
import pytest
import strategies as draw

from gradengine import elementwise
from gradengine.arrays.buffer import Buffer
from gradengine.kernels import CudaKernels, toolchain

MAY_SKIP = "COMPILE_CHECK" not in os.environ  # as `make compile-check` sets it
REGISTERS_OF_AN_SM = 65536
LEAST_THREADS_OF_AN_SM = 512
ARGUMENTS_ANY_DRIVER_TAKES, ARGUMENTS_CUDA_12_1_TAKES = 4096, 32764

SMALL = ("finalise", "tally", "judge")  # a thread block, or a thread
STREAMING = [name for name in nvrtc.names() if name not in SMALL]  # these move gradients, sixteen bytes at a time
WRITING = [name for name in STREAMING if name != "measure"]
UNIT = int(re.search(r"UNIT = (\d+)", toolchain.source("measure"))[1])


def need(found: object, what: str) -> None:
    if not found:
        (pytest.skip if MAY_SKIP else pytest.fail)(f"{what} is not installed")


# A process for each compiler: what one has compiled, all tests of that process read.
def of_major(major: int, architecture: str):
    mark = pytest.mark.xdist_group(f"CUDA-{major}")
    return pytest.param((major, architecture), id=f"CUDA-{major}-{architecture}", marks=mark)


@pytest.fixture(scope="module", params=[of_major(m, a) for m in nvrtc.MAJORS for a in nvrtc.ARCHITECTURES[m]])
def made_for(request) -> tuple[int, str]:
    """A compiler's major version of CUDA and an architecture that it knows."""
    need(nvrtc.library(request.param[0]), "NVRTC")
    return request.param


@pytest.fixture
def compiled(made_for, name) -> nvrtc.Compiled:
    major, architecture = made_for
    return nvrtc.compiled(major, name, architecture)


@pytest.fixture
def instructions(made_for, name) -> dict[str, Counter]:
    need(nvrtc.disassembler(), "nvdisasm")
    major, architecture = made_for
    return {kernel: Counter(codes) for kernel, codes in nvrtc.instructions(major, name, architecture).items()}


def of(codes: Counter, first: str, *others: str) -> int:
    """How many instructions have this opcode and all these modifiers."""
    return sum(
        count for code, count in codes.items() if first == code.split(".")[0] and {*others} <= {*code.split(".")}
    )


@pytest.mark.parametrize("name", nvrtc.names())
class TestCompiled:
    def test_every_kernel_of_the_source_is_there_without_a_warning(self, compiled, name):
        assert nvrtc.kernels_of(name)
        assert sorted(compiled.kernels) == sorted(nvrtc.kernels_of(name))
        assert "warning" not in compiled.log.lower(), compiled.log

    def test_nothing_lives_in_a_stack_frame_and_registers_do_not_spill(self, compiled):
        for kernel in compiled.kernels.values():
            assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0), kernel

    def test_registers_leave_room_for_512_threads(self, compiled):
        for kernel in compiled.kernels.values():
            assert kernel.registers * LEAST_THREADS_OF_AN_SM <= REGISTERS_OF_AN_SM, kernel

    def test_arguments_fit_into_a_launch(self, compiled):
        for kernel in compiled.kernels.values():
            takes_32_kb = kernel.name.endswith("_large")
            assert kernel.arguments <= (ARGUMENTS_CUDA_12_1_TAKES if takes_32_kb else ARGUMENTS_ANY_DRIVER_TAKES), (
                kernel
            )


class Recorder:
    """Stands for CuPy where kernels are asked for, and writes down what would be compiled."""

    def __init__(self):
        self.sources = {}

    def ElementwiseKernel(self, inputs, outputs, operation, name, *, preamble, no_return):
        """The function that CuPy generates, as far as our text meets the compiler: each array as a reference to one
        of its elements, each scalar as it is."""
        types = {"float32": "float", "uint16": "unsigned short"}
        parameters = [parameter.split() for parameter in [*filter(None, inputs.split(", ")), outputs]]
        arrays = [(types[t], p) for t, p in parameters if p in {"source", "target"}]
        scalars = [(types[t], p) for t, p in parameters if p not in {"source", "target"}]
        arguments = [f"{t}* {p}_all" for t, p in arrays] + [f"const {t} {p}" for t, p in scalars]
        elements = "".join(f"  {t}& {p} = {p}_all[i];\n" for t, p in arrays)
        self.sources[name, inputs, outputs, operation] = (
            f'{preamble}\nextern "C" __global__ void {name}({", ".join(arguments)}, long long n) {{\n'
            f"  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n  if (i >= n) return;\n"
            f"{elements}  {operation};\n}}\n"
        )
        return lambda *arguments: None


class NoDevice:
    """A device whose arrays are an address and a dtype."""

    def view(self, given, _):
        address, dtype = given
        return Buffer(address, 8, dtype, (8,), True, None, "cuda:0")

    writable_view = view

    def on(self, _=None):
        return contextlib.nullcontext()

    active = on

    def storage_array(self, buffer):
        return np.empty(0, np.float32 if buffer.dtype == "float32" else np.uint16)

    def give_back(self, *_):
        pass


@pytest.fixture(scope="module")
def elementwise_sources():
    recorder, kernels = Recorder(), object.__new__(CudaKernels)
    kernels.xp, kernels.device = recorder, NoDevice()
    elementwise._kernel.cache_clear()
    for dtype in draw.DTYPES:
        elementwise.add((0, "float32"), (64, dtype), 0.5, device=kernels)
        elementwise.scale((0, dtype), 0.5, device=kernels)
        elementwise.fill((0, dtype), 0.5, device=kernels)
        for destination in draw.DTYPES:
            elementwise.cast((64, dtype), (0, destination), device=kernels)
    elementwise._kernel.cache_clear()
    return recorder.sources


def test_the_elementwise_kernels_compile_and_keep_subnormals(made_for, elementwise_sources):
    major, architecture = made_for
    assert len(elementwise_sources) == 3 + 3 + 3 + 9
    for text in elementwise_sources.values():
        compiled = nvrtc.compiled_text(major, text, "elementwise", architecture)
        (kernel,) = compiled.kernels.values()
        assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0), text
        assert "warning" not in compiled.log.lower(), compiled.log
        assert nvrtc.float_arithmetic(compiled.ptx) == arithmetic_of(text), text


def arithmetic_of(text):
    """What an elementwise kernel may do: each operation that its text names, rounded to nearest, flushing nothing."""
    named = {
        r"gradengine::add\(": "add.rn.f32",
        r"gradengine::multiply\(": "mul.rn.f32",
        r"gradengine::widened\(\w+, gradengine::FLOAT16": "cvt.f32.f16",
        r"gradengine::rounded\(.*, gradengine::FLOAT16\);": "cvt.rn.f16.f32",
    }
    return {instruction for pattern, instruction in named.items() if re.search(pattern, text)}


# All that a kernel adds, multiplies and converts, for every architecture: a GPU runs this inline PTX where the emulator
# runs C++. fp64 is rounded to nearest where nothing is said; .ftz is for squares in fp32 alone.
WIDENED, SQUARES = {"cvt.f32.f16"}, {"fma.rn.ftz.f32", "cvt.f64.f32", "fma.rn.f64", "add.f64"}
STATISTICS = {"sub.f64", "fma.rn.f64", "rcp.rn.f64", "cvt.rn.f64.u64"}  # mean and variance of the norms
ARITHMETIC = {
    "accumulate": {*WIDENED, "mul.rn.f32", "add.rn.f32", *SQUARES},
    "measure": {*WIDENED, *SQUARES},
    "finalise": {*WIDENED, "add.f64", "sqrt.rn.f64", "div.rn.f64", "cvt.rn.f32.f64", "cvt.f64.f32", *STATISTICS},
    "tally": {"add.f64", "cvt.rn.f64.u64"},
    "judge": {"add.f64", "cvt.f64.f32"},
    "hand_back": {*WIDENED, "mul.rn.f32", "cvt.rn.f16.f32"},
}
OR_FUSED = {"mul.f64"}  # the first of eight squares, where the compiler does not add it to zero


@pytest.mark.parametrize("name", nvrtc.names())
def test_every_operation_is_rounded_to_nearest_and_flushes_nothing_but_squares(compiled, name):
    assert nvrtc.float_arithmetic(compiled.ptx) - OR_FUSED == ARITHMETIC[name]


@pytest.mark.parametrize("name", nvrtc.names())
def test_the_assembler_rounds_to_nearest_too(instructions, name):
    """But within the division and the square root of fp64, whose own steps round as they must."""
    singles = ("FADD", "FMUL", "FFMA", "F2F", "F2FP", "HADD2", "HMUL2", "HFMA2")
    doubles = () if name in SMALL else ("DADD", "DMUL", "DFMA")
    for kernel, codes in instructions.items():
        found = sum(of(codes, opcode, mode) for opcode in (*singles, *doubles) for mode in ("RZ", "RM", "RP"))
        assert not found, kernel


@pytest.mark.parametrize("name", nvrtc.names())
class TestInstructions:
    def test_no_address_is_generic_and_nothing_is_in_local_memory(self, instructions, name):
        assert sorted(instructions) == sorted(nvrtc.kernels_of(name))
        for kernel, codes in instructions.items():
            assert not sum(of(codes, opcode) for opcode in ("LD", "ST", "LDL", "STL")), kernel

    def test_nothing_is_atomic(self, instructions):
        """The order of a sum would be another in each run."""
        for kernel, codes in instructions.items():
            assert not sum(of(codes, opcode) for opcode in ("ATOM", "ATOMG", "ATOMS", "RED", "REDG")), kernel


@pytest.mark.parametrize("name", STREAMING)
def test_gradients_are_read_sixteen_bytes_at_a_time(instructions):
    for kernel, codes in instructions.items():
        assert of(codes, "LDG", "128"), kernel


@pytest.mark.parametrize("name", WRITING)
def test_gradients_are_written_sixteen_bytes_at_a_time(instructions):
    for kernel, codes in instructions.items():
        assert of(codes, "STG", "128"), kernel


# How many loads are issued before what one of them brings is used, in the loops of fp32, fp16 and bf16: accumulating
# takes two of the arena and two or one of each source, measuring two units of fp32 at once or four of short dtypes.
AT_ONCE = {"accumulate_1": [2 + 2, 2 + 1, 2 + 1], "accumulate_4": [2 + 8, 2 + 4, 2 + 4], "measure": [2 * 2, 4, 4]}
# Thread blocks of 256 threads that a multiprocessor has room for.
BLOCKS = {"accumulate_1": 5, "accumulate_4": 3, "measure": 4, "hand_back": 5}
MOST_BLOCKS = {"sm_75": 4}  # whatever the registers
REGISTERS_BY = 8  # a thread is given as many, or twice, ...


@pytest.mark.parametrize("name", ["accumulate", "measure"])
def test_all_loads_of_a_unit_are_issued_before_one_is_waited_for(compiled):
    need(nvrtc.disassembler(), "nvdisasm")
    for kernel, code in nvrtc.listings(compiled.cubin).items():
        found = sorted(nvrtc.runs_of_loads(code), reverse=True)
        assert found[:3] == AT_ONCE[kernel.rpartition("_")[0]], kernel


@pytest.mark.parametrize("name", STREAMING)
def test_registers_leave_room_for_thread_blocks_with_enough_loads(compiled, made_for):
    for kernel in compiled.kernels.values():
        blocks = min(BLOCKS[kernel.name.rpartition("_")[0]], MOST_BLOCKS.get(made_for[1], 5))
        given = -(-kernel.registers // REGISTERS_BY) * REGISTERS_BY
        assert given * 256 * blocks <= REGISTERS_OF_AN_SM, kernel


@pytest.mark.parametrize("name", ["finalise"])
def test_a_warp_asks_for_four_components_at_once_and_for_sixteen_rows(compiled):
    """For their sizes, then for four rows of each, before it adds any; then for more of each. First for two weights."""
    need(nvrtc.disassembler(), "nvdisasm")
    (code,) = nvrtc.listings(compiled.cubin).values()
    assert [*nvrtc.runs_of_loads(code, bits=64)][:8] == [1, 1, 1, 4, *[16] * 4]


# Subnormals are kept though CuPy asks to flush them. What may flush are eight squares added in fp32, which are thrown
# away where they are too small to be exact: UNIT fused multiply-adds, and a multiplication by 1 in front of their
# sum's way to fp64.


@pytest.mark.parametrize("name", nvrtc.names())
def test_only_sums_of_squares_flush_subnormals(instructions, name):
    for kernel, codes in instructions.items():
        squares = of(codes, "FFMA", "FTZ")
        assert bool(squares) == (name in {"accumulate", "measure"}), kernel
        assert squares % UNIT == 0, kernel
        assert of(codes, "FMUL", "FTZ") <= squares // UNIT, kernel
        assert not sum(of(codes, opcode, "FTZ") for opcode in ("FADD", "F2F", "F2FP")), kernel


@pytest.mark.parametrize("name", STREAMING)
def test_no_product_is_fused_with_a_sum_but_in_sums_of_squares(instructions):
    """It would have other bits than the host's."""
    for kernel, codes in instructions.items():
        assert of(codes, "FFMA") == of(codes, "FFMA", "FTZ"), kernel


@pytest.mark.parametrize("name", ["accumulate"])
def test_each_micro_batch_is_multiplied_and_added_by_itself(instructions):
    for kernel, codes in instructions.items():
        micro_batches = int(kernel.split("_")[1])
        assert of(codes, "FMUL") - of(codes, "FMUL", "FTZ") >= UNIT * micro_batches, kernel
        assert of(codes, "FADD") >= UNIT * micro_batches, kernel


@pytest.mark.parametrize("name", ["hand_back"])
def test_handing_back_multiplies_and_nothing_else(instructions):
    for kernel, codes in instructions.items():
        assert of(codes, "FMUL") >= UNIT, kernel
        assert not of(codes, "FADD") + of(codes, "FFMA"), kernel
