// The gain of a norm, multiplied into the weight as if it had been folded in beforehand. The product is rounded once,
// where the engines round the normed value; measured no less accurate (triton_kernels/norm_concat_linear.py).
#pragma once

#include "device.cuh"

namespace eagle_kernels::cuda {

// fp16 loses precision below 6e-5, where gain * weight can land: a factor of 2^6 moves its full range to [1e-6, 1023],
// and the kernel's end divides it out exactly.
template <class T>
constexpr float kGainScale = 1.0f;
template <>
constexpr float kGainScale<Float16> = 64.0f;
// Codes are large before their scale: with this factor gains up to 584 keep 448 in fp16's range.
template <class T>
constexpr float kCodeGainScale = 1.0f;
template <>
constexpr float kCodeGainScale<Float16> = 0.25f;

// (offset + gain) * scale of 8 columns, to be multiplied into the weight: 8 gains of T in `low`, or of fp32 in both.
template <class T>
__device__ __forceinline__ void gain_factors(const Words& low, const Words& high, bool is_float32, float offset,
                                             float scale, float (&factor)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Pair pair = widen(word(low, i), T{});
    if (is_float32) {
      const Words& half = i < 2 ? low : high;
      pair = {bits_to_float(word(half, i % 2 * 2)), bits_to_float(word(half, i % 2 * 2 + 1))};
    }
    factor[2 * i] = (offset + pair.first) * scale;
    factor[2 * i + 1] = (offset + pair.second) * scale;
  }
}

template <class T>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, float first, float second) {
  const Pair w = widen(pair, T{});
  return narrow(Pair{w.first * first, w.second * second}, T{});
}

template <class T>
__device__ __forceinline__ Words scaled(const Words& w, const float (&factor)[8]) {
  return {scaled<T>(w.x, factor[0], factor[1]), scaled<T>(w.y, factor[2], factor[3]),
          scaled<T>(w.z, factor[4], factor[5]), scaled<T>(w.w, factor[6], factor[7])};
}

}  // namespace eagle_kernels::cuda
