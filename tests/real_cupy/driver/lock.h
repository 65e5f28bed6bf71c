// One lock for all of the driver: a device does one thing at a time, whichever thread asks.
#pragma once
#include <mutex>

extern "C" {
int PyGILState_Check() __attribute__((weak));
void* PyEval_SaveThread() __attribute__((weak));
void PyEval_RestoreThread(void*) __attribute__((weak));
int Py_IsInitialized() __attribute__((weak));
}

namespace gpuless {

inline std::recursive_mutex& lock() {
  static std::recursive_mutex it;
  return it;
}

// Kernels run under our lock and take Python's. Whoever holds Python's therefore lets go of it before waiting for ours.
// What CuPy asks for amid work of its own that no other thread may come between, the current device, takes no turn.
class Turn {
 public:
  Turn() {
    if (lock().try_lock()) return;
    if (Py_IsInitialized && Py_IsInitialized() && PyGILState_Check()) python_ = PyEval_SaveThread();
    lock().lock();
  }
  ~Turn() {
    lock().unlock();
    if (python_) PyEval_RestoreThread(python_);
  }
  Turn(const Turn&) = delete;

 private:
  void* python_ = nullptr;
};

}  // namespace gpuless
