// K1, accumulate: arena = [arena +] w0*g0 + w1*g1 + ..., for all components in one launch.
//
// A thread block takes one chunk of one component through all micro-batches held: each source is read once, the arena
// once, and written once. Sources may differ in dtype and alignment. On request the squared sum of what was written and
// the number of its non-finite elements are left for K2, so that the norm costs no pass of its own.

#include "common.cuh"

enum { ACCUMULATE_THREADS = 256 };

// The arena is ours: fp32, and each component begins on a 128-byte boundary.
__device__ __forceinline__ Values load_target(const Stretch& target, i64 first) {
  Bits bits;
  load_16_bytes(target.begin + 4 * first, bits.word);
  load_16_bytes(target.begin + 4 * first + 16, bits.word + 4);
  return widened_from<FLOAT32>(bits);
}

// One unit: every product and every sum is rounded by itself, in the order the micro-batches came.
template <int SOURCES>
__device__ __forceinline__ Values folded(const Stretch& target, i64 first, bool overwrite, i64 size,
                                         const u64 (&source)[SOURCES], const float (&weight)[SOURCES]) {
  Bits bits[SOURCES];
  Values total = {};
  if (!overwrite) total = load_target(target, first);
#pragma unroll
  for (int j = 0; j < SOURCES; ++j)  // all loads before the first use of one
    if (source[j] & ADDRESS) bits[j] = load(Stretch(source[j], size), first);
#pragma unroll
  for (int j = 0; j < SOURCES; ++j) {
    if (!(source[j] & ADDRESS)) continue;
    const Values values = widened(bits[j], Stretch(source[j], size).dtype);
#pragma unroll
    for (int k = 0; k < UNIT; ++k) {
      const float term = weight[j] == 1.0f ? values.at[k] : multiply(weight[j], values.at[k]);
      total.at[k] = overwrite ? term : add(total.at[k], term);
    }
    overwrite = false;
  }
  return total;
}

template <int SOURCES>
__device__ __forceinline__ float folded_one(const Stretch& target, i64 index, bool overwrite, i64 size,
                                            const u64 (&source)[SOURCES], const float (&weight)[SOURCES]) {
  float total = overwrite ? 0.0f : load_one(target, index);
  for (int j = 0; j < SOURCES; ++j) {
    if (!(source[j] & ADDRESS)) continue;
    const float value = load_one(Stretch(source[j], size), index);
    const float term = weight[j] == 1.0f ? value : multiply(weight[j], value);
    total = overwrite ? term : add(total, term);
    overwrite = false;
  }
  return total;
}

// `address` holds a row of `entries` for each source; a 0 in it is a component that this micro-batch had nothing for.
template <int SOURCES>
__device__ __forceinline__ void accumulate(const Row* rows, const Target* targets, u32 entries, i64 chunk,
                                           double* squares, u32* non_finite, const u64* address, const float* weight) {
  const Row row = rows[blockIdx.x];
  const Target component = targets[row.entry];
  const bool overwrite = address[row.entry] & OVERWRITE;
  u64 source[SOURCES];
  float factor[SOURCES];
  bool any = false;
#pragma unroll
  for (int j = 0; j < SOURCES; ++j) {
    source[j] = address[j * entries + row.entry];
    factor[j] = weight[j];
    any |= (source[j] & ADDRESS) != 0;
  }
  if (!any) return;

  const Stretch target(component.address & ADDRESS, component.size);
  const Share share(component.size, row.chunk, chunk, 0);
  Partial part = {0.0, 0};
  for (i64 at = share.first + UNIT * threadIdx.x; at < share.last; at += UNIT * ACCUMULATE_THREADS) {
    const Values total = folded(target, at, overwrite, component.size, source, factor);
    store(target, at, rounded_to<FLOAT32>(total));
    if (squares) part.squares += sum_of_squares(total, part.non_finite);
  }
  const i64 edge = share.edge(threadIdx.x);
  if (edge < share.stop) {
    const float total = folded_one(target, edge, overwrite, component.size, source, factor);
    store_one(target, edge, total);
    if (squares) part.squares += square(total, part.non_finite);
  }
  if (!squares) return;
  part = block_sum<ACCUMULATE_THREADS>(part);
  if (threadIdx.x == 0) {
    squares[component.first + row.chunk] = part.squares;
    non_finite[component.first + row.chunk] = part.non_finite;
  }
}

template <int CAPACITY, int SOURCES>
struct Sources {
  u64 address[CAPACITY];
  float weight[SOURCES];
};
template <int SOURCES>
struct Weights {
  float weight[SOURCES];
};

// By value: the addresses travel with the launch, so there is no copy to order and nothing that a capture could lose.
// 4 KB of arguments is what every driver takes, 32 KB what CUDA 12.1 and later do.
#define ACCUMULATE(NAME, CAPACITY, SOURCES)                                                                       \
  extern "C" __global__ void __launch_bounds__(ACCUMULATE_THREADS)                                                \
      NAME(const Row* rows, const Target* targets, u32 entries, i64 chunk, double* squares, u32* non_finite,      \
           const __grid_constant__ Sources<CAPACITY, SOURCES> sources) {                                          \
    accumulate<SOURCES>(rows, targets, entries, chunk, squares, non_finite, sources.address, sources.weight);     \
  }

// More addresses than that come from device memory, whereto a copy on the same stream brought them.
#define ACCUMULATE_TABLE(NAME, SOURCES)                                                                           \
  extern "C" __global__ void __launch_bounds__(ACCUMULATE_THREADS)                                                \
      NAME(const Row* rows, const Target* targets, u32 entries, i64 chunk, double* squares, u32* non_finite,      \
           const __grid_constant__ Weights<SOURCES> weights, const u64* address) {                                \
    accumulate<SOURCES>(rows, targets, entries, chunk, squares, non_finite, address, weights.weight);             \
  }

ACCUMULATE(accumulate_1_small, 480, 1)
ACCUMULATE(accumulate_4_small, 480, 4)
#ifndef SMALL_ARGUMENTS_ONLY
ACCUMULATE(accumulate_1_large, 4000, 1)
ACCUMULATE(accumulate_4_large, 4000, 4)
#endif
ACCUMULATE_TABLE(accumulate_1_table, 1)
ACCUMULATE_TABLE(accumulate_4_table, 4)
