// The projection in bf16 on the AMX tile unit: out^T = weight . rows^T.
//
// The weight is the left operand because that one is read row-major, as it lies in memory: a tile is 16 weight rows of
// 64 bytes. The rows are the right operand, which wants pairs along K interleaved; the pack pass lays them out so once:
// [16-row group][K*H / 32][16 pairs][16 rows][2], each [16][16][2] block one tile. Rows beyond N and columns beyond K*H
// are zero there.
#pragma once

#include "project_dot.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kTile = 16;               // rows of a tile, and fp32 columns of a sum
constexpr int64_t kTileK = 32;              // bf16 columns of a tile
constexpr int64_t kTileSize = kTile * kTileK;
constexpr int64_t kSumSize = kTile * kTile;
static_assert(kPanelColumns == 2 * kTile);

// 512 columns of fp32 sums for 512 rows are 1 MB: half of the L2, beside 512 KB of packed rows. See amx_project.
constexpr int64_t kBlockPanels = 16;
constexpr int64_t kBlockGroups = 32;

inline int64_t num_groups(const NormConcatLinear& op) { return (op.num_rows + kTile - 1) / kTile; }
inline int64_t num_steps(const NormConcatLinear& op) { return (op.source.width + kTileK - 1) / kTileK; }
inline int64_t block_groups(const NormConcatLinear& op) {
  return num_groups(op) < kBlockGroups ? num_groups(op) : kBlockGroups;
}

// Workspace: the fp32 rows (post norm only), the packed rows, the sums.
inline BFloat16* packed_group(const NormConcatLinear& op, int64_t group) {
  const int64_t before = op.post_norm_gain.data == nullptr ? 0 : fp32_rows_bytes(op);
  void* place = static_cast<char*>(op.workspace) + before;
  return static_cast<BFloat16*>(place) + group * num_steps(op) * kTileSize;
}
// Sums of one panel: [group][2 halves of 16 columns][16 columns][16 rows].
inline float* panel_sums(const NormConcatLinear& op, int64_t panel) {
  void* place = packed_group(op, num_groups(op));
  return static_cast<float*>(place) + panel * block_groups(op) * 2 * kSumSize;
}
inline int64_t amx_workspace(const NormConcatLinear& op) {
  return reinterpret_cast<char*>(panel_sums(op, num_panels(op))) - static_cast<char*>(op.workspace);
}

// Transposes 16x16 lanes of 32 bits: each stage swaps the off-diagonal quarters of every block of 2 * stride.
inline void transpose(__m512i (&rows)[kTile]) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int stride = 1; stride < kTile; stride *= 2) {
    const __mmask16 right = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(stride));
    const __m512i upper = _mm512_mask_add_epi32(lane, right, lane, _mm512_set1_epi32(kTile - stride));
    const __m512i lower = _mm512_add_epi32(upper, _mm512_set1_epi32(stride));
#pragma GCC unroll 16
    for (int row = 0; row < kTile; ++row) {
      if (row & stride) continue;
      const __m512i a = rows[row], b = rows[row + stride];
      rows[row] = _mm512_permutex2var_epi32(a, upper, b);
      rows[row + stride] = _mm512_permutex2var_epi32(a, lower, b);
    }
  }
}

// Collects the normed columns of 16 rows, whatever the widths of the chunks, and lays every full tile out.
struct TilePacker {
  static constexpr int64_t kColumns = 16 * kTileK;

  BFloat16* tiles;
  int64_t filled = 0;
  alignas(kCacheLine) BFloat16 rows[kTile][kColumns];

  explicit TilePacker(BFloat16* tiles) : tiles(tiles) {}

  void flush() {
    for (int64_t row = 0; row < kTile; ++row) {
      const int64_t pad = round_up(filled, kTileK) - filled;
      __builtin_memset(&rows[row][filled], 0, pad * sizeof(BFloat16));
    }
    for (int64_t column = 0; column < filled; column += kTileK) {
      __m512i lines[kTile];
      for (int row = 0; row < kTile; ++row) lines[row] = _mm512_load_si512(&rows[row][column]);
      transpose(lines);
      for (int pair = 0; pair < kTile; ++pair) _mm512_store_si512(tiles + pair * kTileK, lines[pair]);
      tiles += kTileSize;
    }
    filled = 0;
  }
};

inline void amx_pack_group(const NormConcatLinear& op, int64_t group) {
  const NormConcat& source = op.source;
  const int64_t first = group * kTile;
  const int64_t count = op.num_rows - first < kTile ? op.num_rows - first : kTile;

  TilePacker packer(packed_group(op, group));
  __builtin_memset(packer.rows[count], 0, (kTile - count) * sizeof packer.rows[0]);

  float of_concat[kTile] = {};
  for (int64_t i = 0; i < count && source.norm == Norm::kConcat; ++i) {
    of_concat[i] = concat_rstd<BFloat16>(source, first + i);
  }
  for (int64_t k = 0; k < source.num_chunks; ++k) {
    const Chunk& chunk = source.chunks[k];
    int64_t row[kTile];
    float rstd[kTile];
    for (int64_t i = 0; i < count; ++i) {
      row[i] = source_row(chunk, first + i);
      rstd[i] = chunk_rstd<BFloat16>(source, chunk, row[i], of_concat[i]);
    }
    for (int64_t begin = 0; begin < chunk.width;) {
      const int64_t room = TilePacker::kColumns - packer.filled;
      const int64_t end = chunk.width - begin < room ? chunk.width : begin + room;
      for (int64_t i = 0; i < count; ++i) {
        BFloat16* columns = packer.rows[i] + packer.filled;
        norm_columns<BFloat16>(chunk, row[i], rstd[i], source.norm_offset, begin, end,
                               [columns](int64_t h, Float value, auto span) { store(columns + h, value, span); });
      }
      packer.filled += end - begin;
      begin = end;
      if (packer.filled == TilePacker::kColumns) packer.flush();
    }
  }
  packer.flush();
}

// All eight tiles 16 x 64 bytes while it lives. Released at the end: a thread that leaves tiles configured makes the
// kernel save 8 KB at each context switch, and oneDNN configures its own.
class TileSession {
 public:
  TileSession() {
    struct alignas(kCacheLine) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
};

// 32 rows of the weight over some steps along K, in memory order or copied to [step][32][32].
struct WeightBlock {
  const BFloat16* data;
  int64_t row_stride;
  int64_t step_stride;
};

// The block that comes next, fetched into L2 row after row while this one is multiplied, `lines` at a time.
struct Prefetch {
  const char* row;
  int64_t row_stride;
  int64_t row_lines;
  int64_t line;
  int64_t lines_left;

  void fetch(int64_t lines) {
    for (; lines > 0 && lines_left > 0; --lines, --lines_left) {
      _mm_prefetch(row + line * kCacheLine, _MM_HINT_T1);
      if (++line == row_lines) line = 0, row += row_stride;
    }
  }
};

// sums[group][half] += weight[half] . rows[group] for 32 columns and 16 or 32 rows: 2x2 tiles of sums, so that each
// loaded tile is used twice. With kKeep the weight's tiles are also stored to `kept`, from where the next rows read
// them: in the weight itself, rows 24 KB apart share one L1 set of 12 ways.
template <int kGroups, bool kKeep>
void multiply(WeightBlock weight, const BFloat16* rows, int64_t group_stride, int64_t steps, float* sums, bool first,
              BFloat16* kept, Prefetch& ahead, int64_t lines) {
  constexpr int kSumBytes = kTile * sizeof(float), kTileBytes = kTileK * sizeof(BFloat16);
  const int64_t weight_bytes = weight.row_stride * sizeof(BFloat16);
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kSumBytes);
    _tile_loadd(1, sums + kSumSize, kSumBytes);
    if constexpr (kGroups == 2) {
      _tile_loadd(2, sums + 2 * kSumSize, kSumBytes);
      _tile_loadd(3, sums + 3 * kSumSize, kSumBytes);
    }
  }
  for (int64_t step = 0; step < steps; ++step) {
    const BFloat16* upper = weight.data + step * weight.step_stride;
    const BFloat16* lower = upper + kTile * weight.row_stride;
    const BFloat16* right = rows + step * kTileSize;
    _tile_loadd(6, right, kTileBytes);
    if constexpr (kGroups == 2) _tile_loadd(7, right + group_stride, kTileBytes);
    ahead.fetch(lines);
    _tile_loadd(4, upper, weight_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kGroups == 2) _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, lower, weight_bytes);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kGroups == 2) _tile_dpbf16ps(3, 5, 7);
    if constexpr (kKeep) {
      _tile_stored(4, kept + step * 2 * kTileSize, kTileBytes);
      _tile_stored(5, kept + step * 2 * kTileSize + kTileSize, kTileBytes);
    }
  }
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kSumSize, kSumBytes);
  if constexpr (kGroups == 2) {
    _tile_stored(2, sums + 2 * kSumSize, kSumBytes);
    _tile_stored(3, sums + 3 * kSumSize, kSumBytes);
  }
}

constexpr int64_t kAmxBlockSteps = 16;

// Copies the end of the weight, zero-padded: a tile load would read 32 rows of 64 bytes, some beyond the last page.
inline void copy_weight(const BFloat16* weight, int64_t row_stride, int64_t rows, int64_t width, BFloat16* kept) {
  __builtin_memset(kept, 0, round_up(width, kTileK) * kPanelColumns * sizeof(BFloat16));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < width; k += kTileK) {
      const int64_t count = width - k < kTileK ? width - k : kTileK;
      __builtin_memcpy(kept + k * kPanelColumns + row * kTileK, weight + row * row_stride + k, count * sizeof(BFloat16));
    }
  }
}

// One panel over one block of K, all row groups of the block.
inline void multiply_panel(const NormConcatLinear& op, int64_t panel, int64_t step, int64_t steps, int64_t group,
                           int64_t groups, float* sums, Prefetch ahead) {
  alignas(kCacheLine) BFloat16 kept[kAmxBlockSteps * 2 * kTileSize];
  const BFloat16* data = static_cast<const BFloat16*>(op.weight) + panel * kPanelColumns * op.weight_row_stride +
                         step * kTileK;
  WeightBlock weight{data, op.weight_row_stride, kTileK};
  const WeightBlock kept_weight{kept, kTileK, 2 * kTileSize};
  const int64_t columns = op.num_columns - panel * kPanelColumns;
  const int64_t width = op.source.width - step * kTileK;
  if (columns < kPanelColumns || width < steps * kTileK) {
    copy_weight(data, op.weight_row_stride, columns < kPanelColumns ? columns : kPanelColumns,
                width < steps * kTileK ? width : steps * kTileK, kept);
    weight = kept_weight;
  }

  const int64_t group_stride = num_steps(op) * kTileSize;
  const BFloat16* rows = packed_group(op, group) + step * kTileSize;
  const int64_t pairs = (groups + 1) / 2;
  const int64_t lines = (2 * kTile + pairs - 1) / pairs;
  const bool first = step == 0;
  for (int64_t g = 0; g < groups; g += 2) {
    const BFloat16* right = rows + g * group_stride;
    float* place = sums + g * 2 * kSumSize;
    if (g + 1 == groups) {
      multiply<1, false>(weight, right, group_stride, steps, place, first, kept, ahead, lines);
    } else if (g == 0 && groups > 2 && weight.data != kept) {
      multiply<2, true>(weight, right, group_stride, steps, place, first, kept, ahead, lines);
      weight = kept_weight;
    } else {
      multiply<2, false>(weight, right, group_stride, steps, place, first, kept, ahead, lines);
    }
  }
}

// Turns a panel's sums into rows of the result: adds the bias, rounds.
inline void finish_panel(const NormConcatLinear& op, int64_t panel, int64_t group, int64_t groups, const float* sums) {
  const bool has_post_norm = op.post_norm_gain.data != nullptr;
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t column = panel * kPanelColumns + half * kTile;
    const int64_t columns = op.num_columns - column;
    if (columns <= 0) return;
    const auto finish = [&](auto span) {
      const Float bias = op.bias.data == nullptr ? Float{} : load_vector<BFloat16>(op.bias, column, span);
      for (int64_t g = 0; g < groups; ++g) {
        __m512i lines[kTile];
        for (int d = 0; d < kTile; ++d) lines[d] = _mm512_load_si512(sums + (2 * g + half) * kSumSize + d * kTile);
        transpose(lines);
        const int64_t first = (group + g) * kTile;
        for (int64_t i = first; i < first + kTile && i < op.num_rows; ++i) {
          const Float value = (Float)lines[i - first] + bias;
          if (has_post_norm) {
            store(fp32_rows(op) + i * op.num_columns + column, value, span);
          } else {
            store(static_cast<BFloat16*>(op.out) + i * op.out_row_stride + column, value, span);
          }
        }
      }
    };
    if (columns >= kTile) {
      finish(Whole{});
    } else {
      finish(Part{columns});
    }
  }
}

inline void amx_project(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const TileSession session;
  const int64_t steps = num_steps(op);
  const auto weight_at = [&](int64_t panel, int64_t step) {
    return static_cast<const char*>(op.weight) +
           (panel * kPanelColumns * op.weight_row_stride + step * kTileK) * sizeof(BFloat16);
  };
  for (int64_t group = 0; group < num_groups(op); group += kBlockGroups) {
    const int64_t groups = num_groups(op) - group < kBlockGroups ? num_groups(op) - group : kBlockGroups;
    for (int64_t begin = panel_begin; begin < panel_end; begin += kBlockPanels) {
      const int64_t end = begin + kBlockPanels < panel_end ? begin + kBlockPanels : panel_end;
      const auto sums = [&](int64_t panel) { return panel_sums(op, panel_begin + panel - begin); };
      for (int64_t step = 0; step < steps; step += kAmxBlockSteps) {
        const int64_t count = steps - step < kAmxBlockSteps ? steps - step : kAmxBlockSteps;
        for (int64_t panel = begin; panel < end; ++panel) {
          const char* next = panel + 1 < end               ? weight_at(panel + 1, step)
                             : step + kAmxBlockSteps < steps ? weight_at(begin, step + kAmxBlockSteps)
                             : end < panel_end             ? weight_at(end, 0)
                                                           : nullptr;
          const Prefetch ahead{next, static_cast<int64_t>(op.weight_row_stride * sizeof(BFloat16)), kAmxBlockSteps, 0,
                               next == nullptr ? 0 : kAmxBlockSteps * kPanelColumns};
          multiply_panel(op, panel, step, count, group, groups, sums(panel), ahead);
        }
      }
      for (int64_t panel = begin; panel < end; ++panel) finish_panel(op, panel, group, groups, sums(panel));
    }
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
