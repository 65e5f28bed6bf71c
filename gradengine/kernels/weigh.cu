// A micro-batch's weight, of which only the device knows: as fp32 for K1, and the window's weight up to it for K2.
//
// One thread: fp64 additions in the order that the micro-batches came, as the host's.

#include "arithmetic.cuh"

#define INFINITE __longlong_as_double(0x7ff0000000000000ll)
#define NOT_A_NUMBER __longlong_as_double(0x7ff8000000000000ll)

struct Weight {  // as kernels/weights.py has room for it
  double total;  // NaN from the first weight on that is none
  float weight;
  u32 reserved;
};

enum : u32 { OF_FLOAT32 = 0, OF_FLOAT64 = 1, OF_INT32 = 2, OF_INT64 = 3 };  // as in kernels/weights.py

__device__ __forceinline__ double read(const void* given, u32 dtype) {
  if (dtype == OF_FLOAT32) return widen(*static_cast<const float*>(given));
  if (dtype == OF_FLOAT64) return *static_cast<const double*>(given);
  if (dtype == OF_INT32) return *static_cast<const int*>(given);
  return (double)*static_cast<const i64*>(given);
}

// `given` is the caller's array, or null and the weight `value`; `before` is the weight of the micro-batch before this
// one, or null and the window's weight so far `start`.
extern "C" __global__ void __launch_bounds__(32)
    weigh(const void* given, u32 dtype, float value, const Weight* before, double start, Weight* weight) {
  if (threadIdx.x != 0) return;
  const float single = given ? narrow(read(given, dtype)) : value;
  const double wide = widen(single);
  const bool is_weight = wide == 0.0 || (wide >= 0x1p-126 && wide < INFINITE);  // NaN is none
  weight->weight = single;
  weight->total = (before ? before->total : start) + (is_weight ? wide : NOT_A_NUMBER);
}
