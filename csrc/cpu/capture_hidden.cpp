// out = round(hidden + residual) into a strided slot, with the row's sum of squares of what was stored: the fc_norm
// that reads the slot later then needs no pass of its own for the statistic.
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

template <class T, class Store>
void add_row(const CaptureHidden& op, int64_t t, Store how) {
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  const T* residual = static_cast<const T*>(op.residual) + t * op.residual_row_stride;
  T* out = static_cast<T*>(op.out) + t * op.out_row_stride;
  const auto add = [=](int64_t i, auto span) {
    const Float value = load(hidden + i, span) + load(residual + i, span);
    store(out + i, value, span, how);
    return round_to(value, T{});
  };
  if (op.sum_squares == nullptr) {
    for_each_vector(op.width, add);
  } else {
    op.sum_squares[t * op.sum_squares_row_stride] = sum_of_squares(op.width, add);
  }
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
      if (op.residual == nullptr) {
        copy_row<T>(op, t);
      } else {
        with_store(static_cast<T*>(op.out) + t * op.out_row_stride, bytes, [&](auto how) { add_row<T>(op, t, how); });
      }
    }
  });
  finish_streaming();
}

}  // namespace eagle_kernels
