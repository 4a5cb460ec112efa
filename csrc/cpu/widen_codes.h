// Widens the codes of quantized weights to bf16, which represents every one exactly: e4m3 has 4 significant bits, e2m1
// 2 and int8 8. Without AVX-512 codes are widened to fp32, and so are bf16 weights.
#pragma once

#include <type_traits>

#include "../norm_concat_linear.h"
#include "simd.h"
#include "widen_bf16_12bit.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr float power_of_two(int exponent) {
  return exponent == -127 ? __builtin_bit_cast(float, 0x00400000) : __builtin_bit_cast(float, (exponent + 127) << 23);
}

struct Float8E4M3 {
  static constexpr float value(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return __builtin_nanf("");
    const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * power_of_two(-9)
                                          : static_cast<float>(8 + mantissa) * power_of_two(exponent - 10);
    return code & 0x80 ? -magnitude : magnitude;
  }
};

struct Float8E8M0 {
  static constexpr float value(int code) { return code == 255 ? __builtin_nanf("") : power_of_two(code - 127); }
};

struct Int8 {
  static constexpr float value(int code) { return static_cast<float>(code < 128 ? code : code - 256); }
};

struct Float4E2M1 {
  static constexpr float value(int code) {
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    const float magnitude = exponent == 0 ? static_cast<float>(mantissa) / 2
                                          : static_cast<float>(2 + mantissa) * power_of_two(exponent - 2);
    return code & 8 ? -magnitude : magnitude;
  }
};

// Every code's value, in fp32 and as the bits of bf16.
template <class Code>
struct CodeTable {
  float values[256] = {};
  alignas(kCacheLine) uint16_t bits[256] = {};
  constexpr CodeTable() {
    for (int code = 0; code < 256; ++code) {
      values[code] = Code::value(code);
      bits[code] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, values[code]) >> 16);
    }
  }
};
template <class Code>
constexpr CodeTable<Code> kCodeTable{};

template <class Code>
constexpr int64_t kCodesPerByte = 1;
template <>
constexpr int64_t kCodesPerByte<Float4E2M1> = 2;

// Whether the weight has codes, not numbers of an element type.
template <class Number>
constexpr bool kIsCode = true;
template <>
constexpr bool kIsCode<float> = false;
template <>
constexpr bool kIsCode<BFloat16> = false;
template <>
constexpr bool kIsCode<Float16> = false;

// Bits of a number of the weight, and the bytes of `count` of them that begin and end with a byte, with BFloat16In12
// with a group.
template <class Number>
constexpr int64_t kBits = kIsCode<Number> ? 8 / kCodesPerByte<Number> : 8 * sizeof(Number);
template <>
constexpr int64_t kBits<BFloat16In12> = 12;
template <class Number>
constexpr int64_t bytes_of(int64_t count) {
  return count * kBits<Number> / 8;
}

// f(code{}) for the codes that `type` names.
template <class F>
inline void with_code(WeightType type, F f) {
  switch (type) {
    case WeightType::kFloat8E4M3: return f(Float8E4M3{});
    case WeightType::kInt8: return f(Int8{});
    case WeightType::kFloat4E2M1: return f(Float4E2M1{});
    case WeightType::kChunks:
    case WeightType::kBFloat16In12: return;
  }
}

inline Float value_of(UInt code, Float8E8M0) {
  const UInt odd = (UInt)((code == 0) | (code == 255));  // 2^-127 is subnormal, 255 is NaN
  return (Float)(code << 23 | (odd & 0x00400000));
}
inline Float value_of(UInt code, Float8E4M3) {
  const UInt magnitude = code & 0x7f;
  const Float subnormal = __builtin_convertvector((__typeof__(code == 0))magnitude, Float) * 0x1p-9f;
  const UInt normal = (magnitude << 20) + (120 << 23);
  const UInt number = magnitude < 8 ? (UInt)subnormal : normal;
  return (Float)((magnitude == 0x7f ? UInt{} + 0x7fc00000 : number) | (code & 0x80) << 24);
}

#if defined(__AVX512F__)
// Each lane of `codes` has four codes that follow one another in a row of the weight (e2m1: eight). They become words
// of two numbers in bf16, the even column in the low half: words[0] has the first two of each lane, words[stride] the
// next two, ... Two numbers in bf16 are a word already.
inline void widen(__m512i numbers, BFloat16, UInt* words, int64_t) { *words = (UInt)numbers; }

// a | (b & c)
inline __m512i or_masked(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0xf8); }

inline void widen(__m512i codes, Float4E2M1, UInt* words, int64_t stride) {
  // vpermw reads 5 bits of an index, and the table has all 16 codes twice: the bit above a code's four does not matter.
  const __m512i table = _mm512_load_si512(kCodeTable<Float4E2M1>.bits);
  unrolled<4>([&](auto pair) {
#if defined(__AVX512VBMI__)
    constexpr int64_t kShifts = 8 * pair | (8 * pair + 4) << 16;
    const __m512i shifts = _mm512_set1_epi64(kShifts | (kShifts + 0x200020) << 32);
    const __m512i index = _mm512_multishift_epi64_epi8(shifts, codes);
#else
    const __m512i low = _mm512_srli_epi32(codes, 8 * pair);
    const __m512i index = _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(low, 12));
#endif
    words[pair * stride] = (UInt)_mm512_permutexvar_epi16(index, table);
  });
}

#if defined(__AVX512VBMI__)
// A table of the low or the high bytes of codes 0 to 127 in bf16.
struct BytesOfCodes {
  alignas(kCacheLine) uint8_t bytes[128] = {};
  constexpr BytesOfCodes(const uint16_t* bits, int shift, int more = 0) {
    for (int code = 0; code < 128; ++code) bytes[code] = static_cast<uint8_t>((bits[code] >> shift) + more);
  }
  // Uses the low 7 bits of each index.
  __m512i look_up(__m512i indices) const {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), indices, _mm512_load_si512(bytes + 64));
  }
};
template <class Code>
constexpr BytesOfCodes kLowBytes{kCodeTable<Code>.bits, 0};
template <class Code>
constexpr BytesOfCodes kHighBytes{kCodeTable<Code>.bits, 8};
// With 0x43 added, which CodeLine subtracts again.
constexpr BytesOfCodes kRaisedHighBytes{kCodeTable<Int8>.bits, 8, 0x43};

// 64 bytes of codes, widened. word(i) has columns 16 q + 8 i to 16 q + 8 i + 7 in quarter q.
template <class Code>
struct CodeLine {
  __m512i low, high;
  CodeLine() = default;
  explicit CodeLine(__m512i codes) {
    constexpr bool kIsInteger = std::is_same_v<Code, Int8>;
    const __m512i magnitudes = kIsInteger ? _mm512_min_epu8(codes, _mm512_sub_epi8(__m512i{}, codes)) : codes;
    low = kLowBytes<Code>.look_up(magnitudes);
    high = (kIsInteger ? kRaisedHighBytes : kHighBytes<Code>).look_up(magnitudes);
    if constexpr (kIsInteger) {
      // |-128| is looked up as 0 but must become 0x4300. So 0x43 is added to the table's bytes, and a shuffle subtracts
      // it from all numbers but this one: an index above 127 gives zero. Saturation and absolute values would run on
      // the units that multiply (8 rows by int8_row in L1: 1.40 cycles a product with both, 1.15 without).
      high = _mm512_add_epi8(high, _mm512_shuffle_epi8(_mm512_set1_epi8(-0x43), magnitudes));
    }
    high = or_masked(high, codes, _mm512_set1_epi8(-128));
  }
  __m512i word(int64_t i) const { return i == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high); }
};
// word(i) has columns 8 j + i and 8 j + i + 4 in lane j: that takes shifts, which do not use the units that multiply.
template <>
struct CodeLine<Float4E2M1> {
  __m512i codes;
  CodeLine() = default;
  explicit CodeLine(__m512i line) : codes(line) {}
  __m512i word(int64_t i) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * i), _mm512_load_si512(kCodeTable<Float4E2M1>.bits));
  }
};

template <class Code>
inline void widen(__m512i codes, Code, UInt* words, int64_t stride) {
  // Each quarter gets bytes 0 and 1 of its four lanes, then 2 and 3: word(0) unpacks the first half, word(1) the
  // second.
  const __m128i order = _mm_setr_epi32(0x05040100, 0x0d0c0908, 0x07060302, 0x0f0e0b0a);
  const CodeLine<Code> line(_mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order)));
  words[0] = (UInt)line.word(0);
  words[stride] = (UInt)line.word(1);
}
#else
inline void widen(__m512i codes, Float8E4M3, UInt* words, int64_t stride) {
  // One look-up covers 64 codes; bit 6 of a code selects the first or the second look-up.
  const auto look_up = [](int first, __m512i indices) {
    const uint16_t* bits = kCodeTable<Float8E4M3>.bits + first;
    return _mm512_permutex2var_epi16(_mm512_load_si512(bits), indices, _mm512_load_si512(bits + 32));
  };
  unrolled<2>([&](auto pair) {
    constexpr int32_t kBytes = static_cast<int32_t>(0x80018000) + 0x00020002 * pair;
    const __m128i order = _mm_setr_epi32(kBytes, kBytes + 0x00040004, kBytes + 0x00080008, kBytes + 0x000c000c);
    const __m512i indices = _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order));
    const __mmask32 upper = _mm512_test_epi16_mask(indices, _mm512_set1_epi16(0x40));
    const __m512i magnitudes = _mm512_mask_mov_epi16(look_up(0, indices), upper, look_up(64, indices));
    words[pair * stride] =
        (UInt)or_masked(magnitudes, _mm512_slli_epi16(indices, 8), _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  });
}

inline void widen(__m512i codes, Int8, UInt* words, int64_t stride) {
  unrolled<2>([&](auto pair) {
    const auto value = [&](int left) {
      const __m512i code = _mm512_srai_epi32(_mm512_slli_epi32(codes, left), 24);
      return _mm512_castps_si512(_mm512_cvtepi32_ps(code));
    };
    const __m512i even = value(24 - 16 * pair), odd = value(16 - 16 * pair);
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    words[pair * stride] = (UInt)or_masked(_mm512_srli_epi32(even, 16), odd, upper);
  });
}
#endif
#else
// A run is what is widened at once. Its values are in units of kRunUnit.
constexpr int64_t kRunNumbers = 16, kRunVectors = kRunNumbers / kLanes;
template <class Number>
constexpr float kRunUnit = 1.0f;

// Whether widen_run turns NaN into a number, so that any_is_nan has to look for it.
template <class Number>
constexpr bool kLosesNaN = false;

template <class Number>
inline void widen_run(const uint8_t* numbers, Float* run, Number) {
  if constexpr (!kIsCode<Number>) {
    const auto* place = reinterpret_cast<const Number*>(numbers);
    unrolled<kRunVectors>([&](auto v) { run[v] = load(place + v * kLanes, Whole{}); });
  } else {
    float values[kRunNumbers];
    for (int64_t i = 0; i < kRunNumbers; ++i) {
      const int code = kCodesPerByte<Number> == 1 ? numbers[i] : numbers[i / 2] >> 4 * (i % 2) & 15;
      values[i] = kCodeTable<Number>.values[code];
    }
    __builtin_memcpy(run, values, sizeof values);
  }
}

// Each number times `scale`.
template <class Number>
inline void widen_scaled_run(const uint8_t* numbers, float scale, Float* run, Number) {
  widen_run(numbers, run, Number{});
  unrolled<kRunVectors>([&](auto v) { run[v] *= scale; });
}

#if defined(__AVX2__)
inline __m128i load_16_bytes(const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }
inline __m128i load_8_bytes(const uint8_t* bytes) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)); }
inline Float float_of_int8(__m128i codes) { return (Float)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)); }

inline void widen_run(const uint8_t* codes, Float* run, Int8) {
  unrolled<2>([&](auto v) { run[v] = float_of_int8(load_8_bytes(codes + 8 * v)); });
}

// The code's bits as fp16, whose exponent is then 8 too small, for subnormal numbers too; NaN becomes 480.
template <>
constexpr float kRunUnit<Float8E4M3> = 256.0f;
template <>
constexpr bool kLosesNaN<Float8E4M3> = true;
inline void widen_run(const uint8_t* codes, Float* run, Float8E4M3) {
  const __m256i extended = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_16_bytes(codes)), 7);
  const __m256i halves = _mm256_and_si256(extended, _mm256_set1_epi16(~0x4000));
  run[0] = (Float)_mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  run[1] = (Float)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

// Whether any of `count` e4m3 codes is NaN: 0xff with the sign set. Two maxima, because each waits for the one before.
inline bool any_is_nan(const uint8_t* codes, int64_t count) {
  const __m256i sign = _mm256_set1_epi8(-128);
  __m256i largest[2]{};
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) {
    unrolled<2>([&](auto half) {
      const auto* bytes = reinterpret_cast<const __m256i*>(codes + k + 32 * half);
      largest[half] = _mm256_max_epu8(largest[half], _mm256_or_si256(_mm256_loadu_si256(bytes), sign));
    });
  }
  const __m256i is_nan = _mm256_cmpeq_epi8(_mm256_max_epu8(largest[0], largest[1]), _mm256_set1_epi8(-1));
  bool any = _mm256_movemask_epi8(is_nan) != 0;
  for (; k < count; ++k) any |= (codes[k] & 0x7f) == 0x7f;
  return any;
}

// The scale multiplies the table. The shuffle reads three bits of each index, the magnitude; the fourth is the sign.
inline void widen_scaled_run(const uint8_t* codes, float scale, Float* run, Float4E2M1) {
  const __m256 magnitudes = (__m256)(load(kCodeTable<Float4E2M1>.values, Whole{}) * scale);
  unrolled<2>([&](auto v) {
    int32_t eight;
    __builtin_memcpy(&eight, codes + 4 * v, sizeof eight);
    const __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(eight), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(index, 28), _mm256_set1_epi32(INT32_MIN));
    run[v] = (Float)_mm256_xor_si256((__m256i)_mm256_permutevar8x32_ps(magnitudes, index), sign);
  });
}
inline void widen_run(const uint8_t* codes, Float* run, Float4E2M1 code) { widen_scaled_run(codes, 1.0f, run, code); }
#endif
#endif

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
