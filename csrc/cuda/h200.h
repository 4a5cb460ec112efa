// What an H200 takes for a call of the fused kernel and of the one of warpgroups, in us, fitted to
// bench/results/nvidia-h200/decode-curve-alternatives*.json: at one row and at 17. Launchers cut the work by it, and
// `make instances` tabulates it. What a call takes besides, 5 us, is 1 to 2.4 us less below 10 MB of weight. How cuts
// of codes for warpgroups compare is no fit.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "device.h"

namespace eagle_kernels::cuda {

// Clusters that run at the same time; 0 where a GPC has no room for one. A cluster's blocks are on the SMs of one GPC:
// of 16 SMs, some of 18. The counts of an H100 and an H200, which have 132 SMs (bench/results/*/device.json), are those
// of GPCs of 18, 18, five times 16 and 8, with 8 more SMs for clusters of two at most. Another GPU of 132 SMs may have
// room for more, but must split alike, because a row's bits depend on the split; six GPCs of 16 and two of 18 would
// have it for 84 clusters of 3 blocks, two on an SM, where these have it for 79.
inline int64_t clusters_at_once(const Device& device, int cluster, int blocks_on_an_sm) {
  const int sms = std::min(device.multiprocessors, 16), gpcs = device.multiprocessors / sms;
  const int larger = std::min(gpcs, (device.multiprocessors - gpcs * sms) / 2);
  const int halved = device.multiprocessors == 132 ? 1 : 0;
  const int halves = cluster <= 2 ? 2 * halved : halved;
  const auto of_gpc = [&](int size) { return size * blocks_on_an_sm / cluster; };
  const int whole = gpcs - larger - halved;
  return whole * of_gpc(sms) + larger * of_gpc(sms + 2) + halves * of_gpc(sms / 2);
}

constexpr float kUsOfCall = 5;  // besides its units or stages
// Of a dense weight, at 4.4 TB/s.
inline float us_to_read(int64_t num_columns, int64_t width) {
  return static_cast<float>(2 * num_columns * width) / 4.4e6f;
}

// How blocks of the fused kernel, of so many output columns, share an SM: in pairs, they are two neighbors of a cluster
// and are launched as one.
struct FusedBlocks {
  int on_an_sm;
  bool in_pairs;
  int columns;
};

// A call of the fused kernel, cut for clusters of `ranges` blocks. The longest range and all ranges have so many units,
// which for 64 output columns are 16 KB of the weight (of four bits 8 KB). In its second part a block has columns of
// the next chunk.
struct FusedWork {
  int64_t clusters;
  int ranges;
  FusedBlocks blocks;
  int longest, units;
  bool has_second_part;
};

// For a unit on an SM with 1, 2 or 3 blocks, and once more where a block has two parts.
struct UsOfUnits {
  float on_an_sm[3], second_part[3];
};
constexpr UsOfUnits kUsOfDense{{0.54f, 0.36f, 0.33f}, {}}, kUsOfCodes{{0.79f, 0.54f, 0.55f}, {1.6f, 1.6f, 2.5f}};

// What to multiply a time by that no GPU has confirmed. Pairs have to promise 5 %, and on other GPUs than those whose
// clusters `clusters_at_once` knows they are not chosen.
inline float doubt_of(const Device& device, const FusedBlocks& blocks) {
  if (!blocks.in_pairs) return 1;
  return device.multiprocessors == 132 ? 1.05f : std::numeric_limits<float>::infinity();
}

// Clusters that do not run at once take a wave of their own, unless reading the weight takes longer. Blocks fill an SM
// before they take the next one, but for clusters of up to two, which take a free one. Room for a few clusters stays
// free: 45 clusters of five, of which 47 have room, take 26.2 us at 3x2880x2880 with two blocks on an SM, where 45 of
// six in threes take 17.5, and 60 of six in threes, of which 62 have room, take as long as two waves. 60 of four, of
// which 62 have room, run at once. Pairs should take as long as two blocks that happen to share an SM.
inline float us_of_fused(const Device& device, bool is_codes, const FusedWork& work) {
  const UsOfUnits& us_of = is_codes ? kUsOfCodes : kUsOfDense;
  const bool in_pairs = work.blocks.in_pairs;
  const int of_launch = in_pairs ? work.ranges / 2 : work.ranges, spare = work.ranges < 5 ? 2 : 3;
  const int launched_on_an_sm = in_pairs ? 1 : work.blocks.on_an_sm;
  const auto at_once = static_cast<float>(clusters_at_once(device, of_launch, launched_on_an_sm));
  const float waves = std::floor(static_cast<float>(work.clusters + spare - 1) / at_once) + 1;  // without room infinite
  const bool alone = work.ranges <= 2 && work.clusters * work.ranges <= device.multiprocessors;
  const int blocks = alone ? 1 : work.blocks.on_an_sm;
  const float columns = static_cast<float>(work.blocks.columns) / 64;
  const float busiest = static_cast<float>(work.longest * blocks) * columns * us_of.on_an_sm[blocks - 1];
  // As many bytes as a dense weight of 64 x 128 for each block and unit; four bits take as long, by widening.
  const float to_read = us_to_read(work.blocks.columns * work.clusters, 128 * static_cast<int64_t>(work.units));
  const float second_part = work.has_second_part ? us_of.second_part[blocks - 1] : 0;
  return std::max(waves * busiest, to_read) + waves * (second_part + kUsOfCall);
}

// A call of the kernel of warpgroups, in blocks of 64 columns of the output for each of `warpgroups`, 1 to 4. The
// longest of the ranges has `longest` stages.
struct WarpgroupWork {
  int64_t num_columns, width;
  int warpgroups, blocks_on_an_sm, ranges, longest;

  int64_t clusters() const { return (num_columns + 64 * warpgroups - 1) / (64 * warpgroups); }
};

// On a dense weight. The longest of the ranges that a cluster has decides, or reading the weight. Clusters that do not
// run at once take a wave of their own, as above, and room for one stays free: 16 of six, of which 17 have room, run at
// once. Where clusters of 192 columns leave 42 SMs idle, at 3x2880x2880, they still take 20.2 us, and those of 128
// columns 22.5.
constexpr float kUsOfStage[] = {0.55f, 0.755f, 0.645f, 0.73f};
inline float us_of_warpgroups(const Device& device, const WarpgroupWork& work) {
  const auto at_once = static_cast<float>(clusters_at_once(device, work.ranges, work.blocks_on_an_sm));
  const float waves = std::floor(static_cast<float>(work.clusters()) / at_once) + 1;  // without room infinite
  const float busiest = static_cast<float>(work.longest) * kUsOfStage[work.warpgroups - 1];
  return std::max(waves * busiest, us_to_read(work.num_columns, work.width)) + waves * kUsOfCall;
}

// On codes, in times of reading the weight: no fit, since an H200 has timed few of their cuts. `units` stages of
// `stage_columns` columns are a row of the weight. Through L2 pass the weight and, for each block of columns, 64 rows
// of x, at 1.28 times the copy rate. Nine of ten SMs should have a block. The instructions of the SM with the most work
// take more than reading because of those for x, which more columns share in a block of 256. At 3x4096x4096 that takes
// 28.3 us for 17 rows of fp8_row where blocks of 128 columns take 25.9, for 64 rows 33.9 and 34.9.
inline double time_of_warpgroups_of_codes(const Device& device, const WarpgroupWork& work, int units,
                                          int stage_columns) {
  constexpr double kCopyOverL2 = 4.3 / 5.5, kBusy = 0.9, kBytesOfX = 2 * 64;  // for a byte of a row of codes
  const double sms = device.multiprocessors, clusters = static_cast<double>(work.clusters());
  const double blocks = clusters * work.ranges, share = static_cast<double>(work.num_columns) * work.width / sms;
  const double waves =
      std::ceil(clusters / static_cast<double>(clusters_at_once(device, work.ranges, work.blocks_on_an_sm)));
  const double busy = waves == 1 ? std::min(1.0, blocks / sms) : blocks / (waves * sms * work.blocks_on_an_sm);
  const double even = static_cast<double>(units) / (work.ranges * work.longest);
  const double of_an_sm = std::max(std::ceil(blocks / sms), waves);
  const double most = of_an_sm * 64 * work.warpgroups * work.longest * stage_columns / share;
  const double through_l2 = kCopyOverL2 * (1 + kBytesOfX * clusters / static_cast<double>(work.num_columns));
  const double execute = work.warpgroups == 4 ? 1.1 : 1.4;
  return std::max(std::max(1.0, through_l2) / std::min(1.0, busy * even / kBusy), execute * most);
}

// norm_concat and a library's product, for up to 48 rows.
inline float us_of_two_steps(int64_t num_columns, int64_t width) { return us_to_read(num_columns, width) + 10; }

}  // namespace eagle_kernels::cuda
