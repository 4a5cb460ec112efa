// Tells ThreadSanitizer what orders the accesses of a GPU's threads (test_sanitized.py). Each thread of a block is a
// thread of its own to it, and the emulation's scheduler, which is not instrumented, orders nothing. A launch comes
// after all that precedes it and before all that follows; __syncthreads orders a block, sync_cluster a cluster,
// sync_warp a warp. end_cluster and the other collectives order nothing: a shuffle, mma.sync and ldmatrix are no memory
// barriers (CUDA C++ Programming Guide, "Warp Shuffle Functions"). Blocks are not ordered with one another.
#pragma once

#include <cstdlib>

#if defined(EAGLE_KERNELS_RACECHECK)
#include <sanitizer/tsan_interface.h>

extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace eagle_kernels::cuda::host {

#if defined(EAGLE_KERNELS_RACECHECK)

// Accesses before a release come before those after an acquire.
class Order {
 public:
  void release() { __tsan_release(&mark_); }
  void acquire() { __tsan_acquire(&mark_); }

 private:
  char mark_;
};

inline void* running_on() { return __tsan_get_current_fiber(); }
inline void* new_thread() { return __tsan_create_fiber(0); }
inline void end_thread(void* thread) { __tsan_destroy_fiber(thread); }
inline void switch_to(void* thread) { __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync); }

// Memory allocated in its scope is new to every block, even where the allocator reuses it.
struct FreshMemory {
  FreshMemory() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~FreshMemory() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
};

constexpr bool kRacecheck = true;

#else

struct Order {
  void release() {}
  void acquire() {}
};
inline void* running_on() { return nullptr; }
inline void* new_thread() { return nullptr; }
inline void end_thread(void*) {}
inline void switch_to(void*) {}
struct FreshMemory {
  FreshMemory() {}
};
constexpr bool kRacecheck = false;

#endif

// False in tests of the tests, which must notice a forgotten barrier: under ThreadSanitizer one that orders nothing,
// without it one at which nobody waits.
inline const bool barriers_order = std::getenv("EAGLE_KERNELS_TEST_NO_BARRIERS") == nullptr;

}  // namespace eagle_kernels::cuda::host
