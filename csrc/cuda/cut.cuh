// How the fused kernel and the one of warpgroups cut the concat into ranges: so that an H200 takes least (h200.h). The
// number of rows is in no cut, so that no sum depends on it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <optional>

#include "../norm_concat_linear.h"
#include "h200.h"
#include "ranges.cuh"
#include "scales.cuh"

namespace eagle_kernels::cuda {

inline int64_t blocks_of_outputs(const NormConcatLinear& op, int columns) {
  return (op.num_columns + columns - 1) / columns;
}

// In units of `unit` columns: chunk k, its longest range, and all chunks.
inline int units_of_chunk(const Concat& source, int k, int unit) { return units_of(source.chunks[k].width, unit); }
inline int longest_of_chunk(const Concat& source, const SplitRanges& ranges, int k, int unit) {
  return (units_of_chunk(source, k, unit) + ranges.of_chunk[k] - 1) / ranges.of_chunk[k];
}
inline int units_of_concat(const Concat& source, int unit) {
  int units = 0;
  for (int k = 0; k < source.num_chunks; ++k) units += units_of_chunk(source, k, unit);
  return units;
}

// One range for every chunk.
inline SplitRanges one_range_each(const Concat& source) {
  SplitRanges ranges{};
  ranges.count = static_cast<int>(source.num_chunks);
  std::fill_n(ranges.of_chunk, source.num_chunks, 1);
  return ranges;
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

#ifdef EAGLE_KERNELS_ALTERNATIVES  // the library that bench/gpu_session.sh times beside the plain one
// What a variable of the environment asks for; 0 where it is not set.
inline int wanted(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? 0 : std::atoi(value);
}
#endif

// The fused kernel's cut: a range for each block of a cluster.
struct FusedCut {
  SplitRanges parts;  // what the ranges have of each chunk
  BlockRange of_block[kMaxCluster];
  int ranges;
  FusedBlocks blocks;

  int longest() const {
    int units = 0;
    for (int block = 0; block < ranges; ++block) units = std::max(units, of_block[block].end - of_block[block].begin);
    return units;
  }
};

// Cuts the concat into `count` ranges, which differ by a unit at most. None where one would have columns of more than
// two chunks, or where there would be too many parts.
inline std::optional<FusedCut> cut_evenly(const Concat& source, int unit, int count) {
  int first[kMaxChunks + 1] = {};  // unit of each chunk
  for (int k = 0; k < source.num_chunks; ++k) first[k + 1] = first[k] + units_of_chunk(source, k, unit);
  const int all = first[source.num_chunks];
  if (all < count) return {};
  FusedCut cut{};
  cut.ranges = count;
  for (int block = 0, k = 0; block < count; ++block) {
    const int begin = all * block / count, end = all * (block + 1) / count;
    while (first[k + 1] <= begin) ++k;
    const bool has_next = end > first[k + 1];
    if (has_next && end > first[k + 2]) return {};
    cut.of_block[block] = {k, begin - first[k], end - first[k], cut.parts.count};
    ++cut.parts.of_chunk[k];
    if (has_next) ++cut.parts.of_chunk[k + 1];
    cut.parts.count += 1 + has_next;
  }
  if (cut.parts.count > kMaxParts) return {};
  return cut;
}

// Cuts every chunk into ranges of its own, `count` in all: one each, then one more for the chunk whose ranges are
// longest. None where there are not as many.
inline std::optional<FusedCut> cut_each_chunk(const Concat& source, int unit, int count) {
  FusedCut cut{};
  cut.parts = one_range_each(source);
  cut.ranges = count;
  if (cut.parts.count > count) return {};
  for (; cut.parts.count < count; ++cut.parts.count) {
    const LongestRange longest = longest_range(source, cut.parts, unit);
    if (longest.units == 1) return {};
    ++cut.parts.of_chunk[longest.chunk];
  }
  for (int block = 0, k = 0; k < source.num_chunks; ++k) {
    const int units = units_of_chunk(source, k, unit), of_chunk = cut.parts.of_chunk[k];
    for (int range = 0; range < of_chunk; ++range, ++block) {
      cut.of_block[block] = {k, units * range / of_chunk, units * (range + 1) / of_chunk, block};
    }
  }
  return cut;
}

// Whether a block has room for what it receives of all parts.
inline bool has_room(const FusedCut& cut, int output_columns) {
  return cut.parts.count * shares_of_block(cut.ranges, output_columns) <= max_received(output_columns);
}

// In the order in which they are preferred where an H200 takes as long.
constexpr FusedBlocks kKindsOfBlocks[] = {{1, false, kFusedColumns},
                                          {2, false, kFusedColumns},
                                          {3, false, kFusedColumns},
                                          {2, true, kFusedColumns},
                                          {2, true, kWideColumns}};

// The best cut with so many ranges, 0: any, of those for whose blocks `may` is true. It is found anew in every call, so
// each cut is made once for all kinds of blocks: 0.8 us of an AMD EPYC for codes in three chunks, and 1.8 with a cut
// for each kind.
template <class May>
std::optional<FusedCut> best_cut(const NormConcatLinear& op, const Device& device, const May& may, int wanted_ranges) {
  const bool is_codes = op.weight_type != WeightType::kChunks;
  const int unit = fused_unit_columns(is_codes), units = units_of_concat(op.source, unit);
  std::optional<FusedCut> best;
  float least = std::numeric_limits<float>::infinity();
  const FusedBlocks* kind_of_best = std::end(kKindsOfBlocks);
  for (int ranges = 1; ranges <= kMaxCluster; ++ranges) {
    if (wanted_ranges != 0 && wanted_ranges != ranges) continue;
    for (const bool evenly : {true, false}) {
      const std::optional<FusedCut> cut =
          evenly ? cut_evenly(op.source, unit, ranges) : cut_each_chunk(op.source, unit, ranges);
      if (!cut) continue;
      const int longest = cut->longest();
      const bool has_second_part = cut->parts.count > ranges;
      bool is_taken = false;
      for (const FusedBlocks& blocks : kKindsOfBlocks) {
        // A pair that is alone in its cluster has no cluster to send in.
        if (blocks.in_pairs && (ranges % 2 != 0 || ranges < 4)) continue;
        if (!may(blocks) || !has_room(*cut, blocks.columns)) continue;
        is_taken = true;
        const int64_t clusters = blocks_of_outputs(op, blocks.columns);
        const FusedWork work{clusters, ranges, blocks, longest, units, has_second_part};
        const float us = us_of_fused(device, is_codes, work) * doubt_of(device, blocks);
        if (us < least || (us == least && &blocks < kind_of_best)) {
          best = cut, best->blocks = blocks;
          least = us, kind_of_best = &blocks;
        }
      }
      // Chunk by chunk the longest range is no shorter.
      if (is_taken && (!is_codes || !has_second_part)) break;
    }
  }
  return best;
}

// may: whether blocks can share an SM so.
template <class May>
FusedCut cut_for_cluster(const NormConcatLinear& op, const Device& device, const May& may) {
#ifdef EAGLE_KERNELS_ALTERNATIVES
  const int wanted_blocks = wanted("EAGLE_KERNELS_FUSED_BLOCKS");  // 1: in pairs
  const int wanted_columns = wanted("EAGLE_KERNELS_FUSED_COLUMNS");
  const auto is_wanted = [&](const FusedBlocks& blocks) {
    const int number = blocks.in_pairs ? 1 : blocks.on_an_sm;
    return may(blocks) && (wanted_blocks == 0 || wanted_blocks == number) &&
           (wanted_columns == 0 || wanted_columns == blocks.columns);
  };
  const int wanted_ranges = wanted("EAGLE_KERNELS_FUSED_RANGES");
  if (const auto cut = best_cut(op, device, is_wanted, wanted_ranges)) return *cut;
  if (const auto cut = best_cut(op, device, may, wanted_ranges)) return *cut;
#endif
  return *best_cut(op, device, may, 0);
}

// The cut of the kernel of warpgroups: blocks of 64 columns of the output for each of its warpgroups, and ranges.
struct WarpgroupCut {
  int warpgroups;
  SplitRanges ranges;
  double time;  // of a dense weight in us, of codes in times of reading the weight
};

// The columns of a block, 64 (neither with codes nor with residuals), 128, 192 or 256, and the ranges, as many as a
// cluster has room for, with the least time.
inline WarpgroupCut cut_for_warpgroups(const NormConcatLinear& op, const Device& device) {
  const bool is_codes = op.weight_type != WeightType::kChunks, residuals = has_residual(op.source);
  const int unit = unit_columns(is_codes);
  WarpgroupCut best{};
  for (int warpgroups = is_codes || residuals ? 2 : 1; warpgroups <= 4; ++warpgroups) {
#ifdef EAGLE_KERNELS_ALTERNATIVES
    if (const int columns = wanted("EAGLE_KERNELS_WGMMA_COLUMNS"); columns != 0 && columns != 64 * warpgroups) continue;
#endif
    const bool two_blocks = warpgroups <= 2 && !(is_codes && (has_blocks(op) || residuals));
    SplitRanges ranges = one_range_each(op.source);
    for (;; ++ranges.count) {
      const LongestRange longest = longest_range(op.source, ranges, unit);
      const WarpgroupWork work{op.num_columns, op.source.width, warpgroups, two_blocks ? 2 : 1, ranges.count,
                               longest.units};
      const double time = is_codes ? time_of_warpgroups_of_codes(device, work, units_of_concat(op.source, unit), unit)
                                   : us_of_warpgroups(device, work);
      if (best.warpgroups == 0 || time < 0.999 * best.time) best = {warpgroups, ranges, time};
      if (ranges.count == kMaxCluster || longest.units == 1) break;
      ++ranges.of_chunk[longest.chunk];
    }
  }
  return best;
}

}  // namespace eagle_kernels::cuda
