// Gather, residual add, RMSNorm and concat of K sources: every source row is read once from memory (the second pass
// finds it in L1) and every concat row is written once. Engines run K norms and a cat.
#include "../norm_concat.h"

#include <optional>

#include "norm_row.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// The source that is read after chunk k of row i, if any.
template <class T>
std::optional<RowValue<T>> source_after(const Concat& op, int64_t k, int64_t i, int64_t row_end) {
  const bool is_last = k + 1 == op.num_chunks;
  if (i + is_last >= row_end) return std::nullopt;
  const Chunk& chunk = op.chunks[is_last ? 0 : k + 1];
  const int64_t row = source_row(chunk, i + is_last);
  if (row < 0) return std::nullopt;
  return RowValue<T>(chunk, row);
}

template <class T>
void norm_concat_row(const NormConcat& op, int64_t i, int64_t row_end, int64_t bytes) {
  T* out = static_cast<T*>(op.out) + i * op.out_row_stride;
  const float of_concat = concat_rstd<T>(op.source, i);
  for (int64_t k = 0; k < op.source.num_chunks; ++k) {
    const Chunk& chunk = op.source.chunks[k];
    const int64_t row = source_row(chunk, i);
    const float rstd = chunk_rstd<T>(op.source, chunk, row, of_concat);
    T* columns = out + chunk.column;
    const auto next = source_after<T>(op.source, k, i, row_end);
    with_store(columns, bytes, [&](auto how) {
      norm_columns<T>(chunk, row, rstd, op.source.norm_offset, 0, chunk.width,
                      [=, width = chunk.width](int64_t h, Float value, auto span) {
                        if (next) next->fetch(h);
                        fetch_to_write(columns + width + h, how);
                        store(columns + h, value, span, how);
                      });
    });
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA

namespace eagle_kernels {

using namespace cpu::EAGLE_KERNELS_ISA;

template <>
void norm_concat_cpu<kIsa>(const NormConcat& op, int64_t row_begin, int64_t row_end) {
  with_dtype(op.source.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t bytes = (row_end - row_begin) * op.source.width * sizeof(T);
    for (int64_t i = row_begin; i < row_end; ++i) norm_concat_row<T>(op, i, row_end, bytes);
  });
  finish_streaming();
}

}  // namespace eagle_kernels
