// norm_concat_linear by ranges: a block multiplies some columns of the output over one range of the columns of the
// concat. Here are the arguments of these kernels, and the sum over all ranges where their blocks form a cluster.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "../norm_concat_linear.h"
#include "device.h"
#include "pack.cuh"
#include "source_row.cuh"

namespace eagle_kernels::cuda {

constexpr int kMaxCluster = 8;  // blocks, on every GPU that has clusters

// What the weight is. A scale per row of codes multiplies the finished sums; scales of blocks, the sums of each block.
// In the last three a scale of 16 or 32 columns multiplies the codes of a row, in bf16, which rows then are of.
enum class Form { kDense, kE4M3, kE4M3Blocks, kInt8, kNvfp4, kMxfp4, kMxfp8 };
constexpr bool has_scaled_codes(Form form) { return form >= Form::kNvfp4; }
constexpr bool has_four_bits(Form form) { return form == Form::kNvfp4 || form == Form::kMxfp4; }

// What a block of a cluster multiplies in the fused kernel: units [begin, end), counted from the first column of a
// chunk. Beyond that chunk's last unit they are the next one's. Each chunk's part of a range has sums of its own, the
// first of which are number `part` of the concat.
struct BlockRange {
  int chunk, begin, end, part;
};

struct Arguments {
  NormConcatLinear op;
  Chunk chunks[kMaxChunks];
  SplitRanges ranges;  // the fused kernel's parts
  BlockRange of_block[kMaxCluster];
  float* partial;          // [ranges.count, num_rows, partial_stride]
  int64_t partial_stride;  // columns of whole blocks
  float* squares;          // [ranges.count, num_rows]
  int scale_shift;         // 2^scale_shift columns share a scale
};

constexpr int kOutputColumns = 4;  // of a thread at a time: 16 bytes of fp32 sums

// kOutputColumns values as they are stored.
template <class T>
struct alignas(kOutputColumns * sizeof(T)) Outputs {
  uint32_t words[sizeof(T)];
};
template <class T>
__device__ __forceinline__ Outputs<T> narrow(const float (&x)[kOutputColumns], T) {
  return {{narrow(Pair{x[0], x[1]}, T{}), narrow(Pair{x[2], x[3]}, T{})}};
}
__device__ __forceinline__ Outputs<float> narrow(const float (&x)[kOutputColumns], float) {
  return {{float_to_bits(x[0]), float_to_bits(x[1]), float_to_bits(x[2]), float_to_bits(x[3])}};
}

// Whether every row of the output consists of whole, aligned Outputs.
template <class T>
__device__ __forceinline__ bool stores_words(const NormConcatLinear& op) {
  const uintptr_t bytes = static_cast<uintptr_t>((op.out_row_stride | op.num_columns) * sizeof(T));
  return (reinterpret_cast<uintptr_t>(op.out) | bytes) % sizeof(Outputs<T>) == 0;
}

// Stores the values of a row from `column` on, those below `columns`.
template <class T>
__device__ __forceinline__ void store_outputs(T* row, int64_t column, int64_t columns,
                                              const float (&values)[kOutputColumns], bool in_words) {
  constexpr int kSize = sizeof(T);
  const Outputs<T> outputs = narrow(values, T{});
  if (in_words) {
    store(reinterpret_cast<Outputs<T>*>(row + column), outputs);
    return;
  }
#pragma unroll
  for (int i = 0; i < kOutputColumns; ++i) {
    if (column + i < columns) store_bits(row + column + i, outputs.words[i * kSize / 4] >> (i * kSize % 4 * 8));
  }
}

// A block's sums over its range, in its shared memory.
template <int kRows, int kColumns, int kStride>
struct BlockSums {
  const float* products;  // [kRows, kColumns], kStride apart
  const float* squares;   // [kRows]
};

// The outputs of a cluster are in packs of four neighbors in a row, and a row has a multiple of this many: lanes of the
// same half of a warp have the same row.
constexpr int kPacksOfRow = 16;

// Each lane finishes a pack: it adds up the sums of all ranges, words[rank], and the squares of its row, squares[rank],
// in the order of ranges (in the fused kernel, parts) and chunks. Lanes that store nothing work on another's pack. Lane
// k of a half computes the scale of chunk k: loads, a root and two divisions, which for three chunks in turn take three
// times as long.
template <class T, class WordsOfRanges, class SquaresOfRanges>
__device__ __forceinline__ void finish_pack(const Arguments& arguments, int64_t row, int64_t output, bool stores,
                                            const WordsOfRanges& words, const SquaresOfRanges& squares,
                                            float gain_unscale) {
  const NormConcatLinear& op = arguments.op;
  const Concat& source = op.source;
  const int blocks = arguments.ranges.count, num_chunks = static_cast<int>(source.num_chunks);
  const int lane = threadIdx.x % 32, own_chunk = lane % kPacksOfRow, first_lane = lane - own_chunk;
  // f(rank, k, whether it is the last range of chunk k).
  const auto for_each_range = [&](auto f) {
    int k = 0, left = arguments.ranges.of_chunk[0];
#pragma unroll
    for (int rank = 0; rank < kMaxCluster; ++rank) {
      if (rank >= blocks) break;
      const bool is_last = --left == 0;
      f(rank, k, is_last);
      if (is_last && ++k < num_chunks) left = arguments.ranges.of_chunk[k];
    }
  };

  float scale = 1, of_concat = 1;
  bool left_out = false;
  if (source.norm != Norm::kNone) {
    float of_chunk = 0, own = 0;
    for_each_range([&](int rank, int k, bool is_last) {
      of_chunk += squares[rank];
      if (!is_last) return;
      if (k == own_chunk) own = of_chunk;
      of_chunk = 0;
    });
    if (own_chunk < num_chunks) {
      const Chunk& chunk = arguments.chunks[own_chunk];
      const int64_t of = source_row(chunk, row);
      left_out = of < 0;
      if (left_out) {
        own = 0;
      } else if (chunk.sum_squares != nullptr) {
        own = load(chunk.sum_squares + of * chunk.sum_squares_row_stride);
      }
      if (chunk.gain.data != nullptr) scale = gain_unscale;
      if (source.norm == Norm::kChunk) scale *= rstd_of(own, chunk.width, chunk.eps);
    }
    if (source.norm == Norm::kConcat) {
      float all = 0;
      for (int chunk = 0; chunk < num_chunks; ++chunk) all += __shfl_sync(~0u, own, first_lane + chunk);
      of_concat = rstd_of(all, source.width, arguments.chunks[0].eps);
    }
  }

  float total[kOutputColumns] = {}, of_chunk[kOutputColumns] = {};
  for_each_range([&](int rank, int k, bool is_last) {
    const Words of_range = words[rank];
    const uint32_t values[kOutputColumns] = {of_range.x, of_range.y, of_range.z, of_range.w};
#pragma unroll
    for (int i = 0; i < kOutputColumns; ++i) of_chunk[i] += bits_to_float(values[i]);
    if (!is_last) return;
    const float by = __shfl_sync(~0u, scale, first_lane + k);
    // A row out of range is skipped, not multiplied by 0: an infinite gain has made its product NaN.
    const bool leaves_out = __shfl_sync(~0u, static_cast<int>(left_out), first_lane + k) != 0;
#pragma unroll
    for (int i = 0; i < kOutputColumns; ++i) {
      total[i] += leaves_out ? 0.0f : of_chunk[i] * by;
      of_chunk[i] = 0;
    }
  });
  if (!stores || output >= op.num_columns) return;
#pragma unroll
  for (int i = 0; i < kOutputColumns; ++i) {
    total[i] *= of_concat;
    if (op.bias.data != nullptr && output + i < op.num_columns) total[i] += value_at<T>(op.bias, output + i);
  }
  store_outputs(static_cast<T*>(op.out) + row * op.out_row_stride, output, op.num_columns, total, stores_words<T>(op));
}

// What the blocks of the cluster have at the same address, loaded when it is used. A block that is alone has no cluster
// (norm_concat_linear.cu, finish_fused) and loads its own.
struct WordsOfBlocks {
  const float* mine;
  bool is_alone;
  __device__ __forceinline__ Words operator[](int rank) const {
    return rank == 0 && is_alone ? *reinterpret_cast<const Words*>(mine) : load_words_from_block(mine, rank);
  }
};
struct SquaresOfBlocks {
  const float* mine;
  bool is_alone;
  __device__ __forceinline__ float operator[](int rank) const {
    return rank == 0 && is_alone ? *mine : load_from_block(mine, rank);
  }
};

// Every block of a cluster sums a share of the outputs over all ranges. Shares are dealt out by warps, so that every
// block has some even of few rows, and a warp reads neighbors. kAtOnce: a pack's words of all ranges are loaded
// together, where there are registers for them; one after the other takes up to 8 times as long.
template <class T, bool kAtOnce, int kRows, int kColumns, int kStride>
__device__ __forceinline__ void sum_over_cluster(const Arguments& arguments, int64_t first_row, int64_t first_output,
                                                 const BlockSums<kRows, kColumns, kStride>& sums, float gain_unscale) {
  static_assert(kColumns / kOutputColumns % kPacksOfRow == 0);
  const NormConcatLinear& op = arguments.op;
  const int blocks = static_cast<int>(gridDim.y), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rows = static_cast<int>(op.num_rows - first_row < kRows ? op.num_rows - first_row : kRows);
  const bool has_norm = op.source.norm != Norm::kNone, is_alone = blocks == 1;
  const int packs = rows * (kColumns / kOutputColumns), step = static_cast<int>(blockDim.x) * blocks;
  if (is_alone) {
    __syncthreads();
  } else {
    sync_cluster();
  }
  for (int first = (warp * blocks + static_cast<int>(blockIdx.y)) * 32; first < packs; first += step) {
    const bool stores = first + lane < packs;
    const int pack = stores ? first + lane : packs - 1;
    const int token = pack / (kColumns / kOutputColumns), column = pack % (kColumns / kOutputColumns) * kOutputColumns;
    const WordsOfBlocks words_of{sums.products + token * kStride + column, is_alone};
    const SquaresOfBlocks squares_of{sums.squares + token, is_alone};
    const auto finish = [&](const auto& words, const auto& squares) {
      finish_pack<T>(arguments, first_row + token, first_output + column, stores, words, squares, gain_unscale);
    };
    if constexpr (kAtOnce) {
      Words words[kMaxCluster];
      float squares[kMaxCluster];
      // Loads only what is used: a load that nothing waits for could reach a block that has ended.
#pragma unroll
      for (int rank = 0; rank < kMaxCluster; ++rank) {
        if (rank >= blocks) break;
        words[rank] = words_of[rank];
        squares[rank] = has_norm ? squares_of[rank] : 0.0f;
      }
      finish(words, squares);
    } else {
      finish(words_of, squares_of);
    }
  }
  if (!is_alone) end_cluster();
}

// Whether several scales lie along a row of the weight.
inline bool has_blocks(const NormConcatLinear& op) {
  return op.weight_type != WeightType::kChunks && op.scales.block_columns < op.source.width;
}

// Whether every tile of `rows` by `columns` of the weight has a single scale.
inline bool has_scale_of_tiles(const NormConcatLinear& op, int rows, int columns) {
  if (!has_blocks(op)) return true;
  const auto begins_one = [&](const Chunk& chunk) { return chunk.column % columns == 0; };
  return op.scales.block_rows % rows == 0 && op.scales.block_columns % columns == 0 &&
         std::all_of(op.source.chunks, op.source.chunks + op.source.num_chunks, begins_one);
}

// Whether the scales can multiply the codes of a row: four scales are copied together.
inline bool has_scales_of_codes(const NormConcatLinear& op) {
  const Scales& scales = op.scales;
  const bool nvfp4 = op.weight_type == WeightType::kFloat4E2M1 && scales.type == ScaleType::kFloat8E4M3 &&
                     scales.block_columns == 16;
  const bool mx = (op.weight_type == WeightType::kFloat4E2M1 || op.weight_type == WeightType::kFloat8E4M3) &&
                  scales.type == ScaleType::kFloat8E8M0 && scales.block_columns == 32;
  const auto in_fours = [&](const Chunk& chunk) { return chunk.width % (4 * scales.block_columns) == 0; };
  const Chunk* chunks = op.source.chunks;
  // The stride of a single row is arbitrary and never used.
  const uintptr_t stride = op.num_columns > 1 ? static_cast<uintptr_t>(scales.row_stride) : 0;
  const uintptr_t bytes = reinterpret_cast<uintptr_t>(scales.data) | stride;
  return (nvfp4 || mx) && scales.block_rows == 1 && op.source.dtype == DType::kBFloat16 && bytes % 4 == 0 &&
         std::all_of(chunks, chunks + op.source.num_chunks, in_fours);
}

// For Arguments::scale_shift; with one scale per row all columns share it.
inline int scale_shift_of(const NormConcatLinear& op) {
  return has_blocks(op) ? std::countr_zero(static_cast<uint64_t>(op.scales.block_columns)) : 31;
}

// Calls f(std::integral_constant<Form, ...>{}) with the form of the weight. It is never kMxfp8: the scales of those
// codes can multiply sums as well.
template <class F>
int with_form(const NormConcatLinear& op, const F& f) {
  using std::integral_constant;
  if (op.weight_type == WeightType::kFloat4E2M1) {
    return op.scales.block_columns == 16 ? f(integral_constant<Form, Form::kNvfp4>{})
                                         : f(integral_constant<Form, Form::kMxfp4>{});
  }
  if (op.weight_type == WeightType::kChunks) return f(integral_constant<Form, Form::kDense>{});
  if (op.weight_type == WeightType::kInt8) return f(integral_constant<Form, Form::kInt8>{});
  return has_blocks(op) ? f(integral_constant<Form, Form::kE4M3Blocks>{}) : f(integral_constant<Form, Form::kE4M3>{});
}

inline bool has_residual(const Arguments& arguments) {
  const auto is_there = [](const Chunk& chunk) { return chunk.residual != nullptr; };
  return std::any_of(arguments.chunks, arguments.chunks + arguments.op.source.num_chunks, is_there);
}

// One range for every chunk.
inline SplitRanges one_range_each(const Concat& source) {
  SplitRanges ranges{};
  ranges.count = static_cast<int>(source.num_chunks);
  std::fill_n(ranges.of_chunk, source.num_chunks, 1);
  return ranges;
}

// In units of `unit` columns: chunk k, its longest range, and all ranges as if each were its chunk's longest.
inline int units_of_chunk(const Concat& source, int k, int unit) {
  return static_cast<int>((source.chunks[k].width + unit - 1) / unit);
}
inline int longest_of_chunk(const Concat& source, const SplitRanges& ranges, int k, int unit) {
  return (units_of_chunk(source, k, unit) + ranges.of_chunk[k] - 1) / ranges.of_chunk[k];
}
inline int units_of(const Concat& source, const SplitRanges& ranges, int unit) {
  int units = 0;
  for (int k = 0; k < source.num_chunks; ++k) {
    units += ranges.of_chunk[k] * longest_of_chunk(source, ranges, k, unit);
  }
  return units;
}

// The first chunk whose ranges are longest, and how long they are.
struct LongestRange {
  int chunk, units;
};
inline LongestRange longest_range(const Concat& source, const SplitRanges& ranges, int unit) {
  LongestRange longest{0, 0};
  for (int k = 0; k < source.num_chunks; ++k) {
    if (const int units = longest_of_chunk(source, ranges, k, unit); units > longest.units) longest = {k, units};
  }
  return longest;
}

}  // namespace eagle_kernels::cuda
