// out = round(hidden + residual) into a strided slot, with the row's sum of squares of what was stored: the fc_norm
// that reads the slot later then needs no pass of its own for the statistic.
#include "simd.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

template <class T>
void capture_row(const CaptureHidden& op, int64_t t) {
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  T* out = static_cast<T*>(op.out) + t * op.out_row_stride;
  const auto capture = [&](int64_t i, auto span) {
    Float value = load(hidden + i, span);
    if (op.residual != nullptr) {
      const T* residual = static_cast<const T*>(op.residual) + t * op.residual_row_stride;
      value = round_to(value + load(residual + i, span), T{});
    }
    store(out + i, value, span);
    return value;
  };
  if (op.sum_squares == nullptr) {
    for_each_vector(op.width, capture);
  } else {
    op.sum_squares[t * op.sum_squares_row_stride] = sum_of_squares(op.width, capture);
  }
}

}  // namespace

void capture_hidden(const CaptureHidden& op, int64_t row_begin, int64_t row_end) {
  with_dtype(op.dtype, [&](auto type) {
    for (int64_t t = row_begin; t < row_end; ++t) capture_row<decltype(type)>(op, t);
  });
}

}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
