// Strips of a weight of codes: 128 columns of a panel, transposed so that the lanes of a vector are rows of the weight,
// and widened when they are multiplied (CodeStrip). While one strip is multiplied the next one is loaded, in steps
// (NextStrip).
#pragma once

#include "scales.h"

#if defined(__AVX512F__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// How far ahead of the products codes are prefetched, in each row (fp8, T = 1, in ms: 256 bytes 3.4, 512 and 1024 2.2).
constexpr int64_t kAheadBytes = 512;

// A strip is read in whole lanes of codes; past the width both operands are zero.
template <class Code>
constexpr int64_t kCodesPerLane = 32 / kBits<Code>;

// Up to kPanelColumns rows of the weight, from column k on.
struct CodeRows {
  const uint8_t* data;
  int64_t row_stride;
  int64_t rows;
  int64_t width;  // columns from k on; past the last one 0 or less
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
// them before the first product would add to its time.
template <class Code>
struct NextStrip {
  CodeStrip<Code>& strip;
  CodeRows codes;
  CodesAhead<Code> ahead;
  int64_t part = 0;

  [[gnu::always_inline]] void step() {
    constexpr int64_t kParts = CodeStrip<Code>::kParts;
    static_assert(kParts <= kPanelColumns);
    unrolled<kPanelColumns / kParts>([&](auto) { ahead.step(); });
    if (part < kParts) strip.load_part(codes, part++);
  }
  void finish() {
    while (part < CodeStrip<Code>::kParts) step();
  }
};

// A panel of the weight, strip by strip.
template <class Code>
struct PanelCodes {
  const uint8_t* data;
  int64_t row_stride;
  int64_t rows;
  int64_t width;

  // `begin` is the panel's first column of the output, a row of the weight.
  PanelCodes(const NormConcatLinear& op, int64_t begin)
      : row_stride(kIsCode<Code> ? op.weight_row_stride : bytes_of<Code>(op.weight_row_stride)),
        rows(op.num_columns - begin < kPanelColumns ? op.num_columns - begin : kPanelColumns),
        width(op.source.width) {
    data = static_cast<const uint8_t*>(op.weight) + begin * row_stride;
  }

  // The strip from column k on.
  CodeRows strip(int64_t k) const { return {data + bytes_of<Code>(k), row_stride, rows, width - k}; }
  // From a row's codes of column k to those that are fetched: at the end of a row they are in the next panel.
  int64_t ahead(int64_t k) const {
    const int64_t row_bytes = bytes_of<Code>(width);
    if (bytes_of<Code>(k) + kAheadBytes < row_bytes) return kAheadBytes;
    return kAheadBytes + kPanelColumns * row_stride - row_bytes;
  }
  CodesAhead<Code> fetch(int64_t k) const {
    return {data + bytes_of<Code>(k) + ahead(k), row_stride, kPanelColumns};
  }
};

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
