// The projection with AVX-512 of a weight of codes, for every element type, and of a weight in bf16, or in bf16 in 12
// bits, where the processor multiplies bf16: out^T = weight . rows^T.
//
// The lanes of a sum are columns of the output. A panel of the weight is transposed 128 columns at a time, a strip, and
// codes are widened to bf16 in L1 or in registers: [pair of columns][kPanelColumns] words, the even column in the low
// half. What is called codes below is bf16 where the weight is. All rows of a pass multiply it. Each strip and each
// block of scales begins a new sum, unless sums go on (StripSums). A sum times its scale is added to the fp32 total: so
// the range and the NaN of a scale are those of fp32, and one multiplication serves all columns of its block.
//
// Packed rows: [strip][tile of rows][pair of columns][row of the tile] pairs, in the type they are multiplied in, zero
// past the width. A tile reads them from one end to the other; with row-major rows it would need 12 lines for every
// 16 pairs (fp8_row, two cores, an AMD EPYC, T = 32 and 64: 5.7 and 8.1 ms; row-major 7.0 and 9.4).
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

// A tile of rows by a strip; `packed` has the tile's pairs in that strip.
template <int kRows, class Strip, class Packed, class Next>
void strip_tile(const Strip& strip, const StripSums& sums, const Packed* packed, Float* totals, Next& next) {
  const bool go_on = kMayGoOn<Packed> && sums.go_on;
  // In fp32 the strip's sums are added up before they join the totals, which else are chains of thousands of additions
  // (nvfp4, K*H = 65536: an error of 3.0 times that of torch's product).
  constexpr bool kByStrip = !std::is_same_v<Packed, BFloat16>;
  Float of_strip[kByStrip ? kRows * kStripVectors : 1] = {};
  Float* const joined = kByStrip ? of_strip : totals;
  int64_t k = 0;
  Float sum[kRows * kStripVectors] = {};
  for (const Float(*scales)[kStripVectors] = sums.scales; k < sums.width; ++scales) {
    const int64_t end = k + sums.sum_width < sums.width ? k + sums.sum_width : sums.width;
    // Not by memset: then the array stays in memory (fp8_row, T = 64: 27.9 ms instead of 16.2).
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

// The tiles of rows, as nearly equal as they can be.
struct RowTiles {
  int64_t num_rows, count, rows;  // of a tile; the last one may have fewer

  explicit RowTiles(int64_t num_rows)
      : num_rows(num_rows),
        count((num_rows + kStripRows - 1) / kStripRows),
        rows((num_rows + count - 1) / count) {}
  int64_t rows_from(int64_t first) const { return num_rows - first < rows ? num_rows - first : rows; }
};

// The tiles of one pass over the weight. Packed rows of more than kPassBytes would come from memory for each panel
// (K=6, H=D=5376, T = 512, in bf16: 510 ms in one pass, 480 in passes of 8 MB and 550 of 2 MB).
struct Pass {
  int64_t tiles;
  RowRange rows;
};
constexpr int64_t kPassBytes = 8 << 20;

// Calls f(pass) for each of them, as nearly equal as they can be. Each has two tiles, if there are two:
// project_from_words needs them.
template <class F>
void for_each_pass(const RowTiles& tiles, int64_t row_bytes, F f) {
  const int64_t needed = tiles.num_rows * row_bytes / kPassBytes + 1, most = tiles.count < 4 ? 1 : tiles.count / 2;
  const int64_t passes = needed < most ? needed : most;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t begin = tiles.count * pass / passes, end = tiles.count * (pass + 1) / passes;
    const int64_t row = begin * tiles.rows, rows = (end - begin) * tiles.rows, left = tiles.num_rows - row;
    f(Pass{end - begin, {row, rows < left ? rows : left}});
  }
}

template <class T>
int64_t strips_workspace(const NormConcatLinear& op) {
  using Packed = typename DotStep<T>::Packed;
  return fp32_rows_bytes(op) + op.num_rows * round_up(op.source.width, kStripWidth) * sizeof(Packed);
}

// Pairs of the tile that begins with row `first`, of the strip from column k on.
template <class T>
typename DotStep<T>::Packed* packed_strip(const NormConcatLinear& op, int64_t k, int64_t first) {
  return packed_rows<T>(op) + k * op.num_rows + first * kStripWidth;
}

// A tile of rows by the strip from column k on.
template <class T, int kRows = kStripRows, class Strip, class Next>
void strip_rows(const NormConcatLinear& op, int64_t k, int64_t first, int64_t rows, const Strip& strip,
                const StripSums& sums, Float* totals, Next& next) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return strip_rows<T, kRows - 1>(op, k, first, rows, strip, sums, totals, next);
  }
  strip_tile<kRows>(strip, sums, packed_strip<T>(op, k, first), totals + first * kStripVectors, next);
}

// A row's place in the packed strips.
template <class T>
struct PackedRow {
  using Packed = typename DotStep<T>::Packed;
  const NormConcatLinear& op;
  int64_t first, rows, row;  // of the tile

  Packed* pair(int64_t column) const {
    const int64_t in_strip = column % kStripWidth;
    return packed_strip<T>(op, column - in_strip, first) + (in_strip / 2 * rows + row) * 2;
  }
  void store(int64_t column, Float value, Whole) const {
    if (column % 2 != 0 || column % kStripWidth + kLanes > kStripWidth) return store(column, value, Part{kLanes});
    Packed values[kLanes];
    EAGLE_KERNELS_ISA::store(values, value, Whole{});
    Packed* place = pair(column);
    for (int64_t i = 0; i < kLanes; i += 2) __builtin_memcpy(place + i * rows, values + i, 2 * sizeof(Packed));
  }
  void store(int64_t column, Float value, Part part) const {
    Packed values[kLanes];
    EAGLE_KERNELS_ISA::store(values, value, Whole{});
    for (int64_t i = 0; i < part.count; ++i) pair(column + i)[(column + i) % 2] = values[i];
  }
};

// The unit of packing is a chunk of the rows of a tile. The rows of a tile share cache lines, which two threads would
// take from one another at every store (12 rows of 3 x 4096: 0.37 ms instead of 0.06).
inline int64_t strips_groups(const NormConcatLinear& op) {
  return RowTiles(op.num_rows).count * op.source.num_chunks;
}

template <class T>
void strips_pack(const NormConcatLinear& op, int64_t group_begin, int64_t group_end) {
  const RowTiles tiles(op.num_rows);
  const int64_t num_chunks = op.source.num_chunks, width = op.source.width;
  for (int64_t group = group_begin; group < group_end; ++group) {
    const int64_t first = group / num_chunks * tiles.rows, rows = tiles.rows_from(first), k = group % num_chunks;
    for (int64_t row = 0; row < rows; ++row) {
      const PackedRow<T> packed{op, first, rows, row};
      const auto store = [&](int64_t column, Float value, auto span) { packed.store(column, value, span); };
      pack_chunk<T>(op, first + row, k, concat_rstd<T>(op.source, first + row), store);
      if (k + 1 < num_chunks) continue;
      const auto zero = [&](int64_t i, auto span) { store(width + i, Float{}, span); };
      for_each_vector(round_up(width, kStripWidth) - width, zero);
    }
  }
}

// Calls f(panel's first column, its codes, its totals, pass) for each panel in each pass, the totals of the pass's rows
// zeroed, then turns these into the result.
template <class T, class Code, class F>
void for_each_panel(const NormConcatLinear& op, const RowTiles& tiles, int64_t panel_begin, int64_t panel_end, F f) {
  const int64_t row_stride = kIsCode<Code> ? op.weight_row_stride : bytes_of<Code>(op.weight_row_stride);
  const int64_t packed_row_bytes = op.source.width * sizeof(typename DotStep<T>::Packed);
  for_each_pass(tiles, packed_row_bytes, [&](const Pass& pass) {
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const int64_t begin = panel * kPanelColumns;
      const int64_t columns = op.num_columns - begin < kPanelColumns ? op.num_columns - begin : kPanelColumns;
      const uint8_t* codes = static_cast<const uint8_t*>(op.weight) + begin * row_stride;
      Float* totals = reinterpret_cast<Float*>(column_totals(op, begin, strips_workspace<T>(op)));
      Float* of_pass = totals + pass.rows.first * kStripVectors;
      __builtin_memset(of_pass, 0, pass.rows.count * kStripVectors * sizeof(Float));
      constexpr bool kIsGrouped = std::is_same_v<Code, BFloat16In12>;
      std::conditional_t<kIsGrouped, GroupedRows, UngroupedRows> grouped(op, begin, columns);
      f(begin, PanelCodes<Code>{codes, row_stride, columns, op.source.width, grouped.address()}, totals, pass);
      const auto* sums = reinterpret_cast<const float*>(of_pass);
      finish_columns<T>(op, pass.rows, begin, begin + columns, sums, kPanelColumns);
    }
  });
}

// Calls f(tile of the pass, first row, rows) for each tile of rows.
template <class F>
void for_each_row_tile(const RowTiles& tiles, const Pass& pass, F f) {
  for (int64_t tile = 0, i = pass.rows.first; tile < pass.tiles; ++tile, i += tiles.rows) {
    f(tile, i, tiles.rows_from(i));
  }
}

// Each code is widened in a register, once for each tile of rows. kSeveral: there is more than one tile.
template <class T, class Code, bool kSeveral>
void project_from_codes(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const RowTiles tiles(op.num_rows);
  CodeStrip<Code> strips[2];
  StripSums sums;
  for_each_panel<T, Code>(op, tiles, panel_begin, panel_end, [&](int64_t begin, const PanelCodes<Code>& codes,
                                                                 Float* totals, const Pass& pass) {
    const PanelScales scales(op, begin, kMayScaleNumbers<T, Code>);
    strips[0].load(codes.strip(0));
    for (int64_t k = 0, turn = 0; k < codes.width; k += kStripWidth, turn ^= 1) {
      read_sums<T>(op, scales, k, sums);
      const auto multiply = [&](const auto& strip, const StripSums& sums) {
        const CodesAhead<Code> ahead = codes.ahead(k, 0, kPanelColumns);
        NextStrip<Code, kSeveral> next{strips[turn ^ 1], codes.strip(k + kStripWidth), ahead, pass.tiles};
        for_each_row_tile(tiles, pass, [&](int64_t, int64_t i, int64_t rows) {
          strip_rows<T>(op, k, i, rows, strip, sums, totals, next);
        });
        next.finish();
      };
      if constexpr (kMayScaleNumbers<T, Code>) {
        if (scales.of_numbers) {
          multiply(ScaledStrip<CodeStrip<Code>>{strips[turn], sums}, sums_of_scaled(sums, scales.global));
        } else {
          multiply(strips[turn], sums);
        }
      } else {
        multiply(strips[turn], sums);
      }
    }
  });
}

// Any number of rows: each code is widened once, into L1.
template <class T, class Code>
void project_from_words(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const RowTiles tiles(op.num_rows);
  StripSums sums;
  // The first tile's steps transpose the next strip and the second's widen it: shuffles beside products (fp8, T = 16,
  // 24 and 32, in ms: 5.4, 6.9 and 8.8; before them 5.7, 7.8 and 9.9). There are two: few rows take project_from_codes.
  WordStrip<Code> strips[2];
  CodeStrip<Code> lanes;
  StripSums blocks;
  for_each_panel<T, Code>(op, tiles, panel_begin, panel_end, [&](int64_t begin, const PanelCodes<Code>& codes,
                                                                 Float* totals, const Pass& pass) {
    const PanelScales scales(op, begin, kMayScaleNumbers<T, Code>);
    const int64_t share = (kPanelColumns + pass.tiles - 1) / pass.tiles;
    const auto multiply = [&](const WordStrip<Code>& strip, int64_t k, int64_t i, int64_t rows, auto& next) {
      strip_rows<T>(op, k, i, rows, strip, sums, totals, next);
    };
    // Calls f(what widens the strip from column k on); `lanes` has that strip already.
    const auto with_next_words = [&](int64_t k, WordStrip<Code>& words, CodesAhead<Code> ahead, auto f) {
      const int64_t width = codes.strip(k).width;
      if constexpr (kMayScaleNumbers<T, Code>) {
        if (scales.of_numbers) {
          if (width > 0) read_sums<T>(op, scales, k, blocks);
          const ScaledStrip<CodeStrip<Code>> numbers{lanes, blocks};
          return f(NextWords<Code, ScaledStrip<CodeStrip<Code>>>{numbers, width, words, ahead});
        }
      }
      f(NextWords<Code, CodeStrip<Code>>{lanes, width, words, ahead});
    };
    lanes.load(codes.strip(0));
    with_next_words(0, strips[0], {}, [](auto next) { next.finish(); });
    for (int64_t k = 0, turn = 0; k < codes.width; k += kStripWidth, turn ^= 1) {
      const int64_t next_k = k + kStripWidth;
      read_sums<T>(op, scales, k, sums);
      if constexpr (kMayScaleNumbers<T, Code>) {
        if (scales.of_numbers) sums = sums_of_scaled(sums, scales.global);
      }
      for_each_row_tile(tiles, pass, [&](int64_t tile, int64_t i, int64_t rows) {
        CodesAhead<Code> ahead = codes.ahead(k, tile * share, share);
        if (tile == 0) {
          NextStrip<Code, false> next{lanes, codes.strip(next_k), ahead};
          multiply(strips[turn], k, i, rows, next);
          return next.finish();
        }
        if (tile > 1) return multiply(strips[turn], k, i, rows, ahead);
        with_next_words(next_k, strips[turn ^ 1], ahead, [&](auto next) {
          multiply(strips[turn], k, i, rows, next);
          next.finish();
        });
      });
    }
  });
}

// Widening e4m3 anew for every tile of rows is hidden behind products of bf16; storing it once for all tiles is not.
// Two AMD EPYCs, two cores, in ms, stored and widened for every tile: fp8_row at T = 16, 32 and 64, where a core starts
// one 512-bit product a cycle, 5.3, 8.8, 16.7 and 4.7, 8.5, 16.1; where it starts two, 3.7, 6.6, 9.1 and 2.7, 4.5, 8.1.
// Other codes are more work to widen: on the first EPYC int8_row 5.3, 9.0, 16.7 and 5.7, 10.3, 19.9, mxfp4 5.4, 9.5,
// 18.1 and 5.1, 10.3, 19.3. So is e4m3 for products of fp32: on the second fp8_row by rows of fp16 4.9, 6.3, 14.5 and
// 4.3, 6.1, 15.1. bf16 is transposed alone.
template <class T, class Code>
void strips_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  constexpr bool kFromCodes =
      std::is_same_v<typename DotStep<T>::Packed, BFloat16> &&
      (std::is_same_v<Code, Float8E4M3> || std::is_base_of_v<CodeStrip<BFloat16>, CodeStrip<Code>>);
  if (op.num_rows <= kStripRows) {
    project_from_codes<T, Code, false>(op, panel_begin, panel_end);
  } else if constexpr (kFromCodes) {
    project_from_codes<T, Code, true>(op, panel_begin, panel_end);
  } else {
    project_from_words<T, Code>(op, panel_begin, panel_end);
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
