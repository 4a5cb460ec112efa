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
// mma_tile.cuh has the sizes of a block and the places of values in a stage, mma_ring.cuh the range of a block and the
// copies, mma_product.cuh the product.
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
// statistic alike; the gain is multiplied into the weight (weight_gain.cuh), or into x (kGainOnX). Rows of values below
// 2^-100, which no model has, lose precision: their products are subnormal in fp32. Sums of squares are taken from the
// same stages: in the split kernels only by the blocks of the first output columns.
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
#include <limits>

#include "cut.cuh"
#include "fused_sums.cuh"
#include "launch.cuh"
#include "mma_product.cuh"
#include "mma_ring.cuh"
#include "mma_tile.cuh"
#include "ranges.cuh"
#include "scales.cuh"

namespace eagle_kernels::cuda {
namespace {

constexpr int kMaxRanges = 16;  // of one chunk

template <class T, Form kForm, int kRows, bool kResidual, End kEnd = End::kSplit>
__global__ void __launch_bounds__(kThreads* MmaTile<T, kForm, kRows, kResidual, kEnd>::kThreadRows,
                                  MmaTile<T, kForm, kRows, kResidual, kEnd>::kBlocksOnAnSm)
    norm_concat_linear_partial_kernel(const __grid_constant__ Arguments arguments) {
  using K = MmaTile<T, kForm, kRows, kResidual, kEnd>;
  if constexpr (K::kInPairs && !kHasPairs) return;
  const NormConcatLinear& op = arguments.op;
  const MmaWork<K> work(arguments);
  MmaRing<K> ring(work);
  const int packs = work.rows * K::kPacksOfRow;
  if (K::kFused && K::blocks() > 1) {
    if (threadIdx.x == kThreads - 1) {
      const int bytes = own_packs<K>(packs) * sizeof(Words) + sizeof K::received().squares[0];
      K::received().all.make(static_cast<uint32_t>(arguments.ranges.count) * bytes);
    }
    arrive_at_cluster();
  }
  if (ring.copies_weight() && op.early_weight) {
    ring.fill();
  } else if (ring.copies_weight()) {
    ring.prefetch_weight();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  ring.find_sources();
  K::sync();
  if (!ring.copies_weight() || !op.early_weight) ring.fill();
  // All blocks can receive after this; the first stage loads meanwhile.
  if (K::kFused && K::blocks() > 1) wait_for_cluster();

  MmaProduct<K> product(work, ring);
  if constexpr (K::kFused) {
#pragma unroll 1
    for (int i = 0; i <= static_cast<int>(work.has_next()); ++i) {
      product.multiply(i != 0);
      const int part = arguments.of_block[K::rank()].part + i;
      send_sums<K>(part, packs, ring.multiplied(), product.sum, product.squares[0], K::received());
      product.clear();
    }
    finish_fused<K>(arguments, work.first_row, work.first_output, packs, K::received());
  } else {
    product.multiply(false);
    product.store_partial();
  }
}

template <class T, Form kForm, int kRows, bool kResidual>
int launch_partial(const Arguments& arguments, const Device& device) {
  const int64_t rounds = (arguments.op.num_rows + kRows - 1) / kRows;
  const Shape shape{rounds * blocks_of_outputs(arguments.op, kSplitColumns), arguments.ranges.count, kThreads,
                    MmaTile<T, kForm, kRows, kResidual, End::kSplit>::kSharedBytes};
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
    if (rows > 64 && MmaTile<T, kForm, 128, false, End::kSplit>::kSharedBytes <= device.shared_memory) {
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
  constexpr int64_t kBytes = MmaTile<T, kForm, kRows, kResidual, End::kFused>::kSharedBytes;
  const bool has_room_for_three = kInThreesToo && 3 * kBytesOfThree <= device.shared_memory;
  const int max_blocks = has_room_for_three ? 3 : 2 * kBytes <= device.shared_memory ? 2 : 1;
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
    using K = MmaTile<T, kForm, kRows, kResidual, kEnd>;
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
