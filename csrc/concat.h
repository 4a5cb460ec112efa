// The normed concat of K chunks, which norm_concat writes and norm_concat_linear multiplies.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace eagle_kernels {

namespace cuda {
// Max chunks of one CUDA call: their records are passed in a kernel parameter, of 4 KB at most.
constexpr int64_t kMaxChunks = 8;
}  // namespace cuda

enum class Norm : int64_t { kNone, kChunk, kConcat };

// One chunk. Output row i reads row index[i], without an index row i; a number outside [0, rows) gives a zero row
// (before and after the norm) and no memory access.
struct Chunk {
  const void* x = nullptr;  // [rows, width]
  int64_t x_row_stride = 0;
  const void* residual = nullptr;  // [rows, width] or null; the chunk's value is round_to_dtype(x + residual)
  int64_t residual_row_stride = 0;
  Integers index;
  Vector gain;                         // [width]; absent: unit gain, and then norm_offset does not apply
  const float* sum_squares = nullptr;  // [rows] row sums of squares of the rounded value, or null: computed here
  int64_t sum_squares_row_stride = 0;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t column = 0;  // where this chunk starts in the concat
  float eps = 0;       // kConcat uses that of chunk 0
};

// concat[i] = concat_k((x_k[i] * rstd_k[i]) * (norm_offset + gain_k)), in fp32. rstd is 1/rms, but 0 where mean square
// and eps are both 0: a row of zeros stays zero.
struct Concat {
  DType dtype;
  Norm norm;
  const Chunk* chunks;
  int64_t num_chunks;
  int64_t width;  // sum of the chunks' widths
  float norm_offset;
};

}  // namespace eagle_kernels
