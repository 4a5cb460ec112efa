// The CPU kernels as the launchers see them: one argument record per op, one table of entry points per instruction set.
//
// A kernel works on a range [begin, end) of rows (or of output columns) and never starts a thread: ops.cpp splits the
// range with the stable ABI's parallel_for. Nothing here checks an argument; ops.cpp has done so. Strides are in
// elements, and the last dimension of every operand is contiguous.
#pragma once

#include <cstdint>

namespace eagle_kernels::cpu {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// Ordered: an instruction set includes those before it. kAmxBf16 is AVX-512-BF16 plus the AMX tile unit.
enum class Isa : int32_t { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

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
  bool ids_are_int64;
  const void* weight;              // [rows, width]
  int64_t weight_row_stride;
  int64_t org_begin, org_end;      // original ids held here, at local row id - org_begin
  int64_t added_begin, added_end;  // added ids held here, at local row id - added_begin + added_row
  int64_t added_row;
  bool has_scale;
  float scale;                     // round(fp32(weight) * scale)
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

struct Kernels {
  void (*capture_hidden)(const CaptureHidden&, int64_t row_begin, int64_t row_end);
  void (*add_rms_norm)(const AddRmsNorm&, int64_t row_begin, int64_t row_end);
  void (*vocab_parallel_embedding)(const VocabParallelEmbedding&, int64_t row_begin, int64_t row_end);
  void (*norm_concat)(const NormConcat&, int64_t row_begin, int64_t row_end);

  // norm_concat_linear runs in up to three parallel passes over one workspace: the rows are normed and laid out for
  // the product, then every panel of panel_columns output columns streams its rows of the weight once, then (post
  // norm only) the fp32 result rows are normed into out.
  int64_t (*norm_concat_linear_workspace)(const NormConcatLinear&);
  int64_t (*norm_concat_linear_row_groups)(const NormConcatLinear&);
  void (*norm_concat_linear_pack)(const NormConcatLinear&, int64_t group_begin, int64_t group_end);
  int64_t (*norm_concat_linear_panels)(const NormConcatLinear&);
  void (*norm_concat_linear_project)(const NormConcatLinear&, int64_t panel_begin, int64_t panel_end);
  void (*norm_concat_linear_post_norm)(const NormConcatLinear&, int64_t row_begin, int64_t row_end);
};

// The best instruction set this machine has (AMX only where the kernel grants the tile registers).
Isa best_isa();
const char* isa_name(Isa isa);

// The table for one instruction set; isa must not exceed best_isa().
const Kernels& kernels(Isa isa);

}  // namespace eagle_kernels::cpu
