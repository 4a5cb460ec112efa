// The projection of a quantized weight by rows of bf16, where the processor multiplies bf16 (vdpbf16ps): dot products
// along K*H. The rows of the weight stream as they are in the checkpoint.
//
// Codes are widened to bf16 in registers and are not reordered: instead the packed rows have their columns in the order
// in which widening leaves them. A lane sums the products of a unit of 512 columns, or of those columns of it that
// share a scale, and the sum times its scale is added to the lane's fp32 total: so the range and the NaN of a scale are
// those of fp32. What a lane has of a line of codes is in one block, since blocks have 16 columns or more: one vector
// of scales serves the whole line, and with 4-bit codes, 8 columns a lane, two lines.
#pragma once

#include "project_dot.h"
#include "widen_codes.h"

#if defined(__AVX512BF16__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kUnitColumns = 512;  // of the weight

// A line: 64 bytes of codes, which become kWords vectors.
template <class Code>
constexpr int64_t kLineColumns = kCacheLine * kCodesPerByte<Code>;
template <class Code>
constexpr int64_t kLines = kUnitColumns / kLineColumns<Code>;
template <class Code>
constexpr int64_t kWords = 2 * kCodesPerByte<Code>;

// What shares a scale: rows, blocks of 128 columns or a multiple, or blocks of 16, 32 or 64.
enum class Sharing { kRow, kWideBlock, kNarrowBlock };

// Lines that exchange lanes, so that a lane has all columns of a block of 16: then one sum is scaled for 8 products,
// not for 4 (nvfp4, T = 1, 4 and 8: 1.2, 1.6 and 2.8 ms; without 1.7, 1.9 and 3.4).
template <class Code, Sharing kSharing>
constexpr int64_t kGroupLines = kSharing == Sharing::kRow ? 1 : kCodesPerByte<Code>;

// Lines whose products make one sum.
template <class Code, Sharing kSharing>
constexpr int64_t kSumLines = kSharing == Sharing::kRow                                   ? kLines<Code>
                              : kSharing == Sharing::kWideBlock || kCodesPerByte<Code> > 1 ? 2
                                                                                           : 1;

// In a group of two lines the even lanes move to the first line, the odd ones to the second.
template <int64_t kGroup>
inline void order_group(__m512i* lines) {
  if constexpr (kGroup == 2) {
    const __m512 first = (__m512)lines[0], second = (__m512)lines[1];
    lines[0] = (__m512i)_mm512_shuffle_ps(first, second, 0x88);
    lines[1] = (__m512i)_mm512_shuffle_ps(first, second, 0xdd);
  }
}
// The lane of a group that moves to `lane` of its first line.
template <int64_t kGroup>
constexpr int64_t source_of(int64_t lane) {
  return kGroup == 1 ? lane : lane % 4 / 2 * kLanes + lane / 4 * 4 + lane % 2 * 2;
}

// Whole units, and an odd number of cache lines (project_dot.h).
inline int64_t codes_packed_width(const NormConcatLinear& op) {
  return round_up(op.source.width, kUnitColumns) + kCacheLine / static_cast<int64_t>(sizeof(BFloat16));
}

inline int64_t codes_workspace(const NormConcatLinear& op) {
  return fp32_rows_bytes(op) + op.num_rows * codes_packed_width(op) * sizeof(BFloat16);
}

// Puts the columns of a line, 32 in a vector, into the order of CodeLine's words.
template <class Code>
inline void order_line(__m512i (&line)[kWords<Code>]) {
  if constexpr (kCodesPerByte<Code> == 1) {  // columns 16 q to 16 q + 7 of quarter q, then the other 8
    const __m512i first = _mm512_shuffle_i32x4(line[0], line[1], 0x88);
    line[1] = _mm512_shuffle_i32x4(line[0], line[1], 0xdd);
    line[0] = first;
  } else {  // columns 8 i + j and 8 i + j + 4 of lane i, in word j
    const __m512i pairs =
        _mm512_broadcast_i32x4(_mm_setr_epi16(0x0100, 0x0908, 0x0302, 0x0b0a, 0x0504, 0x0d0c, 0x0706, 0x0f0e));
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i quarters[4];
    unrolled<4>([&](auto i) { line[i] = _mm512_shuffle_epi8(line[i], pairs); });
    transpose_in_quarters(line, quarters);
    unrolled<4>([&](auto i) { line[i] = _mm512_permutexvar_epi32(lanes, quarters[i]); });
  }
}

// The same for a packed row, which has whole groups of kGroup lines.
template <class Code, int64_t kGroup>
inline void order_row(BFloat16* row, int64_t width) {
  constexpr int64_t kColumns = kLineColumns<Code> / kLanes;  // of a lane
  for (int64_t k = 0; k < width; k += kGroup * kLineColumns<Code>) {
    BFloat16 lanes[kGroup * kLanes][kColumns];
    __builtin_memcpy(lanes, row + k, sizeof lanes);
    for (int64_t i = 0; i < kGroup; ++i) {
      BFloat16 ordered[kLanes][kColumns];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        __builtin_memcpy(ordered[lane], lanes[source_of<kGroup>(lane) + i], sizeof ordered[lane]);
      }
      __m512i line[kWords<Code>];
      __builtin_memcpy(line, ordered, sizeof line);
      order_line<Code>(line);
      __builtin_memcpy(row + k + i * kLineColumns<Code>, line, sizeof line);
    }
  }
}

// Calls f(code{}, integral_constant<Sharing>{}) for the codes and scales of the op.
template <class F>
void with_sharing(const NormConcatLinear& op, F f) {
  const int64_t block = op.scales.block_columns;
  with_code(op.weight_type, [&](auto code) {
    if (block >= op.source.width) return f(code, std::integral_constant<Sharing, Sharing::kRow>{});
    if (block >= 128) return f(code, std::integral_constant<Sharing, Sharing::kWideBlock>{});
    f(code, std::integral_constant<Sharing, Sharing::kNarrowBlock>{});
  });
}

inline void codes_pack(const NormConcatLinear& op, int64_t row_begin, int64_t row_end) {
  const int64_t width = codes_packed_width(op);
  dot_pack<BFloat16>(op, row_begin, row_end, width);
  with_sharing(op, [&](auto code, auto sharing) {
    for (int64_t i = row_begin; i < row_end; ++i) {
      using Code = decltype(code);
      order_row<Code, kGroupLines<Code, sharing>>(packed_rows<BFloat16>(op) + i * width, op.source.width);
    }
  });
}

// Packed rows that share each widened code: 16 sums and the words of two rows of the weight fit in 32 registers.
constexpr int64_t kDotRows = 8;

// Columns of the output that share each unit of those packed rows, which takes 8 KB of L1; their totals take 6 KB.
constexpr int64_t kBlockColumns = 12;
// Rows of the weight in a register tile. 120 columns of fp8_row from the cache, in us, with 2, 3, 4, 5 of them: T = 4
// 71, 68, 71, 88 (sums leave the registers); T = 8 with 1, 2, 3: 157, 126, 139. With groups of lines 2 of them: more
// would be a burst of loads (nvfp4, T = 1, one thread, with 6, 3, 2, 1: 2.2, 1.7, 1.4, 1.5 ms).
template <int64_t kGroup>
constexpr int64_t tile_columns(int64_t rows) {
  if (kGroup > 1) return 2;
  return rows == 1 ? 6 : rows == 2 ? 4 : rows <= 4 ? 3 : 2;
}

// The scales of a unit, at most 32, for blocks of 16 columns: in fp32, or all in the first vector as bf16, which
// represents every 8-bit scale and is the upper half of an fp32 number.
struct UnitScales {
  __m512i first, second;
};

inline __m512i bf16_of(__m512i codes, Float8E8M0) {
  const __mmask32 odd = _mm512_cmpge_epu16_mask(_mm512_sub_epi16(codes, _mm512_set1_epi16(1)), _mm512_set1_epi16(254));
  const __m512i bits = _mm512_slli_epi16(codes, 7);  // codes 0 and 255, 2^-127 and NaN, give 0 and infinity
  return _mm512_or_si512(bits, _mm512_maskz_set1_epi16(odd, 0x40));
}
inline __m512i bf16_of(__m512i codes, Float8E4M3) {
  const __m512i magnitudes = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
  const __mmask32 small = _mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16(8));
  const __mmask32 nan = _mm512_cmpeq_epu16_mask(magnitudes, _mm512_set1_epi16(0x7f));
  __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitudes, 4), _mm512_set1_epi16(120 << 7));
  bits = _mm512_mask_permutexvar_epi16(bits, small, magnitudes, _mm512_load_si512(kCodeTable<Float8E4M3>.bits));
  bits = _mm512_mask_mov_epi16(bits, nan, _mm512_set1_epi16(0x7fc0));
  return or_masked(bits, _mm512_slli_epi16(codes, 8), _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
}

// Reads the scales of a row of the weight, and spreads them over the lanes of a sum.
template <class Code, Sharing kSharing>
struct ScaleReader {
  static constexpr int64_t kSum = kSumLines<Code, kSharing>, kSums = kLines<Code> / kSum;

  ScaleType type;
  // Scales in fp32 are read times this one: applied to their sums one after the other, 1e37 and 1e-37 would overflow.
  float global;
  int64_t width, block_columns, num_blocks, next_rows;
  int64_t first = 0;   // the unit's first block
  uint32_t there = 0;  // mask: of the 32 from there on, those that the row has
  UInt block_of_lane[kSums];  // counted from `first`, in both halves

  explicit ScaleReader(const NormConcatLinear& op)
      : type(op.scales.type),
        global(op.scales.global == nullptr ? 1.0f : *op.scales.global),
        width(op.source.width),
        block_columns(op.scales.block_columns),
        num_blocks((op.source.width - 1) / op.scales.block_columns + 1),
        next_rows(kBlockColumns / op.scales.block_rows * op.scales.row_stride) {
    begin_unit(0);
  }

  // Moves on to the unit that begins at column k.
  void begin_unit(int64_t k) {
    first = k / block_columns;
    const int64_t left = num_blocks - first;
    there = left >= 2 * kLanes ? ~0u : (1u << left) - 1;
    const bool as_in_unit_0 = kUnitColumns % block_columns == 0 || block_columns % kUnitColumns == 0;
    if (k == 0 || !as_in_unit_0) find_blocks(k % block_columns);
    if (k + kUnitColumns > width) leave_out_lanes(static_cast<uint32_t>(width - k), static_cast<uint32_t>(left));
  }

  // What the sums are still to be multiplied by.
  float left_to_multiply() const { return type == ScaleType::kFloat32 ? 1.0f : global; }
  [[gnu::always_inline]] UnitScales read(const uint8_t* row) const {
    __builtin_prefetch(row + (first + next_rows) * size(), 0, 2);  // those of the rows of the next block of columns
    if (type == ScaleType::kFloat32) return {load_floats(row, 0), load_floats(row, kLanes)};
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(there, row + first));
    return {type == ScaleType::kFloat8E8M0 ? bf16_of(codes, Float8E8M0{}) : bf16_of(codes, Float8E4M3{}), __m512i{}};
  }
  int64_t size() const { return type == ScaleType::kFloat32 ? sizeof(float) : 1; }
  Float of_sum(const UnitScales& scales, int64_t sum) const {
    const auto block = (__m512i)block_of_lane[sum];
    if (type == ScaleType::kFloat32) return (Float)_mm512_permutex2var_epi32(scales.first, block, scales.second);
    return (Float)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, block, scales.first);
  }

 private:
  static constexpr int64_t place_of(int64_t sum, int64_t lane) {
    return sum * kSum * kLanes + source_of<kGroupLines<Code, kSharing>>(lane);
  }
  // The lanes' first columns in a unit; with 8-bit codes the order is that of order_line.
  struct FirstColumns {
    alignas(kCacheLine) uint32_t of_lane[kSums][kLanes] = {};
    constexpr FirstColumns() {
      for (int64_t sum = 0; sum < kSums; ++sum) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          const int64_t place = place_of(sum, lane);
          const int64_t column = kCodesPerByte<Code> > 1 ? place * 8 : place / 4 * 16 + place % 4 * 2;
          of_lane[sum][lane] = static_cast<uint32_t>(column);
        }
      }
    }
  };
  static constexpr FirstColumns kFirstColumns{};

  void find_blocks(int64_t begin) {
    for (int64_t sum = 0; sum < kSums; ++sum) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t column = begin + place_of(sum, lane) * kLineColumns<Code> / kLanes;
        block_of_lane[sum][lane] = static_cast<uint32_t>(column / block_columns) * 0x10001;
      }
    }
  }

  // Lanes that begin at this column or later are past the row's end: they get the scale behind the last block, which is
  // read as 0 (of at most 32: a unit has 16 blocks of 8-bit codes at most, and rows of 4-bit codes end with a block).
  // With the last block's scale, 0 * infinity would be NaN.
  void leave_out_lanes(uint32_t columns, uint32_t blocks) {
    for (int64_t sum = 0; sum < kSums; ++sum) {
      UInt first_columns;
      __builtin_memcpy(&first_columns, kFirstColumns.of_lane[sum], sizeof first_columns);
      block_of_lane[sum] = first_columns < columns ? block_of_lane[sum] : UInt{} + blocks * 0x10001;
    }
  }

  __m512i load_floats(const uint8_t* row, int64_t begin) const {
    const auto mask = static_cast<__mmask16>(there >> begin);
    const __m512 floats = _mm512_maskz_loadu_ps(mask, row + (first + begin) * sizeof(float));
    return (__m512i)_mm512_maskz_mul_ps(mask, floats, _mm512_set1_ps(global));
  }
};

// How far ahead of the products codes are prefetched, in each row (fp8_row, T = 1, without packing: 512 columns
// 0.99 ms, 1024 0.86, 2048 0.92), and a line at a time: a burst of prefetches stalls the loads after it (2.6 ms). Into
// L2: rows of 12288 codes begin in one set of L1, which has no room for the lines of twelve (fp8_row, T = 4 and 8, two
// cores: into L2 1.57 and 2.59 ms, into L1 1.88 and 2.78).
template <class Code>
constexpr int64_t kAheadColumns = 2 * kUnitColumns * kCodesPerByte<Code>;

// The lanes of kRows x kColumns totals += those of the products of a unit, times their scales. codes[column] is a row's
// codes, later[column] what is prefetched of it; `scale_of(column, i)` has the scales of sum i; x[row] is a packed row.
// Inlined with the reading of the scales, whose constants else cost six shuffles a row (nvfp4, T = 1: 1.46 ms, inlined
// 1.36).
template <class Code, Sharing kSharing, int64_t kColumns, int64_t kRows, class ScaleOf>
[[gnu::always_inline]] inline void multiply_unit(const uint8_t* const* codes, const uint8_t* const* later,
                                                 ScaleOf scale_of, const BFloat16* const* x, Float* totals) {
  // The totals of one row stay in registers; with four rows that is 5 to 12 % slower.
  Float of_one_row[kColumns], *place = kRows == 1 ? of_one_row : totals;
  if (kRows == 1) __builtin_memcpy(of_one_row, totals, sizeof of_one_row);
  constexpr int64_t kGroup = kGroupLines<Code, kSharing>, kSum = kSumLines<Code, kSharing>;
  for (int64_t first = 0; first < kLines<Code>; first += kSum) {
    // Without this GCC 12 keeps totals in registers and the sums of 8 rows in memory (1.5 cycles a product, with 1.25).
    if (kGroup > 1 && kRows > 2) asm volatile("" : : "r"(place) : "memory");
    Float sums[kRows * kColumns] = {};
    for (int64_t i = first; i < first + kSum; i += kGroup) {
      __m512i group[kColumns][kGroup];
      unrolled<kColumns>([&](auto column) {
        unrolled<kGroup>([&](auto line) {
          group[column][line] = _mm512_loadu_si512(codes[column] + (i + line) * kCacheLine);
        });
        order_group<kGroup>(group[column]);
      });
      const auto multiply_line = [&](auto line) __attribute__((always_inline)) {
        // Not in its own lambda: GCC 12 drops calls that only prefetch (AMX machine, int8_row, T = 1: 2.42 ms, here
        // 2.01).
        for (int64_t column = 0; column < kColumns; ++column) {
          __builtin_prefetch(later[column] + (i + line) * kCacheLine, 0, 2);
        }
        CodeLine<Code> lines[kColumns];
        unrolled<kColumns>([&](auto column) { lines[column] = CodeLine<Code>(group[column][line]); });
        unrolled<kWords<Code>>([&](auto part) __attribute__((always_inline)) {
          __m512bh words[kColumns];
          unrolled<kColumns>([&](auto column) { words[column] = (__m512bh)lines[column].word(part); });
          unrolled<kRows>([&](auto row) __attribute__((always_inline)) {
            const BFloat16* value = x[row] + ((i + line) * kWords<Code> + part) * 2 * kLanes;
            const __m512i values = _mm512_load_si512(value);
            unrolled<kColumns>([&](auto column) {
              Float& sum = sums[row * kColumns + column];
              sum = (Float)_mm512_dpbf16_ps((__m512)sum, words[column], (__m512bh)values);
            });
          });
        });
      };
      unrolled<kGroup>(multiply_line);
    }
    unrolled<kColumns>([&](auto column) {
      if constexpr (kSharing == Sharing::kRow) {
        unrolled<kRows>([&](auto row) { place[row * kBlockColumns + column] += sums[row * kColumns + column]; });
      } else {
        const Float scale = scale_of(column, first / kSum);
        unrolled<kRows>([&](auto row) {
          place[row * kBlockColumns + column] += sums[row * kColumns + column] * scale;
        });
      }
    });
  }
  if (kRows == 1) __builtin_memcpy(totals, of_one_row, sizeof of_one_row);
}

// Up to kDotRows packed rows times rows of the weight.
template <class Code, Sharing kSharing>
struct CodesProjection {
  const NormConcatLinear& op;
  int64_t row_begin = 0, rows = 0;
  ScaleReader<Code, kSharing> scales{op};
  Float totals[kDotRows * kBlockColumns] = {};
  // For each of a block of columns; past its end those of the last one.
  const uint8_t* code_rows[kBlockColumns] = {};
  const uint8_t* scale_rows[kBlockColumns] = {};

  const uint8_t* codes_of(int64_t d) const {
    return static_cast<const uint8_t*>(op.weight) + d * op.weight_row_stride;
  }
  const uint8_t* scales_of(int64_t d) const {
    const int64_t row = d / op.scales.block_rows;
    return static_cast<const uint8_t*>(op.scales.data) + row * op.scales.row_stride * scales.size();
  }

  // Copies the last unit of a row of codes, zero past the width.
  void load_last_unit(const uint8_t* codes, int64_t k, __m512i* place) const {
    const int64_t bytes = (op.source.width - k) / kCodesPerByte<Code>;
    for (int64_t line = 0; line < kLines<Code>; ++line) {
      const int64_t left = bytes - line * kCacheLine;
      const __mmask64 there = left >= kCacheLine ? ~0ull : left > 0 ? (1ull << left) - 1 : 0;
      place[line] = _mm512_maskz_loadu_epi8(there, codes + line * kCacheLine);
    }
  }

  // Offset in a row of codes of what is prefetched at column k: past its end, in a row of the next block of columns.
  int64_t bytes_to_later(int64_t k) const {
    const int64_t later = k + kAheadColumns<Code>, width = op.source.width;
    return later < width ? later / kCodesPerByte<Code>
                         : kBlockColumns * op.weight_row_stride + (later - width) / kCodesPerByte<Code>;
  }

  // Multiplies the unit from column k of the weight on, for the first columns of a block. kOneScale: those share their
  // scales, which are then spread over lanes once for a register tile (blocks of 128 x 128, T = 1: 1.49 ms, else 1.62).
  template <int64_t kRows, bool kOneScale>
  void multiply(int64_t columns, int64_t k) {
    constexpr int64_t kColumns = tile_columns<kGroupLines<Code, kSharing>>(kRows);
    static_assert(kBlockColumns % kColumns == 0);
    const BFloat16* x[kRows];
    unrolled<kRows>([&](auto row) {  // past the last row that one again, whose totals nobody reads
      const int64_t i = row_begin + (row < rows ? row : rows - 1);
      x[row] = packed_rows<BFloat16>(op) + i * codes_packed_width(op) + k;
    });
    const bool is_last = k + kUnitColumns > op.source.width;
    const int64_t to_unit = k / kCodesPerByte<Code>, to_later = bytes_to_later(k);
    for (int64_t first = 0; first < columns; first += kColumns) {
      __m512i last_unit[kColumns][kLines<Code>];
      UnitScales scales_of_unit[kColumns];
      const uint8_t *codes[kColumns], *later[kColumns];
      unrolled<kColumns>([&](auto column) {
        codes[column] = code_rows[first + column] + to_unit;
        later[column] = code_rows[first + column] + to_later;
        if (is_last) {
          load_last_unit(codes[column], k, last_unit[column]);
          codes[column] = reinterpret_cast<const uint8_t*>(last_unit[column]);
        }
        if constexpr (kSharing != Sharing::kRow) {
          if (!kOneScale || column == 0) scales_of_unit[column] = scales.read(scale_rows[first + column]);
        }
      });
      multiply_unit<Code, kSharing, kColumns, kRows>(
          codes, later,
          [&](auto column, int64_t i) { return scales.of_sum(scales_of_unit[kOneScale ? 0 : column()], i); }, x,
          totals + first);
    }
  }

  template <bool kOneScale>
  void multiply(int64_t columns, int64_t k) {
    if (rows == 1) {
      multiply<1, kOneScale>(columns, k);
    } else if (rows == 2) {
      multiply<2, kOneScale>(columns, k);
    } else if (rows <= 4) {
      multiply<4, kOneScale>(columns, k);
    } else {
      multiply<kDotRows, kOneScale>(columns, k);
    }
  }

  static constexpr bool kMayHaveOneScale = kSharing == Sharing::kWideBlock;

  // Computes columns [begin, end) of the output, at most kBlockColumns, of `num` rows from `first` on.
  void run(int64_t first, int64_t num, int64_t begin, int64_t end) {
    row_begin = first, rows = num;
    __builtin_memset(totals, 0, sizeof totals);
    for (int64_t column = 0; column < kBlockColumns; ++column) {
      const int64_t d = begin + column < end ? begin + column : end - 1;
      code_rows[column] = codes_of(d);
      scale_rows[column] = scales_of(d);
    }
    for (int64_t k = 0; k < op.source.width; k += kUnitColumns) {
      if constexpr (kSharing != Sharing::kRow) scales.begin_unit(k);
      if (kMayHaveOneScale && scale_rows[0] == scale_rows[kBlockColumns - 1]) {
        multiply<kMayHaveOneScale>(end - begin, k);
      } else {
        multiply<false>(end - begin, k);
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      Float* of_row = totals + i * kBlockColumns;
      sum_lanes_of_each<kBlockColumns>(of_row);
      if (kSharing != Sharing::kRow) of_row[0] *= scales.left_to_multiply();
      float* result = fp32_rows(op) + (row_begin + i) * op.num_columns;
      __builtin_memcpy(result + begin, of_row, (end - begin) * sizeof(float));
    }
    if constexpr (kSharing == Sharing::kRow) {
      for (int64_t d = begin; d < end; ++d) {
        const float scale = scales.of_sum(scales.read(scale_rows[d - begin]), 0)[0] * scales.left_to_multiply();
        for (int64_t i = row_begin; i < row_begin + rows; ++i) fp32_rows(op)[i * op.num_columns + d] *= scale;
      }
    }
  }
};

inline void codes_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const int64_t columns_end = panel_end * kPanelColumns < op.num_columns ? panel_end * kPanelColumns : op.num_columns;
  with_sharing(op, [&](auto code, auto sharing) {
    CodesProjection<decltype(code), sharing> projection{op};
    for (int64_t begin = panel_begin * kPanelColumns; begin < columns_end; begin += kBlockColumns) {
      const int64_t end = begin + kBlockColumns < columns_end ? begin + kBlockColumns : columns_end;
      for (int64_t row = 0; row < op.num_rows; row += kDotRows) {
        projection.run(row, op.num_rows - row < kDotRows ? op.num_rows - row : kDotRows, begin, end);
      }
    }
    const int64_t begin = panel_begin * kPanelColumns;
    const bool is_finished = op.post_norm_gain.data != nullptr && op.bias.data == nullptr;
    if (is_finished) return;
    finish_columns<BFloat16>(op, {0, op.num_rows}, begin, columns_end, fp32_rows(op) + begin, op.num_columns);
  });
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
