// What Python sets, asks and is told; none of it is CUDA's.
#include <cstring>

#include "api.h"
#include "capture.h"
#include "launches.h"

using namespace gpuless;

namespace {

Stream* stream_on(int device, cudaStream_t handle) {
  std::swap(current_device(), device);
  Stream* found = stream_of(handle);
  std::swap(current_device(), device);
  return found;
}

}  // namespace

extern "C" {

void gpuless_set(int order, unsigned seed, int devices, size_t memory, int guard) {
  Turn turn;
  Settings& it = settings();
  it.order = order, it.devices = devices, it.memory = memory, it.guard = guard;
  dice().seed(seed);
}

void gpuless_run_kernels_by(Runner given) { runner() = given; }
void gpuless_tell(Listener given) { listener() = given; }
void gpuless_idle() { settings().idle = true, listener() = nullptr; }
void gpuless_tell_of_memory(void (*born)(size_t, size_t), void (*dead)(size_t)) {
  Turn turn;
  listen_to_memory({born, dead});
}

// The oldest fault that nobody has taken; false where there is none.
bool gpuless_take_fault(char* text, size_t room) {
  Turn turn;
  if (faults().empty()) return false;
  snprintf(text, room, "%s", faults().front().c_str());
  faults().erase(faults().begin());
  return true;
}
void gpuless_fault(const char* text) { fault("%s", text); }

// All devices have done all they have to do, none has failed, and no stream captures.
int gpuless_finish_all() {
  Turn turn;
  abandon_captures();
  mode_of_thread() = cudaStreamCaptureModeGlobal;  // an interrupt that a tracer makes may leave another
  Error first = cudaSuccess;
  for (int device = 0; device < MOST_DEVICES; ++device)
    if (const Error error = finish_device(device); first == cudaSuccess) first = error;
  revive_devices();
  return first;
}

// As if work of somebody else's ended in an error, so many calls from now.
void gpuless_lose(int device, int error, int calls_before) {
  Turn turn;
  loss_of(device) = {(Error)error, calls_before, false};
}
bool gpuless_has_told_of_loss(int device) {
  Turn turn;
  return loss_of(device).is_told;
}

// CuPy's pool hands out memory: whoever has it may use it once that stream has come to it, at once where it is new.
void gpuless_take(void* pointer, size_t size, cudaStream_t handle, int device) {
  Turn turn;
  Stream* stream = stream_on(device, handle);
  const Allocation* whole = allocation_of(pointer, size);
  if (!stream || stream->capture || !whole || !whole->is_pooled) return take_piece(pointer, size);
  queue_unseen(stream, [=] {
    take_piece(pointer, size);
    return cudaSuccess;
  });
}

// Memory went back to CuPy's pool, which gives it to whoever asks next on that stream: it is NaN when that comes.
void gpuless_void(void* pointer, size_t size, cudaStream_t handle, int device) {
  Turn turn;
  Stream* stream = stream_on(device, handle);
  if (!stream) return;
  const auto make_void = [=] {
    if (allocation_of(pointer, size)) memset(pointer, 0xff, size);  // the pool may have given it back for good
    drop_piece(pointer);
    return cudaSuccess;
  };
  if (!stream->capture) return queue_unseen(stream, make_void);
  finish(stream->last);
  make_void();
}
}
