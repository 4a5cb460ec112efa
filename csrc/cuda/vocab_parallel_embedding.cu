// A row gather of one vocabulary shard: ids of other shards give zero rows, so that the all-reduce over the shards adds
// up to the lookup. One launch, where engines mask, clamp, gather and fill in four kernels.
#include "../vocab_parallel_embedding.h"

#include "launch.cuh"
#include "pack.cuh"

namespace eagle_kernels::cuda {
namespace {

// The shard's row of ids[i], or -1.
__device__ __forceinline__ int64_t local_row(const VocabParallelEmbedding& op, int64_t i) {
  const int64_t id = load(op.ids, i * op.ids_stride);
  if (id >= op.org_begin && id < op.org_end) return id - op.org_begin;
  if (id >= op.added_begin && id < op.added_end) return id - op.added_begin + op.added_row;
  return -1;
}

template <class T>
__device__ __forceinline__ float scalar(const void* data, T) {
  return widen(load_bits(static_cast<const T*>(data)), T{}).first;
}
__device__ __forceinline__ float scalar(const void* data, float) { return load(static_cast<const float*>(data)); }

__device__ __forceinline__ float scale_of(const VocabParallelEmbedding& op) {
  if (op.scale_tensor.data == nullptr) return op.scale;
  switch (op.scale_tensor.dtype) {
    case DType::kBFloat16:
      return scalar(op.scale_tensor.data, BFloat16{});
    case DType::kFloat16:
      return scalar(op.scale_tensor.data, Float16{});
    default:
      return scalar(op.scale_tensor.data, float{});
  }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(512) vocab_parallel_embedding_kernel(
    const __grid_constant__ VocabParallelEmbedding op) {
  const int64_t i = row_of_thread<kAligned>();
  T* out = static_cast<T*>(op.out) + i * op.out_row_stride;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (i >= op.num_rows) return;
  const int64_t row = local_row(op, i);
  const float scale = op.has_scale ? scale_of(op) : 1.0f;
  const T* weight = static_cast<const T*>(op.weight) + row * op.weight_row_stride;
  for (int64_t first = first_column(); first < op.width; first += kInFlight * pack_stride()) {
    Pack<T> value[kInFlight] = {};
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (row >= 0) value[j] = load_pack<kAligned>(weight, first + j * pack_stride(), op.width);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (op.has_scale && row >= 0) {  // an infinite scale leaves a zero row zero
        Values x = widen(value[j]);
#pragma unroll
        for (int k = 0; k < kPack; ++k) x.v[k] *= scale;
        value[j] = narrow(x, T{});
      }
      store_pack<kAligned>(out, first + j * pack_stride(), op.width, value[j]);
    }
  }
}

}  // namespace
}  // namespace eagle_kernels::cuda

namespace eagle_kernels {

using namespace cuda;

int vocab_parallel_embedding_cuda(const VocabParallelEmbedding& record, const Device& device) {
  const int64_t rows = record.num_rows;
  Alignment alignment(record.element_size);
  alignment.add(record.weight, record.weight_row_stride, 2);  // the record does not say how many rows it has
  alignment.add(record.out, record.out_row_stride, rows);
  alignment.add_width(record.width);
  const Shape shape = shape_of_rows(rows, record.width, alignment.holds(), device);
  return with_dtype(record.dtype, [&](auto type) {
    using T = decltype(type);
    return alignment.holds() ? launch<vocab_parallel_embedding_kernel<T, true>>(shape, record, device)
                             : launch<vocab_parallel_embedding_kernel<T, false>>(shape, record, device);
  });
}

}  // namespace eagle_kernels
