#pragma once

#include "../concat.h"
#include "device.cuh"

namespace eagle_kernels::cuda {

// The source row that output row i reads, or -1 for a zero row.
__device__ __forceinline__ int64_t source_row(const Chunk& chunk, int64_t i) {
  int64_t row = i;
  if (chunk.index.data != nullptr) {
    row = chunk.index.is_int64 ? load(static_cast<const int64_t*>(chunk.index.data) + i)
                               : load(static_cast<const int32_t*>(chunk.index.data) + i);
  }
  return row >= 0 && row < chunk.rows ? row : -1;
}

}  // namespace eagle_kernels::cuda
