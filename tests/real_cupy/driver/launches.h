// Modules, their kernels, and launches: checked against what PTX says of the kernel, run by whoever registered.
#pragma once
#include "ptx.h"
#include "streams.h"

namespace gpuless {

struct Module;
struct Function {
  Module* module;
  Entry entry;
  int most_dynamic_shared = 48 << 10;
};

struct Module {
  size_t number;
  std::string image;
  int device;
  std::vector<std::unique_ptr<Function>> functions;
};

struct Size3 {
  unsigned x, y, z;
  size_t product() const { return size_t(x) * y * z; }
};

struct Launch {
  Size3 grid, block;
  unsigned shared;  // bytes, dynamic
};

// A launch as it is handed to whoever runs kernels: which kernel of which module (no other has its number), how, and
// the bytes of its arguments, `count` of them, each at its offset.
struct Call {
  size_t module;
  const char *image, *name;
  Launch how;
  const void* arguments;
  size_t nbytes;
  const size_t *offsets, *sizes;
  size_t count;
};
// Runs it to its end. Returns 0, or CUDA's number of what went wrong.
typedef int (*Runner)(const Call* call);
Runner& runner();

Module* load(const char* ptx);
bool is_loaded(const Module* module);
void unload(Module* module);
Function* function_of(CUfunction handle);  // null where it is none, or its module is gone
Error launch(Function* function, const Launch& how, Stream* stream, void** arguments);

}  // namespace gpuless
