// Arithmetic with the host's bits: each operation rounded once, subnormals kept, bf16 and fp16 widened exactly.
//
// No header is included, so NVRTC compiles in milliseconds and a host compiler takes the same text. CuPy appends
// -ftz=true to every compilation, which would flush subnormals in plain C++ arithmetic: what must have the host's bits
// goes through the functions of this file.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

enum : u32 { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };  // as in arrays/dtypes.py

#ifdef __CUDA_EMU__

__device__ __forceinline__ float add(float a, float b) { return emu_add_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return emu_mul_rn(a, b); }
__device__ __forceinline__ double widen(float a) { return emu_widen(a); }
__device__ __forceinline__ float narrow(double a) { return emu_narrow(a); }
__device__ __forceinline__ float widen_float16(u16 bits) { return emu_widen_float16(bits); }
__device__ __forceinline__ u16 round_to_float16(float a) { return emu_round_to_float16(a); }

#else

// The .rn forms are never contracted to an FMA and, without .ftz, never flush.
__device__ __forceinline__ float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}
__device__ __forceinline__ double widen(float a) {
  double wide;
  asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(a));
  return wide;
}
__device__ __forceinline__ float narrow(double a) {
  float narrowed;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrowed) : "d"(a));
  return narrowed;
}
__device__ __forceinline__ float widen_float16(u16 bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}
__device__ __forceinline__ u16 round_to_float16(float a) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(a));
  return bits;
}

#endif

__device__ __forceinline__ bool is_non_finite(u32 bits) { return (bits & 0x7f800000u) == 0x7f800000u; }

__device__ __forceinline__ u16 round_to_bfloat16(float a) {
  const u32 bits = __float_as_uint(a);
  const u32 nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return (u16)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);  // a carry would make an infinity of a NaN
}

__device__ __forceinline__ float widened(u16 bits, u32 dtype) {
  return dtype == FLOAT16 ? widen_float16(bits) : __uint_as_float((u32)bits << 16);
}

__device__ __forceinline__ u16 rounded(float value, u32 dtype) {
  return dtype == FLOAT16 ? round_to_float16(value) : round_to_bfloat16(value);
}
