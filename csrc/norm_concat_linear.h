// out = post_norm(round(concat) @ weight^T + bias), the concat as in concat.h.
#pragma once

#include "concat.h"
#include "cpu/isa.h"
#include "cuda/device.h"

namespace eagle_kernels {

// A weight in the chunks' dtype, or as codes, whose row stride is in bytes. A byte has two codes of kFloat4E2M1, the
// even column's in the low four bits. kBFloat16In12 is exactly bf16 (cpu/widen_bf16_12bit.h), on CPU, for rows of bf16.
enum class WeightType : int32_t { kChunks, kFloat8E4M3, kInt8, kFloat4E2M1, kBFloat16In12 };

constexpr bool has_scales(WeightType type) {
  return type != WeightType::kChunks && type != WeightType::kBFloat16In12;
}

enum class ScaleType : int32_t { kFloat32, kFloat8E8M0, kFloat8E4M3 };

// weight[d][c] = codes[d][c] * scales[d / block_rows][c / block_columns] * global. A block is as wide as the weight, or
// a multiple of 128 columns, or a power of two from 16 to 64. For kBFloat16In12: what a row has besides its codes.
struct Scales {
  const void* data;
  ScaleType type;
  int64_t row_stride;
  int64_t row_size;
  int64_t block_rows;
  int64_t block_columns;
  const float* global;  // or null: 1
};

// Which kernel multiplies. On CUDA, of codes, in order: the split kernels, the fused one, the one of warpgroups. On
// CPU: the first or, with AVX-512, kFewRows, whose sums are along K*H: of codes for rows of bf16 where the CPU
// multiplies bf16, of other weights but for rows of bf16 with AMX.
enum class ProductKernel : int64_t { kAnyRows, kFewRows, kWgmma };

struct NormConcatLinear {
  Concat source;
  int64_t num_rows;     // N
  int64_t num_columns;  // D
  const void* weight;   // [D, source.width]
  int64_t weight_row_stride;
  WeightType weight_type;
  Scales scales;  // of codes
  ProductKernel kernel;
  Vector bias;            // [D] or absent
  Vector post_norm_gain;  // [D] or absent: no post norm; scaled by norm_offset + gain like the chunks
  float post_norm_eps;    // a row of zeros at eps 0 stays zero here too
  void* out;              // [N, D]
  int64_t out_row_stride;
  // On CPU norm_concat_linear_workspace bytes, 4096-byte aligned; on CUDA fp32 sums of the split kernels or a library.
  void* workspace;
  // On CUDA the weight and scales that multiply codes may be read while the previous kernel runs, provided that one
  // does not write them.
  bool early_weight;
};

// On CPU up to three parallel passes over one workspace: the rows are normed and laid out for the product, then every
// panel of output columns streams its rows of the weight (once, or for each few hundred rows: cpu/project_lanes.h),
// then (post norm only) the fp32 rows are normed into out.
template <cpu::Isa isa>
int64_t norm_concat_linear_workspace(const NormConcatLinear& op);
template <cpu::Isa isa>
int64_t norm_concat_linear_pack_units(const NormConcatLinear& op);
template <cpu::Isa isa>
void norm_concat_linear_pack(const NormConcatLinear& op, int64_t unit_begin, int64_t unit_end);
template <cpu::Isa isa>
int64_t norm_concat_linear_panels(const NormConcatLinear& op);
template <cpu::Isa isa>
void norm_concat_linear_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end);
template <cpu::Isa isa>
void norm_concat_linear_post_norm(const NormConcatLinear& op, int64_t row_begin, int64_t row_end);

namespace cuda {
// Max rows that the fused kernel multiplies in one pass over the weight; more rows take several passes.
constexpr int64_t kMaxDecodeRows = 16;
// The same for the split kernels, which are two launches: of a dense weight without residuals, on sm_90 and sm_100.
// Else they take 64, or 32 of codes with scales of blocks and of codes that are multiplied by scales, with residuals.
constexpr int64_t kMaxSplitRows = 128;
// Whether the kernel of warpgroups, with 17 to 48 rows, takes an H200 less than norm_concat and a library's product: of
// a dense weight, with chunks of one width, at most kMaxChunks.
bool wgmma_pays(int64_t num_chunks, int64_t width, int64_t num_columns, int32_t multiprocessors);
}  // namespace cuda

// The fused kernel, on sm_90 and later, takes chunks of a 16-bit type and no post norm. The weight is of that type, or
// of codes that norm_concat_linear_reads_codes, with one scale per row or blocks of a multiple of 64 rows and of
// 64 columns, where every chunk begins at a multiple of 64 columns; or of 4-bit codes; or of e4m3 with scales in e8m0
// of 32 columns of a row, without residuals and where the conditions of 4-bit codes hold. Operands must be
// norm_concat_linear_is_aligned.
int norm_concat_linear_fused_cuda(const NormConcatLinear& op, const cuda::Device& device);

// The kernel of warpgroups, where the library has code for sm_90a and the GPU runs it, takes any number of rows in
// rounds of 64, chunks of a 16-bit type and no post norm. The weight is of that type or, with chunks of bf16, of codes
// that norm_concat_linear_reads_codes, with one scale per row or blocks of a multiple of 128 columns, where every chunk
// begins at a multiple of 128 columns. Operands must be norm_concat_linear_is_aligned.
int norm_concat_linear_wgmma_cuda(const NormConcatLinear& op, const cuda::Device& device);

// How many ranges of columns the split kernels cut each chunk into, and their workspace in fp32 values.
struct SplitRanges {
  int of_chunk[cuda::kMaxChunks];
  int count;
  int64_t workspace;
};

// The split kernels take the same, all codes that norm_concat_linear_reads_codes, and a post norm, on every GPU.
SplitRanges norm_concat_linear_split_ranges(const NormConcatLinear& op, const cuda::Device& device);
int norm_concat_linear_split_cuda(const NormConcatLinear& op, const SplitRanges& ranges, const cuda::Device& device);

// Bias and post norm of the fp32 rows in `workspace`, which a library has multiplied. Any dtype of the op.
inline int64_t epilogue_row_stride(const NormConcatLinear& op) { return (op.num_columns + 3) / 4 * 4; }
int norm_concat_linear_epilogue_cuda(const NormConcatLinear& op, const cuda::Device& device);

// Whether every width is a multiple of 8 (with codes 16, with those of four bits 32), and the addresses and row strides
// of chunks, residuals, gains and weight are multiples of 16 bytes.
bool norm_concat_linear_is_aligned(const NormConcatLinear& op);

// Whether the kernels take these codes and blocks: codes of 8 bits, with scales in fp32 or e8m0. Codes of e4m3 may have
// several scales per row, in blocks of 32, 64, 128, ... columns, if the width of every chunk is a multiple of a step of
// the product. Codes of e2m1 with rows of bf16, with scales of 16 columns in e4m3 or of 32 in e8m0, if every chunk has
// the columns of a multiple of four scales, and address and row stride of the scales are multiples of 4.
bool norm_concat_linear_reads_codes(const NormConcatLinear& op);

}  // namespace eagle_kernels
