// The split of a CPU kernel's range over torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace eagle_kernels::cpu {

// at::internal::GRAIN_SIZE: elements of a thread below which a second one costs more than it saves.
constexpr int64_t kGrainElements = 32768;

// function(begin, end) over [0, count), each thread with kGrainElements elements or more.
template <typename Function>
void parallel_over(int64_t count, int64_t elements_each, const Function& function) {
  if (count <= 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(elements_each, 1));
  if (count <= grain || torch::stable::get_num_threads() == 1) {
    function(int64_t{0}, count);
  } else {
    torch::stable::parallel_for(0, count, grain, function);
  }
}

}  // namespace eagle_kernels::cpu
