// out = round(hidden + residual), or the rounded mean of the streams, into a strided slot, with each row's sum of
// squares of the stored values, in one launch. Engines clone every captured layer and cat the clones: two passes over
// memory and K + 1 launches.
#include "../capture_hidden.h"

#include "launch.cuh"
#include "pack.cuh"

namespace eagle_kernels::cuda {
namespace {

// All threads of a row call this.
__device__ __forceinline__ void store_sum(const CaptureHidden& op, int64_t t, float squares) {
  if (op.sum_squares == nullptr) return;
  squares = sum_over_row(squares);
  if (threadIdx.x == 0) store(op.sum_squares + t * op.sum_squares_row_stride, squares);
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(512) capture_hidden_kernel(const __grid_constant__ CaptureHidden op) {
  const int64_t t = row_of_thread<kAligned>();
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  const T* residual = static_cast<const T*>(op.residual) + t * op.residual_row_stride;
  T* out = static_cast<T*>(op.out) + t * op.out_row_stride;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (t >= op.num_rows) return;  // barriers wait only for threads that have not exited

  float squares = 0;
  for (int64_t first = first_column(); first < op.width; first += kInFlight * pack_stride()) {
    Pack<T> value[kInFlight], other[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      value[i] = load_pack<kAligned>(hidden, first + i * pack_stride(), op.width);
      if (op.residual != nullptr) other[i] = load_pack<kAligned>(residual, first + i * pack_stride(), op.width);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      // Without a residual the row is copied as bits: rounding it again would change the payload of a NaN.
      if (op.residual != nullptr) value[i] = add(value[i], other[i]);
      store_pack<kAligned>(out, first + i * pack_stride(), op.width, value[i]);
      if (op.sum_squares != nullptr) squares += sum_of_squares(widen(value[i]));
    }
  }
  store_sum(op, t, squares);
}

// Adds the streams in order, beginning with +0, for the bits of torch's mean: where all are -0 it is +0. A kernel of
// its own: in the one above its loads would take fp32 from 64 registers to 70.
template <class T, bool kAligned>
__global__ void __launch_bounds__(512) mean_of_streams_kernel(const __grid_constant__ CaptureHidden op) {
  const int64_t t = row_of_thread<kAligned>();
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  T* out = static_cast<T*>(op.out) + t * op.out_row_stride;
  // 64 bytes of loads in flight; at twice that fp32 spills on sm_80. The emulation's g++ ignores that pragma.
  [[maybe_unused]] constexpr int kUnrolled = 8 / sizeof(T);
  const float share = 1.0f / static_cast<float>(op.num_streams);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (t >= op.num_rows) return;  // barriers wait only for threads that have not exited

  float squares = 0;
  for (int64_t column = first_column(); column < op.width; column += pack_stride()) {
    Values mean{};
#pragma unroll kUnrolled
    for (int64_t s = 0; s < op.num_streams; ++s) {
      mean = mean + widen(load_pack<kAligned>(hidden + s * op.hidden_stream_stride, column, op.width));
    }
#pragma unroll
    for (int i = 0; i < kPack; ++i) mean.v[i] *= share;
    const Pack<T> value = narrow(mean, T{});
    store_pack<kAligned>(out, column, op.width, value);
    if (op.sum_squares != nullptr) squares += sum_of_squares(widen(value));
  }
  store_sum(op, t, squares);
}

}  // namespace
}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

int capture_hidden_cuda(const CaptureHidden& record, const Device& device) {
  const int64_t rows = record.num_rows;
  Alignment alignment(size_of(record.dtype));
  alignment.add(record.hidden, record.hidden_row_stride, rows);
  alignment.add(record.hidden, record.hidden_stream_stride, record.num_streams);
  alignment.add(record.residual, record.residual_row_stride, rows);
  alignment.add(record.out, record.out_row_stride, rows);
  alignment.add_width(record.width);
  const Shape shape = shape_of_rows(rows, record.width, alignment.holds(), device);
  return with_dtype(record.dtype, [&](auto type) {
    using T = decltype(type);
    if (record.num_streams > 0) {
      return alignment.holds() ? launch<mean_of_streams_kernel<T, true>>(shape, record, device)
                               : launch<mean_of_streams_kernel<T, false>>(shape, record, device);
    }
    return alignment.holds() ? launch<capture_hidden_kernel<T, true>>(shape, record, device)
                             : launch<capture_hidden_kernel<T, false>>(shape, record, device);
  });
}

}  // namespace eagle_kernels
