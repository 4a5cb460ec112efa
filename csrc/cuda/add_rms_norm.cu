// sum = round(hidden + residual) and normed = round(rms_norm(hidden + residual) * (offset + gain)), both outputs of a
// row from one read; the engines clone the sum in another kernel.
#include "../add_rms_norm.h"

#include "launch.cuh"
#include "pack.cuh"

namespace eagle_kernels::cuda {
namespace {

template <class T, bool kAligned>
__global__ void __launch_bounds__(512) add_rms_norm_kernel(const __grid_constant__ AddRmsNorm op) {
  const int64_t t = row_of_thread<kAligned>();
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  const T* residual = static_cast<const T*>(op.residual) + t * op.residual_row_stride;
  T* sum = static_cast<T*>(op.sum) + t * op.sum_row_stride;
  T* normed = static_cast<T*>(op.normed) + t * op.normed_row_stride;
  const int64_t step = kInFlight * pack_stride();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (t >= op.num_rows) return;  // barriers wait only for threads that have not exited

  // The norm reads the sum before it is rounded, so both addends stay in registers.
  Pack<T> value[kInFlight], other[kInFlight];
  const auto load_step = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      value[i] = load_pack<kAligned>(hidden, first + i * pack_stride(), op.width);
      other[i] = load_pack<kAligned>(residual, first + i * pack_stride(), op.width);
    }
  };
  float squares = 0;
  for (int64_t first = first_column(); first < op.width; first += step) {
    load_step(first);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) squares += sum_of_squares(widen(value[i]) + widen(other[i]));
  }
  const float rstd = rstd_of(sum_over_row(squares), op.width, op.eps);
  for (int64_t first = first_column(); first < op.width; first += step) {
    if (op.width > step) load_step(first);  // a row of one step, up to 8192 values, is still in registers
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t column = first + i * pack_stride();
      const Values x = widen(value[i]) + widen(other[i]);
      store_pack<kAligned>(sum, column, op.width, narrow(x, T{}));
      const Values scaled = norm<kAligned, T>(x, rstd, op.gain, op.norm_offset, column, op.width);
      store_pack<kAligned>(normed, column, op.width, narrow(scaled, T{}));
    }
  }
}

}  // namespace
}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

int add_rms_norm_cuda(const AddRmsNorm& record, const Device& device) {
  const int64_t rows = record.num_rows;
  Alignment alignment(size_of(record.dtype));
  alignment.add(record.hidden, record.hidden_row_stride, rows);
  alignment.add(record.residual, record.residual_row_stride, rows);
  alignment.add(record.sum, record.sum_row_stride, rows);
  alignment.add(record.normed, record.normed_row_stride, rows);
  alignment.add(record.gain.data);
  alignment.add_width(record.width);
  const Shape shape = shape_of_rows(rows, record.width, alignment.holds(), device);
  return with_dtype(record.dtype, [&](auto type) {
    using T = decltype(type);
    return alignment.holds() ? launch<add_rms_norm_kernel<T, true>>(shape, record, device)
                             : launch<add_rms_norm_kernel<T, false>>(shape, record, device);
  });
}

}  // namespace eagle_kernels
