"""Are the tests sharp? A bug is put into each kernel, one at a time, and has to be caught.

Each mutation is a change to the text of the real source. Four small scenarios, one for each kernel, pass with the
sources as they are; with any of the mutations one of them fails: by a wrong result, or because the emulator finds a
race, an access out of bounds or a misaligned one.
"""

import re
from collections.abc import Callable

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import Backend, device_backend
from folds import Fold, accumulate, finalise, hand_back, measure, status_of, zero_sums

from gradengine.errors import DeviceFailed
from gradengine.kernels import ClipPlan, CudaKernels, launch, toolchain

NAN, INF = np.nan, np.inf
CHUNK = 4096  # of the scenarios: two units for each thread, so that the step from one to the next counts
SIZES = (9001, 4096 + 3, 40, 23, 15, 7, 1, 0, 64)


@pytest.fixture(autouse=True)
def _long_chunks_and_one_order(monkeypatch):
    """So that a mutation is caught by the scenario, not by the luck of an order."""
    monkeypatch.setattr(launch, "_WANTED_CHUNKS", 2)
    with cuda_emulator.options(order="forward"):
        yield


def values_of(seed: int, size: int, dtype: str) -> np.ndarray:
    """Values of all magnitudes: units of large ones, of small ones, subnormals and zeros among them."""
    values = draw.random_array(seed, size).astype(np.float64)
    scale = np.array([1, 1e-30, 1e30, 1e-41, 0, 1e-7])[np.arange(size) // 16 % 6]
    with np.errstate(over="ignore"):
        return (values * (scale if dtype != "float16" else np.clip(scale, 0, 1))).astype(draw.DTYPES[dtype])


def assert_sums(sums, arrays: list[np.ndarray]) -> None:
    """Each chunk's squared sum and count of non-finite elements, each at its place."""
    squares, counts = sums.values.get(), sums.non_finite.get()
    for position, array in enumerate(arrays):
        for _, index, start, stop in sums.chunks([position]):
            part = array[start:stop].astype(np.longdouble)
            assert counts[index] == np.count_nonzero(~np.isfinite(part))
            if counts[index]:
                assert not np.isfinite(squares[index])
            else:
                assert squares[index] == pytest.approx(float(np.sum(part * part)), rel=1e-6, abs=0)


def accumulates(backend: Backend) -> None:
    """Micro-batches of several dtypes, most of them at odd addresses; then of one dtype, most of them at even ones."""
    kinds = list(draw.DTYPES)
    accumulates_micro_batches(backend, lambda p: kinds, lambda p: 0 if p == 1 else 2 * p + 1)
    accumulates_micro_batches(backend, lambda p: [kinds[p % 3]] * 3, lambda p: 1 if p == 2 else 0)


def accumulates_micro_batches(
    backend: Backend, dtypes_of: Callable[[int], list[str]], offset_of: Callable[[int], int]
) -> None:
    kernels, weights = backend.kernels, (0.3, 1 + 2.0**-12, 1.0)
    sums, folds, expected = kernels.partial_sums(SIZES), [], []
    assert sums.chunk == CHUNK
    targets = [values_of(p, size, "float32") for p, size in enumerate(SIZES)]
    targets[0][5000], targets[1][:2] = NAN, (INF, -INF)
    for p, size in enumerate(SIZES):
        arrays = [values_of(10 * p + i, size, dtype) for i, dtype in enumerate(dtypes_of(p))]
        arrays[1 if p == 2 else 0][:1] = NAN
        mine = [arrays[i] for i in range(3) if (p + i) % 4]  # each lacks another micro-batch, one none
        mine_weights = [weights[i] for i in range(3) if (p + i) % 4]
        views = tuple(backend.buffer_at(array, offset_of(p)) for array in mine)
        folds.append(Fold(p, p % 3 == 0, views, tuple(np.float32(w) for w in mine_weights)))
        with np.errstate(all="ignore"):
            expected.append(draw.folded(targets[p], mine, mine_weights, p % 3 == 0))
    buffers = [backend.buffer(target) for target in targets]
    accumulate(kernels, buffers, folds, sums)
    for buffer, values in zip(buffers, expected, strict=True):
        draw.assert_same_values(backend.get(buffer), values)
    assert_sums(sums, expected)


def measures(backend: Backend) -> None:
    kernels, kinds = backend.kernels, list(draw.DTYPES)
    arrays = [values_of(p, size, kinds[p % 3]) for p, size in enumerate(SIZES)]
    arrays[8][:] = 1e-30
    arrays[8][16:32] = np.exp2([-54, *[-63.5] * 7] * 2)  # squares of which fp32 keeps the largest
    arrays[0][[3, 5000, 8999]] = NAN
    arrays[2][[0, 20]] = -INF
    sums = kernels.partial_sums(SIZES)
    buffers = [backend.buffer_at(array, p % 8 + 1 if p in {2, 3} else 0) for p, array in enumerate(arrays)]
    measure(kernels, buffers, sums, range(len(SIZES)))
    assert_sums(sums, arrays)


def finalises(backend: Backend) -> None:
    """Three steps: one is good, one has bad elements, one is good again."""
    sizes = [9001, *[1 + p % 7 for p in range(70)]]
    plan = ClipPlan((0, *[p % 2 for p in range(70)]), (3.0, 5.0), (None, *[p % 3 for p in range(70)]))
    arrays = [draw.random_array([7, p], size) for p, size in enumerate(sizes)]
    bad = [array.copy() for array in arrays]
    bad[18][:] = bad[2][1:] = NAN  # 2 and 18 are of one warp
    late = [array.copy() for array in arrays]
    late[0][[4096 + 700, 4096 + 700 + 512, 8500]] = -INF  # of one thread, and of another chunk
    kernels, sums = backend.kernels, backend.kernels.partial_sums(sizes)
    targets = [kernels.device.allocate(size) for size in sizes]
    for step, given in enumerate((arrays, bad, late, arrays), 1):
        fold_into(backend, targets, given, sums)
        decision = finalise(kernels, targets, sums, plan, 2.0, zero_if_bad=True)
        verdict = status_of(decision)
        is_bad = given is not arrays
        assert (verdict.step, verdict.skipped, verdict.is_bad) == (step, is_bad, is_bad)
        where = {1: (0, 0, 0), 2: (2, 1, 1 + 4), 3: (0, 4096 + 700, 3), 4: (0, 4096 + 700, 3)}[step]
        assert (verdict.bad_component, verdict.bad_index, verdict.non_finite) == where
        assert (verdict.bad_steps, verdict.bad_step) == {1: (0, 0), 2: (1, 2), 3: (2, 3), 4: (2, 3)}[step]
        assert_norms(decision, verdict, given, plan)


def fold_into(backend, targets, arrays, sums) -> None:
    folds = [Fold(p, True, (backend.buffer(array),), (np.float32(1),)) for p, array in enumerate(arrays)]
    accumulate(backend.kernels, targets, folds, sums)


def assert_norms(decision, verdict, arrays, plan) -> None:
    def exact(members) -> float:
        with np.errstate(invalid="ignore"):
            return draw.exact_norm([arrays[m] for m in members]) / 2

    def same(found, members_of) -> None:
        for norm, members in zip(found, members_of, strict=True):
            expected = exact(members)
            if np.isfinite(expected):
                assert float(norm) == pytest.approx(expected, rel=1e-6)
            else:
                assert not np.isfinite(float(norm))

    same([decision.norm], [range(len(arrays))])
    same(decision.group_norms, plan.members)
    same(decision.block_norms, plan.block_members)
    same(decision.component_norms, [[p] for p in range(len(arrays))])
    norms = [float(norm) for norm in decision.group_norms]
    scales = [min(1.0, bound / n) if np.isfinite(n) else 1.0 for n, bound in zip(norms, plan.max_norms, strict=True)]
    assert [float(scale) for scale in decision.scales] == scales
    assert [float(factor) for factor in decision.factors] == [np.float32(scale / 2) for scale in scales]
    assert (verdict.scale, verdict.factor) == (np.float32(min(scales)), np.float32(scales[0] / 2))
    assert float(decision.inverse) == np.float32(2 / scales[0])


def hands_back(backend: Backend) -> None:
    scales_to_other_memory(backend)
    scales_by_group(backend)
    scales_in_place(backend)
    skips(backend)


def scales_to_other_memory(backend: Backend) -> None:
    """Every offset and dtype to every other, destinations and sources among each other in one memory."""
    for turn, dtype in enumerate(draw.DTYPES):
        sources = [values_of(p, size, dtype) for p, size in enumerate(SIZES)]
        whole, views = backend.buffers_in_one(sources, 1 + 2 * turn)
        pairs = [(p, name) for p, name in enumerate(("bfloat16", "float32", "float16", "bfloat16")) if p % 2]
        there = [backend.buffer_at(np.full(SIZES[p], 7, draw.DTYPES[name]), 3 + turn) for p, name in pairs]
        # What lies between them is scaled in place by the same launch.
        moving = [views[p] for p, _ in pairs] + [views[p] for p in (0, 2, 4)]
        backend.kernels.scale(moving, np.float32(0.3), [*there, *(views[p] for p in (0, 2, 4))])
        for (p, name), buffer in zip(pairs, there, strict=True):
            draw.assert_same_values(backend.get(buffer), draw.scaled(sources[p], 0.3, name))
        expected = [draw.scaled(s, 0.3, dtype) if p in {0, 2, 4} else s for p, s in enumerate(sources)]
        draw.assert_same_values(backend.get(whole)[1 + 2 * turn :], np.concatenate(expected))


def scales_by_group(backend: Backend) -> None:
    arrays, plan = [np.full(40, 2, np.float32), np.full(30, 5, np.float32)], ClipPlan((1, 0), (3.0, 1.0))
    buffers = [backend.buffer(array) for array in arrays]
    sums = backend.kernels.partial_sums([40, 30])
    measure(backend.kernels, buffers, sums, [0, 1])
    decision = finalise(backend.kernels, None, sums, plan, 1.0, zero_if_bad=True)
    hand_back(backend.kernels, buffers, decision, plan.groups, buffers)
    factors = [np.float32(bound / np.sqrt(size) / value) for bound, size, value in ((1.0, 40, 2), (3.0, 30, 5))]
    for buffer, array, factor in zip(buffers, arrays, factors, strict=True):
        np.testing.assert_allclose(backend.get(buffer), array * factor, rtol=2e-7)


def scales_in_place(backend: Backend) -> None:
    """Factor 1 leaves even a signalling NaN as it is; ties go to even, NaN stays NaN."""
    signalling = np.full(50, 0x7F800001, np.uint32).view(np.float32)
    buffer, plan = backend.buffer(signalling), ClipPlan((0,), (INF,))
    sums = backend.kernels.partial_sums([50])
    zero_sums(backend.kernels, sums, [0])
    decision = finalise(backend.kernels, None, sums, plan, 1.0, zero_if_bad=True)
    hand_back(backend.kernels, [buffer], decision, [0], [buffer])
    draw.assert_same_bits(backend.get(buffer), signalling)
    ties = np.tile(np.array([0x3F808000, 0x3F818000, 0x7FFFFFFF, 0xFF800001, 0x3F808001], np.uint32), 9)
    there = backend.buffer(np.full(45, 7, draw.DTYPES["bfloat16"]))
    hand_back(backend.kernels, [backend.buffer(ties.view(np.float32))], decision, [0], [there])
    draw.assert_same_values(backend.get(there), draw.scaled(ties.view(np.float32), 1, "bfloat16"))


def skips(backend: Backend) -> None:
    arrays = [np.full(size, NAN, np.float32) for size in (40, 4096)]
    sums, plan = backend.kernels.partial_sums([40, 4096]), ClipPlan((0, 1), (INF, INF))
    buffers = [backend.buffer_at(array, 1) for array in arrays]
    measure(backend.kernels, buffers, sums, [0, 1])
    decision = finalise(backend.kernels, None, sums, plan, 1.0, zero_if_bad=True)
    hand_back(backend.kernels, buffers, decision, plan.groups, buffers)
    for buffer in buffers:
        assert not backend.get(buffer).any()


SCENARIOS: dict[str, Callable[[Backend], None]] = {
    "accumulate": accumulates,
    "measure": measures,
    "finalise": finalises,
    "hand_back": hands_back,
}


# A kernel's variants are the same code again, and take most of the time to compile: all but one are emptied.
OTHER_VARIANTS = re.compile(r"^[A-Z_]+\((\w+_large|\w+_table|accumulate_1_small), .*\)$", re.MULTILINE)
OTHER_BODIES = re.compile(r"(\b\w+_table\([^{]*\{)[^}]*\}")
BARRIER = "  __syncthreads();\n"

# By kernel: the text that is right (it stands there once), and what a tired programmer might write.
MUTATIONS = {
    "accumulate": [
        ("  __syncthreads();\n  if (warp == 0) part", "  if (warp == 0) part"),
        ("return emu_add_rn(a, b);", "return a + b;"),
        ("return emu_mul_rn(a, b);", "return a * b;"),
        (
            "total.at[k] = is_first ? term : add(total.at[k], term);",
            "total.at[k] = is_first ? term : narrow(widen(total.at[k]) + widen(weight[j]) * widen(values.at[k]));",
        ),
        (
            "total = is_first ? term : add(total, term);",
            "total = is_first ? term : narrow(widen(total) + widen(weight[j]) * widen(value));",
        ),
        ("= address[row.entry] & OVERWRITE;", "= false;"),
        ("add(total.at[k], term);\n      }\n      is_first = false;", "add(total.at[k], term);\n      }"),
        ("  if (!is_nothing(j)) bits[j] = load", "  bits[j] = load"),
        ("return either == both ? both : MIXED;", "return both;"),
        ("memory.begin & 15u ? MIXED : memory.dtype", "memory.dtype"),
        ("if (edge < share.stop) {", "if (edge < share.first) {"),
        ("if (squares) part.squares += square(", "if (0) part.squares += square("),
        ("chunk + head, size);\n    first", "chunk + head, size - 1);\n    first"),
        ("fold.weight[j] = weight[j]", "fold.weight[j] = weight[SOURCES - 1 - j]"),
        ("address[j * entries + row.entry]", "address[j * (entries + 1) + row.entry]"),
        ("DTYPE_SHIFT = 56", "DTYPE_SHIFT = 57"),
        ("if (bytes & 4u) {", "if (false) {"),
        ("if (bytes & 2u) {", "if (false) {"),
        ("head + (size - head - UNIT) / UNIT * UNIT", "head + (size - head) / UNIT * UNIT"),
        ("row += UNIT * ACCUMULATE_THREADS", "row += 2 * UNIT * ACCUMULATE_THREADS"),
        ("__syncwarp();  // what", "// what"),
        (
            "of_even[i] = odd ? other : kept, of_odd[i] = odd ? kept : other;",
            "of_even[i] = odd ? kept : other, of_odd[i] = odd ? other : kept;",
        ),
        ("if (even + UNIT < last) store_16", "store_16"),
        ("      store_in_pairs(", "      if (at < share.last) store_in_pairs("),
    ],
    "measure": [
        (" && sum <= LARGEST_FLOAT", ""),
        ("sum >= SAFE_SQUARE && ", ""),
        ("#define SAFE_SQUARE 7.8886090522101181e-31f", "#define SAFE_SQUARE 1.1754943508222875e-38f"),
        ("#define SAFE_SQUARE 7.8886090522101181e-31f", "#define SAFE_SQUARE 7.8886090522101181e-34f"),
        ("if (at + d * stride < share.last) bits[d] = load", "bits[d] = load"),
        ("at += DEPTH * stride", "at += stride"),
        ("(bits[d], buffer", "(bits[0], buffer"),
        ("squares[place] = part.squares", "squares[component.first] = part.squares"),
        ("non_finite[place] = part.non_finite", "non_finite[component.first] = part.non_finite"),
        (
            "for (int distance = 16; distance > 0; distance /= 2) {\n    part",
            "for (int distance = 16; distance > 1; distance /= 2) {\n    part",
        ),
        ("(bits & 0x7f800000u) == 0x7f800000u", "(bits & 0x7fffffffu) > 0x7f800000u"),
        ("start = chunk_index ? chunk_index * chunk + head : 0;", "start = 0;"),
    ],
    "finalise": [
        ("  __syncthreads();  // a call before", "  // a call before"),
        ("least[warp] = value;\n  __syncthreads();\n", "least[warp] = value;\n"),
        ("  __syncthreads();\n  if (threadIdx.x != 0) return;", "  if (threadIdx.x != 0) return;"),
        ("if (!isfinite(total[i]) && bad == NONE) bad = c", "if (!isfinite(total[i])) bad = c"),
        ("i < stop && index == NONE;", "i < stop;"),
        ("index = (u64)i;", "index = (u64)i + 1;"),
        ("for (u32 k = threadIdx.x; k < chunks", "for (u32 k = threadIdx.x + 1; k < chunks"),
        ("is_there = k + 32 * row < chunks;", "is_there = true;"),
        ("component.first + lane, chunks", "component.first, chunks"),
        ("chunk_shift), lane) - lane;", "chunk_shift), lane);"),
        ("s ? segments.member[m] : m", "m"),
        ("if (lane < TOGETHER && own", "if (lane < 1 && own"),
        ("if (lane < TOGETHER && own < components)", "if (lane < TOGETHER)"),
        ("if (c + i * WARPS >= components) continue;", ""),
        ("(lane == i) own_total = total[i],", "(lane == i)"),
        ("m < segments.start[s + 1]; m += 32", "m < segments.start[s + 1]; m += 1 << 20"),
        ("max_norm < norm && isfinite(norm)", "max_norm < norm"),
        ("s > segments.groups) continue", "s >= segments.groups) continue"),
        ("norms[s] = sqrt(total) / divisor;", "norms[s] = sqrt(total);"),
        ("verdict->scale = narrow(scale);", "verdict->scale = narrow(scale), verdict->bad_step = 0;"),
        ("scales[g] < scale ?", "scales[g] > scale ?"),
        ("bad != NONE && zero_if_bad", "zero_if_bad"),
    ],
    "hand_back": [
        ("const bool zero = skipped && *skipped != 0.0f;", "const bool zero = false;"),
        ("zero ? 0.0f : multiply(load_one", "multiply(load_one"),
        ("if (!zero && factor == 1.0f && source.begin", "if (false && source.begin"),
        ("factor == 1.0f && source.begin == destination.begin", "factor == 1.0f"),
        ("const int head = (int)((16u - ", "const int head = 0 * (int)((16u - "),
        ("start = chunk_index ? chunk_index * chunk + head : 0;", "start = chunk_index ? chunk_index * chunk : 0;"),
        ("chunk_index ? start : head + UNIT", "chunk_index ? start : head"),
        ("return emu_mul_rn(a, b);", "return a * b;"),
        ("bits + 0x7fffu + (bits >> 16 & 1u)", "bits + 0x8000u"),
        ("(bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest", "nearest"),
        ("factors[component.group]", "factors[0]"),
        ("load_quads<1>(source.at(at), word)", "load_16_bytes(source.at(at), word)"),
        ("at += QUAD * HAND_BACK_THREADS", "at += UNIT * HAND_BACK_THREADS"),
    ],
}


def mutated_source(kernel: str, old: str, new: str) -> Callable[[str], str]:
    """Our sources with a bug in one."""
    original = toolchain.source

    def source(name: str) -> str:
        text = original(name)
        if name != kernel:
            return text
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        text = OTHER_VARIANTS.sub(r'extern "C" __global__ void \1() {}', text.replace(old, new))
        return OTHER_BODIES.sub(r"\1}", text)

    return source


@pytest.mark.parametrize("kernel", SCENARIOS)
def test_without_a_bug_nothing_is_caught(emulated, kernel):
    SCENARIOS[kernel](emulated)


@pytest.mark.parametrize(("kernel", "bug"), [(kernel, bug) for kernel in MUTATIONS for bug in MUTATIONS[kernel]])
def test_a_bug_is_caught(emulated, kernel, bug, monkeypatch):
    from real_cupy.loaded import expected_faults

    monkeypatch.setattr(toolchain, "source", mutated_source(kernel, *bug))
    xp = emulated.kernels.xp
    backend = device_backend(CudaKernels(xp))
    errors = AssertionError, DeviceFailed, xp.cuda.runtime.CUDARuntimeError, xp.cuda.driver.CUDADriverError
    with expected_faults(), pytest.raises(errors):
        SCENARIOS[kernel](backend)
