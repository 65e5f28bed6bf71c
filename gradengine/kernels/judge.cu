// Whether a micro-batch is finite as a whole, from the counts that `measure` has left of each chunk of its gradients; and
// what the window's micro-batches count that are not dropped.

#include "common.cuh"

enum { JUDGE_THREADS = 256 };

struct Drops {  // `drops_of` of kernels/kept.py
  double weight;  // of the window's micro-batches that count
  u64 dropped;    // micro-batches that do not
  float is_bad;   // 1 if the last one does not
  u32 unused;
  u64 address[1];  // of the last one's gradients, one for each component
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

// Writes the addresses of a micro-batch for K1 to read, without the gradients if it is dropped. K1 then zeroes what it is
// to overwrite, and what was measured before still holds. A branch in K1 itself took it 14 registers on sm_86.
__device__ __forceinline__ void mask(Drops* drops, u32 entries, const u64* address) {
  const u64 kept = drops->is_bad == 0.0f ? ~0ull : OVERWRITE;
  for (u32 entry = threadIdx.x; entry < entries; entry += JUDGE_THREADS) drops->address[entry] = address[entry] & kept;
}

template <int CAPACITY>
struct Source {
  u64 address[CAPACITY];
  float weight;  // K1's
};

#define MASK(NAME, CAPACITY)                                                                                      \
  extern "C" __global__ void __launch_bounds__(JUDGE_THREADS)                                                     \
      NAME(Drops* drops, u32 entries, const __grid_constant__ Source<CAPACITY> source) {                          \
    mask(drops, entries, source.address);                                                                         \
  }

MASK(mask_small, 480)
#ifndef SMALL_ARGUMENTS_ONLY
MASK(mask_large, 4000)
#endif

extern "C" __global__ void __launch_bounds__(JUDGE_THREADS)
    mask_table(Drops* drops, u32 entries, float weight, const u64* address) {
  mask(drops, entries, address);
}
