// The projection with AVX-512 of a weight of codes by more rows than project_strips.h takes, and of many rows by any
// other weight.
//
// The lanes of a sum are rows of the input, so the weight is not transposed: a number of it, in bf16 a pair, is
// broadcast from L1 and multiplies 16 rows. While one strip of a panel is multiplied, the next one is widened into L1
// as its rows lie in memory. Strips whose columns are in the lanes take 4 shuffles for 64 bytes of the weight, which do
// not hide behind the products of more rows than 12. K=3, H=D=4096, two cores of an AMD EPYC that starts two 512-bit
// products a cycle, medians in ms by strips and by lanes, T = 16, 32, 64 and 128: bf16 4.2, 4.7, 8.5, 16.2 and 2.8,
// 4.2, 7.5, 14.6; T = 16, 32 and 64: fp8_row 2.8, 4.8, 8.9 and 2.4, 3.9, 7.6, mxfp4 2.8, 4.8, 8.5 and 2.6, 4.1, 7.8.
//
// A sum has the columns of the weight, in their order, and the scales that it has in project_strips.h: a row has the
// same bits there.
//
// Packed rows: [strip][group of 16 rows][column of the strip, in bf16 pair of columns][row of the group], in the type
// they are multiplied in; zero past the width and past the last row.
#pragma once

#include "pack_groups.h"
#include "strips.h"

#if defined(__AVX512F__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// Columns of one broadcast: a pair of numbers in bf16, or a number in fp32.
template <class Packed>
constexpr int64_t kBroadcastColumns = std::is_same_v<Packed, BFloat16> ? 2 : 1;

// sum += number . x, for 16 rows.
inline Float multiply_add_rows(Float sum, const float* number, Float x) { return sum + *number * x; }
inline Float load_rows(const float* x) { return load(x, Whole{}); }
#if defined(__AVX512BF16__)
inline Float multiply_add_rows(Float sum, const BFloat16* pair, __m512i x) {
  int32_t bits;
  __builtin_memcpy(&bits, pair, sizeof bits);
  return (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)_mm512_set1_epi32(bits));
}
inline __m512i load_rows(const BFloat16* x) { return _mm512_load_si512(x); }
#endif

// Where widening, a line of 64 bytes at a time, leaves column k of a row, where a lane of codes begins. The lane's
// number i (in bf16 pair i) is i times kLanes broadcasts further on.
template <class Code, class Packed>
uint64_t place_of(uint64_t k) {
  constexpr uint64_t kLineColumns = kLanes * kCodesPerLane<Code>;
  return k / kLineColumns * kLineColumns + k % kLineColumns / kCodesPerLane<Code> * kBroadcastColumns<Packed>;
}

// Words of two numbers in bf16, as they are multiplied.
inline void store_words(UInt words, BFloat16* place) { _mm512_store_si512(place, (__m512i)words); }
inline void store_words(UInt words, float* place) {
  store(place, (Float)(words << 16), Whole{});
  store(place + kLanes, (Float)(words & 0xffff0000), Whole{});
}

// The rows of a panel, which are widened into a strip a line at a time.
template <class T, class Code>
struct PanelRows {
  using Packed = typename DotStep<T>::Packed;
  static constexpr int64_t kLineBytes = kCacheLine, kLines = bytes_of<Code>(kStripWidth) / kLineBytes;
  PanelCodes<Code> codes;
  const PanelScales& scales;
  int64_t block_columns;
  __m128i block_of_lane;

  PanelRows(const NormConcatLinear& op, int64_t begin, const PanelScales& scales)
      : codes(op, begin), scales(scales), block_columns(op.scales.block_columns) {
    if (!scales.of_numbers) return;
    uint8_t blocks[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) blocks[lane] = lane * kCodesPerLane<Code> / block_columns;
    __builtin_memcpy(&block_of_lane, blocks, sizeof blocks);
  }

  // `bytes` of the line are there.
  [[gnu::always_inline]] void widen_line(const uint8_t* data, int64_t bytes, int64_t row, int64_t k, Packed* place) {
    __m512i line = {};
    if (bytes >= kLineBytes) {
      line = _mm512_loadu_si512(data);
    } else if (bytes > 0) {
      line = _mm512_maskz_loadu_epi8((1ull << bytes) - 1, data);
    }
    if constexpr (std::is_same_v<Code, float>) {
      _mm512_store_si512(place, line);
    } else if constexpr (std::is_same_v<Code, Float16>) {
      store(place, EAGLE_KERNELS_ISA::widen(truncate((UInt)line), Code{}), Whole{});
      store(place + kLanes, EAGLE_KERNELS_ISA::widen(truncate((UInt)line >> 16), Code{}), Whole{});
    } else {
      UInt words[kCodesPerLane<Code> / 2];
      widen(line, Code{}, words, 1);
      if constexpr (kMayScaleNumbers<T, Code>) {
        if (scales.of_numbers) {
          const Float of_lanes = read_scales(row, k);
          unrolled<kCodesPerLane<Code> / 2>([&](auto i) { words[i] = scaled(words[i], of_lanes); });
        }
      }
      unrolled<kCodesPerLane<Code> / 2>([&](auto i) { store_words(words[i], place + i * 2 * kLanes); });
    }
  }

  // The scales of the lanes of a row's line, the only one that it has in a strip. Past the last block are none.
  Float read_scales(int64_t row, int64_t k) const {
    static_assert(!kMayScaleNumbers<T, Code> || kLines == 1);
    const int64_t left = codes.width - k, columns = left < kStripWidth ? left : kStripWidth;
    const __mmask16 there = (1u << ((columns - 1) / block_columns + 1)) - 1;
    const __m128i of_blocks = _mm_maskz_loadu_epi8(there, scales.rows[row] + k / block_columns);
    return value_of((UInt)_mm512_cvtepu8_epi32(_mm_shuffle_epi8(of_blocks, block_of_lane)), Float8E4M3{});
  }
};

// Rows in 12 bits have 128 columns, a strip's width, at a time.
template <class T>
struct PanelRows<T, BFloat16In12> {
  using Packed = typename DotStep<T>::Packed;
  static constexpr int64_t kLineBytes = kGroupBytes, kLines = 1;
  static_assert(kStripWidth == kGroupColumns);
  PanelCodes<BFloat16In12> codes;
  RowExponents exponents[kPanelColumns];
  const Exception* next[kPanelColumns];  // the first that is not before the strip

  PanelRows(const NormConcatLinear& op, int64_t begin, const PanelScales&) : codes(op, begin) {
    for (int64_t row = 0; row < codes.rows; ++row) {
      exponents[row] = exponents_of(op, begin + row);
      next[row] = exponents[row].begin;
    }
  }

  [[gnu::always_inline]] void widen_line(const uint8_t* data, int64_t bytes, int64_t row, int64_t k, Packed* place) {
    if (bytes <= 0) return void(__builtin_memset(place, 0, kStripWidth * sizeof *place));
    alignas(kCacheLine) BFloat16 numbers[kStripWidth];
    widen_group(data, ExponentTables(exponents[row]), numbers);
    for (; next[row] != exponents[row].end && next[row]->column() < k + kStripWidth; ++next[row]) {
      const int64_t column = next[row]->column() - k;
      if (column >= 0) numbers[column] = next[row]->number();  // a damaged file's may be out of order
    }
    const int64_t left = codes.width - k;
    if (left < kStripWidth) __builtin_memset(numbers + left, 0, (kStripWidth - left) * sizeof *numbers);
    for (int64_t i = 0; i < kStripWidth; i += 2 * kLanes) {
      store_words((UInt)_mm512_load_si512(numbers + i), place + i);
    }
  }
};

// The next strip of a panel: one step in `every` calls widens a line of it, so that loads and widening run beside all
// of the products, and prefetches what is `ahead` bytes further on in the weight.
template <class T, class Code>
struct NextLines {
  using Packed = typename DotStep<T>::Packed;
  using Rows = PanelRows<T, Code>;
  static constexpr int64_t kLines = Rows::kLines, kLineBytes = Rows::kLineBytes, kSteps = kLines * kPanelColumns;
  Rows* rows;
  Packed* place;
  int64_t k, every, ahead;
  const uint8_t* data;
  int64_t wait = 1, left, part = 0;

  // A strip's products call step() 2 * kStripWidth / kCodesPerLane times for each group of rows.
  NextLines(Rows& rows, Packed* place, int64_t k, int64_t groups)
      : rows(&rows),
        place(place),
        k(k),
        every(groups * (2 * kStripWidth / kCodesPerLane<Code>) / kSteps),
        ahead(rows.codes.ahead(k)),
        data(rows.codes.data + bytes_of<Code>(k)),
        left(k < rows.codes.width ? kSteps : 0) {}

  [[gnu::always_inline]] void step() {
    if (--wait > 0) return;
    wait = every;
    if (left > 0) take_line();
  }
  [[gnu::always_inline]] void take_line() {
    const int64_t row = static_cast<uint64_t>(kSteps - left) / kLines;
    const int64_t bytes = row < rows->codes.rows ? bytes_of<Code>(rows->codes.width - k) - part * kLineBytes : 0;
    rows->widen_line(data, bytes, row, k, place);
    for (int64_t byte = 0; byte < kLineBytes; byte += kCacheLine) __builtin_prefetch(data + ahead + byte, 0, 2);
    place += kStripWidth / kLines;
    data += kLineBytes;
    --left;
    if (++part < kLines) return;
    part = 0;
    data += rows->codes.row_stride - kLines * kLineBytes;
  }
  void finish() {
    while (left > 0) take_line();
  }
};

// Numbers of a group of packed rows in a strip.
constexpr int64_t kPackedGroup = kStripWidth * kLanes;

// kGroups groups by kColumns columns of the output, rows of the strip, from `column` on. The totals of a group are
// kPanelColumns.
template <int kGroups, int kColumns, class Code, class Packed, class Next>
[[gnu::always_inline]] inline void lanes_tile(const Packed* numbers, int64_t column, const StripSums& sums,
                                              const Packed* packed, Float* totals, Next& next) {
  constexpr int64_t kStep = kCodesPerLane<Code>, kBroadcast = kBroadcastColumns<Packed>;
  constexpr int kSums = kGroups * kColumns;
  const bool go_on = kMayGoOn<Packed> && sums.go_on;
  constexpr bool kByStrip = !kMayGoOn<Packed>;  // as in project_strips.h
  constexpr int kOfStrip = kByStrip ? kSums : 1;
  Float of_strip[kOfStrip] = {};
  Float sum[kSums] = {};
  numbers += column * kStripWidth;
  totals += column;
  const auto* scales = reinterpret_cast<const float*>(sums.scales[0]) + column;
  const auto* stays = reinterpret_cast<const uint32_t*>(sums.stays) + column;
  int64_t k = 0;
  for (; k < sums.width; scales += kPanelColumns) {
    const int64_t end = k + sums.sum_width < sums.width ? k + sums.sum_width : sums.width;
    if (!go_on) unrolled<kSums>([&](auto i) { sum[i] = Float{}; });
    for (; k < end; k += kStep) {
      next.step();
      const Packed* place = numbers + place_of<Code, Packed>(k);
      unrolled<kStep / kBroadcast>([&](auto i) {
        decltype(load_rows(packed)) x[kGroups];
        unrolled<kGroups>([&](auto g) {
          x[g] = load_rows(packed + g * kPackedGroup + (k + i * kBroadcast) * kLanes);
        });
        unrolled<kColumns>([&](auto c) {
          const Packed* number = place + c * kStripWidth + i * kBroadcast * kLanes;
          unrolled<kGroups>([&](auto g) {
            sum[c * kGroups + g] = multiply_add_rows(sum[c * kGroups + g], number, x[g]);
          });
        });
      });
    }
    k = end;
    if (go_on && k < sums.width) {
      unrolled<kSums>([&](auto i) { sum[i] *= scales[i / kGroups]; });
      if (!sums.some_stay) continue;
      unrolled<kSums>([&](auto i) {
        const UInt stays_here = UInt{} + stays[i / kGroups];
        totals[i % kGroups * kPanelColumns + i / kGroups] += (Float)((UInt)sum[i] & stays_here);
        sum[i] = (Float)((UInt)sum[i] & ~stays_here);
      });
      continue;
    }
    unrolled<kSums>([&](auto i) {
      Float* const joined = kByStrip ? of_strip + i % kOfStrip : totals + i % kGroups * kPanelColumns + i / kGroups;
      *joined = multiply_add(sum[i], Float{} + scales[i / kGroups], *joined);
    });
  }
  if constexpr (kByStrip) {
    unrolled<kSums>([&](auto i) { totals[i % kGroups * kPanelColumns + i / kGroups] += of_strip[i]; });
  }
}

// kGroups groups by a strip (bf16, T = 16: 2.8 ms). Flattened, because a lambda that GCC does not inline keeps the sums
// in memory (6.1). The copy of `next` has its fields in registers (without it 3.6).
template <int kGroups, class Code, class Packed, class Next>
[[gnu::flatten, gnu::noinline]] void lanes_of_groups(const Packed* numbers, const StripSums& sums, const Packed* packed,
                                                     Float* totals, Next& shared) {
  constexpr int kColumns = 16 / kGroups;
  Next next = shared;
  for (int64_t column = 0; column < kPanelColumns; column += kColumns) {
    lanes_tile<kGroups, kColumns, Code>(numbers, column, sums, packed, totals, next);
  }
  shared = next;
}

// Two groups share a broadcast (four: T = 64 and 128 7.9 and 15.6 ms, two 7.7 and 14.7).
template <class Code, class Packed, class Next>
void multiply_strip(const Packed* numbers, const StripSums& sums, const Packed* packed, int64_t groups, Float* totals,
                    Next& next) {
  for (; groups >= 2; groups -= 2, packed += 2 * kPackedGroup, totals += 2 * kPanelColumns) {
    lanes_of_groups<2, Code>(numbers, sums, packed, totals, next);
  }
  if (groups > 0) lanes_of_groups<1, Code>(numbers, sums, packed, totals, next);
}

// The most groups of one pass over the weight. Packed rows of more than kPassBytes would come from memory for each
// panel (K=6, H=D=5376, T = 512, in bf16: 510 ms in one pass, 480 in passes of 8 MB and 550 of 2 MB), and the totals of
// a panel are on the stack.
constexpr int64_t kPassBytes = 8 << 20, kPassGroups = 16;

template <class Packed>
int64_t pass_groups(const NormConcatLinear& op) {
  const int64_t fit = kPassBytes / (op.source.width * kLanes * static_cast<int64_t>(sizeof(Packed))) + 1;
  return fit < kPassGroups ? fit : kPassGroups;
}

template <class T>
int64_t lanes_workspace(const NormConcatLinear& op) {
  const int64_t columns = round_up(op.source.width, kStripWidth);
  return fp32_rows_bytes(op) + num_groups(op) * kLanes * columns * sizeof(typename DotStep<T>::Packed);
}

// The columns from k on, where a strip begins, of a group of rows.
template <class T>
typename DotStep<T>::Packed* packed_group(const NormConcatLinear& op, int64_t k, int64_t group) {
  return packed_rows<T>(op) + (k * num_groups(op) + group * kStripWidth) * kLanes;
}

// Lays the columns of a group out as the lanes read them.
template <class T>
struct LanePacker {
  using Packed = typename DotStep<T>::Packed;
  const NormConcatLinear& op;
  int64_t group, column;

  LanePacker(const NormConcatLinear& op, int64_t group, int64_t column) : op(op), group(group), column(column) {}

  void lay_out(GroupColumns<Packed>& columns) {
    constexpr int64_t kColumns = kLanes * kBroadcastColumns<Packed>;
    columns.fill_up(round_up(columns.filled, kStripWidth));
    for (int64_t i = 0; i < columns.filled; i += kColumns, column += kColumns) {
      __m512i lanes[kLanes];
      for (int64_t row = 0; row < kLanes; ++row) lanes[row] = _mm512_load_si512(&columns.rows[row][i]);
      transpose(lanes);
      const int64_t in_strip = column % kStripWidth;
      Packed* place = packed_group<T>(op, column - in_strip, group) + in_strip * kLanes;
      for (int64_t j = 0; j < kLanes; ++j) _mm512_store_si512(place + j * kColumns, lanes[j]);
    }
  }
};

// Turns the totals of a group of rows into the result.
template <class T>
void finish_group(const NormConcatLinear& op, int64_t group, int64_t begin, int64_t end, const Float* totals) {
  alignas(kCacheLine) float sums[kLanes * kPanelColumns];
  for (int64_t half = 0; half < kStripVectors; ++half) {
    __m512i lanes[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = (__m512i)totals[half * kLanes + i];
    transpose(lanes);
    for (int64_t i = 0; i < kLanes; ++i) _mm512_store_si512(sums + i * kPanelColumns + half * kLanes, lanes[i]);
  }
  const int64_t first = group * kLanes, left = op.num_rows - first;
  finish_columns<T>(op, {first, left < kLanes ? left : kLanes}, begin, end, sums, kPanelColumns);
}

template <class T, class Code>
void lanes_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  using Packed = typename DotStep<T>::Packed;
  const int64_t width = op.source.width, groups = num_groups(op), most = pass_groups<Packed>(op);
  const int64_t passes = (groups + most - 1) / most;
  alignas(kCacheLine) Packed strips[2][kPanelColumns * kStripWidth];
  Float totals[kPassGroups * kPanelColumns];
  StripSums sums;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = groups * pass / passes, count = groups * (pass + 1) / passes - first;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const int64_t begin = panel * kPanelColumns;
      const PanelScales scales(op, begin, kMayScaleNumbers<T, Code>);
      PanelRows<T, Code> rows(op, begin, scales);
      __builtin_memset(totals, 0, count * kPanelColumns * sizeof(Float));
      NextLines<T, Code>(rows, strips[0], 0, 1).finish();
      for (int64_t k = 0, turn = 0; k < width; k += kStripWidth, turn ^= 1) {
        if (scales.of_numbers) {
          sums = sums_of_scaled(width - k < kStripWidth ? width - k : kStripWidth, scales.global);
        } else {
          read_sums<T>(op, scales, k, sums);
        }
        NextLines<T, Code> next(rows, strips[turn ^ 1], k + kStripWidth, count);
        multiply_strip<Code>(strips[turn], sums, packed_group<T>(op, k, first), count, totals, next);
        next.finish();
      }
      for (int64_t group = 0; group < count; ++group) {
        finish_group<T>(op, first + group, begin, begin + rows.codes.rows, totals + group * kPanelColumns);
      }
    }
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
