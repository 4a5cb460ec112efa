// k_cache[slots[i], h] = round(rope(k_norm(kv[i, h]), positions[i])); v_cache[slots[i], h] = kv[i, n + h], or the
// unit-gain norm of kv[i, h].
#pragma once

#include "cpu/isa.h"
#include "dtype.h"

namespace eagle_kernels {

constexpr int64_t kMaxHeadDim = 1024;  // the kernels keep a head in fp32 on the stack

struct Cache {
  void* data;  // [slots, heads, head_dim], or null
  int64_t slot_stride;
  int64_t head_stride;
};

struct StoreContextKV {
  DType dtype;
  int64_t num_rows;
  int64_t num_heads;
  int64_t head_dim;
  const void* kv;
  int64_t kv_row_stride;
  bool v_is_k;
  Vector gain;  // [norm_width] or absent
  float eps;
  float norm_offset;
  int64_t norm_width;
  Vector cos_sin;  // [num_positions, rotary_width]
  int64_t cos_sin_row_stride;
  int64_t num_positions;
  int64_t rotary_begin;
  int64_t rotary_width;
  bool interleaved;
  Integers positions;
  Integers slots;
  int64_t num_slots;
  Cache k_cache;
  Cache v_cache;
};

template <cpu::Isa isa>
void store_context_kv_cpu(const StoreContextKV& op, int64_t row_begin, int64_t row_end);

}  // namespace eagle_kernels
