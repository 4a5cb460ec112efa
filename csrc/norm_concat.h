// out[i] = round(concat[i]), the terms as in concat.h; fp32 until the one rounding.
#pragma once

#include "concat.h"
#include "cpu/isa.h"
#include "cuda/device.h"

namespace eagle_kernels {

struct NormConcat {
  Concat source;
  int64_t num_rows;
  void* out;  // [num_rows, source.width]
  int64_t out_row_stride;
};

template <cpu::Isa isa>
void norm_concat_cpu(const NormConcat& op, int64_t row_begin, int64_t row_end);

int norm_concat_cuda(const NormConcat& op, const cuda::Device& device);

}  // namespace eagle_kernels
