// norm_concat on all threads, for host files only: its primitive, and the first of norm_concat_linear's two steps.
#pragma once

#include "../norm_concat.h"
#include "dispatch.h"
#include "parallel.h"

namespace eagle_kernels::cpu {

inline void norm_concat(const NormConcat& op) {
  static constexpr PerIsa kKernels([](auto isa) { return &norm_concat_cpu<isa>; });
  parallel_rows(kKernels.active(), op, op.source.width);
}

}  // namespace eagle_kernels::cpu
