// out[i] = weight[local(ids[i])] (* scale), a zero row for an id that is not in this shard.
#pragma once

#include "cpu/isa.h"
#include "cuda/device.h"
#include "dtype.h"

namespace eagle_kernels {

struct VocabParallelEmbedding {
  DType dtype;  // only read with a scale; without one a row is copied as bytes
  int64_t element_size;
  int64_t num_rows;
  int64_t width;
  Integers ids;
  int64_t ids_stride;
  const void* weight;  // [rows, width]
  int64_t weight_row_stride;
  int64_t org_begin, org_end;      // original ids of this shard, at local row id - org_begin
  int64_t added_begin, added_end;  // its added ids, at local row id - added_begin + added_row
  int64_t added_row;
  bool has_scale;
  float scale;          // round(fp32(weight) * scale)
  Vector scale_tensor;  // one value that replaces `scale`, or absent
  void* out;
  int64_t out_row_stride;
};

template <cpu::Isa isa>
void vocab_parallel_embedding_cpu(const VocabParallelEmbedding& op, int64_t row_begin, int64_t row_end);

int vocab_parallel_embedding_cuda(const VocabParallelEmbedding& op, const cuda::Device& device);

}  // namespace eagle_kernels
