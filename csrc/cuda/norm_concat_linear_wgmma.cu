// norm_concat_linear by wgmma on sm_90a, up to 64 rows in a pass over the weight: on an H100 44.5 us for 32 rows at
// K=3, H=D=4096, where the split kernels take 53.6. A warpgroup multiplies 64 columns of the output by 64 rows in one
// instruction. A block has two to four warpgroups (four read x half as often as two), or one where there are so few
// columns that most SMs would have no block. plan.py takes it from 17 rows on (codes with scales of blocks: from 33 on)
// as far as it is faster than norm_concat and the library's product: codes in up to three passes.
//
// As in the split kernels a block has a range of the columns of one chunk, the weight and x pass through a ring of
// stages by 16-byte copies (cp.async), and the blocks of a cluster sum their ranges (cluster_sums.cuh). A stage has 128
// bytes of each row of the weight.
//
// The weight is wgmma's operand in registers: there the gain is multiplied into it, or codes are widened. x is the one
// in shared memory, in the 128-byte swizzle, in which lanes also read the weight without bank conflicts. Before the
// product a thread processes the parts of x that it copied itself: it adds the residuals, sums the squares and, with
// codes, multiplies the gain into x.
//
// Sums run by column within a range, then over ranges and chunks. The ranges depend on the chunks' widths, D, the type
// of the weight, whether there are residuals, and the GPU's number of SMs (cut.cuh), not on the rows.
#include "../norm_concat_linear.h"
#include "cluster_sums.cuh"
#include "codes.cuh"
#include "cut.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "ranges.cuh"
#include "scales.cuh"
#include "weight_gain.cuh"

namespace eagle_kernels::cuda {
namespace {

constexpr int kRows = 64;                   // of x in a block: what one wgmma multiplies
constexpr int kRowBytes = 128, kParts = 8;  // of 16 bytes
constexpr int kHalfColumns = 64;            // of x in a row of 128 bytes
[[maybe_unused]] constexpr int kSteps = kHalfColumns / 16;  // of one wgmma each
constexpr int kGainBytes = 1024;  // gains take 512 at most; the next stage's rows must begin at a multiple of 1024

template <class Value, Form form, int warpgroups, bool residual>
struct Tile {
  using T = Value;
  static constexpr Form kForm = form;
  static constexpr int kWarpgroups = warpgroups;
  static constexpr bool kResidual = residual;
  static constexpr bool kIsCodes = kForm != Form::kDense, kBlockScales = kForm == Form::kE4M3Blocks;
  using Code = std::conditional_t<kForm == Form::kInt8, Int8, Float8E4M3>;
  using Weight = std::conditional_t<kIsCodes, uint8_t, T>;
  static constexpr int kThreads = 128 * kWarpgroups, kColumns = 64 * kWarpgroups;
  static constexpr int kStageColumns = unit_columns(kIsCodes), kHalves = kStageColumns / kHalfColumns;
  // A stage has the weight, then the halves of x, then those of the residuals, then the gain.
  static constexpr int kHalfBytes = kRows * kRowBytes, kXAt = kColumns * kRowBytes, kXBytes = kHalves * kHalfBytes;
  static constexpr int kGainAt = kXAt + (kResidual ? 2 : 1) * kXBytes;
  static constexpr int kStageBytes = kGainAt + kGainBytes;
  // On an SM. With blocks of scales the two sets of sums take more than 128 registers.
  static constexpr bool kTwoBlocks = kWarpgroups <= 2 && !kBlockScales && 3 * kStageBytes <= 113 << 10;
  static constexpr int kBlocksOnAnSm = kTwoBlocks ? 2 : 1;
  static constexpr int kStages = (228 / kBlocksOnAnSm - 1) * 1024 / kStageBytes;
  static constexpr int64_t kSharedBytes = kStages * kStageBytes;
  // A thread copies the same part of every kCopyRows-th row.
  static constexpr int kCopyRows = kThreads / kParts, kPasses = (kRows + kCopyRows - 1) / kCopyRows;
  // Rows of sums are padded by four floats, so that lanes of four rows hit all banks.
  static constexpr int kSumStride = kColumns + 4;
  static_assert(kStages >= 3 && (kSumStride + 1) * kRows * sizeof(float) <= kSharedBytes);
  static_assert(kCopyRows % 8 == 0 && kColumns % kCopyRows == 0 && kPasses * kCopyRows >= kRows);
};

// How the gain is multiplied into a pair of weights. kProduct: w * gain in one instruction, for bf16 gains with
// norm_offset = 0 and for ones in place of no gain. kPlusOne: w * gain + w in one instruction, for bf16 gains with
// norm_offset = 1. kFloat32: everything else.
enum class Gain { kProduct, kPlusOne, kFloat32 };

// What a block multiplies: rows of x, columns of the output, and a range of the columns of one chunk.
template <class K>
struct BlockWork {
  const Arguments& arguments;
  const NormConcatLinear& op;
  int64_t first_row, first_output;
  int rows;  // of x that there are, at most kRows
  int k = 0, begin, end, width;  // the chunk, and its columns, of whole stages
  const char* gain;
  bool gain_is_float32;

  __device__ __forceinline__ explicit BlockWork(const Arguments& of) : arguments(of), op(of.op) {
    // Rounds of rows over the same output columns are neighboring blocks: the second finds the weight in L2.
    const int rounds = static_cast<int>((op.num_rows + kRows - 1) / kRows);
    first_row = static_cast<int64_t>(blockIdx.x % rounds) * kRows;
    first_output = static_cast<int64_t>(blockIdx.x / rounds) * K::kColumns;
    rows = static_cast<int>(op.num_rows - first_row < kRows ? op.num_rows - first_row : kRows);
    int range = blockIdx.y;
    for (; range >= arguments.ranges.of_chunk[k]; ++k) range -= arguments.ranges.of_chunk[k];
    width = static_cast<int>(chunk().width);
    gain = static_cast<const char*>(chunk().gain.data);
    gain_is_float32 = chunk().gain.dtype == DType::kFloat32;
    const int units = units_of(chunk().width, K::kStageColumns);
    begin = units * range / arguments.ranges.of_chunk[k] * K::kStageColumns;
    end = units * (range + 1) / arguments.ranges.of_chunk[k] * K::kStageColumns;
  }

  __device__ __forceinline__ const Chunk& chunk() const { return arguments.chunks[k]; }
};

// The part of the ring that this thread copies.
template <class K>
class Ring {
 public:
  using T = typename K::T;
  static constexpr int kPassBytes = K::kCopyRows * kRowBytes;

  const int copy_row = threadIdx.x / kParts, copy_part = threadIdx.x % kParts;
  uint32_t begin = shared_address(shared_memory());
  uint32_t copy_place = copy_row * kRowBytes + (copy_part ^ copy_row % 8) * 16;
  const T* x[K::kPasses];  // null: zeros
  const T* residual[K::kPasses];

  __device__ __forceinline__ explicit Ring(const BlockWork<K>& work) : work_(work) {
    const NormConcatLinear& op = work.op;
    is_new(begin);
    end_ = begin + K::kStages * K::kStageBytes;
    is_new(copy_place);
    weight_ = static_cast<const Weight*>(op.weight) + (work.first_output + copy_row) * op.weight_row_stride +
              work.chunk().column + copy_part * kWeightPart;
    is_new(weight_);
    weight_step_ = K::kCopyRows * op.weight_row_stride;
    outputs_ = static_cast<int>(op.num_columns - work.first_output) - copy_row;
  }

  __device__ __forceinline__ uint32_t last() const { return end_ - K::kStageBytes; }
  __device__ __forceinline__ uint32_t after(uint32_t stage) const {
    const uint32_t next = stage + K::kStageBytes;
    return next == end_ ? begin : next;
  }
  __device__ __forceinline__ bool in_tile(int pass) const { return copy_row + pass * K::kCopyRows < kRows; }

  // Before the previous kernel has ended, the ring's first stages of the weight are prefetched into L2, which is
  // coherent. Not into the ring: a thread's copies complete in order, and the first x would wait for all of the weight
  // that was requested before it.
  __device__ __forceinline__ void prefetch_weight() const {
    for (int i = 0; i < K::kStages - 1; ++i) {
      const int column = work_.begin + i * K::kStageColumns;
      if (column >= work_.end || column + copy_part * kWeightPart >= work_.width) continue;
#pragma unroll
      for (int j = 0; j < K::kColumns / K::kCopyRows; ++j) {
        if (j * K::kCopyRows < outputs_) prefetch(weight_ + j * weight_step_ + column);
      }
    }
  }

  // Ones in place of no gain, for Gain::kProduct.
  __device__ __forceinline__ void store_ones() const {
    if (work_.gain != nullptr || threadIdx.x >= K::kStageColumns / kPack) return;
    const uint32_t one = narrow(Pair{1.0f, 1.0f}, T{});
    for (uint32_t stage = begin; stage != end_; stage += K::kStageBytes) {
      store_shared(stage + K::kGainAt + threadIdx.x * 16, Words{one, one, one, one});
    }
  }

  // Finds the rows of x. In place of those that there are not, all stages have zeros from here on.
  __device__ __forceinline__ void find_sources() {
    const Chunk& chunk = work_.chunk();
#pragma unroll
    for (int i = 0; i < K::kPasses; ++i) {
      const int64_t out_row = work_.first_row + copy_row + i * K::kCopyRows;
      const int64_t row = in_tile(i) && out_row < work_.op.num_rows ? source_row(chunk, out_row) : -1;
      x[i] = row < 0 ? nullptr : static_cast<const T*>(chunk.x) + row * chunk.x_row_stride;
      if constexpr (K::kResidual) {
        const bool present = row >= 0 && chunk.residual != nullptr;
        residual[i] = present ? static_cast<const T*>(chunk.residual) + row * chunk.residual_row_stride : nullptr;
      }
      if (row >= 0 || !in_tile(i)) continue;
      for (uint32_t stage = begin; stage != end_; stage += K::kStageBytes) {
#pragma unroll
        for (int half = 0; half < K::kHalves; ++half) {
          store_shared(stage + K::kXAt + half * K::kHalfBytes + copy_place + i * kPassBytes, Words{0, 0, 0, 0});
        }
      }
    }
  }

  __device__ __forceinline__ void fill() const {
    for (int i = 0; i < K::kStages - 1; ++i) copy(work_.begin + i * K::kStageColumns, begin + i * K::kStageBytes);
  }

  // Copies this thread's part of a stage's columns; past the range the group is empty, so that groups count stages.
  __device__ __forceinline__ void copy(int column, uint32_t stage) const {
    if (column < work_.end) {
      copy_weight(column, stage);
      copy_x(column, stage);
      copy_gain(column, stage);
    }
    commit_copies();
  }

 private:
  using Weight = typename K::Weight;
  static constexpr int kWeightPart = 16 / static_cast<int>(sizeof(Weight));

  __device__ __forceinline__ void copy_weight(int column, uint32_t stage) const {
    const Weight* from = weight_ + column;
    const bool inside = column + copy_part * kWeightPart < work_.width;
#pragma unroll
    for (int i = 0; i < K::kColumns / K::kCopyRows; ++i, from += weight_step_) {
      copy_async(stage + copy_place + i * kPassBytes, from, inside && i * K::kCopyRows < outputs_);
    }
  }

  __device__ __forceinline__ void copy_x(int column, uint32_t stage) const {
#pragma unroll
    for (int i = 0; i < K::kPasses; ++i) {
      if (x[i] == nullptr) continue;
#pragma unroll
      for (int half = 0; half < K::kHalves; ++half) {
        const int own = column + half * kHalfColumns + copy_part * kPack;
        const uint32_t to = stage + K::kXAt + half * K::kHalfBytes + copy_place + i * kPassBytes;
        copy_async(to, x[i] + own, own < work_.width);
        if constexpr (K::kResidual) {
          if (residual[i] != nullptr) copy_async(to + K::kXBytes, residual[i] + own, own < work_.width);
        }
      }
    }
  }

  __device__ __forceinline__ void copy_gain(int column, uint32_t stage) const {
    const int of_part = work_.gain_is_float32 ? 4 : 8, first = column + static_cast<int>(threadIdx.x) * of_part;
    if (work_.gain == nullptr || first >= column + K::kStageColumns) return;
    copy_async(stage + K::kGainAt + threadIdx.x * 16, work_.gain + first * (16 / of_part), first < work_.width);
  }

  const BlockWork<K>& work_;
  uint32_t end_;
  const Weight* weight_;
  int64_t weight_step_;
  int outputs_;
};

// A warp's 16 columns of the output, in its lanes' registers, and the sums of squares of the rows that a thread copies.
template <class K>
class Product {
 public:
  using T = typename K::T;
  static constexpr float kGainFactor = K::kIsCodes ? kCodeGainScale<T> : kGainScale<T>;

  __device__ __forceinline__ Product(const BlockWork<K>& work, Ring<K>& ring) : work_(work), op_(work.op), ring_(ring) {
    own_squares_ = op_.source.norm != Norm::kNone && work.chunk().sum_squares == nullptr;
    if constexpr (K::kBlockScales) {
      find_scales();
      scales_.load(work_.arguments, static_cast<int>(work_.chunk().column) + work_.begin);
    }
  }

  __device__ __forceinline__ void multiply() {
    const bool is_exact = kGainScale<T> == 1 && !work_.gain_is_float32;
    if (work_.gain == nullptr || (is_exact && op_.source.norm_offset == 0)) {
      multiply_stages<Gain::kProduct>();
    } else if (is_exact && op_.source.norm_offset == 1) {
      multiply_stages<Gain::kPlusOne>();
    } else {
      multiply_stages<Gain::kFloat32>();
    }
    if constexpr (K::kIsCodes && !K::kBlockScales) {
      find_scales();
      scales_.load(work_.arguments, 0);
      scale_sums();
    }
  }

  // Stores the sums, [kRows, kColumns], and those of squares, [kRows]. Sums of a row of codes with a NaN are NaN.
  __device__ __forceinline__ void store_sums(float* of_block, float* squares_of) {
    float added[2] = {};
    if constexpr (K::kIsCodes) {
#pragma unroll
      for (int i = 0; i < 2; ++i) added[i] = row_has_nan(nan_[i]) ? bits_to_float(0x7fffffff) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < kRows / 2; ++at) {
      const int tile = at / 4, i = at % 4;
      float& own = K::kBlockScales ? total_[tile][i] : sum_[tile][i];
      if constexpr (!K::kIsCodes) is_new(own);
      const int token = tile * 8 + 2 * q_ + i % 2, output = output_of(i / 2);
      of_block[token * K::kSumStride + output] = K::kIsCodes ? own + added[i / 2] : own;
    }
#pragma unroll
    for (int i = 0; i < K::kPasses; ++i) {
      for (int distance = kParts / 2; distance > 0; distance /= 2) {
        squares_[i] += __shfl_xor_sync(~0u, squares_[i], distance);
      }
      if (ring_.copy_part == 0 && ring_.in_tile(i)) squares_of[ring_.copy_row + i * K::kCopyRows] = squares_[i];
    }
  }

 private:
  static constexpr int kAllSteps = K::kHalves * kSteps;

  template <Gain kGain>
  __device__ __forceinline__ void multiply_stages() {
    uint32_t stage = ring_.begin, before = ring_.last();
    for (int column = work_.begin; column < work_.end; column += K::kStageColumns) {
      wait_for_copies<K::kStages - 2>();
      if constexpr (K::kIsCodes) __syncthreads();  // other threads copied the gains
      take_own_parts<kGain>(stage);
      fence_async_proxy();
      wait_for_wgmma();  // it reads the stage that is overwritten next
      __syncthreads();
      ring_.copy(column + (K::kStages - 1) * K::kStageColumns, before);

      if constexpr (K::kIsCodes) {
        load_codes(stage);
      } else {
        load_weights<kGain>(stage);
      }
      fence_wgmma();
#pragma unroll
      for (int step = 0; step < kAllSteps; ++step) {
        const uint64_t b = matrix_descriptor(stage + K::kXAt + step / kSteps * K::kHalfBytes);
        const uint64_t columns_of_b = b + step % kSteps * kDescriptorColumns;
        if (K::kBlockScales && step == 0) {
          wgmma<false>(sum_, a_[step], columns_of_b, T{});
        } else {
          wgmma<true>(sum_, a_[step], columns_of_b, T{});
        }
      }
      commit_wgmma();
      if constexpr (K::kBlockScales) {
        wait_for_wgmma();
        scale_sums();
        const int next_column = column + K::kStageColumns;
        if (next_column < work_.end) {
          scales_.load(work_.arguments, static_cast<int>(work_.chunk().column) + next_column);
        }
      }
      before = stage;
      stage = ring_.after(stage);
    }
    wait_for_wgmma();
  }

  // Processes the parts of x that this thread copied itself: round(x + residual) replaces x. With codes it also
  // multiplies the gain in, for 64 rows of x instead of 256 of the weight, and permutes the columns of x: a lane has
  // columns 4q to 4q + 3 of 16 codes, where the fragment of wgmma has 2q, 2q + 1, 2q + 8, 2q + 9.
  template <Gain kGain>
  __device__ __forceinline__ void take_own_parts(uint32_t stage) {
    if (!K::kResidual && !K::kIsCodes && !own_squares_) return;
#pragma unroll
    for (int i = 0; i < K::kPasses; ++i) {
      // With codes the warp stays together for its barrier below.
      if (K::kIsCodes ? warp_ * 4 + i * K::kCopyRows >= work_.rows : ring_.x[i] == nullptr) continue;
#pragma unroll
      for (int half = 0; half < K::kHalves; ++half) {
        const uint32_t rows_at = stage + K::kXAt + half * K::kHalfBytes + i * Ring<K>::kPassBytes;
        const uint32_t own = rows_at + ring_.copy_place;
        Pack<T> pack{{load_shared(own)}};
        if constexpr (K::kResidual) {
          if (ring_.residual[i] != nullptr) pack = add(pack, Pack<T>{{load_shared(own + K::kXBytes)}});
        }
        if (own_squares_ && ring_.x[i] != nullptr) squares_[i] += sum_of_squares(widen(pack));
        Words& w = pack.words[0];
        if constexpr (!K::kIsCodes) {
          if constexpr (K::kResidual) store_shared(own, w);
          continue;
        }
        multiply_gain<kGain>(stage, half * kHalfColumns + ring_.copy_part * kPack, w);
        // Of two neighboring parts words 0 and 2 of both go into the first part, words 1 and 3 into the second, once
        // both lanes have read theirs.
        sync_warp();
        if (ring_.x[i] == nullptr) continue;  // zeros stay zeros whatever the gain is
        const uint32_t to = rows_at + ring_.copy_row * kRowBytes + ring_.copy_part % 2 * 8;
        const int first = ring_.copy_part & ~1, swap = ring_.copy_row % 8;
        store_shared(to + (first ^ swap) * 16, w.x, w.z);
        store_shared(to + ((first + 1) ^ swap) * 16, w.y, w.w);
      }
    }
  }

  // With codes: eight columns of x times the gain.
  template <Gain kGain>
  __device__ __forceinline__ void multiply_gain(uint32_t stage, int column, Words& w) const {
    if constexpr (kGain == Gain::kFloat32) {
      float factor[kPack];
#pragma unroll
      for (int j = 0; j < kPack; j += 2) {
        const Pair factors = factors_at(stage, column + j);
        factor[j] = factors.first;
        factor[j + 1] = factors.second;
      }
      w = scaled<T>(w, factor);
    } else {
      const Words gains = load_shared(stage + K::kGainAt + column * 2);
      w = {times_pair<kGain>(w.x, gains.x), times_pair<kGain>(w.y, gains.y), times_pair<kGain>(w.z, gains.z),
           times_pair<kGain>(w.w, gains.w)};
    }
  }

  // The fragments of the weight, rows g and g + 8 of the warp's 16, columns 2q and 2q + 1 of each part, times the gain.
  template <Gain kGain>
  __device__ __forceinline__ void load_weights(uint32_t stage) {
    [[maybe_unused]] uint32_t gains[kParts / 4][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrices(stage + (matrices_ ^ step * 32), a_[step]);
    if constexpr (kGain != Gain::kFloat32) {
#pragma unroll
      for (int i = 0; i < kParts / 4; ++i) load_matrices(stage + K::kGainAt + (4 * i + matrix_) * 16, gains[i]);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Pair factors{};
      if constexpr (kGain == Gain::kFloat32) factors = factors_at(stage, part * 8 + 2 * q_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t& w = a_[part / 2][part % 2 * 2 + i];
        if constexpr (kGain == Gain::kFloat32) {
          w = scaled<T>(w, factors.first, factors.second);
        } else {
          w = times_pair<kGain>(w, gains[part / 4][part % 4]);
        }
      }
    }
  }

  // The fragments of widened codes: columns 4q and 4q + 1 of 16 are where wgmma has 2q, the others where it has 2q + 8.
  __device__ __forceinline__ void load_codes(uint32_t stage) {
    using Code = typename K::Code;
#pragma unroll
    for (int step = 0; step < kAllSteps; step += 2) {
      uint32_t codes[4];
      load_matrices(stage + (matrices_ ^ step * 16), codes);
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        nan_[at % 2] |= nan_bits(codes[at], Code{});
#pragma unroll
        for (int i = 0; i < 2; ++i) a_[step + at / 2][2 * i + at % 2] = widen_pair(codes[at], i, Code{}, T{});
      }
    }
  }

  // (offset + gain) * scale of two columns, of gains in fp32 or T.
  __device__ __forceinline__ Pair factors_at(uint32_t stage, int column) const {
    const uint32_t at = stage + K::kGainAt + column * (work_.gain_is_float32 ? 4 : 2);
    const Pair pair = work_.gain_is_float32 ? load_shared_pair(at) : widen(load_shared_word(at), T{});
    const float offset = op_.source.norm_offset;
    return {(offset + pair.first) * kGainFactor, (offset + pair.second) * kGainFactor};
  }

  template <Gain kGain>
  static __device__ __forceinline__ uint32_t times_pair(uint32_t pair, uint32_t gains) {
    return multiply_add(pair, gains, kGain == Gain::kPlusOne ? pair : 0x80008000u, T{});
  }

  // Column of the output that is this lane's row i of the weight, counted from the block's first.
  __device__ __forceinline__ int output_of(int i) const { return warp_ * 16 + g_ + i * 8; }
  __device__ __forceinline__ void find_scales() {
    scales_.find(op_, work_.first_output, [&](int i) { return output_of(i); });
  }

  // Sums times their scales; those of blocks are added to the sums of earlier stages.
  __device__ __forceinline__ void scale_sums() {
#pragma unroll
    for (int at = 0; at < kRows / 2; ++at) {
      float& of_block = sum_[at / 4][at % 4];
      is_new(of_block);
      if constexpr (K::kBlockScales) {
        total_[at / 4][at % 4] += of_block * scales_.value[at % 4 / 2];
      } else {
        of_block *= scales_.value[at % 4 / 2];
      }
    }
  }

  const BlockWork<K>& work_;
  const NormConcatLinear& op_;
  Ring<K>& ring_;
  const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32, g_ = lane_ / 4, q_ = lane_ % 4;
  // The offset that this lane gives ldmatrix for the first 32 bytes of this warp's 16 rows of the weight. Its XOR with
  // 32 n is the offset 32 n bytes further, as the swizzle is an XOR too.
  const int matrix_ = lane_ / 8, matrix_row_ = lane_ % 8;
  const uint32_t matrices_ =
      (warp_ * 16 + matrix_ % 2 * 8 + matrix_row_) * kRowBytes + (matrix_ / 2 ^ matrix_row_) * 16;
  uint32_t a_[kAllSteps][4];  // fragments of the weight, which wgmma reads until wait_for_wgmma
  float sum_[8][4] = {}, squares_[K::kPasses] = {};
  float total_[8][4] = {};  // with blocks of scales, of which a stage has one: the scaled sums of earlier stages
  // With codes: the scales of rows g and g + 8 of this warp's rows of the weight, and whether a code of theirs is NaN.
  RowScales<2> scales_;
  uint32_t nan_[2] = {};
  bool own_squares_;
};

template <class K>
__device__ __forceinline__ void multiply_block(const Arguments& arguments) {
  const BlockWork<K> work(arguments);
  Ring<K> ring(work);
  ring.prefetch_weight();
  ring.store_ones();
  wait_for_previous_kernel();
  let_next_kernel_start();
  ring.find_sources();
  ring.fill();

  Product<K> product(work, ring);
  product.multiply();
  float* of_block = reinterpret_cast<float*>(shared_memory());  // [kRows, kColumns]
  float* squares_of = of_block + kRows * K::kSumStride;         // [kRows]
  product.store_sums(of_block, squares_of);
  const BlockSums<kRows, K::kColumns, K::kSumStride> sums{of_block, squares_of};
  constexpr bool kAtOnce = !(K::kBlockScales && K::kWarpgroups == 4);  // that instance would spill
  const float unscale = 1 / Product<K>::kGainFactor;
  sum_over_cluster<typename K::T, kAtOnce>(arguments, work.first_row, work.first_output, sums, unscale);
}

template <class T, Form kForm, int kWarpgroups, bool kResidual>
__global__ void __launch_bounds__(Tile<T, kForm, kWarpgroups, kResidual>::kThreads,
                                  Tile<T, kForm, kWarpgroups, kResidual>::kBlocksOnAnSm)
    norm_concat_linear_wgmma_kernel(const __grid_constant__ Arguments arguments) {
  if constexpr (kHasWgmma) {
    multiply_block<Tile<T, kForm, kWarpgroups, kResidual>>(arguments);
  } else {
    trap();  // no plan launches this; a launch ends in an error
  }
}

template <class T, Form kForm, int kWarpgroups, bool kResidual>
int launch_tile(const Arguments& arguments, const Device& device) {
  using K = Tile<T, kForm, kWarpgroups, kResidual>;
  const NormConcatLinear& op = arguments.op;
  const int64_t rounds = (op.num_rows + kRows - 1) / kRows;
  const int64_t outputs = (op.num_columns + K::kColumns - 1) / K::kColumns;
  Shape shape{rounds * outputs, arguments.ranges.count, K::kThreads, K::kSharedBytes};
  shape.cluster = arguments.ranges.count;
  return launch<norm_concat_linear_wgmma_kernel<T, kForm, kWarpgroups, kResidual>>(shape, arguments, device);
}

template <class T, Form kForm>
int launch_columns(int warpgroups, const Arguments& arguments, const Device& device) {
  const bool residual = has_residual(arguments.op.source);
  const auto launch_of = [&](auto of_block) {
    constexpr int kWarpgroups = decltype(of_block)::value;
    return residual ? launch_tile<T, kForm, kWarpgroups, true>(arguments, device)
                    : launch_tile<T, kForm, kWarpgroups, false>(arguments, device);
  };
  using std::integral_constant;
  if (warpgroups == 4) return launch_of(integral_constant<int, 4>{});
  if (warpgroups == 3) return launch_of(integral_constant<int, 3>{});
  if constexpr (kForm == Form::kDense) {
    if (warpgroups == 1) return launch_tile<T, kForm, 1, false>(arguments, device);
  }
  return launch_of(integral_constant<int, 2>{});
}

}  // namespace

// At 3x5120x5120, where the longest range takes 52 us and reading 36, 17 rows took 55.4 us and 47.5 in two steps.
bool wgmma_pays(int64_t num_chunks, int64_t width, int64_t num_columns, int32_t multiprocessors) {
#ifdef EAGLE_KERNELS_ALTERNATIVES
  if (wanted("EAGLE_KERNELS_WGMMA_COLUMNS") != 0) return true;  // it is to be timed
#endif
  Chunk chunks[kMaxChunks];
  for (Chunk& chunk : chunks) chunk.width = width;
  NormConcatLinear op{};
  op.source.chunks = chunks;
  op.source.num_chunks = num_chunks;
  op.source.width = num_chunks * width;
  op.num_columns = num_columns;
  Device device{};
  device.multiprocessors = multiprocessors;
  return cut_for_warpgroups(op, device).time <= us_of_two_steps(num_columns, op.source.width);
}

}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

int norm_concat_linear_wgmma_cuda(const NormConcatLinear& op, const Device& device) {
  if (!device.wgmma || !has_scale_of_tiles(op, 1, unit_columns(true))) return cudaErrorNotSupported;
  const WarpgroupCut cut = cut_for_warpgroups(op, device);
  Arguments arguments = arguments_of(op);
  arguments.ranges = cut.ranges;
  const bool is_bfloat16 = op.source.dtype == DType::kBFloat16;
  return with_form(op, [&](auto form) -> int {
    constexpr Form kForm = decltype(form)::value;
    if constexpr (has_scaled_codes(kForm)) {
      return cudaErrorNotSupported;
    } else if constexpr (kForm == Form::kDense) {
      return is_bfloat16 ? launch_columns<BFloat16, kForm>(cut.warpgroups, arguments, device)
                         : launch_columns<Float16, kForm>(cut.warpgroups, arguments, device);
    } else {
      // With codes the gain is multiplied into x, which may overflow fp16.
      return is_bfloat16 ? launch_columns<BFloat16, kForm>(cut.warpgroups, arguments, device) : cudaErrorNotSupported;
    }
  });
}

}  // namespace eagle_kernels
