// The projection of a quantized weight by rows of bf16 on the AMX tile unit: out^T = weight . rows^T.
//
// 16 rows of codes become bf16 a stretch at a time, in their order, and are the left operand from L1. A sum over the
// columns that share a scale, 128 of them at most, enters the fp32 total times its scale, as in project_quantized.h;
// with one scale a row the totals are the sums, and are scaled when they are finished. Blocks of 16 columns are half of
// what one multiplication takes: there the numbers are scaled, and bf16 has to have the products.
#pragma once

#include "project_amx.h"
#include "project_quantized.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kStretchSteps = 8;  // 8 KB of bf16
constexpr int64_t kStretch = kStretchSteps * kTileK;
constexpr int64_t kMaxSumSteps = kStripWidth / kTileK;
static_assert(kStretch % kStripWidth == 0);

inline bool scales_rows(const NormConcatLinear& op) { return op.scales.block_columns >= op.source.width; }
inline bool scales_numbers(const NormConcatLinear& op) {
  return op.weight_type == WeightType::kFloat4E2M1 && op.scales.type == ScaleType::kFloat8E4M3;
}

inline bool amx_reads_codes(const NormConcatLinear& op) {
  return scales_rows(op) || scales_numbers(op) || op.scales.block_columns % kTileK == 0;
}

inline float scale_at(const Scales& scales, int64_t column, int64_t block) {
  const int64_t place = column / scales.block_rows * scales.row_stride + block;
  const uint8_t* bytes = static_cast<const uint8_t*>(scales.data);
  switch (scales.type) {
    case ScaleType::kFloat32: return static_cast<const float*>(scales.data)[place];
    case ScaleType::kFloat8E8M0: return kCodeTable<Float8E8M0>.values[bytes[place]];
    case ScaleType::kFloat8E4M3: return kCodeTable<Float8E4M3>.values[bytes[place]];
  }
  return 0.0f;
}

// 64 columns in their order, of two vectors that have in each quarter the first 8 columns of 16, and the other 8.
inline void put_in_order(__m512i first, __m512i second, __m512i (&line)[2]) {
  line[0] = _mm512_permutex2var_epi64(first, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second);
  line[1] = _mm512_permutex2var_epi64(first, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), second);
}

// 64 columns of a row of codes in bf16, in their order; those behind the `count` that are there are zero.
template <class Code>
inline void widen_in_order(const uint8_t* codes, int64_t count, __m512i (&line)[2]) {
  const __mmask64 there = count >= 64 ? ~0ull : (1ull << count) - 1;
  const CodeLine<Code> bytes(_mm512_maskz_loadu_epi8(there, codes));
  put_in_order(bytes.word(0), bytes.word(1), line);
}
template <>
inline void widen_in_order<Float4E2M1>(const uint8_t* codes, int64_t count, __m512i (&line)[2]) {
  const __mmask32 there = count >= 64 ? ~0u : (1u << count / 2) - 1;
  const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(there, codes));
  // Of an index vpermw reads 5 bits, and the table has all codes twice.
  const __m512i table = _mm512_load_si512(kCodeTable<Float4E2M1>.bits);
  const __m512i even = _mm512_permutexvar_epi16(pairs, table);
  const __m512i odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), table);
  put_in_order(_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd), line);
}

// 32 columns from column k on times their scales: one for the first 16, one for the others, if they are there.
inline __m512i scaled_line(__m512i line, const Scales& scales, int64_t row, int64_t k, int64_t width) {
  const auto scale = [&](int64_t first) {
    return first < width ? scale_at(scales, row, first / scales.block_columns) : 0.0f;
  };
  const __m512 lower = _mm512_set1_ps(scale(k));
  return (__m512i)scaled((UInt)line, (Float)_mm512_insertf32x8(lower, _mm256_set1_ps(scale(k + 16)), 1));
}

// A stretch of 16 rows of the weight in bf16, zero behind their end. Of rows that are not there it keeps what it has:
// nobody asks for their sums.
struct Stretch {
  alignas(kCacheLine) BFloat16 numbers[kTile][kStretch] = {};

  template <class Code>
  void load(const NormConcatLinear& op, const Columns& columns, int64_t k) {
    const int64_t width = op.source.width, row_bytes = width / kCodesPerByte<Code>;
    const auto* codes = static_cast<const uint8_t*>(op.weight) + columns.begin * op.weight_row_stride;
    const int64_t byte = k / kCodesPerByte<Code>;
    const int64_t later = byte + kAheadBytes;
    const int64_t ahead = later < row_bytes ? later : kTile * op.weight_row_stride + later - row_bytes;
    for (int64_t row = 0; row < columns.count; ++row, codes += op.weight_row_stride) {
      for (int64_t i = 0; i < kStretch / kCodesPerByte<Code>; i += kCacheLine) {
        __builtin_prefetch(codes + ahead + i, 0, 2);
      }
      for (int64_t begin = 0; begin < kStretch; begin += 64) {
        const int64_t left = width - k - begin;
        __m512i line[2] = {};
        if (left > 0) {
          widen_in_order<Code>(codes + byte + begin / kCodesPerByte<Code>, left, line);
          if (scales_numbers(op)) {
            line[0] = scaled_line(line[0], op.scales, columns.begin + row, k + begin, width);
            line[1] = scaled_line(line[1], op.scales, columns.begin + row, k + begin + kTileK, width);
          }
        }
        _mm512_store_si512(&numbers[row][begin], line[0]);
        _mm512_store_si512(&numbers[row][begin + kTileK], line[1]);
      }
    }
  }
};

// totals = or += sums, each of 16 rows of them times the scale of its column.
inline void add_scaled(int64_t groups, const float* sums, const float (&scales)[kTile], bool first, float* totals) {
  for (int64_t g = 0; g < groups; ++g, sums += 2 * kSumSize, totals += 2 * kSumSize) {
    for (int64_t d = 0; d < kTile; ++d) {
      Float total = load(sums + d * kTile, Whole{}) * scales[d];
      if (!first) total += load(totals + d * kTile, Whole{});
      store(totals + d * kTile, total, Whole{});
    }
  }
}

template <class Code>
void amx_project_codes(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const bool whole_sums = scales_rows(op) || scales_numbers(op);
  const int64_t shared = op.scales.block_columns;
  const int64_t sum_steps = (shared < kStripWidth ? shared : kStripWidth) / kTileK;
  const float global = op.scales.global == nullptr ? 1.0f : *op.scales.global;
  Stretch stretch;
  alignas(kCacheLine) float sums[kBlockGroups * 2 * kSumSize];

  const auto multiply = [&](Block block, const Columns& columns, float* totals) {
    for (const int64_t end = block.step + block.steps; block.step < end; block.step += block.steps) {
      stretch.load<Code>(op, columns, block.step * kTileK);
      block.steps = end - block.step < kStretchSteps ? end - block.step : kStretchSteps;
      const BFloat16* numbers = stretch.numbers[0];
      if (whole_sums) {
        multiply_columns(op, block, numbers, kStretch, totals, block.step == 0, numbers);
        continue;
      }
      for (int64_t i = 0; i < block.steps; i += sum_steps) {
        const int64_t step = block.step + i, left = block.steps - i;
        const Block part{block.group, block.groups, step, left < sum_steps ? left : sum_steps};
        multiply_columns(op, part, numbers + i * kTileK, kStretch, sums, true, numbers);
        float scales[kTile] = {};
        for (int64_t d = 0; d < columns.count; ++d) {
          scales[d] = scale_at(op.scales, columns.begin + d, step * kTileK / shared) * global;
        }
        add_scaled(block.groups, sums, scales, step == 0, totals);
      }
    }
  };
  const auto finish = [&](int64_t panel, int64_t group, int64_t groups, const float* totals) {
    if (!whole_sums) return finish_panel(op, panel, group, groups, totals, nullptr);
    float of_column[kPanelColumns];
    for (int64_t d = 0; d < kPanelColumns; ++d) {
      const int64_t column = panel * kPanelColumns + d;
      const bool scaled_rows = !scales_numbers(op) && column < op.num_columns;
      of_column[d] = scaled_rows ? scale_at(op.scales, column, 0) * global : global;
    }
    const Float scales[] = {load(of_column, Whole{}), load(of_column + kLanes, Whole{})};
    finish_panel(op, panel, group, groups, totals, scales);
  };
  for_each_block(op, panel_begin, panel_end, kStretchSteps, multiply, finish);
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
