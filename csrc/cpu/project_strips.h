// The projection with AVX-512 of a weight of codes by few rows, for every element type: out^T = weight . rows^T.
// project_lanes.h takes more rows.
//
// The lanes of a sum are columns of the output. A panel of the weight is transposed 128 columns at a time, a strip, and
// its codes are widened to bf16 in registers: [pair of columns][kPanelColumns] words, the even column in the low half.
// Each strip and each block of scales begins a new sum, unless sums go on (StripSums). A sum times its scale is added
// to the fp32 total: so the range and the NaN of a scale are those of fp32, and one multiplication serves all columns
// of its block.
//
// Packed rows: [pair of columns][row] pairs, in the type they are multiplied in, zero past the width.
#pragma once

#include "strips.h"

#if defined(__AVX512F__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// Rows of a register tile: 24 of 32 vector registers are sums.
constexpr int kStripRows = 24 / kStripVectors;

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

// kRows rows by a strip; `packed` has their pairs in that strip.
template <int kRows, class Strip, class Packed, class Next>
void strip_tile(const Strip& strip, const StripSums& sums, const Packed* packed, Float* totals, Next& next) {
  const bool go_on = kMayGoOn<Packed> && sums.go_on;
  // In fp32 the strip's sums are added up before they join the totals, which else are chains of thousands of additions
  // (nvfp4, K*H = 65536: an error of 3.0 times that of torch's product).
  constexpr bool kByStrip = !kMayGoOn<Packed>;
  Float of_strip[kByStrip ? kRows * kStripVectors : 1] = {};
  Float* const joined = kByStrip ? of_strip : totals;
  int64_t k = 0;
  Float sum[kRows * kStripVectors] = {};
  for (const Float(*scales)[kStripVectors] = sums.scales; k < sums.width; ++scales) {
    const int64_t end = k + sums.sum_width < sums.width ? k + sums.sum_width : sums.width;
    // Not by memset: then the array stays in memory (fp8_row, T = 64 in tiles of 11 rows: 27.9 ms instead of 16.2).
    if (!go_on) unrolled<kRows * kStripVectors>([&](auto i) { sum[i] = Float{}; });
    for (; k < end; k += Strip::kStep) {
      next.step();
      UInt words[Strip::kStep / 2 * kStripVectors];
      strip.read(k, words);
      unrolled<Strip::kStep / 2>([&](auto pair) {
        unrolled<kRows>([&](auto row) {
          unrolled<kStripVectors>([&](auto vector) {
            Float& place = sum[row * kStripVectors + vector];
            const Packed* x = packed + (k + 2 * pair) * kRows + 2 * row;
            place = multiply_add_pair(place, words[pair * kStripVectors + vector], x);
          });
        });
      });
    }
    k = end;
    if (go_on && k < sums.width) {
      unrolled<kRows * kStripVectors>([&](auto i) { sum[i] *= (*scales)[i % kStripVectors]; });
      if (!sums.some_stay) continue;
      unrolled<kRows * kStripVectors>([&](auto i) {
        const UInt stays = sums.stays[i % kStripVectors];
        totals[i] += (Float)((UInt)sum[i] & stays);
        sum[i] = (Float)((UInt)sum[i] & ~stays);
      });
      continue;
    }
    unrolled<kRows * kStripVectors>([&](auto i) {
      joined[i] = multiply_add(sum[i], (*scales)[i % kStripVectors], joined[i]);
    });
  }
  if constexpr (kByStrip) unrolled<kRows * kStripVectors>([&](auto i) { totals[i] += of_strip[i]; });
}

template <class T>
int64_t strips_workspace(const NormConcatLinear& op) {
  using Packed = typename DotStep<T>::Packed;
  return fp32_rows_bytes(op) + op.num_rows * round_up(op.source.width, kStripWidth) * sizeof(Packed);
}

// The pairs of the strip from column k on.
template <class T>
typename DotStep<T>::Packed* packed_strip(const NormConcatLinear& op, int64_t k) {
  return packed_rows<T>(op) + k * op.num_rows;
}

// All rows by the strip from column k on.
template <class T, int kRows = kStripRows, class Strip, class Next>
void strip_rows(const NormConcatLinear& op, int64_t k, const Strip& strip, const StripSums& sums, Float* totals,
                Next& next) {
  if constexpr (kRows > 1) {
    if (op.num_rows < kRows) return strip_rows<T, kRows - 1>(op, k, strip, sums, totals, next);
  }
  strip_tile<kRows>(strip, sums, packed_strip<T>(op, k), totals, next);
}

// A row's place in the packed strips.
template <class T>
struct PackedRow {
  using Packed = typename DotStep<T>::Packed;
  const NormConcatLinear& op;
  int64_t row;

  Packed* pair(int64_t column) const { return packed_rows<T>(op) + (column / 2 * op.num_rows + row) * 2; }
  void store(int64_t column, Float value, Whole) const {
    if (column % 2 != 0) return store(column, value, Part{kLanes});
    Packed values[kLanes];
    EAGLE_KERNELS_ISA::store(values, value, Whole{});
    Packed* place = pair(column);
    for (int64_t i = 0; i < kLanes; i += 2) __builtin_memcpy(place + i * op.num_rows, values + i, 2 * sizeof(Packed));
  }
  void store(int64_t column, Float value, Part part) const {
    Packed values[kLanes];
    EAGLE_KERNELS_ISA::store(values, value, Whole{});
    for (int64_t i = 0; i < part.count; ++i) pair(column + i)[(column + i) % 2] = values[i];
  }
};

// The unit of packing is a chunk of all rows, which share cache lines: two threads would take them from one another at
// every store (12 rows of 3 x 4096: 0.37 ms instead of 0.06).
template <class T>
void strips_pack(const NormConcatLinear& op, int64_t chunk_begin, int64_t chunk_end) {
  const int64_t width = op.source.width;
  for (int64_t k = chunk_begin; k < chunk_end; ++k) {
    for (int64_t row = 0; row < op.num_rows; ++row) {
      const PackedRow<T> packed{op, row};
      const auto store = [&](int64_t column, Float value, auto span) { packed.store(column, value, span); };
      pack_chunk<T>(op, row, k, concat_rstd<T>(op.source, row), store);
      if (k + 1 < op.source.num_chunks) continue;
      const auto zero = [&](int64_t i, auto span) { store(width + i, Float{}, span); };
      for_each_vector(round_up(width, kStripWidth) - width, zero);
    }
  }
}

template <class T, class Code>
void strips_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  CodeStrip<Code> strips[2];
  StripSums sums;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t begin = panel * kPanelColumns;
    const PanelCodes<Code> codes(op, begin);
    const PanelScales scales(op, begin, kMayScaleNumbers<T, Code>);
    Float* totals = reinterpret_cast<Float*>(column_totals(op, begin, strips_workspace<T>(op)));
    __builtin_memset(totals, 0, op.num_rows * kStripVectors * sizeof(Float));
    strips[0].load(codes.strip(0));
    for (int64_t k = 0, turn = 0; k < codes.width; k += kStripWidth, turn ^= 1) {
      read_sums<T>(op, scales, k, sums);
      NextStrip<Code> next{strips[turn ^ 1], codes.strip(k + kStripWidth), codes.fetch(k)};
      if (kMayScaleNumbers<T, Code> && scales.of_numbers) {
        const ScaledStrip<CodeStrip<Code>> numbers{strips[turn], sums};
        strip_rows<T>(op, k, numbers, sums_of_scaled(sums.width, scales.global), totals, next);
      } else {
        strip_rows<T>(op, k, strips[turn], sums, totals, next);
      }
      next.finish();
    }
    const auto* of_columns = reinterpret_cast<const float*>(totals);
    finish_columns<T>(op, {0, op.num_rows}, begin, begin + codes.rows, of_columns, kPanelColumns);
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
