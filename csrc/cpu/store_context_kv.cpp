// k_norm, RoPE and the scatter into the cache of one draft layer, head by head: one pass over the product, where
// engines norm, copy the layers apart, rotate and store in four.
#include "../store_context_kv.h"

#include "norm_row.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

// turned[0, width) in place, by the angles of one position: in pairs of the two halves, or of neighbours.
template <class T>
void rotate(const StoreContextKV& op, int64_t position, float* turned) {
  const int64_t half = op.rotary_width / 2, row = position * op.cos_sin_row_stride;
  const int64_t item = op.cos_sin.dtype == DType::kFloat32 ? sizeof(float) : sizeof(T);
  const char* data = static_cast<const char*>(op.cos_sin.data);
  const Vector cos{data + row * item, op.cos_sin.dtype}, sin{data + (row + half) * item, op.cos_sin.dtype};
  if (!op.interleaved) {
    return for_each_vector(half, [=](int64_t i, auto span) {
      const Float a = load(turned + i, span), b = load(turned + half + i, span);
      const Float c = load_vector<T>(cos, i, span), s = load_vector<T>(sin, i, span);
      store(turned + i, a * c - b * s, span);
      store(turned + half + i, b * c + a * s, span);
    });
  }
  float angles[kMaxHeadDim];
  for_each_vector(half, [&](int64_t i, auto span) { store(angles + i, load_vector<T>(cos, i, span), span); });
  for_each_vector(half, [&](int64_t i, auto span) { store(angles + half + i, load_vector<T>(sin, i, span), span); });
  for (int64_t i = 0; i < half; ++i) {
    const float a = turned[2 * i], b = turned[2 * i + 1];
    turned[2 * i] = a * angles[i] - b * angles[half + i];
    turned[2 * i + 1] = b * angles[i] + a * angles[half + i];
  }
}

template <class T>
float rstd_of(const StoreContextKV& op, const T* x, int64_t width) {
  return rsqrt_mean(sum_of_squares(width, [=](int64_t i, auto span) { return load(x + i, span); }), width, op.eps);
}

template <class T>
void store_k(const StoreContextKV& op, const T* x, int64_t position, T* out) {
  float values[kMaxHeadDim];
  for_each_vector(op.head_dim, [&](int64_t i, auto span) { store(values + i, load(x + i, span), span); });
  if (op.norm_width > 0) {
    const float rstd = rstd_of(op, x, op.norm_width);
    for_each_vector(op.norm_width, [&](int64_t i, auto span) {
      Float value = load(values + i, span) * rstd;
      if (op.gain.data != nullptr) value *= op.norm_offset + load_vector<T>(op.gain, i, span);
      store(values + i, value, span);
    });
  }
  rotate<T>(op, position, values + op.rotary_begin);
  for_each_vector(op.head_dim, [&](int64_t i, auto span) { store(out + i, load(values + i, span), span); });
}

template <class T>
void store_v(const StoreContextKV& op, const T* x, T* out) {
  if (!op.v_is_k) {
    // A cache without columns may be a null pointer.
    if (op.head_dim > 0) __builtin_memcpy(out, x, op.head_dim * sizeof(T));
    return;
  }
  const float rstd = rstd_of(op, x, op.head_dim);
  for_each_vector(op.head_dim, [=](int64_t i, auto span) { store(out + i, load(x + i, span) * rstd, span); });
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA

namespace eagle_kernels {

using namespace cpu::EAGLE_KERNELS_ISA;

template <>
void store_context_kv_cpu<kIsa>(const StoreContextKV& op, int64_t row_begin, int64_t row_end) {
  with_dtype(op.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = row_begin; i < row_end; ++i) {
      const int64_t slot = op.slots[i], position = op.positions[i];
      if (slot < 0 || slot >= op.num_slots || position < 0 || position >= op.num_positions) continue;
      const T* row = static_cast<const T*>(op.kv) + i * op.kv_row_stride;
      const T* of_v = op.v_is_k ? row : row + op.num_heads * op.head_dim;
      for (int64_t head = 0; head < op.num_heads; ++head) {
        const auto at = [=](const Cache& cache) {
          return static_cast<T*>(cache.data) + slot * cache.slot_stride + head * cache.head_stride;
        };
        store_k(op, row + head * op.head_dim, position, at(op.k_cache));
        if (op.v_cache.data != nullptr) store_v(op, of_v + head * op.head_dim, at(op.v_cache));
      }
    }
  });
}

}  // namespace eagle_kernels
