// What the kernels share: where a chunk lies, eight elements from anywhere, block sums.

#include "arithmetic.cuh"

// ---- where things lie ----

// An address as the launcher packs it: the upper byte, which no device address reaches, says how to read what is there.
enum : u64 { ADDRESS = 0x00ffffffffffffffull, OVERWRITE = 1ull << 60 };
enum : u32 { DTYPE_SHIFT = 56, DTYPE_MASK = 15 };

struct Target {  // one component; address 0: the launch says where it lies
  u64 address;
  i64 size;
  u32 first;  // index of its first chunk's partial
  u32 group;  // which factor it is multiplied by
};

struct Row {  // what one thread block does: chunk `chunk` of the launch's entry `entry`
  u32 entry, chunk;
};

struct Stretch {  // memory with elements of one dtype
  u64 begin;
  i64 size;
  u32 dtype;
  __device__ __forceinline__ Stretch(u64 tagged, i64 elements)
      : begin(tagged & ADDRESS), size(elements), dtype((u32)(tagged >> DTYPE_SHIFT) & DTYPE_MASK) {}
  __device__ __forceinline__ u32 itemsize() const { return dtype == FLOAT32 ? 4 : 2; }
  __device__ __forceinline__ u64 at(i64 element) const { return begin + element * itemsize(); }
};

// ---- eight elements at a time: one 16-byte access of a short dtype, two of fp32 ----

enum { UNIT = 8 };

struct Bits {  // as they lie: fp32 fills all words, the short dtypes the first four
  u32 word[UNIT];
};
struct Values {
  float at[UNIT];
};

// An address that came as a number says nothing of its memory: told that it is global, the compiler takes LDG and STG.
template <typename T>
__device__ __forceinline__ T* global(u64 address) {
#ifdef __CUDA_EMU__
  return reinterpret_cast<T*>(address);
#else
  return static_cast<T*>(__cvta_global_to_generic(address));
#endif
}

__device__ __forceinline__ void load_16_bytes(u64 address, u32* word) {
  const uint4 four = *global<const uint4>(address);
  word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
}

__device__ __forceinline__ void store_16_bytes(u64 address, const u32* word) {
#ifdef __CUDA_EMU__
  *reinterpret_cast<uint4*>(address) = make_uint4(word[0], word[1], word[2], word[3]);
#else  // written in C++, NVRTC 12.9 makes four 4-byte stores of it in K1
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3])
               : "memory");
#endif
}

// Drop the first `bytes` (2..14) of a run of words; the branches are the same for a whole tensor.
template <int N>
__device__ __forceinline__ void shift_down(u32 (&word)[N], u32 bytes) {
  if (bytes & 8u) {
#pragma unroll
    for (int i = 0; i < N - 2; ++i) word[i] = word[i + 2];
  }
  if (bytes & 4u) {
#pragma unroll
    for (int i = 0; i < N - 1; ++i) word[i] = word[i + 1];
  }
  if (bytes & 2u) {
#pragma unroll
    for (int i = 0; i < N - 1; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], 16);
  }
}

// QUADS x 16 bytes from anywhere: where they are misaligned, one quad more from the boundary before them, shifted.
template <int QUADS>
__device__ __forceinline__ void load_quads(u64 address, u32* word) {
  const u32 beyond = (u32)address & 15u;
  if (beyond == 0) {
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) load_16_bytes(address + 16 * quad, word + 4 * quad);
    return;
  }
  u32 around[4 * QUADS + 4];
#pragma unroll
  for (int quad = 0; quad <= QUADS; ++quad) load_16_bytes(address - beyond + 16 * quad, around + 4 * quad);
  shift_down(around, beyond);
#pragma unroll
  for (int i = 0; i < 4 * QUADS; ++i) word[i] = around[i];
}

__device__ __forceinline__ Bits load(const Stretch& from, i64 first) {
  Bits bits;
  if (from.dtype == FLOAT32) load_quads<2>(from.at(first), bits.word);
  else load_quads<1>(from.at(first), bits.word);
  return bits;
}

// With a dtype that the compiler knows, and memory that begins on a 16-byte boundary, no branch stands between several
// loads, and all are under way at once. MIXED stands for the dtype of anything else.
enum : u32 { MIXED = DTYPE_MASK };

template <u32 DTYPE>
__device__ __forceinline__ Bits load_as(const Stretch& from, i64 first) {
  if (DTYPE == MIXED) return load(from, first);
  Bits bits;
  const u64 address = from.begin + first * (DTYPE == FLOAT32 ? 4 : 2);
  load_16_bytes(address, bits.word);
  if (DTYPE == FLOAT32) load_16_bytes(address + 16, bits.word + 4);
  return bits;
}

__device__ __forceinline__ u32 aligned_dtype(const Stretch& memory) {
  return memory.begin & 15u ? MIXED : memory.dtype;
}

// To an address that is a multiple of 16.
__device__ __forceinline__ void store(const Stretch& to, i64 first, const Bits& bits) {
  store_16_bytes(to.at(first), bits.word);
  if (to.dtype == FLOAT32) store_16_bytes(to.at(first) + 16, bits.word + 4);
}

template <u32 DTYPE>
__device__ __forceinline__ Values widened_from(const Bits& bits) {
  Values values;
#pragma unroll
  for (int k = 0; k < UNIT; ++k) {
    const u32 pair = bits.word[k / 2];
    if (DTYPE == FLOAT32) values.at[k] = __uint_as_float(bits.word[k]);
    else values.at[k] = widened((u16)(k % 2 ? pair >> 16 : pair), DTYPE);
  }
  return values;
}

template <u32 DTYPE>
__device__ __forceinline__ Bits rounded_to(const Values& values) {
  Bits bits;
#pragma unroll
  for (int k = 0; k < UNIT; ++k) {
    if (DTYPE == FLOAT32) bits.word[k] = __float_as_uint(values.at[k]);
    else if (k % 2 == 0) bits.word[k / 2] = rounded(values.at[k], DTYPE);
    else bits.word[k / 2] |= (u32)rounded(values.at[k], DTYPE) << 16;
  }
  return bits;
}

// One branch for a unit: asked once for each element, the compiler made eight of it.
__device__ __forceinline__ Values widened(const Bits& bits, u32 dtype) {
  if (dtype == FLOAT32) return widened_from<FLOAT32>(bits);
  if (dtype == FLOAT16) return widened_from<FLOAT16>(bits);
  return widened_from<BFLOAT16>(bits);
}

template <u32 DTYPE>
__device__ __forceinline__ Values widened_as(const Bits& bits, u32 dtype) {
  return DTYPE == MIXED ? widened(bits, dtype) : widened_from<DTYPE>(bits);
}

__device__ __forceinline__ Bits rounded(const Values& values, u32 dtype) {
  if (dtype == FLOAT32) return rounded_to<FLOAT32>(values);
  if (dtype == FLOAT16) return rounded_to<FLOAT16>(values);
  return rounded_to<BFLOAT16>(values);
}

__device__ __forceinline__ float load_one(const Stretch& from, i64 index) {
  if (from.dtype == FLOAT32) return *global<const float>(from.at(index));
  return widened(*global<const u16>(from.at(index)), from.dtype);
}

__device__ __forceinline__ void store_one(const Stretch& to, i64 index, float value) {
  if (to.dtype == FLOAT32) *global<float>(to.at(index)) = value;
  else *global<u16>(to.at(index)) = rounded(value, to.dtype);
}

// What a thread block does of a component: the units first..last, and one by one the edges start..first and last..stop.
//
// A misaligned unit is read through the aligned words around it. At the two ends of a component these are not its own,
// so a unit's width at either end is done element by element, whatever its alignment: the order of a sum must not
// depend on addresses. Units begin at `head`, where the destination's first 16-byte boundary is.
struct Share {
  i64 start, first, last, stop;
  __device__ __forceinline__ Share(i64 size, u32 chunk_index, i64 chunk, int head) {
    start = chunk_index ? chunk_index * chunk + head : 0;
    stop = min((chunk_index + 1) * chunk + head, size);
    first = min(chunk_index ? start : head + UNIT, stop);
    last = max(min(stop, head + (size - head - UNIT) / UNIT * UNIT), first);
  }
  // At most 7 + 8 elements before the units and 15 after: each is one thread's.
  __device__ __forceinline__ i64 edge(u32 thread) const {
    const i64 index = start + thread;
    return index < first ? index : last + (index - first);
  }
};

// ---- sums of squares ----

#define SAFE_SQUARE 7.8886090522101181e-31f  // 2**-100: far above what fp32 squares lose below 2**-126
#define LARGEST_FLOAT 3.402823466e38f

__device__ __forceinline__ double square(float value, u32& non_finite) {
  const double wide = widen(value);
  non_finite += is_non_finite(__float_as_uint(value));
  return wide * wide;
}

// Within 5e-7 relative: eight squares in fp32 where that is safe, in fp64 where one overflows, vanishes or is no number.
__device__ __forceinline__ double sum_of_squares(const Values& values, u32& non_finite) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < UNIT; ++k) sum += values.at[k] * values.at[k];
  if (sum >= SAFE_SQUARE && sum <= LARGEST_FLOAT) return widen(sum);  // NaN goes on
  u32 any = 0;
#pragma unroll
  for (int k = 0; k < UNIT; ++k) any |= __float_as_uint(values.at[k]) << 1;
  if (any == 0) return 0.0;  // embeddings' gradients are mostly zeros
  double wide_sum = 0.0;
#pragma unroll
  for (int k = 0; k < UNIT; ++k) wide_sum += square(values.at[k], non_finite);
  return wide_sum;
}

struct Partial {
  double squares;
  u32 non_finite;
};

__device__ __forceinline__ Partial warp_sum(Partial part) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    part.squares += __shfl_xor_sync(0xffffffffu, part.squares, distance);
    part.non_finite += __shfl_xor_sync(0xffffffffu, part.non_finite, distance);
  }
  return part;
}

// The sum over a thread block in a fixed order; good in its first warp.
template <int THREADS>
__device__ __forceinline__ Partial block_sum(Partial part) {
  __shared__ double squares[THREADS / 32];
  __shared__ u32 non_finite[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  part = warp_sum(part);
  if (lane == 0) squares[warp] = part.squares, non_finite[warp] = part.non_finite;
  __syncthreads();
  if (warp == 0) part = warp_sum(lane < THREADS / 32 ? Partial{squares[lane], non_finite[lane]} : Partial{0.0, 0});
  return part;
}
