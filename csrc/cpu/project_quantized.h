// The projection of a quantized weight, for every instruction set and element type: out^T = weight . rows^T.
//
// The lanes of a sum are columns of the output. A panel of the weight is widened 128 columns at a time to a strip of
// bf16 in L1, transposed, which all rows multiply: [pair of columns][kPanelColumns] words, the even column in the low
// half. A sum begins anew with each strip and with each block of scales, and enters the fp32 total times its scale: the
// range and the NaN of a scale are those of fp32, and one multiplication is for as many products as its block has columns.
#pragma once

#include "project_dot.h"
#include "widen_codes.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kStripWidth = 128;  // columns of the weight
constexpr int64_t kStripVectors = kPanelColumns / kLanes;
constexpr int64_t kStripSums = kStripWidth / 16;  // at most: blocks of scales have 16 columns or more

// Rows that one register tile has: 24 of 32 vector registers are sums with AVX-512, 8 of 16 elsewhere.
constexpr int kStripRows = (kLanes == 16 ? 24 : 8) / kStripVectors;

template <class Code>
constexpr int64_t kCodesPerByte = 1;
template <>
constexpr int64_t kCodesPerByte<Float4E2M1> = 2;

// f(code{}) for the codes that `type` names.
template <class F>
inline void with_code(WeightType type, F f) {
  switch (type) {
    case WeightType::kFloat8E4M3: return f(Float8E4M3{});
    case WeightType::kInt8: return f(Int8{});
    case WeightType::kFloat4E2M1: return f(Float4E2M1{});
    case WeightType::kChunks: return;
  }
}

// The totals of a panel: [N][kPanelColumns] in fp32. Where no post norm needs the fp32 rows they are in their place.
inline int64_t totals_workspace(const NormConcatLinear& op) {
  return op.post_norm_gain.data == nullptr ? 0 : fp32_rows_bytes(op);
}
template <class T>
Float* panel_totals(const NormConcatLinear& op, int64_t panel) {
  const int64_t before = op.post_norm_gain.data == nullptr ? 0 : dot_workspace<T>(op);
  return reinterpret_cast<Float*>(static_cast<char*>(op.workspace) + before) + panel * op.num_rows * kStripVectors;
}

// Up to kPanelColumns rows of the weight, from column k on.
struct CodeRows {
  const uint8_t* data;
  int64_t row_stride;
  int64_t rows;
  int64_t width;  // columns from k on, kStripWidth at most
};

#if defined(__AVX512F__)
// 64 bytes of 16 rows, the missing ones zero.
template <class Code>
void widen_strip(const CodeRows& codes, Code code, UInt* strip) {
  constexpr int64_t kWordsPerLane = 2 * kCodesPerByte<Code>;
  const int64_t bytes = (codes.width + kCodesPerByte<Code> - 1) / kCodesPerByte<Code>;
  for (int64_t vector = 0; vector < kStripVectors; ++vector) {
    const int64_t rows = codes.rows - vector * kLanes;
    const uint8_t* data = codes.data + vector * kLanes * codes.row_stride;
    for (int64_t begin = 0; begin < bytes; begin += 64, data += 64) {
      __m512i lines[kLanes] = {};
      if (rows >= kLanes && begin + 64 <= bytes) {
        unrolled<kLanes>([&](auto row) { lines[row] = _mm512_loadu_si512(data + row * codes.row_stride); });
      } else {
        const __mmask64 there = begin + 64 <= bytes ? ~0ull : (1ull << (bytes - begin)) - 1;
        for (int64_t row = 0; row < rows && row < kLanes; ++row) {
          lines[row] = _mm512_maskz_loadu_epi8(there, data + row * codes.row_stride);
        }
      }
      transpose(lines);
      UInt* words = strip + begin / 4 * kWordsPerLane * kStripVectors + vector;
      unrolled<kLanes>([&](auto lane) {
        widen(lines[lane], code, words + lane * kWordsPerLane * kStripVectors, kStripVectors);
      });
    }
  }
}
#else
template <class Code>
void widen_strip(const CodeRows& codes, Code, UInt* strip) {
  uint32_t words[kPanelColumns * kStripWidth / 2];
  const uint16_t* bits = kCodeTable<Code>.bits;
  for (int64_t pair = 0; 2 * pair < codes.width; ++pair) {
    for (int64_t row = 0; row < kPanelColumns; ++row) {
      const uint8_t* data = codes.data + row * codes.row_stride;
      uint32_t even = 0, odd = 0;
      if (row < codes.rows) {
        if constexpr (kCodesPerByte<Code> == 2) {
          even = bits[data[pair] & 15];
          odd = bits[data[pair] >> 4];
        } else {
          even = bits[data[2 * pair]];
          if (2 * pair + 1 < codes.width) odd = bits[data[2 * pair + 1]];
        }
      }
      words[pair * kPanelColumns + row] = even | odd << 16;
    }
  }
  __builtin_memcpy(strip, words, (codes.width + 1) / 2 * kPanelColumns * sizeof(uint32_t));
}
#endif

// One strip's columns of x, multiplied in sums of up to `sum_width` columns, each with its own scales.
struct StripSums {
  int64_t width;
  int64_t sum_width;
  Float scales[kStripSums][kStripVectors];
};

template <class Code>
inline float scale_at(const void* scales, int64_t i) {
  return kCodeTable<Code>.values[static_cast<const uint8_t*>(scales)[i]];
}
inline float scale_at(const Scales& scales, int64_t i) {
  switch (scales.type) {
    case ScaleType::kFloat8E8M0: return scale_at<Float8E8M0>(scales.data, i);
    case ScaleType::kFloat8E4M3: return scale_at<Float8E4M3>(scales.data, i);
    case ScaleType::kFloat32: break;
  }
  return static_cast<const float*>(scales.data)[i];
}

// The scales of `columns` columns of the output from `begin` on, of the sums of the strip at column k.
inline void load_scales(const NormConcatLinear& op, int64_t begin, int64_t columns, int64_t k, StripSums& sums) {
  const Scales& scales = op.scales;
  const float global = scales.global == nullptr ? 1.0f : *scales.global;
  for (int64_t sum = 0; sum * sums.sum_width < sums.width; ++sum) {
    const int64_t block = (k + sum * sums.sum_width) / scales.block_columns;
    float values[kPanelColumns] = {};
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t row = (begin + column) / scales.block_rows;
      values[column] = scale_at(scales, row * scales.row_stride + block) * global;
    }
    __builtin_memcpy(sums.scales[sum], values, sizeof values);
  }
}

// sum += words . x for a pair of columns.
inline Float multiply_add_pair(Float sum, UInt words, const float* x) {
  sum += (Float)(words << 16) * x[0];
  return sum + (Float)(words & 0xffff0000) * x[1];
}
#if defined(__AVX512BF16__)
inline Float multiply_add_pair(Float sum, UInt words, const BFloat16* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)_mm512_set1_epi32(pair));
}
#endif

template <class Packed, int kRows>
void strip_tile(const UInt* strip, const StripSums& sums, const Packed* packed, int64_t packed_width, Float* totals) {
  int64_t k = 0;
  for (const Float(*scales)[kStripVectors] = sums.scales; k < sums.width; ++scales) {
    const int64_t end = k + sums.sum_width < sums.width ? k + sums.sum_width : sums.width;
    Float sum[kRows * kStripVectors] = {};
    for (; k < end; k += 2, strip += kStripVectors) {
      unrolled<kRows>([&](auto row) {
        unrolled<kStripVectors>([&](auto vector) {
          Float& place = sum[row * kStripVectors + vector];
          place = multiply_add_pair(place, strip[vector], packed + row * packed_width + k);
        });
      });
    }
    unrolled<kRows * kStripVectors>([&](auto i) { totals[i] += sum[i] * (*scales)[i % kStripVectors]; });
    k = end;
  }
}

template <class Packed, int kRows = kStripRows>
void strip_rows(int64_t rows, const UInt* strip, const StripSums& sums, const Packed* packed, int64_t packed_width,
                Float* totals) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return strip_rows<Packed, kRows - 1>(rows, strip, sums, packed, packed_width, totals);
  }
  strip_tile<Packed, kRows>(strip, sums, packed, packed_width, totals);
}

template <class T, class Code>
void quantized_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const int64_t width = op.source.width, block_columns = op.scales.block_columns;
  alignas(kCacheLine) UInt strip[kStripWidth / 2 * kStripVectors];
  StripSums sums;
  sums.sum_width = block_columns < kStripWidth ? block_columns : kStripWidth;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t begin = panel * kPanelColumns;
    const int64_t columns = op.num_columns - begin < kPanelColumns ? op.num_columns - begin : kPanelColumns;
    Float* totals = panel_totals<T>(op, panel);
    __builtin_memset(totals, 0, op.num_rows * kStripVectors * sizeof(Float));
    for (int64_t k = 0; k < width; k += kStripWidth) {
      sums.width = width - k < kStripWidth ? width - k : kStripWidth;
      const uint8_t* codes = static_cast<const uint8_t*>(op.weight) + begin * op.weight_row_stride;
      widen_strip({codes + k / kCodesPerByte<Code>, op.weight_row_stride, columns, sums.width}, Code{}, strip);
      load_scales(op, begin, columns, k, sums);
      for (int64_t i = 0; i < op.num_rows; i += kStripRows) {
        const auto* packed = packed_rows<T>(op) + i * packed_width<T>(op) + k;
        strip_rows(op.num_rows - i, strip, sums, packed, packed_width<T>(op), totals + i * kStripVectors);
      }
    }
    finish_columns<T>(op, begin, begin + columns, reinterpret_cast<const float*>(totals), kPanelColumns);
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
