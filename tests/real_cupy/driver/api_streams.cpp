// CUDA's functions about streams, events, capture and graphs.
#include <cstdio>

#include "api.h"
#include "capture.h"

using namespace gpuless;

namespace {

struct Event {
  unsigned flags;
  int device;
  OperationP operation;            // the end of what the stream had; null until it is recorded
  std::weak_ptr<Capture> capture;  // that it was recorded in, if it was
  bool is_captured = false;
  std::set<int> captured_ends;
};

std::set<Event*> events;
std::set<Graph*> graphs;
std::set<Executable*> executables;

template <typename T, typename Handle>
T* known(const std::set<T*>& all, Handle handle) {
  auto found = all.find((T*)handle);
  return found == all.end() ? nullptr : *found;
}

template <typename T, typename Handle>
Error destroy(std::set<T*>& all, Handle handle, Error unknown) {
  TURN_EVEN_IF_LOST;
  T* found = known(all, handle);
  WANT(found, unknown);
  all.erase(found);
  delete found;
  return cudaSuccess;
}

Error wait_in_capture(Stream* stream, const Event& event) {
  const std::shared_ptr<Capture> theirs = event.is_captured ? event.capture.lock() : nullptr;
  if (event.is_captured && !theirs) return cudaErrorCapturedEvent;
  if (theirs) return join_capture(stream, theirs, event.captured_ends);
  if (!event.operation) return cudaSuccess;
  stream->capture->invalidate();
  return cudaErrorStreamCaptureIsolation;
}

}  // namespace

extern "C" {

// ---- streams ----

Error cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  TURN_EVEN_IF_LOST;  // CuPy cannot drop a stream that it could not make
  *handle = (cudaStream_t)new_stream(flags, priority);
  return cudaSuccess;
}
Error cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
Error cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
Error cudaStreamDestroy(cudaStream_t handle) {
  TURN_EVEN_IF_LOST;
  return answer(end_stream(handle));
}
Error cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  *flags = stream->flags;
  return cudaSuccess;
}
Error cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}
Error cudaStreamSynchronize(cudaStream_t handle) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  REFUSE(refuse_waiting(stream));
  tell(WAIT, "stream");
  return answer(finish_stream(stream));
}
Error cudaStreamQuery(cudaStream_t handle) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  REFUSE(refuse_waiting(stream));
  if (!stream->last || stream->last->is_done) return cudaSuccess;
  REFUSE(advance(stream->last));
  return answer(cudaErrorNotReady);
}
Error cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  return answer(queue(stream, "host function", [=] {
    function(data);
    return cudaSuccess;
  }));
}
Error cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  if (stream->capture) stream->capture->invalidate();
  WANT(!stream->capture, cudaErrorStreamCaptureUnsupported);
  return answer(queue(stream, "callback", [=] {
    function(handle, cudaSuccess, data);
    return cudaSuccess;
  }));
}
Error cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t given, unsigned) {
  TURN;
  Stream* stream = stream_of(handle);
  const Event* event = known(events, given);
  WANT(stream && event, cudaErrorInvalidResourceHandle);
  WANT(!stream->capture || !stream->capture->is_invalid, cudaErrorStreamCaptureInvalidated);
  if (stream->capture || event->is_captured) return answer(wait_in_capture(stream, *event));
  if (stream->is_legacy) REFUSE(refuse_legacy_use());
  if (!event->operation || event->operation->is_done) return cudaSuccess;
  stream->awaited.push_back(event->operation);
  if (!stream->is_legacy) return cudaSuccess;
  return answer(queue(stream, "wait", nullptr));  // others wait for the last of this stream: that must wait itself
}

// ---- events ----

Error cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  TURN;
  auto* made = new Event{};
  made->flags = flags, made->device = current_device();
  events.insert(made);
  *handle = (cudaEvent_t)made;
  return cudaSuccess;
}
Error cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
Error cudaEventDestroy(cudaEvent_t handle) { return destroy(events, handle, cudaErrorInvalidResourceHandle); }
Error cudaEventRecord(cudaEvent_t handle, cudaStream_t where) {
  TURN;
  Event* event = known(events, handle);
  Stream* stream = stream_of(where);
  WANT(event && stream && event->device == stream->device, cudaErrorInvalidResourceHandle);
  if (stream->capture) {
    WANT(!stream->capture->is_invalid, cudaErrorStreamCaptureInvalidated);
    event->is_captured = true, event->capture = stream->capture, event->captured_ends = stream->captured_ends;
    return cudaSuccess;
  }
  REFUSE(queue(stream, "event", nullptr, &event->operation));
  event->is_captured = false;
  return cudaSuccess;
}
Error cudaEventQuery(cudaEvent_t handle) {
  TURN;
  Event* event = known(events, handle);
  WANT(event, cudaErrorInvalidResourceHandle);
  if (event->is_captured) REFUSE(refuse_waiting(event->capture.lock()));
  REFUSE(refuse_unsafe_call());
  if (!event->operation || event->operation->is_done) return cudaSuccess;
  REFUSE(advance(event->operation));
  return answer(cudaErrorNotReady);
}
Error cudaEventSynchronize(cudaEvent_t handle) {
  TURN;
  Event* event = known(events, handle);
  WANT(event, cudaErrorInvalidResourceHandle);
  if (event->is_captured) REFUSE(refuse_waiting(event->capture.lock()));
  REFUSE(refuse_unsafe_call());
  tell(WAIT, "event");
  return answer(finish(event->operation));
}
Error cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  TURN;
  const Event *first = known(events, from), *second = known(events, to);
  WANT(first && second && first->operation && second->operation, cudaErrorInvalidResourceHandle);
  WANT(!((first->flags | second->flags) & cudaEventDisableTiming), cudaErrorInvalidResourceHandle);
  WANT(first->operation->is_done && second->operation->is_done, cudaErrorNotReady);
  *milliseconds = second->operation->done_at - first->operation->done_at;
  return cudaSuccess;
}

// ---- capture and graphs ----

Error cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  return answer(begin_capture(stream, mode));
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  const cudaStreamCaptureMode before = mode_of_thread();
  mode_of_thread() = (cudaStreamCaptureMode)*mode;
  *mode = (CUstreamCaptureMode)before;
  return CUDA_SUCCESS;
}
Error cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  TURN;
  *graph = nullptr;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  Graph* made = nullptr;
  REFUSE(end_capture(stream, &made));
  graphs.insert(made);
  *graph = (cudaGraph_t)made;
  return cudaSuccess;
}
Error cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  TURN;
  Stream* stream = stream_of(handle);
  WANT(stream, cudaErrorInvalidResourceHandle);
  return answer(capture_status(stream, status));
}
Error cudaGraphInstantiate(cudaGraphExec_t* handle, cudaGraph_t from, unsigned long long) {
  TURN;
  REFUSE(refuse_unsafe_call());
  const Graph* graph = known(graphs, from);
  WANT(graph, cudaErrorInvalidValue);
  auto* made = new Executable{std::make_shared<const std::vector<Node>>(graph->nodes), nullptr};
  executables.insert(made);
  *handle = (cudaGraphExec_t)made;
  return cudaSuccess;
}
Error cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t where) {
  TURN;
  Executable* executable = known(executables, handle);
  Stream* stream = stream_of(where);
  WANT(executable && stream, cudaErrorInvalidResourceHandle);
  return answer(launch_graph(executable, stream));
}
Error cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
Error cudaGraphDestroy(cudaGraph_t handle) { return destroy(graphs, handle, cudaErrorInvalidValue); }
Error cudaGraphExecDestroy(cudaGraphExec_t handle) {
  {
    TURN_EVEN_IF_LOST;
    REFUSE(refuse_unsafe_call());
  }
  return destroy(executables, handle, cudaErrorInvalidValue);
}
Error cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path, unsigned) {
  TURN;
  const Graph* graph = known(graphs, handle);
  WANT(graph, cudaErrorInvalidValue);
  FILE* file = fopen(path, "w");
  WANT(file, cudaErrorOperatingSystem);
  fprintf(file, "digraph dot {\n");
  for (size_t i = 0; i < graph->nodes.size(); ++i) {
    fprintf(file, "\"%zu\" [label=\"%s\"];\n", i, graph->nodes[i].name.c_str());
    for (int before : graph->nodes[i].after) fprintf(file, "\"%d\" -> \"%zu\";\n", before, i);
  }
  fprintf(file, "}\n");
  fclose(file);
  return cudaSuccess;
}
}
