// One record per op: what a kernel is told about a call. Plain pointers, so that no kernel knows a torch header;
// arguments.h fills them in from tensors and has checked everything. Strides are in elements, and the last dimension of
// every operand is contiguous.
#pragma once

#include <cstdint>

namespace eagle_kernels {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

enum class Norm : int64_t { kNone, kChunk, kConcat };

// A per-column vector (gain, bias) in the op's dtype or in fp32; null data means absent.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// Row numbers, int32 or int64; null data means row i of the output reads row i of the source.
struct Index {
  const void* data = nullptr;
  bool is_int64 = false;
};

// One source of norm_concat / norm_concat_linear. Output row i reads source row index[i]; a number outside [0, rows)
// gives a zero row (before and after the norm) and no memory access.
struct Chunk {
  const void* x = nullptr;         // [rows, width]
  int64_t x_row_stride = 0;
  const void* residual = nullptr;  // [rows, width] or null; the chunk's value is round_to_dtype(x + residual)
  int64_t residual_row_stride = 0;
  Index index;
  Vector gain;                     // [width]; absent: unit gain, and then norm_offset does not apply
  const float* sum_squares = nullptr;  // [rows] row sums of squares of the rounded value, or null: computed here
  int64_t sum_squares_row_stride = 0;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t column = 0;              // where this chunk starts in the concat
  float eps = 0;                   // kConcat uses that of chunk 0
};

// out[i] = concat_k(round((x_k[i] * rstd_k[i]) * (norm_offset + gain_k))), fp32 until the one rounding.
struct NormConcat {
  DType dtype;
  Norm norm;
  const Chunk* chunks;
  int64_t num_chunks;
  int64_t width;                   // sum of the chunks' widths
  float norm_offset;
  void* out;                       // [N, width]
  int64_t out_row_stride;
};

// out = post_norm(norm_concat(...) @ weight^T + bias); source.out is unused.
struct NormConcatLinear {
  NormConcat source;
  int64_t num_rows;                // N
  int64_t num_columns;             // D
  const void* weight;              // [D, source.width]
  int64_t weight_row_stride;
  Vector bias;                     // [D] or absent
  Vector post_norm_gain;           // [D] or absent: no post norm; scaled by norm_offset + gain like the chunks
  float post_norm_eps;
  void* out;                       // [N, D]
  int64_t out_row_stride;
  void* workspace;                 // norm_concat_linear_workspace bytes, 64-byte aligned
};

// out[t] = round(hidden[t] + residual[t]); sum_squares[t] = sum_h fp32(out[t, h])^2.
struct CaptureHidden {
  DType dtype;
  int64_t width;
  const void* hidden;
  int64_t hidden_row_stride;
  const void* residual;            // or null: a copy
  int64_t residual_row_stride;
  void* out;
  int64_t out_row_stride;
  float* sum_squares;              // [rows] or null
  int64_t sum_squares_row_stride;
};

// out[i] = weight[local(ids[i])] (* scale), a zero row for an id this shard does not hold.
struct VocabParallelEmbedding {
  DType dtype;                     // only read with a scale; without one a row is copied as bytes
  int64_t element_size;
  int64_t width;
  const void* ids;
  int64_t ids_stride;
  bool ids_are_int64;
  const void* weight;              // [rows, width]
  int64_t weight_row_stride;
  int64_t org_begin, org_end;      // original ids held here, at local row id - org_begin
  int64_t added_begin, added_end;  // added ids held here, at local row id - added_begin + added_row
  int64_t added_row;
  bool has_scale;
  float scale;                     // round(fp32(weight) * scale)
  Vector scale_tensor;             // one value that replaces `scale`, or absent
  void* out;
  int64_t out_row_stride;
};

// sum = round(hidden + residual); normed = round(rms_norm(fp32(hidden) + fp32(residual)) * (norm_offset + gain)): the
// norm reads the sum before it is rounded, as the fused add-norm kernels of vLLM and SGLang do.
struct AddRmsNorm {
  DType dtype;
  int64_t width;
  const void* hidden;
  int64_t hidden_row_stride;
  const void* residual;
  int64_t residual_row_stride;
  Vector gain;
  float eps;
  float norm_offset;
  void* normed;
  int64_t normed_row_stride;
  void* sum;
  int64_t sum_row_stride;
};

}  // namespace eagle_kernels
