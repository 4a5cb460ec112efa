// Memory of a CPU kernel for the time of a call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace eagle_kernels::cpu {

// Not a tensor: torch's allocator takes memory from the same place, but through a dispatcher call of 2 us.
//
// A thread keeps its largest workspace for its next calls. malloc may return memory of this size to the system, and
// then each call faults all its pages in again (bf16, T = 64 and 128, minima in ms: 417 and 833 faults, 5.4 and 8.9;
// kept 4.8 and 7.8).
class Workspace {
 public:
  Workspace(const char* op, int64_t bytes) {
    if (bytes <= kept_.bytes) {
      memory_ = std::exchange(kept_, Memory());
    } else {
      if (bytes <= max_kept_) kept_ = Memory();  // it will be replaced, so not both at a time
      memory_ = Memory(op, bytes);
    }
  }
  ~Workspace() {
    if (memory_.bytes > kept_.bytes && memory_.bytes <= max_kept_) kept_ = std::move(memory_);
  }
  Workspace(const Workspace&) = delete;

  void* data() const { return memory_.data.get(); }

  // Sets the size up to which workspaces are kept, frees the calling thread's, and returns the size before.
  static int64_t keep(int64_t max_bytes) {
    kept_ = Memory();
    return max_kept_.exchange(max_bytes);
  }

 private:
  static constexpr std::align_val_t kAlignment{4096};

  struct Free {
    void operator()(void* data) const { operator delete(data, kAlignment); }
  };
  struct Memory {
    int64_t bytes;
    std::unique_ptr<void, Free> data;

    Memory() : bytes(0) {}
    Memory(const char* op, int64_t size)
        : bytes(size), data(operator new(static_cast<size_t>(size), kAlignment, std::nothrow)) {
      // std::bad_alloc says neither whose memory nor how much, and torch makes another exception of it than Python.
      // Worded here because checks.h has torch's headers, which csrc/cpu does without.
      if (data == nullptr) {
        throw std::runtime_error(std::string(op) + ": the system gave no workspace of " + std::to_string(size) +
                                 " bytes");
      }
    }
  };

  // By default T = 1000 at K*H = 12288 and D = 4096 in fp32: 49 MB of rows and 16 MB of sums. AddressSanitizer sees the
  // end of a workspace only where the call before has not left a larger one.
#if defined(__SANITIZE_ADDRESS__)
  static inline std::atomic<int64_t> max_kept_ = 0;
#else
  static inline std::atomic<int64_t> max_kept_ = 64 << 20;
#endif
  Memory memory_;
  static inline thread_local Memory kept_;
};

}  // namespace eagle_kernels::cpu
