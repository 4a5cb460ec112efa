// How the memory-bound kernels walk a row: in packs of 8 values, thread t of a row takes packs t, t + blockDim.x, ...
//
// A pack is one 16-byte load (two in fp32) where every base address and row stride is a multiple of 16 bytes and the
// width one of 8 values, else 8 loads of one value each (kAligned = false). The order of a row's sums is the same in
// both, and depends on the width alone.
#pragma once

#include "device.cuh"

namespace eagle_kernels::cuda {

constexpr int kPack = 8;

// Packs of a thread that are in flight at once, and stay in registers between the two passes of a norm.
constexpr int kInFlight = 2;

struct Values {
  float v[kPack];
};

template <class T>
struct Pack {
  Words words[kPack * sizeof(T) / sizeof(Words)];
};

template <class T>
__device__ __forceinline__ Values widen(const Pack<T>& pack) {
  const Words w = pack.words[0];
  const Pair a = widen(w.x, T{}), b = widen(w.y, T{}), c = widen(w.z, T{}), d = widen(w.w, T{});
  return {a.first, a.second, b.first, b.second, c.first, c.second, d.first, d.second};
}
__device__ __forceinline__ Values widen(const Pack<float>& pack) {
  const Words a = pack.words[0], b = pack.words[1];
  return {bits_to_float(a.x), bits_to_float(a.y), bits_to_float(a.z), bits_to_float(a.w),
          bits_to_float(b.x), bits_to_float(b.y), bits_to_float(b.z), bits_to_float(b.w)};
}

template <class T>
__device__ __forceinline__ Pack<T> narrow(const Values& x, T) {
  return {{{narrow(Pair{x.v[0], x.v[1]}, T{}), narrow(Pair{x.v[2], x.v[3]}, T{}), narrow(Pair{x.v[4], x.v[5]}, T{}),
            narrow(Pair{x.v[6], x.v[7]}, T{})}}};
}
__device__ __forceinline__ Pack<float> narrow(const Values& x, float) {
  return {{{float_to_bits(x.v[0]), float_to_bits(x.v[1]), float_to_bits(x.v[2]), float_to_bits(x.v[3])},
           {float_to_bits(x.v[4]), float_to_bits(x.v[5]), float_to_bits(x.v[6]), float_to_bits(x.v[7])}}};
}

__device__ __forceinline__ Values operator+(const Values& a, const Values& b) {
  Values sum;
#pragma unroll
  for (int i = 0; i < kPack; ++i) sum.v[i] = a.v[i] + b.v[i];
  return sum;
}

__device__ __forceinline__ float sum_of_squares(const Values& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPack; ++i) sum += x.v[i] * x.v[i];
  return sum;
}

// The raw bits of one value, loaded and stored as an integer of its size.
__device__ __forceinline__ uint32_t load_bits(const float* p) { return load(reinterpret_cast<const uint32_t*>(p)); }
template <class T>
__device__ __forceinline__ uint32_t load_bits(const T* p) {
  return load(reinterpret_cast<const uint16_t*>(p));
}
__device__ __forceinline__ void store_bits(float* p, uint32_t bits) { store(reinterpret_cast<uint32_t*>(p), bits); }
template <class T>
__device__ __forceinline__ void store_bits(T* p, uint32_t bits) {
  store(reinterpret_cast<uint16_t*>(p), static_cast<uint16_t>(bits));
}

// One value of a vector in T or fp32.
template <class T>
__device__ __forceinline__ float value_at(const Vector& vector, int64_t i) {
  if (std::is_same_v<T, float> || vector.dtype == DType::kFloat32) {
    return load(static_cast<const float*>(vector.data) + i);
  }
  if constexpr (!std::is_same_v<T, float>) return widen(load_bits(static_cast<const T*>(vector.data) + i), T{}).first;
  return 0;
}

// Values [column, column + 8) of a row; those at `width` and beyond are 0 and not read.
template <bool kAligned, class T>
__device__ __forceinline__ Pack<T> load_pack(const T* row, int64_t column, int64_t width) {
  constexpr int kPerWord = 4 / sizeof(T), kPerWords = 4 * kPerWord;
  Pack<T> pack{};
  if (column >= width) return pack;
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < kPack / kPerWords; ++i) {
      pack.words[i] = load(reinterpret_cast<const Words*>(row + column + i * kPerWords));
    }
  } else {
    uint32_t words[kPack / kPerWord] = {};
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      if (column + i < width) words[i / kPerWord] |= load_bits(row + column + i) << (i % kPerWord * 8 * sizeof(T));
    }
#pragma unroll
    for (int i = 0; i < kPack / kPerWords; ++i) {
      pack.words[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }
  }
  return pack;
}

template <bool kAligned, class T>
__device__ __forceinline__ void store_pack(T* row, int64_t column, int64_t width, const Pack<T>& pack) {
  constexpr int kPerWord = 4 / sizeof(T), kPerWords = 4 * kPerWord;
  if (column >= width) return;
#pragma unroll
  for (int i = 0; i < kPack / kPerWords; ++i) {
    const Words& w = pack.words[i];
    if constexpr (kAligned) {
      store(reinterpret_cast<Words*>(row + column + i * kPerWords), w);
    } else {
      const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < kPerWords; ++j) {
        const int64_t at = column + i * kPerWords + j;
        if (at < width) store_bits(row + at, words[j / kPerWord] >> (j % kPerWord * 8 * sizeof(T)));
      }
    }
  }
}

// round(a + b), as it is stored.
template <class T>
__device__ __forceinline__ Pack<T> add(const Pack<T>& a, const Pack<T>& b) {
  return narrow(widen(a) + widen(b), T{});
}

// x * rstd * (offset + gain), unrounded; an absent gain is 1.
template <bool kAligned, class T>
__device__ __forceinline__ Values norm(Values x, float rstd, const Vector& gain, float offset, int64_t column,
                                       int64_t width) {
#pragma unroll
  for (int i = 0; i < kPack; ++i) x.v[i] *= rstd;
  if (gain.data == nullptr) return x;
  const Values g = gain.dtype == DType::kFloat32
                       ? widen(load_pack<kAligned>(static_cast<const float*>(gain.data), column, width))
                       : widen(load_pack<kAligned>(static_cast<const T*>(gain.data), column, width));
#pragma unroll
  for (int i = 0; i < kPack; ++i) x.v[i] *= offset + g.v[i];
  return x;
}

// The column that a thread starts at, and the distance from one of its packs to the next.
__device__ __forceinline__ int64_t first_column() { return static_cast<int64_t>(threadIdx.x) * kPack; }
__device__ __forceinline__ int64_t pack_stride() { return static_cast<int64_t>(blockDim.x) * kPack; }

}  // namespace eagle_kernels::cuda
