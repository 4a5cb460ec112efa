// sum = round(hidden + residual); normed = round(rms_norm(fp32(hidden) + fp32(residual)) * (norm_offset + gain)): the
// norm reads the sum before it is rounded, as the fused add-norm kernels of vLLM and SGLang do. A row of zeros at eps 0
// gives 0.
#pragma once

#include "cpu/isa.h"
#include "cuda/device.h"
#include "dtype.h"

namespace eagle_kernels {

struct AddRmsNorm {
  DType dtype;
  int64_t num_rows;
  int64_t width;
  const void* hidden;
  int64_t hidden_row_stride;
  const void* residual;
  int64_t residual_row_stride;
  Vector gain;
  float eps;
  float norm_offset;
  void* normed;
  int64_t normed_row_stride;
  void* sum;
  int64_t sum_row_stride;
};

template <cpu::Isa isa>
void add_rms_norm_cpu(const AddRmsNorm& op, int64_t row_begin, int64_t row_end);

int add_rms_norm_cuda(const AddRmsNorm& op, const cuda::Device& device);

}  // namespace eagle_kernels
