// The split of a CPU kernel's range over torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace eagle_kernels::cpu {

#if defined(__SANITIZE_THREAD__)
constexpr int64_t kGrainElements = 1;  // every call of the suite runs in several threads

// torch's OpenMP runtime is not instrumented: without these four lines every result of a thread would be reported as a
// race with its next reader. The marks are static, since a thread must read none of the caller's memory before it knows
// of the fork.
template <typename Function>
void fork_and_join(int64_t count, int64_t grain, const Function& function) {
  static char fork_mark, join_mark;
  const auto marked = [&](int64_t begin, int64_t end) {
    __tsan_acquire(&fork_mark);
    function(begin, end);
    __tsan_release(&join_mark);
  };
  __tsan_release(&fork_mark);  // after the writes of what `marked` captures, which every thread reads
  torch::stable::parallel_for(0, count, grain, marked);
  __tsan_acquire(&join_mark);
}
#else
// at::internal::GRAIN_SIZE: with fewer elements per thread, a second thread costs more than it saves.
constexpr int64_t kGrainElements = 32768;

template <typename Function>
void fork_and_join(int64_t count, int64_t grain, const Function& function) {
  torch::stable::parallel_for(0, count, grain, function);
}
#endif

// Calls function(begin, end) over [0, count), each thread with kGrainElements elements or more.
template <typename Function>
void parallel_over(int64_t count, int64_t elements_each, const Function& function) {
  if (count <= 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(elements_each, 1));
  if (count <= grain || torch::stable::get_num_threads() == 1) {
    function(int64_t{0}, count);
  } else {
    fork_and_join(count, grain, function);
  }
}

// Calls kernel(record, begin, end) over the rows of a record, whose rows have `width` elements.
template <class Record>
void parallel_rows(void (*kernel)(const Record&, int64_t, int64_t), const Record& record, int64_t width) {
  parallel_over(record.num_rows, width, [&](int64_t begin, int64_t end) { kernel(record, begin, end); });
}

}  // namespace eagle_kernels::cpu
