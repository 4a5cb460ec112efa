// norm_concat: from tensors to the record, and the primitive of both devices.
#include "norm_concat.h"

#include "checks.h"
#include "cpu/norm_concat.h"
#include "cuda/current_device.h"
#include "python_call.h"
#include "sources.h"

namespace eagle_kernels {
namespace {

constexpr const char* kOp = "norm_concat";

template <auto run>
void concat_out(const SourceArguments& arguments, const Output& out) {
  const Sources sources(kOp, arguments, out);
  check_shape(kOp, "out", out, out.size(0), sources.concat.width);

  NormConcat record{};
  record.source = sources.concat;
  record.num_rows = out.size(0);
  record.out = out.mutable_data();
  record.out_row_stride = out.stride(0);
  run(record, out.device_index);
}

template <auto run>
constexpr auto norm_concat_out = with_sources<&concat_out<run>>;

void run_on_cpu(const NormConcat& record, int32_t) { cpu::norm_concat(record); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) {
  define_alike(m, {"norm_concat_out", "norm_concat_checks_out"}, kSourcesSchema + ", Tensor(a!) out");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  implement<norm_concat_out<run_nothing>>(m, "norm_concat_checks_out", kCudaDevice);
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  implement<norm_concat_out<run_on_cpu>>(m, "norm_concat_out", kCpuDevice);
}

#if defined(EAGLE_KERNELS_WITH_CUDA)
namespace {

void run_on_cuda(const NormConcat& record, int32_t device_index) {
  check(record.source.num_chunks <= cuda::kMaxChunks, kOp, "chunks", "count on CUDA");
  if (record.num_rows > 0) cuda::launch(kOp, norm_concat_cuda, record, device_index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CUDA, m) {
  implement<norm_concat_out<run_on_cuda>>(m, "norm_concat_out", kCudaDevice);
}
#endif

}  // namespace eagle_kernels
