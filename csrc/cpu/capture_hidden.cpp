// out = round(hidden + residual), or the rounded mean of the streams, into a strided slot, with the row's sum of
// squares of what was stored: the fc_norm that reads the slot later then needs no pass of its own for the statistic.
#include "../capture_hidden.h"

#include "simd.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// Without a residual the row is copied as bytes: rounding it again would change the payload of a NaN.
template <class T>
void copy_row(const CaptureHidden& op, int64_t t) {
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  // memcpy takes no null pointer, which a tensor without elements has.
  if (op.width > 0) __builtin_memcpy(static_cast<T*>(op.out) + t * op.out_row_stride, hidden, op.width * sizeof(T));
  if (op.sum_squares == nullptr) return;
  op.sum_squares[t * op.sum_squares_row_stride] =
      sum_of_squares(op.width, [=](int64_t i, auto span) { return load(hidden + i, span); });
}

// Stores the row of value(begin, span), rounded.
template <class T, class Store, class Value>
void store_row(const CaptureHidden& op, int64_t t, Store how, Value value) {
  T* out = static_cast<T*>(op.out) + t * op.out_row_stride;
  const auto store_value = [=](int64_t i, auto span) {
    const Float unrounded = value(i, span);
    store(out + i, unrounded, span, how);
    return round_to(unrounded, T{});
  };
  if (op.sum_squares == nullptr) {
    for_each_vector(op.width, store_value);
  } else {
    op.sum_squares[t * op.sum_squares_row_stride] = sum_of_squares(op.width, store_value);
  }
}

template <class T, class Store>
void add_row(const CaptureHidden& op, int64_t t, bool is_last, Store how) {
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  const T* residual = static_cast<const T*>(op.residual) + t * op.residual_row_stride;
  const T* next_hidden = is_last ? hidden : hidden + op.hidden_row_stride;
  const T* next_residual = is_last ? residual : residual + op.residual_row_stride;
  store_row<T>(op, t, how, [=](int64_t i, auto span) {
    fetch(next_hidden + i);
    fetch(next_residual + i);
    return load(hidden + i, span) + load(residual + i, span);
  });
}

// Sums from +0 on, in the order of the streams: the bits of torch's mean, whose row of all -0 is +0.
template <class T, class Store>
void mean_row(const CaptureHidden& op, int64_t t, bool is_last, Store how) {
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  const T* next = is_last ? hidden : hidden + op.hidden_row_stride;
  const int64_t streams = op.num_streams, stride = op.hidden_stream_stride;
  store_row<T>(op, t, how, [=](int64_t i, auto span) {
    Float sum = Float{};
    for (int64_t s = 0; s < streams; ++s) {
      fetch(next + s * stride + i);
      sum += load(hidden + s * stride + i, span);
    }
    return sum * (1.0f / static_cast<float>(streams));
  });
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA

namespace eagle_kernels {

using namespace cpu::EAGLE_KERNELS_ISA;

template <>
void capture_hidden_cpu<kIsa>(const CaptureHidden& op, int64_t row_begin, int64_t row_end) {
  with_dtype(op.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t bytes = (row_end - row_begin) * op.width * sizeof(T);
    for (int64_t t = row_begin; t < row_end; ++t) {
      if (op.residual == nullptr && op.num_streams == 0) {
        copy_row<T>(op, t);
        continue;
      }
      with_store(static_cast<T*>(op.out) + t * op.out_row_stride, bytes, [&](auto how) {
        const bool is_last = t + 1 == row_end;
        return op.num_streams == 0 ? add_row<T>(op, t, is_last, how) : mean_row<T>(op, t, is_last, how);
      });
    }
  });
  finish_streaming();
}

}  // namespace eagle_kernels
