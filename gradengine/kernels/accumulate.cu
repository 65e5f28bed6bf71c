// K1, accumulate: arena = [arena +] w0*g0 + w1*g1 + ..., for all components in one launch.
//
// A thread block takes one chunk of one component through all micro-batches held: each source is read once, the arena
// once, and written once. Sources may differ in dtype and alignment. On request the squared sum of what was written and
// the number of its non-finite elements are left for K2, so that the norm costs no pass of its own.

#include "common.cuh"

enum { ACCUMULATE_THREADS = 256 };

// fp32 units of a warp, each lane's beside that of the lane before it. Two lanes exchange a quad, so that each store of
// the warp fills sectors of 32 bytes. Else one fills all first halves, and the next the second ones. On an H200 that was
// slower in each case: a set of fp32 gradients took 1.152 ms and takes 1.137 ms.
__device__ __forceinline__ void store_in_pairs(const Stretch& to, i64 first, i64 last, const Bits& bits) {
  const bool odd = threadIdx.x % 2;
  u32 of_even[4], of_odd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 kept = odd ? bits.word[i + 4] : bits.word[i];
    const u32 other = __shfl_xor_sync(0xffffffffu, odd ? bits.word[i] : bits.word[i + 4], 1);
    of_even[i] = odd ? other : kept, of_odd[i] = odd ? kept : other;
  }
  __syncwarp();  // what the neighbour has read may be written now
  const i64 even = odd ? first - UNIT : first;
  const u64 address = to.at(even) + (odd ? 16 : 0);
  if (even < last) store_16_bytes(address, of_even);
  if (even + UNIT < last) store_16_bytes(address + 4 * UNIT, of_odd);
}

// What a thread block folds into its chunk. The arena is ours: fp32, and each component begins on a 128-byte boundary.
template <int SOURCES>
struct Fold {
  Stretch target;
  bool overwrite, measured;
  u64 source[SOURCES];  // as the launcher packs them; 0: this micro-batch had nothing
  float weight[SOURCES];

  __device__ __forceinline__ bool is_nothing(int j) const { return !(source[j] & ADDRESS); }

  __device__ __forceinline__ Stretch from(int j) const { return Stretch(source[j], target.size); }

  // The dtype of all sources, where they have one and begin on 16-byte boundaries; else MIXED.
  __device__ __forceinline__ u32 dtype() const {
    u32 either = 0, both = DTYPE_MASK;
#pragma unroll
    for (int j = 0; j < SOURCES; ++j) {
      if (is_nothing(j)) continue;
      const u32 dtype = aligned_dtype(from(j));
      either |= dtype, both &= dtype;
    }
    return either == both ? both : MIXED;
  }

  // One unit: every product and every sum is rounded by itself, in the order the micro-batches came.
  template <u32 DTYPE>
  __device__ __forceinline__ Values unit(i64 first) const {
    Bits sum, bits[SOURCES];
#pragma unroll
    for (int k = 0; k < UNIT; ++k) sum.word[k] = 0;
    if (!overwrite) sum = load_as<FLOAT32>(target, first);
#pragma unroll
    for (int j = 0; j < SOURCES; ++j)  // all loads before the first use of one
      if (!is_nothing(j)) bits[j] = load_as<DTYPE>(from(j), first);
    Values total = widened_from<FLOAT32>(sum);
    bool is_first = overwrite;
#pragma unroll
    for (int j = 0; j < SOURCES; ++j) {
      if (is_nothing(j)) continue;
      const Values values = widened_as<DTYPE>(bits[j], from(j).dtype);
#pragma unroll
      for (int k = 0; k < UNIT; ++k) {
        const float term = weight[j] == 1.0f ? values.at[k] : multiply(weight[j], values.at[k]);
        total.at[k] = is_first ? term : add(total.at[k], term);
      }
      is_first = false;
    }
    return total;
  }

  template <u32 DTYPE>
  __device__ __forceinline__ void units(const Share& share, Partial& part) const {
    for (i64 row = share.first; row < share.last; row += UNIT * ACCUMULATE_THREADS) {
      const i64 at = row + UNIT * threadIdx.x;  // beyond the last unit are zeros, and a neighbour's quad to store
      Values total = {};
      if (at < share.last) total = unit<DTYPE>(at);
      store_in_pairs(target, at, share.last, rounded_to<FLOAT32>(total));
      if (measured) part.squares += sum_of_squares(total, part.non_finite);
    }
  }

  __device__ __forceinline__ float one(i64 index) const {
    float total = overwrite ? 0.0f : load_one(target, index);
    bool is_first = overwrite;
    for (int j = 0; j < SOURCES; ++j) {
      if (is_nothing(j)) continue;
      const float value = load_one(from(j), index);
      const float term = weight[j] == 1.0f ? value : multiply(weight[j], value);
      total = is_first ? term : add(total, term);
      is_first = false;
    }
    return total;
  }
};

// `address` holds a row of `entries` for each source; a 0 in it is a component that this micro-batch had nothing for.
// One that is to be overwritten and has no source becomes zero, where there is one row.
template <int SOURCES>
__device__ __forceinline__ void accumulate(const Row* rows, const Target* targets, u32 entries, i64 chunk,
                                           double* squares, u32* non_finite, const u64* address, const float* weight) {
  const Row row = rows[blockIdx.x];
  const Target component = targets[row.entry];
  Fold<SOURCES> fold = {Stretch(component.address & ADDRESS, component.size)};
  fold.overwrite = address[row.entry] & OVERWRITE;
  fold.measured = squares;
  bool any = false;
#pragma unroll
  for (int j = 0; j < SOURCES; ++j) {
    fold.source[j] = address[j * entries + row.entry];
    fold.weight[j] = weight[j];
    any |= !fold.is_nothing(j);
  }
  const bool is_zeroed = SOURCES == 1 && fold.overwrite && !any;
  if (!any && !is_zeroed) return;

  const Share share(component.size, row.chunk, chunk, 0);
  Partial part = {0.0, 0};
  if (is_zeroed) {  // apart, so that the loops below need not ask for each unit whether there is a source
#pragma unroll 1
    for (i64 at = share.start + threadIdx.x; at < share.stop; at += ACCUMULATE_THREADS) store_one(fold.target, at, 0.0f);
    const u32 place = component.first + row.chunk;
    if (squares && threadIdx.x == 0) squares[place] = 0.0, non_finite[place] = 0;
    return;
  }
  const u32 dtype = fold.dtype();
  if (dtype == FLOAT32) fold.template units<FLOAT32>(share, part);
  else if (dtype == FLOAT16) fold.template units<FLOAT16>(share, part);
  else if (dtype == BFLOAT16) fold.template units<BFLOAT16>(share, part);
  else fold.template units<MIXED>(share, part);
  const i64 edge = share.edge(threadIdx.x);
  if (edge < share.stop) {
    const float total = fold.one(edge);
    store_one(fold.target, edge, total);
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

// Registers for 3 thread blocks on a multiprocessor with four sources: 120 KB of fp32 loads are under way. With one the
// compiler leaves room for 5 by itself, 80 KB; it warns where those are asked for and never fit (sm_75).
#define BOUNDS_1 ACCUMULATE_THREADS
#define BOUNDS_4 ACCUMULATE_THREADS, 3

// By value: the addresses travel with the launch, so there is no copy to order and nothing that a capture could lose.
// 4 KB of arguments is what every driver takes, 32 KB what CUDA 12.1 and later do.
#define ACCUMULATE(NAME, CAPACITY, SOURCES)                                                                       \
  extern "C" __global__ void __launch_bounds__(BOUNDS_##SOURCES)                                                  \
      NAME(const Row* rows, const Target* targets, u32 entries, i64 chunk, double* squares, u32* non_finite,      \
           const __grid_constant__ Sources<CAPACITY, SOURCES> sources) {                                          \
    accumulate<SOURCES>(rows, targets, entries, chunk, squares, non_finite, sources.address, sources.weight);     \
  }

// More addresses than that come from device memory, whereto a copy on the same stream brought them.
#define ACCUMULATE_TABLE(NAME, SOURCES)                                                                           \
  extern "C" __global__ void __launch_bounds__(BOUNDS_##SOURCES)                                                  \
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
