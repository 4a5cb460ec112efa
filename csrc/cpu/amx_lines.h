// The lines of bf16 that AMX tiles are made of, widened from rows of a quantized weight: 128 columns of a row, a
// stretch, are kStretchSteps lines of 32 columns. Each class of lines has a Panel, which is what is read of the scales
// once per panel: whether sums go along whole rows, and the scales of those sums. widen returns whether numbers are
// rare (widen_bytes); such a row is widened again.
#pragma once

#include "project_amx.h"
#include "scales.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kStretch = kStretchSteps * kTileK;
static_assert(kStretch == kStripWidth);

inline bool scales_rows(const NormConcatLinear& op) { return op.scales.block_columns >= op.source.width; }

// The low and the high bytes of 64 codes in bf16. Only one unit shuffles, and a look-up among 128 bytes takes two
// shuffles: here only the few codes that need it are looked up (fp8_row, T = 8: 1.83 ms; 1.94 with all looked up).
struct NumberBytes {
  __m512i low, high;

  // For numbers that are neither 0 nor subnormal nor NaN.
  NumberBytes(__m512i codes, Float8E4M3) {
    // s eeee mmm has the exponent e + 120 in bf16. Its lowest bit and the mantissa are the code's; its upper 7 bits are
    // (e >> 1) + 60, which is 01111 or 10000, by the upper bit of e, before two more bits of e.
    low = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x0000000001020408), 0);
    high = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(0x1020404040404080), 0x3c);
  }

  NumberBytes(__m512i codes, Int8) {
    const __m512i magnitudes = _mm512_abs_epi8(codes), doubled = _mm512_add_epi8(magnitudes, magnitudes);
    // Magnitudes m of 64 to 127 are 0x4280 + 2 (m - 64).
    const __mmask64 below_64 = ~_mm512_movepi8_mask(doubled);
    const __m512i low_table = _mm512_load_si512(kLowBytes<Int8>.bytes);
    const __m512i high_table = _mm512_load_si512(kHighBytes<Int8>.bytes);
    low = _mm512_mask_permutexvar_epi8(doubled, below_64, magnitudes, low_table);
    high = _mm512_mask_permutexvar_epi8(_mm512_set1_epi8(0x42), below_64, magnitudes, high_table);
    // |-128| is looked up as 0 and must become 0x4300; this maximum leaves smaller magnitudes as they are.
    high = _mm512_max_epu8(high, _mm512_subs_epu8(magnitudes, _mm512_set1_epi8(128 - 0x43)));
    high = or_masked(high, codes, _mm512_set1_epi8(-128));
  }
};

// Widens 128 columns of a row of 8-bit codes to bf16; those from `left` on are zero. Unpacking takes 8 bytes of each
// quarter: where columns must keep their order (kInOrder), the codes are put in place for that before. Returns whether
// some numbers of e4m3 are rare, which is to say zero, subnormal or NaN: those are right only if kRare. Both lines are
// compared at once, since a comparison also takes the unit for shuffles.
template <class Code, bool kInOrder, bool kRare>
[[gnu::always_inline]] inline bool widen_bytes(const uint8_t* codes, int64_t left, __m512i (&lines)[kStretchSteps]) {
  const auto codes_of = [&](int64_t line) __attribute__((always_inline)) {
    const int64_t count = left - 64 * line;
    const __mmask64 there = count >= 64 ? ~0ull : count > 0 ? (1ull << count) - 1 : 0;
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i bytes = _mm512_maskz_loadu_epi8(there, codes + 64 * line);
    return kInOrder ? _mm512_permutexvar_epi64(order, bytes) : bytes;
  };
  const auto unpack = [&](const auto& first, const auto& second) __attribute__((always_inline)) {
    lines[0] = _mm512_unpacklo_epi8(first.low, first.high);
    lines[1] = _mm512_unpackhi_epi8(first.low, first.high);
    lines[2] = _mm512_unpacklo_epi8(second.low, second.high);
    lines[3] = _mm512_unpackhi_epi8(second.low, second.high);
  };
  const __m512i first = codes_of(0), second = codes_of(1);
  if constexpr (kRare) {
    unpack(CodeLine<Code>(first), CodeLine<Code>(second));
  } else {
    unpack(NumberBytes(first, Code{}), NumberBytes(second, Code{}));
  }
  if constexpr (std::is_same_v<Code, Float8E4M3>) {
    // The magnitudes of 0 and subnormal numbers are less than 8, that of NaN is 127.
    const auto rarity = [](__m512i codes) {
      return _mm512_sub_epi8(_mm512_add_epi8(codes, codes), _mm512_set1_epi8(16));
    };
    const __m512i rarest = _mm512_max_epu8(rarity(first), rarity(second));
    return _mm512_cmpge_epu8_mask(rarest, _mm512_set1_epi8(static_cast<char>(0xfe - 16))) != 0;
  }
  return false;
}

// Widens 64 columns of e2m1, in their order.
[[gnu::always_inline]] inline void widen_e2m1(const uint8_t* codes, int64_t count, __m512i* lines) {
  const __mmask32 there = count >= 64 ? ~0u : (1u << count / 2) - 1;
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutexvar_epi32(order, _mm256_maskz_loadu_epi8(there, codes));
  const __m512i pairs = _mm512_cvtepu8_epi16(bytes);
  // vpermw reads 5 bits of an index, and the table has all 16 codes twice.
  const __m512i table = _mm512_load_si512(kCodeTable<Float4E2M1>.bits);
  const __m512i even = _mm512_permutexvar_epi16(pairs, table);
  const __m512i odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), table);
  lines[0] = _mm512_unpacklo_epi16(even, odd);
  lines[1] = _mm512_unpackhi_epi16(even, odd);
}

// Where a stretch begins.
struct Place {
  int64_t panel, step;
};

constexpr int64_t kStepSize = kPage / sizeof(BFloat16);  // from a step's tiles to the next one's

// Numbers as they are.
template <class Code, bool kInOrder>
struct PlainLines {
  struct Panel : PanelScales {
    bool has_whole_sums;

    Panel() = default;
    Panel(const NormConcatLinear& op, int64_t panel)
        : PanelScales(op, panel * kPanelColumns, false), has_whole_sums(scales_rows(op)) {}
    void read_whole(Float (*scales)[kStripVectors]) const { read(0, 1, scales); }
  };
  PlainLines(const NormConcatLinear&, const Panel&, Place) {}

  template <bool kRare>
  [[gnu::always_inline]] bool widen(const uint8_t* codes, int64_t left, int64_t,
                                    __m512i (&lines)[kStretchSteps]) const {
    if constexpr (std::is_same_v<Code, Float4E2M1>) {
      unrolled<kStretchSteps / 2>([&](auto pair) {
        constexpr int64_t kBegin = pair * 2 * kTileK;
        if (left > kBegin) widen_e2m1(codes + bytes_of<Code>(kBegin), left - kBegin, lines + 2 * pair);
      });
      return false;
    } else {
      return widen_bytes<Code, kInOrder, kRare>(codes, left, lines);
    }
  }
};

// The numbers of e2m1 times each scale of e4m3, which bf16 represents exactly.
struct ScaledNumbers {
  alignas(kCacheLine) uint16_t bits[256][16];
  constexpr ScaledNumbers() {
    for (int scale = 0; scale < 256; ++scale) {
      for (int code = 0; code < 16; ++code) {
        const float value = Float8E4M3::value(scale) * Float4E2M1::value(code);
        bits[scale][code] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);
      }
    }
  }
};
constexpr ScaledNumbers kScaledNumbers{};

// Widens numbers of e2m1 times their scales of e4m3, for blocks of 16: they are looked up in a table of the products of
// two blocks' scales (nvfp4, T = 8: 1.9 ms; multiplied in fp32 2.7).
class ScaledLines {
 public:
  struct Panel : PanelScales {
    static constexpr bool has_whole_sums = true;

    Panel() = default;
    Panel(const NormConcatLinear& op, int64_t panel) : PanelScales(op, panel * kPanelColumns, false) {}
    void read_whole(Float (*scales)[kStripVectors]) const {
      for (Float& scale : *scales) scale = Float{} + global;
    }
  };
  ScaledLines(const NormConcatLinear& op, const Panel& panel, Place place)
      : rows_(panel.rows[0] + place.step * kTileK / kBlock), row_stride_(op.scales.row_stride) {}

  template <bool>
  [[gnu::always_inline]] bool widen(const uint8_t* codes, int64_t left, int64_t row,
                                    __m512i (&lines)[kStretchSteps]) const {
    const __mmask64 there = left >= kStretch ? ~0ull : (1ull << left / 2) - 1;
    const __m512i line = _mm512_maskz_loadu_epi8(there, codes);
    const uint8_t* scales = rows_ + row * row_stride_;
    // Word w is taken from byte w / 2, an odd word from its upper half. In the table the second block's products follow
    // the first one's.
    const __m512i pairs = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5,
                                           5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i shifts = _mm512_set1_epi32(4 << 16), second = _mm512_maskz_set1_epi16(0xffff0000, 16);
    unrolled<kStretchSteps>([&](auto i) __attribute__((always_inline)) {
      const auto numbers = [&](int64_t block) {
        const int scale = left > block * kBlock ? scales[block] : 0;
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(kScaledNumbers.bits[scale]));
      };
      const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(numbers(2 * i)), numbers(2 * i + 1), 1);
      const __m512i bytes = _mm512_permutexvar_epi8(_mm512_add_epi16(pairs, _mm512_set1_epi16(16 * i)), line);
      const __m512i codes_of_words = _mm512_srlv_epi16(bytes, shifts);
      lines[i] = _mm512_permutexvar_epi16(or_masked(second, codes_of_words, _mm512_set1_epi16(15)), table);
    });
    return false;
  }

 private:
  static constexpr int64_t kBlock = 16;

  const uint8_t* rows_;
  int64_t row_stride_;
};

// The numbers of e2m1 with +0 for -0, whose bits minus an exponent would not be zero.
struct PositiveZero {
  alignas(kCacheLine) uint16_t bits[32];
  constexpr PositiveZero() {
    for (int code = 0; code < 32; ++code) bits[code] = code % 8 == 0 ? 0 : kCodeTable<Float4E2M1>.bits[code % 16];
  }
};
constexpr PositiveZero kPositiveZero{};

// The smallest and the largest of some bytes.
inline void find_range(const uint8_t* bytes, int64_t count, uint32_t& smallest, uint32_t& largest) {
  __m512i least = _mm512_set1_epi8(-1), most{};
  for (int64_t i = 0; i < count; i += kCacheLine) {
    const __mmask64 there = count - i >= kCacheLine ? ~0ull : (1ull << (count - i)) - 1;
    const __m512i line = _mm512_maskz_loadu_epi8(there, bytes + i);
    least = _mm512_mask_min_epu8(least, there, least, line);
    most = _mm512_max_epu8(most, line);
  }
  // Reduces 64 bytes to the least, and inverted ones to the most. The bytes of a pair are compared first, since there
  // is an instruction for the least of 8 words.
  const auto least_of = [](__m512i values) {
    const __m256i half = _mm256_min_epu8(_mm512_castsi512_si256(values), _mm512_extracti64x4_epi64(values, 1));
    const __m128i quarter = _mm_min_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i words = _mm_min_epu8(quarter, _mm_srli_epi16(quarter, 8));
    const __m128i position = _mm_minpos_epu16(_mm_and_si128(words, _mm_set1_epi16(0xff)));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(position)) & 0xff;
  };
  smallest = least_of(least);
  largest = 255 - least_of(_mm512_xor_si512(most, _mm512_set1_epi8(-1)));
}

// Whether all of these codes are zero, of either sign.
template <class Code>
bool are_zero(const uint8_t* codes, int64_t bytes) {
  constexpr uint8_t kMagnitude = std::is_same_v<Code, Int8> ? 0xff : std::is_same_v<Code, Float4E2M1> ? 0x77 : 0x7f;
  uint8_t any = 0;
  for (int64_t i = 0; i < bytes; ++i) any |= codes[i] & kMagnitude;
  return any == 0;
}

// Widens numbers times the ratio of their scale to the largest of their row, which scales the row's sums. Ratios are
// powers of two, so the exponent of 1 / ratio is subtracted from the number's (mxfp8 and mxfp4, T = 8: 2.1 and 1.5 ms;
// multiplied in fp32 by the ratio to the largest of 128 columns 3.4 and 2.7). The tile unit takes subnormal numbers for
// zero: an output loses products below 2^-126 times its largest scale. Where a number that is not zero has a ratio
// below 2^-64, its panel is multiplied block by block, with zeros for the other blocks, which an infinite x makes NaN.
// (With e2m1 columns in order no zeros would be needed: mxfp4, T = 8 and 64, 2.0 and 4.5 ms instead of 1.7 and 3.7.)
template <class Code>
class RatioLines {
 public:
  struct Panel : PanelScales {
    static constexpr int64_t kPart = 16;  // blocks

    uint32_t largest[kPanelColumns];  // scale of each row
    bool has_whole_sums = true;
    int64_t part;
    alignas(kCacheLine) uint8_t exponents[kPanelColumns][kPart];  // of 1 / ratio, in `part`

    Panel() = default;
    Panel(const NormConcatLinear& op, int64_t panel) : PanelScales(op, panel * kPanelColumns, false), part(-1) {
      constexpr uint32_t kMaxSpread = 64, kNan = 255;
      const int64_t shared = op.scales.block_columns, blocks = (op.source.width - 1) / shared + 1;
      const int64_t columns = op.num_columns - panel * kPanelColumns;
      const auto* codes = static_cast<const uint8_t*>(op.weight) + panel * kPanelColumns * op.weight_row_stride;
      uint32_t smallest = 0;
      for (int64_t i = 0; i < kPanelColumns; ++i, codes += op.weight_row_stride) {
        const bool same = i > 0 && rows[i] == rows[i - 1];
        if (same) largest[i] = largest[i - 1];
        if (!same) find_range(rows[i], blocks, smallest, largest[i]);
        if (largest[i] == kNan || largest[i] - smallest <= kMaxSpread || i >= columns) continue;
        for (int64_t block = 0; block < blocks && has_whole_sums; ++block) {
          const int64_t left = op.source.width - block * shared, count = left < shared ? left : shared;
          const bool is_far = largest[i] - rows[i][block] > kMaxSpread;
          has_whole_sums = !is_far || are_zero<Code>(codes + bytes_of<Code>(block * shared), bytes_of<Code>(count));
        }
      }
    }
    void read_part(int64_t to_read, int64_t blocks) {
      part = to_read;
      const int64_t first = part * kPart, left = blocks - first;
      const __mmask16 there = static_cast<__mmask16>(left >= kPart ? 0xffff : (1 << left) - 1);
      for (int64_t i = 0; i < kPanelColumns; ++i) {
        const __m128i bytes = _mm_maskz_loadu_epi8(there, rows[i] + first);
        const __m128i most = _mm_set1_epi8(static_cast<char>(largest[i]));
        _mm_store_si128(reinterpret_cast<__m128i*>(exponents[i]), _mm_sub_epi8(most, bytes));
      }
    }
    void read_whole(Float (*scales)[kStripVectors]) const {
      for (int64_t v = 0; v < kStripVectors; ++v) {
        UInt lanes;
        __builtin_memcpy(&lanes, largest + v * kLanes, sizeof lanes);
        scales[0][v] = value_of(lanes, Float8E8M0{}) * global;
      }
    }
  };

  RatioLines(const NormConcatLinear& op, Panel& panel, Place place) {
    const int64_t shared = op.scales.block_columns, block = place.step * kTileK / shared;
    if (panel.part != block / Panel::kPart) panel.read_part(block / Panel::kPart, (op.source.width - 1) / shared + 1);
    // Each quarter has the exponents of one row, by block; they are spread to one for each step.
    const __m512i steps = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 1, 2, 3));
    const __m512i blocks = _mm512_srli_epi32(steps, shared == kTileK ? 0 : 1);
    const __m512i bytes = _mm512_add_epi32(blocks, _mm512_set1_epi32(0x80808000 | block % Panel::kPart));
    for (int64_t row = 0; row < kPanelColumns; row += 4) {
      const UInt exponents = (UInt)_mm512_shuffle_epi8(_mm512_load_si512(panel.exponents[row]), bytes);
      const UInt less = exponents << 7 | exponents << 23;
      __builtin_memcpy(less_[row], &less, sizeof less);
    }
  }
  // Leaves one block of a stretch as it is and makes the others zero.
  RatioLines(const NormConcatLinear& op, int64_t block) {
    for (auto& less : less_) {
      for (int64_t i = 0; i < kStretchSteps; ++i) less[i] = i * kTileK / op.scales.block_columns == block ? 0 : kZero;
    }
  }

  template <bool kRare>
  [[gnu::always_inline]] bool widen(const uint8_t* codes, int64_t left, int64_t row,
                                    __m512i (&lines)[kStretchSteps]) const {
    const uint32_t* less = less_[row];
    if constexpr (std::is_same_v<Code, Float4E2M1>) {
      const __mmask64 there = left >= kStretch ? ~0ull : (1ull << left / 2) - 1;
      const __m512i line = _mm512_maskz_loadu_epi8(there, codes);
      const __m512i block_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      const __m512i of_blocks = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(less)));
      const __m512i less_of_lane = _mm512_permutexvar_epi32(block_of_lane, of_blocks);
      const __m512i table = _mm512_load_si512(kPositiveZero.bits);
      unrolled<kStretchSteps>([&](auto i) {
        const __m512i numbers = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4 * i), table);
        lines[i] = _mm512_subs_epu16(numbers, less_of_lane);
      });
      return false;
    } else {
      const bool is_rare = widen_bytes<Code, true, kRare>(codes, left, lines);
      unrolled<kStretchSteps>([&](auto i) __attribute__((always_inline)) {
        if (std::is_same_v<Code, Float8E4M3> && !kRare) {
          lines[i] = _mm512_subs_epu16(lines[i], _mm512_set1_epi32(less[i]));
        } else {
          lines[i] = (__m512i)scaled((UInt)lines[i], Float{} + ratio(less[i]));
        }
      });
      return is_rare;
    }
  }

 private:
  static constexpr uint32_t kZero = 0xffffffff;  // subtraction saturates at zero

  static float ratio(uint32_t less) {
    const uint32_t exponent = less >> 23 & 0xff;
    return exponent < 127 ? __builtin_bit_cast(float, (127 - exponent) << 23) : 0.0f;
  }

  alignas(kCacheLine) uint32_t less_[kPanelColumns][kStretchSteps];  // the exponent of 1 / ratio, in both halves
};

// Widens bf16 in 12 bits exactly; the few numbers that have no code are put in their places afterwards.
class ExactLines {
 public:
  struct Panel : PanelScales {
    static constexpr bool has_whole_sums = true;

    RowExponents of_row[kPanelColumns];

    Panel() = default;
    Panel(const NormConcatLinear& op, int64_t panel) {
      for (int64_t i = 0; i < kPanelColumns && panel * kPanelColumns + i < op.num_columns; ++i) {
        of_row[i] = exponents_of(op, panel * kPanelColumns + i);
      }
    }
    void read_whole(Float (*scales)[kStripVectors]) const {
      for (Float& scale : *scales) scale = Float{} + 1.0f;
    }
  };
  ExactLines(const NormConcatLinear&, Panel& panel, Place place) : panel_(panel), begin_(place.step * kTileK) {}

  template <bool>
  [[gnu::always_inline]] bool widen(const uint8_t* codes, int64_t left, int64_t row,
                                    __m512i (&lines)[kStretchSteps]) const {
    widen_group(codes, ExponentTables(panel_.of_row[row]), lines);
    if (left >= kStretch) return false;
    // Past the width there may be a NaN, which zeros of the packed rows would not cancel.
    unrolled<kStretchSteps>([&](auto i) {
      const int64_t count = left - i * kTileK;
      const __mmask32 there = count >= kTileK ? ~0u : count > 0 ? (1u << count) - 1 : 0;
      lines[i] = _mm512_maskz_mov_epi16(there, lines[i]);
    });
    return false;
  }

  // A panel is widened once, from its beginning to its end, so of_row.begin only moves forward.
  [[gnu::always_inline]] void put_exceptions(int64_t row, BFloat16* line) const {
    RowExponents& of_row = panel_.of_row[row];
    for (; of_row.begin != of_row.end && of_row.begin->column() < begin_ + kStretch; ++of_row.begin) {
      const int64_t column = of_row.begin->column() - begin_;
      if (column >= 0) line[column / kTileK * kStepSize + column % kTileK] = of_row.begin->number();
    }
  }

 private:
  Panel& panel_;
  int64_t begin_;
};

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
