// One vector of fp32 lanes, in the vector extensions of GCC and Clang: the source is written once, and each instruction
// set is this source compiled with other flags. Intrinsics appear only where the extensions cannot express it.
//
// Everything is in the instruction set's namespace and anonymous besides: an inline function shared between
// translation units of different flags is merged by the linker, and the copy it keeps may be the AVX-512 one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../dtype.h"
#include "isa.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

constexpr Isa kIsa = Isa::EAGLE_KERNELS_ISA;

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

constexpr int64_t kCacheLine = 64;

typedef float Float __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UInt __attribute__((vector_size(4 * kLanes)));
typedef uint16_t UShort __attribute__((vector_size(2 * kLanes)));
typedef uint8_t UByte __attribute__((vector_size(kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// GCC 12 compiles __builtin_convertvector to five instructions for UShort, and to 18 for UByte (AVX2 only: nothing with
// AVX-512 reads bytes this way).
#if defined(__AVX512F__)
inline UInt extend(UShort bits) { return (UInt)_mm512_cvtepu16_epi32((__m256i)bits); }
inline UShort truncate(UInt bits) { return (UShort)_mm512_cvtepi32_epi16((__m512i)bits); }
#elif defined(__AVX2__)
inline UInt extend(UByte bits) { return (UInt)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bits)); }
inline UInt extend(UShort bits) { return (UInt)_mm256_cvtepu16_epi32((__m128i)bits); }
inline UShort truncate(UInt bits) { return __builtin_convertvector(bits, UShort); }
#else
inline UInt extend(UByte bits) { return __builtin_convertvector(bits, UInt); }
inline UInt extend(UShort bits) { return __builtin_convertvector(bits, UInt); }
inline UShort truncate(UInt bits) { return __builtin_convertvector(bits, UShort); }
#endif

// a * b + c, rounded once where there is an instruction for it. GCC turns the expression into that instruction only
// where it keeps both operations together: a product that it moves in front of a branch is rounded by itself.
#if defined(__AVX512F__)
inline Float multiply_add(Float a, Float b, Float c) {
  return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__AVX2__)
inline Float multiply_add(Float a, Float b, Float c) {
  return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#else
inline Float multiply_add(Float a, Float b, Float c) { return a * b + c; }
#endif

inline Float widen(UShort bits, BFloat16) { return (Float)(extend(bits) << 16); }

// Keeps a value in a register that GCC would load again for every product.
template <class Vector>
[[gnu::always_inline]] inline Vector in_register(Vector value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("" : "+x"(value));
#endif
  return value;
}

// Round to nearest even on the integer bits. vcvtneps2bf16 is one instruction instead of six, but flushes denormals.
inline UShort narrow(Float value, BFloat16) {
  const UInt bits = (UInt)value;
  const UInt rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return truncate(value != value ? UInt{} + 0x7fc0 : rounded);
}

#if defined(__AVX512F__)
inline Float widen(UShort bits, Float16) { return (Float)_mm512_cvtph_ps((__m256i)bits); }
inline UShort narrow(Float value, Float16) {
  return (UShort)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
inline Float widen(UShort bits, Float16) { return (Float)_mm256_cvtph_ps((__m128i)bits); }
inline UShort narrow(Float value, Float16) {
  return (UShort)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// Shifted to the place of the fp32 fields, an fp16 number needs an exponent 112 larger. A subnormal one is then
// 2^-15 (1 + m / 1024), twice which minus 2^-14 is its value. Multiplied by 2^112 instead, it would first be a
// subnormal fp32 number, which torch.set_flush_denormal(True) makes zero.
inline Float widen(UShort bits, Float16) {
  const UInt wide = extend(bits);
  const UInt magnitude = wide & 0x7fff;
  const Float shifted = (Float)((magnitude << 13) + (112u << 23));
  const Float excess = shifted - 0x1p-14f;
  const UInt finite = (UInt)(shifted + (excess < 0.0f ? excess : Float{}));
  const UInt special = (UInt)(magnitude >= 0x7c00) & 0x7f800000;
  return (Float)((finite | special) | ((wide & 0x8000) << 16));
}

// Adding a power of two whose fp32 ulp is the ulp of the fp16 result makes the fp32 addition do the rounding: `magic`
// has the exponent of the value (at least that of the smallest normal fp16) plus 13.
inline UShort narrow(Float value, Float16) {
  const UInt bits = (UInt)value;
  const UInt magnitude = bits & 0x7fffffff;
  const UInt exponent = magnitude & 0x7f800000;
  const UInt smallest = UInt{} + 0x38800000;
  const UInt magic = (exponent > smallest ? exponent : smallest) + 0x06800000;
  const UInt sum = (UInt)((Float)magnitude + (Float)magic);
  const UInt finite = (((magic - 0x3f000000) >> 13) & 0x7c00) + (sum & 0xfff);
  const UInt bounded = magnitude >= 0x477ff000 ? UInt{} + 0x7c00 : finite;
  const UInt result = magnitude > 0x7f800000 ? UInt{} + 0x7e00 : bounded;
  return truncate(result | ((bits >> 16) & 0x8000));
}
#endif

// How much of a vector a load or store covers: all of it, or the first `count` lanes (the end of a row).
struct Whole {};
struct Part {
  int64_t count;
};

template <class Lanes>
inline Lanes load_lanes(const void* p, Whole) {
  Lanes lanes;
  __builtin_memcpy(&lanes, p, sizeof lanes);
  return lanes;
}
template <class Lanes>
inline Lanes load_lanes(const void* p, Part part) {
  Lanes lanes{};
  __builtin_memcpy(&lanes, p, part.count * (sizeof lanes / kLanes));
  return lanes;
}
template <class Lanes>
inline void store_lanes(void* p, Lanes lanes, Whole) {
  __builtin_memcpy(p, &lanes, sizeof lanes);
}
template <class Lanes>
inline void store_lanes(void* p, Lanes lanes, Part part) {
  __builtin_memcpy(p, &lanes, part.count * (sizeof lanes / kLanes));
}

// How a store reaches memory. Cached is the default: what an op writes, the next one reads. Streamed goes around the
// caches and saves the read of every line that a plain store begins with.
struct Cached {};
struct Streamed {};

#if defined(__AVX512F__)
inline void stream_lanes(void* p, Float lanes) { _mm512_stream_ps(static_cast<float*>(p), (__m512)lanes); }
inline void stream_lanes(void* p, UShort lanes) { _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)lanes); }
#elif defined(__AVX2__)
inline void stream_lanes(void* p, Float lanes) { _mm256_stream_ps(static_cast<float*>(p), (__m256)lanes); }
inline void stream_lanes(void* p, UShort lanes) { _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)lanes); }
#else
template <class Lanes>
inline void stream_lanes(void* p, Lanes lanes) {
  store_lanes(p, lanes, Whole{});
}
#endif

// Makes streamed stores visible to other threads before the caller tells them that the rows are ready.
inline void finish_streaming() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Lanes that a Part leaves out read as zero.
template <class Span>
inline Float load(const float* p, Span span) {
  return load_lanes<Float>(p, span);
}
template <class T, class Span>
inline Float load(const T* p, Span span) {
  return widen(load_lanes<UShort>(p, span), T{});
}

template <class Span>
inline void store(float* p, Float value, Span span) {
  store_lanes(p, value, span);
}
template <class T, class Span>
inline void store(T* p, Float value, Span span) {
  store_lanes(p, narrow(value, T{}), span);
}

// A streamed store must be aligned; the end of a row is stored plainly.
template <class T, class Span>
inline void store(T* p, Float value, Span span, Cached) {
  store(p, value, span);
}
template <class T>
inline void store(T* p, Float value, Part part, Streamed) {
  store(p, value, part);
}
inline void store(float* p, Float value, Whole, Streamed) { stream_lanes(p, value); }
template <class T>
inline void store(T* p, Float value, Whole, Streamed) {
  stream_lanes(p, narrow(value, T{}));
}

// Calls f(Streamed{}) or f(Cached{}) for a row; `bytes` is the size of all rows of the thread. Streaming is for outputs
// too large to stay in a cache until they are read: at 512 MB it takes norm_concat from 52 to 41 ms, capture_hidden
// from 59 to 49. At 16 MB it gains 5 % at most, and the next op would read from memory at 27 GB/s what the last-level
// cache gives at 57.
template <class F>
inline void with_store(const void* row, int64_t bytes, F f) {
  constexpr int64_t kStreamBytes = 32 << 20;
  if (bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(row) % kCacheLine == 0) return f(Streamed{});
  f(Cached{});
}

// Prefetches, a vector at a time, what comes after the current row: the hardware's prefetchers stop at the end of a
// page, and rows are as long as one or two (norm_concat of 64 rows of 3 x 4096: 0.145 ms instead of 0.19, 2 cores with
// AMX). Always inlined: GCC 12 drops calls of a function that only prefetches.
template <class T>
[[gnu::always_inline]] inline void fetch(const T* p) {
  __builtin_prefetch(p);
}
template <class T>
[[gnu::always_inline]] inline void fetch_to_write(const T* p, Cached) {
  __builtin_prefetch(p, 1);
}
template <class T>
[[gnu::always_inline]] inline void fetch_to_write(const T*, Streamed) {}

inline Float round_to(Float value, float) { return value; }
template <class T>
inline Float round_to(Float value, T) {
  return widen(narrow(value, T{}), T{});
}

// The sum of the lanes, always as the same tree.
inline float sum_lanes(Float value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float lanes[kLanes];
  __builtin_memcpy(lanes, &value, sizeof lanes);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
#endif
}

// Calls f(integral_constant<0>), f(integral_constant<1>), ...: an array that has only such subscripts lives in
// registers. In a loop GCC 12 keeps it there too, but clears it in memory first (fp32, K = 3, T = 64, H = D = 128:
// 95.9 us; unrolled 93.0).
template <int64_t kCount, class F>
inline void unrolled(F f) {
  [&]<int64_t... i>(std::integer_sequence<int64_t, i...>) {
    (f(std::integral_constant<int64_t, i>{}), ...);
  }(std::make_integer_sequence<int64_t, kCount>{});
}

// The lower or the upper half of every sum in two vectors: a's sums, then b's, each of 2 * kHalf partial sums.
template <int64_t kHalf, bool kUpper, size_t... kLane>
inline Float halves(Float a, Float b, std::index_sequence<kLane...>) {
  constexpr auto source = [](int64_t lane) {
    const int64_t in_its_vector = lane % (kLanes / 2), vector = lane / (kLanes / 2);
    return vector * kLanes + in_its_vector / kHalf * 2 * kHalf + in_its_vector % kHalf + kUpper * kHalf;
  };
  return __builtin_shufflevector(a, b, source(kLane)...);
}

// Lane j % kLanes of values[j / kLanes] becomes sum_lanes(values[j]), by the same tree. All at once takes two shuffles
// and an addition each; one after the other each is a chain of four of both (as above: 95.9 us; one after the other
// 98.7).
template <int64_t kCount, int64_t kHalf = kLanes / 2>
inline void sum_lanes_of_each(Float* values) {
  constexpr std::make_index_sequence<kLanes> lanes;
  unrolled<(kCount + 1) / 2>([&](auto j) {
    Float odd{};
    if constexpr (2 * j + 1 < kCount) odd = values[2 * j + 1];
    const Float even = values[2 * j];
    values[j] = halves<kHalf, false>(even, odd, lanes) + halves<kHalf, true>(even, odd, lanes);
  });
  if constexpr (kHalf > 1) sum_lanes_of_each<(kCount + 1) / 2, kHalf / 2>(values);
}

#if defined(__AVX512F__)
// Transposes the 4x4 lanes of 32 bits in each quarter of four vectors.
inline void transpose_in_quarters(const __m512i* rows, __m512i* quarters) {
  const __m512i low01 = _mm512_unpacklo_epi32(rows[0], rows[1]), low23 = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i high01 = _mm512_unpackhi_epi32(rows[0], rows[1]), high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
  quarters[0] = _mm512_unpacklo_epi64(low01, low23);
  quarters[1] = _mm512_unpackhi_epi64(low01, low23);
  quarters[2] = _mm512_unpacklo_epi64(high01, high23);
  quarters[3] = _mm512_unpackhi_epi64(high01, high23);
}

// Transposes 4x4 quarters: vectors 0, 4, 8 and 12 of `from` into 0, 4, 8 and 12 times `stride` of `to`.
inline void transpose_quarters(const __m512i* from, __m512i* to, int64_t stride) {
  constexpr int kEven = 0x88, kOdd = 0xdd;  // of each of two vectors' quarters
  const __m512i even01 = _mm512_shuffle_i32x4(from[0], from[4], kEven);
  const __m512i odd01 = _mm512_shuffle_i32x4(from[0], from[4], kOdd);
  const __m512i even23 = _mm512_shuffle_i32x4(from[8], from[12], kEven);
  const __m512i odd23 = _mm512_shuffle_i32x4(from[8], from[12], kOdd);
  to[0] = _mm512_shuffle_i32x4(even01, even23, kEven);
  to[4 * stride] = _mm512_shuffle_i32x4(odd01, odd23, kEven);
  to[8 * stride] = _mm512_shuffle_i32x4(even01, even23, kOdd);
  to[12 * stride] = _mm512_shuffle_i32x4(odd01, odd23, kOdd);
}

// Transposes 16x16 lanes of 32 bits.
inline void transpose(__m512i (&rows)[kLanes]) {
  __m512i quarters[kLanes];
  unrolled<4>([&](auto group) { transpose_in_quarters(rows + 4 * group, quarters + 4 * group); });
  unrolled<4>([&](auto lane) { transpose_quarters(quarters + lane, rows + lane, 1); });
}
#endif

// Calls f(begin, span) over a row of `width` elements.
template <class F>
inline void for_each_vector(int64_t width, F f) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) f(i, Whole{});
  if (i < width) f(i, Part{width - i});
}

// The sum of the squares of f(begin, span). Every instruction set has 64 lanes of partial sums, in kSums vectors, since
// with one vector each FMA would wait 4 cycles for the last. They are emptied into totals every kSquaresSteps. Fewer or
// longer chains are further from float64 than torch's cascade of sums (1.8e-7) on rows of 1152: one chain of 4 lanes
// 5.9e-7, 16 lanes with totals 2.6e-7.
constexpr int64_t kSums = 64 / kLanes;
constexpr int64_t kSquaresSteps = 8;

template <class F>
inline float sum_of_squares(int64_t width, F f) {
  Float totals[kSums] = {};
  int64_t i = 0;
  while (i + kSums * kLanes <= width) {
    Float sums[kSums] = {};
    for (int64_t step = 0; step < kSquaresSteps && i + kSums * kLanes <= width; ++step, i += kSums * kLanes) {
      for (int64_t j = 0; j < kSums; ++j) {
        const Float value = f(i + j * kLanes, Whole{});
        sums[j] += value * value;
      }
    }
    for (int64_t j = 0; j < kSums; ++j) totals[j] += sums[j];
  }
  for (int64_t j = 0; i + kLanes <= width; ++j, i += kLanes) {
    const Float value = f(i, Whole{});
    totals[j] += value * value;
  }
  if (i < width) {
    const Float value = f(i, Part{width - i});
    totals[kSums - 1] += value * value;
  }
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) totals[j] += totals[j + half];
  }
  return sum_lanes(totals[0]);
}

// f(T{}) for the element type T that dtype names.
template <class F>
inline void with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32: return f(float{});
    case DType::kBFloat16: return f(BFloat16{});
    case DType::kFloat16: return f(Float16{});
  }
}

// A gain or bias in T or fp32.
template <class T, class Span>
inline Float load_vector(Vector vector, int64_t i, Span span) {
  if (vector.dtype == DType::kFloat32) return load(static_cast<const float*>(vector.data) + i, span);
  return load(static_cast<const T*>(vector.data) + i, span);
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
