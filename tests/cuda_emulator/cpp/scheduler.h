// What the parts of the runtime share: the state of the one thread block that is running.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

typedef void (*Kernel)(void** arguments);

struct Index3 {
  unsigned x, y, z;
};
struct Indices {  // as the kernels see them
  Index3 thread, block, block_dim, grid_dim;
};
extern "C" {
extern Indices emu_index;
void emu_fail(const char* format, ...) __attribute__((noreturn));
}

enum Order { FORWARD, REVERSE, RANDOM };

struct Options {
  int order, block_order;
  unsigned seed;
  int check, ftz, strict;
  long stack;
  int timeout;
};

enum ThreadState { FRESH, RUNNING, READY, AT_BARRIER, IN_WARP, DONE };

struct Stack;

struct Thread {
  Index3 index;
  int number;  // linear, within the thread block
  ThreadState state;
  int line, kind, predicate;  // of the barrier or collective it waits in
  unsigned mask;
  uint64_t value;
  int source_lane;
  unsigned warp_syncs;  // how many __syncwarp it has passed
  Stack* stack;
  jmp_buf context;
};

struct Launch {
  Options options;
  Kernel kernel;
  void** arguments;
  uintptr_t arguments_begin, arguments_end;
  bool active;
  uint32_t block;
  std::vector<Thread> threads;
  int current;               // the thread that runs, or -1
  unsigned barriers_passed;  // by the thread block
  char *dynamic_shared, *static_shared;
  size_t dynamic_size, static_size;
  jmp_buf failed;
  char error[2048];
  std::mt19937 random;
};
extern Launch launch;

// scheduler.cpp
void run_block();
void abandon_block();  // after a failure, give back its stacks
uintptr_t stack_begin(const Stack* stack);
uintptr_t stack_end(const Stack* stack);

// memory_checks.cpp
void begin_checks(uint64_t blocks);
void begin_block_checks();  // shared memory is uninitialised again
void forget_modules();
void add_module(uintptr_t begin, uintptr_t end);
