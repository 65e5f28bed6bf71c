#include "copies.h"

#include <cstring>

#include "capture.h"

namespace gpuless {
namespace {

struct Side {
  const Allocation* allocation;
  bool is_on_device;
  bool is_pageable;  // host memory that CUDA does not know
};

Side side_of(const void* pointer, size_t size) {
  const Allocation* found = allocation_of(pointer, size);
  return {found, found && found->is_on_device(), !found};
}

const char* direction(bool from_device, bool to_device) {
  if (from_device) return to_device ? "device to device" : "device to host";
  return to_device ? "host to device" : "host to host";
}

const char* direction(cudaMemcpyKind kind) {
  return direction(kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice,
                   kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
}

Error refuse_wrong_kind(cudaMemcpyKind kind, const char* way) {
  if (kind == cudaMemcpyDefault || !strcmp(direction(kind), way)) return cudaSuccess;
  fault("a copy said to be %s is %s", direction(kind), way);
  return cudaErrorInvalidValue;
}

Error refuse_unusable(void* to, const void* from, size_t size) {
  if (is_usable(to, size) && (!from || is_usable(from, size))) return cudaSuccess;
  fault("a copy of %zu bytes from %p to %p: beyond its array, or that was freed before its turn came", size, from, to);
  return cudaErrorIllegalAddress;
}

Work moving(void* to, const void* from, size_t size) {
  return [=] {
    if (Error error = refuse_unusable(to, from, size)) return error;
    memmove(to, from, size);
    return cudaSuccess;
  };
}

// Pageable memory is the caller's again when the call returns.
Work moving_what_is_there_now(void* to, const void* from, size_t size) {
  auto kept = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
  return [=] {
    if (Error error = refuse_unusable(to, nullptr, size)) return error;
    memmove(to, kept->data(), kept->size());
    return cudaSuccess;
  };
}

}  // namespace

Error copy(void* to, const void* from, size_t size, cudaMemcpyKind kind, Stream* stream, bool waits) {
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (waits)
    if (Error error = refuse_waiting(stream)) return error;
  if (!size) {
    tell(COPY, direction(kind));
    return cudaSuccess;
  }
  if (reaches_over(to, size) || reaches_over(from, size)) {
    fault("a copy of %zu bytes from %p to %p reaches over the end of an allocation", size, from, to);
    return cudaErrorInvalidValue;
  }
  const Side target = side_of(to, size), source = side_of(from, size);
  const char* way = direction(source.is_on_device, target.is_on_device);
  if (Error error = refuse_wrong_kind(kind, way)) return error;
  const bool both_on_device = target.is_on_device && source.is_on_device;
  if (both_on_device && stream->is_legacy)  // between devices it comes behind all that either has to do
    for (int device : {target.allocation->device, source.allocation->device})
      if (device != stream->device)
        if (Error error = finish_device(device)) return error;
  const std::string name = std::string("copy ") + way;
  tell(COPY, way);
  const bool host_waits = !both_on_device && (waits || target.is_pageable) && !stream->capture;
  const bool is_staged = source.is_pageable && !waits && !stream->capture;
  if (is_staged) return queue(stream, name, moving_what_is_there_now(to, from, size));
  OperationP made;
  if (Error error = queue(stream, name, moving(to, from, size), &made)) return error;
  if (!host_waits) return cudaSuccess;
  tell(WAIT, "copy");
  return finish(made);
}

Error fill(void* to, int value, size_t size, Stream* stream) {
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (!size) return cudaSuccess;
  const Allocation* target = allocation_of(to, size);
  if (!target || (target->kind == DEVICE && target->device != stream->device)) {
    fault("a fill of %zu bytes at %p, which is no memory of device %d", size, to, stream->device);
    return cudaErrorInvalidValue;
  }
  tell(FILL, "fill");
  return queue(stream, "fill", [=] {
    if (!allocation_of(to, size) || !is_usable(to, size)) {
      fault("a fill of %zu bytes at %p: beyond its array, or that was freed before its turn came", size, to);
      return cudaErrorIllegalAddress;
    }
    memset(to, value, size);
    return cudaSuccess;
  });
}

}  // namespace gpuless
