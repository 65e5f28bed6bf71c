// Whether a micro-batch is finite as a whole, from the counts that `measure` has left of each chunk of its gradients; and
// what the window's micro-batches count that are not dropped.

#include "common.cuh"

enum { JUDGE_THREADS = 256 };

struct Drops {  // `DROPS` of kernels/kept.py
  double weight;  // of the window's micro-batches that count
  u64 dropped;    // micro-batches that do not
  float is_bad;   // 1 if the last one does not
  u32 unused;
};

extern "C" __global__ void __launch_bounds__(JUDGE_THREADS)
    judge(const u32* non_finite, u32 chunks, float weight, u32 is_first, Drops* drops) {
  __shared__ u32 found[JUDGE_THREADS];
  u32 is_bad = 0;
  for (u32 chunk = threadIdx.x; chunk < chunks; chunk += JUDGE_THREADS) is_bad |= non_finite[chunk];
  found[threadIdx.x] = is_bad;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 thread = 1; thread < JUDGE_THREADS; ++thread) is_bad |= found[thread];
  const double before = is_first ? 0.0 : drops->weight;
  drops->weight = is_bad ? before : before + widen(weight);
  drops->dropped = (is_first ? 0 : drops->dropped) + (is_bad ? 1 : 0);
  drops->is_bad = is_bad ? 1.0f : 0.0f;
}

// Takes the addresses of a micro-batch that is dropped out of a launch of K1. What K1 is to overwrite it then zeroes, and
// what was measured before still holds. K1 itself has no branch for it, which took it 14 registers on sm_86.
extern "C" __global__ void __launch_bounds__(JUDGE_THREADS) mask(const float* is_bad, u64* address, u32 entries) {
  if (*is_bad == 0.0f) return;
  for (u32 entry = threadIdx.x; entry < entries; entry += JUDGE_THREADS) address[entry] &= OVERWRITE;
}
