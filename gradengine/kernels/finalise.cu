// K2, finalise: from each chunk's squared sum to norms, scales, factors and the verdict, without the host.
//
// One thread block: all sums are taken in an order that depends on the layout alone, so they are the same from run to
// run. A warp takes a component, then a segment (everything, a clip group, a block).

#include "common.cuh"

enum { FINALISE_THREADS = 512, WARPS = FINALISE_THREADS / 32 };
#define NONE (~0ull)
#define INFINITE __longlong_as_double(0x7ff0000000000000ll)

struct StepStatus {         // as kernels/status.py reads it
  double norm;           // global, of the averaged gradient, before clipping
  u64 steps;             // which step this verdict is of, from 1 on
  u64 bad_step;          // the last of them that was not finite, or 0; what follows stays until there is another
  u64 bad_steps;         // how many there were
  i64 bad_component;     // the first component that is not finite
  i64 bad_index;         // its first such element, or -1 where the launch may not look into the memory
  u64 non_finite;        // elements of the whole set that are not finite
  u64 bad_weight_step;   // the last step that had no divisor, or 0
  u64 bad_weights;       // how many there were
  double bad_weight;     // what it was to be, but for a dynamic loss scale
  float bad_value;
  float scale;           // clip scale, the smallest of all groups
  float factor;          // what the sum is multiplied by (in the first group): a normal number, or 0
  float inverse;         // 1 / factor, for optimizers that divide
  float skipped;         // 1 where zeros are handed back because the gradient is not finite
  float loss_scale;      // of a dynamic one the step's own; else 0
  float spiked;          // 1 where the norm was a spike
  float spike_bound;     // above which it would have been one
};

struct Scaling {  // a dynamic loss scale, as kernels/loss_scale.py has room for it
  float scale;  // of the step that is decided; then of the next
  u32 tracker;  // finite steps in a row that it has seen
};

struct Rule {  // torch's, for a scale in fp32 that grows to 2**64 at most
  double growth, backoff;
  u32 interval;
};

struct Norms {  // of the steps so far, as kernels/spikes.py has room for them
  double mean, variance;
  u64 steps;
};

struct SpikeRule {  // `SpikePolicy`; infinity for a bound that it has not
  double z_score, threshold, decay;
  u32 warm_up, skips;
};

struct Spike {
  double bound, held;  // a norm above the bound counts as `held`
  bool is_found;
};

struct Divisor {  // what the sum is divided by
  double value, told;
  bool is_bad;
  bool is_empty;  // every micro-batch was dropped
};

struct Segments {  // members of segment s: member[start[s]] .. member[start[s + 1] - 1]; segment 0 is everything
  const u32* start;
  const u32* member;
  u32 count;
  u32 groups;  // segments 1..groups are the clip groups
};

__device__ __forceinline__ u64 block_minimum(u64 value) {
  __shared__ u64 least[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // a call before this one may still be read
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const u64 other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = other < value ? other : value;
  }
  if (lane == 0) least[warp] = value;
  __syncthreads();
  for (int w = 0; w < WARPS; ++w) value = least[w] < value ? least[w] : value;
  return value;
}

// Chunks are a power of two: a shift, where a 64-bit division is a function call.
__device__ __forceinline__ u32 chunks_of(i64 size, u32 chunk_shift) {
  return (u32)((size + (1ll << chunk_shift) - 1) >> chunk_shift);
}

// What a lane adds of a component: one chunk of each row of 32, all loaded before one is waited for.
template <u32 ROWS>
struct Rows {
  double squares[ROWS];
  u32 non_finite[ROWS];

  __device__ __forceinline__ void load(const double* from_squares, const u32* from_non_finite, u32 k, u32 chunks) {
    from_squares += k, from_non_finite += k;
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) {
      const bool is_there = k + 32 * row < chunks;
      squares[row] = is_there ? from_squares[32 * row] : 0.0;
      non_finite[row] = is_there ? from_non_finite[32 * row] : 0;
    }
  }

  __device__ __forceinline__ void add_to(double& total, u64& count) const {
    u32 counted = 0;  // a chunk has fewer than 2**20 elements
#pragma unroll
    for (u32 row = 0; row < ROWS; ++row) total += squares[row], counted += non_finite[row];
    count += counted;
  }
};

// Each component's chunks, added by a warp; the first component that is not finite. What takes time is to wait for
// memory and other lanes. So a warp waits for rows of several components at once, and then for as many of each that has
// more. Whatever is waited for at once, each component is added row by row.
__device__ __forceinline__ u64 sum_components(const Target* targets, u32 components, u32 chunk_shift,
                                              const double* squares, const u32* non_finite, const Divisor& by,
                                              double* totals, u64* counts, double* component_norms) {
  enum { TOGETHER = 4, ROWS = 4, ROWS_ALONE = TOGETHER * ROWS, ALONE_FROM = 512 };
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 bad = NONE;
  for (u32 c = warp; c < components; c += TOGETHER * WARPS) {
    u32 first[TOGETHER] = {}, chunks[TOGETHER] = {}, most = 0;  // from this lane's column on
    double total[TOGETHER] = {};
    u64 count[TOGETHER] = {};
#pragma unroll
    for (u32 i = 0; i < TOGETHER; ++i) {
      if (c + i * WARPS >= components) continue;  // it has no chunks
      const Target& component = targets[c + i * WARPS];
      first[i] = component.first + lane, chunks[i] = max(chunks_of(component.size, chunk_shift), lane) - lane;
      most = max(most, chunks[i]);
    }
    for (u32 k = 0; k < min(most, (u32)ALONE_FROM); k += 32 * ROWS) {
      Rows<ROWS> rows[TOGETHER];
#pragma unroll
      for (u32 i = 0; i < TOGETHER; ++i) rows[i].load(squares + first[i], non_finite + first[i], k, chunks[i]);
#pragma unroll
      for (u32 i = 0; i < TOGETHER; ++i) rows[i].add_to(total[i], count[i]);
    }
#pragma unroll
    for (u32 i = 0; i < TOGETHER; ++i) {
      for (u32 k = ALONE_FROM; k < chunks[i]; k += 32 * ROWS_ALONE) {
        Rows<ROWS_ALONE> rows;
        rows.load(squares + first[i], non_finite + first[i], k, chunks[i]);
        rows.add_to(total[i], count[i]);
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
      for (u32 i = 0; i < TOGETHER; ++i) {
        total[i] += __shfl_xor_sync(0xffffffffu, total[i], distance);
        count[i] += __shfl_xor_sync(0xffffffffu, count[i], distance);
      }
    }
    double own_total = total[0];  // lane i writes component i, so that all square roots are taken at once
    u64 own_count = count[0];
#pragma unroll
    for (u32 i = 0; i < TOGETHER; ++i) {
      if (lane == i) own_total = total[i], own_count = count[i];
      if (!isfinite(total[i]) && bad == NONE) bad = c + i * WARPS;
    }
    const u32 own = c + lane * WARPS;
    if (lane < TOGETHER && own < components)
      totals[own] = own_total, counts[own] = own_count, component_norms[own] = sqrt(own_total) / by.value;
  }
  return block_minimum(bad);
}

// A single bound may come with the launch: a schedule changes it at each step. Others are read when the launch runs, so
// that a graph's replay has those of its time.
struct Bounds {
  const double* of_group;
  double only;
};

// min(1, max_norm / norm), no epsilon; 1 where the norm is 0 or not finite: there is nothing to aim at. 0 where the
// factor would be below fp32's normal numbers: rounded there it could pass the bound.
__device__ __forceinline__ double clip_scale(double norm, double max_norm, double divisor) {
  if (!(max_norm < norm && isfinite(norm))) return 1.0;
  const double scale = max_norm / norm;
  return scale / divisor >= 0x1p-126 ? scale : 0.0;
}

__device__ __forceinline__ void norm_segments(const Segments& segments, const double* totals, const Bounds& bounds,
                                              double divisor, double* norms, double* scales, float* factors) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (u32 s = warp; s < segments.count; s += WARPS) {
    double total = 0.0;
    for (u32 m = segments.start[s] + lane; m < segments.start[s + 1]; m += 32)
      total += totals[s ? segments.member[m] : m];  // of everything the members need not be waited for
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
    if (lane != 0) continue;
    norms[s] = sqrt(total) / divisor;
    if (s < 1 || s > segments.groups) continue;
    const double bound = bounds.of_group ? bounds.of_group[s - 1] : bounds.only;
    const double scale = clip_scale(norms[s], bound, divisor);
    scales[s - 1] = scale;
    factors[s - 1] = narrow(scale / divisor);
  }
}

// The first element of a component that is not finite: its first chunk with one, then that chunk.
__device__ __forceinline__ u64 find_non_finite(const Target& component, u32 chunk_shift,
                                               const u32* non_finite) {
  const u32 chunks = chunks_of(component.size, chunk_shift);
  u64 bad = NONE;
  for (u32 k = threadIdx.x; k < chunks && bad == NONE; k += FINALISE_THREADS)
    if (non_finite[component.first + k]) bad = k;
  bad = block_minimum(bad);
  if (bad == NONE || (component.address & ADDRESS) == 0) return NONE;
  const Stretch memory(component.address, component.size);
  const i64 start = (i64)bad << chunk_shift;
  const i64 stop = min(start + (1ll << chunk_shift), component.size);
  u64 index = NONE;
  for (i64 i = start + threadIdx.x; i < stop && index == NONE; i += FINALISE_THREADS)
    if (is_non_finite(__float_as_uint(load_one(memory, i)))) index = (u64)i;
  return block_minimum(index);
}

__device__ __forceinline__ void blame(const Target* targets, u32 components, u64 bad, u64 index, const u64* counts,
                                      StepStatus* verdict) {
  u64 count = 0;
  for (u32 c = 0; c < components; ++c) count += counts[c];
  verdict->bad_steps += verdict->bad_step != verdict->steps;  // once, should a step be decided twice
  verdict->bad_step = verdict->steps;
  verdict->bad_component = (i64)bad;
  verdict->bad_index = index == NONE ? -1 : (i64)index;
  verdict->non_finite = count;
  verdict->bad_value = index == NONE ? 0.0f : load_one(Stretch(targets[bad].address, targets[bad].size), (i64)index);
}

__device__ __forceinline__ void blame_weight(double told, StepStatus* verdict) {
  verdict->bad_weights += verdict->bad_weight_step != verdict->steps;  // once, as above
  verdict->bad_weight_step = verdict->steps;
  verdict->bad_weight = told;
}

// Where 1 / divisor is no normal number of fp32, and NaN is none: infinity, so that norm and factor are 0. `weight` is a
// factor of it that the host does not know, `scaling` a dynamic loss scale.
__device__ __forceinline__ Divisor divisor_of(double by_value, const double* weight, const Scaling* scaling) {
  const double factor = weight ? *weight : 1.0;
  const double value = (scaling ? widen(scaling->scale) * by_value : by_value) * factor;
  const double told = weight ? factor : by_value;  // by its bits a NaN says what is wrong
  const bool is_good = value >= 0x1p-126 && value <= 0x1p126;
  return is_good ? Divisor{value, told, false, false} : Divisor{INFINITE, told, true, false};
}

__device__ __forceinline__ void follow(Scaling* scaling, const Rule& rule, bool is_finite) {
  const u32 finite_steps = is_finite ? scaling->tracker + 1 : 0;
  const bool grows = finite_steps >= rule.interval;
  const double factor = is_finite ? (grows ? rule.growth : 1.0) : rule.backoff;
  const float scale = narrow(widen(scaling->scale) * factor);
  if (!grows || scale <= 0x1p64f) scaling->scale = scale;  // beyond it a step's weight times it may be no divisor
  scaling->tracker = grows ? 0 : finite_steps;
}

// `SpikePolicy.judged`, of a norm that is finite.
__device__ __forceinline__ Spike judged(double norm, const Norms& before, const SpikeRule& rule) {
  const bool is_known = before.steps >= rule.warm_up && before.variance > 0.0;
  const double by_score = is_known ? before.mean + rule.z_score * sqrt(before.variance) : INFINITE;
  const double bound = by_score < rule.threshold ? by_score : rule.threshold;
  if (!(norm > bound)) return Spike{bound, norm, false};
  double held = bound;
  if (!rule.skips && norm > by_score) {
    held = before.mean + rule.z_score * rule.z_score * before.variance / (norm - before.mean);
    held = held < rule.threshold ? held : rule.threshold;
  }
  return Spike{bound, held, true};
}

// `SpikePolicy.after`.
__device__ __forceinline__ void count_norm(double held, const SpikeRule& rule, Norms* norms) {
  const bool is_warm = norms->steps >= rule.warm_up;
  const double share = is_warm ? 1.0 - rule.decay : 1.0 / (double)(norms->steps + 1);
  const double mean = norms->mean + share * (held - norms->mean);
  const double squared = (held - mean) * (held - (is_warm ? mean : norms->mean));
  norms->variance += share * (squared - norms->variance);
  norms->mean = mean;
  norms->steps += 1;
}

// Scales each group at most to what brings the norm of all to `held`.
__device__ __forceinline__ void clip_spike(double norm, double held, double divisor, u32 groups, double* scales,
                                           float* factors) {
  const double most = clip_scale(norm, held, divisor);
  for (u32 g = 0; g < groups; ++g) {
    scales[g] = most < scales[g] ? most : scales[g];
    factors[g] = narrow(scales[g] / divisor);
  }
}

// There is no second thread block for which the compiler should save registers.
extern "C" __global__ void __launch_bounds__(FINALISE_THREADS, 1)
    finalise(const Target* targets, u32 components, u32 chunk_shift, const double* squares, const u32* non_finite,
             const u32* segment_start, const u32* segment_member, u32 segment_count, u32 groups,
             const double* max_norms, double max_norm, double divisor, const double* weight,
             const double* counted, Scaling* scaling, double growth, double backoff, u32 interval, Norms* kept_norms, double z_score,
             double threshold, double decay, u32 warm_up, u32 skips, u32 zero_if_bad, u64 step, double* totals, u64* counts,
             double* component_norms, double* norms, double* scales, float* factors,
             StepStatus* verdict) {
  const Segments segments = {segment_start, segment_member, segment_count, groups};
  __shared__ Divisor by;  // no register of each thread, which would have fewer loads under way
  if (threadIdx.x == 0) {
    verdict->loss_scale = scaling ? scaling->scale : 0.0f;
    by = Divisor{divisor, divisor, false, false};  // which the host has looked at
    if (weight || scaling) by = divisor_of(divisor, weight, scaling);
    // A weight of NaN says by its bits what is wrong.
    if (counted && *counted == 0.0 && !(weight && isnan(*weight))) by = Divisor{INFINITE, 0.0, false, true};
  }
  __syncthreads();
  const u64 bad = sum_components(targets, components, chunk_shift, squares, non_finite, by, totals, counts,
                                 component_norms);
  norm_segments(segments, totals, Bounds{max_norms, max_norm}, by.value, norms, scales, factors);
  u64 index = NONE;
  if (bad != NONE) index = find_non_finite(targets[bad], chunk_shift, non_finite);
  __syncthreads();
  if (threadIdx.x != 0) return;
  Spike spike = {INFINITE, 0.0, false};
  if (kept_norms && bad == NONE && !by.is_bad && !by.is_empty) {
    const SpikeRule rule = {z_score, threshold, decay, warm_up, skips};
    spike = judged(norms[0], *kept_norms, rule);
    count_norm(spike.held, rule, kept_norms);
    if (spike.is_found && !skips) clip_spike(norms[0], spike.held, by.value, groups, scales, factors);
  }
  double scale = 1.0;
  for (u32 g = 0; g < groups; ++g) scale = scales[g] < scale ? scales[g] : scale;
  verdict->norm = norms[0];
  verdict->steps = step ? step : verdict->steps + 1;  // a graph that is replayed counts by itself
  verdict->scale = narrow(scale);
  verdict->factor = factors[0];
  verdict->inverse = narrow(by.value / scales[0]);
  verdict->skipped = by.is_bad || by.is_empty || (bad != NONE && zero_if_bad) || (spike.is_found && skips) ? 1.0f : 0.0f;
  verdict->spiked = spike.is_found ? 1.0f : 0.0f;
  verdict->spike_bound = narrow(spike.bound);
  if (scaling && !by.is_bad) follow(scaling, Rule{growth, backoff, interval}, bad == NONE);
  if (by.is_bad) blame_weight(by.told, verdict);
  else if (bad != NONE) blame(targets, components, bad, index, counts, verdict);
}
