// What a block of norm_concat_linear.cu multiplies, and how it gets into its ring of stages.
#pragma once

#include "mma_tile.cuh"
#include "source_row.cuh"

namespace eagle_kernels::cuda {

// A block's rows of x, columns of the output and range of the columns of the concat.
template <class K>
struct MmaWork {
  static constexpr int kTilesOfUnit = K::kUnitColumns / K::kStageColumns;

  const Arguments& arguments;
  int64_t first_row, first_output;
  int rows;  // of x that there are, at most K::kRows
  // K tiles [begin, end), of a stage's columns each, counted from the first column of `chunk`; those from `next` on are
  // of the next chunk.
  int chunk = 0, begin, end, next;

  __device__ __forceinline__ explicit MmaWork(const Arguments& of) : arguments(of) {
    const NormConcatLinear& op = arguments.op;
    // Rounds of rows over the same output columns are neighboring blocks: the second finds the weight in L2.
    const int rounds = static_cast<int>((op.num_rows + K::kRows - 1) / K::kRows);
    first_row = static_cast<int64_t>(blockIdx.x % rounds) * K::kRows;
    first_output = static_cast<int64_t>(blockIdx.x / rounds) * K::kColumns;
    rows = static_cast<int>(op.num_rows - first_row < K::kRows ? op.num_rows - first_row : K::kRows);
    if constexpr (K::kFused) {
      const BlockRange& range = arguments.of_block[K::rank()];
      chunk = range.chunk, begin = range.begin * kTilesOfUnit, end = range.end * kTilesOfUnit;
      next = units() * kTilesOfUnit;
    } else {
      int range = blockIdx.y;
      for (; range >= arguments.ranges.of_chunk[chunk]; ++chunk) range -= arguments.ranges.of_chunk[chunk];
      const int ranges = arguments.ranges.of_chunk[chunk];
      begin = units() * range / ranges * kTilesOfUnit, next = end = units() * (range + 1) / ranges * kTilesOfUnit;
    }
  }

  __device__ __forceinline__ bool has_next() const { return K::kFused && end > next; }

  struct Place {
    bool is_next;
    int column, ahead;  // of its chunk, and ahead of the first chunk's first column
  };
  __device__ __forceinline__ Place place_of(int k_tile) const {
    const bool is_next = has_next() && k_tile >= next;
    const int column = (is_next ? k_tile - next : k_tile) * K::kStageColumns;
    return {is_next, column, is_next ? column + static_cast<int>(arguments.chunks[chunk].width) : column};
  }

 private:
  __device__ __forceinline__ int units() const { return units_of(arguments.chunks[chunk].width, K::kUnitColumns); }
};

// The part of the ring that this thread copies: half of the threads copy the weight, and half x.
template <class K>
class MmaRing {
 public:
  using T = typename K::T;
  using Weight = typename K::Weight;

  static __device__ __forceinline__ bool copies_weight() { return threadIdx.x < kCopyThreads; }

  __device__ __forceinline__ explicit MmaRing(const MmaWork<K>& work)
      : arguments_(work.arguments),
        op_(work.arguments.op),
        work_(work),
        outputs_(static_cast<int>(op_.num_columns - work.first_output)),
        weight_(static_cast<const Weight*>(op_.weight) + (work.first_output + weight_row_) * op_.weight_row_stride +
                (arguments_.chunks[work.chunk].column + weight_column_) / K::kPerWeight) {}

  // Copies all stages but one: take() copies into the place of the one multiplied before.
  __device__ __forceinline__ void fill() {
    for (int i = 0; i < K::kStages - 1; ++i) copy(work_.begin + i, i);
  }

  // Prefetches what the ring takes first into L2, which is coherent: the previous kernel may still write the weight.
  __device__ __forceinline__ void prefetch_weight() const {
    for (int k_tile = work_.begin; k_tile < work_.end && k_tile < work_.begin + K::kStages - 1; ++k_tile) {
      const auto [is_next, column, ahead] = work_.place_of(k_tile);
      if (column + weight_column_ >= arguments_.chunks[work_.chunk + is_next].width) continue;
#pragma unroll
      for (int i = 0; i < K::kColumns / kWeightCopyRows; ++i) {
        const int row = i * kWeightCopyRows;
        if (row >= outputs_ - weight_row_) continue;
        prefetch(weight_ + row * op_.weight_row_stride + ahead / K::kPerWeight);
      }
    }
  }

  // Finds the rows of x, for all threads after their next barrier.
  __device__ __forceinline__ void find_sources() {
    if (threadIdx.x >= (work_.has_next() ? 2 * K::kRows : K::kRows)) return;
    const int of_chunk = threadIdx.x / K::kRows, of_rows = threadIdx.x % K::kRows;
    const Chunk& chunk = arguments_.chunks[work_.chunk + of_chunk];
    const int64_t out_row = work_.first_row + of_rows;
    const int64_t row = out_row < op_.num_rows ? source_row(chunk, out_row) : -1;
    const T** to = sources_ + of_chunk * K::kSourceRows + of_rows;
    *to = row < 0 ? nullptr : static_cast<const T*>(chunk.x) + row * chunk.x_row_stride;
    if constexpr (K::kResidual) {
      const bool present = row >= 0 && chunk.residual != nullptr;
      to[K::kRows] = present ? static_cast<const T*>(chunk.residual) + row * chunk.residual_row_stride : nullptr;
    }
  }

  // Waits for the stage of a K tile, and copies a later one in place of the stage before it, which no warp reads after
  // the barrier.
  __device__ __forceinline__ const char* take(int k_tile) {
    wait_for_copies<K::kStages - 2>();
    K::sync();
    copy(k_tile + K::kStages - 1, before());
    return ring_ + slot_ * K::kStageBytes;
  }
  __device__ __forceinline__ void advance() { slot_ = slot_ + 1 == K::kStages ? 0 : slot_ + 1; }

  // After advance(), the memory of the stage that was multiplied last: nothing is copied there before the next barrier.
  __device__ __forceinline__ char* multiplied() const { return ring_ + before() * K::kStageBytes; }

 private:
  static constexpr int kCopyRows = kCopyThreads / K::kParts;
  static constexpr int kWeightCopyRows = kCopyThreads / K::kWeightParts;
  // A thread's rows of the weight are a multiple of four (in four bits: eight) apart, and those of x of two, so that
  // all are swizzled alike: 12 instructions per stage fewer.
  static_assert(kCopyRows % 2 == 0);
  static_assert(kWeightCopyRows % (K::kFourBits ? 8 : 4) == 0);

  __device__ __forceinline__ int before() const { return slot_ == 0 ? K::kStages - 1 : slot_ - 1; }

  // Copies this thread's part of a tile; past the range the group is empty, so that groups count stages.
  __device__ __forceinline__ void copy(int k_tile, int slot) const {
    const auto [is_next, column, ahead] = work_.place_of(k_tile);
    const Chunk& chunk = arguments_.chunks[work_.chunk + is_next];
    char* stage = ring_ + slot * K::kStageBytes;
    const int width = static_cast<int>(chunk.width);
    if (k_tile < work_.end && copies_weight()) {
      copy_weight(width, column, ahead, stage);
      if constexpr (K::kScaledCodes) copy_scales(chunk, width, column, stage);
    } else if (k_tile < work_.end) {
      copy_x(width, column, is_next ? sources_ + K::kSourceRows : sources_, stage + K::kWeightBytes);
      copy_gain(chunk, width, column, stage + K::kWeightBytes + K::kSourceRows * K::kRowBytes);
    }
    commit_copies();
  }

  __device__ __forceinline__ void copy_weight(int width, int column, int ahead, char* stage) const {
    const bool inside = column + weight_column_ < width;
#pragma unroll
    for (int i = 0; i < K::kColumns / kWeightCopyRows; ++i) {
      const int row = i * kWeightCopyRows;
      copy_early(stage + weight_place_ + row * K::kWeightRowBytes,
                 weight_ + row * op_.weight_row_stride + ahead / K::kPerWeight, inside && row < outputs_ - weight_row_);
    }
  }

  __device__ __forceinline__ void copy_scales(const Chunk& chunk, int width, int column, char* stage) const {
    constexpr int kWords = K::kRowScales / 4, kRowsAtOnce = kCopyThreads / kWords;  // four scales are a word
    const int row = static_cast<int>(threadIdx.x) / kWords, word = static_cast<int>(threadIdx.x) % kWords;
    const int first = column + word * 4 * K::kScaledColumns;
    const int64_t of_row = (work_.first_output + row) * op_.scales.row_stride;
    const char* scales = static_cast<const char*>(op_.scales.data) + of_row +
                         (static_cast<int>(chunk.column) + first) / K::kScaledColumns;
#pragma unroll
    for (int i = 0; i < (K::kColumns + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
      const int below = i * kRowsAtOnce;
      if (K::kColumns % kRowsAtOnce != 0 && row + below >= K::kColumns) break;
      copy_word_early(stage + K::kScalesAt + (row + below) * K::kRowScales + word * 4,
                      scales + below * op_.scales.row_stride, first < width && row + below < outputs_);
    }
  }

  __device__ __forceinline__ void copy_x(int width, int column, const T** sources, char* stage) const {
    // Threads whose rows are all past the last leave them as they are, since nothing is stored of their sums. For one
    // row of e4m3 that is 5 % of a stage's instructions.
    if (K::kFused && copy_row_ >= work_.rows) return;
    const bool inside = column + copy_part_ * kPack < width;
#pragma unroll
    for (int i = 0; i < K::kSourceRows / kCopyRows; ++i) {
      const int row = copy_row_ + i * kCopyRows;
      const T* source = sources[row];
      copy_async(stage + x_place_ + i * kCopyRows * K::kRowBytes, source + column + copy_part_ * kPack,
                 inside && source != nullptr);
    }
  }

  __device__ __forceinline__ void copy_gain(const Chunk& chunk, int width, int column, char* stage) const {
    const char* gain = static_cast<const char*>(chunk.gain.data);
    const int gains = chunk.gain.dtype == DType::kFloat32 ? 4 : 8;  // in 16 bytes
    const int part = static_cast<int>(threadIdx.x) - kCopyThreads;
    if (part * gains >= K::kStageColumns) return;
    const int first = column + part * gains;
    copy_async(stage + part * 16, gain + first * (16 / gains), gain != nullptr && first < width);
  }

  static __device__ __forceinline__ int place_of_copy(int row, int part) {
    if constexpr (K::kFourBits) return place_four_bits<K::kWeightRowBytes>(row, part);
    return K::kIsCodes ? place_codes<K::kWeightRowBytes>(row, part) : place<K::kRowBytes>(row, part);
  }

  const Arguments& arguments_;
  const NormConcatLinear& op_;
  const MmaWork<K>& work_;
  char* const ring_ = K::memory();
  // [kChunks, kSourceRows], null: zeros
  const T** const sources_ = reinterpret_cast<const T**>(ring_ + K::kStages * K::kStageBytes);
  int slot_ = 0;  // of the stage that is multiplied next
  const int copy_row_ = threadIdx.x % kCopyThreads / K::kParts, copy_part_ = threadIdx.x % K::kParts;
  const int weight_row_ = threadIdx.x % kCopyThreads / K::kWeightParts, weight_part_ = threadIdx.x % K::kWeightParts;
  const int weight_column_ = weight_part_ * (16 / static_cast<int>(sizeof(Weight))) * K::kPerWeight;
  const int weight_place_ = place_of_copy(weight_row_, weight_part_);
  const int x_place_ = place<K::kRowBytes>(copy_row_, copy_part_);
  const int outputs_;
  const Weight* const weight_;
};

}  // namespace eagle_kernels::cuda
