// Gather, residual add, RMSNorm and concat of K sources in one launch; engines run K norms and a cat.
//
// Each row and chunk has a row of threads, which keeps the chunk in registers between the statistic and the store. Only
// a concat norm without given statistics needs all chunks of a row in one row of threads; these read them twice, the
// second time from L1.
#include "../norm_concat.h"

#include "launch.cuh"
#include "pack.cuh"
#include "source_row.cuh"

namespace eagle_kernels::cuda {
namespace {

// NormConcat and its chunks by value, as a kernel parameter.
struct Arguments {
  NormConcat op;
  Chunk chunks[kMaxChunks];
};

// round(x + residual) of columns [column, column + 8); zeros for a row out of range.
template <bool kAligned, class T>
__device__ __forceinline__ Pack<T> load_value(const Chunk& chunk, int64_t row, int64_t column) {
  if (row < 0) return {};
  const T* x = static_cast<const T*>(chunk.x) + row * chunk.x_row_stride;
  const Pack<T> value = load_pack<kAligned>(x, column, chunk.width);
  if (chunk.residual == nullptr) return value;
  const T* residual = static_cast<const T*>(chunk.residual) + row * chunk.residual_row_stride;
  return add(value, load_pack<kAligned>(residual, column, chunk.width));
}

__device__ __forceinline__ float given_squares(const Chunk& chunk, int64_t row) {
  return row < 0 ? 0.0f : load(chunk.sum_squares + row * chunk.sum_squares_row_stride);
}

// A thread stands for kShare of those that shape_of_rows has, blockDim.x apart, with the packs and the sum of each: no
// bit depends on it.
template <class T, bool kAligned, int kShare = 1>
__global__ void __launch_bounds__(512 / kShare) norm_concat_kernel(const __grid_constant__ Arguments arguments) {
  constexpr int kPacks = kShare * kInFlight;
  const NormConcat& op = arguments.op;
  const Concat& source = op.source;
  const int64_t i = row_of_thread<kAligned>();
  const int num_chunks = static_cast<int>(source.num_chunks);
  const bool whole_row = gridDim.y == 1;
  const int begin = whole_row ? 0 : blockIdx.y, end = whole_row ? num_chunks : blockIdx.y + 1;
  const int64_t step = kPacks * pack_stride();
  T* out = static_cast<T*>(op.out) + i * op.out_row_stride;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (i >= op.num_rows) return;  // barriers wait only for threads that have not exited

  Pack<T> value[kPacks];
  const auto load_step = [&](const Chunk& chunk, int64_t row, int64_t first) {
#pragma unroll
    for (int j = 0; j < kPacks; ++j) value[j] = load_value<kAligned, T>(chunk, row, first + j * pack_stride());
  };
  const bool concat = source.norm == Norm::kConcat;
  const bool given = arguments.chunks[0].sum_squares != nullptr;
  float squares = 0;
  if (source.norm != Norm::kNone && given) {
    for (int k = concat ? 0 : begin; k < (concat ? num_chunks : end); ++k) {
      squares += given_squares(arguments.chunks[k], source_row(arguments.chunks[k], i));
    }
  } else if (source.norm != Norm::kNone) {
    float of_share[kShare] = {};
    for (int k = begin; k < end; ++k) {
      const Chunk& chunk = arguments.chunks[k];
      const int64_t row = source_row(chunk, i);
      for (int64_t first = first_column(); first < chunk.width; first += step) {
        load_step(chunk, row, first);
#pragma unroll
        for (int j = 0; j < kPacks; ++j) of_share[j % kShare] += sum_of_squares(widen(value[j]));
      }
    }
    squares = sum_over_row(of_share);
  }

  // A single chunk of one step, up to 8192 values, is still in registers.
  const bool in_registers =
      source.norm != Norm::kNone && !given && end - begin == 1 && arguments.chunks[begin].width <= step;
  for (int k = begin; k < end; ++k) {
    const Chunk& chunk = arguments.chunks[k];
    const int64_t row = source_row(chunk, i);
    const float rstd = source.norm == Norm::kNone ? 1.0f
                       : concat               ? rstd_of(squares, source.width, arguments.chunks[0].eps)
                                              : rstd_of(squares, chunk.width, chunk.eps);
    for (int64_t first = first_column(); first < chunk.width; first += step) {
      if (!in_registers) load_step(chunk, row, first);
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        const int64_t column = first + j * pack_stride();
        // Without a norm the bits are copied; a row out of range stays zero whatever gain and eps are.
        if (source.norm != Norm::kNone && row >= 0) {
          const Values x = widen(value[j]);
          value[j] = narrow(norm<kAligned, T>(x, rstd, chunk.gain, source.norm_offset, column, chunk.width), T{});
        }
        store_pack<kAligned>(out + chunk.column, column, chunk.width, value[j]);
      }
    }
  }
}

}  // namespace
}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

int norm_concat_cuda(const NormConcat& record, const Device& device) {
  const int64_t rows = record.num_rows;
  Arguments arguments{record, {}};
  Alignment alignment(size_of(record.source.dtype));
  alignment.add(record.out, record.out_row_stride, rows);
  int64_t widest = 0;
  for (int64_t k = 0; k < record.source.num_chunks; ++k) {
    const Chunk& chunk = arguments.chunks[k] = record.source.chunks[k];
    alignment.add(chunk.x, chunk.x_row_stride, chunk.rows);
    alignment.add(chunk.residual, chunk.residual_row_stride, chunk.rows);
    alignment.add(chunk.gain.data);
    alignment.add_width(chunk.width);
    widest = std::max(widest, chunk.width);
  }
  const bool whole_row = record.source.norm == Norm::kConcat && record.source.chunks[0].sum_squares == nullptr;
  Shape shape = shape_of_rows(rows, widest, alignment.holds(), device);
  if (!whole_row) shape.y = record.source.num_chunks;
  // Half as many threads, each with twice the packs in flight, where every SM has many blocks. For T = 256, 1024, 4096
  // and 16384 of 3 x 4096 an H200 takes 6.1, 19.5, 69 and 260 us, so 7.3, 19.2, 65 and 234; of 3 x 2880 5.9, 14.9, 52
  // and 194, so 6.4, 15.1, 49 and 177 (bench/results/nvidia-h200/decode-curve-alternatives.json). Narrower rows share
  // blocks; a concat norm over all chunks nobody has timed.
  const bool has_many_blocks = shape.rows == 1 && shape.x * shape.y >= 32 * device.multiprocessors;
  const bool halves = alignment.holds() && !whole_row && has_many_blocks && shape.threads % 64 == 0;
  return with_dtype(record.source.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (halves) {
        shape.threads /= 2;
        return launch<norm_concat_kernel<T, true, 2>>(shape, arguments, device);
      }
    }
    return alignment.holds() ? launch<norm_concat_kernel<T, true>>(shape, arguments, device)
                             : launch<norm_concat_kernel<T, false>>(shape, arguments, device);
  });
}

}  // namespace eagle_kernels
