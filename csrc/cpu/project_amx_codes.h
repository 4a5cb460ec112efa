// The projection of a quantized weight by rows of bf16 on the AMX tile unit: out^T = weight . rows^T.
//
// A panel of codes becomes bf16 a stretch at a time, in the layout of tiles, and is the left operand from L1: while one
// stretch is multiplied the next one is widened, since the tile unit and the vectors' units run beside each other. Two
// tiles of the panel by two of the rows are four products for four loads. A sum over the columns that share a scale,
// 128 of them at most, enters the fp32 total times its scale, as in project_quantized.h; with one scale a row the
// totals are the sums, and are scaled when they are finished. Of less than 128 columns a sum costs more than its
// products (mxfp4, T = 64: 7.2 ms): there the numbers are scaled, where bf16 has the products (4.8 ms). Of e2m1 and
// e4m3 it has them; of e8m0 those with the ratios of a stretch, whose sum takes the rest.
#pragma once

#include <bit>

#include "project_amx.h"
#include "project_quantized.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kStretchSteps = kCodesStretchSteps;
constexpr int64_t kStretch = kStretchSteps * kTileK;
static_assert(kStretch == kStripWidth);

inline bool scales_rows(const NormConcatLinear& op) { return op.scales.block_columns >= op.source.width; }

inline bool amx_reads_codes(const NormConcatLinear& op) {
  return scales_rows(op) || number_scales(op) == NumberScales::kE4M3 || op.scales.block_columns % kTileK == 0;
}

// The low and the high bytes of 64 codes in bf16. Shuffles have one unit, and a look-up among 128 bytes is two of them:
// here they are for the few codes that have to be looked up (fp8_row, T = 8: 1.94 ms, 1.83 so).
struct NumberBytes {
  __m512i low, high;

  NumberBytes(__m512i codes, Float8E4M3) {
    // Of s eeee mmm the exponent in bf16 is e + 120: its lowest bit and the mantissa are the code's, its upper bits
    // (e >> 1) + 60, which is 1111 or 10 before two bits of e.
    low = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x0000000001020408), 0);
    high = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x1020404040404080), 0x3c);
    // Not those of subnormal numbers and NaN, whose magnitudes are less than 8 and 127.
    const __m512i doubled = _mm512_add_epi8(codes, codes);
    const __m512i rare = _mm512_sub_epi8(doubled, _mm512_set1_epi8(16));
    if (_mm512_cmpge_epu8_mask(rare, _mm512_set1_epi8(static_cast<char>(0xfe - 16))) != 0) {
      const CodeLine<Float8E4M3> line(codes);
      low = line.low;
      high = line.high;
    }
  }

  NumberBytes(__m512i codes, Int8) {
    const __m512i magnitudes = _mm512_abs_epi8(codes), doubled = _mm512_add_epi8(magnitudes, magnitudes);
    // 64 to 127 are 0x4280 + 2 (m - 64).
    const __mmask64 below_64 = ~_mm512_movepi8_mask(doubled);
    const __m512i low_table = _mm512_load_si512(kLowBytes<Int8>.bytes);
    const __m512i high_table = _mm512_load_si512(kHighBytes<Int8>.bytes);
    low = _mm512_mask_permutexvar_epi8(doubled, below_64, magnitudes, low_table);
    high = _mm512_mask_permutexvar_epi8(_mm512_set1_epi8(0x42), below_64, magnitudes, high_table);
    // |-128| is looked up as 0: 128 is 0x4300, and less than 128 is no more here.
    high = _mm512_max_epu8(high, _mm512_subs_epu8(magnitudes, _mm512_set1_epi8(128 - 0x43)));
    high = or_masked(high, codes, _mm512_set1_epi8(-128));
  }
};

// 64 columns of a row of codes in bf16, in their order; those behind the `count` that are there are zero. What unpacks
// takes 8 bytes of each quarter: the first ones are put there before.
template <class Code>
inline void widen_in_order(const uint8_t* codes, int64_t count, __m512i* lines) {
  const __mmask64 there = count >= 64 ? ~0ull : (1ull << count) - 1;
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const NumberBytes bytes(_mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(there, codes)), Code{});
  lines[0] = _mm512_unpacklo_epi8(bytes.low, bytes.high);
  lines[1] = _mm512_unpackhi_epi8(bytes.low, bytes.high);
}
template <>
inline void widen_in_order<Float4E2M1>(const uint8_t* codes, int64_t count, __m512i* lines) {
  const __mmask32 there = count >= 64 ? ~0u : (1u << count / 2) - 1;
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutexvar_epi32(order, _mm256_maskz_loadu_epi8(there, codes));
  const __m512i pairs = _mm512_cvtepu8_epi16(bytes);
  // Of an index vpermw reads 5 bits, and the table has all codes twice.
  const __m512i table = _mm512_load_si512(kCodeTable<Float4E2M1>.bits);
  const __m512i even = _mm512_permutexvar_epi16(pairs, table);
  const __m512i odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), table);
  lines[0] = _mm512_unpacklo_epi16(even, odd);
  lines[1] = _mm512_unpackhi_epi16(even, odd);
}

template <class Code>
constexpr int64_t bytes_of(int64_t columns) {
  return columns / kCodesPerByte<Code>;
}

// Where a stretch begins.
struct Place {
  int64_t panel, step;
};

// A stretch of a panel in bf16, zero behind the end of its rows. Of rows that are not there it keeps what it has:
// nobody asks for their sums.
struct Stretch {
  alignas(kCacheLine) BFloat16 tiles[kStretchSteps][2][kTile][kTileK] = {};
  Float scales[kStripVectors] = {};  // of its sums, where the numbers are scaled by ratios to them
  bool has_ratios = false;
};

// How many blocks of columns a stretch has; none behind the end of the rows.
inline int64_t num_blocks(const NormConcatLinear& op, int64_t k) {
  const int64_t left = op.source.width - k, columns = left < kStretch ? left : kStretch;
  return columns > 0 ? (columns - 1) / op.scales.block_columns + 1 : 0;
}

// A row of a stretch as lines of tiles, in the order of its columns; zero behind the end of the row.
template <class Code>
void widen_columns(const uint8_t* codes, int64_t left, __m512i (&lines)[kStretchSteps]) {
  unrolled<kStretchSteps / 2>([&](auto pair) {
    constexpr int64_t kBegin = pair * 2 * kTileK;
    if (left <= kBegin) return;
    widen_in_order<Code>(codes + bytes_of<Code>(kBegin), left - kBegin, lines + 2 * pair);
  });
}
template <class Code>
struct PlainLines {
  PlainLines(const NormConcatLinear&, const PanelScales&, Place, Stretch&) {}

  void widen(const uint8_t* codes, int64_t left, int64_t, __m512i (&lines)[kStretchSteps]) const {
    widen_columns<Code>(codes, left, lines);
  }
};

// The same of e2m1 in the order of its words, each number times the scale of its lane, whose 8 columns share one.
inline void widen_words(const uint8_t* codes, int64_t left, Float scale, __m512i (&lines)[kStretchSteps]) {
  const __mmask64 there = left >= kStretch ? ~0ull : (1ull << left / 2) - 1;
  const CodeLine<Float4E2M1> line(_mm512_maskz_loadu_epi8(there, codes));
  unrolled<kStretchSteps>([&](auto i) { lines[i] = (__m512i)scaled((UInt)line.word(i), scale); });
}
inline UInt block_of_lane(const NormConcatLinear& op) {
  const UInt lanes = (UInt)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return lanes >> static_cast<uint32_t>(std::countr_zero(static_cast<uint64_t>(op.scales.block_columns)) - 3);
}

// Numbers of e2m1 times their scales of e4m3.
class ScaledLines {
 public:
  ScaledLines(const NormConcatLinear& op, const PanelScales& scales, Place place, Stretch&)
      : rows_(scales.rows[0] + place.step * kTileK / op.scales.block_columns),
        row_stride_(op.scales.row_stride),
        there_(static_cast<__mmask16>((1 << num_blocks(op, place.step * kTileK)) - 1)),  // 8 at most
        block_of_lane_(block_of_lane(op)) {}

  void widen(const uint8_t* codes, int64_t left, int64_t row, __m512i (&lines)[kStretchSteps]) const {
    const __m128i bytes = _mm_maskz_loadu_epi8(there_, rows_ + row * row_stride_);
    const Float of_blocks = value_of((UInt)_mm512_cvtepu8_epi32(bytes), Float8E4M3{});
    widen_words(codes, left, (Float)_mm512_permutexvar_ps((__m512i)block_of_lane_, (__m512)of_blocks), lines);
  }

 private:
  const uint8_t* rows_;
  int64_t row_stride_;
  __mmask16 there_;
  UInt block_of_lane_;
};

// Numbers times the ratio of their scale to the largest of their row in the stretch, which is the scale of the sum:
// powers of two. A number that bf16 would not have has no ratio; then the stretch is multiplied block by block.
template <class Code>
class RatioLines {
 public:
  RatioLines(const NormConcatLinear& op, const PanelScales& scales, Place place, Stretch& stretch) : RatioLines(op) {
    const int64_t k = place.step * kTileK, count = num_blocks(op, k);
    if (count == 0) return;
    scales.read_bytes(k / op.scales.block_columns, count, exponents_);
    stretch.has_ratios = true;
    for (int64_t v = 0; v < kStripVectors; ++v) {
      UInt bytes, largest{};
      __builtin_memcpy(&bytes, exponents_ + v * kLanes, sizeof bytes);
      for (int64_t i = 0; i < count; ++i) {
        largest = (UInt)_mm512_max_epu32((__m512i)largest, (__m512i)(bytes >> 8 * i & 0xff));
      }
      stretch.scales[v] = value_of(largest, Float8E8M0{}) * scales.global;
      bytes = (largest * 0x01010101 - bytes) & 0xffffffff >> 8 * (4 - count);
      __builtin_memcpy(exponents_ + v * kLanes, &bytes, sizeof bytes);
      // The smallest number of e2m1 is 2^-1 and of others 2^-9 at least; of bf16, 2^-126.
      constexpr char kMost = std::is_same_v<Code, Float4E2M1> ? 126 - 1 : 126 - 9;
      stretch.has_ratios &= _mm512_cmpgt_epu8_mask((__m512i)bytes, _mm512_set1_epi8(kMost)) == 0;
    }
  }
  // One block of a stretch as it is, the others zero.
  RatioLines(const NormConcatLinear& op, int64_t block) : RatioLines(op) {
    for (uint32_t& exponents : exponents_) exponents = 0x7f7f7f7f & ~(0xff << 8 * block);
  }

  void widen(const uint8_t* codes, int64_t left, int64_t row, __m512i (&lines)[kStretchSteps]) const {
    const UInt exponents = (UInt{} + exponents_[row]) >> shifts_ & 0xff;
    const Float ratios = (Float)(127 - exponents << 23);
    if constexpr (std::is_same_v<Code, Float4E2M1>) {
      widen_words(codes, left, ratios, lines);
    } else {
      widen_columns<Code>(codes, left, lines);
      unrolled<kStretchSteps>([&](auto i) {
        const __m512 ratio = _mm512_permutexvar_ps(_mm512_set1_epi32(i * kLanes / kStretchSteps), (__m512)ratios);
        lines[i] = (__m512i)scaled((UInt)lines[i], (Float)ratio);
      });
    }
  }

 private:
  explicit RatioLines(const NormConcatLinear& op) : shifts_(8 * block_of_lane(op)) {}

  alignas(kCacheLine) uint32_t exponents_[kPanelColumns] = {};  // of 1 / ratio, a byte for each block
  UInt shifts_;
};

// Fills a stretch, row by row while another one is multiplied, and fetches what will be asked for later.
template <class Code, class Lines>
class Widening {
 public:
  Widening(const NormConcatLinear& op, const Lines& lines, Place place, Place later, Stretch& stretch)
      : op_(op), lines_(lines), k_(place.step * kTileK), tiles_(stretch.tiles[0][0][0]) {
    const auto* weight = static_cast<const uint8_t*>(op.weight);
    const int64_t columns = op.num_columns - place.panel * kPanelColumns;
    const auto codes_at = [&](Place from) {
      return weight + from.panel * kPanelColumns * op.weight_row_stride + bytes_of<Code>(from.step * kTileK);
    };
    codes_ = codes_at(place);
    ahead_ = codes_at(later);
    rows_ = columns < kPanelColumns ? columns : kPanelColumns;
  }

  void widen_until(int64_t row) {
    if (row > rows_) row = rows_;
    if (op_.source.width - k_ >= kStretch) {
      for (; row_ < row; ++row_) widen_row(std::true_type{});
    } else {
      for (; row_ < row; ++row_) widen_row(std::false_type{});
    }
  }

 private:
  template <class IsWhole>
  [[gnu::always_inline]] void widen_row(IsWhole) {
    const uint8_t* codes = codes_ + row_ * op_.weight_row_stride;
    for (int64_t byte = 0; byte < bytes_of<Code>(kStretch); byte += kCacheLine) {
      __builtin_prefetch(ahead_ + row_ * op_.weight_row_stride + byte, 0, 2);
    }
    const int64_t left = IsWhole::value ? kStretch : op_.source.width - k_;
    __m512i lines[kStretchSteps] = {};
    lines_.widen(codes, left, row_, lines);
    BFloat16* line = tiles_ + row_ * kTileK;
    unrolled<kStretchSteps>([&](auto step) { _mm512_store_si512(line + step * 2 * kTileSize, lines[step]); });
  }

  const NormConcatLinear& op_;
  const Lines lines_;
  int64_t k_, rows_, row_ = 0;
  const uint8_t *codes_, *ahead_;
  BFloat16* tiles_;
};

// Tiles 0 and 1 are the sums of a panel's halves by a group of rows, 2 and 3 those by the group behind it.
template <bool kTwoGroups>
void load_sums(const float* sums) {
  _tile_loadd(0, sums, kSumBytes);
  _tile_loadd(1, sums + kSumSize, kSumBytes);
  if constexpr (kTwoGroups) _tile_loadd(2, sums + 2 * kSumSize, kSumBytes);
  if constexpr (kTwoGroups) _tile_loadd(3, sums + 3 * kSumSize, kSumBytes);
}
template <bool kTwoGroups>
void store_sums(float* sums) {
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kSumSize, kSumBytes);
  if constexpr (kTwoGroups) _tile_stored(2, sums + 2 * kSumSize, kSumBytes);
  if constexpr (kTwoGroups) _tile_stored(3, sums + 3 * kSumSize, kSumBytes);
}
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Those sums += panel . rows, for some steps of a stretch. beside() stands between what a step loads and multiplies:
// its stores are then older than the products that the next step's loads need not wait for (int8, T = 64: 3.6 ms, 3.5
// so).
template <bool kTwoGroups, class Beside>
void multiply_stretch(const BFloat16* panel, const BFloat16* rows, int64_t steps, Beside beside) {
  for (int64_t step = 0; step < steps; ++step, panel += 2 * kTileSize, rows += kTileSize) {
    _tile_loadd(4, panel, kTileBytes);
    _tile_loadd(6, rows, kTileBytes);
    _tile_loadd(5, panel + kTileSize, kTileBytes);
    if constexpr (kTwoGroups) _tile_loadd(7, rows + kStretchSteps * kTileSize, kTileBytes);
    beside();
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kTwoGroups) {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// totals = or += sums, which are those of a panel by some groups, each column times its scale.
inline void add_scaled(int64_t groups, const float* sums, const float* scales, bool first, float* totals) {
  for (int64_t i = 0; i < groups * kPanelColumns; ++i, sums += kTile, totals += kTile) {
    Float total = load(sums, Whole{}) * scales[i % kPanelColumns];
    if (!first) total += load(totals, Whole{});
    store(totals, total, Whole{});
  }
}

// Where the stretch is that begins `steps` behind a place of the block: at the end of a panel, in the next one.
inline Place place_behind(const NormConcatLinear& op, const Block& block, Place place, int64_t steps) {
  place.step += steps;
  if (place.step < block.end_step()) return place;
  const int64_t step = place.step - block.end_step();
  if (place.panel + 1 < block.end_panel()) return {place.panel + 1, block.step + step};
  if (block.end_step() < num_steps(op)) return {block.panel, block.end_step() + step};
  return {block.end_panel(), step};
}

template <class Code, class Lines>
void amx_project_stretches(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  constexpr int64_t kAheadSteps = kAheadBytes * kCodesPerByte<Code> / kTileK;
  constexpr bool kByRatios = std::is_same_v<Lines, RatioLines<Code>>;
  const bool whole_sums = scales_rows(op) || std::is_same_v<Lines, ScaledLines>;
  const int64_t shared = op.scales.block_columns;
  const int64_t sum_steps = whole_sums || kByRatios || shared > kStretch ? kStretchSteps : shared / kTileK;
  Stretch stretches[2];
  alignas(kCacheLine) float sums[4 * kSumSize];

  const auto multiply = [&](const Block& block, float* block_sums) {
    PanelScales panel_scales[2] = {{op, 0, false}, {op, 0, false}};
    const auto widening = [&](Place place, Stretch& stretch) {
      PanelScales& scales = panel_scales[place.panel % 2];
      if (place.step == block.step) scales = PanelScales(op, place.panel * kPanelColumns, false);
      const Place later = place_behind(op, block, place, kAheadSteps);
      return Widening<Code, Lines>(op, Lines(op, scales, place, stretch), place, later, stretch);
    };
    // The sums of up to two groups stay in their tiles along a panel.
    const bool stays = whole_sums && block.groups <= 2;
    // The totals of a panel = or += some steps of a stretch by all groups.
    const auto add_steps = [&](const Stretch& stretch, Place place, int64_t steps, const Float* of_sums, bool first,
                               float* totals, auto beside) {
      for (int64_t g = 0; g < block.groups; g += 2) {
        const BFloat16* numbers = stretch.tiles[place.step % kStretchSteps][0][0];
        const BFloat16* rows = packed_tile(op, block.group + g, place.step);
        float* total = totals + g * 2 * kSumSize;
        const auto run = [&](auto two_groups) {
          constexpr bool kTwoGroups = decltype(two_groups)::value;
          if (first || !whole_sums) {
            zero_sums();
          } else if (!stays || place.step == block.step) {
            load_sums<kTwoGroups>(total);
          }
          multiply_stretch<kTwoGroups>(numbers, rows, steps, beside);
          if (!whole_sums) {
            store_sums<kTwoGroups>(sums);
            add_scaled(kTwoGroups ? 2 : 1, sums, reinterpret_cast<const float*>(of_sums), first, total);
          } else if (!stays || place.step + steps == block.end_step()) {
            store_sums<kTwoGroups>(total);
          }
        };
        g + 1 < block.groups ? run(std::true_type{}) : run(std::false_type{});
      }
    };
    int64_t turn = 0;
    widening({block.panel, block.step}, stretches[0]).widen_until(kPanelColumns);
    for (int64_t panel = block.panel; panel < block.end_panel(); ++panel) {
      float* totals = block_sums + (panel - block.panel) * block_groups(op) * 2 * kSumSize;
      const PanelScales& scales = panel_scales[panel % 2];
      for (int64_t step = block.step; step < block.end_step(); step += kStretchSteps, turn ^= 1) {
        Stretch& stretch = stretches[turn];
        const int64_t steps = block.end_step() - step < kStretchSteps ? block.end_step() - step : kStretchSteps;
        const Place next = place_behind(op, block, {panel, step}, steps);
        Widening<Code, Lines> widen_next = widening(next, stretches[turn ^ 1]);
        const int64_t next_rows = next.panel < block.end_panel() && next.step < block.end_step() ? kPanelColumns : 0;
        const int64_t products = steps * ((block.groups + 1) / 2), share = (next_rows + products - 1) / products;
        int64_t done = 0;
        const auto beside = [&] { widen_next.widen_until(done += share); };
        Float of_sums[1][kStripVectors];
        if constexpr (kByRatios) {
          if (!stretch.has_ratios) {
            const Place here{panel, step};
            for (int64_t i = 0; i < num_blocks(op, step * kTileK); ++i) {
              Widening<Code, Lines>(op, Lines(op, i), here, here, stretch).widen_until(kPanelColumns);
              scales.read(step * kTileK / shared + i, 1, of_sums);
              add_steps(stretch, here, steps, of_sums[0], step + i == 0, totals, [] {});
            }
            widen_next.widen_until(next_rows);
            continue;
          }
        }
        for (int64_t part = step; part < step + steps; part += sum_steps) {
          const int64_t part_steps = step + steps - part < sum_steps ? step + steps - part : sum_steps;
          if (!whole_sums && !kByRatios) scales.read(part * kTileK / shared, 1, of_sums);
          add_steps(stretch, {panel, part}, part_steps, kByRatios ? stretch.scales : of_sums[0], part == 0, totals,
                    beside);
        }
      }
    }
  };
  const auto finish = [&](int64_t panel, int64_t group, int64_t groups, const float* totals) {
    if (!whole_sums) return finish_panel(op, panel, group, groups, totals, nullptr);
    const PanelScales scales(op, panel * kPanelColumns, false);
    Float of_column[1][kStripVectors] = {{Float{} + scales.global, Float{} + scales.global}};
    if (scales_rows(op)) scales.read(0, 1, of_column);
    finish_panel(op, panel, group, groups, totals, of_column[0]);
  };
  for_each_block(op, panel_begin, panel_end, kStretchSteps, multiply, finish);
}

template <class Code>
void amx_project_codes(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const NumberScales of_numbers = number_scales(op);
  if constexpr (std::is_same_v<Code, Float4E2M1>) {
    if (of_numbers == NumberScales::kE4M3) return amx_project_stretches<Code, ScaledLines>(op, panel_begin, panel_end);
  }
  if (of_numbers == NumberScales::kRatios) {
    return amx_project_stretches<Code, RatioLines<Code>>(op, panel_begin, panel_end);
  }
  amx_project_stretches<Code, PlainLines<Code>>(op, panel_begin, panel_end);
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
