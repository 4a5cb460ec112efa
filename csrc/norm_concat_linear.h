// out = post_norm(round(concat) @ weight^T + bias), the concat as in concat.h.
#pragma once

#include "concat.h"
#include "cpu/isa.h"
#include "cuda/device.h"

namespace eagle_kernels {

// A weight in the chunks' dtype, or as codes, whose row stride is in bytes. A byte has two of kFloat4E2M1, the even
// column's in the low four bits. kBFloat16In12 is bf16 exactly (cpu/widen_bf16_12bit.h), on CPU, by rows of bf16.
enum class WeightType : int32_t { kChunks, kFloat8E4M3, kInt8, kFloat4E2M1, kBFloat16In12 };

enum class ScaleType : int32_t { kFloat32, kFloat8E8M0, kFloat8E4M3 };

// weight[d][c] = codes[d][c] * scales[d / block_rows][c / block_columns] * global. A block is as wide as the weight, or
// a multiple of 128 columns, or a power of two from 16 to 64. Of kBFloat16In12, what a row has beside its codes.
struct Scales {
  const void* data;
  ScaleType type;
  int64_t row_stride;
  int64_t row_size;
  int64_t block_rows;
  int64_t block_columns;
  const float* global;  // or null: 1
};

// Which kernel multiplies codes: on CUDA the split ones, the fused one, the one of warpgroups; on a CPU the first or,
// where it multiplies bf16, by rows of it, the one whose sums are along K*H.
enum class CodesKernel : int64_t { kAnyRows, kFewRows, kWgmma };

struct NormConcatLinear {
  Concat source;
  int64_t num_rows;     // N
  int64_t num_columns;  // D
  const void* weight;   // [D, source.width]
  int64_t weight_row_stride;
  WeightType weight_type;
  Scales scales;          // of codes
  CodesKernel codes_kernel;
  Vector bias;            // [D] or absent
  Vector post_norm_gain;  // [D] or absent: no post norm; scaled by norm_offset + gain like the chunks
  float post_norm_eps;    // a row of zeros at eps 0 stays zero here too
  void* out;              // [N, D]
  int64_t out_row_stride;
  // On CPU norm_concat_linear_workspace bytes, 64-byte aligned; on CUDA the fp32 values of the split kernels, or sums.
  void* workspace;
  // On CUDA the weight may be read while the previous kernel runs, which then must not write it.
  bool early_weight;
};

// On CPU up to three parallel passes over one workspace: the rows are normed and laid out for the product, then every
// panel of output columns streams its rows of the weight once, then (post norm only) the fp32 rows are normed into out.
template <cpu::Isa isa>
int64_t norm_concat_linear_workspace(const NormConcatLinear& op);
template <cpu::Isa isa>
int64_t norm_concat_linear_row_groups(const NormConcatLinear& op);
template <cpu::Isa isa>
void norm_concat_linear_pack(const NormConcatLinear& op, int64_t group_begin, int64_t group_end);
template <cpu::Isa isa>
int64_t norm_concat_linear_panels(const NormConcatLinear& op);
template <cpu::Isa isa>
void norm_concat_linear_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end);
template <cpu::Isa isa>
void norm_concat_linear_post_norm(const NormConcatLinear& op, int64_t row_begin, int64_t row_end);

namespace cuda {
// Rows that the fused kernel multiplies in one pass over the weight; more take it several times.
constexpr int64_t kMaxDecodeRows = 16;
// The same of the split kernels, which are two launches.
constexpr int64_t kMaxSplitRows = 128;
}  // namespace cuda

// The fused kernel takes rows of 16-bit types, a weight of them or codes that norm_concat_linear_reads_codes, whose
// scales are one for a row or for blocks of a multiple of 64 rows and 64 columns or more, as whose multiples the chunks
// begin, no post norm, and operands that norm_concat_linear_is_aligned, on sm_90 and later.
int norm_concat_linear_cuda(const NormConcatLinear& op, const cuda::Device& device);

// The kernel of warpgroups takes any number of rows in rounds of 64, a weight of the
// chunks' 16-bit type or, of bf16, codes that norm_concat_linear_reads_codes, whose scales are one for a row or for
// blocks of 128 columns or more, as whose multiples the chunks begin, no post norm, and operands that
// norm_concat_linear_is_aligned, where the library has code for sm_90a and the GPU runs it.
int norm_concat_linear_wgmma_cuda(const NormConcatLinear& op, const cuda::Device& device);

// How many ranges of columns the split kernels cut each chunk into, and the fp32 values of workspace that this takes.
struct SplitRanges {
  int of_chunk[cuda::kMaxChunks];
  int count;
  int64_t workspace;
};

// The split kernels take the same and a post norm, on every GPU.
SplitRanges norm_concat_linear_split_ranges(const NormConcatLinear& op, const cuda::Device& device);
int norm_concat_linear_split_cuda(const NormConcatLinear& op, const SplitRanges& ranges, const cuda::Device& device);

// bias and post norm of the rows of fp32 in `workspace` that a library has multiplied, of any dtype of the op's.
inline int64_t epilogue_row_stride(const NormConcatLinear& op) { return (op.num_columns + 3) / 4 * 4; }
int norm_concat_linear_epilogue_cuda(const NormConcatLinear& op, const cuda::Device& device);

// Whether every width is a multiple of 8 (of codes 16), and the addresses and row strides of chunks, residuals, gains
// and weight are multiples of 16 bytes.
bool norm_concat_linear_is_aligned(const NormConcatLinear& op);

// Whether the kernels take codes in blocks like these: of 8 bits, with scales in fp32 or e8m0; those of e4m3 may
// have several along a row, in blocks of 32, 64, 128, ... columns that begin with a step of the product in every chunk.
bool norm_concat_linear_reads_codes(const NormConcatLinear& op);

}  // namespace eagle_kernels
