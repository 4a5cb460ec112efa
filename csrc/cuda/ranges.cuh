// norm_concat_linear by ranges: a block multiplies some columns of the output over one range of the columns of the
// concat. Here are the arguments of these kernels, and how the sums of all ranges become outputs.
#pragma once

#include <algorithm>

#include "../norm_concat_linear.h"
#include "device.h"
#include "pack.cuh"
#include "source_row.cuh"

namespace eagle_kernels::cuda {

constexpr int kMaxCluster = 8;  // blocks, on every GPU that has clusters

// What a block of a cluster multiplies in the fused kernel: units [begin, end), counted from the first column of a
// chunk. Beyond that chunk's last unit they are the next one's. Each chunk's part of a range has sums of its own, the
// first of which are number `part` of the concat.
struct BlockRange {
  int chunk, begin, end, part;
};

struct Arguments {
  NormConcatLinear op;
  Chunk chunks[kMaxChunks];
  SplitRanges ranges;                // in the fused kernel its parts
  BlockRange of_block[kMaxCluster];  // in the fused kernel alone
  float* partial;                    // [ranges.count, num_rows, partial_stride], in the split kernels alone
  int64_t partial_stride;            // columns of whole blocks
  float* squares;                    // [ranges.count, num_rows], in the split kernels alone
  int scale_shift;                   // 2^scale_shift columns share a scale
};

constexpr int kSplitColumns = 128;  // output columns of a block of the split kernels
constexpr int kFusedColumns = 64;   // the same of the fused kernel
constexpr int kWideColumns = 96;    // where its blocks are launched in wide pairs

// The unit of a range's length, in columns: 128 bytes of a row of the weight, also the most that a stage of the split
// kernels has, and what one of the warpgroups' kernel has. The fused kernel's unit is twice that: one step for each of
// four warps, two of codes.
constexpr int unit_columns(bool is_codes) { return is_codes ? 128 : 64; }
constexpr int fused_unit_columns(bool is_codes) { return 2 * unit_columns(is_codes); }
// In int, since a quotient of 64 bits takes 8 instructions more.
__host__ __device__ constexpr int units_of(int64_t width, int unit) {
  return static_cast<int>(width + unit - 1) / unit;
}

constexpr int kOutputColumns = 4;  // of a thread at a time: 16 bytes of fp32 sums

// A share is the outputs of 32 lanes, four each: what one block of a cluster sends to another at a time. Those of the
// fused kernel's 16 rows are dealt to the blocks in turn.
constexpr int kShareValues = 32 * kOutputColumns;
__host__ __device__ constexpr int shares_of(int columns) { return kMaxDecodeRows * columns / kShareValues; }
__host__ __device__ constexpr int shares_of_block(int blocks, int columns) {
  return (shares_of(columns) + blocks - 1) / blocks;
}

// What a block has room for. Two chunks in one block, or four in two, are 16 shares of 64 columns; ranges of one chunk
// at most 14, in a cluster of seven. Of 96 columns three chunks in four blocks are 18, seven parts in four blocks 21;
// with more than 22 the ring of mxfp8 would have two stages.
constexpr int kMaxParts = kMaxCluster;
__host__ __device__ constexpr int max_received(int columns) { return columns == kWideColumns ? 22 : 16; }
static_assert(kMaxChunks <= kMaxParts && [] {
  for (int blocks = 1; blocks <= kMaxCluster; ++blocks) {
    for (const int columns : {kFusedColumns, kWideColumns}) {
      if (blocks * shares_of_block(blocks, columns) > max_received(columns)) return false;
    }
  }
  return true;
}());

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

// The outputs of a cluster are in packs of four neighbors in a row, and a row has a multiple of this many: so many
// lanes, from a multiple on, have the same row.
constexpr int kPacksTogether = 8;
static_assert(kMaxChunks <= kPacksTogether);

// Each lane finishes a pack: it adds up the sums of all ranges, words[rank], and the squares of its row, squares[rank],
// in the order of ranges (in the fused kernel, parts) and chunks. Lanes that store nothing work on another's pack. Of
// the lanes of a row, the k-th computes the scale of chunk k: loads, a root and two divisions, which for three chunks
// in turn take three times as long.
template <class T, class WordsOfRanges, class SquaresOfRanges>
__device__ __forceinline__ void finish_pack(const Arguments& arguments, int64_t row, int64_t output, bool stores,
                                            const WordsOfRanges& words, const SquaresOfRanges& squares,
                                            float gain_unscale) {
  const NormConcatLinear& op = arguments.op;
  const Concat& source = op.source;
  const int blocks = arguments.ranges.count, num_chunks = static_cast<int>(source.num_chunks);
  const int lane = threadIdx.x % 32, own_chunk = lane % kPacksTogether, first_lane = lane - own_chunk;
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
#pragma unroll
    for (int i = 0; i < kOutputColumns; ++i) of_chunk[i] += bits_to_float(word(of_range, i));
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

inline bool has_residual(const Concat& source) {
  const auto is_there = [](const Chunk& chunk) { return chunk.residual != nullptr; };
  return std::any_of(source.chunks, source.chunks + source.num_chunks, is_there);
}

// Adds up the partial sums of all ranges and finishes the outputs (norm_concat_linear_finalize.cu).
int finalize(const Arguments& arguments, const Device& device);

}  // namespace eagle_kernels::cuda
