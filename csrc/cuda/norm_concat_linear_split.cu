// out = post_norm(norm_concat(...) @ weight^T + bias) for up to 128 rows at a time, in two launches.
//
// The first multiplies. A block computes 128 columns of the output over a range of columns of one chunk, and the ranges
// are as many as give every SM its share: with the rows of x read once for 128 columns, not 16 or 32 as in the fused
// kernel, they take less of L2 than the weight takes of memory. Both pass through a ring of stages of 64 columns in
// shared memory, 48 KB of the weight ahead of the product in a block and two blocks on an SM of Hopper, or 80 KB in one
// block of 128 rows, which takes as much shared memory as no other GPU but sm_100 has: those multiply 64 rows twice.
// Half of the warps copy the weight and half copy x: a thread's copies land in order, and those of the weight start
// before the previous kernel has ended, those of x after.
//
// The second sums the ranges in their order, scales those of each chunk by its 1/rms, and writes. As in
// norm_concat_linear.cu the raw value enters the product and the gain is multiplied into the weight.
//
// In shared memory the 16-byte parts of a row of 128 bytes change places by halves in odd rows, so that the 8 lanes
// that are served together, of two rows, find all 32 banks. A lane's 16 bytes are 8 neighbouring columns: see
// norm_concat_linear.cu for why the fragments of two products may take them as they come.
//
// Sums of squares are taken from the same stages, in the blocks of the first output columns alone.
//
// Sums go by column within a range, then over ranges, then over chunks: an order that depends on the chunks' widths, D
// and the GPU's number of SMs alone, so a row's bits depend neither on the other rows nor on how many there are.
#include "../norm_concat_linear.h"

#include "launch.cuh"
#include "pack.cuh"
#include "source_row.cuh"
#include "weight_gain.cuh"

namespace eagle_kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kCopyThreads = kThreads / 2;  // of the weight, and of x
constexpr int kColumns = 128;               // of the output
constexpr int kStageColumns = 64;           // of the concat
constexpr int kStepColumns = 32;            // what the 16-byte loads of a warp cover
constexpr int kRowBytes = 2 * kStageColumns;
constexpr int kParts = kRowBytes / 16;  // of a row in a stage
constexpr int kMaxRanges = 16;          // of a chunk

// Blocks of up to 64 rows take 83 to 100 KB of shared memory: two on an SM, where it has more than 100 KB.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kSharedBlocks = 1;
#else
constexpr int kSharedBlocks = 2;
#endif

struct Arguments {
  NormConcatLinear op;
  Chunk chunks[kMaxChunks];
  SplitRanges ranges;
  float* partial;          // [ranges.count, num_rows, partial_stride]
  int64_t partial_stride;  // columns of whole blocks
  float* squares;          // [ranges.count, num_rows]
};

template <int kRows, bool kResidual>
struct Tile {
  static constexpr int kRowWarps = kRows == 128 ? 2 : 1;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kColumnTiles = kColumns / 16 / kColumnWarps;  // of a warp, 16 columns each
  static constexpr int kRowTiles = kRows / 8 / kRowWarps;            // 8 rows each
  static constexpr int kSourceRows = kResidual ? 2 * kRows : kRows;  // in a stage
  static constexpr int kStages = kRows == 128 ? 6 : kResidual && kRows == 64 ? 3 : 4;
  static constexpr int kBlocks = kRows == 128 ? 1 : kSharedBlocks;
  static constexpr int kGainBytes = 4 * kStageColumns;
  static constexpr int kStageBytes = (kColumns + kSourceRows) * kRowBytes + kGainBytes;
  static constexpr int64_t kSharedBytes = kStages * kStageBytes + kSourceRows * sizeof(void*);
};

// Where a 16-byte part of a row is in its stage.
__device__ __forceinline__ int place(int row, int part) { return row * kRowBytes + (part ^ (row % 2 * 4)) * 16; }

__device__ __forceinline__ Words at(const char* stage, int row, int part) {
  return *reinterpret_cast<const Words*>(stage + place(row, part));
}

template <class T, int kRows, bool kResidual>
__global__ void __launch_bounds__(kThreads, Tile<kRows, kResidual>::kBlocks)
    norm_concat_linear_partial_kernel(const __grid_constant__ Arguments arguments) {
  using K = Tile<kRows, kResidual>;
  const NormConcatLinear& op = arguments.op;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, q = lane % 4;
  const int column_warp = warp % K::kColumnWarps, row_warp = warp / K::kColumnWarps;
  // The rounds of rows of one block of columns are neighbours: the second finds the weight in L2.
  const int rounds = static_cast<int>((op.num_rows + kRows - 1) / kRows);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x % rounds) * kRows;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x / rounds) * kColumns;

  int k = 0, range = blockIdx.y;
  for (; range >= arguments.ranges.of_chunk[k]; ++k) range -= arguments.ranges.of_chunk[k];
  const Chunk& chunk = arguments.chunks[k];
  const int width = static_cast<int>(chunk.width);
  const int blocks = (width + kStageColumns - 1) / kStageColumns;
  const int ranges = arguments.ranges.of_chunk[k];
  const int begin = blocks * range / ranges, end = blocks * (range + 1) / ranges;

  char* ring = shared_memory();
  const T** sources = reinterpret_cast<const T**>(ring + K::kStages * K::kStageBytes);  // [kSourceRows], null: zeros
  const bool copies_weight = threadIdx.x < kCopyThreads;
  const int copy_row = threadIdx.x % kCopyThreads / kParts, copy_part = threadIdx.x % kParts;
  constexpr int kCopyRows = kCopyThreads / kParts;
  const ReadOnce read_once;
  const T* weight = static_cast<const T*>(op.weight) + (first_output + copy_row) * op.weight_row_stride + chunk.column +
                    copy_part * kPack;
  const int outputs = static_cast<int>(op.num_columns - first_output);
  const bool gain_is_float32 = chunk.gain.dtype == DType::kFloat32;
  const char* gain = static_cast<const char*>(chunk.gain.data);

  // What this thread copies of a block of 64 columns; beyond the range an empty group, so that groups count stages.
  const auto copy_block = [&](int block, int slot) {
    char* stage = ring + slot * K::kStageBytes;
    const int column = block * kStageColumns;
    if (block < end && copies_weight) {
      const bool inside = column + copy_part * kPack < width;
#pragma unroll
      for (int i = 0; i < kColumns / kCopyRows; ++i) {
        const int row = copy_row + i * kCopyRows;
        read_once.copy_async(stage + place(row, copy_part), weight + i * kCopyRows * op.weight_row_stride + column,
                             inside && row < outputs);
      }
    } else if (block < end) {
      const bool inside = column + copy_part * kPack < width;
      stage += kColumns * kRowBytes;
#pragma unroll
      for (int i = 0; i < K::kSourceRows / kCopyRows; ++i) {
        const int row = copy_row + i * kCopyRows;
        const T* source = sources[row];
        copy_async(stage + place(row, copy_part), source + column + copy_part * kPack, inside && source != nullptr);
      }
      const int gains = gain_is_float32 ? 4 : 8;  // of 16 bytes
      const int part = static_cast<int>(threadIdx.x) - kCopyThreads;
      if (part * gains < kStageColumns) {
        const int first = column + part * gains;
        copy_async(stage + K::kSourceRows * kRowBytes + part * 16, gain + first * (16 / gains),
                   gain != nullptr && first < width);
      }
    }
    commit_copies();
  };
  const auto x_of = [](const char* x_stage, int row, int part) {
    const Pack<T> x{{at(x_stage, row, part)}};
    if constexpr (!kResidual) return x;
    return add(x, Pack<T>{{at(x_stage, kRows + row, part)}});
  };
  const auto fill_ring = [&] {
    for (int i = 0; i < K::kStages - 1; ++i) copy_block(begin + i, i);
  };

  if (copies_weight && op.early_weight) fill_ring();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < kRows) {
    const int64_t out_row = first_row + threadIdx.x;
    const int64_t row = out_row < op.num_rows ? source_row(chunk, out_row) : -1;
    sources[threadIdx.x] = row < 0 ? nullptr : static_cast<const T*>(chunk.x) + row * chunk.x_row_stride;
    if constexpr (kResidual) {
      const bool present = row >= 0 && chunk.residual != nullptr;
      sources[kRows + threadIdx.x] =
          present ? static_cast<const T*>(chunk.residual) + row * chunk.residual_row_stride : nullptr;
    }
  }
  __syncthreads();
  if (!copies_weight || !op.early_weight) fill_ring();

  float sum[K::kColumnTiles][K::kRowTiles][4] = {};
  float squares[2] = {};
  // Without a gain the weight is multiplied by 1 all the same: mma.sync wants four registers in a row, and a value
  // that is the loaded one or a product is moved there for every product again (0.128 moves a byte of the weight at 64
  // rows).
  const float offset = gain != nullptr ? op.source.norm_offset : 1.0f;
  const float scale = gain != nullptr ? kGainScale<T> : 1.0f;
  const bool own_squares = op.source.norm != Norm::kNone && chunk.sum_squares == nullptr && first_output == 0 &&
                           column_warp < K::kRowTiles / 2;
  for (int block = begin, slot = 0; block < end; ++block, slot = slot + 1 == K::kStages ? 0 : slot + 1) {
    wait_for_copies<K::kStages - 2>();
    __syncthreads();
    copy_block(block + K::kStages - 1, slot == 0 ? K::kStages - 1 : slot - 1);
    const char* stage = ring + slot * K::kStageBytes;
    const char* x_stage = stage + kColumns * kRowBytes;
    const char* gains = x_stage + K::kSourceRows * kRowBytes;
    // Two steps in one another spill for 64 rows on sm_100.
#pragma unroll(kRows == 64 ? 1 : 2)
    for (int step = 0; step < kStageColumns / kStepColumns; ++step) {
      const int part = step * 4 + q;
      float factor[8];
      const Words* words = reinterpret_cast<const Words*>(gains) + (gain_is_float32 ? 2 * part : part);
      gain_factors<T>(words[0], words[gain_is_float32], gain_is_float32, offset, scale, factor);
      // Rows g and g + 8 of each tile, as the two products of 16 columns take them.
      uint32_t w[K::kColumnTiles][2][4];
#pragma unroll
      for (int m = 0; m < 2 * K::kColumnTiles; ++m) {
        const Words row = scaled<T>(at(stage, (column_warp * 2 * K::kColumnTiles + m) * 8 + g, part), factor);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[m / 2][i / 2][i % 2 * 2 + m % 2] = word(row, i);
      }
#pragma unroll
      for (int n = 0; n < K::kRowTiles; ++n) {
        const Words x = x_of(x_stage, (row_warp * K::kRowTiles + n) * 8 + g, part).words[0];
#pragma unroll
        for (int m = 0; m < K::kColumnTiles; ++m) {
          const auto &low = w[m][0], &high = w[m][1];
          mma(sum[m][n], low[0], low[1], low[2], low[3], x.x, x.y, T{});
          mma(sum[m][n], high[0], high[1], high[2], high[3], x.z, x.w, T{});
        }
      }
    }
    if (!own_squares) continue;
    // A warp takes two tiles of rows, and reads them again: only the blocks of the first outputs do.
#pragma unroll 1
    for (int part = q; part < kParts; part += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = (row_warp * K::kRowTiles + 2 * column_warp + i) * 8 + g;
        squares[i] += sum_of_squares(widen(x_of(x_stage, row, part)));
      }
    }
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
constexpr int kFinalizeColumns = 4;  // of a thread at a time: 16 bytes of each range

struct alignas(8) Outputs {
  uint32_t first, second;
};

// A block has a row, or without a post norm a part of its columns.
template <class T>
__global__ void __launch_bounds__(kMaxFinalizeThreads)
    norm_concat_linear_finalize_kernel(const __grid_constant__ Arguments arguments) {
  const NormConcatLinear& op = arguments.op;
  const Concat& source = op.source;
  const int num_chunks = static_cast<int>(source.num_chunks);
  const int64_t row = blockIdx.x;
  const bool has_norm = source.norm != Norm::kNone, chunk_norm = source.norm == Norm::kChunk;
  float* scale = reinterpret_cast<float*>(shared_memory()) + blockDim.x / 32;  // [K], behind sum_over_block's
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
    const float unscale = own.gain.data != nullptr ? 1 / kGainScale<T> : 1.0f;
    scale[k] = !has_norm    ? 1.0f
               : chunk_norm ? unscale * rstd_of(total, own.width, own.eps)
                            : unscale * rstd_of(total, source.width, arguments.chunks[0].eps);
    // An infinite gain has made the product NaN.
    left_out[k] = has_norm && source_row(own, row) < 0;
  }
  __syncthreads();

  T* out = static_cast<T*>(op.out) + row * op.out_row_stride;
  const int64_t columns = op.num_columns;
  const auto project = [&](int64_t column, float (&total)[kFinalizeColumns]) {
#pragma unroll
    for (int i = 0; i < kFinalizeColumns; ++i) total[i] = 0;
    const float* partial = arguments.partial + row * arguments.partial_stride + column;
    const int64_t range_stride = op.num_rows * arguments.partial_stride;
    for (int k = 0; k < num_chunks; partial += range_stride * arguments.ranges.of_chunk[k++]) {
      if (left_out[k]) continue;
      float of_chunk[kFinalizeColumns] = {};
#pragma unroll 4
      for (int range = 0; range < arguments.ranges.of_chunk[k]; ++range) {
        const Words words = load(reinterpret_cast<const Words*>(partial + range * range_stride));
#pragma unroll
        for (int i = 0; i < kFinalizeColumns; ++i) of_chunk[i] += bits_to_float(word(words, i));
      }
#pragma unroll
      for (int i = 0; i < kFinalizeColumns; ++i) total[i] += of_chunk[i] * scale[k];
    }
#pragma unroll
    for (int i = 0; i < kFinalizeColumns; ++i) {
      if (op.bias.data != nullptr && column + i < columns) total[i] += value_at<T>(op.bias, column + i);
    }
  };
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kFinalizeColumns;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.x * kFinalizeColumns;
  const bool has_post_norm = op.post_norm_gain.data != nullptr;
  float total[kFinalizeColumns], post_rstd = 1;
  if (has_post_norm) {
    float squares = 0;
    for (int64_t column = first; column < columns; column += step) {
      project(column, total);
#pragma unroll
      for (int i = 0; i < kFinalizeColumns; ++i) squares += column + i < columns ? total[i] * total[i] : 0.0f;
    }
    post_rstd = rstd_of(sum_over_block(squares), columns, op.post_norm_eps);
  }
  const bool in_words =
      (reinterpret_cast<uintptr_t>(op.out) | static_cast<uintptr_t>((op.out_row_stride | columns) * 2)) % 8 == 0;
  for (int64_t column = first; column < columns; column += step) {
    project(column, total);
    if (has_post_norm) {
#pragma unroll
      for (int i = 0; i < kFinalizeColumns; ++i) {
        if (column + i >= columns) continue;
        total[i] *= post_rstd;
        total[i] *= source.norm_offset + value_at<T>(op.post_norm_gain, column + i);
      }
    }
    const Outputs words{narrow(Pair{total[0], total[1]}, T{}), narrow(Pair{total[2], total[3]}, T{})};
    if (in_words) {
      store(reinterpret_cast<Outputs*>(out + column), words);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kFinalizeColumns; ++i) {
      if (column + i < columns) store_bits(out + column + i, (i < 2 ? words.first : words.second) >> (i % 2 * 16));
    }
  }
}

int64_t blocks_of_outputs(const NormConcatLinear& op) { return (op.num_columns + kColumns - 1) / kColumns; }

template <class T, int kRows, bool kResidual>
int launch_partial(const Arguments& arguments, const Device& device) {
  const int64_t rounds = (arguments.op.num_rows + kRows - 1) / kRows;
  const Shape shape{rounds * blocks_of_outputs(arguments.op), arguments.ranges.count, kThreads,
                    Tile<kRows, kResidual>::kSharedBytes};
  return launch<norm_concat_linear_partial_kernel<T, kRows, kResidual>>(shape, arguments, device);
}

template <class T>
int launch_rows(const Arguments& arguments, const Device& device) {
  const int64_t rows = arguments.op.num_rows;
  bool residual = false;
  for (int64_t k = 0; k < arguments.op.source.num_chunks; ++k) residual |= arguments.chunks[k].residual != nullptr;
  if (residual) {
    return rows > 32 ? launch_partial<T, 64, true>(arguments, device) : launch_partial<T, 32, true>(arguments, device);
  }
  if (rows > 64 && Tile<128, false>::kSharedBytes <= device.shared_memory) {
    return launch_partial<T, 128, false>(arguments, device);
  }
  return rows > 32 ? launch_partial<T, 64, false>(arguments, device) : launch_partial<T, 32, false>(arguments, device);
}

template <class T>
int launch_both(const Arguments& arguments, const Device& device) {
  if (const int error = launch_rows<T>(arguments, device); error != 0) return error;
  const NormConcatLinear& op = arguments.op;
  const int64_t packs = (op.num_columns + kFinalizeColumns - 1) / kFinalizeColumns;
  const bool whole_row = op.post_norm_gain.data != nullptr;
  const int64_t threads = std::clamp<int64_t>((packs + 31) / 32 * 32, 32, whole_row ? kMaxFinalizeThreads : 128);
  const Shape shape{op.num_rows, whole_row ? 1 : (packs + threads - 1) / threads, threads,
                    sum_bytes(threads) + op.source.num_chunks * 5};
  return launch<norm_concat_linear_finalize_kernel<T>>(shape, arguments, device);
}

}  // namespace
}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

// The ranges of the least work for the SM that has most of it, in stages: those of its blocks, and 3 more a block,
// which is about what the sums of 64 rows cost on their way through L2 (16 KB of the weight against 64 KB).
SplitRanges norm_concat_linear_split_ranges(const NormConcatLinear& op, const Device& device) {
  const Concat& source = op.source;
  const int outputs = static_cast<int>(blocks_of_outputs(op));
  int64_t widest = 0;
  for (int64_t k = 0; k < source.num_chunks; ++k) widest = std::max(widest, source.chunks[k].width);
  const auto stages_of = [](int64_t width) { return static_cast<int>((width + kStageColumns - 1) / kStageColumns); };
  SplitRanges best{};
  int least = 0;
  for (int parts = 1; parts <= kMaxRanges; ++parts) {
    const int length = std::max(2, (stages_of(widest) + parts - 1) / parts);
    SplitRanges ranges{};
    for (int64_t k = 0; k < source.num_chunks; ++k) {
      ranges.count += ranges.of_chunk[k] = (stages_of(source.chunks[k].width) + length - 1) / length;
    }
    const int blocks = (ranges.count * outputs + device.multiprocessors - 1) / device.multiprocessors;
    const int work = blocks * (length + 3);
    if (parts == 1 || work < least) {
      best = ranges;
      least = work;
    }
  }
  best.workspace = best.count * op.num_rows * (outputs * kColumns + 1);
  return best;
}

int norm_concat_linear_split_cuda(const NormConcatLinear& op, const SplitRanges& ranges, const Device& device) {
  const int64_t stride = blocks_of_outputs(op) * kColumns;
  float* partial = static_cast<float*>(op.workspace);
  Arguments arguments{op, {}, ranges, partial, stride, partial + ranges.count * op.num_rows * stride};
  std::copy_n(op.source.chunks, op.source.num_chunks, arguments.chunks);
  return op.source.dtype == DType::kBFloat16 ? launch_both<BFloat16>(arguments, device)
                                             : launch_both<Float16>(arguments, device);
}

}  // namespace eagle_kernels
