// The projection without AVX-512 of a weight of codes, and of a bf16 weight by many rows. The weight rows of a register
// tile are widened to fp32 in L1, kDotBlockK columns at a time, and multiplied by all rows like an fp32 weight
// (project_dot.h). For few rows codes are widened in registers instead, and summed in the same order.
//
// A row's only scale multiplies its sums; several scales multiply its numbers as they are widened. A finite weight must
// not become infinite: where x is zero the product would be NaN. So where a scale is large enough for that, the row's
// numbers are divided by kLargeUnit, and its sums multiplied by it.
#pragma once

#include "project_dot.h"
#include "widen_codes.h"

#if !defined(__AVX512F__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// Max rows for which a bf16 weight is read in place, and codes are widened in registers. K=3, H=D=4096, AVX2, two cores
// of an AMD EPYC, minima in ms, bf16 at T = 8, 16, 32 and 64: 6.3, 12.8, 25.1 and 50.8 in place; 7.6, 12.7, 24.4 and
// 46.8 widened in L1. fp16, which one instruction loads and widens, gains nothing (49.4 and 50.7 at T = 64). Codes
// at T = 3, 4 and 8: int8_row 2.7, 3.4 and 6.3 in registers, and 4.5, 5.8 and 6.7 in L1; mxfp4 4.1, 5.3 and 9.5, and
// 5.6, 6.3 and 8.9.
constexpr int64_t kMaxRowsInPlace = 8;
constexpr int64_t kMaxRowsOfCodes = kWidenedTile.rows;

constexpr float kLargeScale = 0x1p118f;  // times 448 it is finite, and so is 2^128 * 448 / kLargeUnit
constexpr float kLargeUnit = 512.0f;

// Rows of a weight whose numbers are codes or bf16.
template <class Number>
struct RowsOfNumbers {
  static constexpr int64_t kColumns = kDotTile<float>.columns, kRuns = kDotBlockK<float> / kRunNumbers;

  const NormConcatLinear& op;
  int64_t row_bytes;    // from one row to the next
  bool scales_numbers;  // a row has several scales
  // For each of the rows that are multiplied together, by row number modulo kTogether.
  static constexpr int64_t kTogether = dot_block_columns(kDotTile<float>);
  static_assert(kTogether == dot_block_columns(kWidenedTile) && kColumns >= kWidenedTile.columns);
  bool has_nan[kTogether] = {};
  float units[kTogether];  // of their sums
  int64_t scale_shift;  // column k of a block is multiplied by scales[][k >> scale_shift]
  float scales[kColumns][kRuns];

  explicit RowsOfNumbers(const NormConcatLinear& op)
      : op(op),
        row_bytes(op.weight_row_stride * (kIsCode<Number> ? 1 : sizeof(BFloat16))),
        scales_numbers(kIsCode<Number> && op.scales.block_columns < op.source.width),
        scale_shift(op.scales.block_columns == 32 ? 5 : op.scales.block_columns == 64 ? 6 : 4) {}

  const uint8_t* place(int64_t d, int64_t k) const {
    return static_cast<const uint8_t*>(op.weight) + d * row_bytes + bytes_of<Number>(k);
  }

  // Reads the scales of columns [k, k + count) of rows [d, d + columns).
  void read_scales(int64_t d, int64_t columns, int64_t k, int64_t count) {
    if (!scales_numbers) return;
    for (int64_t i = 0; i < columns; ++i) {
      float& unit = units[(d + i) % kTogether];
      if (k == 0) unit = has_large_scale(d + i) ? kLargeUnit : 1.0f;
      read_scales_of_row(d + i, k, count, kRunUnit<Number> / unit, scales[i]);
    }
  }

  // Looks for NaN after the products, when codes are in L1 (fp8_row, T = 1: 2.6 ms; before the products 3.2).
  void end_rows(int64_t d, int64_t columns, int64_t k, int64_t count) {
    if constexpr (kLosesNaN<Number>) {
      for (int64_t i = d; i < d + columns; ++i) has_nan[i % kTogether] |= any_is_nan(place(i, k), count);
    }
  }

  // Multiplies the sums of columns [begin, end), at most kTogether, by their unit and by the only scale of their
  // row. NaN where the row has a NaN code.
  void finish(int64_t begin, int64_t end, float* totals, int64_t totals_stride) {
    if constexpr (kIsCode<Number>) {
      for (int64_t d = begin; d < end; ++d) {
        const int64_t place = d % kTogether;
        bool& is_nan = has_nan[place];
        const float unit = is_nan ? __builtin_nanf("") : scales_numbers ? units[place] : kRunUnit<Number>;
        const float scale = scales_numbers ? 1.0f : load_scales(scale_place(d), Part{1})[0];
        for (int64_t i = 0; i < op.num_rows; ++i) {
          float& total = totals[i * totals_stride + (d - begin)];
          total = total * unit * scale;
        }
        is_nan = false;
      }
    }
  }

 private:
  float global() const { return op.scales.global == nullptr ? 1.0f : *op.scales.global; }
  // Where the scales of row d begin.
  int64_t scale_place(int64_t d) const {
    return (op.scales.block_rows == 1 ? d : d / op.scales.block_rows) * op.scales.row_stride;
  }

  // As many scales as `span` has, times the global scale.
  template <class Span>
  Float load_scales(int64_t place, Span span) const {
    if (op.scales.type == ScaleType::kFloat32) {
      return load(static_cast<const float*>(op.scales.data) + place, span) * global();
    }
    const UInt codes = extend(load_lanes<UByte>(static_cast<const uint8_t*>(op.scales.data) + place, span));
    return (op.scales.type == ScaleType::kFloat8E8M0 ? value_of(codes, Float8E8M0{}) : value_of(codes, Float8E4M3{})) *
           global();
  }

  // Scales in e4m3 are at most 448. Those in e8m0 are compared as bytes (mxfp8, T = 1: 3.9 ms; as values 4.3).
  bool has_large_scale(int64_t d) const {
    const int64_t count = (op.source.width - 1) / op.scales.block_columns + 1;
    float most = 448.0f;
    if (op.scales.type == ScaleType::kFloat8E8M0) {
      const uint8_t* bytes = static_cast<const uint8_t*>(op.scales.data) + scale_place(d);
      uint8_t largest = 0;
      for (int64_t i = 0; i < count; ++i) largest = bytes[i] > largest ? bytes[i] : largest;
      most = kCodeTable<Float8E8M0>.values[largest];
    } else if (op.scales.type == ScaleType::kFloat32) {
      Float any = {};
      for_each_vector(count, [&](int64_t i, auto span) {
        const Float scale = load(static_cast<const float*>(op.scales.data) + scale_place(d) + i, span);
        const Float magnitude = (Float)((UInt)scale & 0x7fffffff);
        any = magnitude > any ? magnitude : any;
      });
      most = 0.0f;
      for (int64_t lane = 0; lane < kLanes; ++lane) most = any[lane] > most ? any[lane] : most;
    }
    return !(most * __builtin_fabsf(global()) < kLargeScale);
  }

  // Writes the scales times `unit`, one for each 2^scale_shift columns. A block has a multiple of 128 columns, or a
  // power of two.
  void read_scales_of_row(int64_t d, int64_t k, int64_t count, float unit, float* place) const {
    const int64_t size = op.scales.block_columns, row = scale_place(d);
    if (size < 128) {
      const int64_t first = row + (k >> scale_shift);
      const auto read = [&](int64_t i, auto span) { store(place + i, load_scales(first + i, span) * unit, Whole{}); };
      return for_each_vector((count + size - 1) >> scale_shift, read);
    }
    const int64_t runs = 128 >> scale_shift;
    for (int64_t i = 0, block = k / size, left = size - k % size; i * 128 < count; ++i) {
      const Float scale = Float{} + load_scales(row + block, Part{1})[0] * unit;
      for (int64_t run = 0; run < runs; run += kLanes) store(place + i * runs + run, scale, Whole{});
      left -= 128;
      if (left == 0) ++block, left = size;
    }
  }
};

// Widens the last `count` numbers of a row, times `scale`, as a run: zero past them even if `scale` is not finite.
template <class Number>
inline void widen_last(const uint8_t* numbers, int64_t count, float scale, Float* run) {
  uint8_t last[bytes_of<Number>(kRunNumbers)] = {};
  __builtin_memcpy(last, numbers, bytes_of<Number>(count));
  widen_run(last, run, Number{});
  float values[kRunNumbers];
  unrolled<kRunVectors>([&](auto v) { store(values + v * kLanes, run[v] * scale, Whole{}); });
  __builtin_memset(values + count, 0, (kRunNumbers - count) * sizeof(float));
  __builtin_memcpy(run, values, sizeof values);
}

// Rows widened to fp32 in L1.
template <class Number>
struct RowsAsFloats : RowsOfNumbers<Number> {
  using Element = float;
  static constexpr DotTile kTile = kWidenedTile;
  alignas(kCacheLine) float floats[kTile.columns * kDotBlockK<float>];

  explicit RowsAsFloats(const NormConcatLinear& op) : RowsOfNumbers<Number>(op) {}

  // Whole runs of codes, as in CodeTile: adding a zero turns a sum of -0 into 0, so both must add the same zeros.
  static constexpr int64_t tile_width(int64_t count) {
    return kIsCode<Number> ? round_up(count, kRunNumbers) : count;
  }
  WeightRows<float, kBits<Number>> rows(int64_t d, int64_t columns, int64_t k, int64_t count) {
    this->read_scales(d, columns, k, count);
    for (int64_t i = 0; i < columns; ++i) {
      const uint8_t* numbers = this->place(d + i, k);
      float* place = floats + i * kDotBlockK<float>;
      if (this->scales_numbers) {
        widen(numbers, count, place, [&](int64_t column) { return this->scales[i][column >> this->scale_shift]; });
      } else {
        widen(numbers, count, place, [](int64_t) { return 1.0f; });
      }
    }
    return {floats, kDotBlockK<float>};
  }

 private:
  template <class ScaleOf>
  static void widen(const uint8_t* numbers, int64_t count, float* place, ScaleOf scale_of) {
    for (int64_t k = 0; k < count; k += kRunNumbers, numbers += bytes_of<Number>(kRunNumbers)) {
      Float run[kRunVectors];
      const float scale = scale_of(k);
      if (k + kRunNumbers <= count) {
        widen_scaled_run(numbers, scale, run, Number{});
      } else {
        widen_last<Number>(numbers, count - k, scale, run);
      }
      unrolled<kRunVectors>([&](auto v) { store(place + k + v * kLanes, run[v], Whole{}); });
    }
  }
};

// Rows read as codes, which are widened in registers as they are multiplied.
template <class Code, bool kScalesNumbers>
struct CodeTile {
  struct Run {
    Float lanes[kRunVectors];
  };
  struct Step {
    using Packed = float;
    static constexpr int64_t kStep = kRunNumbers;
    static Run load_packed(const float* packed) {
      Run run;
      unrolled<kRunVectors>([&](auto v) { run.lanes[v] = EAGLE_KERNELS_ISA::load(packed + v * kLanes, Whole{}); });
      return run;
    }
    static Float multiply_add(Float sum, const Run& weight, const Run& packed) {
      unrolled<kRunVectors>(
          [&](auto v) { sum = DotStep<float>::multiply_add(sum, weight.lanes[v], packed.lanes[v]); });
      return sum;
    }
  };
  const uint8_t* codes;
  int64_t row_bytes;
  const float (*scales)[RowsOfNumbers<Code>::kRuns];
  int64_t scale_shift;
  RowsAhead<kBits<Code>> ahead{};

  template <class Span>
  Run load(int64_t column, int64_t k, Span span) const {
    const uint8_t* place = codes + column * row_bytes + bytes_of<Code>(k);
    const float scale = kScalesNumbers ? scales[column][k >> scale_shift] : 1.0f;
    Run run;
    if constexpr (std::is_same_v<Span, Part>) {
      widen_last<Code>(place, span.count, scale, run.lanes);
    } else if constexpr (kScalesNumbers) {
      widen_scaled_run(place, scale, run.lanes, Code{});
    } else {
      widen_run(place, run.lanes, Code{});
    }
    return run;
  }
};

template <class Code, bool kScalesNumbers, DotTile kTileOfCodes>
struct RowsOfCodes : RowsOfNumbers<Code> {
  using Element = float;
  static constexpr DotTile kTile = kTileOfCodes;

  explicit RowsOfCodes(const NormConcatLinear& op) : RowsOfNumbers<Code>(op) {}

  static constexpr int64_t tile_width(int64_t count) { return count; }
  CodeTile<Code, kScalesNumbers> rows(int64_t d, int64_t columns, int64_t k, int64_t count) {
    this->read_scales(d, columns, k, count);
    return {this->place(d, k), this->row_bytes, this->scales, this->scale_shift};
  }
};

template <class T, class Code, bool kScalesNumbers>
void project_codes_in_registers(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  // Each column of a tile is a chain of sums: four keep one row busier than three (int8_row, T = 1: 1.8 ms and 2.3).
  if (op.num_rows <= kDotTile<float>.rows) {
    dot_project<T, RowsOfCodes<Code, kScalesNumbers, kDotTile<float>>>(op, panel_begin, panel_end);
  } else {
    dot_project<T, RowsOfCodes<Code, kScalesNumbers, kWidenedTile>>(op, panel_begin, panel_end);
  }
}

template <class T, class Code>
void project_codes_by_floats(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  if (op.num_rows > kMaxRowsOfCodes) return dot_project<T, RowsAsFloats<Code>>(op, panel_begin, panel_end);
  if (op.scales.block_columns < op.source.width) {
    return project_codes_in_registers<T, Code, true>(op, panel_begin, panel_end);
  }
  project_codes_in_registers<T, Code, false>(op, panel_begin, panel_end);
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
