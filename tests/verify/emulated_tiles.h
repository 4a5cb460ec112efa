// Emulates the AMX tile unit with AVX-512-BF16, for processors that have the latter alone. Force-included, it replaces
// the intrinsics. A product is vdpbf16ps, whose order, rounding and denormals are those of tdpbf16ps (Intel's manual,
// both: denormals are zero, sums rounded to even, the even element of a pair first).
#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated_tiles {

struct Unit {
  alignas(64) uint8_t tiles[8][16][64];
  int rows[8], row_bytes[8];
  bool is_configured = false;
};
inline thread_local Unit unit;

inline void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}

// A tile loses its contents, which become NaN here.
inline void load_config(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  expect(bytes[0] == 1, "palette 1");
  for (int tile = 0; tile < 8; ++tile) {
    unit.rows[tile] = bytes[48 + tile];
    unit.row_bytes[tile] = bytes[16 + 2 * tile] | bytes[17 + 2 * tile] << 8;
    const int rows = unit.rows[tile], row_bytes = unit.row_bytes[tile];
    expect(rows > 0 && rows <= 16, "1 to 16 rows of a tile");
    expect(row_bytes > 0 && row_bytes <= 64 && row_bytes % 4 == 0, "rows of 1 to 16 words");
  }
  unit.is_configured = true;
  std::memset(unit.tiles, 0xff, sizeof unit.tiles);
}
inline void release() { unit.is_configured = false; }

inline uint8_t (&rows_of(int tile))[16][64] {
  expect(unit.is_configured, "an instruction without a configuration is a fault");
  return unit.tiles[tile];
}
inline void zero(int tile) { std::memset(rows_of(tile), 0, sizeof unit.tiles[0]); }
// What is written to a tile is zero beyond its configured size.
inline void load(int tile, const void* base, int64_t stride) {
  zero(tile);
  for (int row = 0; row < unit.rows[tile]; ++row) {
    std::memcpy(unit.tiles[tile][row], static_cast<const uint8_t*>(base) + row * stride, unit.row_bytes[tile]);
  }
}
inline void store(int tile, void* base, int64_t stride) {
  const auto& rows = rows_of(tile);
  for (int row = 0; row < unit.rows[tile]; ++row) {
    std::memcpy(static_cast<uint8_t*>(base) + row * stride, rows[row], unit.row_bytes[tile]);
  }
}
inline void multiply(int sums, int left, int right) {
  auto &to = rows_of(sums), &a = rows_of(left), &b = rows_of(right);
  const int pairs = unit.row_bytes[left] / 4;
  const bool fit = unit.rows[left] == unit.rows[sums] && unit.row_bytes[right] == unit.row_bytes[sums];
  expect(fit && unit.rows[right] == pairs, "tiles whose sizes fit, otherwise a product is a fault");
  const __mmask16 columns = static_cast<__mmask16>((1u << unit.row_bytes[sums] / 4) - 1);
  for (int row = 0; row < unit.rows[sums]; ++row) {
    __m512 sum = _mm512_loadu_ps(to[row]);
    for (int k = 0; k < pairs; ++k) {
      int32_t pair;
      std::memcpy(&pair, a[row] + 4 * k, 4);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(b[k]), (__m512bh)_mm512_set1_epi32(pair));
    }
    _mm512_storeu_ps(to[row], _mm512_maskz_mov_ps(columns, sum));
  }
}

}  // namespace emulated_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_tiles::load_config(config)
#define _tile_release() emulated_tiles::release()
#define _tile_loadd(tile, base, stride) emulated_tiles::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_tiles::store(tile, base, stride)
#define _tile_zero(tile) emulated_tiles::zero(tile)
#define _tile_dpbf16ps(sums, left, right) emulated_tiles::multiply(sums, left, right)
#endif
