// The projection of a quantized weight by rows of bf16, where the processor multiplies bf16 (vdpbf16ps): dot products
// along K*H, the weight's rows streaming as the checkpoint has them.
//
// Codes become bf16 in registers and never change places for it: the packed rows have their columns in the order in
// which widened codes leave the registers. A lane sums the products of a unit of 512 columns, or of the columns in it
// that share a scale, and that sum enters the lane's fp32 total times its scale: the range and the NaN of a scale are
// those of fp32. Where scales are of blocks, the 4x4 lanes in each quarter of four lines of codes are transposed, so that
// a vector has lanes of as many blocks as can be and one multiplication by scales follows 8 or 16 products.
#pragma once

#include "project_quantized.h"

#if defined(__AVX512BF16__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kUnitColumns = 512;  // of the weight

// Which columns of a unit a lane multiplies. The lines of codes of a unit, 64 bytes each, become as many vectors of
// lanes, and those kWords vectors of words each.
template <class CodeType>
struct WholeRows {
  using Code = CodeType;
  static constexpr bool kInBlocks = false;
  static constexpr int64_t kChains = 1;
  static constexpr int64_t column(int64_t vector, int64_t word, int64_t lane) {
    const int64_t first = vector * kCacheLine * kCodesPerByte<Code>;
    return first + (kCodesPerByte<Code> == 2 ? 8 * lane + 2 * word : lane / 4 * 16 + 8 * word + lane % 4 * 2);
  }
};

// Lane 4 * quarter + i of vector j is lane j of a quarter of line i, of four lines that are `kLineStride` lines apart.
// One of kChains chains of vectors has the columns of one block in each lane.
template <class CodeType, int64_t kLineStride, int64_t kNumChains>
struct InBlocks {
  using Code = CodeType;
  static constexpr bool kInBlocks = true;
  static constexpr int64_t kChains = kNumChains;
  // The first of the four lines that become vectors 4 * group to 4 * group + 3, and the next.
  static constexpr int64_t line(int64_t group, int64_t i) {
    return kLineStride == 2 ? 2 * i + group : 4 * group + i;
  }
  static constexpr int64_t column(int64_t vector, int64_t word, int64_t lane) {
    const int64_t byte = line(vector / 4, lane % 4) * kCacheLine + lane / 4 * 16 + vector % 4 * 4;
    return byte * kCodesPerByte<Code> + 2 * word;
  }
};

template <class Arrangement>
constexpr int64_t kCodesInByte = kCodesPerByte<typename Arrangement::Code>;
template <class Arrangement>
constexpr int64_t kLines = kUnitColumns / kCacheLine / kCodesInByte<Arrangement>;
template <class Arrangement>
constexpr int64_t kWords = 2 * kCodesInByte<Arrangement>;

// Of each pair of columns of a packed unit, the pair that it is in the row.
template <class Arrangement>
struct ColumnOrder {
  alignas(kCacheLine) int32_t pairs[kUnitColumns / 2] = {};
  constexpr ColumnOrder() {
    for (int64_t i = 0; i < kUnitColumns / 2; ++i) {
      const int64_t vector = i / kLanes / kWords<Arrangement>, word = i / kLanes % kWords<Arrangement>;
      pairs[i] = static_cast<int32_t>(Arrangement::column(vector, word, i % kLanes) / 2);
    }
  }
};
template <class Arrangement>
constexpr ColumnOrder<Arrangement> kColumnOrder{};

// f(Arrangement{}) for the weight of a call.
template <class F>
void with_arrangement(const NormConcatLinear& op, F f) {
  const int64_t block = op.scales.block_columns;
  with_code(op.weight_type, [&](auto code) {
    using Code = decltype(code);
    if (block >= op.source.width) return f(WholeRows<Code>{});
    if constexpr (kCodesPerByte<Code> == 2) {
      if (block == 16) return f(InBlocks<Code, 1, 2>{});
      return f(InBlocks<Code, 1, 1>{});
    } else {
      if (block < 128) return f(InBlocks<Code, 1, 2>{});
      return f(InBlocks<Code, 2, 1>{});
    }
  });
}

// Whole units, and an odd number of cache lines (project_dot.h).
inline int64_t codes_packed_width(const NormConcatLinear& op) {
  return round_up(op.source.width, kUnitColumns) + kCacheLine / static_cast<int64_t>(sizeof(BFloat16));
}

inline int64_t codes_workspace(const NormConcatLinear& op) {
  return fp32_rows_bytes(op) + op.num_rows * codes_packed_width(op) * sizeof(BFloat16);
}

inline void codes_pack(const NormConcatLinear& op, int64_t row_begin, int64_t row_end) {
  const int64_t width = codes_packed_width(op);
  dot_pack<BFloat16>(op, row_begin, row_end, width);
  with_arrangement(op, [&](auto arrangement) {
    const int32_t* order = kColumnOrder<decltype(arrangement)>.pairs;
    for (int64_t i = row_begin; i < row_end; ++i) {
      BFloat16* packed = packed_rows<BFloat16>(op) + i * width;
      for (int64_t k = 0; k < op.source.width; k += kUnitColumns) {
        BFloat16 unit[kUnitColumns];
        __builtin_memcpy(unit, packed + k, sizeof unit);
        for (int64_t pair = 0; pair < kUnitColumns / 2; pair += kLanes) {
          const __m512i columns = _mm512_i32gather_epi32(_mm512_load_si512(order + pair), unit, 4);
          _mm512_store_si512(packed + k + 2 * pair, columns);
        }
      }
    }
  });
}

// The scales of a row of the weight, for the lanes of a unit.
template <class Arrangement>
struct UnitScales {
  ScaleType type;
  int64_t block_columns, num_blocks;
  float global;
  bool is_periodic;        // the lanes of every unit have the same blocks, counted from its first one on
  UInt blocks_of_lane[2];  // for each chain

  explicit UnitScales(const NormConcatLinear& op)
      : type(op.scales.type),
        block_columns(op.scales.block_columns),
        num_blocks((op.source.width - 1) / op.scales.block_columns + 1),
        global(op.scales.global == nullptr ? 1.0f : *op.scales.global),
        is_periodic(kUnitColumns % block_columns == 0 || block_columns % kUnitColumns == 0) {
    begin_first_unit(0);
  }
  void begin_unit(int64_t k) {
    if (!is_periodic) begin_first_unit(k);
  }

  // scales[chain] of the unit from column k on.
  void read(const uint8_t* row, int64_t k, Float* scales) const {
    switch (const int64_t first = k / block_columns; type) {
      case ScaleType::kFloat32: return spread(load_floats(row, first), load_floats(row, first + kLanes), scales);
      case ScaleType::kFloat8E8M0: return read_bytes<Float8E8M0>(row, first, scales);
      case ScaleType::kFloat8E4M3: return read_bytes<Float8E4M3>(row, first, scales);
    }
  }

 private:
  void begin_first_unit(int64_t k) {
    uint32_t blocks[2][kLanes] = {};
    for (int64_t chain = 0; chain < Arrangement::kChains; ++chain) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t column = Arrangement::column(chain * kLines<Arrangement> / Arrangement::kChains, 0, lane);
        blocks[chain][lane] = static_cast<uint32_t>((k % block_columns + column) / block_columns);
      }
    }
    __builtin_memcpy(blocks_of_lane, blocks, sizeof blocks);
  }
  __mmask16 mask(int64_t first) const {
    const int64_t left = num_blocks - first;
    return left >= kLanes ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
  }
  Float load_floats(const uint8_t* row, int64_t first) const {
    return (Float)_mm512_maskz_loadu_ps(mask(first), row + first * sizeof(float));
  }
  template <class Scale>
  void read_bytes(const uint8_t* row, int64_t first, Float* scales) const {
    const auto load_bytes = [&](int64_t begin) {
      return value_of((UInt)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask(begin), row + begin)), Scale{});
    };
    spread(load_bytes(first), Arrangement::kChains == 2 ? load_bytes(first + kLanes) : Float{}, scales);
  }
  void spread(Float lower, Float upper, Float* scales) const {
    unrolled<Arrangement::kChains>([&](auto chain) {
      const __m512i blocks = (__m512i)blocks_of_lane[chain];
      scales[chain] = (Float)_mm512_permutex2var_ps((__m512)lower, blocks, (__m512)upper) * global;
    });
  }
};

// Packed rows that share each code as it is widened: 16 sums and the words of two rows of the weight in 32 registers.
constexpr int64_t kDotRows = 8;

// Columns of the output that share each unit of those packed rows, which are 8 KB of L1, and the totals of all 5 KB.
constexpr int64_t kBlockColumns = 10;
constexpr int64_t tile_columns(int64_t rows) { return rows <= 4 ? 5 : 2; }

// How far ahead of the products codes are fetched, in each row (fp8_row, T = 1, without packing: 512 columns 0.99 ms,
// 1024 0.86, 2048 0.92), and a line at a time: a burst of fetches stops the loads behind it (2.6 ms).
constexpr int64_t kAheadColumns = 2 * kUnitColumns;

// The lanes of kRows x kColumns totals += those of the products of a unit, times their scales. `vector_of(column, i)` has
// the words of vector i; x[row] is a packed row.
template <class Arrangement, int64_t kColumns, int64_t kRows, class VectorOf, class ScaleOf>
inline void multiply_unit(VectorOf vector_of, ScaleOf scale_of, const BFloat16* const* x, Float* totals) {
  constexpr int64_t kParts = kWords<Arrangement>, kVectors = kLines<Arrangement> / Arrangement::kChains;
  for (int64_t chain = 0; chain < Arrangement::kChains; ++chain) {
    Float sums[kRows * kColumns] = {};
    for (int64_t i = chain * kVectors; i < (chain + 1) * kVectors; ++i) {
      decltype(vector_of(0, 0)) vectors[kColumns];
      unrolled<kColumns>([&](auto column) { vectors[column] = vector_of(column, i); });
      unrolled<kParts>([&](auto part) {
        __m512bh words[kColumns];
        unrolled<kColumns>([&](auto column) { words[column] = (__m512bh)vectors[column].word(part); });
        unrolled<kRows>([&](auto row) {
          const __m512i value = _mm512_load_si512(x[row] + (i * kParts + part) * 2 * kLanes);
          unrolled<kColumns>([&](auto column) {
            Float& sum = sums[row * kColumns + column];
            sum = (Float)_mm512_dpbf16_ps((__m512)sum, words[column], (__m512bh)value);
          });
        });
      });
    }
    unrolled<kRows>([&](auto row) {
      unrolled<kColumns>([&](auto column) {
        const Float sum = sums[row * kColumns + column];
        if constexpr (Arrangement::kInBlocks) {
          totals[row * kBlockColumns + column] += sum * scale_of(column, chain);
        } else {
          totals[row * kBlockColumns + column] += sum;
        }
      });
    });
  }
}

// Some packed rows, kDotRows at most, times rows of the weight.
template <class Arrangement>
struct CodesProjection {
  using Code = typename Arrangement::Code;

  const NormConcatLinear& op;
  int64_t row_begin, rows;
  UnitScales<Arrangement> scales{op};
  Float totals[kDotRows * kBlockColumns] = {};

  const uint8_t* codes_at(int64_t d, int64_t k) const {
    return static_cast<const uint8_t*>(op.weight) + d * op.weight_row_stride + k / kCodesPerByte<Code>;
  }
  const uint8_t* scales_of(int64_t d) const {
    const int64_t size = op.scales.type == ScaleType::kFloat32 ? sizeof(float) : 1;
    return static_cast<const uint8_t*>(op.scales.data) + d / op.scales.block_rows * op.scales.row_stride * size;
  }

  // The lanes of a unit of a row of codes, in order, and that row's scales.
  void load_lanes(int64_t d, int64_t k, __m512i* place, Float* scale_of_row) {
    const uint8_t* codes = codes_at(d, k);
    const int64_t bytes = (op.source.width - k + kCodesPerByte<Code> - 1) / kCodesPerByte<Code>;
    const auto load_line = [&](int64_t line) {
      const int64_t left = bytes - line * kCacheLine;
      if (left >= kCacheLine) return _mm512_loadu_si512(codes + line * kCacheLine);
      return left <= 0 ? __m512i{} : _mm512_maskz_loadu_epi8((1ull << left) - 1, codes + line * kCacheLine);
    };
    if constexpr (Arrangement::kInBlocks) {
      unrolled<kLines<Arrangement> / 4>([&](auto group) {
        __m512i lines[4];
        unrolled<4>([&](auto i) { lines[i] = load_line(Arrangement::line(group, i)); });
        transpose_in_quarters(lines, place + 4 * group);
      });
      scales.read(scales_of(d), k, scale_of_row);
    } else {
      unrolled<kLines<Arrangement>>([&](auto line) { place[line] = load_line(line); });
    }
  }

  // What comes later in a row of the weight: at its end, in the row of the next block of columns.
  const uint8_t* ahead(int64_t d, int64_t k) const {
    const int64_t later = k + kAheadColumns;
    return later < op.source.width ? codes_at(d, later) : codes_at(d + kBlockColumns, later - op.source.width);
  }

  // The unit from column k of the weight on, for columns [begin, end) of the output.
  template <int64_t kRows>
  void multiply(int64_t begin, int64_t end, int64_t k) {
    constexpr int64_t kColumns = tile_columns(kRows);
    static_assert(kBlockColumns % kColumns == 0);
    const BFloat16* x[kRows];
    unrolled<kRows>([&](auto row) {  // behind the last row it again, whose totals nobody reads
      const int64_t i = row_begin + (row < rows ? row : rows - 1);
      x[row] = packed_rows<BFloat16>(op) + i * codes_packed_width(op) + k;
    });
    for (int64_t d = begin; d < end; d += kColumns) {
      __m512i lanes[kColumns][kLines<Arrangement>];
      Float scale[kColumns][Arrangement::kChains];
      const uint8_t *codes[kColumns], *later[kColumns];
      unrolled<kColumns>([&](auto column) {
        const int64_t row = d + column < end ? d + column : end - 1;
        codes[column] = codes_at(row, k);
        later[column] = ahead(row, k);
        if (Arrangement::kInBlocks || k + kUnitColumns > op.source.width) {
          load_lanes(row, k, lanes[column], scale[column]);
          codes[column] = reinterpret_cast<const uint8_t*>(lanes[column]);
        }
      });
      multiply_unit<Arrangement, kColumns, kRows>(
          [&](auto column, int64_t i) {
            __builtin_prefetch(later[column] + i * kCacheLine, 0, 2);
            return CodeLine<Code, Arrangement::kInBlocks>(_mm512_loadu_si512(codes[column] + i * kCacheLine));
          },
          [&](auto column, int64_t chain) { return scale[column][chain]; }, x, totals + (d - begin));
    }
  }

  // Columns [begin, end) of the output, kBlockColumns at most.
  void run(int64_t begin, int64_t end) {
    __builtin_memset(totals, 0, sizeof totals);
    for (int64_t k = 0; k < op.source.width; k += kUnitColumns) {
      if constexpr (Arrangement::kInBlocks) scales.begin_unit(k);
      if (rows == 1) {
        multiply<1>(begin, end, k);
      } else if (rows == 2) {
        multiply<2>(begin, end, k);
      } else if (rows <= 4) {
        multiply<4>(begin, end, k);
      } else {
        multiply<kDotRows>(begin, end, k);
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      Float* of_row = totals + i * kBlockColumns;
      sum_lanes_of_each<kBlockColumns>(of_row);
      float* result = fp32_rows(op) + (row_begin + i) * op.num_columns;
      __builtin_memcpy(result + begin, of_row, (end - begin) * sizeof(float));
    }
    if constexpr (!Arrangement::kInBlocks) {
      for (int64_t d = begin; d < end; ++d) {
        Float scale[1];
        scales.read(scales_of(d), 0, scale);
        for (int64_t i = row_begin; i < row_begin + rows; ++i) fp32_rows(op)[i * op.num_columns + d] *= scale[0][0];
      }
    }
  }
};

inline void codes_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const int64_t columns_end = panel_end * kPanelColumns < op.num_columns ? panel_end * kPanelColumns : op.num_columns;
  with_arrangement(op, [&](auto arrangement) {
    for (int64_t row = 0; row < op.num_rows; row += kDotRows) {
      const int64_t rows = op.num_rows - row < kDotRows ? op.num_rows - row : kDotRows;
      CodesProjection<decltype(arrangement)> projection{op, row, rows};
      for (int64_t begin = panel_begin * kPanelColumns; begin < columns_end; begin += kBlockColumns) {
        projection.run(begin, begin + kBlockColumns < columns_end ? begin + kBlockColumns : columns_end);
      }
    }
    const int64_t begin = panel_begin * kPanelColumns;
    const bool is_finished = op.post_norm_gain.data != nullptr && op.bias.data == nullptr;
    if (!is_finished) finish_columns<BFloat16>(op, begin, columns_end, fp32_rows(op) + begin, op.num_columns);
  });
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
