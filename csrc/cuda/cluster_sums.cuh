// The sum over all ranges where their blocks form a cluster: each block has its sums in its shared memory, from where
// the others load them.
#pragma once

#include "ranges.cuh"

namespace eagle_kernels::cuda {

// A block's sums over its range, in its shared memory.
template <int kRows, int kColumns, int kStride>
struct BlockSums {
  const float* products;  // [kRows, kColumns], kStride apart
  const float* squares;   // [kRows]
};

// What the blocks of the cluster have at the same address, loaded when it is used. A block that is alone has no cluster
// (fused_sums.cuh, send_sums) and loads its own.
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
  static_assert(kColumns / kOutputColumns % kPacksTogether == 0);
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

}  // namespace eagle_kernels::cuda
