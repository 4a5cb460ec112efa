// What the bulk copies of a kernel (copy_box) know of a matrix: a CUtensorMap, which the driver encodes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../dtype.h"

namespace eagle_kernels::cuda {

// A matrix of a 16-bit type, at an address and with a row stride that are multiples of 16 bytes, and the boxes that
// are copied of it: rows of 128 bytes one after the other, at multiples of 1024 bytes of shared memory, in which the
// 16-byte parts change places by the row (CU_TENSOR_MAP_SWIZZLE_128B). Zeros where they reach out of the matrix.
struct Boxes {
  const void* data;
  DType dtype;
  int64_t rows, columns;
  int64_t row_stride;  // in values
  uint32_t box_rows, box_columns;
};

// Returns a cudaError_t: cudaErrorNotSupported where the driver has no such maps, which is before CUDA 12.
int encode(const Boxes& boxes, CUtensorMap& map);

}  // namespace eagle_kernels::cuda
