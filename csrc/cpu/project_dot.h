// The projection as dot products along K*H, for every instruction set and element type.
//
// Packed rows: [N, packed_width], row-major, zero-padded to whole vectors, in the type they are multiplied in: bf16
// where the processor multiplies bf16 (vdpbf16ps), otherwise fp32, already rounded to the element type.
#pragma once

#include "../norm_concat_linear.h"
#include "norm_row.h"
#include "widen_bf16_12bit.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kPanelColumns = 32;

inline int64_t num_panels(const NormConcatLinear& op) { return (op.num_columns + kPanelColumns - 1) / kPanelColumns; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The fp32 result [N, D] is at the beginning of the workspace, with room for whole panels.
inline float* fp32_rows(const NormConcatLinear& op) { return static_cast<float*>(op.workspace); }
inline int64_t fp32_rows_bytes(const NormConcatLinear& op) {
  return op.num_rows * num_panels(op) * kPanelColumns * sizeof(float);
}

// Bytes that the column totals take at the end of the workspace. Without a post norm the fp32 rows are not needed, and
// the totals are in their place.
inline int64_t totals_workspace(const NormConcatLinear& op) {
  return op.post_norm_gain.data == nullptr ? 0 : fp32_rows_bytes(op);
}

// One step of a dot product: kStep elements of a weight row times as many of a packed row, into the lanes of a sum.
template <class T>
struct DotStep {
  using Packed = float;
  static constexpr int64_t kStep = kLanes;
  template <class Span>
  static Float load_weight(const T* weight, Span span) {
    return load(weight, span);
  }
  static Float load_packed(const float* packed) { return load(packed, Whole{}); }
  static Float multiply_add(Float sum, Float weight, Float packed) { return sum + weight * packed; }
};

#if defined(__AVX512BF16__)
template <>
struct DotStep<BFloat16> {
  using Packed = BFloat16;
  static constexpr int64_t kStep = 2 * kLanes;
  static __m512i load_weight(const BFloat16* weight, Whole) { return _mm512_loadu_si512(weight); }
  static __m512i load_weight(const BFloat16* weight, Part part) {
    return _mm512_maskz_loadu_epi16((1u << part.count) - 1, weight);
  }
  static __m512i load_packed(const BFloat16* packed) { return _mm512_load_si512(packed); }
  static Float multiply_add(Float sum, __m512i weight, __m512i packed) {
    return (Float)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)packed);
  }
};
#endif

// Weight rows and packed rows of one register tile: 24 of 32 vector registers are sums with AVX-512, 8 of 16 elsewhere
// (12 in kWidenedTile).
// fp32, T = 1, 8, 16, in ms: 6x4 6.1, 6.7, 10.2; 4x6 6.2, 7.2, 10.6; 3x8 5.9, 7.7, 13.1; 8x3 6.4, 7.7, 12.1.
struct DotTile {
  int columns, rows;
};
template <class T>
constexpr DotTile kDotTile = kLanes == 16 ? DotTile{6, 4} : DotTile{4, 2};

// K*H is summed in blocks: the lanes within a block, then block after block. With AVX-512 a block has 2 KB of a packed
// row in fp32, so that 16 rows leave room in L1 for the weight (T = 16: 10.6 ms; 4 KB: 11.1, 1 KB: 11.6); with fewer
// lanes it has 4 KB (bf16, T = 1 and 4: 2.8 and 4.5 ms; 2 KB: 3.8 and 5.2).
template <class T>
constexpr int64_t kDotBlockK = (kLanes == 16 ? 2048 : 4096) / sizeof(float);

#if defined(__AVX512BF16__)
// GCC 12 does not keep 6x4 or 6x3 sums of bf16 products in registers. Blocks of 4 KB of a tile's packed rows fit in L1
// with the same blocks of its weight rows. 6x4 with 8 KB -> 5x4 with 4 KB, in ms, two cores of an AMD EPYC:
//   one 512-bit product a cycle   T = 6: 4.8 -> 3.1, 8: 2.7 -> 3.1, 16: 4.6 -> 4.8, 32: 8.3 -> 8.6, 64: 16.3 -> 16.4
//   two (another EPYC)            T = 24: 4.5 -> 3.7, 32: 6.7 -> 4.8, 48: 9.7 -> 6.5, 64: 11.3 -> 8.2
template <>
constexpr DotTile kDotTile<BFloat16> = {5, 4};
template <>
constexpr int64_t kDotBlockK<BFloat16> = 4096 / sizeof(BFloat16);
#elif !defined(__AVX512F__)
// Where numbers are widened first, 4 rows share the work, and 12 registers are sums. K=3, H=D=4096, AVX2, two cores of
// an AMD EPYC, minima in ms, 4x2 and 3x4: bf16 at T = 4, 8 and 16 4.0, 7.8, 13.0 and 3.3, 6.3, 12.5; int8_row at T = 8,
// 16 and 64 7.3, 13.2, 50.0 and 6.7, 11.9, 46.5. What one instruction loads has no use for it: at T = 4 fp32 takes 5.5
// by 4x2 and 7.2 by 3x4, fp16 3.7 and 7.5.
constexpr DotTile kWidenedTile = {3, 4};
template <>
constexpr DotTile kDotTile<BFloat16> = kWidenedTile;
#endif

// While the packed rows fit in L2 (1 MB or more where there is AVX-512), the weight rows of one tile at a time stream
// from end to end. Otherwise dot_block_columns(tile) weight rows share each block of the packed rows.
constexpr int64_t kCachedBytes = 768 << 10;

// Output columns whose totals are stored side by side until they are finished. In rows of [N, D] the totals of 8 and
// more rows fall into one set of L1, and a tile's columns are no whole vector (bf16, T = 32, one thread: 19.0 ms; side
// by side 16.8).
constexpr int64_t dot_block_columns(DotTile tile) { return 48 / tile.columns * tile.columns; }

// The rows of the weight that come next: each step of a tile prefetches their columns. kBits is the size of a column.
template <int64_t kBits>
struct RowsAhead {
  const uint8_t* data = nullptr;
  int64_t row_bytes = 0;
  int64_t rows = 0;

  [[gnu::always_inline]] void fetch(int64_t k) const {
    const int64_t byte = k * kBits / 8;
    // With codes one cache line spans several steps.
    if (kBits < 16 && byte % kCacheLine != 0) return;
    for (int64_t row = 0; row < rows; ++row) __builtin_prefetch(data + row * row_bytes + byte, 0, 2);
  }
};

// The weight rows of a tile, or one.
template <class T, int64_t kBitsAhead = 8 * sizeof(T)>
struct WeightRows {
  using Step = DotStep<T>;
  const T* data;
  int64_t row_stride;
  RowsAhead<kBitsAhead> ahead{};

  template <class Span>
  auto load(int64_t column, int64_t k, Span span) const {
    return in_register(Step::load_weight(data + column * row_stride + k, span));
  }
};

// result[row][column] = (first ? 0 : result) + weight[column] . packed[row], over `width` elements.
template <int kColumns, int kRows, class Weight>
void dot_tile(Weight weight, const typename Weight::Step::Packed* packed, int64_t packed_width, int64_t width,
              float* result, int64_t result_stride, bool first) {
  using Step = typename Weight::Step;
  Float sums[kRows * kColumns] = {};
  const auto step = [&](int64_t k, auto span) {
    const auto multiply = [&](auto row, auto column, const auto& w, const auto& x) {
      Float& sum = sums[row * kColumns + column];
      sum = Step::multiply_add(sum, w, x);
    };
    const auto x = [&](auto row) { return Step::load_packed(packed + row * packed_width + k); };
    using Numbers = decltype(weight.load(0, k, span));
    if constexpr (sizeof(Numbers) > sizeof(Float)) {
      // Of numbers that take several registers only one column's are held (int8_row, T = 2: 2.1 ms; all columns' 2.8).
      unrolled<kColumns>([&](auto column) {
        const Numbers w = weight.load(column, k, span);
        unrolled<kRows>([&](auto row) { multiply(row, column, w, x(row)); });
      });
    } else {
      Numbers w[kColumns];
      unrolled<kColumns>([&](auto column) { w[column] = weight.load(column, k, span); });
      unrolled<kRows>([&](auto row) {
        const auto of_row = x(row);
        unrolled<kColumns>([&](auto column) { multiply(row, column, w[column], of_row); });
      });
    }
  };
  int64_t k = 0;
  for (; k + Step::kStep <= width; k += Step::kStep) {
    weight.ahead.fetch(k);
    step(k, Whole{});
  }
  if (k < width) step(k, Part{width - k});

  sum_lanes_of_each<kRows * kColumns>(sums);
  float totals[round_up(kRows * kColumns, kLanes)];
  __builtin_memcpy(totals, sums, sizeof totals);
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      float* place = result + row * result_stride + column;
      const float sum = totals[row * kColumns + column];
      *place = first ? sum : *place + sum;
    }
  }
}

template <int kColumns, int kRows, class Weight>
void dot_rows(int64_t rows, const Weight& weight, const typename Weight::Step::Packed* packed, int64_t packed_width,
              int64_t width, float* result, int64_t result_stride, bool first) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return dot_rows<kColumns, kRows - 1>(rows, weight, packed, packed_width, width, result, result_stride, first);
    }
  }
  dot_tile<kColumns, kRows>(weight, packed, packed_width, width, result, result_stride, first);
}

// An odd number of whole cache lines: with rows a multiple of 4 KB apart, the same column of more than 8 rows would not
// fit in L1.
template <class T>
int64_t packed_width(const NormConcatLinear& op) {
  constexpr int64_t kLine = kCacheLine / sizeof(typename DotStep<T>::Packed);
  return ((op.source.width + kLine - 1) / kLine | 1) * kLine;
}

template <class T>
typename DotStep<T>::Packed* packed_rows(const NormConcatLinear& op) {
  void* place = static_cast<char*>(op.workspace) + fp32_rows_bytes(op);
  return static_cast<typename DotStep<T>::Packed*>(place);
}

template <class T>
int64_t packed_bytes(const NormConcatLinear& op) {
  return op.num_rows * packed_width<T>(op) * sizeof(typename DotStep<T>::Packed);
}

template <class T>
int64_t dot_workspace(const NormConcatLinear& op) {
  return fp32_rows_bytes(op) + packed_bytes<T>(op);
}

// The totals of the columns from `begin` on, [N][columns]; `workspace` is the size of the workspace without them.
inline float* column_totals(const NormConcatLinear& op, int64_t begin, int64_t workspace) {
  const int64_t before = op.post_norm_gain.data == nullptr ? 0 : workspace;
  return reinterpret_cast<float*>(static_cast<char*>(op.workspace) + before) + begin * op.num_rows;
}

inline RowExponents exponents_of(const NormConcatLinear& op, int64_t d) {
  return {static_cast<const uint8_t*>(op.scales.data) + d * op.scales.row_stride, op.scales.row_size};
}

// write(column, value, span) for the columns of chunk k of normed row i, rounded to T.
template <class T, class Write>
void pack_chunk(const NormConcatLinear& op, int64_t i, int64_t k, float of_concat, Write write) {
  const Concat& source = op.source;
  const Chunk& chunk = source.chunks[k];
  const int64_t row = source_row(chunk, i), first = chunk.column;
  const float rstd = chunk_rstd<T>(source, chunk, row, of_concat);
  norm_columns<T>(chunk, row, rstd, source.norm_offset, 0, chunk.width,
                  [=](int64_t h, Float value, auto span) { write(first + h, round_to(value, T{}), span); });
}

template <class T>
void dot_pack(const NormConcatLinear& op, int64_t row_begin, int64_t row_end, int64_t width) {
  for (int64_t i = row_begin; i < row_end; ++i) {
    auto* packed = packed_rows<T>(op) + i * width;
    const float of_concat = concat_rstd<T>(op.source, i);
    for (int64_t k = 0; k < op.source.num_chunks; ++k) {
      pack_chunk<T>(op, i, k, of_concat,
                    [=](int64_t column, Float value, auto span) { store(packed + column, value, span); });
    }
    __builtin_memset(packed + op.source.width, 0, (width - op.source.width) * sizeof *packed);
  }
}

struct RowRange {
  int64_t first, count;
};

// Adds the bias to the sums of columns [begin, end) of these rows; rounds them into out, or where a post norm comes
// next stores them as the fp32 result.
template <class T>
void finish_columns(const NormConcatLinear& op, RowRange rows, int64_t begin, int64_t end, const float* sums,
                    int64_t sums_stride) {
  const bool has_bias = op.bias.data != nullptr;
  const bool has_post_norm = op.post_norm_gain.data != nullptr;
  for (int64_t i = rows.first; i < rows.first + rows.count; ++i, sums += sums_stride) {
    T* out = static_cast<T*>(op.out) + i * op.out_row_stride + begin;
    for_each_vector(end - begin, [&](int64_t d, auto span) {
      Float value = load(sums + d, span);
      if (has_bias) value += load_vector<T>(op.bias, begin + d, span);
      if (has_post_norm) {
        store(fp32_rows(op) + i * op.num_columns + begin + d, value, span);
      } else {
        store(out + d, value, span);
      }
    });
  }
}

// Each Rows class below gives dot_tile the rows of a weight, those of a kTile or one at a time. `rows` returns
// columns [k, k + count) of rows [d, d + columns), where k begins a block of kDotBlockK<Element> columns, and zeros up
// to `tile_width`; `end_rows` is called after their products, `finish` when their sums are complete.

// Read in place.
template <class T>
struct RowsInPlace {
  using Element = T;
  static constexpr DotTile kTile = kDotTile<T>;
  const T* data;
  int64_t row_stride, row_bytes;

  explicit RowsInPlace(const NormConcatLinear& op)
      : data(static_cast<const T*>(op.weight)), row_stride(op.weight_row_stride), row_bytes(row_stride * sizeof(T)) {}
  const void* place(int64_t d, int64_t k) const { return data + d * row_stride + k; }
  WeightRows<T> rows(int64_t d, int64_t, int64_t k, int64_t) const { return {data + d * row_stride + k, row_stride}; }
  static constexpr int64_t tile_width(int64_t count) { return count; }
  void end_rows(int64_t, int64_t, int64_t, int64_t) const {}
  void finish(int64_t, int64_t, float*, int64_t) const {}
};

// Widened from bf16 in 12 bits.
template <class T>
struct RowsIn12Bits {
  using Element = T;
  static constexpr DotTile kTile = kDotTile<T>;
  const NormConcatLinear& op;
  int64_t row_bytes;
  alignas(kCacheLine) T widened[kTile.columns * kDotBlockK<T>];

  explicit RowsIn12Bits(const NormConcatLinear& op) : op(op), row_bytes(op.weight_row_stride) {}
  const uint8_t* place(int64_t d, int64_t k) const {
    return static_cast<const uint8_t*>(op.weight) + d * row_bytes + k / kGroupColumns * kGroupBytes;
  }
  // While a row is widened, the same columns of the next row are prefetched.
  WeightRows<T> rows(int64_t d, int64_t columns, int64_t k, int64_t count) {
    for (int64_t i = 0; i < columns; ++i) {
      widen_row(place(d + i, 0), exponents_of(op, d + i), k, k + count, row_bytes, widened + i * kDotBlockK<T>);
    }
    return {widened, kDotBlockK<T>};
  }
  static constexpr int64_t tile_width(int64_t count) { return count; }
  void end_rows(int64_t, int64_t, int64_t, int64_t) const {}
  void finish(int64_t, int64_t, float*, int64_t) const {}
};

// The totals of columns [begin, end), which share each block of the packed rows.
template <class T, class Rows>
void dot_columns(const NormConcatLinear& op, Rows& weight, int64_t begin, int64_t end, float* totals,
                 int64_t totals_stride) {
  constexpr int kColumns = Rows::kTile.columns, kRows = Rows::kTile.rows;
  constexpr int64_t kBlockK = kDotBlockK<typename Rows::Element>;
  const int64_t width = packed_width<T>(op);
  const int64_t row_tiles = (op.num_rows + kRows - 1) / kRows;
  const int64_t tile_rows = (op.num_rows + row_tiles - 1) / row_tiles;
  const int64_t share = (kColumns + row_tiles - 1) / row_tiles;

  for (int64_t k = 0; k < op.source.width; k += kBlockK) {
    const int64_t count = k + kBlockK < op.source.width ? kBlockK : op.source.width - k;
    const int64_t tile_width = weight.tile_width(count);
    const bool last_k = k + count == op.source.width;
    for (int64_t d = begin; d < end;) {
      const int64_t columns = d + kColumns <= end ? kColumns : 1;
      auto rows_of_weight = weight.rows(d, columns, k, count);
      const void* next = d + columns < end ? weight.place(d + columns, k)
                         : last_k          ? weight.place(d + columns, 0)
                                           : weight.place(begin, k + count);
      for (int64_t i = 0, fetched = 0; i < op.num_rows; i += tile_rows, fetched += share) {
        const int64_t rows = op.num_rows - i < tile_rows ? op.num_rows - i : tile_rows;
        const int64_t left = columns - fetched;
        const uint8_t* ahead = static_cast<const uint8_t*>(next) + fetched * weight.row_bytes;
        rows_of_weight.ahead = {ahead, weight.row_bytes, left < share ? left : share};
        const auto* packed = packed_rows<T>(op) + i * width + k;
        float* result = totals + i * totals_stride + (d - begin);
        if (columns == kColumns) {
          dot_rows<kColumns, kRows>(rows, rows_of_weight, packed, width, tile_width, result, totals_stride, k == 0);
        } else {
          dot_rows<1, kRows>(rows, rows_of_weight, packed, width, tile_width, result, totals_stride, k == 0);
        }
      }
      weight.end_rows(d, columns, k, count);
      d += columns;
    }
  }
}

template <class T, class Rows>
void dot_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  Rows weight(op);
  constexpr int64_t kGroup = dot_block_columns(Rows::kTile);
  const int64_t sharing = packed_bytes<T>(op) <= kCachedBytes ? Rows::kTile.columns : kGroup;
  const int64_t columns_end = panel_end * kPanelColumns < op.num_columns ? panel_end * kPanelColumns : op.num_columns;

  for (int64_t begin = panel_begin * kPanelColumns; begin < columns_end; begin += kGroup) {
    const int64_t left = columns_end - begin, end = begin + (left < kGroup ? left : kGroup);
    float* totals = column_totals(op, begin, dot_workspace<T>(op));
    for (int64_t d = begin; d < end; d += sharing) {
      dot_columns<T>(op, weight, d, d + sharing < end ? d + sharing : end, totals + (d - begin), end - begin);
    }
    weight.finish(begin, end, totals, end - begin);
    finish_columns<T>(op, {0, op.num_rows}, begin, end, totals, end - begin);
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
