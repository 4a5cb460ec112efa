#pragma once

#include "../concat.h"
#include "device.cuh"

namespace eagle_kernels::cuda {

// The source row that output row i reads, or -1 for a zero row.
__device__ __forceinline__ int64_t source_row(const Chunk& chunk, int64_t i) {
  const int64_t row = chunk.index.data == nullptr ? i : load(chunk.index, i);
  return row >= 0 && row < chunk.rows ? row : -1;
}

}  // namespace eagle_kernels::cuda
