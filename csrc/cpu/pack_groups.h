// Packs rows 16 at a time, a group, for the kernels that multiply them side by side (project_lanes.h, project_amx.h).
#pragma once

#include <type_traits>

#include "project_dot.h"

#if defined(__AVX512F__)
namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr int64_t kGroupRows = 16;
static_assert(kGroupRows == kLanes);

inline int64_t num_groups(const NormConcatLinear& op) { return (op.num_rows + kGroupRows - 1) / kGroupRows; }

// The unit of packing is a part of the columns of a group: up to 16 rows are one group, and one thread would pack them
// (two threads, D = 64, T = 4, 8 and 16, bf16 in us: 115, 125 and 146; one thread 137, 154 and 184).
constexpr int64_t kPartColumns = 512;
inline int64_t pack_parts(const NormConcatLinear& op) { return (op.source.width - 1) / kPartColumns + 1; }

// The normed columns of a group that come next, whatever the widths of the chunks.
template <class Packed>
struct GroupColumns {
  alignas(kCacheLine) Packed rows[kGroupRows][kPartColumns];
  int64_t filled = 0;

  // Fills all rows up with zeros.
  void fill_up(int64_t end) {
    for (auto& row : rows) __builtin_memset(row + filled, 0, (end - filled) * sizeof(Packed));
    filled = end;
  }
};

// Columns [begin, end) of a group. Both are multiples of kPartColumns, but that `end` may be past the width. A Packer
// lays out kPartColumns at a time, at the end fewer.
template <class T, class Packer>
void pack_columns(const NormConcatLinear& op, int64_t group, int64_t begin, int64_t end) {
  using Packed = typename Packer::Packed;
  const Concat& source = op.source;
  const int64_t first = group * kGroupRows;
  const int64_t count = op.num_rows - first < kGroupRows ? op.num_rows - first : kGroupRows;

  Packer packer(op, group, begin);
  GroupColumns<Packed> columns;
  __builtin_memset(columns.rows[count], 0, (kGroupRows - count) * sizeof columns.rows[0]);

  float of_concat[kGroupRows] = {};
  for (int64_t i = 0; i < count; ++i) of_concat[i] = concat_rstd<T>(source, first + i);
  for (int64_t k = 0; k < source.num_chunks; ++k) {
    const Chunk& chunk = source.chunks[k];
    const int64_t chunk_end = chunk.column + chunk.width;
    if (chunk_end <= begin || chunk.column >= end) continue;
    int64_t row[kGroupRows];
    float rstd[kGroupRows];
    for (int64_t i = 0; i < count; ++i) {
      row[i] = source_row(chunk, first + i);
      rstd[i] = chunk_rstd<T>(source, chunk, row[i], of_concat[i]);
    }
    const int64_t last = (chunk_end < end ? chunk_end : end) - chunk.column;
    for (int64_t from = begin > chunk.column ? begin - chunk.column : 0; from < last;) {
      const int64_t room = kPartColumns - columns.filled;
      const int64_t to = last - from < room ? last : from + room;
      for (int64_t i = 0; i < count; ++i) {
        Packed* place = columns.rows[i] + columns.filled;
        norm_columns<T>(chunk, row[i], rstd[i], source.norm_offset, from, to,
                        [place](int64_t h, Float value, auto span) {
                          // Where rows are multiplied in fp32 they are rounded to their own type first.
                          if constexpr (!std::is_same_v<Packed, T>) value = round_to(value, T{});
                          store(place + h, value, span);
                        });
      }
      columns.filled += to - from;
      from = to;
      if (columns.filled < kPartColumns) continue;
      packer.lay_out(columns);
      columns.filled = 0;
    }
  }
  packer.lay_out(columns);
}

// Units [begin, end): those of one group that follow one another are packed together, with one statistic of a chunk.
template <class T, class Packer>
void pack_groups(const NormConcatLinear& op, int64_t begin, int64_t end) {
  const int64_t parts = pack_parts(op);
  while (begin < end) {
    const int64_t group = begin / parts, next = (group + 1) * parts < end ? (group + 1) * parts : end;
    pack_columns<T, Packer>(op, group, (begin - group * parts) * kPartColumns, (next - group * parts) * kPartColumns);
    begin = next;
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
#endif
