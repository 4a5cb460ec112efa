// One row of one chunk: its memory, its statistic, its normed value. Shared by norm_concat and norm_concat_linear.
#pragma once

#include "../concat.h"
#include "simd.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// 1/rms, but 0 where eps = 0 meets a row of zeros, which then stays zero.
inline float rsqrt_mean(float sum_squares, int64_t width, float eps) {
  const float mean_square = sum_squares / static_cast<float>(width) + eps;
  return mean_square == 0.0f ? 0.0f : 1.0f / __builtin_sqrtf(mean_square);
}

// The source row that output row i reads, or -1 for a zero row.
inline int64_t source_row(const Chunk& chunk, int64_t i) {
  const int64_t row = chunk.index.data == nullptr ? i : chunk.index[i];
  return row >= 0 && row < chunk.rows ? row : -1;
}

// round_to_dtype(x + residual), from fp32.
template <class T>
struct RowValue {
  const T* x;
  const T* residual;

  RowValue(const Chunk& chunk, int64_t row)
      : x(static_cast<const T*>(chunk.x) + row * chunk.x_row_stride),
        residual(chunk.residual == nullptr
                     ? nullptr
                     : static_cast<const T*>(chunk.residual) + row * chunk.residual_row_stride) {}

  template <class Span>
  Float operator()(int64_t i, Span span) const {
    if (residual == nullptr) return load(x + i, span);
    return round_to(load(x + i, span) + load(residual + i, span), T{});
  }

  [[gnu::always_inline]] void fetch(int64_t i) const {
    cpu::EAGLE_KERNELS_ISA::fetch(x + i);
    if (residual != nullptr) cpu::EAGLE_KERNELS_ISA::fetch(residual + i);
  }
};

template <class T>
inline float row_sum_squares(const Chunk& chunk, int64_t row) {
  if (row < 0) return 0.0f;
  if (chunk.sum_squares != nullptr) return chunk.sum_squares[row * chunk.sum_squares_row_stride];
  return sum_of_squares(chunk.width, RowValue<T>(chunk, row));
}

// The rstd of output row i under kConcat, else 0: one statistic over all chunks, where a zero row adds nothing.
template <class T>
inline float concat_rstd(const Concat& op, int64_t i) {
  if (op.norm != Norm::kConcat) return 0.0f;
  float sum = 0.0f;
  for (int64_t k = 0; k < op.num_chunks; ++k) {
    sum += row_sum_squares<T>(op.chunks[k], source_row(op.chunks[k], i));
  }
  return rsqrt_mean(sum, op.width, op.chunks[0].eps);
}

// The rstd that scales a row of `chunk`. `of_concat` is concat_rstd of the row, read under kConcat only.
template <class T>
inline float chunk_rstd(const Concat& op, const Chunk& chunk, int64_t row, float of_concat) {
  if (op.norm == Norm::kNone) return 1.0f;
  if (op.norm == Norm::kConcat) return of_concat;
  return rsqrt_mean(row_sum_squares<T>(chunk, row), chunk.width, chunk.eps);
}

// Calls write(column - begin, value, span) with columns [begin, end) of a chunk's normed row, not yet rounded.
template <class T, class Write>
inline void norm_columns(const Chunk& chunk, int64_t row, float rstd, float norm_offset, int64_t begin, int64_t end,
                         Write write) {
  if (row < 0) {
    for_each_vector(end - begin, [&](int64_t i, auto span) { write(i, Float{}, span); });
    return;
  }
  const RowValue<T> value(chunk, row);
  const Vector gain = chunk.gain;
  if (gain.data == nullptr) {
    for_each_vector(end - begin, [=](int64_t i, auto span) { write(i, value(begin + i, span) * rstd, span); });
    return;
  }
  for_each_vector(end - begin, [=](int64_t i, auto span) {
    write(i, value(begin + i, span) * rstd * (norm_offset + load_vector<T>(gain, begin + i, span)), span);
  });
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
