"""The emulator does what CUDA promises, in every order, and finds what CUDA does not promise to bear."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass

import cuda_emulator
import numpy as np
import pytest

from gradengine.kernels import toolchain

ORDERS = [{"order": "forward"}, {"order": "reverse"}, {"order": "random", "seed": 1}]
# CuPy's memory comes in pieces of 512 bytes: after these 4,000 bytes nobody else's begin at once.
X = np.random.default_rng(1).integers(1, 9, 1000).astype(np.float32)


@pytest.fixture
def xp(emulated):
    return emulated.kernels.xp


def finds(xp, launch) -> str:
    """What is found in a launch, which has to fail."""
    from real_cupy.loaded import expected_faults

    def launch_and_wait():
        launch()
        xp.cuda.Device().synchronize()

    errors = xp.cuda.runtime.CUDARuntimeError, xp.cuda.driver.CUDADriverError
    with expected_faults() as faults, pytest.raises(errors):
        launch_and_wait()
    return "\n".join(faults)


# ---- seeded bugs: each must be found, and what differs from it only by being right must pass ----


@dataclass(frozen=True)
class Case:
    """A kernel's body, how it is launched, and the finding it must give; None: the values of `out`."""

    body: str
    finds: str | None
    size: int = 1
    grid: int = 1
    block: int = 64
    shared_mem: int = 0
    expected: Callable[[], np.ndarray] | None = None


REDUCTION = """
  __shared__ float s[256];
  s[t] = x[blockIdx.x * 256 + t];
  FIRST;
  for (int k = 128; k > 0; k >>= 1) {
    if (t < k) s[t] += s[t + k];
    EACH;
  }
  if (t == 0) out[blockIdx.x] = s[0];
"""
REVERSAL = "__shared__ float s[64]; s[t] = x[t]; BETWEEN; out[t] = s[blockDim.x - 1 - t];"


def filled(template, **words):
    for word, text in words.items():
        template = template.replace(word, text)
    return template


BARRIER = "__syncthreads()"
TOO_EARLY = "race|uninitialised shared memory"  # which of them is met first depends on the order
SHUFFLE = "float value = x[t]; if (t < 16) value += __shfl_down_sync(MASK, value, 8); out[t] = value;"
CASES = {
    "reduction": Case(
        filled(REDUCTION, FIRST=BARRIER, EACH=BARRIER),
        None,
        2,
        grid=2,
        block=256,
        expected=lambda: X[:512].reshape(2, 256).sum(1),
    ),
    "no_barrier": Case(filled(REDUCTION, FIRST="", EACH=""), TOO_EARLY, 2, grid=2, block=256),
    "syncwarp": Case(filled(REVERSAL, BETWEEN="__syncwarp()"), None, 32, block=32, expected=lambda: X[:32][::-1]),
    "no_syncwarp": Case(filled(REVERSAL, BETWEEN=""), TOO_EARLY, 32, block=32),
    "atomic_sum": Case("atomicAdd(out, x[t]);", None, expected=lambda: X[:64].sum()[None]),
    "plain_sum": Case("out[0] += x[t];", "race"),
    "blocks_overlap": Case(
        "for (int i = t; i < 65; i += blockDim.x) out[blockIdx.x * 64 + i] = x[i];",
        "race: .* conflicts with block",
        193,
        grid=3,
        block=32,
    ),
    "reads_beyond": Case(
        "const int i = blockIdx.x * 64 + t; if (i <= 136 && x[864 + i] == 1e30f) out[0] = 1;",
        r"out of bounds: 4-byte read .* \[block \(2,0,0\) thread \(8,0,0\)\], grid \(3, 1, 1\), block \(64, 1, 1\)",
        grid=3,
    ),
    "writes_beyond": Case("if (t <= 50) out[t] = 1;", "^writes_beyond: .*out of bounds: 4-byte write", 50),
    "misaligned": Case(
        """
          const float4 four = *reinterpret_cast<const float4*>(x + 1 + 4 * t);
          *reinterpret_cast<float4*>(out + 4 * t) = four;""",
        "misaligned: .*float4",
        64,
        block=16,
    ),
    "static_shared_too_small": Case(
        "__shared__ float s[32]; s[t] = x[t]; __syncthreads(); out[t] = s[63 - t];",
        r"out of bounds: index \d+ of 'float \[32\]'",
        64,
    ),
    "dynamic_shared_too_small": Case(
        "extern __shared__ float d[]; d[t] = x[t]; __syncthreads(); out[t] = d[63 - t];",
        "out of bounds",
        64,
        shared_mem=128,
    ),
    "shared_never_written": Case(
        "__shared__ float s[64]; if (t < 60) s[t] = x[t]; __syncthreads(); out[t] = s[63 - t];",
        "uninitialised shared memory",
        64,
    ),
    "divergent_barrier": Case(
        """
          __shared__ float s[64];
          s[t] = x[t];
          if (t < 32) {
            __syncthreads();
            out[t] = s[t + 32];
          } else {
            __syncthreads();
            out[t] = s[t - 32];
          }""",
        "divergent barrier: threads wait at __syncthreads.. of lines",
        64,
    ),
    "return_before_a_barrier": Case(
        "__shared__ float s[64]; if (t >= 40) return; s[t] = x[t]; __syncthreads(); out[t] = s[39 - t];",
        r"divergent barrier: .* after 24 thread\(s\) of the block had returned",
        64,
    ),
    "shuffle_without_all_lanes": Case(filled(SHUFFLE, MASK="~0u"), "deadlock", 32, block=32),
    "shuffle_from_a_lane_outside_the_mask": Case(
        filled(SHUFFLE, MASK="0xffffu"), "shuffle at line .* reads lane 16, which takes no part", 32, block=32
    ),
    "writes_to_a_parameter": Case("const_cast<int&>(sizes.n[1]) = 3;", "to a kernel's parameters", block=1),
    "partial_words_overlap": Case(
        """
          unsigned short* half = reinterpret_cast<unsigned short*>(out);
          if (t < 63) half[t + 1] = 1;
          if (t == 0) *reinterpret_cast<unsigned*>(half + 62) = 7;""",
        "race",
        32,
    ),
    "assertion": Case("\n  assert(t != 7);", r"assert\(t != 7\) failed at line"),
}
KERNEL = """
extern "C" __global__ void NAME(const float* x, float* out, const __grid_constant__ Sizes sizes) {
  const int t = threadIdx.x;
BODY
}
"""
SIZES = np.zeros((), [("n", "<i4", 4)])
PRELUDE = """
#ifndef __CUDA_EMU__
#define assert(condition)
#endif
struct Sizes { int n[4]; };
"""
BUGS = PRELUDE + "".join(filled(KERNEL, NAME=name, BODY=case.body) for name, case in CASES.items())


def launched(xp, name, case):
    """What a case's kernel has written."""
    out = xp.zeros(case.size, np.float32)
    kernel = xp.RawModule(code=BUGS).get_function(name)
    kernel((case.grid,), (case.block,), (xp.asarray(X), out, SIZES), shared_mem=case.shared_mem)
    return out.get()


@pytest.mark.parametrize("name", CASES)
def test_a_bug_is_found_and_its_correction_passes_in_every_order(xp, name):
    case = CASES[name]
    for how in ORDERS:
        with cuda_emulator.options(**how):
            if case.finds is None:
                np.testing.assert_array_equal(launched(xp, name, case).view(np.uint32), as_bits(case.expected()))
            else:
                found = finds(xp, lambda: launched(xp, name, case))
                assert re.search(case.finds, found), found


def as_bits(values):
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def test_only_strict_refuses_a_barrier_after_a_return(xp):
    name = "return_before_a_barrier"
    with cuda_emulator.options(strict=False):
        np.testing.assert_array_equal(launched(xp, name, CASES[name])[:40], X[:40][::-1])


def test_an_unchecked_kernel_may_look_beyond_and_its_crash_is_an_error(xp):
    kernel = xp.RawKernel('extern "C" __global__ void fault(int* x) { *x = 1; }', "fault")
    with cuda_emulator.options(check=False):
        launched(xp, "blocks_overlap", CASES["blocks_overlap"])
        assert "SIGSEGV at 0x8" in finds(xp, lambda: kernel((1,), (1,), (np.uint64(8),)))


def test_a_kernel_that_uses_memory_after_it_was_freed_is_found(xp):
    runtime = xp.cuda.runtime
    kernel = xp.RawKernel('extern "C" __global__ void late(float* x) { *x = 1; }', "late")
    address = runtime.malloc(4)
    runtime.free(address)
    found = finds(xp, lambda: kernel((1,), (1,), (np.uint64(address),)))
    assert re.search("is in no array|SIGSEGV", found), found


def test_a_kernel_that_never_ends_is_stopped(xp):
    kernel = xp.RawKernel('extern "C" __global__ void spin(volatile int* x) { while (*x) {} }', "spin")
    with cuda_emulator.options(timeout=1):
        found = finds(xp, lambda: kernel((1,), (1,), (xp.ones(1, np.int32),)))
    assert "timeout: the launch ran longer than 1 s" in found


def test_a_parameter_that_the_two_compilers_see_differently_is_found(xp):
    code = """
    #ifdef __CUDA_EMU__
    typedef double Number;
    #else
    typedef float Number;
    #endif
    extern "C" __global__ void f(Number x) {}"""
    found = finds(xp, lambda: xp.RawKernel(code, "f")((1,), (1,), (np.float32(1),)))
    assert "parameters have [4] bytes in PTX, [8] by g++" in found


# ---- what kernels may rely on, whatever the order of threads and blocks ----

SEMANTICS = """
extern "C" __global__ void warp_maximum(const int* x, int* y) {
  const int t = threadIdx.y * blockDim.x + threadIdx.x;
  double value = 0.5 * x[t];
  for (int lanes = 16; lanes; lanes >>= 1) value = fmax(value, __shfl_xor_sync(~0u, value, lanes));
  y[t] = (int)(2 * value);
}
extern "C" __global__ void half_warps(const int* x, int* y) {
  const int t = threadIdx.y * blockDim.x + threadIdx.x;
  int value = x[t];
  if ((t & 31) < 16) {
    for (int lanes = 8; lanes; lanes >>= 1) value += __shfl_xor_sync(0xffffu, value, lanes);
  } else {
    for (int lanes = 8; lanes; lanes >>= 1) value = max(value, __shfl_xor_sync(0xffff0000u, value, lanes));
  }
  y[t] = value;
}
extern "C" __global__ void maximum(const int* x, int* out) {
  const int t = threadIdx.y * blockDim.x + threadIdx.x;
  int seen = *reinterpret_cast<volatile int*>(out), expected;
  do {
    expected = seen;
    if (expected >= x[t]) break;
    seen = atomicCAS(out, expected, x[t]);
  } while (expected != seen);
}
extern "C" __global__ void bits(unsigned* y) {
  y[0] = __funnelshift_r(0x44332211u, 0x88776655u, 8);
  y[1] = sizeof(float4) + 100 * alignof(float4) + 10000 * alignof(uint2) + 1000000 * sizeof(uint3);
  y[2] = min(3, 5u) + 10 * max(2ll, 4ll) + 100 * (unsigned)min(2.5, 7.0);
}
"""
Y = np.random.default_rng(2).integers(0, 50, 64).astype(np.int32)
HALVES = Y.reshape(2, 2, 16)
TOGETHER = {
    "warp_maximum": np.repeat(Y.reshape(2, 32).max(1), 32),
    "half_warps": np.repeat(np.stack([HALVES[:, 0].sum(1), HALVES[:, 1].max(1)], 1).ravel(), 16),
    "maximum": Y.max()[None],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_threads_of_a_warp_and_a_block_work_together_in_any_order(xp, name):
    for how in (*ORDERS, {"check": False}):
        with cuda_emulator.options(**how):
            y = xp.zeros(TOGETHER[name].size, np.int32)
            xp.RawModule(code=SEMANTICS).get_function(name)((1,), (8, 8), (xp.asarray(Y), y))
            np.testing.assert_array_equal(y.get(), TOGETHER[name])


def test_bit_functions_and_vector_types(xp):
    y = xp.empty(3, np.uint32)
    xp.RawModule(code=SEMANTICS).get_function("bits")((1,), (1,), (y,))
    assert list(y.get()) == [0x55443322, 16 + 1600 + 80000 + 12000000, 3 + 40 + 200]


# ---- arithmetic: that of our kernels, which has no FMA and keeps subnormals, and C++'s own, which flushes them ----

ARITHMETIC = """
extern "C" __global__ void arithmetic(const float* a, const float* b, const double* c, float* out, double* wide) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x, n = blockDim.x * gridDim.x;
  out[i] = a[i] + b[i], out[n + i] = add(a[i], b[i]), out[2 * n + i] = multiply(a[i], b[i]);
  out[3 * n + i] = narrow(c[i]), out[4 * n + i] = a[i] * b[i] + 1.0f, wide[i] = widen(a[i]);
}
extern "C" __global__ void halves(const u16* half, float* wide, const float* a, u16* rounded) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  wide[i] = widen_float16(half[i]);
  rounded[i] = round_to_float16(a[i]);
}
"""
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, -3e-39, 1.1754944e-38, 1.1754942e-38, 2e-38, 1e-30, 1.0, -3e38, 3e38]
SMALLEST = np.float32(2.0**-126)


def arithmetic(xp, name):
    return xp.RawModule(code=f"{toolchain.arithmetic()}\nusing namespace gradengine;\n{ARITHMETIC}").get_function(name)


def same_bits(got, expected):
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(got[number].view(f"u{got.itemsize}"), expected[number].view(f"u{got.itemsize}"))


def with_random_ones(a, b, size=2048):
    """As many values of each, of all magnitudes, and doubles beside them."""
    scale = np.float32(2) ** np.random.default_rng(0).integers(-20, 20, size - a.size).astype("f4")
    random = np.random.default_rng(1).integers(0, 1 << 32, (2, size - a.size), np.uint32).view("f4") * scale
    a, b = np.concatenate([a, random[0]]), np.concatenate([b, random[1] / scale])
    return a, b, a.astype("f8") * np.float64(2) ** np.random.default_rng(2).integers(-30, 10, size)


def test_sums_and_products_are_rounded_once_and_keep_subnormals(xp):
    specials = np.array([*SPECIAL, np.inf, -np.inf, np.nan], "f4")
    a, b = (grid.ravel() for grid in np.meshgrid(specials, specials))
    with np.errstate(all="ignore"):
        a, b, c = with_random_ones(a, b)
    out, wide = xp.empty((5, 2048), np.float32), xp.empty(2048)
    with np.errstate(all="ignore"):
        arithmetic(xp, "arithmetic")((8,), (256,), (*map(xp.asarray, (a, b, c)), out, wide))
        plain, *got, contracted = out.get()
        for values, expected in zip(got, (a + b, a * b, c.astype("f4")), strict=True):
            same_bits(values, expected)
        same_bits(wide.get(), a.astype("f8"))
        near = np.abs(a) < SMALLEST, np.abs(b) < SMALLEST, np.abs(a + b) < SMALLEST, np.abs(a * b) < SMALLEST
        normal = ~np.logical_or.reduce(near)
        same_bits(plain[normal], (a + b)[normal])
        same_bits(contracted[normal], (a * b + np.float32(1))[normal])
    assert not ((np.abs(plain) < SMALLEST) & (plain != 0)).any()


def test_plain_arithmetic_keeps_subnormals_where_it_is_told_to(xp):
    kernel = xp.RawKernel('extern "C" __global__ void half(float* x) { *x *= 0.5f; }', "half")
    for ftz, expected in ((True, 0.0), (False, np.float32(1e-39) / 2)):
        x = xp.asarray(np.full(1, 1e-39, np.float32))
        with cuda_emulator.options(ftz=ftz):
            kernel((1,), (1,), (x,))
            assert x.get()[0] == expected


def test_halves_are_widened_and_rounded_as_numpy_does(xp):
    half = np.arange(1 << 16, dtype=np.uint16)
    exact = half.view("f2").astype("f4")
    steps = np.concatenate([exact.view("u4") + np.uint32(beyond) for beyond in (0, 1, 0xFFF, 0x1000, 0x1001)])
    ties = np.random.default_rng(0).permutation(steps)[: 1 << 16].view("f4")
    with np.errstate(all="ignore"):
        expected = ties.astype("f2")
    wide, rounded = xp.empty(1 << 16, np.float32), xp.empty(1 << 16, np.uint16)
    arithmetic(xp, "halves")((256,), (256,), (xp.asarray(half), wide, xp.asarray(ties), rounded))
    np.testing.assert_array_equal(wide.get(), exact)
    np.testing.assert_array_equal(rounded.get().view("f2"), expected)


# ---- compiling, launching, recording ----


def test_templates_macros_and_options(xp):
    code = """
    template <class T> __device__ T twice(T a) { return FACTOR * a; }
    template <class T, int N> __global__ void __launch_bounds__(N) typed(T* x) { x[0] = twice(x[0]); }
    #define KERNEL(NAME, T) extern "C" __global__ void __launch_bounds__(32) NAME(T* x) { x[0] = twice(x[0]); }
    KERNEL(twice_float, float)
    KERNEL(twice_int, int)
    """
    module = xp.RawModule(code=code, options=("-DFACTOR=2", "--std=c++17"), name_expressions=("typed<float, 64>",))
    for name, dtype in (("typed<float, 64>", "f4"), ("twice_float", "f4"), ("twice_int", "i4")):
        x = xp.asarray(np.full(1, 21, dtype))
        module.get_function(name)((1,), (1,), (x,))
        assert x.get()[0] == 42


def test_g_pluspluss_complaint_names_the_line(xp):
    from cuda_emulator.kernels import Library

    with pytest.raises(cuda_emulator.CompileException, match=r"kernel.cu:2:.*undeclared_thing"):
        Library('\nextern "C" __global__ void f(int* x) { *x = undeclared_thing; }', (), (), True)


def test_libraries_are_built_once_and_whole(xp, tmp_path, monkeypatch):
    from cuda_emulator.compiler import library

    monkeypatch.setenv("CUDA_EMULATOR_CACHE", str(tmp_path))
    built = []
    threads = [threading.Thread(target=lambda: built.append(library("int one = 1;", ["-O1"]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(built)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [built[0].name]


def test_what_is_asked_of_the_device_is_recorded(xp):
    stream, kernel = xp.cuda.Stream(non_blocking=True), xp.RawKernel('extern "C" __global__ void none() {}', "none")
    xp.cuda.Device().synchronize()
    with cuda_emulator.recorded() as record, stream:
        kernel((1,), (1,), ())
        y = xp.empty(4, np.float32)
        y.data.memset_async(0, 16, stream)
        y.get()
        y.set(np.ones(4, np.float32))
        stream.synchronize()
        stream.begin_capture()
        kernel((1,), (1,), ())
        graph = stream.end_capture()
        graph.launch(stream)
    assert record.operations == ["none", "fill", "copy device to host", "copy host to device", "none", "graph"]
    assert record.launches == ["none", "none"]
    assert record.copies == ["device to host", "host to device"]
    assert (record.fills, record.graphs, record.allocations) == (1, 1, [16])
    assert "stream" in record.waits


def test_options_hold_until_the_end_of_the_block():
    before = cuda_emulator.settings()
    with cuda_emulator.options(check=not before.check, seed=before.seed + 1):
        assert (cuda_emulator.settings().check, cuda_emulator.settings().seed) == (not before.check, before.seed + 1)
    assert cuda_emulator.settings() == before
    with pytest.raises(TypeError), cuda_emulator.options(unknown=1):
        pass
