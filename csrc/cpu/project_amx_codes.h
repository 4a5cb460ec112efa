// The projection of a quantized weight by rows of bf16 on the AMX tile unit: out^T = weight . rows^T.
//
// A panel of codes is widened to bf16 a stretch at a time, in the layout of tiles, and is the left operand from L1.
// While one stretch is multiplied the next one is widened: the tile unit and the vector units run at the same time. Two
// tiles of the panel by two of the rows are four products for four loads.
//
// A sum over the columns that share a scale, at most 128 of them, is multiplied by it and added to the fp32 total, as
// in project_strips.h. With one scale a row the totals are the sums, and are scaled when they are finished. With
// fewer than 128 columns a sum costs more than its products (mxfp4, T = 64: 7.2 ms), so there the numbers are scaled
// (3.6 ms). bf16 represents the products of e2m1 and e4m3, and those of any number and a power of two: scales of e8m0
// become ratios to the largest of their row, which scales its sums.
#pragma once

#include "amx_lines.h"
#include "strips.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

inline bool amx_reads_codes(const NormConcatLinear& op) {
  return scales_rows(op) || number_scales(op) == NumberScales::kE4M3 || op.scales.block_columns % kTileK == 0;
}

// Two stretches of a panel in bf16, zero past the end of its rows, each in one half of four pages (in_half_pages). Rows
// past the weight's last one keep old values: nobody reads their sums.
struct Stretches {
  alignas(kPage) BFloat16 tiles[kStretchSteps][2][2][kTile][kTileK] = {};

  BFloat16* operator[](int64_t half) { return tiles[0][half][0][0]; }
};

// Widens a stretch, row by row while another one is multiplied, and prefetches the codes of a later one.
template <class Code, class Lines>
class Widening {
 public:
  Widening(const NormConcatLinear& op, const Lines& lines, Place place, Place later, BFloat16* stretch)
      : lines_(lines),
        row_stride_(op.weight_row_stride),
        left_(op.source.width - place.step * kTileK),
        tiles_(stretch) {
    const auto* weight = static_cast<const uint8_t*>(op.weight);
    const int64_t columns = op.num_columns - place.panel * kPanelColumns;
    const auto codes_at = [&](Place from) {
      return weight + from.panel * kPanelColumns * op.weight_row_stride + bytes_of<Code>(from.step * kTileK);
    };
    codes_ = codes_at(place);
    ahead_ = codes_at(later);
    rows_ = columns < kPanelColumns ? columns : kPanelColumns;
  }

  void widen_until(int64_t row) {
    widen_rare();
    if (row > rows_) row = rows_;
    if (left_ >= kStretch) {
      widen_rows(row, std::true_type{});
    } else {
      widen_rows(row, std::false_type{});
    }
  }
  // For the last rows: those of earlier calls that have rare numbers are widened again in the next call.
  void finish(int64_t row) {
    widen_until(row);
    widen_rare();
  }

 private:
  // Rows with rare numbers are asked for only now, when the answer has long been known: a wrong guess, which there is
  // for one in 70 rows of normally distributed numbers, then costs little of what runs beside (fp8_row, T = 64: 4.8 ms;
  // asked at once 5.4).
  void widen_rare() {
    if (rare_ != 0) widen_rare_rows();
  }
  [[gnu::noinline]] void widen_rare_rows() {
    for (; rare_ != 0; rare_ &= rare_ - 1) {
      const int64_t row = __builtin_ctz(rare_);
      __m512i lines[kStretchSteps] = {};
      lines_.template widen<true>(codes_ + row * row_stride_, left_ < kStretch ? left_ : kStretch, row, lines);
      store_lines(tiles_ + row * kTileK, lines);
    }
  }
  static void store_lines(BFloat16* line, const __m512i (&lines)[kStretchSteps]) {
    unrolled<kStretchSteps>([&](auto step) { _mm512_store_si512(line + step * kStepSize, lines[step]); });
  }
  // The members are copied: otherwise a store of a line might change them, and they would be loaded anew for each row
  // (fp8_row, T = 8: 2.11 ms; copied 2.01).
  template <class IsWhole>
  [[gnu::always_inline]] void widen_rows(int64_t end, IsWhole) {
    const int64_t stride = row_stride_, left = IsWhole::value ? kStretch : left_;
    const uint8_t *codes = codes_ + row_ * stride, *ahead = ahead_ + row_ * stride;
    BFloat16* line = tiles_ + row_ * kTileK;
    uint32_t rare = 0;
    for (int64_t row = row_; row < end; ++row, codes += stride, ahead += stride, line += kTileK) {
      for (int64_t byte = 0; byte < bytes_of<Code>(kStretch); byte += kCacheLine) {
        __builtin_prefetch(ahead + byte);
      }
      __m512i lines[kStretchSteps] = {};
      const bool is_rare = lines_.template widen<false>(codes, left, row, lines);
      rare |= static_cast<uint32_t>(is_rare) << row;
      store_lines(line, lines);
      if constexpr (std::is_same_v<Lines, ExactLines>) lines_.put_exceptions(row, line);
    }
    rare_ = rare;
    if (end > row_) row_ = end;
  }

  const Lines lines_;
  int64_t row_stride_, left_, rows_, row_ = 0;
  uint32_t rare_ = 0;  // a bit for each row
  const uint8_t *codes_, *ahead_;
  BFloat16* tiles_;
};

// Tiles 0 and 1 are the sums of a panel's two halves by a group of rows, 2 and 3 those by the next group.
constexpr int64_t kSumsOfGroup = kPage / sizeof(float);  // from a group's to those of the next one (group_sums)
template <bool kTwoGroups>
void load_sums(const float* sums) {
  _tile_loadd(0, sums, kSumBytes);
  _tile_loadd(1, sums + kSumSize, kSumBytes);
  if constexpr (kTwoGroups) _tile_loadd(2, sums + kSumsOfGroup, kSumBytes);
  if constexpr (kTwoGroups) _tile_loadd(3, sums + kSumsOfGroup + kSumSize, kSumBytes);
}
template <bool kTwoGroups>
void store_sums(float* sums) {
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kSumSize, kSumBytes);
  if constexpr (kTwoGroups) _tile_stored(2, sums + kSumsOfGroup, kSumBytes);
  if constexpr (kTwoGroups) _tile_stored(3, sums + kSumsOfGroup + kSumSize, kSumBytes);
}
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Those sums += panel . rows, for some steps of a stretch. beside() runs between the loads and the products of a step:
// its stores then precede the products, for which the next step's loads need not wait (int8, T = 64: 3.5 ms; else 3.6).
template <bool kTwoGroups, class Beside>
void multiply_stretch(const BFloat16* panel, const BFloat16* rows, const int64_t* row_steps, int64_t steps,
                      int64_t row_bytes, Beside beside) {
  for (int64_t step = 0; step < steps; ++step, panel += kStepSize) {
    const BFloat16* right = rows + row_steps[step];
    _tile_loadd(4, panel, kTileBytes);
    _tile_loadd(6, right, row_bytes);
    _tile_loadd(5, panel + kTileSize, kTileBytes);
    if constexpr (kTwoGroups) _tile_loadd(7, right + kTileSize, kTileBytes);
    beside();
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kTwoGroups) {
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// totals = (or +=) the sums of a panel by some groups, each column times its scale.
inline void add_scaled(int64_t groups, const float* sums, const float* scales, bool first, float* totals) {
  for (int64_t group = 0; group < groups; ++group, sums += kSumsOfGroup, totals += kSumsOfGroup) {
    for (int64_t column = 0; column < kPanelColumns; ++column) {
      Float total = load(sums + column * kTile, Whole{}) * scales[column];
      if (!first) total += load(totals + column * kTile, Whole{});
      store(totals + column * kTile, total, Whole{});
    }
  }
}

// Sums in memory that add_scaled has yet to take. It does so beside the next products: right after their own it would
// wait for the tile unit (fp8_block128, T = 8 and 16: 1.93 and 1.99 ms; right after 2.09 and 2.11).
struct UnscaledSums {
  // Zero at first: the unit stores nothing for rows that a packed tile lacks, but what is there is scaled all the same,
  // and slowly if it is subnormal (fp8_block128, T = 8, with what was on the stack: 10.7 ms instead of 2.2).
  alignas(kCacheLine) float sums[kSumsOfGroup + 2 * kSumSize] = {};
  Float scales[kStripVectors];
  int64_t groups = 0;
  bool first;
  float* totals;

  void add() {
    if (groups > 0) add_scaled(groups, sums, reinterpret_cast<const float*>(scales), first, totals);
    groups = 0;
  }
};

// The place `steps` after one of the block: past the end of a panel, in the one that is widened next.
inline Place place_behind(const NormConcatLinear& op, const Block& block, Place place, int64_t steps) {
  place.step += steps;
  if (place.step < block.end_step()) return place;
  const int64_t step = place.step - block.end_step();
  if (place.panel + 1 < block.end_panel()) return {place.panel + 1, block.step + step};
  if (block.end_step() < num_steps(op)) return {block.panel, block.end_step() + step};
  return {block.end_panel(), step};
}

// The products of the panels of a block, a stretch of codes at a time.
template <class Code, class Lines>
class StretchProducts {
 public:
  explicit StretchProducts(const NormConcatLinear& op)
      : op_(op), shared_(op.scales.block_columns), row_bytes_(4 * tile_rows(op)) {
    for (int64_t i = 0; i < kStretchSteps; ++i) row_steps_[i] = packed_tile(op, 0, i) - packed_tile(op, 0, 0);
  }

  // Adds the block's products to the sums of its panels.
  void multiply(const Block& block, float* block_sums) {
    turn_ = 0;
    widening(block, {block.panel, block.step}, stretches_[0]).finish(kPanelColumns);
    for (int64_t panel = block.panel; panel < block.end_panel(); ++panel) {
      float* totals = block_sums + (panel - block.panel) * panel_sums_size(op_);
      for (int64_t step = block.step; step < block.end_step(); step += kStretchSteps, turn_ ^= 1) {
        multiply_stretch_of(block, {panel, step}, totals);
      }
      unscaled_.add();
    }
  }

  // Turns the sums of one of the block's panels, the one at this index, into the result.
  void finish(int64_t panel, int64_t index, int64_t group, int64_t groups, const float* totals) const {
    const Panel& scales = panels_[index];
    if (!scales.has_whole_sums) return finish_panel(op_, panel, group, groups, totals, nullptr);
    Float of_columns[1][kStripVectors];
    scales.read_whole(of_columns);
    finish_panel(op_, panel, group, groups, totals, of_columns[0]);
  }

 private:
  using Panel = typename Lines::Panel;
  static constexpr bool kByRatios = std::is_same_v<Lines, RatioLines<Code>>;
  static constexpr int64_t kStretchBytes = bytes_of<Code>(kStretch);
  static constexpr int64_t kAheadSteps = (kAheadBytes + kStretchBytes - 1) / kStretchBytes * kStretchSteps;

  static bool is_inside(const Block& block, Place place) {
    return place.panel < block.end_panel() && place.step < block.end_step();
  }
  Widening<Code, Lines> widening(const Block& block, Place place, BFloat16* stretch) {
    // Past the last panel nothing is widened.
    Panel& panel = panels_[is_inside(block, place) ? place.panel - block.panel : 0];
    if (place.step == 0 && is_inside(block, place)) panel = Panel(op_, place.panel);
    const Place later = place_behind(op_, block, place, kAheadSteps);
    return Widening<Code, Lines>(op_, Lines(op_, panel, place), place, later, stretch);
  }

  // A stretch is multiplied while the next one is widened.
  void multiply_stretch_of(const Block& block, Place here, float* totals) {
    const int64_t left_steps = block.end_step() - here.step;
    const int64_t steps = left_steps < kStretchSteps ? left_steps : kStretchSteps;
    const Place next = place_behind(op_, block, here, steps);
    Widening<Code, Lines> widen_next = widening(block, next, stretches_[turn_ ^ 1]);
    const int64_t next_rows = is_inside(block, next) ? kPanelColumns : 0;
    const int64_t products = steps * num_pairs(block), share = (next_rows + products - 1) / products;
    int64_t done = 0;
    const auto beside = [&] { widen_next.widen_until(done += share); };
    const Panel& scales = panels_[here.panel - block.panel];
    if (scales.has_whole_sums) {
      add_steps(block, here, steps, nullptr, here.step == 0, totals, beside);
    } else if constexpr (kByRatios) {
      const int64_t left = op_.source.width - here.step * kTileK, columns = left < kStretch ? left : kStretch;
      for (int64_t i = 0; i * shared_ < columns; ++i) {
        Widening<Code, Lines>(op_, Lines(op_, i), here, here, stretches_[turn_]).finish(kPanelColumns);
        Float of_sums[1][kStripVectors];
        scales.read((here.step + i * block_steps()) * kTileK / shared_, 1, of_sums);
        add_steps(block, here, steps, of_sums[0], here.step + i == 0, totals, [] {});
      }
    } else {
      for (int64_t part = here.step; part < here.step + steps; part += block_steps()) {
        const int64_t left = here.step + steps - part, part_steps = left < block_steps() ? left : block_steps();
        Float of_sums[1][kStripVectors];
        scales.read(part * kTileK / shared_, 1, of_sums);
        add_steps(block, {here.panel, part}, part_steps, of_sums[0], part == 0, totals, beside);
      }
    }
    widen_next.finish(next_rows);
  }

  // The totals of a panel = (or +=) some steps of a stretch by all groups, times the scales if given. Without scales
  // the sums of up to two groups stay in their tiles: stretches take the groups forwards and backwards in turn, so that
  // the last ones of a stretch are the first ones of the next (fp8_row, T = 64: 4.2 ms; otherwise 4.4).
  template <class Beside>
  [[gnu::always_inline]] void add_steps(const Block& block, Place place, int64_t steps, const Float* scales, bool first,
                                        float* totals, Beside beside) {
    const bool begins = place.step == block.step, ends = place.step + steps == block.end_step();
    const int64_t pairs = num_pairs(block);
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t g = 2 * (turn_ == 0 ? i : pairs - 1 - i);
      const BFloat16* numbers = stretches_[turn_] + place.step % kStretchSteps * kStepSize;
      const BFloat16* rows = packed_tile(op_, block.group + g, place.step / kStretchSteps * kStretchSteps);
      float* total = totals + group_sums(op_, g);
      const auto run = [&](auto two_groups) {
        constexpr bool kTwoGroups = decltype(two_groups)::value;
        if (first || scales != nullptr) {
          zero_sums();
        } else if (i > 0 || begins) {
          load_sums<kTwoGroups>(total);
        }
        const auto beside_and_add = [&] {
          beside();
          unscaled_.add();
        };
        multiply_stretch<kTwoGroups>(numbers, rows, row_steps_ + place.step % kStretchSteps, steps, row_bytes_,
                                     beside_and_add);
        if (scales != nullptr) {
          store_sums<kTwoGroups>(unscaled_.sums);
          __builtin_memcpy(unscaled_.scales, scales, sizeof unscaled_.scales);
          unscaled_.groups = kTwoGroups ? 2 : 1;
          unscaled_.first = first;
          unscaled_.totals = total;
        } else if (i + 1 < pairs || ends) {
          store_sums<kTwoGroups>(total);
        }
      };
      g + 1 < block.groups ? run(std::true_type{}) : run(std::false_type{});
    }
  }

  static int64_t num_pairs(const Block& block) { return (block.groups + 1) / 2; }
  int64_t block_steps() const { return shared_ > kStretch ? kStretchSteps : shared_ / kTileK; }

  const NormConcatLinear& op_;
  const int64_t shared_;              // columns that share a scale
  int64_t row_steps_[kStretchSteps];  // where a step's packed rows are, from those of the stretch's first step
  const int64_t row_bytes_;
  Stretches stretches_;
  int64_t turn_ = 0;  // which of the two stretches is multiplied
  Panel panels_[kMaxCodesBlockPanels];
  UnscaledSums unscaled_;
};

template <class Code, class Lines>
void amx_project_stretches(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  StretchProducts<Code, Lines> products(op);
  const auto multiply = [&](const Block& block, float* sums) { products.multiply(block, sums); };
  const auto finish = [&](int64_t panel, int64_t group, int64_t groups, const float* totals) {
    products.finish(panel, (panel - panel_begin) % block_panels(op), group, groups, totals);
  };
  for_each_block(op, panel_begin, panel_end, 2 * kStretchSteps, multiply, finish);
}

inline void amx_project_bf16_12bit(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  amx_project_stretches<BFloat16In12, ExactLines>(op, panel_begin, panel_end);
}

template <class Code>
void amx_project_codes(const NormConcatLinear& op, int64_t panel_begin, int64_t panel_end) {
  const NumberScales of_numbers = number_scales(op);
  if constexpr (std::is_same_v<Code, Float4E2M1>) {
    if (of_numbers == NumberScales::kE4M3) return amx_project_stretches<Code, ScaledLines>(op, panel_begin, panel_end);
  }
  if (of_numbers == NumberScales::kRatios) {
    return amx_project_stretches<Code, RatioLines<Code>>(op, panel_begin, panel_end);
  }
  if (order_columns(op) > 1) return amx_project_stretches<Code, PlainLines<Code, false>>(op, panel_begin, panel_end);
  amx_project_stretches<Code, PlainLines<Code, true>>(op, panel_begin, panel_end);
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
