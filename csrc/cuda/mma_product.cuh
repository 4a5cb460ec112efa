// How a block of norm_concat_linear.cu multiplies the stages of its ring.
#pragma once

#include <cstring>

#include "mma_ring.cuh"

namespace eagle_kernels::cuda {

// A lane's sums, and what it multiplies them from.
template <class K>
class MmaProduct {
 public:
  using T = typename K::T;

  float sum[K::kColumnTiles][K::kRowTiles][4] = {};
  float squares[2] = {};  // of the rows of x that this warp squares, if any

  __device__ __forceinline__ MmaProduct(const MmaWork<K>& work, MmaRing<K>& ring)
      : arguments_(work.arguments), op_(work.arguments.op), work_(work), ring_(ring) {
    if constexpr (K::kScaledStages) {
      scales_of_tile_ = static_cast<uint32_t>(work.first_output / op_.scales.block_rows * op_.scales.row_stride);
      if (op_.scales.global != nullptr) global_scale_ = load(op_.scales.global);
      is_new(scales_of_tile_);  // keeps the division out of the loop
    }
    // Kept in registers: ptxas recomputed them in every stage, 19 instructions of 449 with scales of blocks, 22 of 372
    // with one for a row. A dense weight takes fewer where it may.
    if constexpr (K::kIsCodes) {
      is_new(weight_place_);
      is_new(x_place_);
    }
    if constexpr (K::kFused) is_new(square_place_);
  }

  // Multiplies the part of the range that is in its first chunk, or the next one.
  __device__ __forceinline__ void multiply(bool is_next) {
    const OfChunk of(work_, is_next);
    if constexpr (kKeepsGainsPlace) is_new(gains_place_ = part_of(0) * 16);  // here, or 80 registers do not suffice
    if constexpr (K::kBlockScales && !K::kFused) {
      find_scales();
      scales_.load(arguments_, of.column + work_.begin * K::kStageColumns);
    }
    // In the fused kernel each warp squares two rows, and warps past the last row skip that: it is 19 of 188
    // instructions in its loop, 38 of 360 with codes.
    own_squares_ = op_.source.norm != Norm::kNone && of.chunk.sum_squares == nullptr &&
                  (K::kFused ? work_.first_row + 2 * warp_ < op_.num_rows
                             : work_.first_output == 0 && column_warp_ < K::kRowTiles / 2);
    if constexpr (K::kFused || K::kIsCodes) {
      // With a dense weight products of pairs saved 84 instructions in a warp's step of 2 KB.
      const bool exact = K::kGainFactor == 1 && !of.gain_is_float32 && of.offset == 0;
      exact || of.gain == nullptr ? multiply_stages<true>(of) : multiply_stages<false>(of);
    } else {
      multiply_stages<false>(of);
    }
    if constexpr (K::kIsCodes) finish_codes();
  }

  __device__ __forceinline__ void clear() {
    squares[0] = 0;
    std::memset(sum, 0, sizeof sum);
    std::memset(total_, 0, sizeof total_);
    std::memset(nan_, 0, sizeof nan_);
  }

  // Stores the range's sums and sums of squares.
  __device__ __forceinline__ void store_partial() const {
    const int64_t first = static_cast<int64_t>(blockIdx.y) * op_.num_rows;
#pragma unroll
    for (int n = 0; n < K::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t row = work_.first_row + (row_warp_ * K::kRowTiles + n) * 8 + 2 * q_ + i;
        if (row >= op_.num_rows) continue;
        float* partial = arguments_.partial + (first + row) * arguments_.partial_stride + work_.first_output;
#pragma unroll
        for (int m = 0; m < K::kColumnTiles; ++m) {
          const int column = (column_warp_ * K::kColumnTiles + m) * 16 + g_;
          store(partial + column, sum[m][n][i]);
          store(partial + column + 8, sum[m][n][2 + i]);
        }
      }
    }
    if (!own_squares_) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float all = squares[i];
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      const int64_t row = work_.first_row + (row_warp_ * K::kRowTiles + 2 * column_warp_ + i) * 8 + g_;
      if (q_ == 0 && row < op_.num_rows) store(arguments_.squares + first + row, all);
    }
  }

 private:
  // A chunk's part of the work.
  struct OfChunk {
    const Chunk& chunk;
    const int column, width;
    const int origin, first, last;  // K tiles: that of the chunk's first column, and the range
    const bool gain_is_float32 = chunk.gain.dtype == DType::kFloat32;
    const char* const gain = static_cast<const char*>(chunk.gain.data);
    // Without a gain the weight is still multiplied by 1: mma.sync wants four consecutive registers, and a value that
    // is either loaded or a product is moved there for every mma.sync (0.128 moves per byte of the weight at 64 rows).
    const float offset, scale = gain == nullptr ? 1.0f : K::kGainFactor;

    __device__ __forceinline__ OfChunk(const MmaWork<K>& work, bool is_next)
        : chunk(work.arguments.chunks[work.chunk + is_next]),
          column(static_cast<int>(chunk.column)),
          width(static_cast<int>(chunk.width)),
          origin(is_next ? work.next : 0),
          first(is_next ? work.next : work.begin),
          last(work.has_next() && !is_next ? work.next : work.end),
          offset(gain != nullptr ? work.arguments.op.source.norm_offset : 1.0f) {}
  };

  static_assert((K::kSteps & (K::kSteps - 1)) == 0 && (K::kWeightRowBytes & (K::kWeightRowBytes - 1)) == 0);
  static constexpr int kStepBytes = K::kWeightRowBytes / (K::kStageColumns / kStepColumns);  // of a row of the weight
  static constexpr bool kKeepsGainsPlace = K::kFused || K::kIsCodes;  // not where it costs 9 %: dense, 32 rows
  // With scales of blocks and three blocks on an SM the NaN bits of all rows are in one: 24 bytes would be spilled.
  static constexpr bool kNansInOne = K::kForm == Form::kE4M3Blocks && K::kInThrees;

  // kPairs: there is no gain, or its factors are exact in T and one instruction multiplies a pair. A third loop, for no
  // gain, costs the others registers, and 15 % more instructions.
  template <bool kPairs>
  __device__ __forceinline__ void multiply_stages(const OfChunk& of) {
    [[maybe_unused]] float next_scale = 0;
    if constexpr (K::kScaledStages) next_scale = scale_of_stage(of, of.first);
    for (int k_tile = of.first; k_tile < of.last; ++k_tile, ring_.advance()) {
      const char* stage = ring_.take(k_tile);
      [[maybe_unused]] const float stage_scale = next_scale;
      if constexpr (K::kScaledStages) next_scale = scale_of_stage(of, k_tile + 1);
      // Unrolled steps overlap, and spill for 64 rows on sm_100 and with scales of blocks and residuals.
#pragma unroll(K::kRows == 64 || (K::kBlockScales && K::kResidual) ? 1 : K::kSteps)
      for (int at_step = 0; at_step < K::kSteps; ++at_step) {
        multiply_step<kPairs>(of, stage, at_step);
        if constexpr (K::kBlockScales && !K::kFused) {
          // Widths are multiples of a step's columns. The sums of the range's last block are added by finish_codes.
          const int ahead = k_tile * K::kStageColumns + (step_of(at_step) + 1) * kStepColumns;
          if (ahead >= of.width || ahead >= work_.end * K::kStageColumns) break;
          const int column = of.column + ahead;
          if ((column >> arguments_.scale_shift) << arguments_.scale_shift == column) {
            add_scaled();
            std::memset(sum, 0, sizeof sum);
            scales_.load(arguments_, column);
          }
        }
      }
      if constexpr (K::kScaledStages) {
#pragma unroll
        for (float& of_row : scales_.value) of_row = stage_scale;
        add_scaled();
        std::memset(sum, 0, sizeof sum);
      }
      if (own_squares_) add_squares(stage + K::kWeightBytes);
    }
  }

  template <bool kPairs>
  __device__ __forceinline__ void multiply_step(const OfChunk& of, const char* stage, int at_step) {
    const int part = part_of(at_step);
    const char* x_stage = stage + K::kWeightBytes;
    const char* gains_of_stage = x_stage + K::kSourceRows * K::kRowBytes;
    const Words* gains;
    if constexpr (kKeepsGainsPlace) {
      const uint32_t place = (gains_place_ + at_step * kStepColumns * 2) * (of.gain_is_float32 ? 2 : 1);
      gains = reinterpret_cast<const Words*>(gains_of_stage + place);
    } else {
      gains = reinterpret_cast<const Words*>(gains_of_stage) + (of.gain_is_float32 ? 2 * part : part);
    }
    [[maybe_unused]] float factor[8];
    if constexpr (!kPairs) {
      gain_factors<T>(gains[0], gains[of.gain_is_float32], of.gain_is_float32, of.offset, of.scale, factor);
      if constexpr (K::kFourBits && !K::kGainOnX) {
        const float inner[6] = {factor[4], factor[1], factor[5], factor[2], factor[6], factor[3]};
        std::memcpy(factor + 1, inner, sizeof inner);
      }
    }
    // Without a gain x is multiplied by 1: 402 instructions in a stage, 479 with a branch for every row of x.
    [[maybe_unused]] Words pairs_of_x{0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    if (K::kGainOnX && kPairs && of.gain != nullptr) pairs_of_x = *gains;
    // Fragments of the two mma.sync of 16 columns each: rows g and g + 8 of each tile.
    uint32_t w[K::kColumnTiles][2][4];
#pragma unroll
    for (int m = 0; m < 2 * K::kColumnTiles; ++m) {
      Words row = weight_at(stage, at_step, m);
      if constexpr (!kPairs && !K::kGainOnX) {
        row = scaled<T>(row, factor);
      } else if (!K::kGainOnX && kCodeGainScale<T> == 1 && of.gain != nullptr) {
        row = eagle_kernels::cuda::multiply(row, K::kFourBits ? paired(*gains) : *gains, T{});
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) w[m / 2][i / 2][i % 2 * 2 + m % 2] = word(row, i);
    }
#pragma unroll
    for (int n = 0; n < K::kRowTiles; ++n) {
      Words x = x_at(x_stage + (x_place_ ^ at_step * kStepColumns * 2) + n * 8 * K::kRowBytes).words[0];
      if constexpr (K::kGainOnX) x = kPairs ? eagle_kernels::cuda::multiply(x, pairs_of_x, T{}) : scaled<T>(x, factor);
      if constexpr (K::kFourBits) x = paired(x);
#pragma unroll
      for (int m = 0; m < K::kColumnTiles; ++m) {
        const auto &low = w[m][0], &high = w[m][1];
        mma(sum[m][n], low[0], low[1], low[2], low[3], x.x, x.y, T{});
        mma(sum[m][n], high[0], high[1], high[2], high[3], x.z, x.w, T{});
      }
    }
  }

  // 8 columns of row g of the warp's m-th 8 rows of the weight.
  __device__ __forceinline__ Words weight_at(const char* stage, int at_step, int m) {
    const char* from = stage + (weight_place_ ^ at_step * kStepBytes) + m * 8 * K::kWeightRowBytes;
    if constexpr (!K::kIsCodes) {
      return *reinterpret_cast<const Words*>(from);
    } else {
      using Code = typename K::Code;
      using CodesOfLane = typename K::CodesOfLane;
      const CodesOfLane codes = *reinterpret_cast<const CodesOfLane*>(from);
      if constexpr (kNansInOne) {
        nan_[0] |= nan_bits_of_row(nan_bits(codes, Code{}), m);
      } else if constexpr (!K::kFourBits) {
        nan_[m] |= nan_bits(codes, Code{});
      }
      if constexpr (!K::kScaledCodes) {
        return widen(codes, Code{}, T{});
      } else {
        const int part = part_of(at_step), row = (first_column_tile_ + m) * 8 + g_;
        const int own = part * 8 / K::kScaledColumns % 4;
        const int word = step_of(at_step) * kStepColumns / K::kScaledColumns / 4;
        const char* scales_of_row = stage + K::kScalesAt + row * K::kRowScales;
        const uint32_t four = reinterpret_cast<const uint32_t*>(scales_of_row)[word];
        if constexpr (K::kForm == Form::kNvfp4) {
          nan_[m] |= nan_bits(four, Float8E4M3{});
          return widen_scaled_nvfp4(codes, four, own);
        } else if constexpr (K::kForm == Form::kMxfp4) {
          return widen_scaled_mxfp4(codes, four, own);
        } else {
          return widen_scaled_mxfp8(codes, four, own);
        }
      }
    }
  }

  static __device__ __forceinline__ Pack<T> x_at(const char* from) {
    const auto pack_at = [](const char* at) { return Pack<T>{{*reinterpret_cast<const Words*>(at)}}; };
    if constexpr (!K::kResidual) return pack_at(from);
    return add(pack_at(from), pack_at(from + K::kRows * K::kRowBytes));
  }

  __device__ __forceinline__ void add_squares(const char* x_stage) {
    if constexpr (K::kFused) {
      // Two rows per warp, every 16th part per lane.
      static_assert(K::kParts % 16 == 0);
#pragma unroll
      for (int part = 0; part < K::kParts; part += 16) {
        squares[0] += sum_of_squares(widen(x_at(x_stage + square_place_ + part * 16)));
      }
    } else {
      // A warp reads two tiles of rows a second time: only the blocks of the first outputs do.
#pragma unroll 1
      for (int part = q_; part < K::kParts; part += 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = (row_warp_ * K::kRowTiles + 2 * column_warp_ + i) * 8 + g_;
          squares[i] += sum_of_squares(widen(x_at(x_stage + place<K::kRowBytes>(row, part))));
        }
      }
    }
  }

  // Scales of blocks, fused: that of this warp's columns of a K tile.
  __device__ __forceinline__ float scale_of_stage(const OfChunk& of, int k_tile) const {
    const int column = of.column + step_warp_ * K::kSteps * kStepColumns + (k_tile - of.origin) * K::kStageColumns;
    // No branch: with one ptxas keeps less in registers. Nor `of.column` + `of.width`, which it spills on sm_100.
    const bool inside = column < static_cast<int>(of.chunk.column) + static_cast<int>(of.chunk.width);
    const uint32_t at = scales_of_tile_ + (inside ? column >> arguments_.scale_shift : 0);
    const float scale = load_scale(op_.scales.type, op_.scales.data, at);
    return inside ? global_scale_ * scale : 0.0f;
  }

  __device__ __forceinline__ void add_scaled() {
#pragma unroll
    for (int at = 0; at < K::kColumnTiles * K::kRowTiles * 4; ++at) {
      const int m = at / 4 / K::kRowTiles, n = at / 4 % K::kRowTiles, i = at % 4;
      total_[m][n][i] += sum[m][n][i] * scales_.value[2 * m + i / 2];
    }
  }

  // Multiplies the sums of codes by their scales, of a row or the last block; sums of a row with a NaN are NaN.
  __device__ __forceinline__ void finish_codes() {
    if constexpr (K::kScaledCodes) {
      const float by = op_.scales.global == nullptr ? 1.0f : load(op_.scales.global);
#pragma unroll
      for (float& of_row : scales_.value) of_row = K::kForm == Form::kNvfp4 ? by * kNvfp4Unscale : by;
    } else if constexpr (!K::kBlockScales) {  // not earlier: two more registers spill on sm_100
      find_scales();
      scales_.load(arguments_, 0);
    }
#pragma unroll
    for (int m = 0; m < 2 * K::kColumnTiles; ++m) {
      if constexpr (K::kScaledStages) scales_.value[m] = 0;
      if (row_has_nan(kNansInOne ? nan_[0] << m : nan_[m])) scales_.value[m] = bits_to_float(0x7fffffff);
    }
    add_scaled();
    std::memcpy(sum, total_, sizeof sum);
  }

  static __device__ __forceinline__ int place_of_lane(int row, int part) {
    if constexpr (!K::kIsCodes) return place<K::kRowBytes>(row, part);
    if constexpr (K::kFourBits) return place_four_bits<K::kWeightRowBytes>(row, part / 4) + part % 4 * 4;
    return place_codes<K::kWeightRowBytes>(row, part / 2) + part % 2 * 8;
  }
  __device__ __forceinline__ void find_scales() {
    scales_.find(op_, work_.first_output, [&](int m) { return (first_column_tile_ + m) * 8 + g_; });
  }
  __device__ __forceinline__ int step_of(int at_step) const { return step_warp_ * K::kSteps + at_step; }
  __device__ __forceinline__ int part_of(int at_step) const { return step_of(at_step) * 4 + q_; }

  const Arguments& arguments_;
  const NormConcatLinear& op_;
  const MmaWork<K>& work_;
  MmaRing<K>& ring_;
  const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32, g_ = lane_ / 4, q_ = lane_ % 4;
  const int column_warp_ = warp_ % K::kColumnWarps, other_warp_ = warp_ / K::kColumnWarps;
  const int row_warp_ = K::kFused ? 0 : other_warp_, step_warp_ = K::kFused ? other_warp_ : 0;
  const int first_column_tile_ = column_warp_ * 2 * K::kColumnTiles;  // of 8 columns
  float total_[K::kColumnTiles][K::kRowTiles][4] = {};  // scaled, of earlier blocks of columns
  // Scales and NaN bits of the rows of the weight whose sums this lane has; rows past the last take the last one's.
  RowScales<2 * K::kColumnTiles> scales_;
  uint32_t nan_[kNansInOne ? 1 : 2 * K::kColumnTiles] = {};
  uint32_t scales_of_tile_ = 0;
  bool own_squares_ = false;
  float global_scale_ = 1;
  // Offsets of a lane's first step, from where the weight, x and the gains (of 16 bits) begin in a stage. Another
  // step's are these XOR its bytes for the weight and x, since the swizzle is an XOR too, and plus its bytes for gains.
  uint32_t weight_place_ = place_of_lane(first_column_tile_ * 8 + g_, part_of(0));
  uint32_t x_place_ = place<K::kRowBytes>(row_warp_ * K::kRowTiles * 8 + g_, part_of(0));
  uint32_t gains_place_ = 0;
  // The offset of the first part that a lane squares, in its warp's two rows: recomputed in every stage it was 7 of 26
  // instructions.
  uint32_t square_place_ = place<K::kRowBytes>(2 * warp_ + lane_ / 16, lane_ % 16);
};

}  // namespace eagle_kernels::cuda
