// The projection in bf16 on the AMX tile unit: out^T = weight . rows^T. (For codes: project_amx_codes.h.)
//
// The weight is the left operand because the unit reads that one row-major, as it is in memory: a tile is 16 weight
// rows of 64 bytes. The rows are the right operand, whose pairs along K must be interleaved; the pack pass lays them
// out once: [16-row group][steps of 32 columns][16 pairs][16 rows][2], each [16][16][2] block one tile; for codes in
// stretches along K (in_half_pages). Rows beyond N and columns beyond K*H are zero there.
#pragma once

#include "pack_groups.h"
#include "project_codes.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kTile = 16;    // rows of a tile, and fp32 columns of a sum
constexpr int64_t kTileK = 32;   // bf16 columns of a tile
constexpr int64_t kTileSize = kTile * kTileK;
constexpr int64_t kSumSize = kTile * kTile;
constexpr int kTileBytes = kTileK * sizeof(BFloat16), kSumBytes = kTile * sizeof(float);  // of a tile's row
static_assert(kPanelColumns == 2 * kTile && kGroupRows == kTile);

// One multiplication is 16 output columns by up to 64 rows: a loaded tile of the weight serves four sums. 16 columns
// are 16 streams of memory, which read 100 MB in 3.0 ms; 32 take 3.25 (Xeon with AMX, 2 cores).
constexpr int64_t kTileGroups = 4;

// Up to 512 rows share one pass over the weight, and K is cut evenly into blocks of at most 1024 packed tiles: that
// 1 MB and the 512 KB of sums of 256 columns stay in an L2 of 2 MB. With 256 rows a pass, T = 512 would widen bf16 in
// 12 bits twice (26.5 ms instead of 25.5; plain bf16 takes equally long). Blocks are not shorter: each weight row of a
// block is a page or two whose address must be translated again (T = 64 in 2 blocks: 4.1 ms, in 6: 6.5).
constexpr int64_t kBlockGroups = 32;
constexpr int64_t kBlockTiles = 1024;
constexpr int64_t kBlockPanels = 8;

// Codes pass through L2 too and put the packed rows out: up to 256 rows blocks are half as long there, and they have
// more panels, so that the rows come from L3 less often (fp8_row, T = 64: 4.7 ms; in blocks as above 5.4). With 512
// rows shorter blocks take longer (mxfp4: 33.8 ms; 31.2 as above). The sums are 512 KB at most.
constexpr int64_t kCodesBlockTiles = 512;
constexpr int64_t kLeastCodesBlockSteps = 32;
constexpr int64_t kMaxCodesBlockPanels = 32;

// Rows of a packed tile. With codes 4 or 8 where that is enough: all packed rows are read from L2 for each panel, and
// padded to 16 rows they may be as many lines as the panel's codes (fp8_row, T = 4: 2.05 ms; padded 2.15).
inline int64_t tile_rows(const NormConcatLinear& op) {
  if (op.weight_type == WeightType::kChunks || op.num_rows > 8) return kTile;
  return op.num_rows > 4 ? 8 : 4;
}
inline int64_t packed_tile_size(const NormConcatLinear& op) { return tile_rows(op) * kTileK; }

// Scales that multiply numbers before they are summed: e4m3 scales for 16 columns of e2m1, and ratios of e8m0 scales
// for 32 or 64 columns (project_amx_codes.h).
enum class NumberScales { kNone, kE4M3, kRatios };
inline NumberScales number_scales(const NormConcatLinear& op) {
  const int64_t block = op.scales.block_columns;
  if (block >= op.source.width) return NumberScales::kNone;
  if (op.scales.type == ScaleType::kFloat8E8M0) {
    return block == 32 || block == 64 ? NumberScales::kRatios : NumberScales::kNone;
  }
  const bool is_nvfp4 = op.weight_type == WeightType::kFloat4E2M1 && op.scales.type == ScaleType::kFloat8E4M3;
  return is_nvfp4 && block == 16 && op.scales.block_rows == 1 ? NumberScales::kE4M3 : NumberScales::kNone;
}
// Columns within which packed rows are reordered, or 1. Widening leaves codes in an order of its own (CodeLine); with
// packed rows in the same order, codes need one shuffle less (fp8_row with the weight in cache, D = 64, T = 8: 90 us;
// 80 with that and one test for 128 columns). e2m1 times ratios is reordered within 128 columns, 8-bit codes within 64
// that share a scale.
inline int64_t order_columns(const NormConcatLinear& op) {
  const NumberScales of_numbers = number_scales(op);
  const bool is_byte = op.weight_type == WeightType::kFloat8E4M3 || op.weight_type == WeightType::kInt8;
  if (op.weight_type == WeightType::kFloat4E2M1 && of_numbers == NumberScales::kRatios) return kStripWidth;
  const bool shares = op.scales.block_columns >= op.source.width || op.scales.block_columns % kCacheLine == 0;
  return is_byte && of_numbers == NumberScales::kNone && shares ? kCacheLine : 1;
}
inline int64_t num_steps(const NormConcatLinear& op) {
  return (round_up(op.source.width, order_columns(op)) + kTileK - 1) / kTileK;
}
inline int64_t block_groups(const NormConcatLinear& op) {
  return num_groups(op) < kBlockGroups ? num_groups(op) : kBlockGroups;
}
inline int64_t block_tiles(const NormConcatLinear& op) {
  if (op.weight_type == WeightType::kChunks) return kBlockTiles;
  const int64_t least = kLeastCodesBlockSteps * block_groups(op);
  return least < kCodesBlockTiles ? kCodesBlockTiles : least;
}
inline int64_t block_panels(const NormConcatLinear& op) {
  if (op.weight_type == WeightType::kChunks) return kBlockPanels;
  const int64_t panels = kBlockGroups * kBlockPanels / block_groups(op);
  return panels < kMaxCodesBlockPanels ? panels : kMaxCodesBlockPanels;
}

// A stretch has 128 columns, which are 8 KB of a panel in bf16: two stretches and the packed rows they multiply, 16 KB
// at T = 64, stay in L1 (fp8, T = 8 and 64, in ms: 4 steps 2.0 and 4.3, 8 2.2 and 4.8, 16 2.7 and 5.5).
constexpr int64_t kStretchSteps = 4;

// A load waits for every earlier store to an address with the same lower 12 bits, which may be its own as long as only
// those are compared. While a stretch is multiplied the next one is widened, so what is loaded has one half of each
// page, the lower one for stretches with even numbers, and what is stored has the other one (fp8_row, T = 8 and 64, in
// ms: 2.35 and 5.4; anywhere 2.43 and 5.8). Where a panel has an odd number of stretches, this holds for every other
// panel: the stretches go on in turn in the two halves.
constexpr int64_t kPage = 4096;
constexpr int64_t kHalfPage = kPage / 2;

// Where a byte is in pages of which only the lower (0) or the upper halves (1) are used.
inline int64_t in_half_pages(int64_t half, int64_t byte) {
  return byte / kHalfPage * kPage + half * kHalfPage + byte % kHalfPage;
}

// Packed rows for codes: [stretch][pair of groups][step][group of the pair], or without the pairs where there is one
// group.
inline int64_t pair_groups(const NormConcatLinear& op) { return num_groups(op) > 1 ? 2 : 1; }
inline int64_t num_pairs(const NormConcatLinear& op) { return (num_groups(op) + 1) / 2; }

// Workspace: the fp32 rows (post norm only), the packed rows, the sums of each panel, in bytes from its beginning.
inline int64_t packed_offset(const NormConcatLinear& op) {
  return op.post_norm_gain.data == nullptr ? 0 : round_up(fp32_rows_bytes(op), kPage);
}
inline int64_t amx_packed_bytes(const NormConcatLinear& op) {
  if (op.weight_type == WeightType::kChunks) return num_groups(op) * num_steps(op) * kTileSize * sizeof(BFloat16);
  const int64_t tiles_of_a_half = round_up(num_steps(op), 2 * kStretchSteps) / 2 * num_pairs(op) * pair_groups(op);
  return 2 * round_up(tiles_of_a_half * packed_tile_size(op) * 2, kHalfPage);
}
// Floats. For codes the sums of four groups have both halves of two pages.
inline int64_t panel_sums_size(const NormConcatLinear& op) {
  const int64_t groups = block_groups(op);
  return (op.weight_type == WeightType::kChunks ? groups : round_up(groups, 4)) * 2 * kSumSize;
}
inline int64_t sums_offset(const NormConcatLinear& op, int64_t panel) {
  return round_up(packed_offset(op) + amx_packed_bytes(op), kPage) + panel * panel_sums_size(op) * sizeof(float);
}
inline int64_t amx_workspace(const NormConcatLinear& op) { return sums_offset(op, num_panels(op)); }

inline BFloat16* packed_tile(const NormConcatLinear& op, int64_t group, int64_t step) {
  char* packed = static_cast<char*>(op.workspace) + packed_offset(op);
  int64_t byte = (group * num_steps(op) + step) * kTileSize * sizeof(BFloat16);
  if (op.weight_type != WeightType::kChunks) {
    const int64_t stretch = step / kStretchSteps, groups = pair_groups(op);
    const int64_t steps = (stretch / 2 * num_pairs(op) + group / groups) * kStretchSteps + step % kStretchSteps;
    byte = in_half_pages(stretch % 2, (steps * groups + group % groups) * packed_tile_size(op) * 2);
  }
  return reinterpret_cast<BFloat16*>(packed + byte);
}

// [group][2 halves of 16 columns][16 columns][16 rows]. For codes at T = 64, of the two pairs of groups the first is
// stored and the second loaded in stretches with even numbers, and the other way round in odd ones (in_half_pages).
inline float* panel_sums(const NormConcatLinear& op, int64_t panel) {
  return reinterpret_cast<float*>(static_cast<char*>(op.workspace) + sums_offset(op, panel));
}
inline int64_t group_sums(const NormConcatLinear& op, int64_t group) {
  constexpr int64_t kBytes = 2 * kSumSize * sizeof(float);
  if (op.weight_type == WeightType::kChunks) return group * 2 * kSumSize;
  const int64_t pair = group / 2;
  return in_half_pages((pair + 1) % 2, (pair / 2 * 2 + group % 2) * kBytes) / static_cast<int64_t>(sizeof(float));
}

// Lays the columns of a group out as tiles.
struct TilePacker {
  using Packed = BFloat16;
  const NormConcatLinear& op;
  int64_t group, step;

  TilePacker(const NormConcatLinear& op, int64_t group, int64_t column) : op(op), group(group), step(column / kTileK) {}

  void lay_out(GroupColumns<BFloat16>& columns) {
    const int64_t filled = columns.filled, ordered = order_columns(op);
    columns.fill_up(round_up(filled, ordered > kTileK ? ordered : kTileK));
    for (auto& row : columns.rows) {
      if (ordered == kLineColumns<Float4E2M1>) order_row<Float4E2M1, 1>(row, filled);
      if (ordered == kLineColumns<Int8>) order_row<Int8, 1>(row, filled);
    }
    for (int64_t column = 0; column < columns.filled; column += kTileK) {
      __m512i lines[kTile];
      for (int row = 0; row < kTile; ++row) lines[row] = _mm512_load_si512(&columns.rows[row][column]);
      transpose(lines);
      BFloat16* tile = packed_tile(op, group, step++);
      const int64_t pair_size = 2 * tile_rows(op);
      const __mmask16 there = static_cast<__mmask16>((1u << tile_rows(op)) - 1);
      for (int pair = 0; pair < kTile; ++pair) {
        _mm512_mask_storeu_epi32(tile + pair * pair_size, there, lines[pair]);
      }
    }
  }
};

// Configures the eight tiles: rows of 64 bytes, or of 4 * rows bytes in sums and packed rows. Released at the end: a
// thread that leaves tiles configured makes the kernel save 8 KB at each context switch, and oneDNN configures its own.
class TileSession {
 public:
  explicit TileSession(int64_t rows) {
    struct alignas(kCacheLine) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    for (int i : {0, 1, 2, 3, 6, 7}) config.row_bytes[i] = static_cast<uint16_t>(4 * rows);
    // To GCC before 12.4 and 13.3 the intrinsic reads 8 bytes only (PR target/114098): where this is not inlined it
    // drops what is stored in the others, and the first tile instruction is illegal.
    __asm__ volatile("" : : "m"(config));
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
};

// The cache lines of the weight that a multiplication prefetches: one per step in each of `rows` rows.
struct Ahead {
  const BFloat16* weight;
  int64_t rows;
};

// Up to 64 rows: the weight is prefetched 512 bytes ahead within its own rows (256: 3.4 ms, 512: 3.3, 1024: 3.45) and,
// at their end, from the beginning of the next ones. More rows: the 16 columns are multiplied several times, from L2
// but for the first, and each time prefetches a share of the next 16 (T = 128: 6.3 ms; all in the first 6.9).
constexpr int64_t kAheadSteps = 8;

// sums[group] = (or +=) weight . rows[group], for 16 columns and up to kTileGroups groups of 16 rows.
struct TileProduct {
  const BFloat16* weight;
  int64_t weight_stride;
  const BFloat16* rows;
  int64_t group_stride;
  int64_t steps;
  float* sums;
  bool is_first;
  Ahead ahead;
};

template <int kGroups, bool kStream>
void multiply(const TileProduct& product) {
  const auto [weight, weight_stride, rows, group_stride, steps, sums, is_first, ahead] = product;
  const int64_t weight_bytes = weight_stride * sizeof(BFloat16);
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kSumBytes);
    if constexpr (kGroups > 1) _tile_loadd(1, sums + 2 * kSumSize, kSumBytes);
    if constexpr (kGroups > 2) _tile_loadd(2, sums + 4 * kSumSize, kSumBytes);
    if constexpr (kGroups > 3) _tile_loadd(3, sums + 6 * kSumSize, kSumBytes);
  }
  const BFloat16* fetch = kStream ? weight + kAheadSteps * kTileK : ahead.weight;
  for (int64_t step = 0; step < steps; ++step) {
    if (kStream && step + kAheadSteps == steps) fetch = ahead.weight;
    const int64_t fetch_rows = kStream ? kTile : ahead.rows;
    for (int64_t row = 0; row < fetch_rows; ++row) {
      __builtin_prefetch(fetch + row * weight_stride, 0, kStream ? 3 : 2);
    }
    fetch += kTileK;

    const BFloat16* right = rows + step * kTileSize;
    _tile_loadd(4, weight + step * kTileK, weight_bytes);
    _tile_loadd(5, right, kTileBytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kGroups > 1) {
      _tile_loadd(6, right + group_stride, kTileBytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kGroups > 2) {
      _tile_loadd(7, right + 2 * group_stride, kTileBytes);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kGroups > 3) {
      _tile_loadd(5, right + 3 * group_stride, kTileBytes);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, kSumBytes);
  if constexpr (kGroups > 1) _tile_stored(1, sums + 2 * kSumSize, kSumBytes);
  if constexpr (kGroups > 2) _tile_stored(2, sums + 4 * kSumSize, kSumBytes);
  if constexpr (kGroups > 3) _tile_stored(3, sums + 6 * kSumSize, kSumBytes);
}

template <bool kStream>
void multiply_up_to_four(int64_t groups, const TileProduct& product) {
  switch (groups) {
    case 1: return multiply<1, kStream>(product);
    case 2: return multiply<2, kStream>(product);
    case 3: return multiply<3, kStream>(product);
    default: return multiply<4, kStream>(product);
  }
}

// The part of the operands that stays in the cache together: groups of rows by steps along K, and the panels of the
// weight that they multiply.
struct Block {
  int64_t group, groups;
  int64_t step, steps;
  int64_t panel, panels;

  int64_t end_step() const { return step + steps; }
  int64_t end_panel() const { return panel + panels; }
};

// sums = (or +=) 16 columns of the weight by all rows of the block; `next` is the weight that is read afterwards.
inline void multiply_columns(const NormConcatLinear& op, Block block, const BFloat16* weight, int64_t weight_stride,
                             float* sums, bool is_first, const BFloat16* next) {
  const BFloat16* rows = packed_tile(op, block.group, block.step);
  TileProduct product{weight,      weight_stride, rows,     num_steps(op) * kTileSize,
                      block.steps, sums,          is_first, {next, kTile}};
  if (block.groups <= kTileGroups) return multiply_up_to_four<true>(block.groups, product);
  const int64_t share = (kTile * kTileGroups + block.groups - 1) / block.groups;
  for (int64_t g = 0, row = 0; g < block.groups; g += kTileGroups, row += share) {
    product.rows = rows + g * product.group_stride;
    product.sums = sums + g * 2 * kSumSize;
    product.ahead = {next + row * weight_stride, kTile - row < share ? kTile - row : share};
    multiply_up_to_four<false>(block.groups - g, product);
  }
}

// multiply_columns from a zero-padded copy of the weight, where tiles would reach beyond its last row or the end of a
// row: there may be an unmapped page, or a NaN that zeros of the packed rows would not cancel.
inline void multiply_edge(const NormConcatLinear& op, Block block, const BFloat16* weight, int64_t columns,
                          float* sums) {
  constexpr int64_t kCopySteps = 8, kWidth = kCopySteps * kTileK;
  for (const int64_t end = block.end_step(); block.step < end; block.step += block.steps) {
    block.steps = end - block.step < kCopySteps ? end - block.step : kCopySteps;
    const int64_t left = op.source.width - block.step * kTileK;
    alignas(kCacheLine) BFloat16 copy[kTile * kWidth] = {};
    for (int64_t column = 0; column < columns; ++column) {
      __builtin_memcpy(copy + column * kWidth, weight + column * op.weight_row_stride + block.step * kTileK,
                       (left < kWidth ? left : kWidth) * sizeof(BFloat16));
    }
    multiply_columns(op, block, copy, kWidth, sums, block.step == 0, copy);
  }
}

// Turns a panel's sums into rows of the result: multiplies by the scales of its columns, if given, adds the bias,
// rounds. The two halves of a row are stored together, as a whole cache line: a half-written line would be evicted
// before its other half comes (1.5 ms more at T = 512).
inline void finish_panel(const NormConcatLinear& op, int64_t panel, int64_t group, int64_t groups, const float* sums,
                         const Float* scales) {
  const bool has_post_norm = op.post_norm_gain.data != nullptr;
  for (int64_t g = group; g < group + groups; ++g) {
    const float* of_group = sums + group_sums(op, g - group);
    __m512i lines[2][kTile];
    for (int half = 0; half < 2; ++half) {
      for (int d = 0; d < kTile; ++d) lines[half][d] = _mm512_load_si512(of_group + half * kSumSize + d * kTile);
      transpose(lines[half]);
    }
    for (int64_t i = g * kTile; i < (g + 1) * kTile && i < op.num_rows; ++i) {
      const int64_t column = panel * kPanelColumns;
      const int64_t columns = op.num_columns - column < kPanelColumns ? op.num_columns - column : kPanelColumns;
      float* result = fp32_rows(op) + i * op.num_columns + column;
      BFloat16* out = static_cast<BFloat16*>(op.out) + i * op.out_row_stride + column;
      for_each_vector(columns, [&](int64_t d, auto span) {
        Float value = (Float)lines[d / kTile][i - g * kTile];
        if (scales != nullptr) value *= scales[d / kTile];
        if (op.bias.data != nullptr) value += load_vector<BFloat16>(op.bias, column + d, span);
        if (has_post_norm) {
          store(result + d, value, span);
        } else {
          store(out + d, value, span);
        }
      });
    }
  }
}

// Calls multiply(block, sums of its first panel) for blocks that cover the panels and, along K, are a multiple of
// `unit_steps` long; then finish(panel, first group, groups, sums) for each panel.
template <class Multiply, class Finish>
void for_each_block(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end, int64_t unit_steps,
                    Multiply multiply, Finish finish) {
  const TileSession session(tile_rows(op));
  const int64_t steps = num_steps(op);
  // The next panels reuse the sums, which are finished by then.
  float* sums = panel_sums(op, panel_begin);
  const int64_t max_panels = block_panels(op);
  for (int64_t group = 0; group < num_groups(op); group += kBlockGroups) {
    const int64_t groups = num_groups(op) - group < kBlockGroups ? num_groups(op) - group : kBlockGroups;
    const int64_t blocks = (groups * steps - 1) / block_tiles(op) + 1;
    const int64_t block_steps = round_up((steps + blocks - 1) / blocks, unit_steps);
    for (int64_t begin = panel_begin; begin < panel_end; begin += max_panels) {
      const int64_t panels = panel_end - begin < max_panels ? panel_end - begin : max_panels;
      for (int64_t step = 0; step < steps; step += block_steps) {
        const int64_t count = steps - step < block_steps ? steps - step : block_steps;
        multiply(Block{group, groups, step, count, begin, panels}, sums);
      }
      for (int64_t i = 0; i < panels; ++i) finish(begin + i, group, groups, sums + i * panel_sums_size(op));
    }
  }
}

inline void amx_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const int64_t whole_steps = op.source.width / kTileK;
  const auto weight_at = [&](int64_t column, int64_t step) {
    return static_cast<const BFloat16*>(op.weight) + column * op.weight_row_stride + step * kTileK;
  };
  const auto multiply = [&](const Block& block, float* sums) {
    const int64_t end = block.end_panel() * kPanelColumns;
    for (int64_t column = block.panel * kPanelColumns; column < end && column < op.num_columns; column += kTile) {
      const int64_t count = op.num_columns - column < kTile ? op.num_columns - column : kTile;
      const int64_t whole_end = block.end_step() < whole_steps ? block.end_step() : whole_steps;
      const int64_t direct_end = count < kTile || whole_end < block.step ? block.step : whole_end;
      const int64_t half = column / kTile - 2 * block.panel;
      float* place = sums + half / 2 * panel_sums_size(op) + half % 2 * kSumSize;
      Block part = block;
      if (block.step < direct_end) {
        const bool is_last = column + kTile >= end, goes_on = block.end_step() < num_steps(op);
        const BFloat16* next = !is_last  ? weight_at(column + kTile, block.step)
                               : goes_on ? weight_at(block.panel * kPanelColumns, block.end_step())
                                         : weight_at(end, 0);
        part.steps = direct_end - block.step;
        multiply_columns(op, part, weight_at(column, block.step), op.weight_row_stride, place, block.step == 0, next);
      }
      if (direct_end < block.end_step()) {
        part.step = direct_end;
        part.steps = block.end_step() - direct_end;
        multiply_edge(op, part, weight_at(column, 0), count, place);
      }
    }
  };
  const auto finish = [&](int64_t panel, int64_t group, int64_t groups, const float* sums) {
    finish_panel(op, panel, group, groups, sums, nullptr);
  };
  for_each_block(op, panel_begin, panel_end, 1, multiply, finish);
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
