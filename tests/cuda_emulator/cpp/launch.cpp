// One launch from its first block to its last: the order of blocks, signals, the kernel library's shared memory.
#include "scheduler.h"

#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

const size_t MOST_SHARED = 256 << 10;
const unsigned FLUSH = 0x8040;  // MXCSR: flush to zero, denormals are zero

// The kernel library's thread-local block is its static __shared__ memory; its other data are __device__ variables.
struct Library {
  uintptr_t kernel;
  size_t module, size;
};

int look_at_library(dl_phdr_info* info, size_t, void* data) {
  Library& library = *(Library*)data;
  bool found = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD && library.kernel >= begin && library.kernel < begin + header.p_memsz) found = true;
  }
  if (!found) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_TLS) library.module = info->dlpi_tls_modid, library.size = header.p_memsz;
    if (header.p_type == PT_LOAD) add_module(begin, begin + header.p_memsz);
  }
  return 1;
}

extern "C" void* __tls_get_addr(void*);

void find_shared_memory(Kernel kernel) {
  Library library = {(uintptr_t)kernel, 0, 0};
  forget_modules();
  dl_iterate_phdr(look_at_library, &library);
  size_t index[2] = {library.module, 0};
  launch.static_size = library.size;
  launch.static_shared = library.size ? (char*)__tls_get_addr(index) : nullptr;
}

// Dynamic shared memory ends at a page that nobody may touch.
void place_dynamic_shared(size_t size) {
  static char* memory = nullptr;
  if (!memory) {
    memory = (char*)mmap(nullptr, MOST_SHARED + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(memory + MOST_SHARED, 4096, PROT_NONE);
  }
  launch.dynamic_size = size;
  launch.dynamic_shared = memory + MOST_SHARED - (size + 15) / 16 * 16;
}

void on_fault(int signal_number, siginfo_t* info, void*) {
  if (!launch.active) {
    signal(signal_number, SIG_DFL);
    return;
  }
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal_number);
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  emu_fail("%s at %p: out of bounds, misaligned, or a thread's stack is full",
           signal_number == SIGBUS ? "SIGBUS" : "SIGSEGV", info->si_addr);
}

void on_timeout(int) {
  if (launch.active) emu_fail("timeout: the launch ran longer than %d s", launch.options.timeout);
}

// A launch's signal handlers, its alarm and its arithmetic mode, until the end of the scope.
class Surroundings {
 public:
  Surroundings() {
    static char alternate[65536];
    stack_t stack = {};
    stack.ss_sp = alternate;
    stack.ss_size = sizeof alternate;
    sigaltstack(&stack, &old_stack_);
    struct sigaction fault = {}, alarm = {};
    fault.sa_sigaction = on_fault;
    fault.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &fault, &old_segv_);
    sigaction(SIGBUS, &fault, &old_bus_);
    alarm.sa_handler = on_timeout;
    alarm.sa_flags = SA_NODEFER;
    sigaction(SIGRTMIN + 5, &alarm, &old_alarm_);
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGRTMIN + 5;
    event._sigev_un._tid = gettid();
    itimerspec time = {};
    time.it_value.tv_sec = launch.options.timeout;
    timer_create(CLOCK_MONOTONIC, &event, &timer_);
    timer_settime(timer_, 0, &time, nullptr);
#if defined(__x86_64__)
    old_mode_ = _mm_getcsr();
    if (launch.options.ftz) _mm_setcsr(old_mode_ | FLUSH);
#endif
  }
  ~Surroundings() {
#if defined(__x86_64__)
    _mm_setcsr(old_mode_);
#endif
    timer_delete(timer_);
    sigaction(SIGRTMIN + 5, &old_alarm_, nullptr);
    sigaction(SIGSEGV, &old_segv_, nullptr);
    sigaction(SIGBUS, &old_bus_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  stack_t old_stack_;
  struct sigaction old_segv_, old_bus_, old_alarm_;
  timer_t timer_;
  unsigned old_mode_ = 0;
};

std::vector<uint64_t> order_of_blocks(uint64_t blocks) {
  std::vector<uint64_t> order(blocks);
  for (uint64_t i = 0; i < blocks; ++i) order[i] = launch.options.block_order == REVERSE ? blocks - 1 - i : i;
  if (launch.options.block_order == RANDOM)
    for (uint64_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[launch.random() % i]);
  return order;
}

void run_blocks(const std::vector<uint64_t>& order) {
  const Index3 grid = emu_index.grid_dim;
  for (uint64_t block : order) {
    launch.block = (uint32_t)block;
    launch.current = -1;
    emu_index.block = {(unsigned)(block % grid.x), (unsigned)(block / grid.x % grid.y),
                       (unsigned)(block / ((uint64_t)grid.x * grid.y))};
    run_block();
  }
}

}  // namespace

extern "C" {

// `offsets` of the arguments in `argument_memory`; 0 where all went well, else emulator_error() says what did not.
int emulator_launch(Kernel kernel, char* argument_memory, size_t argument_size, const size_t* offsets, int count,
                    const unsigned* grid, const unsigned* block, size_t shared_size, const Options* options) {
  std::vector<void*> arguments(count + 1);
  for (int i = 0; i < count; ++i) arguments[i] = argument_memory + offsets[i];
  launch.options = *options;
  launch.kernel = kernel;
  launch.arguments = arguments.data();
  launch.arguments_begin = (uintptr_t)argument_memory;
  launch.arguments_end = launch.arguments_begin + argument_size;
  launch.error[0] = 0;
  launch.random.seed(options->seed);
  emu_index.grid_dim = {grid[0], grid[1], grid[2]};
  emu_index.block_dim = {block[0], block[1], block[2]};
  if (shared_size > MOST_SHARED) {
    snprintf(launch.error, sizeof launch.error, "%zu bytes of dynamic shared memory", shared_size);
    return 1;
  }
  find_shared_memory(kernel);
  place_dynamic_shared(shared_size);
  const uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
  if (options->check) begin_checks(blocks);
  const std::vector<uint64_t> order = order_of_blocks(blocks);
  Surroundings surroundings;
  launch.active = true;
  const int failed = _setjmp(launch.failed);
  if (failed) abandon_block();
  else run_blocks(order);
  launch.active = false;
  return failed;
}

const char* emulator_error() { return launch.error; }

// ---- fp32 arithmetic with subnormals kept, whatever the mode: the values that the kernels' header does not do itself

float emu_add_kept(float a, float b) {
#if defined(__x86_64__)
  unsigned mode = _mm_getcsr(), kept = mode & ~FLUSH;
  asm volatile("ldmxcsr %2\n\taddss %1, %0\n\tldmxcsr %3" : "+x"(a) : "x"(b), "m"(kept), "m"(mode));
  return a;
#else
  return a + b;
#endif
}

float emu_multiply_kept(float a, float b) {
#if defined(__x86_64__)
  unsigned mode = _mm_getcsr(), kept = mode & ~FLUSH;
  asm volatile("ldmxcsr %2\n\tmulss %1, %0\n\tldmxcsr %3" : "+x"(a) : "x"(b), "m"(kept), "m"(mode));
  return a;
#else
  return a * b;
#endif
}

float emu_narrow_kept(double a) {
#if defined(__x86_64__)
  unsigned mode = _mm_getcsr(), kept = mode & ~FLUSH;
  float narrow;
  asm volatile("ldmxcsr %2\n\tcvtsd2ss %1, %0\n\tldmxcsr %3" : "=x"(narrow) : "x"(a), "m"(kept), "m"(mode));
  return narrow;
#else
  return (float)a;
#endif
}
}
