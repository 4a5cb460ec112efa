// add_rms_norm: from tensors to the record, and the primitive of both devices.
#include "add_rms_norm.h"

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cuda/current_device.h"
#include "python_call.h"

namespace eagle_kernels {
namespace {

constexpr const char* kOp = "add_rms_norm";

template <auto run>
void add_rms_norm_out(const View& hidden, const View& residual, const View& weight, double eps, double norm_offset,
                      const Output& out, const Output& out_sum) {
  check_floating(kOp, "hidden", hidden);
  check_rows(kOp, "hidden", hidden);
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  check_operand(kOp, "residual", residual, hidden);
  check_shape(kOp, "residual", residual, rows, width);
  check_vector(kOp, "weight", weight, width, hidden);
  check_eps(kOp, "eps", eps);
  check_finite(kOp, "norm_offset", norm_offset);
  check_output(kOp, "out", out, hidden);
  check_shape(kOp, "out", out, rows, width);
  check_output(kOp, "out_sum", out_sum, hidden);
  check_shape(kOp, "out_sum", out_sum, rows, width);
  check_no_overlap(kOp, "out", out, hidden);
  check_no_overlap(kOp, "out", out, residual);
  check_no_overlap(kOp, "out", out, weight);
  check_no_overlap(kOp, "out", out, out_sum);
  check_no_overlap(kOp, "out_sum", out_sum, hidden);
  check_no_overlap(kOp, "out_sum", out_sum, residual);
  check_no_overlap(kOp, "out_sum", out_sum, weight);

  AddRmsNorm record{};
  record.dtype = hidden.type();
  record.num_rows = rows;
  record.width = width;
  record.hidden = hidden.data;
  record.hidden_row_stride = hidden.stride(0);
  record.residual = residual.data;
  record.residual_row_stride = residual.stride(0);
  record.gain = {weight.data, weight.type()};
  record.eps = static_cast<float>(eps);
  record.norm_offset = static_cast<float>(norm_offset);
  record.normed = out.mutable_data();
  record.normed_row_stride = out.stride(0);
  record.sum = out_sum.mutable_data();
  record.sum_row_stride = out_sum.stride(0);
  run(record, hidden.device_index);
}

constexpr cpu::PerIsa kCpu([](auto isa) { return &add_rms_norm_cpu<isa>; });

void run_on_cpu(const AddRmsNorm& record, int32_t) { cpu::parallel_rows(kCpu.active(), record, record.width); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) {
  define_alike(m, {"add_rms_norm_out", "add_rms_norm_checks_out"},
               "Tensor hidden, Tensor residual, Tensor weight, float eps, float norm_offset, Tensor(a!) out, "
               "Tensor(b!) out_sum");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  implement<&add_rms_norm_out<run_nothing>>(m, "add_rms_norm_checks_out", kCudaDevice);
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  implement<&add_rms_norm_out<run_on_cpu>>(m, "add_rms_norm_out", kCpuDevice);
}

#if defined(EAGLE_KERNELS_WITH_CUDA)
namespace {

void run_on_cuda(const AddRmsNorm& record, int32_t device_index) {
  if (record.num_rows > 0 && record.width > 0) cuda::launch(kOp, add_rms_norm_cuda, record, device_index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CUDA, m) {
  implement<&add_rms_norm_out<run_on_cuda>>(m, "add_rms_norm_out", kCudaDevice);
}
#endif

}  // namespace eagle_kernels
