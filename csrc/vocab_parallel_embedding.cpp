// vocab_parallel_embedding: from tensors to the record, and the primitive of both devices.
#include "vocab_parallel_embedding.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cuda/current_device.h"
#include "python_call.h"

namespace eagle_kernels {
namespace {

constexpr const char* kOp = "vocab_parallel_embedding";

template <auto run>
void vocab_parallel_embedding_out(const View& ids, const View& weight, int64_t org_begin, int64_t org_end,
                                  int64_t added_begin, int64_t added_end, int64_t added_row,
                                  std::optional<double> scale, const OptionalView& scale_tensor, const Output& out) {
  check_floating(kOp, "weight", weight);
  check_rows(kOp, "weight", weight);
  const int64_t width = weight.size(1), rows = weight.size(0);
  check_device(kOp, "ids", ids, weight);
  check_integer(kOp, "ids", ids);
  check(ids.dim == 1, kOp, "ids", "dimensions");
  check_output(kOp, "out", out, weight);
  check_shape(kOp, "out", out, ids.size(0), width);
  check_no_overlap(kOp, "out", out, weight);
  check_no_overlap(kOp, "out", out, ids);
  check(0 <= org_begin && org_begin <= org_end, kOp, "shard", "original bounds");
  check(0 <= added_begin && added_begin <= added_end, kOp, "shard", "added bounds");
  check(org_end - org_begin <= rows, kOp, "shard", "original rows");
  const int64_t added = added_end - added_begin;
  check(added == 0 || (added <= rows && 0 <= added_row && added_row <= rows - added), kOp, "shard", "added rows");

  VocabParallelEmbedding record{};
  if (scale_tensor) {
    const View& view = *scale_tensor;
    check_device(kOp, "scale", view, weight);
    check_floating(kOp, "scale", view);
    check(view.dim == 0, kOp, "scale", "dimensions");
    check_no_overlap(kOp, "out", out, view);
    record.scale_tensor = {view.data, view.type()};
  }
  record.dtype = weight.type();
  record.element_size = weight.element_size;
  record.num_rows = ids.size(0);
  record.width = width;
  record.ids = ids.integers();
  record.ids_stride = ids.stride(0);
  record.weight = weight.data;
  record.weight_row_stride = weight.stride(0);
  record.org_begin = org_begin;
  record.org_end = org_end;
  record.added_begin = added_begin;
  record.added_end = added_end;
  record.added_row = added_row;
  record.has_scale = scale || scale_tensor;
  record.scale = static_cast<float>(scale.value_or(1.0));
  record.out = out.mutable_data();
  record.out_row_stride = out.stride(0);
  run(record, weight.device_index);
}

float value_of(const Vector& scalar) {
  switch (scalar.dtype) {
    case DType::kFloat32:
      return *static_cast<const float*>(scalar.data);
    case DType::kBFloat16:
      return static_cast<float>(*static_cast<const torch::headeronly::BFloat16*>(scalar.data));
    case DType::kFloat16:
      return static_cast<float>(*static_cast<const torch::headeronly::Half*>(scalar.data));
  }
  return 0;
}

constexpr cpu::PerIsa kCpu([](auto isa) { return &vocab_parallel_embedding_cpu<isa>; });

void run_on_cpu(VocabParallelEmbedding record, int32_t) {
  if (record.scale_tensor.data != nullptr) record.scale = value_of(record.scale_tensor);
  cpu::parallel_rows(kCpu.active(), record, record.width);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) {
  define_alike(m, {"vocab_parallel_embedding_out", "vocab_parallel_embedding_checks_out"},
               "Tensor ids, Tensor weight, int org_begin, int org_end, int added_begin, int added_end, "
               "int added_row, float? scale, Tensor? scale_tensor, Tensor(a!) out");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  implement<&vocab_parallel_embedding_out<run_nothing>>(m, "vocab_parallel_embedding_checks_out", kCudaDevice);
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  implement<&vocab_parallel_embedding_out<run_on_cpu>>(m, "vocab_parallel_embedding_out", kCpuDevice);
}

#if defined(EAGLE_KERNELS_WITH_CUDA)
namespace {

void run_on_cuda(const VocabParallelEmbedding& record, int32_t device_index) {
  if (record.num_rows > 0 && record.width > 0) cuda::launch(kOp, vocab_parallel_embedding_cuda, record, device_index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CUDA, m) {
  implement<&vocab_parallel_embedding_out<run_on_cuda>>(m, "vocab_parallel_embedding_out", kCudaDevice);
}
#endif

}  // namespace eagle_kernels
