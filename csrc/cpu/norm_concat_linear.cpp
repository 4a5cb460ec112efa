// out = norm_concat(...) @ weight^T + bias, and optionally an RMSNorm of that.
//
// With few rows the time is that of reading the weight once (100 MB at K = 3, H = D = 4096 in bf16), which the eager
// path does at half of the memory's speed. Here the weight streams row-major, as in the checkpoint, and is never
// copied; the rows are normed and rounded once into a packed operand that stays in the cache.
//
// Seven projections: project_codes.h for a weight of codes and few rows of bf16, project_amx.h and project_amx_codes.h
// for bf16 on the tile unit, project_strips.h for few rows by other codes with AVX-512, project_lanes.h for more rows
// by them and for many rows by any other weight, project_floats.h for codes and many rows of bf16 without AVX-512,
// project_dot.h for everything else. Each sums a column of the output in an order that depends only on K*H and the
// weight's scales (on the tile unit, with e8m0 scales of 32 or 64 columns, also on which numbers are zero);
// project_strips.h and project_lanes.h have the same one. So the bits of a row do not depend on N, on the other rows or
// on the split over threads.
#include "../norm_concat_linear.h"

#include "norm_row.h"
#include "project_codes.h"
#include "project_dot.h"
#include "project_floats.h"
#include "project_lanes.h"
#include "project_strips.h"
#if defined(__AMX_BF16__)
#include "project_amx_codes.h"
#endif

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// Each class is one way to do the passes over the workspace (norm_concat_linear.h); with_projection chooses.

// Sums along K*H: what no class below takes.
template <class T>
struct Dots {
  static int64_t workspace(const NormConcatLinear& op) { return dot_workspace<T>(op) + totals_workspace(op); }
  static int64_t pack_units(const NormConcatLinear& op) { return op.num_rows; }
  static void pack(const NormConcatLinear& op, int64_t row_begin, int64_t row_end) {
    dot_pack<T>(op, row_begin, row_end, packed_width<T>(op));
  }
  static void project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
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
      if (op.num_rows > kMaxRowsInPlace) return dot_project<T, RowsAsFloats<T>>(op, panel_begin, panel_end);
    }
#endif
    dot_project<T, RowsInPlace<T>>(op, panel_begin, panel_end);
  }
};

#if defined(__AVX512F__)
// Few rows by a weight of codes.
template <class T>
struct Strips {
  static bool takes(const NormConcatLinear& op) {
    return has_scales(op.weight_type) && op.num_rows <= kStripRows;
  }
  static int64_t workspace(const NormConcatLinear& op) { return strips_workspace<T>(op) + totals_workspace(op); }
  static int64_t pack_units(const NormConcatLinear& op) { return op.source.num_chunks; }
  static void pack(const NormConcatLinear& op, int64_t unit_begin, int64_t unit_end) {
    strips_pack<T>(op, unit_begin, unit_end);
  }
  static void project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
    with_code(op.weight_type, [&](auto code) { strips_project<T, decltype(code)>(op, panel_begin, panel_end); });
  }
};

// More rows by a weight of codes, or any number by another one.
template <class T>
struct Lanes {
  static bool takes(const NormConcatLinear& op) {
    return has_scales(op.weight_type) || op.kernel != ProductKernel::kFewRows;
  }
  static int64_t workspace(const NormConcatLinear& op) { return lanes_workspace<T>(op); }
  static int64_t pack_units(const NormConcatLinear& op) { return num_groups(op) * pack_parts(op); }
  static void pack(const NormConcatLinear& op, int64_t unit_begin, int64_t unit_end) {
    pack_groups<T, LanePacker<T>>(op, unit_begin, unit_end);
  }
  static void project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
    if (op.weight_type == WeightType::kChunks) return lanes_project<T, T>(op, panel_begin, panel_end);
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (op.weight_type == WeightType::kBFloat16In12) {
        return lanes_project<T, BFloat16In12>(op, panel_begin, panel_end);
      }
    }
    with_code(op.weight_type, [&](auto code) { lanes_project<T, decltype(code)>(op, panel_begin, panel_end); });
  }
};
#endif

#if defined(__AVX512BF16__)
struct FewRowsOfCodes {
  static bool takes(const NormConcatLinear& op) {
    const bool is_few = op.kernel == ProductKernel::kFewRows && op.source.dtype == DType::kBFloat16;
    // A unit of 8-bit codes has room for 16 scales (ScaleReader): blocks of 16 columns are of 4-bit codes alone.
    const bool fits = op.weight_type == WeightType::kFloat4E2M1 || op.scales.block_columns > 16;
    return is_few && has_scales(op.weight_type) && fits;
  }
  static int64_t workspace(const NormConcatLinear& op) { return codes_workspace(op); }
  static int64_t pack_units(const NormConcatLinear& op) { return op.num_rows; }
  static void pack(const NormConcatLinear& op, int64_t row_begin, int64_t row_end) {
    codes_pack(op, row_begin, row_end);
  }
  static void project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
    codes_project(op, panel_begin, panel_end);
  }
};
#endif

#if defined(__AMX_BF16__)
struct Tiles {
  static bool takes(const NormConcatLinear& op) {
    if (op.source.dtype != DType::kBFloat16) return false;
    return !has_scales(op.weight_type) || (op.kernel != ProductKernel::kFewRows && amx_reads_codes(op));
  }
  static int64_t workspace(const NormConcatLinear& op) { return amx_workspace(op); }
  static int64_t pack_units(const NormConcatLinear& op) { return num_groups(op) * pack_parts(op); }
  static void pack(const NormConcatLinear& op, int64_t unit_begin, int64_t unit_end) {
    pack_groups<BFloat16, TilePacker>(op, unit_begin, unit_end);
  }
  static void project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
    if (op.weight_type == WeightType::kChunks) return amx_project(op, panel_begin, panel_end);
    if (op.weight_type == WeightType::kBFloat16In12) return amx_project_bf16_12bit(op, panel_begin, panel_end);
    with_code(op.weight_type, [&](auto code) { amx_project_codes<decltype(code)>(op, panel_begin, panel_end); });
  }
};
#endif

// f(projection) for the one that multiplies this weight.
template <class F>
void with_projection(const NormConcatLinear& op, F f) {
#if defined(__AMX_BF16__)
  if (Tiles::takes(op)) return f(Tiles{});
#endif
#if defined(__AVX512BF16__)
  if (FewRowsOfCodes::takes(op)) return f(FewRowsOfCodes{});
#endif
  with_dtype(op.source.dtype, [&](auto type) {
    using T = decltype(type);
#if defined(__AVX512F__)
    if (Strips<T>::takes(op)) return f(Strips<T>{});
    if (Lanes<T>::takes(op)) return f(Lanes<T>{});
#endif
    f(Dots<T>{});
  });
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
  int64_t bytes = 0;
  with_projection(op, [&](auto projection) { bytes = projection.workspace(op); });
  return bytes;
}

template <>
int64_t norm_concat_linear_pack_units<kIsa>(const NormConcatLinear& op) {
  int64_t units = 0;
  with_projection(op, [&](auto projection) { units = projection.pack_units(op); });
  return units;
}

template <>
void norm_concat_linear_pack<kIsa>(const NormConcatLinear& op, int64_t unit_begin, int64_t unit_end) {
  with_projection(op, [&](auto projection) { projection.pack(op, unit_begin, unit_end); });
}

template <>
int64_t norm_concat_linear_panels<kIsa>(const NormConcatLinear& op) { return num_panels(op); }

template <>
void norm_concat_linear_project<kIsa>(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  with_projection(op, [&](auto projection) { projection.project(op, panel_begin, panel_end); });
}

template <>
void norm_concat_linear_post_norm<kIsa>(const NormConcatLinear& op, int64_t row_begin, int64_t row_end) {
  with_dtype(op.source.dtype, [&](auto type) {
    for (int64_t i = row_begin; i < row_end; ++i) post_norm_row<decltype(type)>(op, i);
  });
}

}  // namespace eagle_kernels
