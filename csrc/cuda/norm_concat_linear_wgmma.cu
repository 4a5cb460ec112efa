// norm_concat_linear by wgmma on sm_90a, up to 64 rows in a pass over the weight: on an H100 44.5 us for 32 rows at
// K=3, H=D=4096, where the split kernels take 53.6. A warpgroup multiplies 64 columns of the output by 64 rows in one
// instruction. A block has two to four warpgroups (four read x half as often as two), or one where there are so few
// columns that most SMs would have no block. plan.py takes it from 17 rows on (codes with scales of blocks: from 33 on)
// as far as it is faster than norm_concat and the library's product: codes in up to three passes.
//
// As in norm_concat_linear.cu a block has a range of the columns of one chunk, the weight and x pass through a ring of
// stages by 16-byte copies (cp.async), and the blocks of a cluster sum their ranges (cluster_sums.cuh). A stage has 128
// bytes of each row of the weight.
//
// The weight is wgmma's operand in registers: there the gain is multiplied into it, or codes are widened. x is the one
// in shared memory, in the 128-byte swizzle, in which lanes also read the weight without bank conflicts. Before the
// product a thread processes the parts of x that it copied itself: it sums their squares, adds the residuals and, with
// codes, multiplies the gain into x.
//
// Sums run by column within a range, then over ranges and chunks. The ranges depend on the chunks' widths, D, the type
// of the weight, whether there are residuals, and the GPU's number of SMs (cut.cuh), not on the rows.
#include "../norm_concat_linear.h"
#include "cluster_sums.cuh"
#include "codes.cuh"
#include "cut.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "ranges.cuh"
#include "scales.cuh"
#include "weight_gain.cuh"

namespace eagle_kernels::cuda {
namespace {

constexpr int kRows = 64;                   // of x in a block: what one wgmma multiplies
constexpr int kRowBytes = 128, kParts = 8;  // of 16 bytes
constexpr int kHalfColumns = 64;            // of x in a row of 128 bytes
[[maybe_unused]] constexpr int kSteps = kHalfColumns / 16;  // of one wgmma each
constexpr int kGainBytes = 1024;  // gains take 512 at most; the next stage's rows must begin at a multiple of 1024

template <Form kForm, int kWarpgroups, bool kResidual>
struct Tile {
  static constexpr bool kIsCodes = kForm != Form::kDense;
  static constexpr int kThreads = 128 * kWarpgroups, kColumns = 64 * kWarpgroups;
  static constexpr int kStageColumns = unit_columns(kIsCodes), kHalves = kStageColumns / kHalfColumns;
  // A stage has the weight, then the halves of x, then those of the residuals, then the gain.
  static constexpr int kHalfBytes = kRows * kRowBytes, kXAt = kColumns * kRowBytes, kXBytes = kHalves * kHalfBytes;
  static constexpr int kGainAt = kXAt + (kResidual ? 2 : 1) * kXBytes;
  static constexpr int kStageBytes = kGainAt + kGainBytes;
  // On an SM. With blocks of scales the two sets of sums take more than 128 registers.
  static constexpr bool kTwoBlocks = kWarpgroups <= 2 && kForm != Form::kE4M3Blocks && 3 * kStageBytes <= 113 << 10;
  static constexpr int kBlocksOnAnSm = kTwoBlocks ? 2 : 1;
  static constexpr int kStages = (228 / kBlocksOnAnSm - 1) * 1024 / kStageBytes;
  static constexpr int64_t kSharedBytes = kStages * kStageBytes;
  // A thread copies the same part of every kCopyRows-th row.
  static constexpr int kCopyRows = kThreads / kParts, kPasses = (kRows + kCopyRows - 1) / kCopyRows;
  // Rows of sums are padded by four floats, so that lanes of four rows hit all banks.
  static constexpr int kSumStride = kColumns + 4;
  static_assert(kStages >= 3 && (kSumStride + 1) * kRows * sizeof(float) <= kSharedBytes);
  static_assert(kCopyRows % 8 == 0 && kColumns % kCopyRows == 0 && kPasses * kCopyRows >= kRows);
};

// How the gain is multiplied into a pair of weights. kProduct: w * gain in one instruction, for bf16 gains with
// norm_offset = 0 and for ones in place of no gain. kPlusOne: w * gain + w in one instruction, for bf16 gains with
// norm_offset = 1. kFloat32: everything else.
enum class Gain { kProduct, kPlusOne, kFloat32 };

template <class T, Form kForm, int kWarpgroups, bool kResidual>
__device__ __forceinline__ void multiply_block(const Arguments& arguments) {
  using K = Tile<kForm, kWarpgroups, kResidual>;
  using Code = std::conditional_t<kForm == Form::kInt8, Int8, Float8E4M3>;
  using Weight = std::conditional_t<K::kIsCodes, uint8_t, T>;
  constexpr bool kBlockScales = kForm == Form::kE4M3Blocks;
  constexpr int kStageColumns = K::kStageColumns;
  const NormConcatLinear& op = arguments.op;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, q = lane % 4;
  // Rounds of rows over the same output columns are neighboring blocks: the second finds the weight in L2.
  const int rounds = static_cast<int>((op.num_rows + kRows - 1) / kRows);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x % rounds) * kRows;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x / rounds) * K::kColumns;

  int k = 0, range = blockIdx.y;
  for (; range >= arguments.ranges.of_chunk[k]; ++k) range -= arguments.ranges.of_chunk[k];
  const Chunk& chunk = arguments.chunks[k];
  const int width = static_cast<int>(chunk.width), units = units_of(chunk.width, kStageColumns);
  const int begin = units * range / arguments.ranges.of_chunk[k] * kStageColumns;
  const int end = units * (range + 1) / arguments.ranges.of_chunk[k] * kStageColumns;

  uint32_t ring = shared_address(shared_memory());
  is_new(ring);
  const uint32_t ring_end = ring + K::kStages * K::kStageBytes;
  const int copy_row = threadIdx.x / kParts, copy_part = threadIdx.x % kParts;
  uint32_t copy_place = copy_row * kRowBytes + (copy_part ^ copy_row % 8) * 16;
  is_new(copy_place);
  constexpr int kPassBytes = K::kCopyRows * kRowBytes, kWeightPart = 16 / static_cast<int>(sizeof(Weight));
  const Weight* weight = static_cast<const Weight*>(op.weight) + (first_output + copy_row) * op.weight_row_stride +
                         chunk.column + copy_part * kWeightPart;
  is_new(weight);
  const int64_t weight_step = K::kCopyRows * op.weight_row_stride;
  const int outputs = static_cast<int>(op.num_columns - first_output) - copy_row;
  const bool gain_is_float32 = chunk.gain.dtype == DType::kFloat32;
  const char* gain = static_cast<const char*>(chunk.gain.data);
  const T* x[K::kPasses];  // null: zeros
  [[maybe_unused]] const T* residual[K::kPasses];
  const int rows = static_cast<int>(op.num_rows - first_row < kRows ? op.num_rows - first_row : kRows);
  const auto in_tile = [&](int pass) { return copy_row + pass * K::kCopyRows < kRows; };

  // Copy this thread's part of a stage's columns; past the range nothing.
  const auto copy_weight = [&](int column, uint32_t stage) {
    if (column >= end) return;
    const Weight* from = weight + column;
    const bool inside = column + copy_part * kWeightPart < width;
#pragma unroll
    for (int i = 0; i < K::kColumns / K::kCopyRows; ++i, from += weight_step) {
      copy_async(stage + copy_place + i * kPassBytes, from, inside && i * K::kCopyRows < outputs);
    }
  };
  const auto copy_x = [&](int column, uint32_t stage) {
    if (column >= end) return;
#pragma unroll
    for (int i = 0; i < K::kPasses; ++i) {
      if (x[i] == nullptr) continue;
#pragma unroll
      for (int half = 0; half < K::kHalves; ++half) {
        const int own = column + half * kHalfColumns + copy_part * kPack;
        const uint32_t to = stage + K::kXAt + half * K::kHalfBytes + copy_place + i * kPassBytes;
        copy_async(to, x[i] + own, own < width);
        if constexpr (kResidual) {
          if (residual[i] != nullptr) copy_async(to + K::kXBytes, residual[i] + own, own < width);
        }
      }
    }
    const int of_part = gain_is_float32 ? 4 : 8, first = column + static_cast<int>(threadIdx.x) * of_part;
    if (gain == nullptr || first >= column + kStageColumns) return;
    copy_async(stage + K::kGainAt + threadIdx.x * 16, gain + first * (16 / of_part), first < width);
  };

  // Before the previous kernel has ended, the ring's first stages of the weight are prefetched into L2, which is
  // coherent. Not into the ring: a thread's copies complete in order, and the first x would wait for all of the weight
  // that was requested before it.
  for (int i = 0; i < K::kStages - 1; ++i) {
    const int column = begin + i * kStageColumns;
    if (column >= end || column + copy_part * kWeightPart >= width) continue;
#pragma unroll
    for (int j = 0; j < K::kColumns / K::kCopyRows; ++j) {
      if (j * K::kCopyRows < outputs) prefetch(weight + j * weight_step + column);
    }
  }
  if (gain == nullptr && threadIdx.x < kStageColumns / kPack) {
    const uint32_t one = narrow(Pair{1.0f, 1.0f}, T{});
    for (uint32_t stage = ring; stage != ring_end; stage += K::kStageBytes) {
      store_shared(stage + K::kGainAt + threadIdx.x * 16, Words{one, one, one, one});
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < K::kPasses; ++i) {
    const int64_t out_row = first_row + copy_row + i * K::kCopyRows;
    const int64_t row = in_tile(i) && out_row < op.num_rows ? source_row(chunk, out_row) : -1;
    x[i] = row < 0 ? nullptr : static_cast<const T*>(chunk.x) + row * chunk.x_row_stride;
    if constexpr (kResidual) {
      const bool present = row >= 0 && chunk.residual != nullptr;
      residual[i] = present ? static_cast<const T*>(chunk.residual) + row * chunk.residual_row_stride : nullptr;
    }
    if (row >= 0 || !in_tile(i)) continue;
    for (uint32_t stage = ring; stage != ring_end; stage += K::kStageBytes) {
#pragma unroll
      for (int half = 0; half < K::kHalves; ++half) {
        store_shared(stage + K::kXAt + half * K::kHalfBytes + copy_place + i * kPassBytes, Words{0, 0, 0, 0});
      }
    }
  }
  for (int i = 0; i < K::kStages - 1; ++i) {
    copy_weight(begin + i * kStageColumns, ring + i * K::kStageBytes);
    copy_x(begin + i * kStageColumns, ring + i * K::kStageBytes);
    commit_copies();
  }

  float sum[8][4] = {}, squares[K::kPasses] = {};
  uint32_t a[K::kHalves * kSteps][4];
  const bool own_squares = op.source.norm != Norm::kNone && chunk.sum_squares == nullptr;
  // (offset + gain) * scale of two columns, of gains in fp32 or T.
  constexpr float kGainFactor = K::kIsCodes ? kCodeGainScale<T> : kGainScale<T>;
  const auto factors_at = [&](uint32_t stage, int column) {
    const uint32_t at = stage + K::kGainAt + column * (gain_is_float32 ? 4 : 2);
    const Pair pair = gain_is_float32 ? load_shared_pair(at) : widen(load_shared_word(at), T{});
    const float offset = op.source.norm_offset;
    return Pair{(offset + pair.first) * kGainFactor, (offset + pair.second) * kGainFactor};
  };
  const auto times_pair = [](auto with_gain, uint32_t pair, uint32_t gains) {
    return multiply_add(pair, gains, decltype(with_gain)::value == Gain::kPlusOne ? pair : 0x80008000u, T{});
  };
  // Processes the parts of x that this thread copied itself: round(x + residual) replaces x. With codes it also
  // multiplies the gain in, for 64 rows of x instead of 256 of the weight, and permutes the columns of x: a lane has
  // columns 4q to 4q + 3 of 16 codes, where the fragment of wgmma has 2q, 2q + 1, 2q + 8, 2q + 9.
  const auto take_own_parts = [&](uint32_t stage, auto with_gain) {
    constexpr Gain kGain = decltype(with_gain)::value;
    if (!kResidual && !K::kIsCodes && !own_squares) return;
#pragma unroll
    for (int i = 0; i < K::kPasses; ++i) {
      // With codes the warp stays together for its barrier below.
      if (K::kIsCodes ? warp * 4 + i * K::kCopyRows >= rows : x[i] == nullptr) continue;
#pragma unroll
      for (int half = 0; half < K::kHalves; ++half) {
        const uint32_t rows_at = stage + K::kXAt + half * K::kHalfBytes + i * kPassBytes, own = rows_at + copy_place;
        Pack<T> pack{{load_shared(own)}};
        if constexpr (kResidual) {
          if (residual[i] != nullptr) pack = add(pack, Pack<T>{{load_shared(own + K::kXBytes)}});
        }
        if (own_squares && x[i] != nullptr) squares[i] += sum_of_squares(widen(pack));
        Words& w = pack.words[0];
        if constexpr (!K::kIsCodes) {
          if constexpr (kResidual) store_shared(own, w);
          continue;
        }
        const int column = half * kHalfColumns + copy_part * kPack;
        if constexpr (kGain == Gain::kFloat32) {
          float factor[kPack];
#pragma unroll
          for (int j = 0; j < kPack; j += 2) {
            const Pair factors = factors_at(stage, column + j);
            factor[j] = factors.first;
            factor[j + 1] = factors.second;
          }
          w = scaled<T>(w, factor);
        } else {
          const Words gains = load_shared(stage + K::kGainAt + column * 2);
          w = {times_pair(with_gain, w.x, gains.x), times_pair(with_gain, w.y, gains.y),
               times_pair(with_gain, w.z, gains.z), times_pair(with_gain, w.w, gains.w)};
        }
        // Of two neighboring parts words 0 and 2 of both go into the first part, words 1 and 3 into the second, once
        // both lanes have read theirs.
        sync_warp();
        if (x[i] == nullptr) continue;  // zeros stay zeros whatever the gain is
        const uint32_t to = rows_at + copy_row * kRowBytes + copy_part % 2 * 8;
        const int first = copy_part & ~1, swap = copy_row % 8;
        store_shared(to + (first ^ swap) * 16, w.x, w.z);
        store_shared(to + ((first + 1) ^ swap) * 16, w.y, w.w);
      }
    }
  };
  // The offset that this lane gives ldmatrix for the first 32 bytes of this warp's 16 rows of the weight. Its XOR with
  // 32 n is the offset 32 n bytes further, as the swizzle is an XOR too.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const uint32_t matrices = (warp * 16 + matrix % 2 * 8 + matrix_row) * kRowBytes + (matrix / 2 ^ matrix_row) * 16;
  // The fragments of the weight, rows g and g + 8 of the warp's 16, columns 2q and 2q + 1 of each part, times the gain.
  [[maybe_unused]] const auto load_weights = [&](uint32_t stage, auto with_gain) {
    constexpr Gain kGain = decltype(with_gain)::value;
    [[maybe_unused]] uint32_t gains[kParts / 4][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_matrices(stage + (matrices ^ step * 32), a[step]);
    if constexpr (kGain != Gain::kFloat32) {
#pragma unroll
      for (int i = 0; i < kParts / 4; ++i) load_matrices(stage + K::kGainAt + (4 * i + matrix) * 16, gains[i]);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Pair factors{};
      if constexpr (kGain == Gain::kFloat32) factors = factors_at(stage, part * 8 + 2 * q);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t& w = a[part / 2][part % 2 * 2 + i];
        if constexpr (kGain == Gain::kFloat32) {
          w = scaled<T>(w, factors.first, factors.second);
        } else {
          w = times_pair(with_gain, w, gains[part / 4][part % 4]);
        }
      }
    }
  };
  // With codes: the scales of rows g and g + 8 of this warp's rows of the weight, and whether a code of theirs is NaN.
  [[maybe_unused]] RowScales<2> scales;
  [[maybe_unused]] uint32_t nan[2] = {};
  [[maybe_unused]] const auto output_of = [&](int i) { return warp * 16 + g + i * 8; };
  // With blocks of scales: the scaled sums of earlier stages. The columns of a stage share a scale.
  [[maybe_unused]] float total[8][4] = {};
  [[maybe_unused]] const auto add_scaled = [&] {
#pragma unroll
    for (int at = 0; at < kRows / 2; ++at) {
      float& of_block = sum[at / 4][at % 4];
      is_new(of_block);
      if constexpr (kBlockScales) {
        total[at / 4][at % 4] += of_block * scales.value[at % 4 / 2];
      } else {
        of_block *= scales.value[at % 4 / 2];
      }
    }
  };
  if constexpr (kBlockScales) {
    scales.find(op, first_output, output_of);
    scales.load(arguments, static_cast<int>(chunk.column) + begin);
  }
  // The fragments of widened codes: columns 4q and 4q + 1 of 16 are where wgmma has 2q, the others where it has 2q + 8.
  [[maybe_unused]] const auto load_codes = [&](uint32_t stage) {
#pragma unroll
    for (int step = 0; step < K::kHalves * kSteps; step += 2) {
      uint32_t codes[4];
      load_matrices(stage + (matrices ^ step * 16), codes);
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        nan[at % 2] |= nan_bits(codes[at], Code{});
#pragma unroll
        for (int i = 0; i < 2; ++i) a[step + at / 2][2 * i + at % 2] = widen_pair(codes[at], i, Code{}, T{});
      }
    }
  };

  const auto multiply_range = [&](auto with_gain) {
    uint32_t stage = ring, before = ring_end - K::kStageBytes;
    for (int column = begin; column < end; column += kStageColumns) {
      wait_for_copies<K::kStages - 2>();
      if constexpr (K::kIsCodes) __syncthreads();  // other threads copied the gains
      take_own_parts(stage, with_gain);
      fence_async_proxy();
      wait_for_wgmma();  // it reads the stage that is overwritten next
      __syncthreads();
      const int ahead = column + (K::kStages - 1) * kStageColumns;
      copy_weight(ahead, before);
      copy_x(ahead, before);
      commit_copies();

      if constexpr (K::kIsCodes) {
        load_codes(stage);
      } else {
        load_weights(stage, with_gain);
      }
      fence_wgmma();
#pragma unroll
      for (int step = 0; step < K::kHalves * kSteps; ++step) {
        const uint64_t b = matrix_descriptor(stage + K::kXAt + step / kSteps * K::kHalfBytes);
        const uint64_t columns_of_b = b + step % kSteps * kDescriptorColumns;
        if (kBlockScales && step == 0) {
          wgmma<false>(sum, a[step], columns_of_b, T{});
        } else {
          wgmma<true>(sum, a[step], columns_of_b, T{});
        }
      }
      commit_wgmma();
      if constexpr (kBlockScales) {
        wait_for_wgmma();
        add_scaled();
        const int next_column = column + kStageColumns;
        if (next_column < end) scales.load(arguments, static_cast<int>(chunk.column) + next_column);
      }
      before = stage;
      stage += K::kStageBytes;
      if (stage == ring_end) stage = ring;
    }
    wait_for_wgmma();
  };
  const bool is_exact = kGainScale<T> == 1 && !gain_is_float32;
  if (gain == nullptr || (is_exact && op.source.norm_offset == 0)) {
    multiply_range(std::integral_constant<Gain, Gain::kProduct>{});
  } else if (is_exact && op.source.norm_offset == 1) {
    multiply_range(std::integral_constant<Gain, Gain::kPlusOne>{});
  } else {
    multiply_range(std::integral_constant<Gain, Gain::kFloat32>{});
  }
  if constexpr (K::kIsCodes) {
    if constexpr (!kBlockScales) {
      scales.find(op, first_output, output_of);
      scales.load(arguments, 0);
      add_scaled();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales.value[i] = row_has_nan(nan[i]) ? bits_to_float(0x7fffffff) : 0.0f;  // added to every sum of the row
    }
  }

  float* of_block = reinterpret_cast<float*>(shared_memory());  // [kRows, kColumns]
  float* squares_of = of_block + kRows * K::kSumStride;         // [kRows]
  __syncthreads();
#pragma unroll
  for (int at = 0; at < kRows / 2; ++at) {
    const int tile = at / 4, i = at % 4;
    float& own = kBlockScales ? total[tile][i] : sum[tile][i];
    if constexpr (!K::kIsCodes) is_new(own);
    const int token = tile * 8 + 2 * q + i % 2, output = warp * 16 + g + i / 2 * 8;
    of_block[token * K::kSumStride + output] = K::kIsCodes ? own + scales.value[i / 2] : own;
  }
#pragma unroll
  for (int i = 0; i < K::kPasses; ++i) {
    for (int distance = kParts / 2; distance > 0; distance /= 2) {
      squares[i] += __shfl_xor_sync(~0u, squares[i], distance);
    }
    if (copy_part == 0 && in_tile(i)) squares_of[copy_row + i * K::kCopyRows] = squares[i];
  }
  const BlockSums<kRows, K::kColumns, K::kSumStride> sums{of_block, squares_of};
  constexpr bool kAtOnce = !(kBlockScales && kWarpgroups == 4);  // that instance would spill
  sum_over_cluster<T, kAtOnce>(arguments, first_row, first_output, sums, 1 / kGainFactor);
}

template <class T, Form kForm, int kWarpgroups, bool kResidual>
__global__ void __launch_bounds__(Tile<kForm, kWarpgroups, kResidual>::kThreads,
                                  Tile<kForm, kWarpgroups, kResidual>::kBlocksOnAnSm)
    norm_concat_linear_wgmma_kernel(const __grid_constant__ Arguments arguments) {
  if constexpr (kHasWgmma) {
    multiply_block<T, kForm, kWarpgroups, kResidual>(arguments);
  } else {
    trap();  // no plan launches this; a launch ends in an error
  }
}

template <class T, Form kForm, int kWarpgroups, bool kResidual>
int launch_tile(const Arguments& arguments, const Device& device) {
  using K = Tile<kForm, kWarpgroups, kResidual>;
  const NormConcatLinear& op = arguments.op;
  const int64_t rounds = (op.num_rows + kRows - 1) / kRows;
  const int64_t outputs = (op.num_columns + K::kColumns - 1) / K::kColumns;
  Shape shape{rounds * outputs, arguments.ranges.count, K::kThreads, K::kSharedBytes};
  shape.cluster = arguments.ranges.count;
  return launch<norm_concat_linear_wgmma_kernel<T, kForm, kWarpgroups, kResidual>>(shape, arguments, device);
}

template <class T, Form kForm>
int launch_columns(int warpgroups, const Arguments& arguments, const Device& device) {
  const bool residual = has_residual(arguments.op.source);
  const auto launch_of = [&](auto of_block) {
    constexpr int kWarpgroups = decltype(of_block)::value;
    return residual ? launch_tile<T, kForm, kWarpgroups, true>(arguments, device)
                    : launch_tile<T, kForm, kWarpgroups, false>(arguments, device);
  };
  using std::integral_constant;
  if (warpgroups == 4) return launch_of(integral_constant<int, 4>{});
  if (warpgroups == 3) return launch_of(integral_constant<int, 3>{});
  if constexpr (kForm == Form::kDense) {
    if (warpgroups == 1) return launch_tile<T, kForm, 1, false>(arguments, device);
  }
  return launch_of(integral_constant<int, 2>{});
}

}  // namespace

// At 3x5120x5120, where the longest range takes 52 us and reading 36, 17 rows took 55.4 us and 47.5 in two steps.
bool wgmma_pays(int64_t num_chunks, int64_t width, int64_t num_columns, int32_t multiprocessors) {
#ifdef EAGLE_KERNELS_ALTERNATIVES
  if (wanted("EAGLE_KERNELS_WGMMA_COLUMNS") != 0) return true;  // it is to be timed
#endif
  Chunk chunks[kMaxChunks];
  for (Chunk& chunk : chunks) chunk.width = width;
  NormConcatLinear op{};
  op.source.chunks = chunks;
  op.source.num_chunks = num_chunks;
  op.source.width = num_chunks * width;
  op.num_columns = num_columns;
  Device device{};
  device.multiprocessors = multiprocessors;
  return cut_for_warpgroups(op, device).time <= us_of_two_steps(num_columns, op.source.width);
}

}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

int norm_concat_linear_wgmma_cuda(const NormConcatLinear& op, const Device& device) {
  if (!device.wgmma || !has_scale_of_tiles(op, 1, unit_columns(true))) return cudaErrorNotSupported;
  const WarpgroupCut cut = cut_for_warpgroups(op, device);
  Arguments arguments = arguments_of(op);
  arguments.ranges = cut.ranges;
  const bool is_bfloat16 = op.source.dtype == DType::kBFloat16;
  return with_form(op, [&](auto form) -> int {
    constexpr Form kForm = decltype(form)::value;
    if constexpr (has_scaled_codes(kForm)) {
      return cudaErrorNotSupported;
    } else if constexpr (kForm == Form::kDense) {
      return is_bfloat16 ? launch_columns<BFloat16, kForm>(cut.warpgroups, arguments, device)
                         : launch_columns<Float16, kForm>(cut.warpgroups, arguments, device);
    } else {
      // With codes the gain is multiplied into x, which may overflow fp16.
      return is_bfloat16 ? launch_columns<BFloat16, kForm>(cut.warpgroups, arguments, device) : cudaErrorNotSupported;
    }
  });
}

}  // namespace eagle_kernels
