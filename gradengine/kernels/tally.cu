// What workers have told each other of a step, added up in rank order, and whether they are in one step, with the same
// loss scale and bounds.
//
// One thread: a few numbers of each worker, and nothing to do meanwhile that could hide that.

#include "common.cuh"

struct Told {  // as reduction/device_sums.py writes it; behind it flags that only the host reads
  double divisor;        // this worker's part of what the sum is divided by
  double weight;
  double micro_batches;
  u64 step;              // how many were before it
  u64 loss_scale;        // its bits
  u64 bounds;            // a digest of each group's bound
  u64 stop;              // 1 if this worker asks all to stop, else 0
  u64 dropped;           // micro-batches that have no weight
};

enum : u32 { OTHER_STEP = 1, OTHER_SCALE = 2, NO_MICRO_BATCH = 3, OTHER_BOUNDS = 4, FAULTS = 5 };  // as result.py reads them

__device__ __forceinline__ double not_a_number(u64 payload) {
  return __longlong_as_double((i64)(0x7ff8000000000000ull | payload));
}

// `told` has `words` of 8 bytes for each worker. Where something is wrong the divisor is NaN, and its payload says what:
// a fault + FAULTS * rank.
extern "C" __global__ void __launch_bounds__(32) tally(const u64* told, u32 workers, u32 words, double* sums) {
  if (threadIdx.x != 0) return;
  const Told& first = *reinterpret_cast<const Told*>(told);
  double divisor = 0.0, weight = 0.0, micro_batches = 0.0;
  u64 found = 0, stop = 0, dropped = 0;
  for (u32 rank = 0; rank < workers; ++rank) {
    const Told& one = *reinterpret_cast<const Told*>(told + (u64)rank * words);
    divisor += one.divisor, weight += one.weight, micro_batches += one.micro_batches;
    stop |= one.stop, dropped += one.dropped;
    if (found) continue;
    if (one.step != first.step) found = OTHER_STEP + (u64)FAULTS * rank;
    else if (one.loss_scale != first.loss_scale) found = OTHER_SCALE + (u64)FAULTS * rank;
    else if (one.bounds != first.bounds) found = OTHER_BOUNDS + (u64)FAULTS * rank;
  }
  if (!found && !(micro_batches > 0.0)) found = NO_MICRO_BATCH;
  sums[0] = found ? not_a_number(found) : divisor;
  sums[1] = weight;
  sums[2] = micro_batches;
  sums[3] = stop ? 1.0 : 0.0;
  sums[4] = (double)dropped;
}
