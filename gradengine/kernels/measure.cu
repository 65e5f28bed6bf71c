// Squared sums and non-finite counts of buffers as they lie: for clipping without accumulation, and for what was
// written to by somebody else. One read of each buffer.

#include "common.cuh"

enum { MEASURE_THREADS = 256 };

// DEPTH units of each thread are loaded at once, and added in the order of one at a time.
template <u32 DTYPE, int DEPTH>
__device__ __forceinline__ void measure_units(const Stretch& buffer, const Share& share, Partial& part) {
  const i64 stride = UNIT * MEASURE_THREADS;
  for (i64 at = share.first + UNIT * threadIdx.x; at < share.last; at += DEPTH * stride) {
    Bits bits[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
      if (at + d * stride < share.last) bits[d] = load_as<DTYPE>(buffer, at + d * stride);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
      if (at + d * stride < share.last)
        part.squares += sum_of_squares(widened_as<DTYPE>(bits[d], buffer.dtype), part.non_finite);
  }
}

__device__ __forceinline__ void measure(const Row* rows, const Target* targets, i64 chunk, double* squares,
                                        u32* non_finite, const u64* address) {
  const Row row = rows[blockIdx.x];
  const Target component = targets[row.entry];
  const u32 place = component.first + row.chunk;
  if (!(address[row.entry] & ADDRESS)) {  // a micro-batch has no gradient for it
    if (threadIdx.x == 0) squares[place] = 0.0, non_finite[place] = 0;
    return;
  }
  const Stretch buffer(address[row.entry], component.size);
  const Share share(component.size, row.chunk, chunk, 0);
  Partial part = {0.0, 0};
  const u32 dtype = aligned_dtype(buffer);
  if (dtype == FLOAT32) measure_units<FLOAT32, 2>(buffer, share, part);
  else if (dtype == FLOAT16) measure_units<FLOAT16, 4>(buffer, share, part);
  else if (dtype == BFLOAT16) measure_units<BFLOAT16, 4>(buffer, share, part);
  else measure_units<MIXED, 1>(buffer, share, part);
  const i64 edge = share.edge(threadIdx.x);
  if (edge < share.stop) part.squares += square(load_one(buffer, edge), part.non_finite);
  part = block_sum<MEASURE_THREADS>(part);
  if (threadIdx.x == 0) squares[place] = part.squares, non_finite[place] = part.non_finite;
}

template <int CAPACITY>
struct Addresses {
  u64 address[CAPACITY];
};

#define MEASURE(NAME, CAPACITY)                                                                                   \
  extern "C" __global__ void __launch_bounds__(MEASURE_THREADS)                                                   \
      NAME(const Row* rows, const Target* targets, i64 chunk, double* squares, u32* non_finite,                   \
           const __grid_constant__ Addresses<CAPACITY> buffers) {                                                 \
    measure(rows, targets, chunk, squares, non_finite, buffers.address);                                          \
  }

MEASURE(measure_small, 480)
#ifndef SMALL_ARGUMENTS_ONLY
MEASURE(measure_large, 4000)
#endif

extern "C" __global__ void __launch_bounds__(MEASURE_THREADS)
    measure_table(const Row* rows, const Target* targets, i64 chunk, double* squares, u32* non_finite,
                  const u64* address) {
  measure(rows, targets, chunk, squares, non_finite, address);
}
