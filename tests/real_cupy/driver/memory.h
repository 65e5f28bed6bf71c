// Memory between guard pages: each allocation ends where nobody may read, is NaN until it is written, and is known.
#pragma once
#include <map>

#include "settings.h"

namespace gpuless {

enum Kind { PINNED, DEVICE, MANAGED, REGISTERED };

struct Allocation {
  size_t size;
  Kind kind;
  int device;
  char* base;  // of the mapping, guard pages included; null where the memory is the host's own
  size_t mapped;
  bool is_pooled = false;  // a pool hands it out in pieces

  bool is_on_device() const { return kind == DEVICE || kind == MANAGED; }
};

// Whoever runs kernels keeps a table of what they may touch.
struct MemoryListeners {
  void (*born)(size_t address, size_t size) = nullptr;
  void (*dead)(size_t address) = nullptr;
};

Error allocate(void** pointer, size_t size, Kind kind, int device);
Error release(void* pointer, bool is_pinned);
Error adopt(void* pointer, size_t size, int device);  // host memory becomes known as pinned
Error disown(void* pointer);

// The allocation that holds all these bytes, or null.
const Allocation* allocation_of(const void* pointer, size_t size = 1);
// Whether they begin in an allocation and end outside of it.
bool reaches_over(const void* pointer, size_t size);
// Whether they may be read and written, as far as it is known: pieces of a pool end where they were asked to.
bool is_usable(const void* pointer, size_t size);
// A pool hands out a piece of an allocation, or has it back: what is in no piece is nobody's.
void take_piece(const void* pointer, size_t size);
void drop_piece(const void* pointer);
size_t bytes_taken(int device);
void listen_to_memory(MemoryListeners listeners);

// While one lives the device works: device memory is open. Else, with `guard`, a read of the host's ends the process.
class Working {
 public:
  Working();
  ~Working();
};

}  // namespace gpuless
