// The second launch of the split kernels of norm_concat_linear, and the end of products of the library whose fp32 sums
// need a bias in fp32 or a post norm: these have one range.
//
// It adds up the sums of the ranges in their order, scales those of each chunk by its 1/rms, and writes the output.
#include <algorithm>

#include "../norm_concat_linear.h"
#include "launch.cuh"
#include "pack.cuh"
#include "ranges.cuh"
#include "source_row.cuh"
#include "weight_gain.cuh"

namespace eagle_kernels::cuda {
namespace {

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

}  // namespace

int finalize(const Arguments& arguments, const Device& device) {
  return with_dtype(arguments.op.source.dtype,
                    [&](auto type) { return launch_finalize<decltype(type)>(arguments, device); });
}

}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

int norm_concat_linear_epilogue_cuda(const NormConcatLinear& op, const Device& device) {
  Arguments arguments{};
  arguments.op = op;
  arguments.op.source.norm = Norm::kNone;
  arguments.op.source.num_chunks = 1;
  arguments.ranges = {{1}, 1, 0};
  arguments.partial = static_cast<float*>(op.workspace);
  arguments.partial_stride = epilogue_row_stride(op);
  return finalize(arguments, device);
}

}  // namespace eagle_kernels
