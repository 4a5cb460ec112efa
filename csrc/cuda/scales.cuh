// What the weight of norm_concat_linear is, and the scales of its codes.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "../norm_concat_linear.h"
#include "device.cuh"
#include "ranges.cuh"

namespace eagle_kernels::cuda {

// What the weight is. A scale per row of codes multiplies the finished sums; scales of blocks, the sums of each block.
// In the last three a scale of 16 or 32 columns of a row multiplies codes; x is then bf16.
enum class Form { kDense, kE4M3, kE4M3Blocks, kInt8, kNvfp4, kMxfp4, kMxfp8 };
constexpr bool has_scaled_codes(Form form) { return form >= Form::kNvfp4; }
constexpr bool has_four_bits(Form form) { return form == Form::kNvfp4 || form == Form::kMxfp4; }

// Whether several scales lie along a row of the weight.
inline bool has_blocks(const NormConcatLinear& op) {
  return op.weight_type != WeightType::kChunks && op.scales.block_columns < op.source.width;
}

// Whether every tile of `rows` by `columns` of the weight has a single scale.
inline bool has_scale_of_tiles(const NormConcatLinear& op, int rows, int columns) {
  if (!has_blocks(op)) return true;
  const auto begins_one = [&](const Chunk& chunk) { return chunk.column % columns == 0; };
  return op.scales.block_rows % rows == 0 && op.scales.block_columns % columns == 0 &&
         std::all_of(op.source.chunks, op.source.chunks + op.source.num_chunks, begins_one);
}

// Whether the scales can multiply the codes of a row: four scales are copied together.
inline bool has_scales_of_codes(const NormConcatLinear& op) {
  const Scales& scales = op.scales;
  const bool nvfp4 = op.weight_type == WeightType::kFloat4E2M1 && scales.type == ScaleType::kFloat8E4M3 &&
                     scales.block_columns == 16;
  const bool mx = (op.weight_type == WeightType::kFloat4E2M1 || op.weight_type == WeightType::kFloat8E4M3) &&
                  scales.type == ScaleType::kFloat8E8M0 && scales.block_columns == 32;
  const auto in_fours = [&](const Chunk& chunk) { return chunk.width % (4 * scales.block_columns) == 0; };
  const Chunk* chunks = op.source.chunks;
  // The stride of a single row is arbitrary and never used.
  const uintptr_t stride = op.num_columns > 1 ? static_cast<uintptr_t>(scales.row_stride) : 0;
  const uintptr_t bytes = reinterpret_cast<uintptr_t>(scales.data) | stride;
  return (nvfp4 || mx) && scales.block_rows == 1 && op.source.dtype == DType::kBFloat16 && bytes % 4 == 0 &&
         std::all_of(chunks, chunks + op.source.num_chunks, in_fours);
}

// For Arguments::scale_shift; with one scale per row all columns share it.
inline int scale_shift_of(const NormConcatLinear& op) {
  return has_blocks(op) ? std::countr_zero(static_cast<uint64_t>(op.scales.block_columns)) : 31;
}

// Calls f(std::integral_constant<Form, ...>{}) with the form of the weight. It is never kMxfp8: the scales of those
// codes can multiply sums as well.
template <class F>
int with_form(const NormConcatLinear& op, const F& f) {
  using std::integral_constant;
  if (op.weight_type == WeightType::kFloat4E2M1) {
    return op.scales.block_columns == 16 ? f(integral_constant<Form, Form::kNvfp4>{})
                                         : f(integral_constant<Form, Form::kMxfp4>{});
  }
  if (op.weight_type == WeightType::kChunks) return f(integral_constant<Form, Form::kDense>{});
  if (op.weight_type == WeightType::kInt8) return f(integral_constant<Form, Form::kInt8>{});
  return has_blocks(op) ? f(integral_constant<Form, Form::kE4M3Blocks>{}) : f(integral_constant<Form, Form::kE4M3>{});
}

// The arguments of a kernel for this call, without ranges.
inline Arguments arguments_of(const NormConcatLinear& op) {
  Arguments arguments{};
  arguments.op = op;
  std::copy_n(op.source.chunks, op.source.num_chunks, arguments.chunks);
  arguments.scale_shift = scale_shift_of(op);
  return arguments;
}

// The scale at an offset from the first, fp32 or e8m0; the overload below multiplies it by the global one.
__device__ __forceinline__ float load_scale(ScaleType type, const void* scales, int64_t offset) {
  if (type == ScaleType::kFloat32) return load(static_cast<const float*>(scales) + offset);
  const uint32_t code = load(static_cast<const uint8_t*>(scales) + offset);
  // 2^-127 is subnormal, 255 is NaN.
  return bits_to_float(code << 23 | (code == 0 || code == 255 ? 0x00400000u : 0u));
}
__device__ __forceinline__ float load_scale(const Scales& scales, int64_t offset) {
  const float scale = load_scale(scales.type, scales.data, offset);
  return scales.global == nullptr ? scale : scale * load(scales.global);
}

// The scales of the kNum rows of the weight whose sums a lane has; rows past the last take the last one's.
template <int kNum>
struct RowScales {
  int64_t offset[kNum];  // of the row's scales, from the first
  float value[kNum];

  // output_of(i): the column of the output that is row i, counted from the block's first.
  template <class F>
  __device__ __forceinline__ void find(const NormConcatLinear& op, int64_t first_output, F output_of) {
    const int outputs = static_cast<int>(op.num_columns - first_output);
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      const int output = output_of(i);
      const int64_t of = output < outputs ? first_output + output : op.num_columns - 1;
      offset[i] = of / op.scales.block_rows * op.scales.row_stride;
    }
  }
  // Those of a column of the concat.
  __device__ __forceinline__ void load(const Arguments& arguments, int column) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      value[i] = load_scale(arguments.op.scales, offset[i] + (column >> arguments.scale_shift));
    }
  }
};

}  // namespace eagle_kernels::cuda
