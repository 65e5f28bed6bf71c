// Copies and fills: checked when they are asked for, done when their turn comes.
#pragma once
#include "streams.h"

namespace gpuless {

// `waits`: the call returns when it is done, but for one between devices' memory, as CUDA's own.
Error copy(void* to, const void* from, size_t size, cudaMemcpyKind kind, Stream* stream, bool waits);
Error fill(void* to, int value, size_t size, Stream* stream);

}  // namespace gpuless
