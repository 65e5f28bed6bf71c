// CUDA's functions about memory, copies and fills.
#include <algorithm>
#include <cstring>

#include "api.h"
#include "capture.h"
#include "copies.h"

using namespace gpuless;

namespace {

// As the real one, freeing waits for all the device has to do.
Error release_after_all(void* pointer, bool is_pinned) {
  const Error error = finish_device(current_device());
  const Error own = release(pointer, is_pinned);
  return own ? own : error;
}

Error copy_rows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                cudaMemcpyKind kind, Stream* stream, bool waits) {
  for (size_t row = 0; row < height; ++row) {
    auto *there = (char*)to + row * to_pitch, *here = (char*)from + row * from_pitch;
    if (Error error = copy(there, here, width, kind, stream, waits)) return error;
  }
  return cudaSuccess;
}

}  // namespace

extern "C" {

Error cudaMalloc(void** pointer, size_t size) {
  TURN;
  REFUSE(refuse_unsafe_call());
  return answer(allocate(pointer, size, DEVICE, current_device()));
}
Error cudaMallocManaged(void** pointer, size_t size, unsigned) {
  TURN;
  REFUSE(refuse_unsafe_call());
  return answer(allocate(pointer, size, MANAGED, current_device()));
}
Error cudaMallocAsync(void** pointer, size_t size, cudaStream_t handle) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  WANT(!stream->capture, cudaErrorNotSupported);  // memory that lives in a graph is not offered here
  return answer(allocate(pointer, size, DEVICE, stream->device));
}
Error cudaMallocFromPoolAsync(void** pointer, size_t size, cudaMemPool_t, cudaStream_t handle) {
  return cudaMallocAsync(pointer, size, handle);
}
Error cudaFree(void* pointer) {
  TURN_EVEN_IF_LOST;
  if (!pointer) return cudaSuccess;
  REFUSE(refuse_unsafe_call());
  return answer(release_after_all(pointer, false));
}
Error cudaFreeAsync(void* pointer, cudaStream_t handle) {
  TURN_EVEN_IF_LOST;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  return answer(queue(stream, "free", [=] { return release(pointer, false); }));
}
Error cudaHostAlloc(void** pointer, size_t size, unsigned) {
  TURN;
  REFUSE(refuse_unsafe_call());
  return answer(allocate(pointer, size, PINNED, current_device()));
}
Error cudaFreeHost(void* pointer) {
  TURN_EVEN_IF_LOST;
  if (!pointer) return cudaSuccess;
  REFUSE(refuse_unsafe_call());
  return answer(release_after_all(pointer, true));
}
Error cudaHostRegister(void* pointer, size_t size, unsigned) {
  TURN;
  return answer(adopt(pointer, size, current_device()));
}
Error cudaHostUnregister(void* pointer) {
  TURN;
  REFUSE(finish_device(current_device()));
  return answer(disown(pointer));
}
Error cudaMemGetInfo(size_t* free, size_t* total) {
  TURN;
  *total = settings().memory;
  *free = *total - std::min(*total, bytes_taken(current_device()));
  return cudaSuccess;
}
Error cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  TURN;
  memset(found, 0, sizeof *found);
  const Allocation* it = allocation_of(pointer);
  found->device = it ? it->device : -2;
  found->type = !it                    ? cudaMemoryTypeUnregistered
                : it->kind == DEVICE   ? cudaMemoryTypeDevice
                : it->kind == MANAGED  ? cudaMemoryTypeManaged
                                       : cudaMemoryTypeHost;
  found->devicePointer = it ? (void*)pointer : nullptr;
  found->hostPointer = it && it->kind == DEVICE ? nullptr : (void*)pointer;
  return cudaSuccess;
}

Error cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  TURN;
  return answer(copy(to, from, size, kind, legacy_stream(current_device()), true));
}
Error cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t handle) {
  TURN;
  return answer(copy(to, from, size, kind, stream_of(handle), false));
}
Error cudaMemcpyPeer(void* to, int, const void* from, int, size_t size) {
  TURN;
  return answer(copy(to, from, size, cudaMemcpyDefault, legacy_stream(current_device()), true));
}
Error cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t handle) {
  TURN;
  return answer(copy(to, from, size, cudaMemcpyDefault, stream_of(handle), false));
}
Error cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                   cudaMemcpyKind kind) {
  TURN;
  return answer(copy_rows(to, to_pitch, from, from_pitch, width, height, kind, legacy_stream(current_device()), true));
}
Error cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                        cudaMemcpyKind kind, cudaStream_t handle) {
  TURN;
  return answer(copy_rows(to, to_pitch, from, from_pitch, width, height, kind, stream_of(handle), false));
}
Error cudaMemset(void* to, int value, size_t size) {
  TURN;
  REFUSE(refuse_unsafe_call());
  return answer(fill(to, value, size, legacy_stream(current_device())));
}
Error cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t handle) {
  TURN;
  return answer(fill(to, value, size, stream_of(handle)));
}
}
