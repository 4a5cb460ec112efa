// A row gather of one vocabulary shard: ids of other shards give zero rows, so that the all-reduce over the shards
// adds up to the lookup. Engines mask, clamp, gather and fill in four kernels.
#include "../vocab_parallel_embedding.h"

#include "simd.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// The shard's row of ids[i], or -1.
inline int64_t local_row(const VocabParallelEmbedding& op, int64_t i) {
  const int64_t id = op.ids[i * op.ids_stride];
  if (id >= op.org_begin && id < op.org_end) return id - op.org_begin;
  if (id >= op.added_begin && id < op.added_end) return id - op.added_begin + op.added_row;
  return -1;
}

void copy_row(const VocabParallelEmbedding& op, int64_t row, int64_t i) {
  const int64_t row_bytes = op.width * op.element_size;
  if (row_bytes == 0) return;  // memcpy and memset take no null pointer, which a tensor without elements has
  char* out = static_cast<char*>(op.out) + i * op.out_row_stride * op.element_size;
  if (row < 0) {
    __builtin_memset(out, 0, row_bytes);
  } else {
    const char* weight = static_cast<const char*>(op.weight) + row * op.weight_row_stride * op.element_size;
    __builtin_memcpy(out, weight, row_bytes);
  }
}

template <class T>
void scale_row(const VocabParallelEmbedding& op, int64_t row, int64_t i, int64_t bytes) {
  if (row < 0) return copy_row(op, row, i);
  const T* weight = static_cast<const T*>(op.weight) + row * op.weight_row_stride;
  T* out = static_cast<T*>(op.out) + i * op.out_row_stride;
  const float scale = op.scale;
  with_store(out, bytes, [=, width = op.width](auto how) {
    for_each_vector(width, [=](int64_t h, auto span) { store(out + h, load(weight + h, span) * scale, span, how); });
  });
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA

namespace eagle_kernels {

using namespace cpu::EAGLE_KERNELS_ISA;

template <>
void vocab_parallel_embedding_cpu<kIsa>(const VocabParallelEmbedding& op, int64_t row_begin, int64_t row_end) {
  if (!op.has_scale) {
    for (int64_t i = row_begin; i < row_end; ++i) copy_row(op, local_row(op, i), i);
    return;
  }
  with_dtype(op.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t bytes = (row_end - row_begin) * op.width * sizeof(T);
    for (int64_t i = row_begin; i < row_end; ++i) scale_row<T>(op, local_row(op, i), i, bytes);
  });
  finish_streaming();
}

}  // namespace eagle_kernels
