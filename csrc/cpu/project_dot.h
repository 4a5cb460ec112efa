// The projection as dot products along K*H, for every instruction set and element type.
//
// Packed rows: [N, packed_width], row-major, zero-padded to whole vectors, in the type they are multiplied in: bf16
// where the processor multiplies bf16 (vdpbf16ps), otherwise fp32, already rounded to the element type.
#pragma once

#include "norm_row.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kPanelColumns = 32;

inline int64_t num_panels(const NormConcatLinear& op) { return (op.num_columns + kPanelColumns - 1) / kPanelColumns; }
inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The fp32 result [N, D] opens the workspace.
inline float* fp32_rows(const NormConcatLinear& op) { return static_cast<float*>(op.workspace); }
inline int64_t fp32_rows_bytes(const NormConcatLinear& op) {
  return round_up(op.num_rows * op.num_columns * sizeof(float), kCacheLine);
}

// One step of a dot product: kStep elements of a weight row times as many of a packed row, into the lanes of a sum.
template <class T>
struct DotStep {
  using Packed = float;
  static constexpr int64_t kStep = kLanes;
  template <class Span>
  static Float load_weight(const T* weight, Span span) {
    return load(weight, span);
  }
  static Float load_packed(const float* packed) { return load(packed, Whole{}); }
  static Float multiply_add(Float sum, Float weight, Float packed) { return sum + weight * packed; }
};

#if defined(__AVX512BF16__)
template <>
struct DotStep<BFloat16> {
  using Packed = BFloat16;
  static constexpr int64_t kStep = 2 * kLanes;
  static __m512i load_weight(const BFloat16* weight, Whole) { return _mm512_loadu_si512(weight); }
  static __m512i load_weight(const BFloat16* weight, Part part) {
    return _mm512_maskz_loadu_epi16((1u << part.count) - 1, weight);
  }
  static __m512i load_packed(const BFloat16* packed) { return _mm512_load_si512(packed); }
  static Float multiply_add(Float sum, __m512i weight, __m512i packed) {
    return (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)packed);
  }
};
#endif

// Weight rows and packed rows that one register tile holds: 24 of 32 vector registers are sums with AVX-512 (the best
// of six shapes measured, reference/performance.md section 5), 8 of 16 elsewhere.
constexpr int kTileColumns = 4;
constexpr int kTileRows = kLanes == 16 ? 6 : 2;

// K*H is summed in blocks of 1024: lanes within a block, then block after block. A packed tile of a block (24 KB in
// fp32) stays in L1 while kBlockColumns weight rows pass, and those stay in L2 for the next packed tile.
constexpr int64_t kDotBlockK = 1024;
constexpr int64_t kDotBlockColumns = 64;

// A panel of weight rows and where the next one begins.
template <class T>
struct WeightRows {
  const T* data;
  int64_t row_stride;
  const T* ahead;
};

// result[row][column] = (first ? 0 : result) + weight[column] . packed[row], over `width` elements.
template <class T, int kColumns, int kRows>
void dot_tile(WeightRows<T> weight, const typename DotStep<T>::Packed* packed, int64_t packed_width, int64_t width,
              float* result, int64_t result_stride, bool first) {
  using Step = DotStep<T>;
  Float sums[kColumns][kRows] = {};
  const auto step = [&](int64_t k, auto span) {
    decltype(Step::load_weight(weight.data, span)) w[kColumns];
    for (int column = 0; column < kColumns; ++column) {
      w[column] = Step::load_weight(weight.data + column * weight.row_stride + k, span);
    }
    for (int row = 0; row < kRows; ++row) {
      const auto x = Step::load_packed(packed + row * packed_width + k);
      for (int column = 0; column < kColumns; ++column) {
        sums[column][row] = Step::multiply_add(sums[column][row], w[column], x);
      }
    }
  };
  int64_t k = 0;
  for (; k + Step::kStep <= width; k += Step::kStep) {
    if (weight.ahead != nullptr) {
      for (int column = 0; column < kColumns; ++column) {
        __builtin_prefetch(weight.ahead + column * weight.row_stride + k, 0, 2);
      }
    }
    step(k, Whole{});
  }
  if (k < width) step(k, Part{width - k});

  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      float* place = result + row * result_stride + column;
      const float sum = sum_lanes(sums[column][row]);
      *place = first ? sum : *place + sum;
    }
  }
}

template <class T, int kColumns, int kRows = kTileRows>
void dot_rows(int64_t rows, WeightRows<T> weight, const typename DotStep<T>::Packed* packed, int64_t packed_width,
              int64_t width, float* result, int64_t result_stride, bool first) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return dot_rows<T, kColumns, kRows - 1>(rows, weight, packed, packed_width, width, result, result_stride, first);
    }
  }
  dot_tile<T, kColumns, kRows>(weight, packed, packed_width, width, result, result_stride, first);
}

template <class T>
int64_t packed_width(const NormConcatLinear& op) {
  return round_up(op.source.width, kCacheLine / sizeof(typename DotStep<T>::Packed));
}

template <class T>
typename DotStep<T>::Packed* packed_rows(const NormConcatLinear& op) {
  void* place = static_cast<char*>(op.workspace) + fp32_rows_bytes(op);
  return static_cast<typename DotStep<T>::Packed*>(place);
}

template <class T>
int64_t dot_workspace(const NormConcatLinear& op) {
  return fp32_rows_bytes(op) + op.num_rows * packed_width<T>(op) * sizeof(typename DotStep<T>::Packed);
}

template <class T>
void dot_pack(const NormConcatLinear& op, int64_t row_begin, int64_t row_end) {
  using Packed = typename DotStep<T>::Packed;
  const NormConcat& source = op.source;
  for (int64_t i = row_begin; i < row_end; ++i) {
    Packed* packed = packed_rows<T>(op) + i * packed_width<T>(op);
    const float of_concat = source.norm == Norm::kConcat ? concat_rstd<T>(source, i) : 0.0f;
    for (int64_t k = 0; k < source.num_chunks; ++k) {
      const Chunk& chunk = source.chunks[k];
      const int64_t row = source_row(chunk, i);
      const float rstd = chunk_rstd<T>(source, chunk, row, of_concat);
      Packed* columns = packed + chunk.column;
      norm_columns<T>(chunk, row, rstd, source.norm_offset, 0, chunk.width, [columns](int64_t h, Float value, auto span) {
        store(columns + h, round_to(value, T{}), span);
      });
    }
    __builtin_memset(packed + source.width, 0, (packed_width<T>(op) - source.width) * sizeof(Packed));
  }
}

// Adds the bias to columns [begin, end) of the fp32 result; rounds them into out, unless a post norm comes next.
template <class T>
void finish_columns(const NormConcatLinear& op, int64_t begin, int64_t end) {
  const bool has_bias = op.bias.data != nullptr;
  const bool has_post_norm = op.post_norm_gain.data != nullptr;
  if (has_post_norm && !has_bias) return;
  for (int64_t i = 0; i < op.num_rows; ++i) {
    float* result = fp32_rows(op) + i * op.num_columns + begin;
    T* out = static_cast<T*>(op.out) + i * op.out_row_stride + begin;
    for_each_vector(end - begin, [&](int64_t d, auto span) {
      Float value = load(result + d, span);
      if (has_bias) value += load_vector<T>(op.bias, begin + d, span);
      if (has_post_norm) {
        store(result + d, value, span);
      } else {
        store(out + d, value, span);
      }
    });
  }
}

template <class T>
void dot_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const T* weight = static_cast<const T*>(op.weight);
  const int64_t stride = op.weight_row_stride;
  const int64_t columns_end = panel_end * kPanelColumns < op.num_columns ? panel_end * kPanelColumns : op.num_columns;
  for (int64_t begin = panel_begin * kPanelColumns; begin < columns_end; begin += kDotBlockColumns) {
    const int64_t end = begin + kDotBlockColumns < columns_end ? begin + kDotBlockColumns : columns_end;
    for (int64_t k = 0; k < op.source.width; k += kDotBlockK) {
      const int64_t width = k + kDotBlockK < op.source.width ? kDotBlockK : op.source.width - k;
      const bool last_k = k + width == op.source.width;
      for (int64_t i = 0; i < op.num_rows; i += kTileRows) {
        const auto* packed = packed_rows<T>(op) + i * packed_width<T>(op) + k;
        float* result = fp32_rows(op) + i * op.num_columns;
        int64_t d = begin;
        for (; d + kTileColumns <= end; d += kTileColumns) {
          const bool last_d = d + 2 * kTileColumns > end;
          const T* ahead = i > 0                ? nullptr
                           : !last_d            ? weight + (d + kTileColumns) * stride + k
                           : !last_k            ? weight + begin * stride + k + width
                           : end < columns_end  ? weight + end * stride
                                                : nullptr;
          dot_rows<T, kTileColumns>(op.num_rows - i, {weight + d * stride + k, stride, ahead}, packed,
                                    packed_width<T>(op), width, result + d, op.num_columns, k == 0);
        }
        for (; d < end; ++d) {
          dot_rows<T, 1>(op.num_rows - i, {weight + d * stride + k, stride, nullptr}, packed, packed_width<T>(op),
                         width, result + d, op.num_columns, k == 0);
        }
      }
    }
    finish_columns<T>(op, begin, end);
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
