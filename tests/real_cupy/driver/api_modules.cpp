// The driver's functions that CuPy looks up by name: modules, kernels, launches, contexts.
#include <algorithm>
#include <cstring>

#include "api.h"
#include "launches.h"

using namespace gpuless;

namespace {

int contexts[64];  // one for each device; nobody looks into them
CUcontext context_of(int device) { return (CUcontext)&contexts[device]; }

CUresult driver_answer(Error error) { return (CUresult)error; }  // the two count errors alike, where we answer any

}  // namespace

extern "C" {

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* found) {
  *found = context_of(current_device());
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext given) {
  current_device() = (int)((int*)given - contexts);
  return CUDA_SUCCESS;
}
#undef cuCtxCreate
#undef cuCtxCreate_v2
CUresult cuCtxCreate_v2(CUcontext* made, unsigned, CUdevice) { return cuCtxGetCurrent(made); }
CUresult cuCtxDestroy_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream handle, CUcontext* found) {
  Turn turn;
  const Stream* stream = stream_of((cudaStream_t)handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *found = context_of(stream->device);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  Turn turn;
  if (!settings().devices) return CUDA_ERROR_NO_DEVICE;
  if (!memcmp(image, "\177ELF", 4)) return CUDA_ERROR_NO_BINARY_FOR_GPU;  // a cubin: only PTX can be read
  *handle = (CUmodule)load((const char*)image);
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule handle) {
  Turn turn;
  if (!is_loaded((Module*)handle)) return CUDA_ERROR_INVALID_HANDLE;
  unload((Module*)handle);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* handle, CUmodule from, const char* name) {
  Turn turn;
  if (!is_loaded((Module*)from)) return CUDA_ERROR_INVALID_HANDLE;
  for (auto& function : ((Module*)from)->functions)
    if (function->entry.name == name) {
      *handle = (CUfunction)function.get();
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_NOT_FOUND;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  Turn turn;
  const Function* function = function_of(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = function->entry.most_threads; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = function->entry.shared; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->most_dynamic_shared; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = settings().capability; break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = -1; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  Turn turn;
  Function* function = function_of(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value < 0 || value + function->entry.shared > 227 << 10) return CUDA_ERROR_INVALID_VALUE;
  function->most_dynamic_shared = value;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream where, void** arguments, void** extra) {
  Turn turn;
  Function* function = function_of(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  if (extra) return CUDA_ERROR_NOT_SUPPORTED;  // arguments in one buffer: CuPy has no use for it
  const Launch how = {{gx, gy, gz}, {bx, by, bz}, shared};
  return driver_answer(launch(function, how, stream_of((cudaStream_t)where), arguments));
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int size, size_t) {
  *blocks = std::max(1, 2048 / std::max(1, size));
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction handle, CUoccupancyB2DSize, size_t, int) {
  Turn turn;
  const Function* function = function_of(handle);
  if (!function) return CUDA_ERROR_INVALID_HANDLE;
  *grid = 132, *block = function->entry.most_threads;
  return CUDA_SUCCESS;
}
}
