// out[t] = round(hidden[t] + residual[t]), or the rounded mean of a row's streams: round(mean_s hidden[t, s]);
// sum_squares[t] = sum_h fp32(out[t, h])^2.
#pragma once

#include "cpu/isa.h"
#include "cuda/device.h"
#include "dtype.h"

namespace eagle_kernels {

struct CaptureHidden {
  DType dtype;
  int64_t num_rows;
  int64_t width;
  int64_t num_streams;  // of each row of hidden; 0: it has none, and may have a residual
  const void* hidden;
  int64_t hidden_row_stride;
  int64_t hidden_stream_stride;
  const void* residual;  // or null: a copy
  int64_t residual_row_stride;
  void* out;
  int64_t out_row_stride;
  float* sum_squares;  // [num_rows] or null
  int64_t sum_squares_row_stride;
};

template <cpu::Isa isa>
void capture_hidden_cpu(const CaptureHidden& op, int64_t row_begin, int64_t row_end);

int capture_hidden_cuda(const CaptureHidden& op, const cuda::Device& device);

}  // namespace eagle_kernels
