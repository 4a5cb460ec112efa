// out = post_norm(norm_concat(...) @ weight^T + bias) for up to 128 rows in one pass over the weight. One kernel
// multiplies; it ends in one of two ways, fused or split.
//
// A block computes some columns of the output over a range of columns of the concat: of one chunk, in the fused kernel
// also of the end of one and the beginning of the next. The weight and x pass through a ring of stages in shared
// memory. A block has 48 KB of the weight in flight ahead of the product (32 with residuals in the fused kernel or at
// 64 rows, 24 to 48 of codes, 16 to 32 of four bits), and an SM of Hopper has two blocks; or 32 KB (16 of codes), and
// the SM three. A block of 128 rows has 80 KB in flight and the SM to itself. It needs more shared memory than any GPU
// but sm_90 and sm_100 has: the others multiply 64 rows twice. Half of the warps copy the weight and half copy x, since
// a thread's copies complete in order: those of the weight start before the previous kernel has ended (or, where that
// kernel may write the weight, the weight is prefetched into L2), those of x after.
//
// Fused, up to 16 rows: one launch on GPUs with clusters (sm_90 and later). The blocks of all ranges of the same 64
// output columns form a cluster. They send one another their sums (st.async), and each block finishes a share of the
// outputs. On an H100 that takes 1.3 us less at K=3, H=D=896 than a barrier of the cluster and loads from the others'
// shared memory, and 0.7 to 1.2 us less at 2880 and 4096: the barrier's release waits for all outstanding memory
// accesses of a block (MEMBAR.GPU). Global memory has no partial sums that a second stream could overwrite and no
// counter that an aborted launch would leave behind. Four warps share the steps of a stage.
//
// Split, up to 128 rows, all GPUs (on sm_90 norm_concat_linear_wgmma.cu replaces it where there is no post norm): two
// launches. The sums of each range, 128 columns a block, go to global memory. A second kernel adds them up in the order
// of the ranges, scales those of each chunk by its 1/rms, and writes the output. Blocks of 128 output columns read x a
// quarter as often as blocks of 32.
//
// A cluster in place of the second kernel was tried, and was modeled at 0.75 to 1.15 times the speed: a cluster has
// room for 8 ranges, where up to 20 balance the work best, and each of its blocks needs the squares of its x.
//
// The second kernel also finishes products of the library whose fp32 sums need a bias in fp32 or a post norm: these
// have one range.
//
// Fused or split, x enters the product unnormed and 1/rms multiplies the fp32 sum, so x is read once, for product and
// statistic alike; the gain is multiplied into the weight (weight_gain.cuh). Rows of values below 2^-100, which no
// model has, lose precision: their products are subnormal in fp32.
//
// A lane's 16-byte part of a row is 8 neighboring columns, where the fragments of two mma.sync want columns 2q, 2q+1,
// 2q+8, 2q+9: the order of the columns does not matter to the sum as long as both operands agree, so the parts are
// used as they are loaded. Shared memory is swizzled: in odd rows the halves of each 128 bytes are exchanged, so that
// the 8 lanes that are served together, which read two rows, hit all 32 banks.
//
// Sums of squares are taken from the same stages: in the split kernels only by the blocks of the first output columns.
//
// A weight of codes (FP8, INT8) passes through the ring as bytes, for up to 32 rows in stages of 128 columns, and is
// widened as it is read from there (codes.cuh). Its scales multiply fp32 sums: those of each block of columns, or of a
// range. The fused kernel takes stages of 256 columns, with half as many barriers and address computations as stages
// of 128: with the gain multiplied into x that is 0.171 instructions per byte, 0.215 with neither. A warp has two steps
// of 32 columns of such a stage. Where scales are of blocks of at least 64 columns and 64 rows of the weight, these
// steps share one scale, which multiplies their sums after the second (0.192 instructions; 0.4 with a scale for each
// row of the weight).
//
// Codes whose scales are of 16 or 32 columns of one row (NVFP4, MXFP4, and MXFP8 in the fused kernel) are multiplied by
// them as they are widened, which is exact within bf16's range. These scales pass through the ring with the weight.
//
// Sums run by column within a warp's share of a range, then over warps, ranges and chunks: an order that depends only
// on the chunks' widths, D, the types of weight and chunks, whether there are residuals, and the GPU (its number of
// SMs, the shared memory of a block), so a row's bits depend neither on the other rows nor on how many there are.
#include "../norm_concat_linear.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "codes.cuh"
#include "h200.h"
#include "launch.cuh"
#include "pack.cuh"
#include "ranges.cuh"
#include "source_row.cuh"
#include "weight_gain.cuh"

namespace eagle_kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kCopyThreads = kThreads / 2;  // for the weight, and for x
constexpr int kSplitColumns = 128;          // output columns of a block of the split kernels
constexpr int kFusedColumns = 64;           // the same of the fused kernel
constexpr int kStepColumns = 32;            // columns of the concat that a warp's 16-byte loads cover
constexpr int kMaxRanges = 16;              // of one chunk

// The unit of a range's length, in columns: in the split kernels 128 bytes of a row of the weight, also the most that a
// stage of theirs has. The fused kernel's unit is twice that: one step for each of four warps, two of codes.
constexpr int unit_columns(bool is_codes) { return is_codes ? 128 : 64; }
constexpr int fused_unit_columns(bool is_codes) { return 2 * unit_columns(is_codes); }

// Blocks of up to 64 rows take 83 to 100 KB of shared memory, and an SM of these GPUs has 100 KB.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kSharedBlocks = 1;
#else
constexpr int kSharedBlocks = 2;
#endif

// How the sums of the ranges are added up. With kFusedInThrees an SM has three blocks of the fused kernel in place of
// two: clusters leave fewer slots empty in some shapes. Codes of eight bits have one stage in flight there, and at
// 3x5376x5376 still take 34.6 us of an H200, where two blocks with two stages in flight take 41.0.
enum class End { kSplit, kFused, kFusedInThrees };
constexpr int kBytesOfThree = 75 << 10;  // what each of three blocks on an SM of Hopper can have

// A share is the outputs of 32 lanes, four each: what one block of a cluster sends to another at a time. The fused
// kernel's 16 rows by 64 columns are kShares of them, dealt to the blocks in turn.
constexpr int kShareValues = 32 * kOutputColumns, kShares = kMaxDecodeRows * kFusedColumns / kShareValues;
__host__ __device__ constexpr int shares_of_block(int blocks) { return (kShares + blocks - 1) / blocks; }

// Of a block. Two chunks in one block, or four in two, are 16 shares; ranges of one chunk at most 14, in a cluster of
// seven.
constexpr int kMaxParts = kMaxCluster, kMaxReceived = 16;
static_assert(kMaxChunks <= kMaxParts && [] {
  for (int blocks = 1; blocks <= kMaxCluster; ++blocks) {
    if (blocks * shares_of_block(blocks) > kMaxReceived) return false;
  }
  return true;
}());

// What a block receives from its cluster, itself included.
struct Received {
  float shares[kMaxReceived][kShareValues];  // [parts, shares of a block]
  float squares[kMaxParts][kMaxDecodeRows];
  SentBarrier all;
};

template <Form kForm, int kRows, bool kResidual, End kEnd>
struct Tile {
  static constexpr bool kIsCodes = kForm != Form::kDense, kFused = kEnd != End::kSplit;
  static constexpr bool kFourBits = has_four_bits(kForm), kScaledCodes = has_scaled_codes(kForm);
  static constexpr int kColumns = kFused ? kFusedColumns : kSplitColumns;
  static constexpr int kRowWarps = kRows == 128 ? 2 : 1;
  static constexpr int kStepWarps = kFused ? 4 : 1;  // share the steps of a stage
  static constexpr int kColumnWarps = kWarps / kRowWarps / kStepWarps;
  static constexpr int kColumnTiles = kColumns / 16 / kColumnWarps;  // of a warp, 16 columns each
  static constexpr int kRowTiles = kRows / 8 / kRowWarps;            // 8 rows each
  static constexpr int kSourceRows = kResidual ? 2 * kRows : kRows;  // in a stage
  static constexpr bool kInThrees = kEnd == End::kFusedInThrees;
  static constexpr int kBlocksOnAnSm = kRows == 128 ? 1 : kInThrees && kSharedBlocks == 2 ? 3 : kSharedBlocks;
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
  static constexpr int kStageBytes = kScalesAt + kColumns * kRowScales;
  static constexpr int kChunks = kFused ? 2 : 1;  // of a range
  // Between two chunks the block's sums take the place of a stage.
  static_assert(!kFused || kStageBytes >= kStepWarps * kRows * kColumns * 4);
  static constexpr int kPointerBytes = kChunks * kSourceRows * sizeof(void*);
  // 99 KB is what a block can have on every GPU, and two blocks on Hopper; 128 rows are for sm_90 and sm_100 only.
  static constexpr int kMaxBytes = kRows == 128 ? 200 << 10 : kInThrees ? kBytesOfThree : 99 << 10;
  static constexpr int kEndBytes = kFused ? sizeof(Received) : 0;
  static constexpr int kStages = (kMaxBytes - kPointerBytes - kEndBytes) / kStageBytes;
  static constexpr int kReceivedAt = kStages * kStageBytes + kPointerBytes;
  static constexpr int64_t kSharedBytes = kReceivedAt + kEndBytes;
  static_assert(kSharedBytes <= kMaxBytes && kReceivedAt % 16 == 0);
  static constexpr int kSteps = kStageColumns / kStepColumns / kStepWarps;  // of a warp in a stage
  template <class T>
  static constexpr float kGainFactor = kIsCodes ? kCodeGainScale<T> : kGainScale<T>;
};

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

// The packs of four outputs that this block finishes, over all its shares.
__device__ __forceinline__ int own_packs(int packs) {
  int own = 0;
  for (int share = static_cast<int>(blockIdx.y); share * 32 < packs; share += static_cast<int>(gridDim.y)) {
    own += packs - share * 32 < 32 ? packs - share * 32 : 32;
  }
  return own;
}

// Adds up the sums of a block's warps, those of part number `part` of the concat, in memory that no stage is in, and
// sends each share to the block that finishes it. A block that is alone stores them itself: compute-sanitizer's
// memcheck reports the st.async of a cluster of one block (K=1 in one range, on an H100) as an invalid access.
template <class K>
__device__ __forceinline__ void send_sums(int part, int packs, char* memory,
                                          const float (&sum)[K::kColumnTiles][K::kRowTiles][4], float squares,
                                          Received& received) {
  constexpr int kRows = 8 * K::kRowTiles, kOutputs = kRows * K::kColumns;
  static_assert(kRows == 2 * kWarps && kRows == kMaxDecodeRows && K::kColumns == kPacksOfRow * kOutputColumns);
  static_assert(kOutputs == kThreads * kOutputColumns);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, q = lane % 4;
  const int column_warp = warp % K::kColumnWarps, step_warp = warp / K::kColumnWarps;
  const int blocks = static_cast<int>(gridDim.y);
  const bool is_alone = blocks == 1;
  float* of_warps = reinterpret_cast<float*>(memory);  // [kStepWarps, kRows, kColumns]
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  __syncthreads();
#pragma unroll
  for (int at = 0; at < K::kColumnTiles * K::kRowTiles * 4; ++at) {
    const int m = at / 4 / K::kRowTiles, n = at / 4 % K::kRowTiles, i = at % 4;
    const int column = (column_warp * K::kColumnTiles + m) * 16 + i / 2 * 8 + g;
    of_warps[step_warp * kOutputs + (n * 8 + 2 * q + i % 2) * K::kColumns + column] = sum[m][n][i];
  }
  if (lane % 16 < blocks) {
    float* to = received.squares[part] + 2 * warp + lane / 16;
    if (is_alone) {
      *to = squares;
    } else {
      send_to_block(to, received.all, squares, lane % 16);
    }
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= packs) return;
  float total[kOutputColumns] = {};
#pragma unroll
  for (int w = 0; w < K::kStepWarps; ++w) {
    const Words words = reinterpret_cast<const Words*>(of_warps + w * kOutputs)[threadIdx.x];
#pragma unroll
    for (int i = 0; i < kOutputColumns; ++i) total[i] += bits_to_float(word(words, i));
  }
  const Words words{float_to_bits(total[0]), float_to_bits(total[1]), float_to_bits(total[2]), float_to_bits(total[3])};
  float* to = received.shares[part * shares_of_block(blocks) + warp / blocks] + lane * kOutputColumns;
  if (is_alone) {
    *reinterpret_cast<Words*>(to) = words;
  } else {
    send_to_block(to, received.all, words, warp % blocks);
  }
}

// Computes outputs from the sums that this block receives.
template <class T, class K>
__device__ __forceinline__ void finish_fused(const Arguments& arguments, int64_t first_row, int64_t first_output,
                                             int packs, Received& received) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int blocks = static_cast<int>(gridDim.y), rank = static_cast<int>(blockIdx.y);
  if (blocks == 1) {
    __syncthreads();
  } else {
    received.all.wait();
  }
  const int first = (warp * blocks + rank) * 32;
  if (first >= packs) return;
  const bool stores = first + lane < packs;
  const int pack = stores ? first + lane : packs - 1;
  const int token = pack / kPacksOfRow, column = pack % kPacksOfRow * kOutputColumns;
  Words words[kMaxParts];
  float squares_of[kMaxParts];
#pragma unroll
  for (int part = 0; part < kMaxParts; ++part) {
    if (part >= arguments.ranges.count) break;
    const float* share = received.shares[part * shares_of_block(blocks) + warp];
    words[part] = reinterpret_cast<const Words*>(share)[pack % 32];
    squares_of[part] = received.squares[part][token];
  }
  finish_pack<T>(arguments, first_row + token, first_output + column, stores, words, squares_of,
                 1 / K::template kGainFactor<T>);
}

template <class T, Form kForm, int kRows, bool kResidual, End kEnd = End::kSplit>
__global__ void __launch_bounds__(kThreads, Tile<kForm, kRows, kResidual, kEnd>::kBlocksOnAnSm)
    norm_concat_linear_partial_kernel(const __grid_constant__ Arguments arguments) {
  using K = Tile<kForm, kRows, kResidual, kEnd>;
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

  // Stages [begin, end) of the range, counted from the first column of its chunk; those from `next` on are of the next
  // chunk.
  constexpr int kStagesOfUnit = K::kUnitColumns / kStageColumns;
  const auto units_of_chunk = [&](int k) {
    return static_cast<int>(arguments.chunks[k].width + K::kUnitColumns - 1) / K::kUnitColumns;
  };
  int first_chunk = 0, begin = 0, end = 0, next = 0;
  if constexpr (K::kFused) {
    const BlockRange& range = arguments.of_block[blockIdx.y];
    first_chunk = range.chunk, begin = range.begin * kStagesOfUnit, end = range.end * kStagesOfUnit;
    next = units_of_chunk(first_chunk) * kStagesOfUnit;
  } else {
    int range = blockIdx.y;
    for (; range >= arguments.ranges.of_chunk[first_chunk]; ++first_chunk) {
      range -= arguments.ranges.of_chunk[first_chunk];
    }
    const int units = units_of_chunk(first_chunk), ranges = arguments.ranges.of_chunk[first_chunk];
    begin = units * range / ranges * kStagesOfUnit, next = end = units * (range + 1) / ranges * kStagesOfUnit;
  }
  const bool has_next = K::kFused && end > next;
  struct Place {
    bool is_next;
    int column, ahead;  // of its chunk, and ahead of the first chunk's first column
  };
  const auto place_of = [&](int block) -> Place {
    const bool is_next = has_next && block >= next;
    const int column = (is_next ? block - next : block) * kStageColumns;
    return {is_next, column, is_next ? column + static_cast<int>(arguments.chunks[first_chunk].width) : column};
  };

  char* ring = shared_memory();
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
  [[maybe_unused]] Received& received = *reinterpret_cast<Received*>(ring + K::kReceivedAt);
  [[maybe_unused]] const int packs =
      static_cast<int>(op.num_rows - first_row < kRows ? op.num_rows - first_row : kRows) * kPacksOfRow;
  // A warp has two tiles of 8 rows of x and four of the weight, so the gain is cheaper on x; it is one rounding either
  // way. In fp16 x times a gain may overflow.
  constexpr bool kGainOnX = K::kFused && K::kIsCodes && std::is_same_v<T, BFloat16>;

  // Copies this thread's part of a block of columns; past the range the group is empty, so that groups count stages.
  const auto copy_block = [&](int block, int slot) {
    const auto [is_next, column, ahead] = place_of(block);
    const Chunk& chunk = arguments.chunks[first_chunk + is_next];
    const int width = static_cast<int>(chunk.width);
    if (block < end && copies_weight) {
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
          if (kRowsAtOnce > kColumns && row >= kColumns) break;
          copy_word_early(stage + K::kScalesAt + (row + below) * K::kRowScales + word * 4,
                          scales + below * op.scales.row_stride, first < width && row + below < outputs);
        }
      }
    } else if (block < end) {
      char* stage = ring + slot * K::kStageBytes + K::kWeightBytes;
      const bool inside = column + copy_part * kPack < width;
      const T** const of_chunk = is_next ? sources + K::kSourceRows : sources;
#pragma unroll
      for (int i = 0; i < K::kSourceRows / kCopyRows; ++i) {
        const int row = copy_row + i * kCopyRows;
        const T* source = of_chunk[row];
        copy_async(stage + place<kRowBytes>(row, copy_part), source + column + copy_part * kPack,
                   inside && source != nullptr);
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
    for (int i = 0; i < K::kStages - 1; ++i) copy_block(begin + i, i);
  };
  // Prefetches what the ring takes first into L2, which is coherent: the previous kernel may still write the weight.
  const auto prefetch_weight = [&] {
    for (int block = begin; block < end && block < begin + K::kStages - 1; ++block) {
      const auto [is_next, column, ahead] = place_of(block);
      if (column + weight_column >= arguments.chunks[first_chunk + is_next].width) continue;
#pragma unroll
      for (int i = 0; i < kColumns / kWeightCopyRows; ++i) {
        const int row = i * kWeightCopyRows;
        if (row < outputs - weight_row) prefetch(weight + row * op.weight_row_stride + ahead / kPerWeight);
      }
    }
  };

  if (K::kFused && gridDim.y > 1) {
    if (threadIdx.x == kThreads - 1) {
      const int bytes = own_packs(packs) * sizeof(Words) + sizeof received.squares[0];
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
  __syncthreads();
  if (!copies_weight || !op.early_weight) fill_ring();
  // All blocks can receive after this; the first stage loads meanwhile.
  if (K::kFused && gridDim.y > 1) wait_for_cluster();

  // Scales and NaN bits of the rows of the weight whose sums this lane has; rows past the last take the last one's.
  [[maybe_unused]] int64_t scale_row[2 * K::kColumnTiles];
  [[maybe_unused]] float row_scale[2 * K::kColumnTiles];
  // With scales of blocks and three blocks on an SM the bits of all rows are in one: 24 bytes would be spilled.
  constexpr bool kNansInOne = kForm == Form::kE4M3Blocks && K::kInThrees;
  [[maybe_unused]] uint32_t nan[kNansInOne ? 1 : 2 * K::kColumnTiles] = {};
  [[maybe_unused]] const auto find_scales = [&] {
#pragma unroll
    for (int m = 0; m < 2 * K::kColumnTiles; ++m) {
      const int output = (column_warp * 2 * K::kColumnTiles + m) * 8 + g;
      const int64_t row = output < outputs ? first_output + output : op.num_columns - 1;
      scale_row[m] = row / op.scales.block_rows * op.scales.row_stride;
    }
  };
  [[maybe_unused]] const auto load_scales = [&](int column) {
#pragma unroll
    for (int m = 0; m < 2 * K::kColumnTiles; ++m) {
      row_scale[m] = load_scale(op.scales, scale_row[m] + (column >> arguments.scale_shift));
    }
  };


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
      total[m][n][i] += sum[m][n][i] * row_scale[2 * m + i / 2];
    }
  };
  // Scales of blocks: the split kernels load one for every row of the weight where a block of columns ends. In the
  // fused kernel the rows of a tile and a warp's columns of a stage share one, which is loaded a stage ahead.
  constexpr bool kBlocks = kForm == Form::kE4M3Blocks, kScaledStages = kBlocks && K::kFused;
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
  int block = begin, slot = 0;
#pragma unroll 1
  for (int of_range = 0; of_range <= static_cast<int>(has_next); ++of_range) {
    const Chunk& chunk = arguments.chunks[first_chunk + of_range];
    const int width = static_cast<int>(chunk.width);
    const int origin = of_range == 0 ? 0 : next, last = of_range == 0 && has_next ? next : end;
    const bool gain_is_float32 = chunk.gain.dtype == DType::kFloat32;
    const char* gain = static_cast<const char*>(chunk.gain.data);

    if constexpr (kBlocks && !K::kFused) {
      find_scales();
      load_scales(static_cast<int>(chunk.column) + begin * kStageColumns);
    }
    [[maybe_unused]] const int column_of_warp = static_cast<int>(chunk.column) + step_warp * K::kSteps * kStepColumns;
    [[maybe_unused]] const int end_of_scales = static_cast<int>(chunk.column) + width;
    [[maybe_unused]] float next_scale = 0;
    [[maybe_unused]] const auto load_next_scale = [&](int block) {
      const int column = column_of_warp + (block - origin) * kStageColumns;
      const bool inside = column < end_of_scales;  // no branch: with one ptxas keeps less in registers
      const uint32_t at = scales_of_tile + (inside ? column >> arguments.scale_shift : 0);
      const float scale = load_scale(op.scales.type, op.scales.data, at);
      next_scale = inside ? global_scale * scale : 0.0f;
    };
    if constexpr (kScaledStages) load_next_scale(block);
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
      for (; block < last; ++block, slot = slot + 1 == K::kStages ? 0 : slot + 1) {
        wait_for_copies<K::kStages - 2>();
        __syncthreads();
        copy_block(block + K::kStages - 1, slot == 0 ? K::kStages - 1 : slot - 1);
        [[maybe_unused]] const float stage_scale = next_scale;
        if constexpr (kScaledStages) load_next_scale(block + 1);
        const char* stage = ring + slot * K::kStageBytes;
        const char* x_stage = stage + K::kWeightBytes;
        const char* gains = x_stage + K::kSourceRows * kRowBytes;
        // Unrolled steps overlap, and spill for 64 rows on sm_100 and with scales of blocks and residuals.
#pragma unroll(kRows == 64 || (kBlocks && kResidual) ? 1 : K::kSteps)
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
          const auto times = [](const Words& row, const Words& by) -> Words {
            return {multiply(row.x, by.x, T{}), multiply(row.y, by.y, T{}), multiply(row.z, by.z, T{}),
                    multiply(row.w, by.w, T{})};
          };
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
                const uint32_t scales = reinterpret_cast<const uint32_t*>(scales_of_row)[word];
                if constexpr (kForm == Form::kNvfp4) nan[m] |= nan_bits(scales, Float8E4M3{});
                row = widen_scaled(codes, scales, own % 4);
              } else {
                row = widen(codes, Code{}, T{});
              }
            } else {
              row = at(stage, tile_row, part);
            }
            if constexpr (!kPairs && !kGainOnX) {
              row = scaled<T>(row, factor);
            } else if (!kGainOnX && kCodeGainScale<T> == 1 && gain != nullptr) {
              row = times(row, K::kFourBits ? paired(*words) : *words);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) w[m / 2][i / 2][i % 2 * 2 + m % 2] = word(row, i);
          }
#pragma unroll
          for (int n = 0; n < K::kRowTiles; ++n) {
            Words x = kKeepsPlaces ? x_at(x_stage + x_place[at_step] + n * 8 * kRowBytes).words[0]
                                   : x_of(x_stage, (row_warp * K::kRowTiles + n) * 8 + g, part).words[0];
            if constexpr (kGainOnX) x = kPairs ? times(x, pairs_of_x) : scaled<T>(x, factor);
            if constexpr (K::kFourBits) x = paired(x);
#pragma unroll
            for (int m = 0; m < K::kColumnTiles; ++m) {
              const auto &low = w[m][0], &high = w[m][1];
              mma(sum[m][n], low[0], low[1], low[2], low[3], x.x, x.y, T{});
              mma(sum[m][n], high[0], high[1], high[2], high[3], x.z, x.w, T{});
            }
          }
          if constexpr (kBlocks && !K::kFused) {
            // Widths are multiples of a step's columns. The sums of the range's last block are added after the loop.
            const int ahead = block * kStageColumns + (step + 1) * kStepColumns;
            if (ahead >= width || ahead >= end * kStageColumns) break;
            const int column = static_cast<int>(chunk.column) + ahead;
            if ((column >> arguments.scale_shift) << arguments.scale_shift == column) {
              add_scaled();
              std::memset(sum, 0, sizeof sum);
              load_scales(column);
            }
          }
        }
        if constexpr (kScaledStages) {
#pragma unroll
          for (float& of_row : row_scale) of_row = stage_scale;
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
        for (float& of_row : row_scale) of_row = kForm == Form::kNvfp4 ? by * kNvfp4Unscale : by;
      } else if constexpr (!kBlocks) {  // not earlier: two more registers spill on sm_100
        find_scales();
        load_scales(0);
      }
#pragma unroll
      for (int m = 0; m < 2 * K::kColumnTiles; ++m) {
        if constexpr (kScaledStages) row_scale[m] = 0;
        if (row_has_nan(kNansInOne ? nan[0] << m : nan[m])) row_scale[m] = bits_to_float(0x7fffffff);
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
      send_sums<K>(arguments.of_block[blockIdx.y].part + of_range, packs, memory, sum, squares[0], received);
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

constexpr int kMaxFinalizeThreads = 512;
// A block computes a row of the output, or without a post norm some of its columns.
template <class T>
__global__ void __launch_bounds__(kMaxFinalizeThreads)
    norm_concat_linear_finalize_kernel(const __grid_constant__ Arguments arguments) {
  const NormConcatLinear& op = arguments.op;
  const Concat& source = op.source;
  const int num_chunks = static_cast<int>(source.num_chunks);
  const int64_t row = blockIdx.x;
  const bool has_norm = source.norm != Norm::kNone, chunk_norm = source.norm == Norm::kChunk;
  const float gain_unscale = op.weight_type == WeightType::kChunks ? 1 / kGainScale<T> : 1 / kCodeGainScale<T>;
  float* scale = reinterpret_cast<float*>(shared_memory()) + blockDim.x / 32;  // [K], after sum_over_row's
  bool* left_out = reinterpret_cast<bool*>(scale + num_chunks);                 // [K]
  wait_for_previous_kernel();
  let_next_kernel_start();

  if (threadIdx.x < num_chunks) {
    const int k = threadIdx.x;
    float total = 0;
    int first_range = 0;
    for (int chunk = 0; chunk < num_chunks && has_norm; first_range += arguments.ranges.of_chunk[chunk++]) {
      if (chunk_norm && chunk != k) continue;
      const Chunk& given = arguments.chunks[chunk];
      if (given.sum_squares != nullptr) {
        const int64_t of = source_row(given, row);
        if (of >= 0) total += load(given.sum_squares + of * given.sum_squares_row_stride);
        continue;
      }
      for (int range = 0; range < arguments.ranges.of_chunk[chunk]; ++range) {
        total += load(arguments.squares + (first_range + range) * op.num_rows + row);
      }
    }
    const Chunk& own = arguments.chunks[k];
    const float unscale = own.gain.data != nullptr ? gain_unscale : 1.0f;
    scale[k] = !has_norm    ? 1.0f
               : chunk_norm ? unscale * rstd_of(total, own.width, own.eps)
                            : unscale * rstd_of(total, source.width, arguments.chunks[0].eps);
    // A row out of range is skipped, not multiplied by 0: an infinite gain has made its product NaN.
    left_out[k] = has_norm && source_row(own, row) < 0;
  }
  __syncthreads();

  T* out = static_cast<T*>(op.out) + row * op.out_row_stride;
  const int64_t columns = op.num_columns;
  const auto project = [&](int64_t column, float (&total)[kOutputColumns]) {
#pragma unroll
    for (int i = 0; i < kOutputColumns; ++i) total[i] = 0;
    const float* partial = arguments.partial + row * arguments.partial_stride + column;
    const int64_t range_stride = op.num_rows * arguments.partial_stride;
    for (int k = 0; k < num_chunks; partial += range_stride * arguments.ranges.of_chunk[k++]) {
      if (left_out[k]) continue;
      float of_chunk[kOutputColumns] = {};
#pragma unroll 4
      for (int range = 0; range < arguments.ranges.of_chunk[k]; ++range) {
        const Words words = load(reinterpret_cast<const Words*>(partial + range * range_stride));
#pragma unroll
        for (int i = 0; i < kOutputColumns; ++i) of_chunk[i] += bits_to_float(word(words, i));
      }
#pragma unroll
      for (int i = 0; i < kOutputColumns; ++i) total[i] += of_chunk[i] * scale[k];
    }
#pragma unroll
    for (int i = 0; i < kOutputColumns; ++i) {
      if (op.bias.data != nullptr && column + i < columns) total[i] += value_at<T>(op.bias, column + i);
    }
  };
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kOutputColumns;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.x * kOutputColumns;
  const bool has_post_norm = op.post_norm_gain.data != nullptr;
  float total[kOutputColumns], post_rstd = 1;
  if (has_post_norm) {
    float squares = 0;
    for (int64_t column = first; column < columns; column += step) {
      project(column, total);
#pragma unroll
      for (int i = 0; i < kOutputColumns; ++i) squares += column + i < columns ? total[i] * total[i] : 0.0f;
    }
    post_rstd = rstd_of(sum_over_row(squares), columns, op.post_norm_eps);
  }
  const bool in_words = stores_words<T>(op);
  for (int64_t column = first; column < columns; column += step) {
    project(column, total);
    if (has_post_norm) {
#pragma unroll
      for (int i = 0; i < kOutputColumns; ++i) {
        if (column + i >= columns) continue;
        total[i] *= post_rstd;
        total[i] *= source.norm_offset + value_at<T>(op.post_norm_gain, column + i);
      }
    }
    store_outputs(out, column, columns, total, in_words);
  }
}

int64_t blocks_of_outputs(const NormConcatLinear& op, int columns = kSplitColumns) {
  return (op.num_columns + columns - 1) / columns;
}

// Cuts every chunk into ranges of at most `length` units.
SplitRanges ranges_of(const Concat& source, int unit, int length) {
  SplitRanges ranges{};
  for (int k = 0; k < source.num_chunks; ++k) {
    ranges.count += ranges.of_chunk[k] = (units_of_chunk(source, k, unit) + length - 1) / length;
  }
  return ranges;
}

int units_of_widest(const Concat& source, int unit) {
  int widest = 0;
  for (int k = 0; k < source.num_chunks; ++k) widest = std::max(widest, units_of_chunk(source, k, unit));
  return widest;
}

// Cuts the concat into `count` ranges, which differ by a unit at most. False where one would have columns of more than
// two chunks, or where a block has no room for the parts that it receives.
bool cut_evenly(Arguments& arguments, int unit, int count) {
  const Concat& source = arguments.op.source;
  int first[kMaxChunks + 1] = {};  // unit of each chunk
  for (int k = 0; k < source.num_chunks; ++k) first[k + 1] = first[k] + units_of_chunk(source, k, unit);
  const int all = first[source.num_chunks];
  if (all < count) return false;
  SplitRanges parts{};
  for (int block = 0, k = 0; block < count; ++block) {
    const int begin = all * block / count, end = all * (block + 1) / count;
    while (first[k + 1] <= begin) ++k;
    const bool has_next = end > first[k + 1];
    if (has_next && end > first[k + 2]) return false;
    arguments.of_block[block] = {k, begin - first[k], end - first[k], parts.count};
    ++parts.of_chunk[k];
    if (has_next) ++parts.of_chunk[k + 1];
    parts.count += 1 + has_next;
  }
  arguments.ranges = parts;
  return parts.count <= kMaxParts && parts.count * shares_of_block(count) <= kMaxReceived;
}

// Cuts every chunk into ranges of its own, `count` in all: one each, then one more for the chunk whose ranges are
// longest. False where there are not as many.
bool cut_each_chunk(Arguments& arguments, int unit, int count) {
  const Concat& source = arguments.op.source;
  SplitRanges ranges = one_range_each(source);
  if (ranges.count > count) return false;
  for (; ranges.count < count; ++ranges.count) {
    const LongestRange longest = longest_range(source, ranges, unit);
    if (longest.units == 1) return false;
    ++ranges.of_chunk[longest.chunk];
  }
  for (int block = 0, k = 0; k < source.num_chunks; ++k) {
    const int units = units_of_chunk(source, k, unit), of_chunk = ranges.of_chunk[k];
    for (int range = 0; range < of_chunk; ++range, ++block) {
      arguments.of_block[block] = {k, units * range / of_chunk, units * (range + 1) / of_chunk, block};
    }
  }
  arguments.ranges = ranges;
  return true;
}

struct Cut {
  int ranges, blocks_on_an_sm;
  bool evenly;
};

// Cuts the concat into the fused kernel's ranges, so that an H200 takes least. T is not in it, so that no sum depends
// on it.
Cut cut_for_cluster(Arguments& arguments, const Device& device, int max_blocks_on_an_sm) {
  const NormConcatLinear& op = arguments.op;
  const bool is_codes = op.weight_type != WeightType::kChunks;
  const int64_t clusters = blocks_of_outputs(op, kFusedColumns);
  const int unit = fused_unit_columns(is_codes);
  int units = 0;
  for (int k = 0; k < op.source.num_chunks; ++k) units += units_of_chunk(op.source, k, unit);
  const auto cut = [&](const Cut& into) {
    return into.evenly ? cut_evenly(arguments, unit, into.ranges) : cut_each_chunk(arguments, unit, into.ranges);
  };
  // Of the call, cut so.
  const auto us_of_call = [&](const Cut& into) {
    int longest = 0;
    for (int block = 0; block < into.ranges; ++block) {
      longest = std::max(longest, arguments.of_block[block].end - arguments.of_block[block].begin);
    }
    const bool has_second_part = arguments.ranges.count > into.ranges;
    const FusedWork work{clusters, into.ranges, into.blocks_on_an_sm, longest, units, has_second_part};
    return us_of_fused(device, is_codes, work);
  };
  // With the blocks and ranges that somebody wants; 0 of them: any.
  const auto best_cut = [&](int wanted_blocks, int wanted_ranges) {
    Cut best{};
    float least = std::numeric_limits<float>::infinity();
    for (int blocks = std::min(2, max_blocks_on_an_sm); blocks <= max_blocks_on_an_sm; ++blocks) {
      if (wanted_blocks != 0 && wanted_blocks != blocks) continue;
      for (int ranges = 1; ranges <= kMaxCluster; ++ranges) {
        if (wanted_ranges != 0 && wanted_ranges != ranges) continue;
        for (const bool evenly : {true, false}) {
          const Cut tried{ranges, blocks, evenly};
          if (!cut(tried)) continue;
          if (const float us = us_of_call(tried); us < least || best.ranges == 0) best = tried, least = us;
          // Chunk by chunk the longest range is no shorter.
          if (!is_codes || arguments.ranges.count == ranges) break;
        }
      }
    }
    return best;
  };
  Cut best{};
#ifdef EAGLE_KERNELS_ALTERNATIVES  // the library that bench/gpu_session.sh times beside the plain one
  const auto wanted = [](const char* name) { return std::getenv(name) == nullptr ? 0 : std::atoi(std::getenv(name)); };
  const int wanted_blocks = max_blocks_on_an_sm == 3 ? wanted("EAGLE_KERNELS_FUSED_BLOCKS") : 0;
  best = best_cut(wanted_blocks, wanted("EAGLE_KERNELS_FUSED_RANGES"));
#endif
  if (best.ranges == 0) best = best_cut(0, 0);
  cut(best);
  return best;
}

template <class T, Form kForm, int kRows, bool kResidual>
int launch_partial(const Arguments& arguments, const Device& device) {
  const int64_t rounds = (arguments.op.num_rows + kRows - 1) / kRows;
  const Shape shape{rounds * blocks_of_outputs(arguments.op), arguments.ranges.count, kThreads,
                    Tile<kForm, kRows, kResidual, End::kSplit>::kSharedBytes};
  return launch<norm_concat_linear_partial_kernel<T, kForm, kRows, kResidual>>(shape, arguments, device);
}

template <class T, Form kForm>
int launch_rows(const Arguments& arguments, const Device& device) {
  const int64_t rows = arguments.op.num_rows;
  const bool residual = has_residual(arguments);
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
  const Cut cut = cut_for_cluster(arguments, device, max_blocks);
  const auto launch_end = [&](auto end) {
    constexpr End kEnd = decltype(end)::value;
    Shape shape{rounds * blocks_of_outputs(op, kFusedColumns), cut.ranges, kThreads,
                Tile<kForm, kRows, kResidual, kEnd>::kSharedBytes};
    shape.cluster = cut.ranges;
    return launch<norm_concat_linear_partial_kernel<T, kForm, kRows, kResidual, kEnd>>(shape, arguments, device);
  };
  if constexpr (kInThreesToo) {
    if (cut.blocks_on_an_sm == 3) return launch_end(std::integral_constant<End, End::kFusedInThrees>{});
  }
  return launch_end(std::integral_constant<End, End::kFused>{});
}

template <class T>
int launch_finalize(const Arguments& arguments, const Device& device) {
  const NormConcatLinear& op = arguments.op;
  const int64_t packs = (op.num_columns + kOutputColumns - 1) / kOutputColumns;
  const bool whole_row = op.post_norm_gain.data != nullptr;
  const int64_t threads = std::clamp<int64_t>((packs + 31) / 32 * 32, 32, whole_row ? kMaxFinalizeThreads : 128);
  const Shape shape{op.num_rows, whole_row ? 1 : (packs + threads - 1) / threads, threads,
                    sum_bytes(threads) + op.source.num_chunks * 5};
  return launch<norm_concat_linear_finalize_kernel<T>>(shape, arguments, device);
}

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
  return error != 0 ? error : launch_finalize<T>(arguments, device);
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

int norm_concat_linear_cuda(const NormConcatLinear& op, const Device& device) {
  constexpr int kTile = kFusedColumns;  // rows of the weight, and a warp's columns of a stage
  if (!device.hopper) return cudaErrorNotSupported;
  Arguments arguments{op, {}, {}, {}, nullptr, 0, nullptr, scale_shift_of(op)};
  std::copy_n(op.source.chunks, op.source.num_chunks, arguments.chunks);
  const bool residual = has_residual(arguments);
  if (op.weight_type == WeightType::kFloat8E4M3 && has_scales_of_codes(op) && !residual) {
    return launch_fused<BFloat16, Form::kMxfp8, false>(arguments, device);
  }
  if (op.weight_type != WeightType::kFloat4E2M1 && !has_scale_of_tiles(op, kTile, kTile)) return cudaErrorNotSupported;
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
  const int outputs = static_cast<int>(blocks_of_outputs(op));
  const bool is_codes = op.weight_type != WeightType::kChunks;
  const int unit = unit_columns(is_codes), widest = units_of_widest(op.source, unit), of_sums = is_codes ? 1 : 3;
  SplitRanges best{};
  int least = 0;
  for (int parts = 1; parts <= kMaxRanges; ++parts) {
    const int length = std::max(2, (widest + parts - 1) / parts);
    const SplitRanges ranges = ranges_of(op.source, unit, length);
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
  const int64_t stride = blocks_of_outputs(op) * kSplitColumns;
  float* partial = static_cast<float*>(op.workspace);
  Arguments arguments{op, {}, ranges, {}, partial, stride, partial + ranges.count * op.num_rows * stride,
                      scale_shift_of(op)};
  std::copy_n(op.source.chunks, op.source.num_chunks, arguments.chunks);
  return op.source.dtype == DType::kBFloat16 ? launch_both<BFloat16>(arguments, device)
                                             : launch_both<Float16>(arguments, device);
}

int norm_concat_linear_epilogue_cuda(const NormConcatLinear& op, const Device& device) {
  Arguments arguments{op, {}, {{1}, 1, 0}, {}, static_cast<float*>(op.workspace), epilogue_row_stride(op), nullptr, 31};
  Concat& source = arguments.op.source;
  source.norm = Norm::kNone;
  source.num_chunks = 1;
  return with_dtype(source.dtype, [&](auto type) { return launch_finalize<decltype(type)>(arguments, device); });
}

}  // namespace eagle_kernels
