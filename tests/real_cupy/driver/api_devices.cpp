// CUDA's functions about errors, versions and devices.
#include <cstdio>
#include <cstring>
#include <map>

#include "api.h"
#include "capture.h"

using namespace gpuless;

namespace {

struct Message {
  Error code;
  const char *name, *text;
};
const Message messages[] = {
#define MESSAGE(code, text) {code, #code, text}
    MESSAGE(cudaSuccess, "no error"),
    MESSAGE(cudaErrorInvalidValue, "invalid argument"),
    MESSAGE(cudaErrorMemoryAllocation, "out of memory"),
    MESSAGE(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    MESSAGE(cudaErrorInvalidDevice, "invalid device ordinal"),
    MESSAGE(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    MESSAGE(cudaErrorIllegalState, "not permitted in this state"),
    MESSAGE(cudaErrorSymbolNotFound, "named symbol not found"),
    MESSAGE(cudaErrorNotReady, "device not ready"),
    MESSAGE(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    MESSAGE(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    MESSAGE(cudaErrorHostMemoryAlreadyRegistered, "host memory is registered already"),
    MESSAGE(cudaErrorHostMemoryNotRegistered, "host memory is not registered"),
    MESSAGE(cudaErrorLaunchFailure, "a kernel failed"),
    MESSAGE(cudaErrorNotSupported, "operation not supported"),
    MESSAGE(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    MESSAGE(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    MESSAGE(cudaErrorStreamCaptureMerge, "operation would merge two captures"),
    MESSAGE(cudaErrorStreamCaptureUnmatched, "capture was not ended on the stream it began on"),
    MESSAGE(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    MESSAGE(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    MESSAGE(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing stream"),
    MESSAGE(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    MESSAGE(cudaErrorStreamCaptureWrongThread, "capture was begun by another thread"),
#undef MESSAGE
};
const Message unknown = {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"};

const Message& message_of(int code) {
  for (const Message& message : messages)
    if (message.code == code) return message;
  return unknown;
}

// Of an H100, as far as anybody asks.
const std::map<int, int> attributes = {
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10},
    {cudaDevAttrTotalConstantMemory, 64 << 10},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMultiProcessorCount, 132},
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMemoryClockRate, 2619000},
    {cudaDevAttrGlobalMemoryBusWidth, 5120},
    {cudaDevAttrL2CacheSize, 50 << 20},
    {cudaDevAttrCanMapHostMemory, 1},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrManagedMemory, 1},
    {cudaDevAttrPageableMemoryAccess, 1},
    {cudaDevAttrMemoryPoolsSupported, 1},
};

}  // namespace

extern "C" {

const char* cudaGetErrorName(Error error) { return message_of(error).name; }
const char* cudaGetErrorString(Error error) { return message_of(error).text; }
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = message_of(error).name;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = message_of(error).text;
  return CUDA_SUCCESS;
}
Error cudaGetLastError() {
  const Error error = last_error();
  last_error() = cudaSuccess;
  return error;
}

Error cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
Error cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

Error cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return answer(*count ? cudaSuccess : cudaErrorNoDevice);
}
Error cudaGetDevice(int* device) {
  WANT_DEVICES;
  *device = current_device();
  return cudaSuccess;
}
Error cudaSetDevice(int device) {
  WANT_DEVICES;
  WANT(is_device(device), cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}
Error cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  WANT_DEVICES;
  WANT(is_device(device), cudaErrorInvalidDevice);
  auto found = attributes.find(attribute);
  *value = found == attributes.end() ? 0 : found->second;
  if (attribute == cudaDevAttrComputeCapabilityMajor) *value = settings().capability / 10;
  if (attribute == cudaDevAttrComputeCapabilityMinor) *value = settings().capability % 10;
  return cudaSuccess;
}
Error cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  WANT_DEVICES;
  WANT(is_device(device), cudaErrorInvalidDevice);
  memset(found, 0, sizeof *found);
  strcpy(found->name, "no GPU: real CuPy on the CPU");
  found->totalGlobalMem = settings().memory;
  found->major = settings().capability / 10, found->minor = settings().capability % 10;
  found->warpSize = attributes.at(cudaDevAttrWarpSize);
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->sharedMemPerBlock = attributes.at(cudaDevAttrMaxSharedMemoryPerBlock);
  found->sharedMemPerBlockOptin = attributes.at(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  found->regsPerBlock = attributes.at(cudaDevAttrMaxRegistersPerBlock);
  found->multiProcessorCount = attributes.at(cudaDevAttrMultiProcessorCount);
  found->maxThreadsPerMultiProcessor = attributes.at(cudaDevAttrMaxThreadsPerMultiProcessor);
  found->l2CacheSize = attributes.at(cudaDevAttrL2CacheSize);
  found->memoryBusWidth = attributes.at(cudaDevAttrGlobalMemoryBusWidth);
  found->unifiedAddressing = 1;
#if CUDART_VERSION < 13000
  found->clockRate = attributes.at(cudaDevAttrClockRate);
  found->memoryClockRate = attributes.at(cudaDevAttrMemoryClockRate);
#endif
  return cudaSuccess;
}
Error cudaDeviceGetPCIBusId(char* id, int length, int device) {
  snprintf(id, length, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}
Error cudaDeviceGetByPCIBusId(int* device, const char* id) {
  TURN;
  unsigned domain, bus;
  WANT(sscanf(id, "%x:%x", &domain, &bus) == 2 && is_device(int(bus) - 1), cudaErrorInvalidDevice);
  *device = bus - 1;
  return cudaSuccess;
}
Error cudaDeviceSynchronize() {
  TURN;
  REFUSE(refuse_waiting_for_device());
  tell(WAIT, "device");
  return answer(finish_device(current_device()));
}
Error cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
Error cudaDeviceEnablePeerAccess(int, unsigned) { return answer(cudaErrorNotSupported); }
Error cudaDeviceDisablePeerAccess(int) { return answer(cudaErrorNotSupported); }
Error cudaDeviceGetLimit(size_t* value, cudaLimit) {
  *value = 1 << 20;
  return cudaSuccess;
}
Error cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
Error cudaProfilerStart() { return cudaSuccess; }
Error cudaProfilerStop() { return cudaSuccess; }
}
