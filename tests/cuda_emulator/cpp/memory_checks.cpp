// Checked memory: every load and store of a kernel comes by here, and what came before it is remembered.
//
// Kernels are compiled with -fsanitize=thread,alignment,bounds but not linked with a sanitizer: these are the functions
// the compiler calls. Bounds, alignment, races between threads and blocks, and shared memory read before it was written.
#include "scheduler.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>

namespace {

enum Place { NOWHERE, GLOBAL, SHARED, PRIVATE, PARAMETER };

struct Range {
  uintptr_t begin, end;
  bool contains(uintptr_t address, size_t size) const { return address >= begin && address + size <= end; }
};

// ---- where an address lies ----

std::map<uintptr_t, size_t> arrays;  // device memory: begin, size
Range recent[4];                     // of those, the ones met last
unsigned next_recent;
std::vector<Range> modules;  // __device__ and __constant__ variables

void forget_recent() { memset(recent, 0, sizeof recent); }

bool in_array(uintptr_t address, size_t size) {
  for (const Range& range : recent)
    if (range.contains(address, size)) return true;
  auto found = arrays.upper_bound(address);
  if (found == arrays.begin()) return false;
  --found;
  const Range range = {found->first, found->first + found->second};
  if (!range.contains(address, size)) return false;
  recent[next_recent++ % 4] = range;
  return true;
}

Place place_of(uintptr_t address, size_t size) {
  const Stack* stack = launch.threads[launch.current].stack;
  if (Range{stack_begin(stack), stack_end(stack)}.contains(address, size)) return PRIVATE;
  if (Range{(uintptr_t)&emu_index, (uintptr_t)(&emu_index + 1)}.contains(address, size)) return PARAMETER;
  if (in_array(address, size)) return GLOBAL;
  const uintptr_t dynamic_shared = (uintptr_t)launch.dynamic_shared, static_shared = (uintptr_t)launch.static_shared;
  if (Range{dynamic_shared, dynamic_shared + launch.dynamic_size}.contains(address, size)) return SHARED;
  if (Range{static_shared, static_shared + launch.static_size}.contains(address, size)) return SHARED;
  if (Range{launch.arguments_begin, launch.arguments_end}.contains(address, size)) return PARAMETER;
  for (const Range& module : modules)
    if (module.contains(address, size)) return GLOBAL;
  return NOWHERE;
}

// ---- what came before: one record for four bytes, or one for each byte once they differ ----

enum { WRITTEN = 1, READ = 2, READ_BY_MANY = 4, READ_BY_BLOCKS = 8, ATOMIC_WRITE = 16, ATOMIC_READ = 32 };

struct Past {  // the last write and the last read
  uint32_t write_block, read_block;
  uint16_t write_thread, read_thread;
  uint16_t write_barrier, read_barrier;  // barriers the block had passed
  uint8_t write_sync, read_sync;         // __syncwarp the thread had passed
  uint8_t flags;
};
struct Word {
  Past past;
  uint32_t bytes;  // index into `byte_pasts` where the four bytes differ, or 0
};
struct FourPasts {
  Past byte[4];
};
struct Page {
  uint32_t launch;  // records of other launches are void
  Word words[1024];
};

std::unordered_map<uintptr_t, Page*> pages;
struct {
  uintptr_t number;
  Page* page;
} recent_pages[64];
std::vector<FourPasts> byte_pasts;
uint32_t launch_number;
std::vector<uint8_t> fenced, did_atomic;  // for each block

Word& word_at(uintptr_t address) {
  const uintptr_t number = address >> 12;
  auto& recent_page = recent_pages[number & 63];
  if (recent_page.number != number || !recent_page.page) {
    Page*& page = pages[number];
    if (!page) page = (Page*)calloc(1, sizeof(Page));
    if (page->launch != launch_number) {
      memset((void*)page, 0, sizeof(Page));
      page->launch = launch_number;
    }
    recent_page = {number, page};
  }
  return recent_page.page->words[(address & 4095) / 4];
}

void forget_word(uintptr_t address) { memset((void*)&word_at(address), 0, sizeof(Word)); }

// ---- races ----

// Ordered before the current thread: by its own program, a barrier of the block, or a __syncwarp of its warp; another
// block by a fence and then an atomic (taken on trust: any fence, any atomic).
bool ordered(const Thread& thread, uint32_t block, int other, uint16_t barrier, uint8_t sync) {
  if (block != launch.block) return fenced[block] && did_atomic[launch.block];
  if (other == thread.number || barrier != (uint16_t)launch.barriers_passed) return true;
  return other / 32 == thread.number / 32 && sync != (uint8_t)thread.warp_syncs;
}

[[noreturn]] void report_race(const char* what, uintptr_t address, uint32_t block, int other) {
  if (block != launch.block) emu_fail("race: %s at %#lx conflicts with block %u", what, (long)address, block);
  if (other < 0) emu_fail("race: %s at %#lx conflicts with other threads of the block", what, (long)address);
  emu_fail("race: %s at %#lx conflicts with thread %d of the same block, no barrier between", what, (long)address,
           other);
}

struct Access {
  bool write, atomic, shared;
  const char* name;
};

void check_write_after_read(const Past& past, const Access& access, const Thread& thread, uintptr_t address) {
  if (!(past.flags & READ) || (access.atomic && (past.flags & ATOMIC_READ))) return;
  if (!ordered(thread, past.read_block, past.read_thread, past.read_barrier, past.read_sync))
    report_race(access.name, address, past.read_block, past.read_thread);
  const bool same_phase = past.read_block == launch.block && past.read_barrier == (uint16_t)launch.barriers_passed;
  const bool synced = past.read_thread / 32 == thread.number / 32 && past.read_sync != (uint8_t)thread.warp_syncs;
  if (same_phase && (past.flags & READ_BY_MANY) && !synced) report_race(access.name, address, launch.block, -1);
  if ((past.flags & READ_BY_BLOCKS) && !did_atomic[launch.block])
    emu_fail("race: %s at %#lx conflicts with reads of other blocks", access.name, (long)address);
}

void remember_write(Past& past, const Access& access, const Thread& thread) {
  past.write_block = launch.block;
  past.write_thread = thread.number;
  past.write_barrier = launch.barriers_passed;
  past.write_sync = thread.warp_syncs;
  past.flags = (past.flags & ~ATOMIC_WRITE) | WRITTEN | (access.atomic ? ATOMIC_WRITE : 0);
}

void remember_read(Past& past, const Access& access, const Thread& thread) {
  const bool same_phase = (past.flags & READ) && past.read_block == launch.block &&
                          past.read_barrier == (uint16_t)launch.barriers_passed;
  uint8_t flags = (past.flags & ~(ATOMIC_READ | (same_phase ? 0 : READ_BY_MANY))) | READ;
  if (access.atomic) flags |= ATOMIC_READ;
  if (same_phase && past.read_thread != thread.number) flags |= READ_BY_MANY;
  if ((past.flags & READ) && past.read_block != launch.block) flags |= READ_BY_BLOCKS;
  past.read_block = launch.block;
  past.read_thread = thread.number;
  past.read_barrier = launch.barriers_passed;
  past.read_sync = thread.warp_syncs;
  past.flags = flags;
}

void check_and_remember(Past& past, const Access& access, const Thread& thread, uintptr_t address) {
  if (access.shared && !access.write && !(past.flags & WRITTEN))
    emu_fail("uninitialised shared memory: %s", access.name);
  if ((past.flags & WRITTEN) && !(access.atomic && (past.flags & ATOMIC_WRITE)) &&
      !ordered(thread, past.write_block, past.write_thread, past.write_barrier, past.write_sync))
    report_race(access.name, address, past.write_block, past.write_thread);
  if (access.write) {
    check_write_after_read(past, access, thread, address);
    remember_write(past, access, thread);
  }
  if (!access.write || access.atomic) remember_read(past, access, thread);
}

void check_bytes(Word& word, int first, int last, const Access& access, const Thread& thread, uintptr_t base) {
  if (!word.bytes) {
    word.bytes = (uint32_t)byte_pasts.size();
    byte_pasts.push_back({{word.past, word.past, word.past, word.past}});
  }
  for (int i = first; i < last; ++i) check_and_remember(byte_pasts[word.bytes].byte[i], access, thread, base + i);
}

void check_access(uintptr_t address, size_t size, bool write, bool atomic, size_t alignment) {
  if (!launch.active || launch.current < 0) return;
  const Place place = place_of(address, size);
  if (place == PRIVATE || (place == PARAMETER && !write)) return;
  const char* name = atomic ? "atomic" : write ? "write" : "read";
  if (place == PARAMETER) emu_fail("out of bounds: %zu-byte %s to a kernel's parameters", size, name);
  if (place == NOWHERE) emu_fail("out of bounds: %zu-byte %s at %#lx is in no array", size, name, (long)address);
  if (alignment > 1 && address % alignment)
    emu_fail("misaligned: %zu-byte %s at %#lx", size, name, (long)address);
  const Access access = {write, atomic, place == SHARED, name};
  const Thread& thread = launch.threads[launch.current];
  const uintptr_t end = address + size;
  for (uintptr_t base = address & ~(uintptr_t)3; base < end; base += 4) {
    Word& word = word_at(base);
    const int first = base < address ? (int)(address - base) : 0, last = end - base < 4 ? (int)(end - base) : 4;
    if (!word.bytes && first == 0 && last == 4) check_and_remember(word.past, access, thread, base);
    else check_bytes(word, first, last, access, thread, base);
  }
}

}  // namespace

void forget_modules() { modules.clear(); }
void add_module(uintptr_t begin, uintptr_t end) { modules.push_back({begin, end}); }

void begin_checks(uint64_t blocks) {
  if (pages.size() > 16384 || ++launch_number == 0) {  // 400 MB of records are enough to keep
    for (auto& page : pages) free(page.second);
    pages.clear();
    launch_number = 1;
  }
  memset((void*)recent_pages, 0, sizeof recent_pages);
  byte_pasts.assign(1, FourPasts());
  fenced.assign(blocks, 0);
  did_atomic.assign(blocks, 0);
}

void begin_block_checks() {
  const uintptr_t static_shared = (uintptr_t)launch.static_shared, dynamic_shared = (uintptr_t)launch.dynamic_shared;
  for (size_t i = 0; i < launch.static_size; i += 4) forget_word(static_shared + i);
  for (size_t i = 0; i < launch.dynamic_size; i += 4) forget_word(dynamic_shared + i);
}

#define CHECKED(SIZE)                                                                                           \
  void __tsan_read##SIZE(void* p) { check_access((uintptr_t)p, SIZE, false, false, SIZE); }                     \
  void __tsan_write##SIZE(void* p) { check_access((uintptr_t)p, SIZE, true, false, SIZE); }                     \
  void __tsan_volatile_read##SIZE(void* p) { check_access((uintptr_t)p, SIZE, false, true, SIZE); }             \
  void __tsan_volatile_write##SIZE(void* p) { check_access((uintptr_t)p, SIZE, true, true, SIZE); }             \
  void __tsan_unaligned_read##SIZE(void* p) { check_access((uintptr_t)p, SIZE, false, false, 1); }              \
  void __tsan_unaligned_write##SIZE(void* p) { check_access((uintptr_t)p, SIZE, true, false, 1); }

struct SourceLine {
  const char* file;
  uint32_t line, column;
};
struct TypeName {
  uint16_t kind, info;
  char name[1];
};
struct Misaligned {
  SourceLine at;
  TypeName* type;
  uint8_t log_alignment, kind;
};
struct OutOfBounds {
  SourceLine at;
  TypeName *array, *index;
};

extern "C" {

CHECKED(1)
CHECKED(2)
CHECKED(4)
CHECKED(8)
CHECKED(16)
void __tsan_read_range(void* p, size_t size) { check_access((uintptr_t)p, size, false, false, 1); }
void __tsan_write_range(void* p, size_t size) { check_access((uintptr_t)p, size, true, false, 1); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void**, void*) {}

void __ubsan_handle_type_mismatch_v1(const Misaligned* found, uintptr_t address) {
  if (launch.active && launch.current >= 0)
    emu_fail("misaligned: %#lx at line %u, type %s needs %d-byte alignment", (long)address, found->at.line,
             found->type->name, 1 << found->log_alignment);
}
void __ubsan_handle_out_of_bounds(const OutOfBounds* found, uintptr_t index) {
  if (launch.active && launch.current >= 0)
    emu_fail("out of bounds: index %ld of %s at line %u", (long)index, found->array->name, found->at.line);
}

void emu_atomic(const void* address, size_t size) {
  if (!launch.options.check) return;
  check_access((uintptr_t)address, size, true, true, size);
  did_atomic[launch.block] = 1;
}
void emu_fence() {
  if (launch.options.check) fenced[launch.block] = 1;
}

void emulator_register(uintptr_t begin, size_t size) {
  arrays[begin] = size;
  forget_recent();
}
void emulator_unregister(uintptr_t begin) {
  arrays.erase(begin);
  forget_recent();
}
}
