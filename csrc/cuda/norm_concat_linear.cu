// out = norm_concat(...) @ weight^T + bias for up to 8 rows at a time, in one launch: at so few rows the time is that
// of reading the weight once, and everything else hides behind it.
//
// A block computes 16 * kTiles columns of the output. Its 8 warps share the concat out in blocks of 64 columns, round
// robin, and stream the weight's rows straight into registers, which are the left operand of mma.sync; the rows of x,
// padded to 8, are the right one. Neither passes through shared memory, and no warp waits for another before the end of
// its share. A lane's 16-byte load covers 8 neighbouring columns, where the fragments of two products want columns 2q,
// 2q+1, 2q+8, 2q+9: the sum over columns is indifferent to which is which as long as both operands agree, so the loads
// go in as they come.
//
// The raw value enters the product and 1/rms multiplies the fp32 sum, so x is read once, for product and statistic
// alike; the gain is multiplied into the weight (weight_gain.cuh).
// Rows of values below 2^-100, which no model has, lose precision: their products are subnormal in fp32.
//
// Sums go by column within a warp, then over warps, then over chunks: an order that depends on the norm and the chunks'
// widths and indices alone, so a row's bits depend neither on what other rows hold nor on how many are asked for nor on
// the template instance.
#include "../norm_concat_linear.h"

#include <type_traits>

#include "launch.cuh"
#include "pack.cuh"
#include "source_row.cuh"
#include "weight_gain.cuh"

namespace eagle_kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockColumns = 64;  // 128 bytes of a row: two loads of a warp, in steps of 32 columns
constexpr int kStepColumns = 32;

// What the main loop has to do, each with registers for as many loads in flight as fit without spills.
enum class Flavour {
  kNoGain,  // a weight with its gains folded in, or no norm
  kGain,    // gains of the weight's type
  kAny,     // residuals, fp32 gains
};

struct Arguments {
  NormConcatLinear op;
  Chunk chunks[kMaxChunks];
  // Products are summed by chunk first: for an rstd of each, or to leave out one whose index is out of range, where an
  // infinite gain has made the product NaN. Chunks that share an index and have the same rows are left out together.
  bool sum_per_chunk;
};

static_assert(kMaxDecodeRows == 8);  // the n of mma.m16n8k16: lane group g holds row g of x

template <int kTiles, Flavour kFlavour>
struct Kernel {
  static constexpr int kRows = kMaxDecodeRows;  // of x
  static constexpr int kColumns = 16 * kTiles;  // of the output
  static constexpr int kPartial = kRows * kColumns;
  // Blocks of 64 columns in flight, each with 2 KB of the weight for a warp and tile. More would spill.
  static constexpr int kDepth =
      kFlavour == Flavour::kNoGain || (kFlavour == Flavour::kGain && kTiles == 1) ? 2 : 1;
  static constexpr int kUnroll = 2 * kDepth;

  // Shared memory: the row that each token reads in each chunk, partial sums of squares and products, rstd.
  static constexpr int64_t shared_bytes(int64_t num_chunks, bool sum_per_chunk) {
    const int64_t slots = sum_per_chunk ? num_chunks : 1;
    return num_chunks * kRows * (8 + 4 * kWarps + 4) + slots * kWarps * kPartial * 4;
  }
};

template <class T>
__device__ __forceinline__ float sum_of_squares(const Words& w) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pair x = widen(word(w, i), T{});
    sum += x.first * x.first + x.second * x.second;
  }
  return sum;
}

// 8 gains of the columns that a lane's loads cover.
template <class T, Flavour kFlavour>
struct Gains {
  Words words[kFlavour == Flavour::kAny ? 2 : 1];

  __device__ __forceinline__ void load_from(const Vector& gain, int64_t column, bool inside) {
    if (kFlavour == Flavour::kAny && gain.dtype == DType::kFloat32) {
      const Words* p = reinterpret_cast<const Words*>(static_cast<const float*>(gain.data) + column);
      words[0] = inside ? load(p) : Words{};
      words[kFlavour == Flavour::kAny] = inside ? load(p + 1) : Words{};
    } else {
      const Words* p = reinterpret_cast<const Words*>(static_cast<const T*>(gain.data) + column);
      words[0] = inside ? load(p) : Words{};
    }
  }

  __device__ __forceinline__ void factors(const Vector& gain, float offset, float (&factor)[8]) const {
    constexpr bool kAny = kFlavour == Flavour::kAny;
    gain_factors<T>(words[0], words[kAny], kAny && gain.dtype == DType::kFloat32, offset, kGainScale<T>, factor);
  }
};

// Where the loads of a warp's step are, counted from the first: steps 2j and 2j+1 are the halves of its j-th block.
__device__ __forceinline__ constexpr int step_offset(int step) {
  return step / 2 * kWarps * kBlockColumns + step % 2 * kStepColumns;
}

template <class T, int kTiles, Flavour kFlavour>
__global__ void __launch_bounds__(kThreads, 2) norm_concat_linear_kernel(const __grid_constant__ Arguments arguments) {
  using K = Kernel<kTiles, kFlavour>;
  const NormConcatLinear& op = arguments.op;
  const Concat& source = op.source;
  const int num_chunks = static_cast<int>(source.num_chunks);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, q = lane % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * K::kRows;
  const int64_t first_output = static_cast<int64_t>(blockIdx.y) * K::kColumns;
  const bool chunk_norm = source.norm == Norm::kChunk, sum_per_chunk = arguments.sum_per_chunk;
  const bool own_squares = source.norm != Norm::kNone && arguments.chunks[0].sum_squares == nullptr;

  int64_t* rows = reinterpret_cast<int64_t*>(shared_memory());               // [K, kRows], -1 for a zero row
  float* squares_of = reinterpret_cast<float*>(rows + num_chunks * K::kRows);  // [K, kWarps, kRows]
  float* rstd = squares_of + num_chunks * kWarps * K::kRows;                 // [K, kRows]
  float* partial = rstd + num_chunks * K::kRows;                             // [K or 1, kWarps, kRows, kColumns]

  // Rows g and g + 8 of each tile. Outputs beyond D compute the last one again.
  const ReadOnce read_once;
  const T* weight_rows[2 * kTiles];
#pragma unroll
  for (int m = 0; m < 2 * kTiles; ++m) {
    const int64_t output = first_output + m * 8 + g;
    const int64_t row = output < op.num_columns ? output : op.num_columns - 1;
    weight_rows[m] = static_cast<const T*>(op.weight) + row * op.weight_row_stride + q * kPack;
  }
  // The weight is no one's output while a model runs, but nothing forbids it: into L2 only.
#pragma unroll
  for (int u = 0; u < K::kUnroll; ++u) {
    const int column = warp * kBlockColumns + step_offset(u);
    if (column + q * kPack >= source.width) continue;
#pragma unroll
    for (int m = 0; m < 2 * kTiles; ++m) prefetch(weight_rows[m] + column);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int at = threadIdx.x; at < num_chunks * K::kRows; at += kThreads) {
    const int64_t row = first_row + at % K::kRows;
    rows[at] = row < op.num_rows ? source_row(arguments.chunks[at / K::kRows], row) : -1;
  }
  __syncthreads();

  float sum[kTiles][4] = {};
  int block = warp;
  for (int k = 0; k < num_chunks; ++k) {
    const Chunk& chunk = arguments.chunks[k];
    const int width = static_cast<int>(chunk.width);
    const int64_t row = rows[k * K::kRows + g];
    const T* x_row = row < 0 ? nullptr : static_cast<const T*>(chunk.x) + row * chunk.x_row_stride + q * kPack;
    const T* residual_row = static_cast<const T*>(chunk.residual) + row * chunk.residual_row_stride + q * kPack;
    float squares = 0;
    const bool has_gain = kFlavour == Flavour::kGain || (kFlavour == Flavour::kAny && chunk.gain.data != nullptr);
    const bool has_residual = kFlavour == Flavour::kAny && chunk.residual != nullptr;

    // Steps [0, kUnroll) from `column` on: all loads first, then the products. kWhole: no lane is beyond the width.
    const auto run_steps = [&](int column, auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      Words w[K::kUnroll][2 * kTiles], x[K::kUnroll], residual[K::kUnroll];
      Gains<T, kFlavour> gains[K::kUnroll];
#pragma unroll
      for (int u = 0; u < K::kUnroll; ++u) {
        const int at = column + step_offset(u);
        const bool inside = kWhole || at + q * kPack < width;
#pragma unroll
        for (int m = 0; m < 2 * kTiles; ++m) w[u][m] = inside ? read_once(weight_rows[m] + at) : Words{};
        x[u] = inside && x_row != nullptr ? load(reinterpret_cast<const Words*>(x_row + at)) : Words{};
        if (has_residual) {
          residual[u] = inside && x_row != nullptr ? load(reinterpret_cast<const Words*>(residual_row + at)) : Words{};
        }
        if (has_gain) gains[u].load_from(chunk.gain, at + q * kPack, inside);
      }
#pragma unroll
      for (int u = 0; u < K::kUnroll; ++u) {
        if (has_gain) {
          float factor[8];
          gains[u].factors(chunk.gain, source.norm_offset, factor);
#pragma unroll
          for (int m = 0; m < 2 * kTiles; ++m) w[u][m] = scaled<T>(w[u][m], factor);
        }
        if (has_residual) x[u] = add(Pack<T>{{x[u]}}, Pack<T>{{residual[u]}}).words[0];
        if (own_squares) squares += sum_of_squares<T>(x[u]);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const Words &upper = w[u][2 * m], &lower = w[u][2 * m + 1];
          mma(sum[m], upper.x, lower.x, upper.y, lower.y, x[u].x, x[u].y, T{});
          mma(sum[m], upper.z, lower.z, upper.w, lower.w, x[u].z, x[u].w, T{});
        }
      }
    };
    for (int column = block * kBlockColumns; column < width; column += step_offset(K::kUnroll)) {
      // Without masks 370 instructions a pass where the masked copy has 437 (bf16, kGain, 4 steps, sm_90a); with both,
      // kAny spills on sm_100 and sm_120.
      if (kFlavour != Flavour::kAny && column + step_offset(K::kUnroll - 1) + kStepColumns <= width) {
        run_steps(column, std::true_type{});
      } else {
        run_steps(column, std::false_type{});
      }
    }
#pragma unroll
    for (int m = 0; m < 2 * kTiles; ++m) weight_rows[m] += width;

    // This warp's next block: counted through the concat, so that no warp is first in every chunk.
    const int blocks = (width + kBlockColumns - 1) / kBlockColumns;
    const int taken = block < blocks ? (blocks - block + kWarps - 1) / kWarps : 0;
    block += taken * kWarps - blocks;

    if (own_squares) {
      squares += __shfl_xor_sync(~0u, squares, 1);
      squares += __shfl_xor_sync(~0u, squares, 2);
      if (q == 0) squares_of[(k * kWarps + warp) * K::kRows + g] = squares;
    }
    if (!sum_per_chunk && k + 1 < num_chunks) continue;
    float* mine = partial + ((sum_per_chunk ? k : 0) * kWarps + warp) * K::kPartial;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mine[(2 * q + i % 2) * K::kColumns + m * 16 + i / 2 * 8 + g] = sum[m][i];
        sum[m][i] = 0;
      }
    }
  }
  __syncthreads();

  // rstd of each token in each chunk, without a norm 1; a concat's stands in chunk 0.
  const int statistics = chunk_norm ? num_chunks : 1;
  for (int at = threadIdx.x; at < statistics * K::kRows; at += kThreads) {
    const int k = at / K::kRows, token = at % K::kRows;
    float total = 0;
    for (int chunk = k; chunk < (chunk_norm ? k + 1 : num_chunks) && source.norm != Norm::kNone; ++chunk) {
      if (own_squares) {
        float of_chunk = 0;
        for (int w = 0; w < kWarps; ++w) of_chunk += squares_of[(chunk * kWarps + w) * K::kRows + token];
        total += of_chunk;
      } else {
        const Chunk& given = arguments.chunks[chunk];
        const int64_t row = rows[chunk * K::kRows + token];
        if (row >= 0) total += load(given.sum_squares + row * given.sum_squares_row_stride);
      }
    }
    const float scale = arguments.chunks[k].gain.data != nullptr ? 1 / kGainScale<T> : 1.0f;
    rstd[at] = source.norm == Norm::kNone
                   ? 1.0f
                   : scale * rstd_of(total, chunk_norm ? arguments.chunks[k].width : source.width,
                                     arguments.chunks[k].eps);
  }
  __syncthreads();

  for (int at = threadIdx.x; at < K::kPartial; at += kThreads) {
    const int token = at / K::kColumns;
    const int64_t row = first_row + token, output = first_output + at % K::kColumns;
    if (row >= op.num_rows || output >= op.num_columns) continue;
    float total = 0;
    for (int k = 0; k < (sum_per_chunk ? num_chunks : 1); ++k) {
      if (source.norm != Norm::kNone && rows[k * K::kRows + token] < 0) continue;
      float of_chunk = 0;
      for (int w = 0; w < kWarps; ++w) of_chunk += partial[(k * kWarps + w) * K::kPartial + at];
      total += of_chunk * rstd[(chunk_norm ? k : 0) * K::kRows + token];
    }
    if (op.bias.data != nullptr) total += value_at<T>(op.bias, output);
    store_bits(static_cast<T*>(op.out) + row * op.out_row_stride + output, narrow(Pair{total, 0.0f}, T{}));
  }
}

template <class T, int kTiles, Flavour kFlavour>
int launch_as(const Arguments& arguments, const Device& device) {
  using K = Kernel<kTiles, kFlavour>;
  const NormConcatLinear& op = arguments.op;
  const Shape shape{(op.num_rows + K::kRows - 1) / K::kRows, (op.num_columns + K::kColumns - 1) / K::kColumns, kThreads,
                    K::shared_bytes(op.source.num_chunks, arguments.sum_per_chunk)};
  return launch<norm_concat_linear_kernel<T, kTiles, kFlavour>>(shape, arguments, device);
}

// 32 columns a block halve what is read of x; 16 make enough blocks for every SM of a narrow output. Two blocks a SM on
// an H100 are 264. A heuristic that no GPU has measured.
template <class T, Flavour kFlavour>
int launch_flavour(const Arguments& arguments, const Device& device) {
  if (arguments.op.num_columns > 16 * 264) return launch_as<T, 2, kFlavour>(arguments, device);
  return launch_as<T, 1, kFlavour>(arguments, device);
}

}  // namespace
}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

bool norm_concat_linear_is_aligned(const NormConcatLinear& record) {
  const bool is_codes = record.weight_type != WeightType::kChunks;
  Alignment alignment(2), weight(is_codes ? 1 : 2);
  weight.add(record.weight, record.weight_row_stride, record.num_columns);
  for (int64_t k = 0; k < record.source.num_chunks; ++k) {
    const Chunk& chunk = record.source.chunks[k];
    alignment.add(chunk.x, chunk.x_row_stride, chunk.rows);
    alignment.add(chunk.residual, chunk.residual_row_stride, chunk.rows);
    alignment.add(chunk.gain.data);
    alignment.add_width(chunk.width);
    if (is_codes) weight.add(static_cast<const char*>(record.weight) + chunk.column + chunk.width);
  }
  return alignment.holds() && weight.holds();
}

int norm_concat_linear_cuda(const NormConcatLinear& record, const Device& device) {
  Arguments arguments{record, {}, record.source.norm == Norm::kChunk};
  bool any_gain = false, plain = true;
  for (int64_t k = 0; k < record.source.num_chunks; ++k) {
    const Chunk& chunk = arguments.chunks[k] = record.source.chunks[k];
    any_gain |= chunk.gain.data != nullptr;
    const Chunk& first = arguments.chunks[0];
    arguments.sum_per_chunk |= record.source.norm == Norm::kConcat &&
                               (chunk.index.data != first.index.data || chunk.rows != first.rows);
    plain &= chunk.residual == nullptr && (chunk.gain.data == nullptr || chunk.gain.dtype == record.source.dtype);
  }
  const auto launch_type = [&](auto type) {
    using T = decltype(type);
    if (!plain) return launch_flavour<T, Flavour::kAny>(arguments, device);
    if (any_gain) return launch_flavour<T, Flavour::kGain>(arguments, device);
    return launch_flavour<T, Flavour::kNoGain>(arguments, device);
  };
  return record.source.dtype == DType::kBFloat16 ? launch_type(BFloat16{}) : launch_type(Float16{});
}

}  // namespace eagle_kernels
