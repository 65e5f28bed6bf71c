"""The emulator does what CUDA promises, in every order, and finds what CUDA does not promise to bear."""

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import cuda_emulator as cp
import ml_dtypes
import numpy as np
import pytest
from cuda_emulator.cuda import runtime

pytestmark = pytest.mark.skipif(cp.compiler() is None, reason="g++ is not installed")

ORDERS = [{"order": "forward"}, {"order": "reverse"}, *({"order": "random", "seed": seed} for seed in range(3))]


@pytest.fixture(autouse=True)
def _fresh():
    cp.reset()
    yield
    cp.reset()


# ---- seeded bugs: each must be found, and what differs from it only by being right must pass ----


@dataclass(frozen=True)
class Case:
    """A kernel, how it is launched, and the finding it must give; None: the values of its last argument."""

    name: str
    code: str
    arguments: Callable[[], tuple]
    finds: str | None
    grid: int = 1
    block: int = 64
    shared_mem: int = 0
    expected: Callable[[], np.ndarray] | None = None


X = np.random.default_rng(1).integers(1, 9, 1024).astype(np.float32)


def reads_x_writes(size):
    return lambda: (cp.asarray(X), cp.empty(size, np.float32))


def reads_x_adds_to(size):
    return lambda: (cp.asarray(X), cp.zeros(size, np.float32))


def last_block_arguments():
    return cp.asarray(X), cp.empty(5, np.float32), cp.zeros(1, np.uint32), cp.empty(1, np.float32)


REDUCTION = """
extern "C" __global__ void NAME(const float* x, float* out) {
  __shared__ float s[256];
  const int t = threadIdx.x;
  s[t] = x[blockIdx.x * 256 + t];
  FIRST;
  for (int k = 128; k > 0; k >>= 1) {
    if (t < k) s[t] += s[t + k];
    EACH;
  }
  if (t == 0) out[blockIdx.x] = s[0];
}
"""
LAST_BLOCK = """
extern "C" __global__ void NAME(const float* x, float* part, unsigned* count, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    part[blockIdx.x] = x[blockIdx.x];
    FENCE;
    last = atomicAdd(count, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += part[i];
    out[0] = sum;
  }
}
"""


def filled(template, **words):
    for word, text in words.items():
        template = template.replace(word, text)
    return template


BARRIER = "__syncthreads()"
TOO_EARLY = "race|uninitialised shared memory"  # which of them is met first depends on the order
CASES = [
    Case(
        "reduction",
        filled(REDUCTION, FIRST=BARRIER, EACH=BARRIER),
        reads_x_writes(2),
        None,
        grid=2,
        block=256,
        expected=lambda: X[:512].reshape(2, 256).sum(1),
    ),
    Case("no_barrier", filled(REDUCTION, FIRST="", EACH=""), reads_x_writes(2), TOO_EARLY, grid=2, block=256),
    Case(
        "no_first_barrier", filled(REDUCTION, FIRST="", EACH=BARRIER), reads_x_writes(2), TOO_EARLY, grid=2, block=256
    ),
    Case(
        "shared_used_again_after_a_barrier",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          __shared__ float s[256];
          __shared__ float total;
          const int t = threadIdx.x;
          float result = 0;
          for (int j = 0; j < 2; ++j) {
            s[t] = x[t] * (j + 1);
            __syncthreads();
            if (t == 0) {
              float sum = 0;
              for (int i = 0; i < 256; ++i) sum += s[i];
              total = sum;
            }
            __syncthreads();
            result += total;
          }
          out[t] = result;
        }""",
        reads_x_writes(256),
        None,
        block=256,
        expected=lambda: np.full(256, 3 * X[:256].sum()),
    ),
    Case(
        "shared_used_again_without_a_barrier",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          __shared__ float value;
          for (int j = 0; j < 2; ++j) {
            if (threadIdx.x == 0) value = x[j];
            __syncthreads();
            out[j * 256 + threadIdx.x] = value;
          }
        }""",
        reads_x_writes(512),
        "race",
        block=256,
    ),
    Case(
        "syncwarp",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          __shared__ float s[32];
          const int t = threadIdx.x;
          s[t] = x[t];
          __syncwarp();
          out[t] = s[31 - t];
        }""",
        reads_x_writes(32),
        None,
        block=32,
        expected=lambda: X[:32][::-1],
    ),
    Case(
        "no_syncwarp",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          __shared__ float s[32];
          const int t = threadIdx.x;
          s[t] = x[t];
          out[t] = s[31 - t];
        }""",
        reads_x_writes(32),
        TOO_EARLY,
        block=32,
    ),
    Case(
        "atomic_sum",
        """extern "C" __global__ void NAME(const float* x, float* out) { atomicAdd(out, x[threadIdx.x]); }""",
        reads_x_adds_to(1),
        None,
        expected=lambda: X[:64].sum()[None],
    ),
    Case(
        "plain_sum",
        """extern "C" __global__ void NAME(const float* x, float* out) { out[0] += x[threadIdx.x]; }""",
        reads_x_adds_to(1),
        "race",
    ),
    Case(
        "blocks_overlap",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          for (int i = threadIdx.x; i < 65; i += blockDim.x) out[blockIdx.x * 64 + i] = x[i];
        }""",
        reads_x_writes(193),
        "race: .* conflicts with block",
        grid=3,
        block=32,
    ),
    Case(
        "last_block",
        filled(LAST_BLOCK, FENCE="__threadfence()"),
        last_block_arguments,
        None,
        grid=5,
        block=32,
        expected=lambda: X[:5].sum()[None],
    ),
    Case(
        "last_block_without_fence",
        filled(LAST_BLOCK, FENCE=""),
        last_block_arguments,
        "race: .* block",
        grid=5,
        block=32,
    ),
    Case(
        "reads_beyond",
        """
        extern "C" __global__ void NAME(const float* x, int n, float* out) {
          const int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i <= n && x[i] == 1e30f) out[0] = 1;
        }""",
        lambda: (cp.asarray(X[:200]), np.int32(200), cp.zeros(1, np.float32)),
        r"out of bounds: 4-byte read .* \[block \(3,0,0\) thread \(8,0,0\)\]",
        grid=4,
    ),
    Case(
        "writes_beyond",
        """
        extern "C" __global__ void NAME(int n, float* out) {
          const int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i <= n) out[i] = 1;
        }""",
        lambda: (np.int32(200), cp.empty(200, np.float32)),
        "out of bounds: 4-byte write",
        grid=4,
    ),
    Case(
        "misaligned",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          const float4 four = *reinterpret_cast<const float4*>(x + 1 + 4 * threadIdx.x);
          *reinterpret_cast<float4*>(out + 4 * threadIdx.x) = four;
        }""",
        reads_x_writes(64),
        "misaligned: .*float4",
        block=16,
    ),
    Case(
        "static_shared_too_small",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          __shared__ float s[32];
          const int t = threadIdx.x;
          s[t] = x[t];
          __syncthreads();
          out[t] = s[63 - t];
        }""",
        reads_x_writes(64),
        r"out of bounds: index \d+ of 'float \[32\]'",
    ),
    Case(
        "dynamic_shared_too_small",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          extern __shared__ float s[];
          const int t = threadIdx.x;
          s[t] = x[t];
          __syncthreads();
          out[t] = s[63 - t];
        }""",
        reads_x_writes(64),
        "out of bounds",
        shared_mem=128,
    ),
    Case(
        "shared_never_written",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          __shared__ float s[64];
          const int t = threadIdx.x;
          if (t < 60) s[t] = x[t];
          __syncthreads();
          out[t] = s[63 - t];
        }""",
        reads_x_writes(64),
        "uninitialised shared memory",
    ),
    Case(
        "divergent_barrier",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          __shared__ float s[64];
          const int t = threadIdx.x;
          s[t] = x[t];
          if (t < 32) {
            __syncthreads();
            out[t] = s[t + 32];
          } else {
            __syncthreads();
            out[t] = s[t - 32];
          }
        }""",
        reads_x_writes(64),
        "divergent barrier: threads wait at __syncthreads.. of lines",
    ),
    Case(
        "return_before_a_barrier",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          __shared__ float s[64];
          const int t = threadIdx.x;
          if (t >= 40) return;
          s[t] = x[t];
          __syncthreads();
          out[t] = s[39 - t];
        }""",
        reads_x_writes(64),
        r"divergent barrier: .* after 24 thread\(s\) of the block had returned",
    ),
    Case(
        "shuffle_without_all_lanes",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          float value = x[threadIdx.x];
          if (threadIdx.x < 16) value += __shfl_down_sync(0xffffffffu, value, 8);
          out[threadIdx.x] = value;
        }""",
        reads_x_writes(32),
        "deadlock",
        block=32,
    ),
    Case(
        "shuffle_from_a_lane_outside_the_mask",
        """
        extern "C" __global__ void NAME(const float* x, float* out) {
          float value = x[threadIdx.x];
          if (threadIdx.x < 16) value += __shfl_down_sync(0x0000ffffu, value, 8);
          out[threadIdx.x] = value;
        }""",
        reads_x_writes(32),
        "shuffle at line .* reads lane 16, which takes no part",
        block=32,
    ),
    Case(
        "writes_to_a_parameter",
        """
        struct Sizes { int n[4]; };
        extern "C" __global__ void NAME(const __grid_constant__ Sizes sizes, float* out) {
          const_cast<int&>(sizes.n[1]) = 3;
        }""",
        lambda: (np.zeros((), [("n", "<i4", 4)]), cp.empty(1, np.float32)),
        "to a kernel's parameters",
        block=1,
    ),
    Case(
        "plain_and_partial_words",
        """
        extern "C" __global__ void NAME(unsigned short* out) {
          out[threadIdx.x] = (unsigned short)threadIdx.x;
        }""",
        lambda: (cp.empty(64, np.uint16),),
        None,
        expected=lambda: np.arange(64),
    ),
    Case(
        "partial_words_overlap",
        """
        extern "C" __global__ void NAME(unsigned short* out) {
          if (threadIdx.x < 63) out[threadIdx.x + 1] = 1;
          if (threadIdx.x == 0) *reinterpret_cast<unsigned*>(out + 62) = 7;
        }""",
        lambda: (cp.empty(64, np.uint16),),
        "race",
    ),
]
ALL_CASES = cp.RawModule(code="\n".join(case.code.replace("NAME", case.name) for case in CASES))


def run(case):
    """The launch's last argument afterwards."""
    arguments = case.arguments()
    ALL_CASES.get_function(case.name)((case.grid,), (case.block,), arguments, shared_mem=case.shared_mem)
    return arguments[-1].get()


@pytest.mark.parametrize("how", ORDERS[:3], ids=lambda how: how["order"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bugs_are_found_and_their_corrections_pass(case, how):
    with cp.options(**how):
        if case.finds is None:
            np.testing.assert_array_equal(run(case), case.expected())
        else:
            with pytest.raises(cp.EmulatorError, match=case.finds):
                run(case)


def test_a_finding_names_kernel_block_thread_and_launch():
    case = next(case for case in CASES if case.name == "writes_beyond")
    with pytest.raises(cp.EmulatorError) as found:
        run(case)
    message = str(found.value)
    assert message.startswith("writes_beyond: out of bounds: 4-byte write")
    assert "[block (3,0,0) thread (8,0,0)], launch " in message
    assert "grid (4, 1, 1), block (64, 1, 1), made at " in message
    assert f"{os.path.basename(__file__)}:" in message


def test_what_only_strict_refuses():
    case = next(case for case in CASES if case.name == "return_before_a_barrier")
    with cp.options(strict=False):
        np.testing.assert_array_equal(run(case)[:40], X[:40][::-1])


def test_a_kernel_that_never_ends_is_stopped():
    kernel = cp.RawKernel('extern "C" __global__ void spin(volatile int* x) { while (*x) {} }', "spin")
    flag = cp.asarray(np.ones(1, np.int32))
    with cp.options(timeout=1):
        kernel((1,), (1,), (flag,))
    with pytest.raises(cp.EmulatorError, match="timeout: the launch ran longer than 1 s"):
        runtime.deviceSynchronize()


def test_a_fault_in_an_unchecked_kernel_is_an_error():
    kernel = cp.RawKernel('extern "C" __global__ void fault(int* x) { *x = 1; }', "fault")
    with cp.options(check=False):
        kernel((1,), (1,), (np.uint64(8),))
        with pytest.raises(cp.EmulatorError, match="SIGSEGV at 0x8"):
            runtime.deviceSynchronize()


def test_assertions_and_traps_of_a_kernel():
    kernel = cp.RawKernel('extern "C" __global__ void sure(int n) {\n  assert(n == 1);\n  __trap();\n}', "sure")
    for n, found in ((2, r"assert\(n == 1\) failed at line 2"), (1, "__trap")):
        kernel((1,), (1,), (np.int32(n),))
        with pytest.raises(cp.EmulatorError, match=found):
            runtime.deviceSynchronize()


# ---- what kernels may rely on, whatever the order of threads and blocks ----

SEMANTICS = cp.RawModule(
    code="""
extern "C" __global__ void scan(const int* x, int* y) {
  __shared__ int totals[32];
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, warps = blockDim.x >> 5;
  int value = x[blockIdx.x * blockDim.x + t];
  for (int distance = 1; distance < 32; distance <<= 1) {
    const int below = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += below;
  }
  if (lane == 31) totals[warp] = value;
  __syncthreads();
  if (warp == 0) {
    const unsigned mask = __ballot_sync(~0u, lane < warps);
    if (lane < warps) {
      int total = totals[lane];
      for (int distance = 1; distance < warps; distance <<= 1) {
        const int below = __shfl_up_sync(mask, total, distance);
        if (lane >= distance) total += below;
      }
      totals[lane] = total;
    }
  }
  __syncthreads();
  y[blockIdx.x * blockDim.x + t] = value + (warp ? totals[warp - 1] : 0);
}

extern "C" __global__ void sum_of_eight(const float* x, float* y) {
  float value = x[threadIdx.x];
  for (int distance = 4; distance; distance >>= 1) value += __shfl_down_sync(~0u, value, distance, 8);
  y[threadIdx.x] = __shfl_sync(~0u, value, 0, 8);
}

extern "C" __global__ void warp_maximum(const double* x, double* y) {
  const int t = threadIdx.y * blockDim.x + threadIdx.x;
  double value = x[t];
  for (int lanes = 16; lanes; lanes >>= 1) value = fmax(value, __shfl_xor_sync(~0u, value, lanes));
  y[t] = value;
}

extern "C" __global__ void votes(const int* x, int* y) {
  const int value = x[threadIdx.x];
  int* mine = y + 6 * threadIdx.x;
  mine[0] = __popc(__ballot_sync(~0u, value & 1));
  mine[1] = __any_sync(~0u, value == 7);
  mine[2] = __all_sync(~0u, value >= 0);
  mine[3] = __syncthreads_count(value & 1);
  mine[4] = __syncthreads_and(value < 100);
  mine[5] = __syncthreads_or(value == 7);
}

extern "C" __global__ void histogram(const int* x, int n, int* counts) {
  extern __shared__ int local[];
  for (int i = threadIdx.x; i < 16; i += blockDim.x) local[i] = 0;
  __syncthreads();
  const int threads = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) atomicAdd(&local[x[i] & 15], 1);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}

extern "C" __global__ void maximum(const float* x, float* out) {
  int* bits = reinterpret_cast<int*>(out);
  int seen = *reinterpret_cast<volatile int*>(bits), expected;
  do {
    expected = seen;
    if (__int_as_float(expected) >= x[threadIdx.x]) break;
    seen = atomicCAS(bits, expected, __float_as_int(x[threadIdx.x]));
  } while (expected != seen);
}

extern "C" __global__ void half_warps(const int* x, int* y) {
  const int lane = threadIdx.x & 31;
  int value = x[threadIdx.x];
  if (lane < 16) {
    for (int lanes = 8; lanes; lanes >>= 1) value += __shfl_xor_sync(0xffffu, value, lanes);
  } else {
    for (int lanes = 8; lanes; lanes >>= 1) value = max(value, __shfl_xor_sync(0xffff0000u, value, lanes));
  }
  y[threadIdx.x] = value;
}
"""
)


def integers(count, below, dtype=np.int32):
    return np.random.default_rng(count + below).integers(0, below, count).astype(dtype)


def result_of(name, grid, block, x, size, dtype, *more, shared_mem=0):
    y = cp.zeros(size, dtype)
    SEMANTICS.get_function(name)(grid, block, (cp.asarray(x), *more, y), shared_mem=shared_mem)
    return y.get()


@pytest.fixture(params=[*ORDERS, {"check": False}], ids=lambda how: "-".join(map(str, how.values())))
def _any_order(request):
    with cp.options(**request.param):
        yield


@pytest.mark.usefixtures("_any_order")
class TestSemantics:
    def test_scan_over_a_block(self):
        x = integers(3 * 192, 50)
        expected = np.cumsum(x.reshape(3, 192), 1).ravel()
        np.testing.assert_array_equal(result_of("scan", (3,), (192,), x, x.size, np.int32), expected)

    def test_shuffles_with_a_width(self):
        x = integers(64, 9, np.float32)
        expected = np.repeat(x.reshape(8, 8).sum(1), 8)
        np.testing.assert_array_equal(result_of("sum_of_eight", (1,), (64,), x, 64, np.float32), expected)

    def test_shuffles_of_doubles_in_a_block_of_two_dimensions(self):
        x = np.random.default_rng(0).standard_normal(64)
        expected = np.repeat(x.reshape(2, 32).max(1), 32)
        np.testing.assert_array_equal(result_of("warp_maximum", (1,), (8, 8), x, 64, np.float64), expected)

    def test_votes(self):
        x = integers(96, 50) // 8 * 8
        x[3:9], x[40] = 1, 7
        y = result_of("votes", (1,), (96,), x, 96 * 6, np.int32).reshape(3, 32, 6)
        odd = (x & 1).reshape(3, 32)
        for warp in range(3):
            assert set(map(tuple, y[warp])) == {(odd[warp].sum(), warp == 1, 1, odd.sum(), 1, 1)}

    def test_histogram_in_dynamic_shared_memory(self):
        x = integers(5000, 999)
        counts = result_of("histogram", (4,), (100,), x, 16, np.int32, np.int32(x.size), shared_mem=64)
        np.testing.assert_array_equal(counts, np.bincount(x & 15, minlength=16))

    def test_compare_and_swap(self):
        x = np.random.default_rng(0).random(256, np.float32)
        assert result_of("maximum", (1,), (256,), x, 1, np.float32) == x.max()

    def test_half_warps_with_masks_of_their_own(self):
        x = integers(64, 50)
        halves = x.reshape(2, 2, 16)
        expected = np.repeat(np.stack([halves[:, 0].sum(1), halves[:, 1].max(1)], 1).ravel(), 16)
        np.testing.assert_array_equal(result_of("half_warps", (1,), (64,), x, 64, np.int32), expected)


# ---- arithmetic ----

ARITHMETIC = cp.RawModule(
    code="""
struct Results { float plain_sum, sum, product, narrow; double wide; };
extern "C" __global__ void arithmetic(const float* a, const float* b, const double* c, Results* results) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  results[i] = {a[i] + b[i], emu_add_rn(a[i], b[i]), emu_mul_rn(a[i], b[i]), emu_narrow(c[i]), emu_widen(a[i])};
}
extern "C" __global__ void halves(const unsigned short* half, float* wide, const float* a, unsigned short* rounded) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  wide[i] = emu_widen_float16(half[i]);
  rounded[i] = emu_round_to_float16(a[i]);
}
extern "C" __global__ void bits(unsigned* y) {
  y[0] = __funnelshift_r(0x44332211u, 0x88776655u, 8);
  y[1] = __funnelshift_l(0x44332211u, 0x88776655u, 8);
  y[2] = __byte_perm(0x44332211u, 0x88776655u, 0x7140u);
  y[3] = __popc(0xf0f0u) + 100 * __clz(1) + 10000 * __ffs(8);
  y[4] = sizeof(float4) + 100 * alignof(float4) + 10000 * alignof(uint2) + 1000000 * sizeof(uint3);
  y[5] = min(3, 5u) + 10 * max(2ll, 4) + 100 * (unsigned)min(2.5, 7.0);
}
"""
)
RESULTS = np.dtype(
    [("plain_sum", "<f4"), ("sum", "<f4"), ("product", "<f4"), ("narrow", "<f4"), ("wide", "<f8")], align=True
)
SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-40, -3e-39, 1.1754944e-38, 1.1754942e-38, 2e-38, -2e-38, 1e-30, 1.0, -3e38, 3e38],
    "f4",
)


def test_kept_subnormals_are_kept_and_others_flushed():
    with np.errstate(all="ignore"):
        specials = np.concatenate([SPECIAL, np.array([np.inf, -np.inf, np.nan], "f4")])
        a, b = (grid.ravel() for grid in np.meshgrid(specials, specials))
        scale = np.float32(2) ** np.random.default_rng(0).integers(-20, 20, 4096 - a.size).astype("f4")
        random = np.random.default_rng(1).integers(0, 1 << 32, (2, 4096 - a.size), np.uint32).view("f4") * scale
        a, b = np.concatenate([a, random[0]]), np.concatenate([b, random[1] / scale])
        c = a.astype("f8") * np.float64(2) ** np.random.default_rng(2).integers(-30, 10, 4096)
        expected = {"sum": a + b, "product": a * b, "narrow": c.astype("f4"), "wide": a.astype("f8")}
    results = cp.empty(4096 * RESULTS.itemsize, np.uint8)
    function = ARITHMETIC.get_function("arithmetic")
    function((16,), (256,), (cp.asarray(a), cp.asarray(b), cp.asarray(c), results))
    got = results.get().view(RESULTS)
    for name, values in expected.items():
        number = ~np.isnan(values)
        bits = f"u{values.itemsize}"
        np.testing.assert_array_equal(np.isnan(got[name]), ~number, name)
        np.testing.assert_array_equal(got[name][number].view(bits), values[number].view(bits), name)
    smallest = np.float32(2.0**-126)
    touches_subnormal = (np.abs(a) < smallest) | (np.abs(b) < smallest) | (np.abs(expected["sum"]) < smallest)
    np.testing.assert_array_equal(got["plain_sum"][~touches_subnormal], expected["sum"][~touches_subnormal])
    assert not ((np.abs(got["plain_sum"]) < smallest) & (got["plain_sum"] != 0)).any()


def test_plain_arithmetic_keeps_subnormals_where_it_is_told_to():
    kernel = cp.RawKernel('extern "C" __global__ void half(float* x) { *x *= 0.5f; }', "half")
    for ftz, expected in ((True, 0.0), (False, np.float32(1e-39) / 2)):
        x = cp.asarray(np.full(1, 1e-39, np.float32))
        with cp.options(ftz=ftz):
            kernel((1,), (1,), (x,))
        assert x.item() == expected


def test_halves_are_widened_and_rounded_as_numpy_does():
    half = np.arange(1 << 16, dtype=np.uint16)
    exact = half.view("f2").astype("f4")
    steps = np.concatenate([exact.view("u4") + np.uint32(beyond) for beyond in (0, 1, 0xFFF, 0x1000, 0x1001)])
    ties = np.random.default_rng(0).permutation(steps)[: 1 << 16].view("f4")
    with np.errstate(all="ignore"):
        expected = ties.astype("f2")
    wide, rounded = cp.empty(1 << 16, np.float32), cp.empty(1 << 16, np.uint16)
    ARITHMETIC.get_function("halves")((256,), (256,), (cp.asarray(half), wide, cp.asarray(ties), rounded))
    np.testing.assert_array_equal(wide.get(), exact)
    np.testing.assert_array_equal(rounded.get().view("f2"), expected)


def test_bit_functions_and_vector_types():
    y = cp.empty(6, np.uint32)
    ARITHMETIC.get_function("bits")((1,), (1,), (y,))
    assert list(y.get()[:3]) == [0x55443322, 0x77665544, 0x88225511]
    assert list(y.get()[3:]) == [8 + 3100 + 40000, 16 + 1600 + 80000 + 12000000, 3 + 40 + 200]


# ---- compiling and launching ----

KERNELS = cp.RawModule(
    code="""
extern "C" __global__ void scale(float* x, float factor, long long n) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= factor;
}
extern "C" __global__ void store(const float* from, float* to) { *to = *from; }
extern "C" __global__ void narrow(float* out, float a, int b, unsigned char c) { *out = a + b + c; }
struct Table { unsigned long long address[4000]; float weight[4]; };
extern "C" __global__ void large(double* out, const __grid_constant__ Table table) {
  out[threadIdx.x] = (double)table.address[threadIdx.x] * table.weight[1];
}
struct Pair { int a; double b; };
extern "C" __global__ void by_value(double* out, Pair pair) { *out = pair.a++ + pair.b; }
extern "C" __global__ void count(int* n) { atomicAdd(n, 1); }
"""
)
TABLE = np.dtype([("address", "<u8", 4000), ("weight", "<f4", 4)])
PAIR = np.dtype([("a", "<i4"), ("b", "<f8")], align=True)


def launch(name, *arguments, grid=1, block=1):
    KERNELS.get_function(name)((grid,), (block,), arguments)


def scale(x, factor):
    launch("scale", x, np.float32(factor), np.int64(x.size), block=64)


def ones(size=4):
    return cp.asarray(np.ones(size, np.float32))


def test_arguments_are_copied_when_they_are_launched():
    out, table = cp.empty(8, np.float64), np.zeros((), TABLE)
    table["address"], table["weight"] = np.arange(4000), 0.5
    launch("large", out, table, block=8)
    table["address"] = 0
    np.testing.assert_array_equal(out.get(), np.arange(8) * 0.5)


@pytest.mark.parametrize("shape", [(), (1,), None], ids=["0-d", "one element", "scalar"])
def test_structs_go_by_value(shape):
    pair = np.zeros(shape or (), PAIR)
    pair["a"], pair["b"] = 2, 0.25
    out = cp.empty(1, np.float64)
    launch("by_value", out, pair[()] if shape is None else pair)
    assert out.item() == 2.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.float32(1), 2), "got 3 arguments, expected 4"),
        ((1.5, 2, 3), r"argument 1: got a float of 8 bytes .*, expected 4 bytes"),
        ((np.float32(1), np.int64(2), 3), r"argument 2: got a int64 of 8 bytes"),
        ((np.int32(1), 2, 3), r"argument 1: got a int32 of 4 bytes \(an integer\), expected .* floating point"),
        ((np.float32(1), 2**40, 3), "does not fit the 4 bytes"),
        ((np.float32(1), 2, 256), "does not fit the 1 bytes"),
    ],
)
def test_arguments_are_held_against_the_parameters(arguments, message):
    with pytest.raises(cp.EmulatorError, match=message):
        launch("narrow", cp.empty(1, np.float32), *arguments)


def test_python_numbers_fit_where_cupy_would_pass_them_right():
    out = cp.empty(1, np.float32)
    launch("narrow", out, np.float32(0.5), -2, 255)
    assert out.item() == 253.5


def test_host_arrays_are_no_arguments():
    with pytest.raises(TypeError, match="in host memory; pass a device array"):
        launch("store", np.zeros(3, np.float32), cp.empty(1, np.float32))


def test_pointers_are_arrays_memory_pointers_or_numbers():
    source = cp.asarray(np.arange(4, dtype=np.float32))
    address = source.data.ptr + 8
    for pointer in (source[2:], source.data + 8, np.uint64(address), np.intp(address), address):
        out = cp.empty(1, np.float32)
        launch("store", pointer, out)
        assert out.item() == 2


def test_more_arguments_than_cuda_takes():
    kernel = cp.RawKernel('struct S { char c[32768]; };\nextern "C" __global__ void f(S s) {}', "f")
    with pytest.raises(cp.EmulatorError, match="more than 32764 bytes of arguments"):
        kernel((1,), (1,), (np.zeros((), [("c", "S32768")]),))


def test_a_grid_of_0_blocks_is_one_block():
    n = cp.zeros(1, np.int32)
    launch("count", n, grid=0)
    assert n.item() == 1


@pytest.mark.parametrize(
    ("grid", "block", "shared_mem", "message"),
    [((1,), (1025,), 0, "threads"), ((1, 65536), (1,), 0, "larger than"), ((1,), (1,), 49153, "shared memory")],
)
def test_launches_that_cuda_refuses(grid, block, shared_mem, message):
    with pytest.raises(cp.EmulatorError, match=message):
        KERNELS.get_function("count")(grid, block, (cp.zeros(1, np.int32),), shared_mem=shared_mem)


def test_templates_macros_options_and_included_files(tmp_path):
    (tmp_path / "twice.cuh").write_text("template <class T> __device__ T twice(T a) { return FACTOR * a; }")
    code = """
    #include "twice.cuh"
    template <class T, int N> __global__ void __launch_bounds__(N) typed(T* x) { x[0] = twice(x[0]); }
    #define KERNEL(NAME, T) extern "C" __global__ void __launch_bounds__(32) NAME(T* x) { x[0] = twice(x[0]); }
    KERNEL(twice_float, float)
    KERNEL(twice_int, int)
    """
    options = (f"-I{tmp_path}", "-DFACTOR=2", "--std=c++17", "--use_fast_math", "-lineinfo")
    module = cp.RawModule(code=code, options=options, name_expressions=("typed<float, 64>",))
    for name, dtype in (("typed<float, 64>", "f4"), ("twice_float", "f4"), ("twice_int", "i4")):
        x = cp.asarray(np.full(1, 21, dtype))
        module.get_function(name)((1,), (1,), (x,))
        assert x.item() == 42
    with pytest.raises(cp.EmulatorError, match=r"no kernel 'typed'; there are \['twice_float'"):
        module.get_function("typed")


def test_what_does_not_compile():
    with pytest.raises(cp.CompileException, match=r"kernel.cu:2:.*undeclared_thing"):
        cp.RawModule(code='\nextern "C" __global__ void f(int* x) { *x = undeclared_thing; }').compile()


def test_libraries_are_built_once_and_whole(tmp_path, monkeypatch):
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
    before = built[0].stat().st_mtime_ns
    assert library("int one = 1;", ["-O1"]).stat().st_mtime_ns == before


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cp.compiler.__wrapped__() is None


# ---- ElementwiseKernel ----


def test_elementwise_kernels():
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
    axpy = cp.ElementwiseKernel("T x, T y, T a", "T z", "z = a * x + y", "axpy")
    z = axpy(cp.asarray(x), cp.asarray(y), 2)
    assert z.dtype == np.float32
    np.testing.assert_array_equal(z.get(), 2 * x + y)

    reverse = cp.ElementwiseKernel("raw T x, raw S n", "raw T z", "z[i] = x[_ind.size() - 1 - i] + x.size() + n[0]")
    z = cp.empty(6, np.float32)
    assert reverse(cp.asarray(x.ravel()), cp.asarray(np.ones(1, np.int32)), z, size=6) is z
    np.testing.assert_array_equal(z.get(), x.ravel()[::-1] + 7)

    halve = cp.ElementwiseKernel("", "float32 z", "z = half(z)", "halve", no_return=True, preamble=HALF)
    assert halve(z) is None
    np.testing.assert_array_equal(z.get(), (x.ravel()[::-1] + 7) / 2)


HALF = "__device__ float half(float a) { return a / 2; }"


def test_elementwise_kernels_refuse():
    add = cp.ElementwiseKernel("float32 x", "float32 z", "z += x", "add_to")
    with pytest.raises(TypeError, match="x is float64, expected float32"):
        add(cp.zeros(3), cp.zeros(3, np.float32))
    with pytest.raises(TypeError, match="got 3 arguments"):
        add(1, 2, 3)
    with pytest.raises(ValueError, match="size is undecided"):
        add(1)
    with pytest.raises(NotImplementedError, match="strided or broadcast"):
        add(cp.zeros((3, 1), np.float32), cp.zeros((3, 2), np.float32))


# ---- nothing is done before the host waits for it ----


def pinned_array(size):
    return np.frombuffer(cp.cuda.alloc_pinned_memory(4 * size), np.float32)[:size]


def copy_async(x, host, stream=cp.cuda.Stream.null):
    runtime.memcpyAsync(x.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, stream.ptr)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_pinned_memory_is_read_when_the_copys_turn_comes(asynchronous):
    with cp.options(asynchronous=asynchronous):
        host, x = pinned_array(4), cp.empty(4, np.float32)
        host[:] = 1
        copy_async(x, host)
        host[:] = 2
        assert x.get()[0] == (2 if asynchronous else 1)


def test_pageable_memory_is_read_at_once():
    host, x = np.ones(4, np.float32), cp.empty(4, np.float32)
    copy_async(x, host)
    host[:] = 2
    assert x.get()[0] == 1


def test_pinned_memory_is_written_when_the_copys_turn_comes():
    host, x = pinned_array(4), ones()
    stream = cp.cuda.Stream()
    host[:] = 0
    scale(x, 3)
    runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 16, runtime.memcpyDeviceToHost, stream.ptr)
    assert list(host) == [0] * 4
    stream.synchronize()  # a blocking stream comes after the default one
    assert list(host) == [3] * 4


def test_pinned_memory_that_was_freed_too_early():
    x = cp.empty(4, np.float32)
    copy_async(x, pinned_array(4))
    with pytest.raises(cp.EmulatorError, match=r"a copy reads 16 bytes at .*, which are in no array \(any more\)"):
        x.get()


def test_errors_are_raised_where_the_host_waits():
    x = ones()
    launch("scale", x, np.float32(2), np.int64(5), block=64)
    with pytest.raises(cp.EmulatorError, match="scale: out of bounds"):
        float(x[0])
    scale(x, 2)  # what was queued is forgotten, and the device goes on
    assert x.get()[1] in (2, 4)


def test_host_reads_wait_for_the_current_stream_only():
    x, stream = ones(1), cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        scale(x, 2)
    assert x.item() == 1
    assert x.get(stream=stream)[0] == 2


@pytest.mark.parametrize(
    "read", [float, int, bool, lambda x: x.item(), lambda x: x.get()[0], lambda x: cp.asnumpy(x)[0]]
)
def test_reading_waits(read):
    x = ones(1)
    scale(x, 0)
    assert read(x) == 0


def test_memory_freed_too_early_for_another_stream():
    x, stream = ones(), cp.cuda.Stream(non_blocking=True)
    runtime.deviceSynchronize()
    with stream:
        scale(x, 2)
    del x
    with pytest.raises(cp.EmulatorError, match="in no array"):
        stream.synchronize()


def test_memory_used_again_too_early_for_another_stream():
    x, stream = ones(), cp.cuda.Stream(non_blocking=True)
    address = x.data.ptr
    runtime.deviceSynchronize()
    with stream:
        scale(x, 2)
    del x
    y = ones()
    assert y.data.ptr == address
    cp.cuda.Stream.null.synchronize()
    stream.synchronize()
    assert list(y.get()) == [2] * 4  # as on a GPU: somebody else's kernel wrote to it


def test_memory_may_be_freed_after_its_last_use_on_its_own_stream():
    stream, out = cp.cuda.Stream(), cp.empty(1, np.float32)
    with stream:
        for value in (1, 2, 3):
            x = cp.asarray(np.full(1, value, np.float32))
            launch("store", x, out)
            del x
        stream.synchronize()
    assert out.item() == 3


def test_memory_of_the_default_stream_may_be_freed_after_use_on_a_blocking_stream():
    x, stream = ones(), cp.cuda.Stream()
    runtime.deviceSynchronize()
    with stream:
        scale(x, 2)
    address = x.data.ptr
    del x
    y = cp.empty(4, np.float32)
    assert y.data.ptr == address
    y.fill(5)
    assert list(y.get()) == [5] * 4


def test_new_memory_holds_nan():
    assert np.isnan(cp.empty(3, np.float32).get()).all()
    x = ones()
    del x
    assert np.isnan(cp.empty(4, np.float32).get()).all()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("how", ORDERS, ids=lambda how: "-".join(map(str, how.values())))
def test_streams_wait_for_events_and_for_nothing_else(waits, how):
    x, y = ones(1), cp.zeros(1, np.float32)
    first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    runtime.deviceSynchronize()
    with first:
        scale(x, 2)
    event = first.record()
    with second:
        if waits:
            second.wait_event(event)
        launch("store", x, y)
    second.synchronize()
    assert y.item() == (2 if waits else 1)
    with cp.options(**how):
        runtime.deviceSynchronize()
    assert x.item() == 2


def test_an_event_is_done_after_some_asking():
    x, stream = ones(), cp.cuda.Stream(non_blocking=True)
    assert cp.cuda.Event().done
    runtime.deviceSynchronize()
    with stream:
        scale(x, 2)
        scale(x, 2)
    event = stream.record(cp.cuda.Event(disable_timing=True))
    answers = []
    while not answers or not answers[-1]:
        answers.append(event.done)
    assert answers == [False, False, True]
    assert stream.done
    scale(x, 2)
    event.record()
    event.synchronize()
    assert event.done


def test_so_much_waits_and_no_more():
    x, stream = ones(1), cp.cuda.Stream(non_blocking=True)
    runtime.deviceSynchronize()
    with cp.options(most_queued=10):
        for expected in [1] * 10 + [2**11] * 2:
            scale(x, 2)
            assert x.get(stream=stream)[0] == expected


def test_work_of_a_stream_that_nobody_refers_to_is_done():
    x, stream = ones(1), cp.cuda.Stream()
    handle = stream.ptr
    with stream:
        scale(x, 2)
    del stream
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidResourceHandle"):
        runtime.streamSynchronize(handle)
    assert x.item() == 2


def test_each_thread_has_its_current_stream():
    x, stream, seen = ones(1), cp.cuda.Stream(), []
    with stream:
        thread = threading.Thread(target=lambda: seen.append(cp.cuda.get_current_stream()))
        thread.start()
        thread.join()
        assert cp.cuda.get_current_stream() == stream
        with cp.cuda.Stream.null:
            assert cp.cuda.get_current_stream().ptr == 0
        assert cp.cuda.get_current_stream() is stream
    assert seen == [cp.cuda.Stream.null]
    other = cp.cuda.Stream().use()
    assert cp.cuda.get_current_stream() is other
    scale(x, 2)
    other.synchronize()
    assert x.item() == 2


def test_streams_of_other_frameworks():
    stream, x = cp.cuda.Stream(non_blocking=True), ones(1)
    runtime.deviceSynchronize()
    with pytest.warns(DeprecationWarning, match="ExternalStream is deprecated"):
        external = cp.cuda.ExternalStream(stream.ptr)
    for same in (cp.cuda.Stream.from_external(stream), external):
        assert same == stream
        with same:
            scale(x, 2)
    stream.synchronize()
    assert x.item() == 4


# ---- capturing ----


@pytest.fixture
def stream():
    return cp.cuda.Stream(non_blocking=True)


def test_what_is_captured_is_done_when_the_graph_is_launched(stream):
    x, y, host = ones(), cp.zeros(4, np.float32), pinned_array(4)
    runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        assert stream.is_capturing()
        scale(x, 2)
        runtime.memcpyAsync(y.data.ptr, x.data.ptr, 16, runtime.memcpyDeviceToDevice, stream.ptr)
        runtime.memcpyAsync(host.ctypes.data, y.data.ptr, 16, runtime.memcpyDeviceToHost, stream.ptr)
        runtime.memsetAsync(y.data.ptr, 0, 8, stream.ptr)
        graph = stream.end_capture()
    assert not stream.is_capturing()
    assert graph.operations == ["scale", "copy device to device", "copy device to host", "fill"]
    runtime.deviceSynchronize()
    assert list(x.get()) == [1] * 4
    for times in (1, 2):
        graph.upload(stream)
        graph.launch(stream)
        stream.synchronize()
        assert list(host) == [2**times] * 4
        assert list(y.get()) == [0, 0, 2**times, 2**times]


@pytest.mark.parametrize(
    "action",
    [
        lambda x, stream: stream.synchronize(),
        lambda x, stream: x.get(),
        lambda x, stream: float(x[0]),
        lambda x, stream: x.set(np.ones(4, np.float32)),
        lambda x, stream: cp.cuda.Device().synchronize(),
        lambda x, stream: stream.begin_capture(),
    ],
)
def test_what_waits_cannot_be_captured(stream, action):
    x = ones()
    runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        with pytest.raises(runtime.CUDARuntimeError) as error:
            action(x, stream)
        assert error.value.status == 900
        with pytest.raises(runtime.CUDARuntimeError, match="Invalidated"):
            scale(x, 2)
        with pytest.raises(RuntimeError, match="invalidated"):
            stream.is_capturing()
        with pytest.raises(runtime.CUDARuntimeError, match="Invalidated"):
            stream.end_capture()
    assert not stream.is_capturing()
    assert list(x.get()) == [1] * 4


def test_the_default_stream_is_not_captured_nor_used_beside_a_blocking_capture():
    with pytest.raises(RuntimeError, match=r"cannot capture on the default \(legacy\) stream"):
        cp.cuda.Stream.null.begin_capture()
    x, blocking = ones(), cp.cuda.Stream()
    blocking.begin_capture()
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorStreamCaptureImplicit"):
        scale(x, 2)


def test_a_capture_over_two_streams(stream):
    x, y, side = ones(1), cp.zeros(1, np.float32), cp.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    with stream:
        scale(x, 2)
    side.wait_event(stream.record())
    assert side.is_capturing()
    with side:
        launch("store", x, y)
    stream.wait_event(side.record())
    graph = stream.end_capture()
    assert not side.is_capturing()
    assert graph.operations == ["scale", "store"]
    graph.launch()
    assert y.item() == 2


def test_a_capture_that_leaves_work_unjoined_or_waits_for_what_came_before(stream):
    x, side = ones(1), cp.cuda.Stream(non_blocking=True)
    before = side.record()
    stream.begin_capture()
    inside = stream.record()
    side.wait_event(inside)
    with side:
        scale(x, 2)
    with pytest.raises(runtime.CUDARuntimeError, match="Unjoined"):
        stream.end_capture()
    stream.begin_capture()
    with pytest.raises(runtime.CUDARuntimeError, match="Isolation"):
        stream.wait_event(before)
    with pytest.raises(runtime.CUDARuntimeError, match="Invalidated"):
        stream.end_capture()
    with pytest.raises(runtime.CUDARuntimeError, match="CapturedEvent"):
        inside.synchronize()


def test_a_graph_whose_memory_was_freed(stream):
    with stream:
        stream.begin_capture()
        x = cp.zeros(4, np.float32)
        scale(x, 2)
        graph = stream.end_capture()
        graph.launch()
        assert list(x.get()) == [0] * 4
        del x
        graph.launch()
        with pytest.raises(cp.EmulatorError, match="in no array"):
            stream.synchronize()


# ---- memory ----


def test_the_pool_counts_and_keeps_what_is_freed():
    pool = cp.get_default_memory_pool()
    gc.collect()  # what other tests have left
    pool.free_all_blocks()
    used, total, free = pool.used_bytes(), pool.total_bytes(), pool.free_bytes()
    free_before, device_total = runtime.memGetInfo()
    pointer = cp.cuda.alloc(1000)
    assert (pool.used_bytes() - used, pool.total_bytes() - total) == (1024, 1024)
    assert runtime.memGetInfo() == (free_before - 1024, device_total) == cp.cuda.Device().mem_info
    address = pointer.ptr
    assert (pointer + 8).ptr == address + 8 == int(pointer) + 8
    assert (pointer + 8 - 8).mem is pointer.mem
    del pointer
    assert (pool.used_bytes() - used, pool.free_bytes() - free) == (0, 1024)
    assert cp.cuda.alloc(1024).ptr == address
    pool.free_all_blocks()
    assert pool.total_bytes() == total
    assert cp.cuda.alloc(0).ptr == 0


def test_out_of_memory():
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    with cp.options(device_memory=pool.used_bytes() + (1 << 20)):  # other tests' backends hold some
        kept = cp.cuda.alloc(600 << 10)
        with pytest.raises(cp.cuda.memory.OutOfMemoryError, match="Out of memory allocating 524,288 bytes"):
            cp.empty(1 << 17, np.float32)
        del kept
        cp.empty(1 << 17, np.float32)  # what was free is given back first
    pool.set_limit(size=1000)
    with pytest.raises(MemoryError, match="limit set to: 1,000 bytes"):
        cp.empty(1000, np.float32)
    pool.set_limit(0)


def test_memory_of_the_runtime_stays_until_it_is_freed(stream):
    address, host = runtime.malloc(16), np.arange(4, dtype=np.float32)
    runtime.memcpy(address, host.ctypes.data, 16, runtime.memcpyHostToDevice)
    copy = cp.zeros(4, np.float32)
    runtime.deviceSynchronize()
    runtime.memcpyAsync(copy.data.ptr, address, 16, runtime.memcpyDeviceToDevice, stream.ptr)
    with cp.recorded() as record:
        runtime.free(address)  # waits for what still reads it
    assert record.waits == ["device"]
    np.testing.assert_array_equal(copy.get(), host)
    assert runtime.pointerGetAttributes(address).type == 0
    assert runtime.malloc(0) == 0
    runtime.free(0)
    for nothing in (address, copy.data.ptr, 8):
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
            runtime.free(nothing)
    with cp.options(device_memory=0), pytest.raises(runtime.CUDARuntimeError, match="cudaErrorMemoryAllocation"):
        runtime.malloc(16 << 20)


def test_whose_memory_an_address_is():
    x, pinned, host = cp.empty(4, np.float32), cp.cuda.alloc_pinned_memory(100), np.zeros(4)
    middle = runtime.pointerGetAttributes(x.data.ptr + 12)
    assert (middle.type, middle.device, middle.devicePointer) == (2, 0, x.data.ptr + 12)
    assert runtime.pointerGetAttributes(x.data.ptr + 16).type == 0
    attributes = runtime.pointerGetAttributes(pinned.ptr)
    assert (attributes.type, attributes.hostPointer) == (1, pinned.ptr)
    assert runtime.pointerGetAttributes(host.ctypes.data).type == 0
    address = x.data.ptr
    del x
    assert runtime.pointerGetAttributes(address).type == 0


def test_pinned_memory_is_a_buffer():
    pinned = cp.cuda.alloc_pinned_memory(100)
    assert pinned.size() == pinned.mem.size == memoryview(pinned).nbytes == 512
    array = np.frombuffer(pinned, np.uint8)
    array[:] = 7
    assert array.ctypes.data == pinned.ptr == int(pinned)
    address = pinned.ptr
    del pinned
    assert runtime.pointerGetAttributes(address).type == 1  # the array keeps it
    del array
    assert cp.cuda.alloc_pinned_memory(100).ptr == address


def test_arrays_over_memory_of_others():
    owner = cp.asarray(np.arange(8, dtype=np.float32))
    address = owner.data.ptr
    memory = cp.cuda.UnownedMemory(address, owner.nbytes, owner, 0)
    view = cp.ndarray((2, 2), np.float32, cp.cuda.MemoryPointer(memory, 8))
    del owner
    np.testing.assert_array_equal(view.get(), [[2, 3], [4, 5]])
    assert view.data.ptr == address + 8


def test_copies_are_checked():
    x, host = ones(), np.zeros(8, np.float32)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 16, runtime.memcpyHostToDevice, 0)
    copy_async(x, host)
    with pytest.raises(cp.EmulatorError, match="a copy writes 32 bytes"):
        runtime.streamSynchronize(0)


# ---- arrays ----


def test_views_share_memory_and_keep_it():
    x = cp.asarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    address = x.data.ptr
    row = x[1]
    assert (row.data.ptr, row.shape, row.strides) == (address + 16, (4,), (4,))
    assert (x.ravel()[5:].data.ptr, x.T.strides, x[1, 2].shape) == (address + 20, (4, 16), ())
    assert x.reshape(4, 3).view(np.uint16).shape == (4, 6)
    assert (len(x), x.size, x.nbytes, x.itemsize, x.ndim, x.dtype) == (3, 12, 48, 4, 2, np.float32)
    assert not x[:, 1].flags.c_contiguous
    np.testing.assert_array_equal(x[:, 1].get(), [1, 5, 9])
    del x
    np.testing.assert_array_equal(row.get(), [4, 5, 6, 7])


def test_arrays_are_written_when_their_turn_comes():
    x = cp.zeros((2, 2), np.float32)
    x[0] = 3
    x[1, 1] = np.float32(4)
    x[1, :1] = x[0, :1]
    np.testing.assert_array_equal(x.get(), [[3, 3], [3, 4]])
    x.set(np.ones((2, 2), np.float32))
    y = x.astype(np.int32)
    x.fill(2)
    assert (y.get().sum(), x.copy().get().sum(), y.dtype) == (4, 8, np.int32)
    with pytest.raises(ValueError, match=r"of \(2, 2\) is set from one of \(4,\)"):
        x.set(np.ones(4, np.float32))
    out = np.zeros((2, 2), np.float32)
    assert x.get(out=out) is out
    assert out.sum() == 8


def test_arrays_are_no_host_arrays():
    x = ones()
    assert not isinstance(x, np.ndarray)
    with pytest.raises(TypeError, match="Implicit conversion to a NumPy array is not allowed"):
        np.asarray(x)
    with pytest.raises(TypeError, match="elementwise == is not emulated"):
        x == x  # noqa: B015
    with pytest.raises(TypeError):
        np.add(x, 1)
    assert cp.asarray(x) is x


def test_interfaces_to_other_frameworks():
    x = cp.zeros((3, 4), np.float32)
    interface = x.__cuda_array_interface__
    assert interface["data"] == (x.data.ptr, False)
    assert (interface["shape"], interface["typestr"], interface["strides"]) == ((3, 4), "<f4", None)
    assert x[:, 1].__cuda_array_interface__["strides"] == (16,)
    assert cp.empty(0).__cuda_array_interface__["data"][0] == 0
    assert x.__dlpack_device__() == (2, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dlpack_capsules_are_of_cuda_memory_and_keep_it(dtype):
    from gradengine.arrays.host import host_buffer
    from gradengine.errors import BufferRefused

    x = cp.asarray(np.ones(4, dtype))
    pool = cp.get_default_memory_pool()
    capsule = x.__dlpack__(stream=1)
    with pytest.raises(BufferRefused, match="cuda"):
        host_buffer(x, "w")
    used = pool.used_bytes()
    del x
    assert pool.used_bytes() == used
    del capsule
    assert pool.used_bytes() == used - 512


# ---- devices and records ----


def test_the_device():
    device = cp.cuda.Device()
    with cp.cuda.Device(0) as same:
        assert same == device
    assert (device.id, int(device), runtime.getDevice(), runtime.getDeviceCount()) == (0, 0, 0, 1)
    properties = runtime.getDeviceProperties(0)
    assert properties["name"] == b"CUDA emulator"
    assert device.compute_capability == f"{properties['major']}{properties['minor']}"
    assert ones().device == device
    assert device.attributes["MultiProcessorCount"] == properties["multiProcessorCount"]
    assert runtime.driverGetVersion() >= runtime.runtimeGetVersion() >= 12000
    with pytest.raises(runtime.CUDARuntimeError) as error:
        cp.cuda.Device(1).use()
    assert error.value.status == 101
    assert cp.cuda.is_available()


def test_without_a_device():
    with cp.options(device_count=0):
        assert not cp.cuda.is_available()
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorNoDevice"):
            cp.cuda.Device()


def test_what_is_asked_of_the_device_is_recorded(stream):
    x = ones()
    with cp.recorded() as record:
        scale(x, 2)
        y, host = cp.zeros(4, np.float32), pinned_array(4)
        copy_async(y, host)
        x.get()
        stream.synchronize()
        stream.begin_capture()
        with stream:
            launch("store", x, y)
        graph = stream.end_capture()
        graph.launch(stream)
    runtime.deviceSynchronize()
    assert record.operations == ["scale", "fill", "copy host to device", "copy device to host", "store", "graph"]
    assert record.launches == ["scale", "store"]
    assert record.copies == ["host to device", "device to host"]
    assert (record.fills, record.graphs, record.allocations, record.pinned_allocations) == (1, 1, [16], [512])
    assert record.waits == ["copy", "stream"]


def test_options_hold_until_the_end_of_the_block_and_for_launches_made_there():
    x = ones()
    with cp.options(check=False, order="reverse"):
        assert cp.settings().order == "reverse"
        launch("scale", x, np.float32(2), np.int64(5), block=64)
    assert cp.settings() == cp.Settings()
    assert list(x.get()) == [2] * 4  # the fifth element lies in what surrounds the array
    with pytest.raises(TypeError), cp.options(unknown=1):
        pass
