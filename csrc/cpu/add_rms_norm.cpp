// sum = round(hidden + residual) and normed = round(rms_norm(hidden + residual) * (offset + gain)), in one kernel with
// two outputs; the engines clone the sum in another.
#include "norm_row.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// The second pass adds again, from L1, rather than keep the fp32 row: no scratch, and since each element is read before
// its place is written, sum or normed may be the same memory as hidden or residual.
template <class T>
void add_rms_norm_row(const AddRmsNorm& op, int64_t t) {
  const T* hidden = static_cast<const T*>(op.hidden) + t * op.hidden_row_stride;
  const T* residual = static_cast<const T*>(op.residual) + t * op.residual_row_stride;
  T* sum = static_cast<T*>(op.sum) + t * op.sum_row_stride;
  T* normed = static_cast<T*>(op.normed) + t * op.normed_row_stride;

  const auto add = [&](int64_t i, auto span) { return load(hidden + i, span) + load(residual + i, span); };
  const float rstd = rsqrt_mean(sum_of_squares(op.width, add), op.width, op.eps);
  for_each_vector(op.width, [&](int64_t i, auto span) {
    const Float value = add(i, span);
    Float scaled = value * rstd;
    if (op.gain.data != nullptr) scaled *= op.norm_offset + load_vector<T>(op.gain, i, span);
    store(sum + i, value, span);
    store(normed + i, scaled, span);
  });
}

}  // namespace

void add_rms_norm(const AddRmsNorm& op, int64_t row_begin, int64_t row_end) {
  with_dtype(op.dtype, [&](auto type) {
    for (int64_t t = row_begin; t < row_end; ++t) add_rms_norm_row<decltype(type)>(op, t);
  });
}

}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
