#include "capture.h"

#include <algorithm>

namespace gpuless {
namespace {

std::set<std::shared_ptr<Capture>> captures;

bool a_blocking_stream_captures() {
  for (auto& capture : captures)
    for (Stream* stream : capture->streams)
      if (stream->is_blocking()) return true;
  return false;
}

// Whether work that other streams captured is not before what the origin captured last.
bool has_unjoined_work(const Capture& capture) {
  std::set<int> reached = capture.origin->captured_ends;
  std::vector<int> open(reached.begin(), reached.end());
  while (!open.empty()) {
    const int node = open.back();
    open.pop_back();
    for (int before : capture.nodes[node].after)
      if (reached.insert(before).second) open.push_back(before);
  }
  for (Stream* stream : capture.streams)
    for (int end : stream->captured_ends)
      if (!reached.count(end)) return true;
  return false;
}

void leave(const std::shared_ptr<Capture>& capture) {
  for (Stream* stream : capture->streams) stream->capture = nullptr, stream->captured_ends.clear();
  captures.erase(capture);
}

// Each node once what it comes after is done; where that leaves a choice, the order decides.
Error run_nodes(const std::vector<Node>& nodes) {
  std::vector<size_t> missing(nodes.size()), ready;
  std::vector<std::vector<size_t>> next(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) {
    missing[i] = nodes[i].after.size();
    for (int before : nodes[i].after) next[before].push_back(i);
    if (!missing[i]) ready.push_back(i);
  }
  Error first = cudaSuccess;
  while (!ready.empty()) {
    const size_t pick = settings().order == RANDOM ? below(ready.size()) : ready.size() - 1, node = ready[pick];
    ready.erase(ready.begin() + pick);
    if (const Error error = nodes[node].work(); first == cudaSuccess) first = error;
    for (size_t after : next[node])
      if (--missing[after] == 0) ready.push_back(after);
  }
  return first;
}

}  // namespace

Error Capture::record(Stream* stream, const std::string& name, Work work) {
  if (is_invalid) return cudaErrorStreamCaptureInvalidated;
  const std::set<int>& ends = stream->captured_ends;
  nodes.push_back({name, std::move(work), {ends.begin(), ends.end()}});
  stream->captured_ends = {int(nodes.size()) - 1};
  return cudaSuccess;
}

Error begin_capture(Stream* stream, cudaStreamCaptureMode mode) {
  if (stream->is_legacy) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture) return cudaErrorIllegalState;
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream;
  stream->capture->mode = mode;
  stream->capture->thread = pthread_self();
  stream->capture->streams = {stream};
  stream->captured_ends.clear();
  captures.insert(stream->capture);
  return cudaSuccess;
}

Error end_capture(Stream* stream, Graph** graph) {
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return cudaErrorIllegalState;
  if (capture->origin != stream) {
    capture->invalidate();
    return cudaErrorStreamCaptureUnmatched;
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(capture->thread, pthread_self()))
    return cudaErrorStreamCaptureWrongThread;
  const bool is_unjoined = has_unjoined_work(*capture);
  leave(capture);
  if (capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (is_unjoined) return cudaErrorStreamCaptureUnjoined;
  *graph = new Graph{std::move(capture->nodes)};
  return cudaSuccess;
}

void abandon_captures_of(Stream* stream) {
  const std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return;
  capture->invalidate();
  if (capture->origin == stream) leave(capture);
  else capture->streams.erase(stream);
}

void abandon_captures() {
  while (!captures.empty()) leave(*captures.begin());
}

Error join_capture(Stream* stream, const std::shared_ptr<Capture>& capture, const std::set<int>& ends) {
  if (stream->capture && stream->capture != capture) {
    capture->invalidate(), stream->capture->invalidate();
    return cudaErrorStreamCaptureMerge;
  }
  if (stream->is_legacy) {
    capture->invalidate();
    return cudaErrorStreamCaptureImplicit;
  }
  stream->capture = capture;
  capture->streams.insert(stream);
  stream->captured_ends.insert(ends.begin(), ends.end());
  return cudaSuccess;
}

Error capture_status(Stream* stream, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  if (stream->is_legacy && a_blocking_stream_captures()) return cudaErrorStreamCaptureImplicit;
  if (stream->capture)
    *status = stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaStreamCaptureMode& mode_of_thread() {
  thread_local cudaStreamCaptureMode it = cudaStreamCaptureModeGlobal;
  return it;
}

Error refuse_unsafe_call() {
  const cudaStreamCaptureMode mine = mode_of_thread();
  if (mine == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto& capture : captures) {
    const bool is_own = pthread_equal(capture->thread, pthread_self());
    const bool is_global = capture->mode == cudaStreamCaptureModeGlobal && mine == cudaStreamCaptureModeGlobal;
    if (is_global || (is_own && capture->mode != cudaStreamCaptureModeRelaxed)) {
      capture->invalidate();
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return cudaSuccess;
}

Error refuse_legacy_use() {
  if (!a_blocking_stream_captures()) return cudaSuccess;
  for (auto& capture : captures) capture->invalidate();
  return cudaErrorStreamCaptureImplicit;
}

Error refuse_waiting(Stream* stream) {
  if (stream->capture) {
    stream->capture->invalidate();
    return cudaErrorStreamCaptureUnsupported;
  }
  if (stream->is_legacy)
    if (Error error = refuse_legacy_use()) return error;
  return refuse_unsafe_call();
}

Error refuse_waiting_for_device() {
  for (auto& capture : captures) capture->invalidate();
  return captures.empty() ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

Error refuse_waiting(const std::shared_ptr<Capture>& capture) {
  if (capture) capture->invalidate();
  return cudaErrorCapturedEvent;
}

Error launch_graph(Executable* executable, Stream* stream) {
  if (stream->capture) {  // a graph within a graph is not offered here
    stream->capture->invalidate();
    return cudaErrorStreamCaptureUnsupported;
  }
  if (executable->last) stream->awaited.push_back(executable->last);
  tell(GRAPH, "graph");
  const auto nodes = executable->nodes;  // an executable may be destroyed while it runs
  return queue(stream, "graph", [nodes] { return run_nodes(*nodes); }, &executable->last);
}

}  // namespace gpuless
