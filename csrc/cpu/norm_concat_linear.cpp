// out = norm_concat(...) @ weight^T + bias, and optionally an RMSNorm of that.
//
// With few rows the time is that of reading the weight once (100 MB at K = 3, H = D = 4096 in bf16), which the eager
// path does at half of the memory's speed. Here the weight streams row-major, as in the checkpoint, and is never
// copied; the rows are normed and rounded once into a packed operand that stays in the cache.
//
// Six projections: project_codes.h for a weight of codes and few rows of bf16, project_amx.h and project_amx_codes.h
// for bf16 on the tile unit, project_quantized.h for other codes with AVX-512, project_floats.h for codes and many rows
// of bf16 without it, project_dot.h for everything else. Each sums a column of the output in an order that depends only
// on K*H and the weight's scales (on the tile unit, with e8m0 scales of 32 or 64 columns, also on which numbers are
// zero), so the bits of a row do not depend on N, on the other rows or on the split over threads.
#include "../norm_concat_linear.h"

#include "norm_row.h"
#include "project_codes.h"
#include "project_dot.h"
#include "project_floats.h"
#include "project_quantized.h"
#if defined(__AMX_BF16__)
#include "project_amx_codes.h"
#endif

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

#if defined(__AMX_BF16__)
bool on_tiles(const NormConcatLinear& op) {
  if (op.source.dtype != DType::kBFloat16) return false;
  if (op.weight_type == WeightType::kChunks || op.weight_type == WeightType::kBFloat16In12) return true;
  return op.codes_kernel != CodesKernel::kFewRows && amx_reads_codes(op);
}
#endif

#if defined(__AVX512BF16__)
bool multiplies_few_rows(const NormConcatLinear& op) {
  return op.codes_kernel == CodesKernel::kFewRows && op.source.dtype == DType::kBFloat16;
}
#endif

#if defined(__AVX512F__)
// Whether the weight is codes. bf16 in 12 bits does not count: its rows are widened to bf16 (RowsIn12Bits).
bool is_in_strips(const NormConcatLinear& op) {
  return op.weight_type != WeightType::kChunks && op.weight_type != WeightType::kBFloat16In12;
}
#endif

template <class T>
void project_rows(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (op.weight_type == WeightType::kBFloat16In12) {
      return dot_project<T, RowsIn12Bits<T>>(op, panel_begin, panel_end);
    }
  }
#if !defined(__AVX512F__)
  if (op.weight_type != WeightType::kChunks) {
    return with_code(op.weight_type,
                     [&](auto code) { project_codes_by_floats<T, decltype(code)>(op, panel_begin, panel_end); });
  }
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (op.num_rows > kMostRowsInPlace) return dot_project<T, RowsAsFloats<T>>(op, panel_begin, panel_end);
  }
#endif
  dot_project<T, RowsInPlace<T>>(op, panel_begin, panel_end);
}

template <class T>
void post_norm_row(const NormConcatLinear& op, int64_t i) {
  const float* result = fp32_rows(op) + i * op.num_columns;
  T* out = static_cast<T*>(op.out) + i * op.out_row_stride;
  const auto value = [&](int64_t d, auto span) { return load(result + d, span); };
  const float rstd = rsqrt_mean(sum_of_squares(op.num_columns, value), op.num_columns, op.post_norm_eps);
  for_each_vector(op.num_columns, [&](int64_t d, auto span) {
    const Float gain = op.source.norm_offset + load_vector<T>(op.post_norm_gain, d, span);
    store(out + d, value(d, span) * rstd * gain, span);
  });
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA

namespace eagle_kernels {

using namespace cpu::EAGLE_KERNELS_ISA;

template <>
int64_t norm_concat_linear_workspace<kIsa>(const NormConcatLinear& op) {
#if defined(__AMX_BF16__)
  if (on_tiles(op)) return amx_workspace(op);
#endif
#if defined(__AVX512BF16__)
  if (multiplies_few_rows(op)) return codes_workspace(op);
#endif
  int64_t bytes = 0;
  with_dtype(op.source.dtype, [&](auto type) {
    using T = decltype(type);
    bytes = dot_workspace<T>(op);
#if defined(__AVX512F__)
    if (is_in_strips(op)) bytes = strips_workspace<T>(op);
#endif
  });
  return bytes + totals_workspace(op);
}

template <>
int64_t norm_concat_linear_row_groups<kIsa>(const NormConcatLinear& op) {
#if defined(__AMX_BF16__)
  if (on_tiles(op)) return num_groups(op);
#endif
#if defined(__AVX512BF16__)
  if (multiplies_few_rows(op)) return op.num_rows;
#endif
#if defined(__AVX512F__)
  if (is_in_strips(op)) return strips_groups(op);
#endif
  return op.num_rows;
}

template <>
void norm_concat_linear_pack<kIsa>(const NormConcatLinear& op, int64_t group_begin, int64_t group_end) {
#if defined(__AMX_BF16__)
  if (on_tiles(op)) {
    for (int64_t group = group_begin; group < group_end; ++group) amx_pack_group(op, group);
    return;
  }
#endif
#if defined(__AVX512BF16__)
  if (multiplies_few_rows(op)) return codes_pack(op, group_begin, group_end);
#endif
  with_dtype(op.source.dtype, [&](auto type) {
    using T = decltype(type);
#if defined(__AVX512F__)
    if (is_in_strips(op)) return strips_pack<T>(op, group_begin, group_end);
#endif
    dot_pack<T>(op, group_begin, group_end, packed_width<T>(op));
  });
}

template <>
int64_t norm_concat_linear_panels<kIsa>(const NormConcatLinear& op) { return num_panels(op); }

template <>
void norm_concat_linear_project<kIsa>(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
#if defined(__AMX_BF16__)
  if (on_tiles(op)) {
    if (op.weight_type == WeightType::kChunks) return amx_project(op, panel_begin, panel_end);
    if (op.weight_type == WeightType::kBFloat16In12) return amx_project_bf16_12bit(op, panel_begin, panel_end);
    return with_code(op.weight_type, [&](auto code) { amx_project_codes<decltype(code)>(op, panel_begin, panel_end); });
  }
#endif
#if defined(__AVX512BF16__)
  if (multiplies_few_rows(op)) return codes_project(op, panel_begin, panel_end);
#endif
  with_dtype(op.source.dtype, [&](auto type) {
    using T = decltype(type);
#if defined(__AVX512F__)
    if (is_in_strips(op)) {
      return with_code(op.weight_type,
                       [&](auto code) { quantized_project<T, decltype(code)>(op, panel_begin, panel_end); });
    }
#endif
    project_rows<T>(op, panel_begin, panel_end);
  });
}

template <>
void norm_concat_linear_post_norm<kIsa>(const NormConcatLinear& op, int64_t row_begin, int64_t row_end) {
  with_dtype(op.source.dtype, [&](auto type) {
    for (int64_t i = row_begin; i < row_end; ++i) post_norm_row<decltype(type)>(op, i);
  });
}

}  // namespace eagle_kernels
