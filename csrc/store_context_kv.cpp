// store_context_kv: from tensors to the record, and the primitive of the CPU.
#include "store_context_kv.h"

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "python_call.h"

namespace eagle_kernels {
namespace {

constexpr const char* kOp = "store_context_kv";
constexpr cpu::PerIsa kCpu([](auto isa) { return &store_context_kv_cpu<isa>; });

uintptr_t end_of(const View& view) {
  int64_t last = 0;
  for (int64_t i = 0; i < view.dim; ++i) last += (view.size(i) - 1) * view.stride(i);
  return reinterpret_cast<uintptr_t>(view.at(last + 1));
}

// Whether the byte ranges of the two, from the first element to the last, overlap. `overlap` of checks.h also tells
// rows that lie between the other's rows from these; but neither a cache nor an input lies in another's gaps.
bool touch(const View& a, const View& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  return reinterpret_cast<uintptr_t>(a.data) < end_of(b) && reinterpret_cast<uintptr_t>(b.data) < end_of(a);
}

// Whether every element of a cache has a place of its own. The stride of a dimension of one entry is not used.
bool is_disjoint(const View& cache) {
  const int64_t slots = cache.size(0), heads = cache.size(1), d = cache.size(2);
  const int64_t span_of_slots = (slots - 1) * cache.stride(0) + d, span_of_heads = (heads - 1) * cache.stride(1) + d;
  if (heads <= 1) return slots <= 1 || cache.stride(0) >= d;
  if (slots <= 1) return cache.stride(1) >= d;
  const bool of_slots = cache.stride(1) >= d && cache.stride(0) >= span_of_heads;
  return of_slots || (cache.stride(0) >= d && cache.stride(1) >= span_of_slots);
}

Cache cache_of(const char* name, const Output& view, const View& kv) {
  check_device(kOp, name, view, kv);
  check_dtype(kOp, name, view, kv.dtype);
  check(view.dim == 3, kOp, name, "dimensions");
  check(view.size(2) <= 1 || view.stride(2) == 1, kOp, name, "last stride");
  check(view.size(2) <= kMaxHeadDim, kOp, name, "head");
  check(view.numel() == 0 || is_disjoint(view), kOp, name, "strides");
  return {view.mutable_data(), view.stride(0), view.stride(1)};
}

Integers integers_of(const char* name, const View& view, const View& kv) {
  check_device(kOp, name, view, kv);
  check_integer(kOp, name, view);
  check(view.dim == 1 && view.size(0) == kv.size(0), kOp, name, "shape");
  check(view.size(0) <= 1 || view.stride(0) == 1, kOp, name, "stride");
  return view.integers();
}

template <auto run>
void store_context_kv_out(const View& kv, const OptionalView& gain, double eps, double norm_offset, int64_t norm_width,
                          const View& cos_sin, int64_t rotary_begin, bool interleaved, const View& positions,
                          const View& slots, const Output& k_cache, const std::optional<Output>& v_cache) {
  check_floating(kOp, "kv", kv);
  check_rows(kOp, "kv", kv);
  StoreContextKV record{};
  record.k_cache = cache_of("k_cache", k_cache, kv);
  const int64_t heads = k_cache.size(1), head_dim = k_cache.size(2);
  if (v_cache) {
    record.v_cache = cache_of("v_cache", *v_cache, kv);
    const bool same = v_cache->size(0) == k_cache.size(0) && v_cache->size(1) == heads && v_cache->size(2) == head_dim;
    check(same, kOp, "v_cache", "shape");
  }
  const int64_t width = heads * head_dim;
  check(kv.size(1) == width || (v_cache && kv.size(1) == 2 * width), kOp, "kv", "shape");
  record.positions = integers_of("positions", positions, kv);
  record.slots = integers_of("slots", slots, kv);
  check(0 <= norm_width && norm_width <= head_dim, kOp, "norm_width", "value");
  if (gain) {
    check_vector(kOp, "k_norm_weight", *gain, norm_width, kv);
    record.gain = {gain->data, gain->type()};
  }
  check_eps(kOp, "eps", eps);
  check_finite(kOp, "norm_offset", norm_offset);
  check_device(kOp, "cos_sin", cos_sin, kv);
  check(cos_sin.dtype == kv.dtype || cos_sin.dtype == kTorchFloat, kOp, "cos_sin", "dtype");
  check_rows(kOp, "cos_sin", cos_sin);
  check(cos_sin.size(1) % 2 == 0, kOp, "cos_sin", "pairs");
  check(0 <= rotary_begin && rotary_begin <= head_dim, kOp, "rotary_begin", "value");
  check(cos_sin.size(1) <= head_dim - rotary_begin, kOp, "cos_sin", "width");
  for (const View* input : {&kv, &positions, &slots, &cos_sin, gain ? &*gain : nullptr}) {
    if (input == nullptr) continue;
    check(!touch(k_cache, *input), kOp, "k_cache", "overlap");
    check(!v_cache || !touch(*v_cache, *input), kOp, "v_cache", "overlap");
  }

  record.dtype = kv.type();
  record.num_rows = kv.size(0);
  record.num_heads = heads;
  record.head_dim = head_dim;
  record.kv = kv.data;
  record.kv_row_stride = kv.stride(0);
  record.v_is_k = v_cache && kv.size(1) == width;
  record.eps = static_cast<float>(eps);
  record.norm_offset = static_cast<float>(norm_offset);
  record.norm_width = norm_width;
  record.cos_sin = {cos_sin.data, cos_sin.type()};
  record.cos_sin_row_stride = cos_sin.stride(0);
  record.num_positions = cos_sin.size(0);
  record.rotary_begin = rotary_begin;
  record.rotary_width = cos_sin.size(1);
  record.interleaved = interleaved;
  record.num_slots = k_cache.size(0);
  run(record);
}

void run_on_cpu(const StoreContextKV& record) {
  cpu::parallel_rows(kCpu.active(), record, 2 * record.num_heads * record.head_dim);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) {
  define_alike(m, {"store_context_kv_out", "store_context_kv_checks_out"},
               "Tensor kv, Tensor? k_norm_weight, float eps, float norm_offset, int norm_width, Tensor cos_sin, "
               "int rotary_begin, bool interleaved, Tensor positions, Tensor slots, Tensor(a!) k_cache, "
               "Tensor(b!)? v_cache");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  implement<&store_context_kv_out<run_nothing>>(m, "store_context_kv_checks_out", kCudaDevice);
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  implement<&store_context_kv_out<run_on_cpu>>(m, "store_context_kv_out", kCpuDevice);
}

}  // namespace eagle_kernels
