"""Clip bf16 on a CPU by ours, by torch, and by a C++ loop over the same bytes on as many threads.

Run: python measured/clip_bf16.py THREADS [BEFORE, the folder of another checkout] > measured/results/NAME.json

Six tensors of 8 million elements, clipped to 0.7 of their norm. The loop passes over them twice. NumPy passes over a
chunk in the cache with each operation, too. Variants take turns; medians. One thread is timed by its CPU time.
"""

import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import torch

TENSORS, ELEMENTS, ROUNDS, THREADS = 6, 8_000_000, 25, int(sys.argv[1])
TYPES = (ctypes.c_void_p, ctypes.c_long, ctypes.c_float)
LOOP = """
#include <bit>
#include <cstdint>
static inline float wide(uint16_t value) { return std::bit_cast<float>(uint32_t(value) << 16); }
extern "C" double squares(const uint16_t* p, long n) {
    double sum = 0;
    for (const uint16_t* row = p; row < p + n; row += 256) {
        float part = 0;
        for (int i = 0; i < 256; i++) part += wide(row[i]) * wide(row[i]);
        sum += part;
    }
    return sum;
}
extern "C" void scale(uint16_t* p, long n, float factor) {
    for (long i = 0; i < n; i++) {
        uint32_t bits = std::bit_cast<uint32_t>(wide(p[i]) * factor);
        p[i] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    }
}
"""
path, size = str(Path(tempfile.mkdtemp(), "loop.so")), ELEMENTS // THREADS
command = f"g++ -std=c++20 -Ofast -march=native -shared -fPIC -xc++ - -o {path}"
subprocess.run(command.split(), input=LOOP.encode(), check=True)  # noqa: S603
library, each = ctypes.CDLL(path), map if THREADS == 1 else ThreadPoolExecutor(THREADS).map
library.squares.restype = ctypes.c_double
library.squares.argtypes, library.scale.argtypes = TYPES[:2], TYPES


def _by_loop(tensors, bound):
    parts = [tensor.data_ptr() + 2 * size * i for tensor in tensors for i in range(THREADS)]
    norm = sum(each(lambda part: library.squares(part, size), parts)) ** 0.5
    list(each(lambda part: library.scale(part, size, bound / norm), parts))


def _by_torch(tensors, bound):
    torch._foreach_mul_(tensors, torch.clamp(bound / (torch.nn.utils.get_total_norm(tensors) + 1e-6), max=1.0))


def _ours(folder):
    for name in [name for name in sys.modules if name.partition(".")[0] == "gradengine"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    clip, kernels = import_module("gradengine.clip"), import_module("gradengine.kernels.host").HostKernels(THREADS)
    state = clip.FusedClipState([ELEMENTS] * TENSORS, kernels)
    return lambda tensors, bound: clip.clip_gradients_fused(tensors, bound, state)


torch.set_num_threads(THREADS)
given, bound = [torch.randn(ELEMENTS).bfloat16() for _ in range(TENSORS)], 0.7 * (TENSORS * ELEMENTS) ** 0.5
variants = {"torch": _by_torch, "C++ loop": _by_loop, "ours": _ours(str(Path(__file__).parent.parent))}
variants |= {f"ours at {folder}": _ours(folder) for folder in sys.argv[2:]}
times, clock = {name: [] for name in variants}, time.thread_time if THREADS == 1 else time.perf_counter
for _ in range(ROUNDS):
    for name, clip in variants.items():
        tensors = [tensor.clone() for tensor in given]
        began = clock()
        clip(tensors, bound)
        times[name].append(1e3 * (clock() - began))
report = {"threads": THREADS, "torch": torch.__version__, "columns": ["ms", "of torch's"]}
for name, values in times.items():
    ratios = [ours / theirs for ours, theirs in zip(values, times["torch"], strict=True)]
    report[name] = [round(statistics.median(column), 2) for column in (values, ratios)]
print(json.dumps(report))
