// Streams and the order of their work: what was queued waits for what CUDA says it waits for, and for nothing else.
#pragma once
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "memory.h"

namespace gpuless {

struct Operation;
typedef std::shared_ptr<Operation> OperationP;
typedef std::function<Error()> Work;

// Something for a device to do, once what it comes after is done.
struct Operation {
  Work work;
  std::vector<OperationP> after;
  int device = 0;
  bool is_unseen = false;  // done even on a device that has failed
  bool is_done = false;
  double done_at = 0;  // milliseconds
};

struct Capture;

struct Stream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  bool is_legacy = false;          // the default stream that orders itself with all blocking ones
  OperationP last;                 // that was queued
  std::vector<OperationP> awaited;  // by whatever is queued next: events of other streams
  std::shared_ptr<Capture> capture;
  std::set<int> captured_ends;     // nodes that what it captures next comes after

  bool is_blocking() const { return !(flags & cudaStreamNonBlocking); }
};

int& current_device();  // of the calling thread
// A device that has failed: as the real driver, this one answers with the error of it from then on, and does nothing.
struct Loss {
  Error error = cudaSuccess;
  int calls_before = 0;  // that are answered as ever
  bool is_told = false;
};
Loss& loss_of(int device);
Error refuse_if_lost(int device);
void revive_devices();
Stream* new_stream(unsigned flags, int priority);
// What a handle stands for; null where it is no stream, or no longer one.
Stream* stream_of(cudaStream_t handle);
Stream* legacy_stream(int device);
// No more work can come; what is there is done all the same.
Error end_stream(cudaStream_t handle);

// Queues work behind what the stream has, or records it where the stream captures; `made` is left null then.
Error queue(Stream* stream, const std::string& name, Work work, OperationP* made = nullptr);
// The same past every rule of capture and unseen by it: for what is no call of the program. Where it has nothing to wait
// for it is done at once: what is left on the stream of a thread that ended comes at any time, or never.
void queue_unseen(Stream* stream, Work work);

Error finish(const OperationP& wanted);
Error finish_stream(Stream* stream);
Error finish_device(int device);
// Does one thing that comes before it, or it: so that a host that asks again and again sees an end.
Error advance(const OperationP& wanted);

}  // namespace gpuless
