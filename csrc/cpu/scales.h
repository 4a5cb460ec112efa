// The scales of a panel of a quantized weight, and how the columns of a strip are summed under them: a sum over the
// columns that share a scale is multiplied by it and added to the fp32 total.
#pragma once

#include "project_dot.h"
#include "widen_codes.h"

#if defined(__AVX512F__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kStripWidth = 128;  // columns of the weight
constexpr int64_t kStripVectors = kPanelColumns / kLanes;
constexpr int64_t kStripSums = kStripWidth / 16;  // at most: blocks of scales have 16 columns or more

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
// of its total (two cores of an AMD EPYC, K*H = 12288, D = 4096, tiles of 8 to 11 rows in strips, T = 16, 32 and 64, in
// ms: mxfp8 5.4, 9.6 and 18.1, going on 5.3, 9.1 and 17.0; mxfp4 5.2, 9.3 and 17.6, going on 5.3, 9.1 and 16.7).
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
// scaled and numbers scaled, in strips: 1.33 and 1.08 at T = 64, 0.28 and 0.29 at T = 12).
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

// The sums over `width` columns of a scaled strip.
inline StripSums sums_of_scaled(int64_t width, float global) {
  StripSums sums;
  sums.width = width;
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

// Max columns of one sum. In fp32 a sum adds column after column: with 128 its error is 2.5 times that of a blocked
// product (torch's, on an Intel processor), with 32 it is 1.5 times.
template <class Packed>
constexpr int64_t kSumWidth = 32;
template <>
constexpr int64_t kSumWidth<BFloat16> = kStripWidth;

// The sums of the strip from column k on, with their scales.
template <class T>
void read_sums(const NormConcatLinear& op, const PanelScales& scales, int64_t k, StripSums& sums) {
  constexpr int64_t kWidth = kSumWidth<typename DotStep<T>::Packed>;
  const int64_t block_columns = op.scales.block_columns, left = op.source.width - k;
  const int64_t columns = left < kStripWidth ? left : kStripWidth;
  sums.sum_width = block_columns < kWidth ? block_columns : kWidth;
  sums.width = columns;  // no more: past the last block are no scales, and zero times what is there may be NaN
  if (!has_scales(op.weight_type)) {
    sums.sum_width = kWidth;
    for (int64_t i = 0; i < kStripWidth / kWidth; ++i) {
      for (Float& scale : sums.scales[i]) scale = Float{} + 1.0f;
    }
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

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
