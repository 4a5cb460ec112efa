// capture_hidden: from tensors to the record, and the primitive of both devices.
#include "capture_hidden.h"

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cuda/current_device.h"
#include "python_call.h"

namespace eagle_kernels {
namespace {

constexpr const char* kOp = "capture_hidden";

template <auto run>
void capture_hidden_out(const View& hidden, const OptionalView& residual, const Output& out,
                        const std::optional<Output>& sum_squares) {
  check_floating(kOp, "hidden", hidden);
  const bool streams = hidden.dim == 3;
  if (streams) {
    check(hidden.size(1) >= 1, kOp, "hidden", "streams");
    check(hidden.size(2) <= 1 || hidden.stride(2) == 1, kOp, "hidden", "last stride");
  } else {
    check_rows(kOp, "hidden", hidden);
  }
  const int64_t rows = hidden.size(0), width = hidden.size(hidden.dim - 1);
  check_output(kOp, "out", out, hidden);
  check_shape(kOp, "out", out, rows, width);
  check_no_overlap(kOp, "out", out, hidden);
  if (residual) {
    check(!streams, kOp, "residual", "streams");
    check_operand(kOp, "residual", *residual, hidden);
    check_shape(kOp, "residual", *residual, rows, width);
    check_no_overlap(kOp, "out", out, *residual);
  }
  if (sum_squares) {
    check_device(kOp, "sum_squares", *sum_squares, hidden);
    check_dtype(kOp, "sum_squares", *sum_squares, kTorchFloat);
    check(sum_squares->dim == 1 && sum_squares->size(0) == rows, kOp, "sum_squares", "shape");
    check(rows <= 1 || sum_squares->stride(0) >= 1, kOp, "sum_squares", "stride");
    check_no_overlap(kOp, "sum_squares", *sum_squares, hidden);
    check_no_overlap(kOp, "sum_squares", *sum_squares, out);
    if (residual) check_no_overlap(kOp, "sum_squares", *sum_squares, *residual);
  }

  CaptureHidden record{};
  record.dtype = hidden.type();
  record.num_rows = rows;
  record.width = width;
  record.hidden = hidden.data;
  record.hidden_row_stride = hidden.stride(0);
  if (streams) {
    record.num_streams = hidden.size(1);
    record.hidden_stream_stride = hidden.stride(1);
  }
  if (residual) {
    record.residual = residual->data;
    record.residual_row_stride = residual->stride(0);
  }
  record.out = out.mutable_data();
  record.out_row_stride = out.stride(0);
  if (sum_squares) {
    record.sum_squares = static_cast<float*>(sum_squares->mutable_data());
    record.sum_squares_row_stride = sum_squares->stride(0);
  }
  run(record, hidden.device_index);
}

constexpr cpu::PerIsa kCpu([](auto isa) { return &capture_hidden_cpu<isa>; });

void run_on_cpu(const CaptureHidden& record, int32_t) {
  cpu::parallel_rows(kCpu.active(), record, record.width * (record.num_streams + 1));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) {
  define_alike(m, {"capture_hidden_out", "capture_hidden_checks_out"},
               "Tensor hidden, Tensor? residual, Tensor(a!) out, Tensor(b!)? sum_squares");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  implement<&capture_hidden_out<run_nothing>>(m, "capture_hidden_checks_out", kCudaDevice);
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  implement<&capture_hidden_out<run_on_cpu>>(m, "capture_hidden_out", kCpuDevice);
}

#if defined(EAGLE_KERNELS_WITH_CUDA)
namespace {

void run_on_cuda(const CaptureHidden& record, int32_t device_index) {
  if (record.num_rows > 0) cuda::launch(kOp, capture_hidden_cuda, record, device_index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CUDA, m) {
  implement<&capture_hidden_out<run_on_cuda>>(m, "capture_hidden_out", kCudaDevice);
}
#endif

}  // namespace eagle_kernels
