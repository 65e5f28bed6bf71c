// For the files that define CUDA's own functions: each takes its turn, and its error stays for cudaGetLastError.
#pragma once
#include "lock.h"
#include "settings.h"
#include "streams.h"

namespace gpuless {

inline Error& last_error() {
  thread_local Error it = cudaSuccess;
  return it;
}
inline Error answer(Error error) {
  if (error != cudaSuccess) last_error() = error;
  return error;
}
inline bool is_device(int device) { return device >= 0 && device < settings().devices; }

}  // namespace gpuless

// Begins a function that wants a device that has not failed; where CuPy's destructors call it, any device.
#define TURN              \
  TURN_EVEN_IF_LOST;      \
  REFUSE(gpuless::refuse_if_lost(gpuless::current_device()))
#define TURN_EVEN_IF_LOST \
  Turn turn_;             \
  WANT_DEVICES
#define WANT_DEVICES WANT(settings().devices > 0, cudaErrorNoDevice)
#define WANT(condition, error) \
  if (!(condition)) return gpuless::answer(error)
#define REFUSE(check) \
  if (gpuless::Error error_ = (check)) return gpuless::answer(error_)
