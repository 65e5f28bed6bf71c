// K3, hand back: destination = source x factor, one fp32 multiplication, then one rounding to the destination's dtype.
//
// The factor is K2's, read from device memory, or the caller's. A factor of exactly 1 in place ends the thread block at
// once. Where the verdict is "skip", zeros are written instead: NaN x 0 would be NaN.

#include "common.cuh"

enum { HAND_BACK_THREADS = 256, QUAD = 4 };

__device__ __forceinline__ void units(const Stretch& destination, const Stretch& source, const Share& share, bool zero,
                                      float factor) {
  for (i64 at = share.first + UNIT * threadIdx.x; at < share.last; at += UNIT * HAND_BACK_THREADS) {
    Values values = {};
    if (!zero) {
      values = widened(load(source, at), source.dtype);
#pragma unroll
      for (int k = 0; k < UNIT; ++k) values.at[k] = multiply(values.at[k], factor);
    }
    store(destination, at, rounded(values, destination.dtype));
  }
}

// fp32 to fp32: each access of a warp is 512 bytes in a row. By units each store fills half of each sector, and an H200
// wrote 2.5 times the sectors that it had to. There a loop that multiplies in place runs at 3.0 TB/s by units and at 3.9
// TB/s by quads, at 3.7 and 4.05 with chunks of 2,048. The driver copies at 4.2 TB/s.
__device__ __forceinline__ void quads(const Stretch& destination, const Stretch& source, const Share& share, bool zero,
                                      float factor) {
#pragma unroll 1  // else NVRTC takes 58 registers on sm_90, where 32 leave room for all threads
  for (i64 at = share.first + QUAD * threadIdx.x; at < share.last; at += QUAD * HAND_BACK_THREADS) {
    u32 word[QUAD] = {};
    if (!zero) {
      load_quads<1>(source.at(at), word);
#pragma unroll
      for (int k = 0; k < QUAD; ++k) word[k] = __float_as_uint(multiply(__uint_as_float(word[k]), factor));
    }
    store_16_bytes(destination.at(at), word);
  }
}

__device__ __forceinline__ void hand_back(const Row* rows, const Target* targets, i64 chunk, const float* factors,
                                          const float* skipped, float factor, const u64* address) {
  const Row row = rows[blockIdx.x];
  const Target component = targets[row.entry];
  if ((address[row.entry] & ADDRESS) == 0) return;  // not wanted
  const Stretch destination(address[row.entry], component.size);
  const Stretch source(component.address & ADDRESS ? component.address : address[row.entry], component.size);
  const bool zero = skipped && *skipped != 0.0f;
  if (factors) factor = factors[component.group];
  if (!zero && factor == 1.0f && source.begin == destination.begin) return;

  const int head = (int)((16u - ((u32)destination.begin & 15u)) % 16u / destination.itemsize());
  const Share share(component.size, row.chunk, chunk, head);
  if (source.dtype == FLOAT32 && destination.dtype == FLOAT32) quads(destination, source, share, zero, factor);
  else units(destination, source, share, zero, factor);
  const i64 edge = share.edge(threadIdx.x);
  if (edge < share.stop) store_one(destination, edge, zero ? 0.0f : multiply(load_one(source, edge), factor));
}

template <int CAPACITY>
struct Destinations {
  u64 address[CAPACITY];
};

#define HAND_BACK(NAME, CAPACITY)                                                                                 \
  extern "C" __global__ void __launch_bounds__(HAND_BACK_THREADS)                                                 \
      NAME(const Row* rows, const Target* targets, i64 chunk, const float* factors, const float* skipped,         \
           float factor, const __grid_constant__ Destinations<CAPACITY> destinations) {                           \
    hand_back(rows, targets, chunk, factors, skipped, factor, destinations.address);                              \
  }

HAND_BACK(hand_back_small, 480)
#ifndef SMALL_ARGUMENTS_ONLY
HAND_BACK(hand_back_large, 4000)
#endif

extern "C" __global__ void __launch_bounds__(HAND_BACK_THREADS)
    hand_back_table(const Row* rows, const Target* targets, i64 chunk, const float* factors, const float* skipped,
                    float factor, const u64* address) {
  hand_back(rows, targets, chunk, factors, skipped, factor, address);
}
