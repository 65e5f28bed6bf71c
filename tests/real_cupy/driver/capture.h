// Capture of streams into graphs, and the rules of what may be called meanwhile.
#pragma once
#include <pthread.h>

#include "streams.h"

namespace gpuless {

struct Node {
  std::string name;
  Work work;
  std::vector<int> after;
};

struct Capture {
  Stream* origin;
  cudaStreamCaptureMode mode;
  pthread_t thread;
  std::vector<Node> nodes;
  std::set<Stream*> streams;  // that take part
  bool is_invalid = false;

  void invalidate() { is_invalid = true; }
  // Work of a stream that takes part becomes a node.
  Error record(Stream* stream, const std::string& name, Work work);
};

struct Graph {
  std::vector<Node> nodes;
};

struct Executable {
  std::shared_ptr<const std::vector<Node>> nodes;
  OperationP last;  // launch of it: it never runs beside itself
};

Error begin_capture(Stream* stream, cudaStreamCaptureMode mode);
Error end_capture(Stream* stream, Graph** graph);
// Nothing comes of it: its stream is gone, or its test is over.
void abandon_captures_of(Stream* stream);
void abandon_captures();
// A stream waits for an event that was captured on another one, and takes part from now on.
Error join_capture(Stream* stream, const std::shared_ptr<Capture>& capture, const std::set<int>& ends);
// The answer to whether a stream captures; the default stream may not even be asked while a blocking one does.
Error capture_status(Stream* stream, cudaStreamCaptureStatus* status);

// What captures may forbid this thread: those in global mode of any thread, its own alone, or none.
cudaStreamCaptureMode& mode_of_thread();

// Each refuses a call, with the capture that it would disturb void from then on:
Error refuse_unsafe_call();                 // one that might wait for what is only being recorded
Error refuse_legacy_use();                  // the default stream would have to wait for a stream that captures
Error refuse_waiting(Stream* stream);       // for a stream that captures, or the question whether it is done
Error refuse_waiting_for_device();
Error refuse_waiting(const std::shared_ptr<Capture>& capture);  // for an event that was captured

Error launch_graph(Executable* executable, Stream* stream);

}  // namespace gpuless
