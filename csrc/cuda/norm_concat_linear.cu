// out = post_norm(norm_concat(...) @ weight^T + bias) for up to 128 rows in one pass over the weight. One kernel
// multiplies; it ends in one of two ways, fused or split.
//
// A block computes some columns of the output over a range of columns of the concat: of one chunk, in the fused kernel
// also of the end of one and the beginning of the next. The weight and x pass through a ring of stages in shared
// memory, as many as fit: `make instances` tabulates what is in flight. A block of 128 rows needs more shared memory
// than any GPU but sm_90 and sm_100 has: the others multiply 64 rows twice. Half of the warps copy the weight and half
// copy x, since a thread's copies complete in order: those of the weight start before the previous kernel has ended
// (or, where that kernel may write the weight, the weight is prefetched into L2), those of x after.
//
// Fused, up to 16 rows: one launch on GPUs with clusters (sm_90 and later). The blocks of all ranges of the same 64 or
// 96 output columns form a cluster, which adds up their sums (fused_sums.cuh). Two neighbors of it may be launched as
// one, a pair.
//
// Split, up to 128 rows, all GPUs (plan.py says where norm_concat_linear_wgmma.cu replaces it on sm_90): two launches.
// The sums of each range, 128 columns a block, go to global memory, where norm_concat_linear_finalize.cu adds
// them up. Blocks of 128 output columns read x a quarter as often as blocks of 32.
//
// Fused or split, x enters the product unnormed and 1/rms multiplies the fp32 sum, so x is read once, for product and
// statistic alike; the gain is multiplied into the weight (weight_gain.cuh). Rows of values below 2^-100, which no
// model has, lose precision: their products are subnormal in fp32. Sums of squares are taken from the same stages: in
// the split kernels only by the blocks of the first output columns.
//
// The eight warps of a block share its outputs by columns (kColumnWarps), its rows (kRowWarps, of 128 rows) or the
// steps of a stage (kStepWarps, fused). A warp multiplies by mma.sync m16n8k16: the weight is A, 16 output columns, of
// which lane 4g + q has columns g and g + 8; x is B, 8 rows, of which it has row g; its sums are of rows 2q and 2q+1.
//
// A weight of codes passes through the ring as bytes and is widened as it is read from there (codes.cuh). Scales of a
// row or of blocks multiply fp32 sums: those of each block of columns, or of a range. Scales of 16 or 32 columns of one
// row (NVFP4, MXFP4, and MXFP8 in the fused kernel) multiply the codes as they are widened, which is exact within
// bf16's range, and pass through the ring with the weight.
//
// Sums run by column within a warp's share of a range, then over warps, ranges and chunks: an order that depends only
// on the chunks' widths, D, the types of weight and chunks, whether there are residuals, and the GPU (its number of
// SMs, the shared memory of a block), so a row's bits depend neither on the other rows nor on how many there are.
#include "../norm_concat_linear.h"

#include <bit>
#include <cstring>
#include <limits>

#include "codes.cuh"
#include "cut.cuh"
#include "fused_sums.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "ranges.cuh"
#include "scales.cuh"
#include "source_row.cuh"
#include "weight_gain.cuh"

namespace eagle_kernels::cuda {
namespace {

constexpr int kCopyThreads = kThreads / 2;  // for the weight, and for x
constexpr int kStepColumns = 32;            // columns of the concat that a warp's 16-byte loads cover
constexpr int kMaxRanges = 16;              // of one chunk

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

template <Form kForm, int kRows, bool kResidual, End kEnd>
struct Tile {
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
  // of 128 these are 0.171 instructions per byte with the gain multiplied into x, 0.215 with neither. Scales of blocks
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
  template <class T>
  static constexpr float kGainFactor = kIsCodes ? kCodeGainScale<T> : kGainScale<T>;

  // Of the cluster's blocks: how many, and which one this is.
  static __device__ __forceinline__ int blocks() { return static_cast<int>(gridDim.y) * kThreadRows; }
  static __device__ __forceinline__ int rank() {
    return kInPairs ? 2 * static_cast<int>(blockIdx.y) + static_cast<int>(threadIdx.y) : static_cast<int>(blockIdx.y);
  }
  static __device__ __forceinline__ char* memory() {
    return kInPairs ? shared_memory() + static_cast<int>(threadIdx.y) * kOwnBytes : shared_memory();
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

template <class T, Form kForm, int kRows, bool kResidual, End kEnd = End::kSplit>
__global__ void __launch_bounds__(kThreads* Tile<kForm, kRows, kResidual, kEnd>::kThreadRows,
                                  Tile<kForm, kRows, kResidual, kEnd>::kBlocksOnAnSm)
    norm_concat_linear_partial_kernel(const __grid_constant__ Arguments arguments) {
  using K = Tile<kForm, kRows, kResidual, kEnd>;
  if constexpr (K::kInPairs && !kHasPairs) return;
  constexpr int kColumns = K::kColumns;
  using Code = std::conditional_t<kForm == Form::kInt8, Int8, Float8E4M3>;
  using Weight = std::conditional_t<K::kIsCodes, uint8_t, T>;
  constexpr int kStageColumns = K::kStageColumns, kRowBytes = K::kRowBytes, kParts = K::kParts;
  constexpr int kPerWeight = K::kFourBits ? 2 : 1;  // columns of a Weight
  const NormConcatLinear& op = arguments.op;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, q = lane % 4;
  const int column_warp = warp % K::kColumnWarps, other_warp = warp / K::kColumnWarps;
  const int row_warp = K::kFused ? 0 : other_warp, step_warp = K::kFused ? other_warp : 0;
  // Rounds of rows over the same output columns are neighboring blocks: the second finds the weight in L2.
  const int rounds = static_cast<int>((op.num_rows + kRows - 1) / kRows);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x % rounds) * kRows;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x / rounds) * kColumns;

  // K tiles [begin, end) of the range, of a stage's columns each, counted from the first column of its chunk; those
  // from `next` on are of the next chunk.
  constexpr int kTilesOfUnit = K::kUnitColumns / kStageColumns;
  const auto units_of_chunk = [&](int k) { return units_of(arguments.chunks[k].width, K::kUnitColumns); };
  int first_chunk = 0, begin = 0, end = 0, next = 0;
  if constexpr (K::kFused) {
    const BlockRange& range = arguments.of_block[K::rank()];
    first_chunk = range.chunk, begin = range.begin * kTilesOfUnit, end = range.end * kTilesOfUnit;
    next = units_of_chunk(first_chunk) * kTilesOfUnit;
  } else {
    int range = blockIdx.y;
    for (; range >= arguments.ranges.of_chunk[first_chunk]; ++first_chunk) {
      range -= arguments.ranges.of_chunk[first_chunk];
    }
    const int units = units_of_chunk(first_chunk), ranges = arguments.ranges.of_chunk[first_chunk];
    begin = units * range / ranges * kTilesOfUnit, next = end = units * (range + 1) / ranges * kTilesOfUnit;
  }
  const bool has_next = K::kFused && end > next;
  struct Place {
    bool is_next;
    int column, ahead;  // of its chunk, and ahead of the first chunk's first column
  };
  const auto place_of = [&](int k_tile) -> Place {
    const bool is_next = has_next && k_tile >= next;
    const int column = (is_next ? k_tile - next : k_tile) * kStageColumns;
    return {is_next, column, is_next ? column + static_cast<int>(arguments.chunks[first_chunk].width) : column};
  };

  char* ring = K::memory();
  // [kChunks, kSourceRows], null: zeros
  const T** sources = reinterpret_cast<const T**>(ring + K::kStages * K::kStageBytes);
  const bool copies_weight = threadIdx.x < kCopyThreads;
  const int copy_row = threadIdx.x % kCopyThreads / kParts, copy_part = threadIdx.x % kParts;
  constexpr int kCopyRows = kCopyThreads / kParts;
  constexpr int kWeightCopyRows = kCopyThreads / K::kWeightParts;
  const int weight_row = threadIdx.x % kCopyThreads / K::kWeightParts, weight_part = threadIdx.x % K::kWeightParts;
  const int weight_column = weight_part * (16 / static_cast<int>(sizeof(Weight))) * kPerWeight;
  const Weight* weight = static_cast<const Weight*>(op.weight) + (first_output + weight_row) * op.weight_row_stride +
                         (arguments.chunks[first_chunk].column + weight_column) / kPerWeight;
  const int outputs = static_cast<int>(op.num_columns - first_output);
  // A thread's rows are a multiple of four (in four bits: eight) apart, so that all are swizzled alike: 12 instructions
  // per stage fewer.
  static_assert(kWeightCopyRows % (K::kFourBits ? 8 : 4) == 0);
  const int weight_place = [&] {
    if constexpr (K::kFourBits) return place_four_bits<K::kWeightRowBytes>(weight_row, weight_part);
    return K::kIsCodes ? place_codes<K::kWeightRowBytes>(weight_row, weight_part)
                       : place<kRowBytes>(weight_row, weight_part);
  }();
  [[maybe_unused]] auto& received = *reinterpret_cast<Received<kColumns>*>(ring + K::kReceivedAt);
  const int rows = static_cast<int>(op.num_rows - first_row < kRows ? op.num_rows - first_row : kRows);
  [[maybe_unused]] const int packs = rows * K::kPacksOfRow;
  // A warp has two tiles of 8 rows of x and four of the weight, so the gain is cheaper on x; it is one rounding either
  // way. In fp16 x times a gain may overflow.
  constexpr bool kGainOnX = K::kFused && K::kIsCodes && std::is_same_v<T, BFloat16>;

  // Copies this thread's part of a tile; past the range the group is empty, so that groups count stages.
  const auto copy_tile = [&](int k_tile, int slot) {
    const auto [is_next, column, ahead] = place_of(k_tile);
    const Chunk& chunk = arguments.chunks[first_chunk + is_next];
    const int width = static_cast<int>(chunk.width);
    if (k_tile < end && copies_weight) {
      char* stage = ring + slot * K::kStageBytes;
      const bool inside = column + weight_column < width;
#pragma unroll
      for (int i = 0; i < kColumns / kWeightCopyRows; ++i) {
        const int row = i * kWeightCopyRows;
        copy_early(stage + weight_place + row * K::kWeightRowBytes,
                   weight + row * op.weight_row_stride + ahead / kPerWeight, inside && row < outputs - weight_row);
      }
      if constexpr (K::kScaledCodes) {
        constexpr int kWords = K::kRowScales / 4, kRowsAtOnce = kCopyThreads / kWords;  // four scales are a word
        const int row = static_cast<int>(threadIdx.x) / kWords, word = static_cast<int>(threadIdx.x) % kWords;
        const int first = column + word * 4 * K::kScaledColumns;
        const char* scales = static_cast<const char*>(op.scales.data) + (first_output + row) * op.scales.row_stride +
                             (static_cast<int>(chunk.column) + first) / K::kScaledColumns;
#pragma unroll
        for (int i = 0; i < (kColumns + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
          const int below = i * kRowsAtOnce;
          if (kColumns % kRowsAtOnce != 0 && row + below >= kColumns) break;
          copy_word_early(stage + K::kScalesAt + (row + below) * K::kRowScales + word * 4,
                          scales + below * op.scales.row_stride, first < width && row + below < outputs);
        }
      }
    } else if (k_tile < end) {
      char* stage = ring + slot * K::kStageBytes + K::kWeightBytes;
      const bool inside = column + copy_part * kPack < width;
      const T** const of_chunk = is_next ? sources + K::kSourceRows : sources;
      // Threads whose rows are all past the last leave them as they are, since nothing is stored of their sums. For one
      // row of e4m3 that is 5 % of a stage's instructions.
      if (!K::kFused || copy_row < rows) {
#pragma unroll
        for (int i = 0; i < K::kSourceRows / kCopyRows; ++i) {
          const int row = copy_row + i * kCopyRows;
          const T* source = of_chunk[row];
          copy_async(stage + place<kRowBytes>(row, copy_part), source + column + copy_part * kPack,
                     inside && source != nullptr);
        }
      }
      const char* gain = static_cast<const char*>(chunk.gain.data);
      const int gains = chunk.gain.dtype == DType::kFloat32 ? 4 : 8;  // in 16 bytes
      const int part = static_cast<int>(threadIdx.x) - kCopyThreads;
      if (part * gains < kStageColumns) {
        const int first = column + part * gains;
        copy_async(stage + K::kSourceRows * kRowBytes + part * 16, gain + first * (16 / gains),
                   gain != nullptr && first < width);
      }
    }
    commit_copies();
  };
  const auto at = [](const char* rows, int row, int part) {
    return *reinterpret_cast<const Words*>(rows + place<K::kRowBytes>(row, part));
  };
  const auto x_at = [](const char* place_of_x) {
    const auto pack_at = [](const char* at) { return Pack<T>{{*reinterpret_cast<const Words*>(at)}}; };
    if constexpr (!kResidual) return pack_at(place_of_x);
    return add(pack_at(place_of_x), pack_at(place_of_x + kRows * kRowBytes));
  };
  const auto x_of = [&](const char* x_stage, int row, int part) { return x_at(x_stage + place<kRowBytes>(row, part)); };
  const auto fill_ring = [&] {
    for (int i = 0; i < K::kStages - 1; ++i) copy_tile(begin + i, i);
  };
  // Prefetches what the ring takes first into L2, which is coherent: the previous kernel may still write the weight.
  const auto prefetch_weight = [&] {
    for (int k_tile = begin; k_tile < end && k_tile < begin + K::kStages - 1; ++k_tile) {
      const auto [is_next, column, ahead] = place_of(k_tile);
      if (column + weight_column >= arguments.chunks[first_chunk + is_next].width) continue;
#pragma unroll
      for (int i = 0; i < kColumns / kWeightCopyRows; ++i) {
        const int row = i * kWeightCopyRows;
        if (row < outputs - weight_row) prefetch(weight + row * op.weight_row_stride + ahead / kPerWeight);
      }
    }
  };

  if (K::kFused && K::blocks() > 1) {
    if (threadIdx.x == kThreads - 1) {
      const int bytes = own_packs<K>(packs) * sizeof(Words) + sizeof received.squares[0];
      received.all.make(static_cast<uint32_t>(arguments.ranges.count) * bytes);
    }
    arrive_at_cluster();
  }
  if (copies_weight && op.early_weight) {
    fill_ring();
  } else if (copies_weight) {
    prefetch_weight();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < (has_next ? 2 * kRows : kRows)) {
    const int of_chunk = threadIdx.x / kRows, of_rows = threadIdx.x % kRows;
    const Chunk& chunk = arguments.chunks[first_chunk + of_chunk];
    const int64_t out_row = first_row + of_rows;
    const int64_t row = out_row < op.num_rows ? source_row(chunk, out_row) : -1;
    const T** to = sources + of_chunk * K::kSourceRows + of_rows;
    *to = row < 0 ? nullptr : static_cast<const T*>(chunk.x) + row * chunk.x_row_stride;
    if constexpr (kResidual) {
      const bool present = row >= 0 && chunk.residual != nullptr;
      to[kRows] = present ? static_cast<const T*>(chunk.residual) + row * chunk.residual_row_stride : nullptr;
    }
  }
  K::sync();
  if (!copies_weight || !op.early_weight) fill_ring();
  // All blocks can receive after this; the first stage loads meanwhile.
  if (K::kFused && K::blocks() > 1) wait_for_cluster();

  // Scales and NaN bits of the rows of the weight whose sums this lane has; rows past the last take the last one's.
  [[maybe_unused]] RowScales<2 * K::kColumnTiles> scales;
  // With scales of blocks and three blocks on an SM the bits of all rows are in one: 24 bytes would be spilled.
  constexpr bool kNansInOne = kForm == Form::kE4M3Blocks && K::kInThrees;
  [[maybe_unused]] uint32_t nan[kNansInOne ? 1 : 2 * K::kColumnTiles] = {};
  [[maybe_unused]] const auto output_of = [&](int m) { return (column_warp * 2 * K::kColumnTiles + m) * 8 + g; };

  using CodesOfLane = std::conditional_t<K::kFourBits, uint32_t, Codes>;
  [[maybe_unused]] const auto widen_scaled = [](const CodesOfLane& codes, uint32_t scales, uint32_t i) {
    if constexpr (kForm == Form::kNvfp4) return widen_scaled_nvfp4(codes, scales, i);
    if constexpr (kForm == Form::kMxfp4) return widen_scaled_mxfp4(codes, scales, i);
    if constexpr (kForm == Form::kMxfp8) return widen_scaled_mxfp8(codes, scales, i);
  };
  float sum[K::kColumnTiles][K::kRowTiles][4] = {}, squares[2] = {};
  bool own_squares = false;
  [[maybe_unused]] float total[K::kColumnTiles][K::kRowTiles][4] = {};  // scaled, of earlier blocks of columns
  [[maybe_unused]] const auto add_scaled = [&] {
#pragma unroll
    for (int at = 0; at < K::kColumnTiles * K::kRowTiles * 4; ++at) {
      const int m = at / 4 / K::kRowTiles, n = at / 4 % K::kRowTiles, i = at % 4;
      total[m][n][i] += sum[m][n][i] * scales.value[2 * m + i / 2];
    }
  };
  // Scales of blocks: the split kernels load one for every row of the weight where a block of columns ends. In the
  // fused kernel the rows of a tile and a warp's columns of a stage share one, which is loaded a stage ahead.
  constexpr bool kBlockScales = kForm == Form::kE4M3Blocks, kScaledStages = kBlockScales && K::kFused;
  [[maybe_unused]] uint32_t scales_of_tile = 0;
  [[maybe_unused]] float global_scale = 1;
  if constexpr (kScaledStages) {
    scales_of_tile = static_cast<uint32_t>(first_output / op.scales.block_rows * op.scales.row_stride);
    if (op.scales.global != nullptr) global_scale = load(op.scales.global);
    is_new(scales_of_tile);  // keeps the division out of the loop
  }
  // Offsets at which a lane reads a stage of codes in each of its steps, kept in registers: ptxas recomputed them in
  // every stage, 19 instructions of 449 with scales of blocks, 22 of 372 with one for a row.
  constexpr bool kKeepsPlaces = K::kIsCodes && K::kFused && !kResidual;
  [[maybe_unused]] const auto codes_at = [](int row, int part) {
    if constexpr (K::kFourBits) return place_four_bits<K::kWeightRowBytes>(row, part / 4) + part % 4 * 4;
    return place_codes<K::kWeightRowBytes>(row, part / 2) + part % 2 * 8;
  };
  [[maybe_unused]] uint32_t codes_place[K::kSteps], x_place[K::kSteps];
  if constexpr (kKeepsPlaces) {
#pragma unroll
    for (int at_step = 0; at_step < K::kSteps; ++at_step) {
      const int part = (step_warp * K::kSteps + at_step) * 4 + q, row = column_warp * 2 * K::kColumnTiles * 8 + g;
      codes_place[at_step] = codes_at(row, part);
      x_place[at_step] = place<kRowBytes>(g, part);
      is_new(codes_place[at_step]);
      is_new(x_place[at_step]);
    }
  }
  // The offset of the first part that a lane squares, in its warp's two rows: recomputed in every stage it was 7 of 26
  // instructions.
  [[maybe_unused]] uint32_t square_place = place<kRowBytes>(2 * warp + lane / 16, lane % 16);
  if constexpr (K::kFused) is_new(square_place);
  int k_tile = begin, slot = 0;
#pragma unroll 1
  for (int of_range = 0; of_range <= static_cast<int>(has_next); ++of_range) {
    const Chunk& chunk = arguments.chunks[first_chunk + of_range];
    const int width = static_cast<int>(chunk.width);
    const int origin = of_range == 0 ? 0 : next, last = of_range == 0 && has_next ? next : end;
    const bool gain_is_float32 = chunk.gain.dtype == DType::kFloat32;
    const char* gain = static_cast<const char*>(chunk.gain.data);

    if constexpr (kBlockScales && !K::kFused) {
      scales.find(op, first_output, output_of);
      scales.load(arguments, static_cast<int>(chunk.column) + begin * kStageColumns);
    }
    [[maybe_unused]] const int column_of_warp = static_cast<int>(chunk.column) + step_warp * K::kSteps * kStepColumns;
    [[maybe_unused]] const int end_of_scales = static_cast<int>(chunk.column) + width;
    [[maybe_unused]] float next_scale = 0;
    [[maybe_unused]] const auto load_next_scale = [&](int k_tile) {
      const int column = column_of_warp + (k_tile - origin) * kStageColumns;
      const bool inside = column < end_of_scales;  // no branch: with one ptxas keeps less in registers
      const uint32_t at = scales_of_tile + (inside ? column >> arguments.scale_shift : 0);
      const float scale = load_scale(op.scales.type, op.scales.data, at);
      next_scale = inside ? global_scale * scale : 0.0f;
    };
    if constexpr (kScaledStages) load_next_scale(k_tile);
    // Without a gain the weight is still multiplied by 1: mma.sync wants four consecutive registers, and a value that
    // is either loaded or a product is moved there for every mma.sync (0.128 moves per byte of the weight at 64 rows).
    const float offset = gain != nullptr ? op.source.norm_offset : 1.0f;
    const float scale = gain == nullptr ? 1.0f : K::template kGainFactor<T>;
    // In the fused kernel each warp squares two rows, and warps past the last row skip that: it is 19 of 188
    // instructions in its loop, 38 of 360 with codes.
    own_squares = op.source.norm != Norm::kNone && chunk.sum_squares == nullptr &&
                  (K::kFused ? first_row + 2 * warp < op.num_rows
                             : first_output == 0 && column_warp < K::kRowTiles / 2);
    // kPairs: there is no gain, or its factors are exact in T and one instruction multiplies a pair. A third loop, for
    // no gain, costs the others registers, and 15 % more instructions.
    const auto multiply_range = [&](auto pairs) {
      constexpr bool kPairs = decltype(pairs)::value;
      for (; k_tile < last; ++k_tile, slot = slot + 1 == K::kStages ? 0 : slot + 1) {
        wait_for_copies<K::kStages - 2>();
        K::sync();
        copy_tile(k_tile + K::kStages - 1, slot == 0 ? K::kStages - 1 : slot - 1);
        [[maybe_unused]] const float stage_scale = next_scale;
        if constexpr (kScaledStages) load_next_scale(k_tile + 1);
        const char* stage = ring + slot * K::kStageBytes;
        const char* x_stage = stage + K::kWeightBytes;
        const char* gains = x_stage + K::kSourceRows * kRowBytes;
        // Unrolled steps overlap, and spill for 64 rows on sm_100 and with scales of blocks and residuals.
#pragma unroll(kRows == 64 || (kBlockScales && kResidual) ? 1 : K::kSteps)
        for (int at_step = 0; at_step < K::kSteps; ++at_step) {
          const int step = step_warp * K::kSteps + at_step;
          const int part = step * 4 + q;
          [[maybe_unused]] float factor[8];
          const Words* words = reinterpret_cast<const Words*>(gains) + (gain_is_float32 ? 2 * part : part);
          if constexpr (!kPairs) {
            gain_factors<T>(words[0], words[gain_is_float32], gain_is_float32, offset, scale, factor);
            if constexpr (K::kFourBits && !kGainOnX) {
              const float inner[6] = {factor[4], factor[1], factor[5], factor[2], factor[6], factor[3]};
              std::memcpy(factor + 1, inner, sizeof inner);
            }
          }
          // Without a gain x is multiplied by 1: 402 instructions in a stage, 479 with a branch for every row of x.
          [[maybe_unused]] Words pairs_of_x{0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
          if (kGainOnX && kPairs && gain != nullptr) pairs_of_x = *words;
          // Fragments of the two mma.sync of 16 columns each: rows g and g + 8 of each tile.
          uint32_t w[K::kColumnTiles][2][4];
#pragma unroll
          for (int m = 0; m < 2 * K::kColumnTiles; ++m) {
            const int tile_row = (column_warp * 2 * K::kColumnTiles + m) * 8 + g;
            Words row;
            if constexpr (K::kIsCodes) {
              const uint32_t from =
                  kKeepsPlaces ? codes_place[at_step] + m * 8 * K::kWeightRowBytes : codes_at(tile_row, part);
              const CodesOfLane codes = *reinterpret_cast<const CodesOfLane*>(stage + from);
              if constexpr (kNansInOne) {
                nan[0] |= nan_bits_of_row(nan_bits(codes, Code{}), m);
              } else if constexpr (!K::kFourBits) {
                nan[m] |= nan_bits(codes, Code{});
              }
              if constexpr (K::kScaledCodes) {
                const int own = part * 8 / K::kScaledColumns, word = step * kStepColumns / K::kScaledColumns / 4;
                const char* scales_of_row = stage + K::kScalesAt + tile_row * K::kRowScales;
                const uint32_t four = reinterpret_cast<const uint32_t*>(scales_of_row)[word];
                if constexpr (kForm == Form::kNvfp4) nan[m] |= nan_bits(four, Float8E4M3{});
                row = widen_scaled(codes, four, own % 4);
              } else {
                row = widen(codes, Code{}, T{});
              }
            } else {
              row = at(stage, tile_row, part);
            }
            if constexpr (!kPairs && !kGainOnX) {
              row = scaled<T>(row, factor);
            } else if (!kGainOnX && kCodeGainScale<T> == 1 && gain != nullptr) {
              row = multiply(row, K::kFourBits ? paired(*words) : *words, T{});
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) w[m / 2][i / 2][i % 2 * 2 + m % 2] = word(row, i);
          }
#pragma unroll
          for (int n = 0; n < K::kRowTiles; ++n) {
            Words x = kKeepsPlaces ? x_at(x_stage + x_place[at_step] + n * 8 * kRowBytes).words[0]
                                   : x_of(x_stage, (row_warp * K::kRowTiles + n) * 8 + g, part).words[0];
            if constexpr (kGainOnX) x = kPairs ? multiply(x, pairs_of_x, T{}) : scaled<T>(x, factor);
            if constexpr (K::kFourBits) x = paired(x);
#pragma unroll
            for (int m = 0; m < K::kColumnTiles; ++m) {
              const auto &low = w[m][0], &high = w[m][1];
              mma(sum[m][n], low[0], low[1], low[2], low[3], x.x, x.y, T{});
              mma(sum[m][n], high[0], high[1], high[2], high[3], x.z, x.w, T{});
            }
          }
          if constexpr (kBlockScales && !K::kFused) {
            // Widths are multiples of a step's columns. The sums of the range's last block are added after the loop.
            const int ahead = k_tile * kStageColumns + (step + 1) * kStepColumns;
            if (ahead >= width || ahead >= end * kStageColumns) break;
            const int column = static_cast<int>(chunk.column) + ahead;
            if ((column >> arguments.scale_shift) << arguments.scale_shift == column) {
              add_scaled();
              std::memset(sum, 0, sizeof sum);
              scales.load(arguments, column);
            }
          }
        }
        if constexpr (kScaledStages) {
#pragma unroll
          for (float& of_row : scales.value) of_row = stage_scale;
          add_scaled();
          std::memset(sum, 0, sizeof sum);
        }
        if (!own_squares) continue;
        if constexpr (K::kFused) {
          // Two rows per warp, every 16th part per lane.
          static_assert(kParts % 16 == 0);
#pragma unroll
          for (int part = 0; part < kParts; part += 16) {
            squares[0] += sum_of_squares(widen(x_at(x_stage + square_place + part * 16)));
          }
        } else {
          // A warp reads two tiles of rows a second time: only the blocks of the first outputs do.
#pragma unroll 1
          for (int part = q; part < kParts; part += 4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int row = (row_warp * K::kRowTiles + 2 * column_warp + i) * 8 + g;
              squares[i] += sum_of_squares(widen(x_of(x_stage, row, part)));
            }
          }
        }
      }
    };
    if constexpr (K::kIsCodes) {
      const bool exact = kCodeGainScale<T> == 1 && !gain_is_float32 && offset == 0;
      exact || gain == nullptr ? multiply_range(std::true_type{}) : multiply_range(std::false_type{});
      if constexpr (K::kScaledCodes) {
        const float by = op.scales.global == nullptr ? 1.0f : load(op.scales.global);
#pragma unroll
        for (float& of_row : scales.value) of_row = kForm == Form::kNvfp4 ? by * kNvfp4Unscale : by;
      } else if constexpr (!kBlockScales) {  // not earlier: two more registers spill on sm_100
        scales.find(op, first_output, output_of);
        scales.load(arguments, 0);
      }
#pragma unroll
      for (int m = 0; m < 2 * K::kColumnTiles; ++m) {
        if constexpr (kScaledStages) scales.value[m] = 0;
        if (row_has_nan(kNansInOne ? nan[0] << m : nan[m])) scales.value[m] = bits_to_float(0x7fffffff);
      }
      add_scaled();
      std::memcpy(sum, total, sizeof sum);
    } else if constexpr (K::kFused) {
      // Products of pairs save 84 instructions in a warp's step of 2 KB.
      const bool exact = kGainScale<T> == 1 && !gain_is_float32 && offset == 0;
      exact || gain == nullptr ? multiply_range(std::true_type{}) : multiply_range(std::false_type{});
    } else {
      multiply_range(std::false_type{});
    }
    if constexpr (K::kFused) {
      // In the place of the stage that was multiplied last: nothing is copied there before the next barrier.
      char* memory = ring + (slot == 0 ? K::kStages - 1 : slot - 1) * K::kStageBytes;
      send_sums<K>(arguments.of_block[K::rank()].part + of_range, packs, memory, sum, squares[0], received);
      squares[0] = 0;
      std::memset(sum, 0, sizeof sum);
      std::memset(total, 0, sizeof total);
      std::memset(nan, 0, sizeof nan);
    }
  }

  if constexpr (K::kFused) {
    finish_fused<T, K>(arguments, first_row, first_output, packs, received);
    return;
  }
  const int64_t of_range = static_cast<int64_t>(blockIdx.y) * op.num_rows;
#pragma unroll
  for (int n = 0; n < K::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = first_row + (row_warp * K::kRowTiles + n) * 8 + 2 * q + i;
      if (row >= op.num_rows) continue;
      float* partial = arguments.partial + (of_range + row) * arguments.partial_stride + first_output;
#pragma unroll
      for (int m = 0; m < K::kColumnTiles; ++m) {
        const int column = (column_warp * K::kColumnTiles + m) * 16 + g;
        store(partial + column, sum[m][n][i]);
        store(partial + column + 8, sum[m][n][2 + i]);
      }
    }
  }
  if (!own_squares) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = squares[i];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int64_t row = first_row + (row_warp * K::kRowTiles + 2 * column_warp + i) * 8 + g;
    if (q == 0 && row < op.num_rows) store(arguments.squares + of_range + row, total);
  }
}

template <class T, Form kForm, int kRows, bool kResidual>
int launch_partial(const Arguments& arguments, const Device& device) {
  const int64_t rounds = (arguments.op.num_rows + kRows - 1) / kRows;
  const Shape shape{rounds * blocks_of_outputs(arguments.op, kSplitColumns), arguments.ranges.count, kThreads,
                    Tile<kForm, kRows, kResidual, End::kSplit>::kSharedBytes};
  return launch<norm_concat_linear_partial_kernel<T, kForm, kRows, kResidual>>(shape, arguments, device);
}

template <class T, Form kForm>
int launch_rows(const Arguments& arguments, const Device& device) {
  const int64_t rows = arguments.op.num_rows;
  const bool residual = has_residual(arguments.op.source);
  constexpr int kMany = kForm == Form::kE4M3Blocks ? 32 : 64;  // two sets of sums of 64 rows spill
  if (residual) {
    constexpr int kManyAdded = has_scaled_codes(kForm) ? 32 : kMany;  // with 64 the ring would have two stages
    return rows > 32 ? launch_partial<T, kForm, kManyAdded, true>(arguments, device)
                     : launch_partial<T, kForm, 32, true>(arguments, device);
  }
  if constexpr (kForm == Form::kDense) {
    if (rows > 64 && Tile<kForm, 128, false, End::kSplit>::kSharedBytes <= device.shared_memory) {
      return launch_partial<T, kForm, 128, false>(arguments, device);
    }
  }
  return rows > 32 ? launch_partial<T, kForm, kMany, false>(arguments, device)
                   : launch_partial<T, kForm, 32, false>(arguments, device);
}

template <class T, Form kForm, bool kResidual>
int launch_fused(Arguments& arguments, const Device& device) {
  constexpr int kRows = kMaxDecodeRows;
  const NormConcatLinear& op = arguments.op;
  const int64_t rounds = (op.num_rows + kRows - 1) / kRows;
  // With residuals nobody has timed it; fp16 times codes with scales of blocks would spill 116 bytes on sm_100.
  constexpr bool kInThreesToo = !kResidual && !(kForm == Form::kE4M3Blocks && std::is_same_v<T, Float16>);
  // What a block may have is nearly all that an SM has: 227 KB of sm_90 and sm_100, 99 KB of sm_120.
  const int max_blocks = kInThreesToo && 3 * kBytesOfThree <= device.shared_memory                            ? 3
                         : 2 * Tile<kForm, kRows, kResidual, End::kFused>::kSharedBytes <= device.shared_memory ? 2
                                                                                                                 : 1;
  constexpr bool kInPairsToo = !kResidual && kForm != Form::kDense;  // a dense weight is read at memory speed without
  constexpr bool kInWidePairsToo = kInPairsToo && kForm != Form::kE4M3Blocks;  // 96 rows may have two scales
  const auto may_share_an_sm = [&](const FusedBlocks& blocks) {
    if (!blocks.in_pairs) return blocks.on_an_sm == std::min(2, max_blocks) || blocks.on_an_sm == max_blocks;
    const bool is_built = blocks.columns == kWideColumns ? kInWidePairsToo : kInPairsToo;
    return is_built && kBytesOfPair <= device.shared_memory;
  };
  const FusedCut cut = cut_for_cluster(op, device, may_share_an_sm);
  arguments.ranges = cut.parts;
  std::copy_n(cut.of_block, cut.ranges, arguments.of_block);
  const auto launch_end = [&](auto end) {
    constexpr End kEnd = decltype(end)::value;
    using K = Tile<kForm, kRows, kResidual, kEnd>;
    Shape shape{rounds * blocks_of_outputs(op, K::kColumns), cut.ranges / K::kThreadRows, kThreads, K::kSharedBytes};
    shape.rows = K::kThreadRows;
    shape.cluster = shape.y;
    return launch<norm_concat_linear_partial_kernel<T, kForm, kRows, kResidual, kEnd>>(shape, arguments, device);
  };
  if constexpr (kInWidePairsToo) {
    if (cut.blocks.columns == kWideColumns) return launch_end(std::integral_constant<End, End::kFusedInWidePairs>{});
  }
  if constexpr (kInPairsToo) {
    if (cut.blocks.in_pairs) return launch_end(std::integral_constant<End, End::kFusedInPairs>{});
  }
  if constexpr (kInThreesToo) {
    if (cut.blocks.on_an_sm == 3) return launch_end(std::integral_constant<End, End::kFusedInThrees>{});
  }
  return launch_end(std::integral_constant<End, End::kFused>{});
}

// A cluster in place of the second kernel was tried, and was modeled at 0.75 to 1.15 times the speed: a cluster has
// room for 8 ranges, where up to 20 balance the work best, and each of its blocks needs the squares of its x.
template <class T>
int launch_both(const Arguments& arguments, const Device& device) {
  const int error = with_form(arguments.op, [&](auto form) -> int {
    constexpr Form kForm = decltype(form)::value;
    if constexpr (has_scaled_codes(kForm) && std::is_same_v<T, Float16>) {
      return cudaErrorNotSupported;
    } else {
      return launch_rows<T, kForm>(arguments, device);
    }
  });
  return error != 0 ? error : finalize(arguments, device);
}

}  // namespace
}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

bool norm_concat_linear_is_aligned(const NormConcatLinear& record) {
  const bool is_codes = record.weight_type != WeightType::kChunks;
  const int per_byte = record.weight_type == WeightType::kFloat4E2M1 ? 2 : 1;
  Alignment alignment(2), weight(is_codes ? 1 : 2);
  weight.add(record.weight, record.weight_row_stride, record.num_columns);
  for (int64_t k = 0; k < record.source.num_chunks; ++k) {
    const Chunk& chunk = record.source.chunks[k];
    alignment.add(chunk.x, chunk.x_row_stride, chunk.rows);
    alignment.add(chunk.residual, chunk.residual_row_stride, chunk.rows);
    alignment.add(chunk.gain.data);
    alignment.add_width(chunk.width);
    if (is_codes) weight.add(static_cast<const char*>(record.weight) + (chunk.column + chunk.width) / per_byte);
  }
  return alignment.holds() && weight.holds();
}

int norm_concat_linear_fused_cuda(const NormConcatLinear& op, const Device& device) {
  constexpr int kTile = kFusedColumns;  // rows of the weight, and a warp's columns of a stage
  if (!device.has_clusters) return cudaErrorNotSupported;
  Arguments arguments = arguments_of(op);
  const bool residual = has_residual(op.source);
  if (op.weight_type == WeightType::kFloat8E4M3 && has_scales_of_codes(op) && !residual) {
    return launch_fused<BFloat16, Form::kMxfp8, false>(arguments, device);
  }
  if (op.weight_type != WeightType::kFloat4E2M1 && !has_scale_of_tiles(op, kTile, kTile)) return cudaErrorNotSupported;
  // The kernel keeps the offset of a block's scale in 32 bits.
  const bool has_block_scales = op.weight_type == WeightType::kFloat8E4M3 && has_blocks(op);
  const int64_t last_row = has_block_scales ? (op.num_columns - 1) / op.scales.block_rows * op.scales.row_stride : 0;
  if (last_row + op.source.width > std::numeric_limits<uint32_t>::max()) return cudaErrorNotSupported;
  const auto launch_type = [&](auto type) {
    using T = decltype(type);
    return with_form(op, [&](auto form) -> int {
      constexpr Form kForm = decltype(form)::value;
      if constexpr (has_scaled_codes(kForm) && std::is_same_v<T, Float16>) {
        return cudaErrorNotSupported;
      } else {
        return residual ? launch_fused<T, kForm, true>(arguments, device)
                        : launch_fused<T, kForm, false>(arguments, device);
      }
    });
  };
  return op.source.dtype == DType::kBFloat16 ? launch_type(BFloat16{}) : launch_type(Float16{});
}

// The ranges that give the busiest SM the least work, counted in units: those of its blocks, and 3 more per block,
// about what the sums of 64 rows cost on their way through L2 (64 KB, where a unit of the weight is 16 KB). With codes
// 1 more: rounds have 32 rows, and multiplying a unit takes longer than reading it.
SplitRanges norm_concat_linear_split_ranges(const NormConcatLinear& op, const Device& device) {
  const int outputs = static_cast<int>(blocks_of_outputs(op, kSplitColumns));
  const bool is_codes = op.weight_type != WeightType::kChunks;
  const int unit = unit_columns(is_codes), of_sums = is_codes ? 1 : 3;
  const int widest = longest_range(op.source, one_range_each(op.source), unit).units;
  SplitRanges best{};
  int least = 0;
  for (int parts = 1; parts <= kMaxRanges; ++parts) {
    const int length = std::max(2, (widest + parts - 1) / parts);
    SplitRanges ranges{};
    for (int k = 0; k < op.source.num_chunks; ++k) {
      ranges.count += ranges.of_chunk[k] = (units_of_chunk(op.source, k, unit) + length - 1) / length;
    }
    const int blocks = (ranges.count * outputs + device.multiprocessors - 1) / device.multiprocessors;
    const int work = blocks * (length + of_sums);
    if (parts == 1 || work < least) {
      best = ranges;
      least = work;
    }
  }
  best.workspace = best.count * op.num_rows * (outputs * kSplitColumns + 1);
  return best;
}

bool norm_concat_linear_reads_codes(const NormConcatLinear& op) {
  if (op.weight_type == WeightType::kFloat4E2M1) return has_scales_of_codes(op);
  const bool has_bytes = op.weight_type == WeightType::kFloat8E4M3 || op.weight_type == WeightType::kInt8;
  if (!has_bytes || op.scales.type == ScaleType::kFloat8E4M3) return false;
  if (!has_blocks(op)) return true;
  bool holds = op.weight_type == WeightType::kFloat8E4M3 && op.scales.block_columns >= kStepColumns &&
               std::has_single_bit(static_cast<uint64_t>(op.scales.block_columns));
  for (int64_t k = 0; k < op.source.num_chunks; ++k) holds &= op.source.chunks[k].width % kStepColumns == 0;
  return holds;
}

int norm_concat_linear_split_cuda(const NormConcatLinear& op, const SplitRanges& ranges, const Device& device) {
  Arguments arguments = arguments_of(op);
  arguments.ranges = ranges;
  arguments.partial = static_cast<float*>(op.workspace);
  arguments.partial_stride = blocks_of_outputs(op, kSplitColumns) * kSplitColumns;
  arguments.squares = arguments.partial + ranges.count * op.num_rows * arguments.partial_stride;
  return op.source.dtype == DType::kBFloat16 ? launch_both<BFloat16>(arguments, device)
                                             : launch_both<Float16>(arguments, device);
}

}  // namespace eagle_kernels
