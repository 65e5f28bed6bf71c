#include "streams.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "capture.h"

namespace gpuless {
namespace {

typedef std::shared_ptr<Stream> StreamP;

std::map<Stream*, StreamP> streams;  // that have a handle
std::vector<StreamP> ended;          // whose handle is gone and whose work may not be done
StreamP legacy[MOST_DEVICES];
Error unreported = cudaSuccess;          // of work that was done while nobody waited for it

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<StreamP> all_streams() {
  std::vector<StreamP> all(ended);
  for (auto& [_, stream] : streams) all.push_back(stream);
  for (auto& stream : legacy)
    if (stream) all.push_back(stream);
  return all;
}

bool waits(const OperationP& it) { return it && !it->is_done; }

Error perform(const OperationP& it) {
  Working working;
  it->is_done = true;
  it->after.clear();
  const Work work = std::move(it->work);
  it->work = nullptr;
  const Loss& loss = loss_of(it->device);
  const bool is_lost = loss.error && !loss.calls_before && !it->is_unseen;
  const Error error = is_lost ? loss.error : work ? work() : cudaSuccess;
  it->done_at = now();
  if (error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure) loss_of(it->device).error = error;
  return error;
}

// What it comes after and is not done: one of them, or null where it may be done now.
OperationP one_before(const OperationP& it) {
  std::vector<OperationP>& after = it->after;
  after.erase(std::remove_if(after.begin(), after.end(), [](OperationP& other) { return !waits(other); }), after.end());
  if (after.empty()) return nullptr;
  return after[settings().order == RANDOM ? below(after.size()) : 0];
}

// Something that may be done now and must be before `wanted`, or `wanted`.
OperationP ready_before(OperationP wanted) {
  while (OperationP before = one_before(wanted)) wanted = before;
  return wanted;
}

// In random order a device may at any time do anything that is ready, of any stream.
void wander() {
  if (settings().order != RANDOM || below(2)) return;
  std::vector<OperationP> lasts;
  for (auto& stream : all_streams())
    if (waits(stream->last)) lasts.push_back(stream->last);
  if (lasts.empty()) return;
  const Error error = perform(ready_before(lasts[below(lasts.size())]));
  if (unreported == cudaSuccess) unreported = error;
}

Error reported(Error error) {
  if (error == cudaSuccess) std::swap(error, unreported);
  return error;
}

// What new work of a stream comes after: its own, what it was told to wait for, and what the legacy stream's rule says.
std::vector<OperationP> predecessors(Stream* stream) {
  std::vector<OperationP> found = std::move(stream->awaited);
  stream->awaited.clear();
  found.push_back(stream->last);
  if (stream->is_legacy) {
    for (auto& other : all_streams())
      if (other->is_blocking() && other->device == stream->device) found.push_back(other->last);
  } else if (stream->is_blocking() && legacy[stream->device]) {
    found.push_back(legacy[stream->device]->last);
  }
  found.erase(std::remove_if(found.begin(), found.end(), [](OperationP& it) { return !waits(it); }), found.end());
  return found;
}

OperationP append(Stream* stream, Work work) {
  auto made = std::make_shared<Operation>();
  made->work = std::move(work), made->device = stream->device;
  made->after = predecessors(stream);
  return stream->last = made;
}

}  // namespace

Loss& loss_of(int device) {
  static Loss losses[MOST_DEVICES];
  return losses[device];
}

Error refuse_if_lost(int device) {
  Loss& it = loss_of(device);
  if (it.calls_before && it.calls_before--) return cudaSuccess;
  it.is_told = it.error != cudaSuccess;
  return it.error;
}

void revive_devices() {
  for (int device = 0; device < MOST_DEVICES; ++device) loss_of(device) = Loss();
  unreported = cudaSuccess;
}

int& current_device() {
  thread_local int it = 0;
  return it;
}

Stream* new_stream(unsigned flags, int priority) {
  auto made = std::make_shared<Stream>();
  made->device = current_device(), made->flags = flags, made->priority = priority;
  streams[made.get()] = made;
  return made.get();
}

Stream* legacy_stream(int device) {
  if (!legacy[device]) {
    legacy[device] = std::make_shared<Stream>();
    legacy[device]->is_legacy = true, legacy[device]->device = device;
  }
  return legacy[device].get();
}

Stream* stream_of(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy) return legacy_stream(current_device());
  auto found = streams.find((Stream*)handle);
  return found == streams.end() ? nullptr : found->second.get();
}

Error end_stream(cudaStream_t handle) {
  auto found = streams.find((Stream*)handle);
  if (found == streams.end()) return cudaErrorInvalidResourceHandle;
  abandon_captures_of(found->second.get());
  ended.push_back(found->second);
  streams.erase(found);
  return cudaSuccess;
}

Error queue(Stream* stream, const std::string& name, Work work, OperationP* made) {
  if (stream->capture) return stream->capture->record(stream, name, std::move(work));
  if (stream->is_legacy)
    if (Error error = refuse_legacy_use()) return error;
  const OperationP it = append(stream, std::move(work));
  if (made) *made = it;
  if (settings().order == EAGER) return finish(it);
  wander();
  return cudaSuccess;
}

void queue_unseen(Stream* stream, Work work) {
  const OperationP it = append(stream, std::move(work));
  it->is_unseen = true;
  if (it->after.empty()) perform(it);
  else if (settings().order == EAGER) finish(it);
}

Error finish(const OperationP& wanted) {
  if (!waits(wanted)) return reported(cudaSuccess);
  Working working;  // opened once for all of them
  Error first = cudaSuccess;
  std::vector<OperationP> path = {wanted};  // no recursion: a stream may hold thousands
  while (!path.empty()) {
    wander();
    const OperationP last = path.back();
    if (last->is_done) {
      path.pop_back();
    } else if (const OperationP before = one_before(last)) {
      path.push_back(before);
    } else if (const Error error = perform(last); first == cudaSuccess) {
      first = error;
    }
  }
  return reported(first);
}

Error finish_stream(Stream* stream) {
  Error first = finish(stream->last);
  for (const OperationP& it : std::vector<OperationP>(stream->awaited))
    if (const Error error = finish(it); first == cudaSuccess) first = error;
  stream->awaited.clear();
  if (stream->is_legacy)  // it waits for the blocking streams too
    for (auto& other : all_streams())
      if (other->is_blocking() && !other->is_legacy && other->device == stream->device)
        if (const Error error = finish(other->last); first == cudaSuccess) first = error;
  return first;
}

Error finish_device(int device) {
  std::vector<StreamP> all = all_streams();
  std::shuffle(all.begin(), all.end(), dice());  // of what is not ordered, any order will do
  Error first = cudaSuccess;
  for (auto& stream : all)
    if (stream->device == device)
      if (const Error error = finish_stream(stream.get()); first == cudaSuccess) first = error;
  ended.erase(std::remove_if(ended.begin(), ended.end(), [=](StreamP& it) { return it->device == device; }), ended.end());
  return first;
}

Error advance(const OperationP& wanted) {
  if (!waits(wanted)) return reported(cudaSuccess);
  return reported(perform(ready_before(wanted)));
}

}  // namespace gpuless
