// Widens bf16 that is stored exactly in 12 bits a number.
//
// A row of weights has few exponents: 16 of them cover all its numbers but some in ten thousand. 128 columns of a row
// are 192 bytes: two lines with the signs and mantissas of 64 columns each, then a line with their exponents, as 4-bit
// indices into the row's 16; those of the second line are in the upper halves of the bytes. In quarter q of a line the
// first 8 bytes belong to columns 8 q to 8 q + 7 of the line and the other 8 to the columns 32 further on, so that
// unpacking leaves numbers in order.
#pragma once

#include <algorithm>

#include "simd.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

struct BFloat16In12 {};

constexpr int64_t kGroupColumns = 128, kGroupBytes = 192;

// A number whose exponent is not one of its row's 16. Bytes, because it may lie at any address.
struct Exception {
  uint8_t bytes[4];

  int64_t column() const { return bytes[0] | bytes[1] << 8; }
  BFloat16 number() const { return {static_cast<uint16_t>(bytes[2] | bytes[3] << 8)}; }
};

// What a row has besides its codes.
struct RowExponents {
  const uint8_t* low;   // [16] the exponents' bits in the low byte of a number
  const uint8_t* high;  // [16] in the high byte
  const Exception *begin, *end;  // by column; padded with columns that the row does not have

  RowExponents() = default;
  RowExponents(const void* row, int64_t bytes) : low(static_cast<const uint8_t*>(row)), high(low + 16) {
    begin = reinterpret_cast<const Exception*>(high + 16);
    end = begin + (bytes - 32) / static_cast<int64_t>(sizeof(Exception));
  }
};

#if defined(__AVX512BW__)
struct ExponentTables {
  __m512i low, high;
  explicit ExponentTables(const RowExponents& row) {
    low = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row.low)));
    high = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row.high)));
  }
};

[[gnu::always_inline]] inline void widen_group(const uint8_t* codes, const ExponentTables& tables,
                                               __m512i (&lines)[4]) {
  const __m512i sign = _mm512_set1_epi8(-128), index = _mm512_set1_epi8(15);
  const __m512i pairs = _mm512_loadu_si512(codes + 128);
  unrolled<2>([&](auto half) __attribute__((always_inline)) {
    const __m512i indices = _mm512_and_si512(half == 0 ? pairs : _mm512_srli_epi16(pairs, 4), index);
    const __m512i numbers = _mm512_loadu_si512(codes + 64 * half);
    // (numbers & ~sign) | low, (numbers & sign) | high
    const __m512i low = _mm512_ternarylogic_epi32(numbers, sign, _mm512_shuffle_epi8(tables.low, indices), 0xba);
    const __m512i high = _mm512_ternarylogic_epi32(numbers, sign, _mm512_shuffle_epi8(tables.high, indices), 0xea);
    lines[2 * half] = _mm512_unpacklo_epi8(low, high);
    lines[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
  });
}

inline void widen_group(const uint8_t* codes, const ExponentTables& tables, BFloat16* numbers) {
  __m512i lines[4];
  widen_group(codes, tables, lines);
  unrolled<4>([&](auto i) { _mm512_storeu_si512(numbers + 32 * i, lines[i]); });
}
#else
using ExponentTables = RowExponents;

inline void widen_group(const uint8_t* codes, const ExponentTables& tables, BFloat16* numbers) {
#if defined(__AVX2__)
  const auto load_table = [](const uint8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  };
  const auto load_bytes = [](const uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  };
  const __m256i low_table = load_table(tables.low), high_table = load_table(tables.high);
  const __m256i sign = _mm256_set1_epi8(-128), index = _mm256_set1_epi8(15);
  unrolled<4>([&](auto part) {
    constexpr int64_t kLine = part / 2, kHalf = part % 2;
    const __m256i pairs = load_bytes(codes + 128 + 32 * kHalf), line = load_bytes(codes + 64 * kLine + 32 * kHalf);
    const __m256i indices = _mm256_and_si256(kLine == 0 ? pairs : _mm256_srli_epi16(pairs, 4), index);
    const __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, line), _mm256_shuffle_epi8(low_table, indices));
    const __m256i high = _mm256_or_si256(_mm256_and_si256(sign, line), _mm256_shuffle_epi8(high_table, indices));
    BFloat16* first = numbers + 64 * kLine + 16 * kHalf;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(first + 32), _mm256_unpackhi_epi8(low, high));
  });
#else
  for (int64_t column = 0; column < kGroupColumns; ++column) {
    const int64_t byte = column % 32 / 8 * 16 + column % 64 / 32 * 8 + column % 8;
    const uint8_t number = codes[column / 64 * 64 + byte], index = codes[128 + byte] >> column / 64 * 4 & 15;
    const int low = (number & 0x7f) | tables.low[index], high = (number & 0x80) | tables.high[index];
    numbers[column].bits = static_cast<uint16_t>(high << 8 | low);
  }
#endif
}
#endif

// Widens columns [begin, end) of a row to bf16; `begin` is a multiple of 128, and `numbers` has room for whole groups.
// The codes `next` bytes further on are prefetched.
inline void widen_row(const uint8_t* codes, const RowExponents& row, int64_t begin, int64_t end, int64_t next,
                      BFloat16* numbers) {
  const ExponentTables tables(row);
  codes += begin / kGroupColumns * kGroupBytes;
  for (int64_t column = begin; column < end; column += kGroupColumns, codes += kGroupBytes) {
    for (int64_t byte = 0; byte < kGroupBytes; byte += kCacheLine) __builtin_prefetch(codes + next + byte, 0, 2);
    widen_group(codes, tables, numbers + (column - begin));
  }
  const auto is_before = [](const Exception& exception, int64_t column) { return exception.column() < column; };
  const Exception* exception = std::lower_bound(row.begin, row.end, begin, is_before);
  for (; exception != row.end && exception->column() < end; ++exception) {
    if (exception->column() >= begin) numbers[exception->column() - begin] = exception->number();
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
