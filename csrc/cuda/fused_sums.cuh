// How the fused kernel of norm_concat_linear ends: the blocks of a cluster, one for each range, send one another their
// sums (st.async), and each finishes a share of the outputs. On an H100 that takes 1.3 us less at K=3, H=D=896 than a
// barrier of the cluster and loads from the others' shared memory, and 0.7 to 1.2 us less at 2880 and 4096: the
// barrier's release waits for all outstanding memory accesses of a block (MEMBAR.GPU). Global memory has no partial
// sums that a second stream could overwrite and no counter that an aborted launch would leave behind.
#pragma once

#include "ranges.cuh"

namespace eagle_kernels::cuda {

constexpr int kWarps = 8, kThreads = 32 * kWarps;  // of a block that multiplies by mma.sync, fused or split

// What a block of so many columns receives from its cluster, itself included.
template <int kColumns>
struct Received {
  float shares[max_received(kColumns)][kShareValues];  // [parts, shares of a block]
  float squares[kMaxParts][kMaxDecodeRows];
  SentBarrier all;
};

// The packs of four outputs that this block finishes, over all its shares.
template <class K>
__device__ __forceinline__ int own_packs(int packs) {
  int own = 0;
  for (int share = K::rank(); share * 32 < packs; share += K::blocks()) {
    own += packs - share * 32 < 32 ? packs - share * 32 : 32;
  }
  return own;
}

// Sends to what is `mine` here in block `rank`. A pair shares its memory: what it has in the other's half is
// kOwnBytes away.
template <class K, class Value>
__device__ __forceinline__ void send(float* mine, Received<K::kColumns>& received, const Value& value, int rank) {
  if constexpr (K::kInPairs) {
    const int away = (rank % 2 - static_cast<int>(threadIdx.y)) * K::kOwnBytes;
    const auto moved = [&](auto* p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<char*>(p) + away); };
    send_to_block(moved(mine), moved(&received)->all, value, rank / 2);
  } else {
    send_to_block(mine, received.all, value, rank);
  }
}

// Adds up the sums of a block's warps, those of part number `part` of the concat, in memory that no stage is in, and
// sends each share to the block that finishes it. A block that is alone stores them itself: compute-sanitizer's
// memcheck reports the st.async of a cluster of one block (K=1 in one range, on an H100) as an invalid access.
template <class K>
__device__ __forceinline__ void send_sums(int part, int packs, char* memory,
                                          const float (&sum)[K::kColumnTiles][K::kRowTiles][4], float squares,
                                          Received<K::kColumns>& received) {
  constexpr int kRows = 8 * K::kRowTiles, kOutputs = kRows * K::kColumns;
  static_assert(kRows == 2 * kWarps && kRows == kMaxDecodeRows && K::kPacksOfRow % kPacksTogether == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, q = lane % 4;
  const int column_warp = warp % K::kColumnWarps, step_warp = warp / K::kColumnWarps;
  const int blocks = K::blocks();
  const bool is_alone = blocks == 1;
  float* of_warps = reinterpret_cast<float*>(memory);  // [kStepWarps, kRows, kColumns]
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  K::sync();
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
      send<K>(to, received, squares, lane % 16);
    }
  }
  K::sync();
#pragma unroll
  for (int share = warp; share < shares_of(K::kColumns); share += kWarps) {
    const int pack = share * 32 + lane;
    if (pack >= packs) return;
    float total[kOutputColumns] = {};
#pragma unroll
    for (int w = 0; w < K::kStepWarps; ++w) {
      const Words words = reinterpret_cast<const Words*>(of_warps + w * kOutputs)[pack];
#pragma unroll
      for (int i = 0; i < kOutputColumns; ++i) total[i] += bits_to_float(word(words, i));
    }
    const Words words{float_to_bits(total[0]), float_to_bits(total[1]), float_to_bits(total[2]),
                      float_to_bits(total[3])};
    const int place = part * shares_of_block(blocks, K::kColumns) + share / blocks;
    float* to = received.shares[place] + lane * kOutputColumns;
    if (is_alone) {
      *reinterpret_cast<Words*>(to) = words;
    } else {
      send<K>(to, received, words, share % blocks);
    }
  }
}

// Computes outputs from the sums that this block receives.
template <class K>
__device__ __forceinline__ void finish_fused(const Arguments& arguments, int64_t first_row, int64_t first_output,
                                             int packs, Received<K::kColumns>& received) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int blocks = K::blocks(), rank = K::rank();
  if (blocks == 1) {
    K::sync();
  } else {
    received.all.wait();
  }
  const int first = (warp * blocks + rank) * 32;
  if (first >= packs) return;
  const bool stores = first + lane < packs;
  const int pack = stores ? first + lane : packs - 1;
  const int token = pack / K::kPacksOfRow, column = pack % K::kPacksOfRow * kOutputColumns;
  Words words[kMaxParts];
  float squares_of[kMaxParts];
#pragma unroll
  for (int part = 0; part < kMaxParts; ++part) {
    if (part >= arguments.ranges.count) break;
    const float* share = received.shares[part * shares_of_block(blocks, K::kColumns) + warp];
    words[part] = reinterpret_cast<const Words*>(share)[pack % 32];
    squares_of[part] = received.squares[part][token];
  }
  finish_pack<typename K::T>(arguments, first_row + token, first_output + column, stores, words, squares_of,
                             1 / K::kGainFactor);
}

}  // namespace eagle_kernels::cuda
