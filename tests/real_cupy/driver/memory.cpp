#include "memory.h"

#include <sys/mman.h>

#include <cstring>

namespace gpuless {
namespace {

const size_t PAGE = 4096;
const size_t UNIT = 512;                        // CUDA's own alignment, and CuPy's
const size_t MOST_ON_DEVICE = 28000;             // allocations: each takes 2 of the 65530 mappings that Linux allows
const size_t MOST_POISONED = size_t(64) << 20;  // larger ones stay zeros: to touch them all would take real memory

std::map<uintptr_t, Allocation> allocations;
std::map<uintptr_t, size_t> pieces;
size_t taken[MOST_DEVICES];
MemoryListeners listeners;
int working = 0;

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

void set_access(const Allocation& it, bool is_open) {
  if (settings().guard && it.kind == DEVICE)
    mprotect(it.base + PAGE, it.mapped - 2 * PAGE, is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void remember(void* pointer, const Allocation& it) {
  allocations[(uintptr_t)pointer] = it;
  if (listeners.born) listeners.born((uintptr_t)pointer, it.size);
}

void drop(std::map<uintptr_t, size_t>::iterator from, std::map<uintptr_t, size_t>::iterator to) {
  for (; from != to; from = pieces.erase(from))
    if (listeners.dead) listeners.dead(from->first);
}

void forget(std::map<uintptr_t, Allocation>::iterator found) {
  const auto& [begin, it] = *found;
  if (it.is_pooled) drop(pieces.lower_bound(begin), pieces.lower_bound(begin + it.size));
  else if (listeners.dead) listeners.dead(begin);
  allocations.erase(found);
}

bool is_in_piece(uintptr_t at, size_t size) {
  auto next = pieces.upper_bound(at);
  if (next == pieces.begin()) return false;
  const auto& [begin, length] = *--next;
  return at - begin <= length && size <= length - (at - begin);
}

}  // namespace

Error allocate(void** pointer, size_t size, Kind kind, int device) {
  *pointer = nullptr;
  if (!size) return cudaSuccess;
  const bool counts = kind != PINNED;
  if (counts && (size > settings().memory || taken[device] > settings().memory - size)) return cudaErrorMemoryAllocation;
  if (counts && allocations.size() >= MOST_ON_DEVICE) return cudaErrorMemoryAllocation;
  const size_t used = rounded(size, UNIT), inner = rounded(used, PAGE), mapped = inner + 2 * PAGE;
  char* base = (char*)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
  if (mprotect(base + PAGE, inner, PROT_READ | PROT_WRITE)) {
    munmap(base, mapped);
    return cudaErrorMemoryAllocation;
  }
  *pointer = base + PAGE + inner - used;  // it ends at the guard page
  if (size <= MOST_POISONED) memset(*pointer, 0xff, used);
  if (counts) taken[device] += size;
  const Allocation made = {size, kind, device, base, mapped};
  remember(*pointer, made);
  if (!working) set_access(made, false);
  return cudaSuccess;
}

Error release(void* pointer, bool is_pinned) {
  auto found = allocations.find((uintptr_t)pointer);
  if (found == allocations.end() || !found->second.base || (found->second.kind == PINNED) != is_pinned)
    return cudaErrorInvalidValue;
  const Allocation it = found->second;
  if (it.is_on_device()) taken[it.device] -= it.size;
  forget(found);
  munmap(it.base, it.mapped);
  return cudaSuccess;
}

Error adopt(void* pointer, size_t size, int device) {
  if (!pointer || !size) return cudaErrorInvalidValue;
  if (allocation_of(pointer)) return cudaErrorHostMemoryAlreadyRegistered;
  remember(pointer, {size, REGISTERED, device, nullptr, 0});
  return cudaSuccess;
}

Error disown(void* pointer) {
  auto found = allocations.find((uintptr_t)pointer);
  if (found == allocations.end() || found->second.kind != REGISTERED) return cudaErrorHostMemoryNotRegistered;
  forget(found);
  return cudaSuccess;
}

const Allocation* allocation_of(const void* pointer, size_t size) {
  const uintptr_t at = (uintptr_t)pointer;
  auto next = allocations.upper_bound(at);
  if (next == allocations.begin()) return nullptr;
  const auto& [begin, it] = *--next;
  const size_t offset = at - begin;
  return offset < it.size && size <= it.size - offset ? &it : nullptr;
}

bool reaches_over(const void* pointer, size_t size) { return allocation_of(pointer) && !allocation_of(pointer, size); }

bool is_usable(const void* pointer, size_t size) {
  const Allocation* found = allocation_of(pointer);
  if (!found) return true;
  return found->is_pooled ? is_in_piece((uintptr_t)pointer, size) : allocation_of(pointer, size) != nullptr;
}

void take_piece(const void* pointer, size_t size) {
  const uintptr_t begin = (uintptr_t)pointer;
  auto* whole = (Allocation*)allocation_of(pointer, size);
  if (!whole) return;  // given back meanwhile
  if (!whole->is_pooled && listeners.dead) listeners.dead((--allocations.upper_bound(begin))->first);
  whole->is_pooled = true;
  auto first = pieces.lower_bound(begin);
  if (first != pieces.begin() && std::prev(first)->first + std::prev(first)->second > begin) --first;
  drop(first, pieces.lower_bound(begin + size));  // dropped where no work could be queued
  pieces[begin] = size;
  if (listeners.born) listeners.born(begin, size);
}

void drop_piece(const void* pointer) {
  auto found = pieces.find((uintptr_t)pointer);
  if (found != pieces.end()) drop(found, std::next(found));
}

size_t bytes_taken(int device) { return taken[device]; }

void listen_to_memory(MemoryListeners given) {
  listeners = given;
  for (auto& [begin, it] : allocations) listeners.born(begin, it.size);
}

Working::Working() {
  if (working++ == 0 && settings().guard)
    for (auto& [_, it] : allocations) set_access(it, true);
}
Working::~Working() {
  if (--working == 0 && settings().guard)
    for (auto& [_, it] : allocations) set_access(it, false);
}

}  // namespace gpuless
