// The words of CUDA C++ for a host compiler: a kernel's source is compiled behind this file as it stands.
//
// One thread block runs at a time, its threads as fibers of one OS thread, so a static thread_local is shared memory.
// Nothing of the CUDA toolkit is needed: fp32, fp64, integers and vector types; no half, no textures, no inline PTX.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#define __host__
#define __device__
#define __global__
#define __constant__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __isGlobal(pointer) true
#undef __builtin_assume
#define __builtin_assume(condition) ((void)0)
#define __builtin_assume_aligned(pointer, bytes) (pointer)

#define EMU_UNCHECKED __attribute__((no_sanitize("thread"))) inline
#define EMU_LINE int line = __builtin_LINE()

// ---- vector types ----

#define EMU_VECTOR2(NAME, SCALAR, ALIGNMENT)             \
  struct __align__(ALIGNMENT) NAME { SCALAR x, y; };     \
  constexpr NAME make_##NAME(SCALAR x, SCALAR y) { return {x, y}; }
#define EMU_VECTOR3(NAME, SCALAR)                        \
  struct NAME { SCALAR x, y, z; };                       \
  constexpr NAME make_##NAME(SCALAR x, SCALAR y, SCALAR z) { return {x, y, z}; }
#define EMU_VECTOR4(NAME, SCALAR, ALIGNMENT)             \
  struct __align__(ALIGNMENT) NAME { SCALAR x, y, z, w; }; \
  constexpr NAME make_##NAME(SCALAR x, SCALAR y, SCALAR z, SCALAR w) { return {x, y, z, w}; }

EMU_VECTOR2(ushort2, unsigned short, 4)
EMU_VECTOR4(ushort4, unsigned short, 8)
EMU_VECTOR2(int2, int, 8)
EMU_VECTOR3(int3, int)
EMU_VECTOR4(int4, int, 16)
EMU_VECTOR2(uint2, unsigned, 8)
EMU_VECTOR3(uint3, unsigned)
EMU_VECTOR4(uint4, unsigned, 16)
EMU_VECTOR2(float2, float, 8)
EMU_VECTOR3(float3, float)
EMU_VECTOR4(float4, float, 16)
EMU_VECTOR2(double2, double, 16)
EMU_VECTOR2(longlong2, long long, 16)
EMU_VECTOR2(ulonglong2, unsigned long long, 16)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- the runtime ----

struct EmuIndex {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
enum { EMU_PLAIN, EMU_AND, EMU_OR, EMU_COUNT };   // what a barrier does with its predicate
enum { EMU_SYNC, EMU_SHUFFLE, EMU_BALLOT };       // what a warp collective does

extern "C" {
extern EmuIndex emu_index;
void* emu_dynamic_shared_memory();
int emu_barrier(int predicate, int kind, int line);
uint64_t emu_warp(unsigned mask, uint64_t value, int source_lane, int kind, int line);
int emu_lane();
unsigned emu_active_mask();
void emu_atomic(const void* address, size_t size);
void emu_fence();
void emu_fail(const char* format, ...) __attribute__((noreturn));
float emu_add_kept(float, float);
float emu_multiply_kept(float, float);
float emu_narrow_kept(double);
}
#define threadIdx emu_index.thread
#define blockIdx emu_index.block
#define blockDim emu_index.block_dim
#define gridDim emu_index.grid_dim
constexpr int warpSize = 32;

// ---- barriers, fences, warp collectives ----

inline void __syncthreads(EMU_LINE) { emu_barrier(0, EMU_PLAIN, line); }
inline int __syncthreads_and(int predicate, EMU_LINE) { return emu_barrier(predicate, EMU_AND, line); }
inline int __syncthreads_or(int predicate, EMU_LINE) { return emu_barrier(predicate, EMU_OR, line); }
inline int __syncthreads_count(int predicate, EMU_LINE) { return emu_barrier(predicate, EMU_COUNT, line); }
inline void __threadfence() { emu_fence(); }
inline void __threadfence_system() { emu_fence(); }
inline void __threadfence_block() {}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_LINE) { emu_warp(mask, 0, -1, EMU_SYNC, line); }
inline unsigned __activemask() { return emu_active_mask(); }
inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_LINE) {
  return (unsigned)emu_warp(mask, predicate != 0, -1, EMU_BALLOT, line);
}
inline int __any_sync(unsigned mask, int predicate, EMU_LINE) { return __ballot_sync(mask, predicate, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, EMU_LINE) { return __ballot_sync(mask, !predicate, line) == 0; }

template <class T>
EMU_UNCHECKED T emu_shuffle(unsigned mask, T value, int source_lane, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = emu_warp(mask, bits, source_lane, EMU_SHUFFLE, line);
  __builtin_memcpy((void*)&value, &bits, sizeof(T));
  return value;
}
// A lane whose source would lie outside its own segment of `width` lanes gets its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_LINE) {
  return emu_shuffle(mask, value, (emu_lane() & ~(width - 1)) | (source & (width - 1)), line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, EMU_LINE) {
  const int lane = emu_lane(), source = lane + (int)distance;
  return emu_shuffle(mask, value, (source & ~(width - 1)) == (lane & ~(width - 1)) ? source : lane, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, EMU_LINE) {
  const int lane = emu_lane(), source = lane - (int)distance;
  return emu_shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : lane, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMU_LINE) {
  const int lane = emu_lane(), source = lane ^ lanes;
  return emu_shuffle(mask, value, source < (lane & ~(width - 1)) + width ? source : lane, line);
}

// ---- atomics: fibers never switch inside one ----

template <class T, class F>
EMU_UNCHECKED T emu_update(T* address, F updated) {
  emu_atomic(address, sizeof(T));
  const T old = *address;
  *address = updated(old);
  return old;
}
#define EMU_ATOMIC(NAME, UPDATED)                                  \
  template <class T>                                               \
  T NAME(T* address, std::common_type_t<T> value) {                \
    return emu_update(address, [=](T old) -> T { return UPDATED; }); \
  }
EMU_ATOMIC(atomicAdd, old + value)
EMU_ATOMIC(atomicSub, old - value)
EMU_ATOMIC(atomicExch, value)
EMU_ATOMIC(atomicMax, old > value ? old : value)
EMU_ATOMIC(atomicMin, old < value ? old : value)
EMU_ATOMIC(atomicAnd, old & value)
EMU_ATOMIC(atomicOr, old | value)
EMU_ATOMIC(atomicXor, old ^ value)
EMU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMU_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
template <class T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return emu_update(address, [=](T old) -> T { return old == expected ? value : old; });
}

// ---- loads and stores with cache hints ----

template <class T> inline T __ldg(const T* address) { return *address; }
template <class T> inline T __ldcg(const T* address) { return *address; }
template <class T> inline T __ldca(const T* address) { return *address; }
template <class T> inline T __ldcs(const T* address) { return *address; }
template <class T> inline T __ldlu(const T* address) { return *address; }
template <class T> inline T __ldcv(const T* address) { return *address; }
template <class T> inline void __stwb(T* address, std::common_type_t<T> value) { *address = value; }
template <class T> inline void __stcg(T* address, std::common_type_t<T> value) { *address = value; }
template <class T> inline void __stcs(T* address, std::common_type_t<T> value) { *address = value; }
template <class T> inline void __stwt(T* address, std::common_type_t<T> value) { *address = value; }

// ---- bits ----

inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline long long __double_as_longlong(double value) { return __builtin_bit_cast(long long, value); }
inline double __longlong_as_double(long long bits) { return __builtin_bit_cast(double, bits); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = (uint64_t)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz((unsigned)bits) : 32; }
inline int __clzll(long long bits) { return bits ? __builtin_clzll((unsigned long long)bits) : 64; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned __brev(unsigned bits) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (bits >> i & 1) << (31 - i);
  return reversed;
}

// ---- arithmetic ----

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;
template <class A, class B>
using EmuIntegers = std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B>, std::common_type_t<A, B>>;
template <class A, class B>
constexpr EmuIntegers<A, B> min(A a, B b) { return (EmuIntegers<A, B>)b < (EmuIntegers<A, B>)a ? b : a; }
template <class A, class B>
constexpr EmuIntegers<A, B> max(A a, B b) { return (EmuIntegers<A, B>)a < (EmuIntegers<A, B>)b ? b : a; }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
inline double rsqrt(double a) { return 1.0 / __builtin_sqrt(a); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __saturatef(float a) { return __builtin_fminf(__builtin_fmaxf(a, 0.0f), 1.0f); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __double2float_rn(double a) { return (float)a; }
inline float __int2float_rn(int a) { return (float)a; }
inline int __float2int_rn(float a) { return (int)__builtin_rintf(a); }
inline void __nanosleep(unsigned) {}
inline void __trap() { emu_fail("__trap()"); }
#undef assert
#define assert(condition) ((condition) ? (void)0 : emu_fail("assert(%s) failed at line %d", #condition, __LINE__))

// ---- fp32 arithmetic that keeps subnormals, for what a kernel does in inline PTX without .ftz ----

inline bool emu_is_normal(float a) { return __float_as_uint(a) << 1 >= 0x01000000u; }
inline float emu_add_rn(float a, float b) {
  const float sum = a + b;
  return emu_is_normal(a) && emu_is_normal(b) && emu_is_normal(sum) ? sum : emu_add_kept(a, b);
}
inline float emu_mul_rn(float a, float b) {
  const float product = a * b;
  return emu_is_normal(a) && emu_is_normal(b) && emu_is_normal(product) ? product : emu_multiply_kept(a, b);
}
inline double emu_widen(float a) {
  if (emu_is_normal(a)) return a;
  const unsigned bits = __float_as_uint(a);
  const double magnitude = (int)(bits & 0x7fffffffu) * 0x1p-149;  // a subnormal counts in units of 2**-149
  return bits >> 31 ? -magnitude : magnitude;
}
inline float emu_narrow(double a) {
  const float narrow = (float)a;
  return emu_is_normal(narrow) ? narrow : emu_narrow_kept(a);
}
inline float emu_widen_float16(unsigned short half) {
  const unsigned sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0u));
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = (int)fraction * 0x1p-24f;  // normal in fp32, or zero
  return __uint_as_float(sign | __float_as_uint(magnitude));
}
inline unsigned short emu_round_to_float16(float a) {
  const unsigned bits = __float_as_uint(a), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // from 65520 on: infinity
  if (magnitude < 0x38800000u) {  // below 2**-14 the result counts in units of 2**-24, ties to even
    return (unsigned short)(sign | (unsigned)__builtin_rint(emu_widen(__uint_as_float(magnitude)) * 0x1p24));
  }
  return (unsigned short)(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

// ---- launching: arguments come as an array of addresses, and each kernel describes its parameters ----

template <class... Parameters>
struct EmuSignature {
  template <class P>
  using Value = std::remove_cv_t<std::remove_reference_t<P>>;
  template <size_t... I>
  EMU_UNCHECKED static void unpack(void (*volatile kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*(Value<Parameters>*)arguments[I]...);
  }
  EMU_UNCHECKED static void call(void (*kernel)(Parameters...), void** arguments) {
    unpack(kernel, arguments, std::index_sequence_for<Parameters...>{});
  }
  static int describe(int* sizes) {
    int n = 0;
    ((sizes[n++] = (int)sizeof(Parameters)), ...);
    return (int)sizeof...(Parameters);
  }
};
template <class... Parameters>
EmuSignature<Parameters...> emu_signature(void (*)(Parameters...));
#define EMU_EXPORT(ID, ...)                                                                      \
  extern "C" __attribute__((no_sanitize("thread"))) void emu_call_##ID(void** arguments) {       \
    decltype(emu_signature(__VA_ARGS__))::call(__VA_ARGS__, arguments);                          \
  }                                                                                              \
  extern "C" int emu_describe_##ID(int* sizes) {                                                 \
    return decltype(emu_signature(__VA_ARGS__))::describe(sizes);                                \
  }
