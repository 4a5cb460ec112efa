// norm_concat on all threads, for the host files alone: its primitive, and the first of norm_concat_linear's two steps.
#pragma once

#include "../norm_concat.h"
#include "dispatch.h"
#include "parallel.h"

namespace eagle_kernels::cpu {

inline void norm_concat(const NormConcat& op) {
  static constexpr PerIsa kKernels([](auto isa) { return &norm_concat_cpu<isa>; });
  const auto kernel = kKernels.active();
  parallel_over(op.num_rows, op.source.width, [&](int64_t begin, int64_t end) { kernel(op, begin, end); });
}

}  // namespace eagle_kernels::cpu
