// The threads of a block as fibers: they switch at barriers and warp collectives only, in the order asked for.
#include "scheduler.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>
#include <ucontext.h>

extern "C" {
Indices emu_index;
}
Launch launch;

struct Stack {
  char* base;
  size_t size;
  ucontext_t start;
};
uintptr_t stack_begin(const Stack* stack) { return (uintptr_t)stack->base; }
uintptr_t stack_end(const Stack* stack) { return (uintptr_t)stack->base + stack->size; }

namespace {

std::vector<int> start_order;  // thread numbers
std::vector<int> ready;
std::vector<unsigned> arrived;  // for each warp, lanes that wait in a collective
std::vector<Stack*> free_stacks;
jmp_buf scheduler;
size_t started;
int alive, waiting_at_barrier;

const size_t GUARD = 65536;  // below a stack: a large frame must not step over it

int thread_count() { return (int)launch.threads.size(); }

Stack* take_stack() {
  while (!free_stacks.empty()) {
    Stack* stack = free_stacks.back();
    free_stacks.pop_back();
    if (stack->size == (size_t)launch.options.stack) return stack;
    munmap(stack->base - GUARD, stack->size + GUARD);
    delete stack;
  }
  Stack* stack = new Stack;
  stack->size = launch.options.stack;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* memory = (char*)mmap(nullptr, stack->size + GUARD, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) emu_fail("no memory for a thread's stack");
  mprotect(memory, GUARD, PROT_NONE);
  stack->base = memory + GUARD;
  return stack;
}

void fiber_main() {
  for (;;) {  // a fiber takes fresh threads for as long as they run to their end: no switch for those that never wait
    launch.threads[launch.current].state = RUNNING;
    emu_index.thread = launch.threads[launch.current].index;
    launch.kernel(launch.arguments);
    Thread& finished = launch.threads[launch.current];  // not always the one it began with
    finished.state = DONE;
    --alive;
    Stack* stack = finished.stack;
    finished.stack = nullptr;
    if (started == start_order.size() || !ready.empty()) {
      free_stacks.push_back(stack);
      _longjmp(scheduler, 1);
    }
    launch.current = start_order[started++];
    launch.threads[launch.current].stack = stack;
  }
}

void run(int number) {  // until it waits or ends: it comes back by a jump to `scheduler`
  launch.current = number;
  if (_setjmp(scheduler) == 0) {
    Thread& thread = launch.threads[number];
    if (thread.state == FRESH) {
      thread.stack = take_stack();
      ucontext_t& start = thread.stack->start;
      getcontext(&start);
      start.uc_stack.ss_sp = thread.stack->base;
      start.uc_stack.ss_size = thread.stack->size;
      start.uc_link = nullptr;
      makecontext(&start, fiber_main, 0);
      setcontext(&start);
    }
    thread.state = RUNNING;
    emu_index.thread = thread.index;
    _longjmp(thread.context, 1);
  }
  launch.current = -1;
}

void wait() {
  if (_setjmp(launch.threads[launch.current].context) == 0) _longjmp(scheduler, 1);
}

void wake(Thread& thread) {
  thread.state = READY;
  ready.push_back(thread.number);
}

void shuffle_order(std::vector<int>& order) {
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[launch.random() % i]);
}

// ---- the block's barrier ----

void release_barrier() {
  if (waiting_at_barrier == 0 || waiting_at_barrier != alive) return;
  int line = -1, all = 1, count = 0;
  for (Thread& thread : launch.threads) {
    if (thread.state != AT_BARRIER) continue;
    if (line < 0) line = thread.line;
    if (line != thread.line)
      emu_fail("divergent barrier: threads wait at __syncthreads() of lines %d and %d", line, thread.line);
    all &= thread.predicate != 0;
    count += thread.predicate != 0;
  }
  if (launch.options.strict && alive != thread_count())
    emu_fail("divergent barrier: __syncthreads() at line %d reached after %d thread(s) of the block had returned", line,
             thread_count() - alive);
  waiting_at_barrier = 0;
  ++launch.barriers_passed;
  if (launch.options.order == RANDOM) shuffle_order(start_order);
  const int results[] = {0, all, count > 0, count};
  for (int number : start_order) {
    Thread& thread = launch.threads[number];
    if (thread.state != AT_BARRIER) continue;
    thread.predicate = results[thread.kind];
    wake(thread);
  }
}

// ---- warp collectives ----

unsigned warp_lanes(int warp, bool only_alive) {
  unsigned lanes = 0;
  for (int lane = 0; lane < 32 && warp * 32 + lane < thread_count(); ++lane)
    if (!only_alive || launch.threads[warp * 32 + lane].state != DONE) lanes |= 1u << lane;
  return lanes;
}

// Whether all lanes of `mask` wait in the same collective as `thread`.
bool is_complete(int warp, unsigned mask, const Thread& thread) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const Thread& other = launch.threads[warp * 32 + lane];
    if (other.state != IN_WARP || other.mask != thread.mask || other.kind != thread.kind) return false;
    if (other.line != thread.line)
      emu_fail("divergent warp collective: lanes wait at lines %d and %d", thread.line, other.line);
  }
  return true;
}

uint64_t shuffled(int warp, unsigned mask, const Thread& thread) {
  if (mask >> (thread.source_lane & 31) & 1) return launch.threads[warp * 32 + (thread.source_lane & 31)].value;
  if (!launch.options.strict) return ~0ull;
  launch.current = thread.number;
  emu_fail("shuffle at line %d reads lane %d, which takes no part", thread.line, thread.source_lane);
}

void complete(int warp, unsigned mask, int kind) {
  uint64_t results[32], ballot = 0;
  for (int lane = 0; lane < 32; ++lane)
    if ((mask >> lane & 1) && launch.threads[warp * 32 + lane].value) ballot |= 1u << lane;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) results[lane] = kind == 1 ? shuffled(warp, mask, launch.threads[warp * 32 + lane]) : ballot;
  arrived[warp] &= ~mask;
  for (int place = 0; place < 32; ++place) {
    const int lane = launch.options.order == REVERSE ? 31 - place : place;
    if (!(mask >> lane & 1)) continue;
    Thread& thread = launch.threads[warp * 32 + lane];
    thread.value = results[lane];
    thread.warp_syncs += kind == 0;
    wake(thread);
  }
}

bool release_warp(int warp) {
  const unsigned existing = warp_lanes(warp, false);
  bool any = false;
  for (int lane = 0; lane < 32 && warp * 32 + lane < thread_count(); ++lane) {
    const Thread& thread = launch.threads[warp * 32 + lane];
    if (thread.state != IN_WARP || !is_complete(warp, thread.mask & existing, thread)) continue;
    complete(warp, thread.mask & existing, thread.kind);
    any = true;
  }
  return any;
}

void report_deadlock() {
  int at_barrier = 0, in_warp = 0, barrier_line = 0, warp_line = 0;
  for (const Thread& thread : launch.threads) {
    if (thread.state == AT_BARRIER) ++at_barrier, barrier_line = thread.line;
    if (thread.state == IN_WARP) ++in_warp, warp_line = thread.line;
  }
  emu_fail("deadlock: %d thread(s) wait at __syncthreads() of line %d, %d in a warp collective of line %d, %d returned",
           at_barrier, barrier_line, in_warp, warp_line, thread_count() - alive);
}

void release_somebody() {
  bool any = false;
  for (int warp = 0; warp * 32 < thread_count(); ++warp) any |= release_warp(warp);
  if (any) return;
  release_barrier();
  if (ready.empty()) report_deadlock();
}

void begin_block() {
  const Index3 dim = emu_index.block_dim;
  const int n = dim.x * dim.y * dim.z;
  launch.threads.resize(n);
  start_order.resize(n);
  arrived.assign((n + 31) / 32, 0);
  for (int i = 0; i < n; ++i) {
    Thread& thread = launch.threads[i];
    thread.index = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
    thread.number = i;
    thread.state = FRESH;
    thread.stack = nullptr;
    thread.warp_syncs = 0;
    start_order[i] = launch.options.order == REVERSE ? n - 1 - i : i;
  }
  if (launch.options.order == RANDOM) shuffle_order(start_order);
  ready.clear();
  started = 0;
  alive = n;
  waiting_at_barrier = 0;
  launch.barriers_passed = 0;
  if (launch.static_size) memset(launch.static_shared, 0xff, launch.static_size);  // NaN in every float format
  if (launch.dynamic_size) memset(launch.dynamic_shared, 0xff, launch.dynamic_size);
  if (launch.options.check) begin_block_checks();
}

// Forward lets the first warps run ahead, reverse starts everybody first, random does either.
bool start_another(bool some_ready) {
  if (started == start_order.size()) return false;
  if (!some_ready || launch.options.order == REVERSE) return true;
  return launch.options.order == RANDOM && launch.random() % 2;
}

}  // namespace

void run_block() {
  begin_block();
  size_t next = 0;
  while (alive > 0) {
    if (next == ready.size()) ready.clear(), next = 0;
    if (start_another(next < ready.size())) {
      run(start_order[started++]);
    } else if (next < ready.size()) {
      if (launch.options.order == RANDOM)
        std::swap(ready[next], ready[next + launch.random() % (ready.size() - next)]);
      const int number = ready[next++];
      if (next == ready.size()) ready.clear(), next = 0;
      run(number);
    } else {
      release_somebody();
    }
  }
}

void abandon_block() {
  for (Thread& thread : launch.threads)
    if (thread.stack) free_stacks.push_back(thread.stack), thread.stack = nullptr;
}

extern "C" {

void emu_fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(launch.error, sizeof launch.error, format, arguments);
  va_end(arguments);
  if (length >= 0 && length < (int)sizeof launch.error) {
    char* end = launch.error + length;
    const size_t room = sizeof launch.error - length;
    const Index3 block = emu_index.block;
    if (launch.current < 0) {
      snprintf(end, room, " [block (%u,%u,%u)]", block.x, block.y, block.z);
    } else {
      const Index3 thread = launch.threads[launch.current].index;
      snprintf(end, room, " [block (%u,%u,%u) thread (%u,%u,%u)]", block.x, block.y, block.z, thread.x, thread.y,
               thread.z);
    }
  }
  _longjmp(launch.failed, 1);
}

int emu_barrier(int predicate, int kind, int line) {
  Thread& thread = launch.threads[launch.current];
  thread.predicate = predicate;
  thread.kind = kind;
  thread.line = line;
  thread.state = AT_BARRIER;
  ++waiting_at_barrier;
  wait();
  return launch.threads[launch.current].predicate;
}

uint64_t emu_warp(unsigned mask, uint64_t value, int source_lane, int kind, int line) {
  Thread& thread = launch.threads[launch.current];
  const int warp = thread.number / 32, lane = thread.number % 32;
  if (!(mask >> lane & 1)) emu_fail("warp collective at line %d: the calling lane is not in its mask %08x", line, mask);
  thread.mask = mask;
  thread.value = value;
  thread.source_lane = source_lane;
  thread.kind = kind;
  thread.line = line;
  thread.state = IN_WARP;
  arrived[warp] |= 1u << lane;
  const unsigned expected = mask & warp_lanes(warp, false);
  if ((arrived[warp] & expected) == expected) release_warp(warp);
  wait();
  return launch.threads[launch.current].value;
}

int emu_lane() { return launch.current % 32; }
unsigned emu_active_mask() { return warp_lanes(launch.current / 32, true); }
void* emu_dynamic_shared_memory() { return launch.dynamic_shared; }
}
