// The sizes of norm_concat_linear.cu's blocks, and where values are in a stage of their rings.
#pragma once

#include <type_traits>

#include "codes.cuh"
#include "fused_sums.cuh"
#include "pack.cuh"
#include "scales.cuh"
#include "weight_gain.cuh"

namespace eagle_kernels::cuda {

constexpr int kCopyThreads = kThreads / 2;  // for the weight, and for x
constexpr int kStepColumns = 32;            // columns of the concat that a warp's 16-byte loads cover

// Blocks of up to 64 rows take 83 to 100 KB of shared memory, and an SM of these GPUs has 100 KB.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kSharedBlocks = 1;
#else
constexpr int kSharedBlocks = 2;
#endif

// How the sums of the ranges are added up. With kFusedInThrees an SM has three blocks of the fused kernel in place of
// two: clusters leave fewer slots empty in some shapes. Codes of eight bits have one stage in flight there, and at
// 3x5376x5376 still take 34.6 us of an H200, where two blocks with two stages in flight take 41.0. With kFusedInPairs
// two neighbors of a cluster are launched as one block, of two rows of threads: clusters of four then fill all SMs but
// four, where 62 clusters of four blocks run at once on 124 SMs and 64 take two waves (3x4096x4096). Wide pairs have 96
// output columns each: at D = 6144 they are 64 clusters as well.
enum class End { kSplit, kFused, kFusedInThrees, kFusedInPairs, kFusedInWidePairs };
constexpr int kBytesOfThree = 75 << 10;  // what each of three blocks on an SM of Hopper can have
constexpr int kBytesOfPair = 227 << 10;  // and what one can
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
constexpr bool kHasPairs = true;
#else  // no clusters, or no block of so much memory: their instances are empty
constexpr bool kHasPairs = false;
#endif

// What a block computes, how its warps share it, and what it has in shared memory: a ring of stages, and more in the
// fused kernel. A stage has the weight, x, the residuals, the gain, and scales of 16 or 32 columns.
template <class Value, Form form, int rows, bool residual, End end>
struct MmaTile {
  using T = Value;
  static constexpr Form kForm = form;
  static constexpr int kRows = rows;
  static constexpr bool kResidual = residual;
  static constexpr End kEnd = end;
  static constexpr bool kIsCodes = kForm != Form::kDense, kFused = kEnd != End::kSplit;
  static constexpr bool kFourBits = has_four_bits(kForm), kScaledCodes = has_scaled_codes(kForm);
  static constexpr bool kWide = kEnd == End::kFusedInWidePairs;
  static constexpr bool kInThrees = kEnd == End::kFusedInThrees, kInPairs = kEnd == End::kFusedInPairs || kWide;
  static constexpr int kColumns = kWide ? kWideColumns : kFused ? kFusedColumns : kSplitColumns;
  static constexpr int kPacksOfRow = kColumns / kOutputColumns;
  static constexpr int kRowWarps = kRows == 128 ? 2 : 1;
  static constexpr int kStepWarps = kFused ? 4 : 1;  // share the steps of a stage
  static constexpr int kColumnWarps = kWarps / kRowWarps / kStepWarps;
  static constexpr int kColumnTiles = kColumns / 16 / kColumnWarps;  // of a warp, 16 columns each
  static constexpr int kRowTiles = kRows / 8 / kRowWarps;            // 8 rows each
  static constexpr int kSourceRows = kResidual ? 2 * kRows : kRows;  // in a stage
  static constexpr int kThreadRows = kInPairs ? 2 : 1;               // of a launched block
  static constexpr bool kAlone = kRows == 128 || kInPairs;           // on an SM
  static constexpr int kBlocksOnAnSm = kAlone ? 1 : kInThrees && kSharedBlocks == 2 ? 3 : kSharedBlocks;
  // Stages of codes have 256 columns in the fused kernel: with half as many barriers and address computations as stages
  // of 128 these were 0.171 instructions per byte with the gain multiplied into x, 0.215 with neither. Scales of blocks
  // of at least 64 columns and 64 rows multiply a warp's sums once a stage (0.192; 0.4 with a scale for each row).
  static constexpr int kUnitColumns = kFused ? fused_unit_columns(kIsCodes) : unit_columns(kIsCodes);
  // With residuals three stages of 256 columns of 8-bit codes would take 108 KB. Four scales of 32 columns are copied
  // together, so a stage has 128 or more.
  static constexpr int kNarrow = kScaledCodes ? 128 : 64;
  static constexpr int kOfRows = kFused && kResidual && !kFourBits ? 128 : kUnitColumns;
  static constexpr int kStageColumns = kSourceRows > 32 ? kNarrow : kOfRows;
  static constexpr int kRowBytes = 2 * kStageColumns;
  static constexpr int kWeightRowBytes = kFourBits ? kStageColumns / 2 : kIsCodes ? kStageColumns : kRowBytes;
  static constexpr int kParts = kRowBytes / 16, kWeightParts = kWeightRowBytes / 16;  // of a row in a stage
  static constexpr int kWeightBytes = kColumns * kWeightRowBytes;
  static constexpr int kGainBytes = 4 * kStageColumns;
  static constexpr int kScaledColumns = kForm == Form::kNvfp4 ? 16 : 32;  // of one scale
  static constexpr int kRowScales = kScaledCodes ? kStageColumns / kScaledColumns : 0;
  static constexpr int kScalesAt = kWeightBytes + kSourceRows * kRowBytes + kGainBytes;
  static constexpr int kOperandBytes = kScalesAt + kColumns * kRowScales;
  // Between two chunks the sums of the block's warps take the place of a stage.
  static constexpr int kSumBytes = kFused ? kStepWarps * kRows * kColumns * 4 : 0;
  static constexpr int kStageBytes = kOperandBytes > kSumBytes ? kOperandBytes : kSumBytes;
  static constexpr int kChunks = kFused ? 2 : 1;  // of a range
  static constexpr int kPointerBytes = kChunks * kSourceRows * sizeof(void*);
  // 99 KB is what a block can have on every GPU, and two blocks on Hopper; 128 rows are for sm_90 and sm_100 only.
  static constexpr int kMaxBytes = kRows == 128 ? 200 << 10
                                   : kInThrees  ? kBytesOfThree
                                   : kInPairs   ? kBytesOfPair / 2
                                                : 99 << 10;
  static constexpr int kEndBytes = kFused ? sizeof(Received<kColumns>) : 0;
  static constexpr int kStages = (kMaxBytes - kPointerBytes - kEndBytes) / kStageBytes;
  static constexpr int kReceivedAt = kStages * kStageBytes + kPointerBytes;
  static constexpr int kOwnBytes = (kReceivedAt + kEndBytes + 15) / 16 * 16;  // of a row of threads
  static constexpr int64_t kSharedBytes = kThreadRows * kOwnBytes;
  static_assert(kOwnBytes <= kMaxBytes && kReceivedAt % 16 == 0);
  static constexpr int kSteps = kStageColumns / kStepColumns / kStepWarps;  // of a warp in a stage
  static constexpr float kGainFactor = kIsCodes ? kCodeGainScale<T> : kGainScale<T>;
  // A warp has two tiles of 8 rows of x and four of the weight, so the gain is cheaper on x; it is one rounding either
  // way. In fp16 x times a gain may overflow.
  static constexpr bool kGainOnX = kFused && kIsCodes && std::is_same_v<T, BFloat16>;
  // Scales of blocks: the split kernels load one for every row of the weight where a block of columns ends. In the
  // fused kernel the rows of a tile and a warp's columns of a stage share one, which is loaded a stage ahead.
  static constexpr bool kBlockScales = kForm == Form::kE4M3Blocks, kScaledStages = kBlockScales && kFused;

  using Code = std::conditional_t<kForm == Form::kInt8, Int8, Float8E4M3>;
  using CodesOfLane = std::conditional_t<kFourBits, uint32_t, Codes>;  // of 8 columns
  using Weight = std::conditional_t<kIsCodes, uint8_t, T>;
  static constexpr int kPerWeight = kFourBits ? 2 : 1;  // columns of a Weight

  // Of the cluster's blocks: how many, and which one this is.
  static __device__ __forceinline__ int blocks() { return static_cast<int>(gridDim.y) * kThreadRows; }
  static __device__ __forceinline__ int rank() {
    return kInPairs ? 2 * static_cast<int>(blockIdx.y) + static_cast<int>(threadIdx.y) : static_cast<int>(blockIdx.y);
  }
  static __device__ __forceinline__ char* memory() {
    return kInPairs ? shared_memory() + static_cast<int>(threadIdx.y) * kOwnBytes : shared_memory();
  }
  static __device__ __forceinline__ Received<kColumns>& received() {
    return *reinterpret_cast<Received<kColumns>*>(memory() + kReceivedAt);
  }
  static __device__ __forceinline__ void sync() {
    if constexpr (kInPairs) {
      sync_row<kThreads>();
    } else {
      __syncthreads();
    }
  }
};

// A lane's 16-byte part of a row is 8 neighboring columns, where the fragments of two mma.sync want columns 2q, 2q+1,
// 2q+8, 2q+9: the order of the columns does not matter to the sum as long as both operands agree, so the parts are
// used as they are loaded. Stages are swizzled: in odd rows the halves of each 128 bytes are exchanged, so that the 8
// lanes that are served together, which read two rows, hit all 32 banks.
//
// Byte offset in a stage of a 16-byte part of a row of 16-bit values.
template <int kRowBytes>
__device__ __forceinline__ int place(int row, int part) {
  return row * kRowBytes + (part ^ (row % 2 * 4)) * 16;
}

// The same for codes: a lane reads 8 bytes, and the 16 lanes that are served together read four rows.
template <int kRowBytes>
__device__ __forceinline__ int place_codes(int row, int part) {
  return row * kRowBytes + (part ^ (kRowBytes == 64 ? row / 2 % 2 * 2 : row % 4 * 2)) * 16;
}

// The same for codes of four bits: a lane reads 4 bytes, and all lanes eight rows.
template <int kRowBytes>
__device__ __forceinline__ int place_four_bits(int row, int part) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  return row * kRowBytes + (part ^ (kRowBytes == 64 ? row / 2 % 4 : row % 8)) * 16;
}

}  // namespace eagle_kernels::cuda
