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

#include "project_dot.h"
#include "widen_codes.h"

#if defined(__AVX512F__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kStripWidth = 128;  // columns of the weight
constexpr int64_t kStripVectors = kPanelColumns / kLanes;
constexpr int64_t kStripSums = kStripWidth / 16;  // at most: blocks of scales have 16 columns or more

// How far ahead of the products codes are prefetched, in each row (fp8, T = 1, in ms: 256 bytes 3.4, 512 and 1024 2.2).
constexpr int64_t kAheadBytes = 512;

// Rows of a register tile: 24 of 32 vector registers are sums.
constexpr int kStripRows = 24 / kStripVectors;

// A strip is read in whole lanes of codes; past the width both operands are zero.
template <class Code>
constexpr int64_t kCodesPerLane = 32 / kBits<Code>;

struct GroupedRows;

// Up to kPanelColumns rows of the weight, from column k on.
struct CodeRows {
  const uint8_t* data;
  int64_t row_stride;
  int64_t rows;
  int64_t width;  // columns from k on, kStripWidth at most
  GroupedRows* grouped = nullptr;  // of BFloat16In12
  int64_t k = 0;                   // of these
};

// The rows of a panel in 12 bits, of which a strip has one group each. Strips are widened one after the other, each
// before it is transposed.
struct GroupedRows {
  RowExponents exponents[kPanelColumns];
  const Exception* next[kPanelColumns];  // the first that is not before the strip
  BFloat16 numbers[kPanelColumns][kStripWidth];
  static_assert(kStripWidth == kGroupColumns);

  GroupedRows(const NormConcatLinear& op, int64_t begin, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      exponents[row] = exponents_of(op, begin + row);
      next[row] = exponents[row].begin;
    }
  }

  GroupedRows* address() { return this; }

  // Widens four rows of the strip, from row `first` on.
  void widen(const CodeRows& codes, int64_t first) {
    for (int64_t row = first; row < first + 4 && row < codes.rows; ++row) {
      widen_group(codes.data + row * codes.row_stride, ExponentTables(exponents[row]), numbers[row]);
      for (; next[row] != exponents[row].end && next[row]->column() < codes.k + kStripWidth; ++next[row]) {
        const int64_t column = next[row]->column() - codes.k;
        if (column >= 0) numbers[row][column] = next[row]->number();  // a damaged file's may be out of order
      }
    }
  }
};

// Of other weights.
struct UngroupedRows {
  UngroupedRows(const NormConcatLinear&, int64_t, int64_t) {}
  GroupedRows* address() { return nullptr; }
};

// A strip that is widened when it is multiplied: lanes[i * kStripVectors] has 32 bits, lane i, of each of 16 rows of
// codes; missing rows are zero. It is transposed in blocks of 16 rows by 64 bytes, each in 8 parts.
template <class Code>
struct CodeStrip {
  static constexpr int64_t kStep = kCodesPerLane<Code>;
  static constexpr int64_t kRowBytes = bytes_of<Code>(kStripWidth);
  static constexpr int64_t kParts = 8 * kStripVectors * kRowBytes / kCacheLine;
  static_assert(kParts == kStripWidth / kStep);
  __m512i lanes[kParts * kStripVectors];
  __m512i quarters[kLanes];

  void load_part(const CodeRows& codes, int64_t part) {
    const int64_t block = part / 8, group = part % 4;
    const int64_t vector = block % kStripVectors, begin = block / kStripVectors * kCacheLine;
    if (part % 8 >= 4) {
      __m512i* place = lanes + (begin / 4 + group) * kStripVectors + vector;
      return transpose_quarters(quarters + group, place, kStripVectors);
    }
    const int64_t first = vector * kLanes + 4 * group, rows = codes.rows - first;
    const int64_t bytes = bytes_of<Code>(codes.width) - begin;
    const uint8_t* data = codes.data + first * codes.row_stride + begin;
    __m512i lines[4] = {};
    if (rows >= 4 && bytes >= kCacheLine) {
      unrolled<4>([&](auto row) { lines[row] = _mm512_loadu_si512(data + row * codes.row_stride); });
    } else if (bytes > 0) {
      const __mmask64 there = bytes >= kCacheLine ? ~0ull : (1ull << bytes) - 1;
      for (int64_t row = 0; row < rows && row < 4; ++row) {
        lines[row] = _mm512_maskz_loadu_epi8(there, data + row * codes.row_stride);
      }
    }
    transpose_in_quarters(lines, quarters + 4 * group);
  }
  void load(const CodeRows& codes) {
    for (int64_t part = 0; part < kParts; ++part) load_part(codes, part);
  }
  // Writes [pair of columns][kStripVectors] words from column k on.
  void read(int64_t k, UInt* words) const {
    unrolled<kStripVectors>([&](auto vector) {
      widen(lanes[k / kStep * kStripVectors + vector], Code{}, words + vector, kStripVectors);
    });
  }
};

template <>
struct CodeStrip<BFloat16In12> : CodeStrip<BFloat16> {
  void load_part(const CodeRows& codes, int64_t part) {
    // The first parts that read a row.
    if (part < 8 * kStripVectors && part % 8 < 4) codes.grouped->widen(codes, part / 8 * kLanes + part % 4 * 4);
    const auto* numbers = reinterpret_cast<const uint8_t*>(codes.grouped->numbers);
    CodeStrip<BFloat16>::load_part({numbers, sizeof codes.grouped->numbers[0], codes.rows, codes.width}, part);
  }
  void load(const CodeRows& codes) {
    for (int64_t part = 0; part < kParts; ++part) load_part(codes, part);
  }
};

// A strip that is widened already.
template <class Code>
struct WordStrip {
  static constexpr int64_t kStep = 2;
  UInt words[kStripWidth / 2 * kStripVectors];

  void read(int64_t k, UInt* place) const {
    unrolled<kStripVectors>([&](auto vector) { place[vector] = words[k / 2 * kStripVectors + vector]; });
  }
};

// Whether sums may go on. In fp32 they may not: a sum has few columns there (kSumWidth).
template <class Packed>
constexpr bool kMayGoOn = std::is_same_v<Packed, BFloat16>;

// How the columns of one strip are summed: in sums of up to `sum_width` columns, each with its own scales. Where sums
// go on, each starts from the one before, converted to the unit of its own scale, and only the last one is added to the
// total: scales[i] is then scale i over scale i + 1. `stays` masks the columns of the output whose sums do not go on:
// they are chosen one by one, so that no column's scales change another's bits.
struct StripSums {
  int64_t width;
  int64_t sum_width;
  bool go_on = false, some_stay = false;
  UInt stays[kStripVectors];
  Float scales[kStripSums][kStripVectors];
};

// Sums go on where all scales of a column are powers of two, whose ratios are exact, and within 2^16 of one another,
// which leaves the sums far from both ends of the range. That costs a multiplication a sum and saves the load and store
// of its total (two cores of an AMD EPYC, K*H = 12288, D = 4096, T = 16, 32 and 64, in ms: mxfp8 5.4, 9.6 and 18.1,
// going on 5.3, 9.1 and 17.0; mxfp4 5.2, 9.3 and 17.6, going on 5.3, 9.1 and 16.7; dense bf16 5.3, 9.3 and 16.9).
// Adding the exponents to the numbers instead takes the units that multiply: mxfp8 6.1, 10.3 and 19.3.
inline void let_sums_go_on(StripSums& sums) {
  constexpr uint32_t kExponent = 1u << 23;
  const int64_t count = (sums.width + sums.sum_width - 1) / sums.sum_width;
  UInt any = {};
  for (int64_t v = 0; v < kStripVectors; ++v) {
    UInt least = (UInt)sums.scales[0][v], most = least;
    for (int64_t i = 1; i < count; ++i) {
      const UInt scale = (UInt)sums.scales[i][v];
      least = scale < least ? scale : least;
      most = scale > most ? scale : most;
    }
    // 2^-127 is subnormal, and above the largest scale is NaN.
    const UInt stays =
        (UInt)(most - least > 16 * kExponent) | (UInt)(least < kExponent) | (UInt)(most >= 255 * kExponent);
    for (int64_t i = 0; i + 1 < count; ++i) {
      const UInt scale = (UInt)sums.scales[i][v], ratio = scale - (UInt)sums.scales[i + 1][v] + 127 * kExponent;
      sums.scales[i][v] = (Float)((stays & scale) | (~stays & ratio));
    }
    sums.stays[v] = stays;
    any |= stays;
  }
  sums.go_on = true;
  sums.some_stay = false;
  for (int64_t lane = 0; lane < kLanes; ++lane) sums.some_stay |= any[lane] != 0;
}

// Whether the numbers of a strip may be scaled, instead of the sums of each block: bf16 represents the products of e2m1
// and e4m3, which have 6 significant bits and are in [2^-10, 2688]. A block of 16 columns takes 8 product instructions;
// scaling its sum takes one more, and a load and a store of the total (128 columns of nvfp4 from the cache, in ms, sums
// scaled and numbers scaled: 1.33 and 1.08 at T = 64, 0.28 and 0.29 at T = 12).
#if defined(__AVX512BF16__)
template <class T, class Code>
constexpr bool kMayScaleNumbers = std::is_same_v<T, BFloat16> && std::is_same_v<Code, Float4E2M1>;
#else
template <class T, class Code>
constexpr bool kMayScaleNumbers = false;
#endif

// Words of numbers times the scale of their lane.
inline UInt scaled(UInt words, Float scale) {
  const Float even = (Float)(words << 16) * scale, odd = (Float)(words & 0xffff0000) * scale;
  return (UInt)even >> 16 | (UInt)odd;
}

// A strip whose numbers are scaled as they are read.
template <class Strip>
struct ScaledStrip {
  static constexpr int64_t kStep = Strip::kStep;
  const Strip& strip;
  const StripSums& blocks;

  void read(int64_t k, UInt* words) const {
    strip.read(k, words);
    const Float* scales = blocks.scales[k / blocks.sum_width];
    unrolled<kStep / 2 * kStripVectors>([&](auto i) { words[i] = scaled(words[i], scales[i % kStripVectors]); });
  }
};

// The sums over a scaled strip.
inline StripSums sums_of_scaled(const StripSums& blocks, float global) {
  StripSums sums;
  sums.width = blocks.width;
  sums.sum_width = kStripWidth;
  for (Float& scale : sums.scales[0]) scale = Float{} + global;
  return sums;
}

// The scales of a panel: the row of scales of each of its columns; a missing column has that of the last one.
struct PanelScales {
  const uint8_t* rows[kPanelColumns];
  ScaleType type;
  bool of_numbers;  // they scale numbers, and `global` the sums
  bool is_one_row;  // of scales, which is that of every column
  float global;

  PanelScales() = default;
  PanelScales(const NormConcatLinear& op, int64_t begin, bool may_scale_numbers)
      : type(op.scales.type),
        of_numbers(may_scale_numbers && type == ScaleType::kFloat8E4M3 && op.scales.block_columns < kStripWidth) {
    if (!has_scales(op.weight_type)) return;
    const int64_t size = type == ScaleType::kFloat32 ? sizeof(float) : 1;
    for (int64_t i = 0; i < kPanelColumns; ++i) {
      const int64_t column = begin + i < op.num_columns ? begin + i : op.num_columns - 1;
      const int64_t row = column / op.scales.block_rows * op.scales.row_stride;
      rows[i] = static_cast<const uint8_t*>(op.scales.data) + row * size;
    }
    is_one_row = rows[0] == rows[kPanelColumns - 1];
    global = op.scales.global == nullptr ? 1.0f : *op.scales.global;
  }

  // Writes the scales of block `first` + i to scales[i].
  void read(int64_t first, int64_t count, Float (*scales)[kStripVectors]) const {
    switch (type) {
      case ScaleType::kFloat32: return load_floats(first, count, scales);
      case ScaleType::kFloat8E8M0: return load_bytes<Float8E8M0>(first, count, scales);
      case ScaleType::kFloat8E4M3: return load_bytes<Float8E4M3>(first, count, scales);
    }
  }

  void load_floats(int64_t first, int64_t count, Float (*scales)[kStripVectors]) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = (first + i) * sizeof(float);
      float values[kPanelColumns];
      if (is_one_row) {
        __builtin_memcpy(values, rows[0] + place, sizeof(float));
        for (Float& scale : scales[i]) scale = Float{} + values[0] * global;
        continue;
      }
      for (int64_t column = 0; column < kPanelColumns; ++column) {
        __builtin_memcpy(values + column, rows[column] + place, sizeof(float));
      }
      for (int64_t v = 0; v < kStripVectors; ++v) scales[i][v] = load(values + v * kLanes, Whole{}) * global;
    }
  }

  // The scales of blocks [first, first + count), four at most, each in a byte of bytes[column].
  void read_bytes(int64_t first, int64_t count, uint32_t* bytes) const {
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      if (count == 4) {
        __builtin_memcpy(bytes + column, rows[column] + first, 4);
        continue;
      }
      bytes[column] = 0;
      for (int64_t i = 0; i < count; ++i) bytes[column] |= static_cast<uint32_t>(rows[column][first + i]) << 8 * i;
    }
  }

  template <class Code>
  void load_bytes(int64_t first, int64_t count, Float (*scales)[kStripVectors]) const {
    for (int64_t i = 0; i < count; i += 4) {
      uint32_t bytes[kPanelColumns];
      read_bytes(first + i, count - i < 4 ? count - i : 4, bytes);
      for (int64_t v = 0; v < kStripVectors; ++v) {
        UInt lanes;
        __builtin_memcpy(&lanes, bytes + v * kLanes, sizeof lanes);
        for (int64_t j = i; j < count && j < i + 4; ++j, lanes >>= 8) {
          scales[j][v] = value_of(lanes & 0xff, Code{}) * (of_numbers ? 1.0f : global);
        }
      }
    }
  }
};

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

// Codes to prefetch: a strip's width of some rows of the weight. One row in each step, since a burst of prefetches
// stalls the loads after it.
template <class Code>
struct CodesAhead {
  const uint8_t* data;
  int64_t row_stride;
  int64_t rows;

  void step() {
    if (rows == 0) return;
    for (int64_t byte = 0; byte < bytes_of<Code>(kStripWidth); byte += kCacheLine) {
      __builtin_prefetch(data + byte, 0, 2);
    }
    data += row_stride;
    --rows;
  }
};

// Besides prefetching, transposes a part of the next strip in each step: the shuffles run beside the products; all of
// them before the first product would add to its time. kShared: the steps of several tiles share the parts evenly.
template <class Code, bool kShared>
struct NextStrip {
  CodeStrip<Code>& strip;
  CodeRows codes;
  CodesAhead<Code> ahead;
  int64_t tiles = 1;
  int64_t part = 0, wait = 0;

  [[gnu::always_inline]] void step() {
    if constexpr (kShared) {
      if (--wait > 0) return;
      wait = tiles;
    }
    take_part();
  }
  [[gnu::always_inline]] void take_part() {
    constexpr int64_t kParts = CodeStrip<Code>::kParts;
    if constexpr (kParts > kPanelColumns) {
      if (part % (kParts / kPanelColumns) == 0) ahead.step();
    } else {
      unrolled<kPanelColumns / kParts>([&](auto) { ahead.step(); });
    }
    if (part < kParts) strip.load_part(codes, part++);
  }
  void finish() {
    while (part < CodeStrip<Code>::kParts) take_part();
  }
};

// Besides prefetching, widens some words of a transposed strip in each step.
template <class Code, class Strip>
struct NextWords {
  const Strip& strip;
  int64_t width;
  WordStrip<Code>& words;
  CodesAhead<Code> ahead;
  int64_t k = 0;

  void step() {
    ahead.step();
    if (k >= width) return;
    strip.read(k, words.words + k / 2 * kStripVectors);
    k += Strip::kStep;
  }
  void finish() {
    while (k < width) step();
  }
};

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

// A panel of the weight, strip by strip.
template <class Code>
struct PanelCodes {
  const uint8_t* data;
  int64_t row_stride;
  int64_t rows;
  int64_t width;
  GroupedRows* grouped;

  // The strip from column k on; empty past the width.
  CodeRows strip(int64_t k) const {
    const int64_t left = width - k < kStripWidth ? width - k : kStripWidth;
    return {data + bytes_of<Code>(k), row_stride, left > 0 ? rows : 0, left > 0 ? left : 0, grouped, k};
  }
  // Rows [row, row + count) of the codes kAheadBytes further on: at the end of a row, in the next panel.
  CodesAhead<Code> ahead(int64_t k, int64_t row, int64_t count) const {
    const int64_t row_bytes = bytes_of<Code>(width), later = bytes_of<Code>(k) + kAheadBytes;
    const int64_t place = later < row_bytes ? later : kPanelColumns * row_stride + later - row_bytes;
    return {data + row * row_stride + place, row_stride, count};
  }
};

// Max columns of one sum. In fp32 a sum adds column after column: with 128 its error is 2.5 times that of a blocked
// product (torch's, on an Intel processor), with 32 it is 1.5 times.
template <class Packed>
constexpr int64_t kSumWidth = 32;
template <>
constexpr int64_t kSumWidth<BFloat16> = kStripWidth;

// The sums of the strip from column k on, with their scales.
template <class T>
void load_sums(const NormConcatLinear& op, const PanelScales& scales, int64_t k, StripSums& sums) {
  constexpr int64_t kWidth = kSumWidth<typename DotStep<T>::Packed>;
  const int64_t block_columns = op.scales.block_columns, left = op.source.width - k;
  const int64_t columns = left < kStripWidth ? left : kStripWidth;
  sums.sum_width = block_columns < kWidth ? block_columns : kWidth;
  sums.width = columns;  // no more: past the last block are no scales, and zero times what is there may be NaN
  if (!has_scales(op.weight_type)) {
    sums.sum_width = kWidth;
    for (Float& scale : sums.scales[0]) scale = Float{} + 1.0f;
    return;
  }
  // A block that began in an earlier strip has its scales here already.
  if (k % block_columns != 0) return;
  sums.go_on = false;
  scales.read(k / block_columns, (columns - 1) / block_columns + 1, sums.scales);
  const bool are_powers = op.scales.type == ScaleType::kFloat8E8M0 && op.scales.global == nullptr;
  if (kMayGoOn<typename DotStep<T>::Packed> && are_powers && block_columns < kStripWidth) return let_sums_go_on(sums);
  for (int64_t i = (columns - 1) / sums.sum_width; i > 0; --i) {
    const int64_t block = i * sums.sum_width / block_columns;
    for (int64_t v = 0; v < kStripVectors; ++v) sums.scales[i][v] = sums.scales[block][v];
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
      load_sums<T>(op, scales, k, sums);
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
          if (width > 0) load_sums<T>(op, scales, k, blocks);
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
      load_sums<T>(op, scales, k, sums);
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
