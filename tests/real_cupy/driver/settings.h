// How the devices behave, set from Python; and what is told to Python: what was asked for, and what was done wrong.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdarg>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace gpuless {

typedef cudaError_t Error;
const int MOST_DEVICES = 16;

enum Order { LAZY = 0, EAGER = 1, RANDOM = 2 };

struct Settings {
  int order = LAZY;
  int devices = 1;
  int capability = 90;
  size_t memory = size_t(8) << 30;  // of each device, in bytes
  bool guard = false;               // device memory is closed to the host: a read there is a fault
  bool idle = false;                // kernels are not run, and nobody is told: what is left is the host's time
};

inline Settings& settings() {
  static Settings it;
  return it;
}

// Of everything random.
inline std::mt19937& dice() {
  static std::mt19937 it(0);
  return it;
}
inline size_t below(size_t limit) { return dice()() % limit; }

// ---- what was asked for ----

enum Request { LAUNCH, COPY, FILL, GRAPH, WAIT };
typedef void (*Listener)(int request, const char* name);

inline Listener& listener() {
  static Listener it = nullptr;
  return it;
}
inline void tell(Request request, const char* name) {
  if (listener()) listener()(request, name);
}

// ---- what was done wrong: on a GPU, memory that is not theirs, or nothing that anybody would notice ----

inline std::vector<std::string>& faults() {
  static std::vector<std::string> it;
  return it;
}
__attribute__((format(printf, 1, 2))) inline void fault(const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  faults().push_back(text);
}

}  // namespace gpuless
