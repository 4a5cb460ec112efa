// Widens the codes of quantized weights to pairs of bf16 or fp16, which represent all of them exactly: e4m3 has 4
// significant bits, int8 8. By their bits, alike on every GPU: sm_80 has no instruction for e4m3, later ones only widen
// it to fp16.
#pragma once

#include <type_traits>

#include "device.cuh"

namespace eagle_kernels::cuda {

struct Float8E4M3 {};
struct Int8 {};

// The codes of 8 columns, a byte each.
struct alignas(8) Codes {
  uint32_t first, second;
};

// Widens columns 2 i and 2 i + 1 of four. A NaN becomes 480 with its sign: see has_nan.
template <class T>
__device__ __forceinline__ uint32_t widen_pair(uint32_t codes, int i, Float8E4M3, T) {
  constexpr bool kIsBFloat16 = std::is_same_v<T, BFloat16>;
  // The upper byte of a half is the code's sign, replicated. Shifted to the places of sign, exponent and mantissa the
  // code is too small by 2^120 (bf16) or 2^8 (fp16), subnormals too.
  const uint32_t halves = permute_bytes(codes, 0, i == 0 ? 0x9180u : 0xb3a2u);
  const uint32_t small = kIsBFloat16 ? halves << 4 & 0x87f087f0u : halves << 7 & 0xbf80bf80u;
  return multiply(small, kIsBFloat16 ? 0x7b807b80u : 0x5c005c00u, T{});
}

template <class T>
__device__ __forceinline__ uint32_t widen_pair(uint32_t codes, int i, Int8, T) {
  constexpr bool kIsBFloat16 = std::is_same_v<T, BFloat16>;
  // bf16: 128 + the lower seven bits, minus 128, or 256 where the sign is set. fp16: 1024 +, minus 1024 or 1152.
  const uint32_t halves = permute_bytes(codes, kIsBFloat16 ? 0x43434343u : 0x64646464u, i == 0 ? 0x4140u : 0x4342u);
  return multiply_add(halves & 0xff80ff80u, kIsBFloat16 ? 0xbf80bf80u : 0xbc00bc00u, halves & 0xff7fff7fu, T{});
}

template <class Code, class T>
__device__ __forceinline__ Words widen(const Codes& codes, Code, T) {
  return {widen_pair(codes.first, 0, Code{}, T{}), widen_pair(codes.first, 1, Code{}, T{}),
          widen_pair(codes.second, 0, Code{}, T{}), widen_pair(codes.second, 1, Code{}, T{})};
}

// The codes of 8 columns in four bits each. Word i of the result has columns i and i + 4, which takes one shift and one
// mask for both; `paired` brings x into this order. With sign, exponent and mantissa in the places of bf16's, a code is
// too small by 2^126, a subnormal one too.
__device__ __forceinline__ Words widen_small(uint32_t codes) {
  const uint32_t sign = 0x80008000u, magnitude = 0x01c001c0u;
  return {(codes << 12 & sign) | (codes << 6 & magnitude), (codes << 8 & sign) | (codes << 2 & magnitude),
          (codes << 4 & sign) | (codes >> 2 & magnitude), (codes & sign) | (codes >> 6 & magnitude)};
}
__device__ __forceinline__ Words paired(const Words& w) {
  return {permute_bytes(w.x, w.z, 0x5410u), permute_bytes(w.x, w.z, 0x7632u), permute_bytes(w.y, w.w, 0x5410u),
          permute_bytes(w.y, w.w, 0x7632u)};
}

// Byte `i` of four scales as a pair of bf16: of e4m3 times 2^116, with 480 for a NaN, and of e8m0 itself.
__device__ __forceinline__ uint32_t pair_of_e4m3(uint32_t scales, uint32_t i) {
  const uint32_t halves = permute_bytes(scales, 0, 0x8080u + i * 0x1111u);
  const uint32_t scale = multiply(halves << 4 & 0x87f087f0u, 0x7b807b80u, BFloat16{});
  return multiply(scale, 0x79807980u, BFloat16{});
}
__device__ __forceinline__ uint32_t pair_of_e8m0(uint32_t scales, uint32_t i) {
  const uint32_t codes = permute_bytes(scales, 0, 0x4040u + i * 0x0101u);
  const bool is_first_or_last = ((codes + 0x00010001u) & 0x00fe00feu) == 0;  // 2^-127 is subnormal, 255 is NaN
  return codes << 7 | (is_first_or_last ? 0x00400040u : 0u);
}

// The codes of 8 columns times their scale, byte `i` of `scales`, for Form::kNvfp4 to kMxfp8. Products within bf16's
// range are exact; a weight beyond it is infinite, as it would be in bf16. Those of nvfp4 are too small by 2^10: with
// 2^126 its scales would leave that range.
constexpr float kNvfp4Unscale = 1024.0f;
__device__ __forceinline__ Words widen_scaled_nvfp4(uint32_t codes, uint32_t scales, uint32_t i) {
  return multiply(widen_small(codes), pair_of_e4m3(scales, i), BFloat16{});
}
__device__ __forceinline__ Words widen_scaled_mxfp4(uint32_t codes, uint32_t scales, uint32_t i) {
  const Words values = multiply(widen_small(codes), 0x7e807e80u, BFloat16{});
  return multiply(values, pair_of_e8m0(scales, i), BFloat16{});
}
__device__ __forceinline__ Words widen_scaled_mxfp8(const Codes& codes, uint32_t scales, uint32_t i) {
  return multiply(widen(codes, Float8E4M3{}, BFloat16{}), pair_of_e8m0(scales, i), BFloat16{});
}

// Bits by which has_nan finds a NaN among the codes; those of several words may be or'ed. Adding 1 flips a code's
// uppermost bit where the other seven are set, which is a NaN; a carry into the next code comes from a NaN as well.
__device__ __forceinline__ uint32_t nan_bits(uint32_t codes, Float8E4M3) { return (codes + 0x01010101u) ^ codes; }
__device__ __forceinline__ uint32_t nan_bits(uint32_t, Int8) { return 0; }
template <class Code>
__device__ __forceinline__ uint32_t nan_bits(const Codes& codes, Code) {
  return nan_bits(codes.first, Code{}) | nan_bits(codes.second, Code{});
}
__device__ __forceinline__ bool has_nan(uint32_t bits) { return (bits & 0x80808080u) != 0; }
// Whether one of the four lanes that share a row of the weight has found one.
__device__ __forceinline__ bool row_has_nan(uint32_t bits) {
  float lanes = has_nan(bits) ? 1.0f : 0.0f;
  lanes += __shfl_xor_sync(~0u, lanes, 1);
  lanes += __shfl_xor_sync(~0u, lanes, 2);
  return lanes > 0;
}
// The same in bits that no other of eight rows has: those of several rows may be or'ed, and shifted left by `row` they
// are has_nan's again.
__device__ __forceinline__ uint32_t nan_bits_of_row(uint32_t bits, int row) { return (bits & 0x80808080u) >> row; }

}  // namespace eagle_kernels::cuda
