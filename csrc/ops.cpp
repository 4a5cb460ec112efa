// The compiled primitives torch.ops.eagle_kernels_C.*: schemas, the CPU launchers (the split of rows over threads), and
// the registration of both backends.
//
// They never choose: python/eagle_kernels decides which primitive runs. Everything here is on the libtorch stable ABI
// (target 2.11) and holds no Python, so that one build serves every torch from 2.11 on, CPU or CUDA.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>

#include "arguments.h"
#include "cpu/kernels.h"
#include "schemas.h"
#if defined(EAGLE_KERNELS_WITH_CUDA)
#include "cuda/ops.h"
#endif

namespace eagle_kernels {
namespace {

std::atomic<cpu::Isa> selected_isa{cpu::Isa::kScalar};

const cpu::Kernels& kernels() { return cpu::kernels(selected_isa.load(std::memory_order_relaxed)); }

// Rows per thread below which a second thread costs more than it saves: at::internal::GRAIN_SIZE elements.
int64_t row_grain(int64_t width) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(width, 1)); }

template <typename Function>
void parallel_over(int64_t count, int64_t grain, const Function& function) {
  if (count > 0) torch::stable::parallel_for(0, count, grain, function);
}

void capture_hidden_out(const Tensor& hidden, const OptionalTensor& residual, Tensor out,
                        const OptionalTensor& sum_squares) {
  const CaptureHidden record = capture_hidden_record(hidden, residual, out, sum_squares);
  parallel_over(hidden.size(0), row_grain(record.width),
                [&](int64_t begin, int64_t end) { kernels().capture_hidden(record, begin, end); });
}

void add_rms_norm_out(const Tensor& hidden, const Tensor& residual, const Tensor& weight, double eps,
                      double norm_offset, Tensor out, Tensor out_sum) {
  const AddRmsNorm record = add_rms_norm_record(hidden, residual, weight, eps, norm_offset, out, out_sum);
  parallel_over(hidden.size(0), row_grain(record.width),
                [&](int64_t begin, int64_t end) { kernels().add_rms_norm(record, begin, end); });
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

void vocab_parallel_embedding_out(const Tensor& ids, const Tensor& weight, int64_t org_begin, int64_t org_end,
                                  int64_t added_begin, int64_t added_end, int64_t added_row,
                                  std::optional<double> scale, const OptionalTensor& scale_tensor, Tensor out) {
  VocabParallelEmbedding record = vocab_parallel_embedding_record(
      ids, weight, org_begin, org_end, added_begin, added_end, added_row, scale, scale_tensor, out);
  if (record.scale_tensor.data != nullptr) record.scale = value_of(record.scale_tensor);
  parallel_over(ids.size(0), row_grain(record.width),
                [&](int64_t begin, int64_t end) { kernels().vocab_parallel_embedding(record, begin, end); });
}

void norm_concat_out(const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                     const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                     const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                     const OptionalTensor& sum_squares, Tensor out) {
  constexpr const char* op = "norm_concat";
  check_rows(op, "out", out);
  const int64_t rows = out.size(0);
  const Sources sources(op, chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares, rows);
  const NormConcat record = norm_concat_record(sources, chunks[0], out);
  parallel_over(rows, row_grain(record.width),
                [&](int64_t begin, int64_t end) { kernels().norm_concat(record, begin, end); });
}

void norm_concat_linear_out(const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                            const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                            const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                            const OptionalTensor& sum_squares, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& post_norm_weight, double post_norm_eps, Tensor out) {
  constexpr const char* op = "norm_concat_linear";
  check_rows(op, "out", out);
  const int64_t rows = out.size(0), columns = out.size(1);
  const Sources sources(op, chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares, rows);
  NormConcatLinear record =
      norm_concat_linear_record(sources, chunks[0], weight, bias, post_norm_weight, post_norm_eps, out);
  if (rows == 0 || columns == 0) return;

  const cpu::Kernels& table = kernels();
  const Tensor workspace =
      torch::stable::new_empty(out, {table.norm_concat_linear_workspace(record)}, std::make_optional(ScalarType::Byte));
  record.workspace = workspace.mutable_data_ptr();
  parallel_over(table.norm_concat_linear_row_groups(record), 1,
                [&](int64_t begin, int64_t end) { table.norm_concat_linear_pack(record, begin, end); });
  parallel_over(table.norm_concat_linear_panels(record), 1,
                [&](int64_t begin, int64_t end) { table.norm_concat_linear_project(record, begin, end); });
  if (post_norm_weight) {
    parallel_over(rows, row_grain(columns),
                  [&](int64_t begin, int64_t end) { table.norm_concat_linear_post_norm(record, begin, end); });
  }
}

// Caps the instruction set and returns the one in force: the best the machine has up to the cap. Numbers, not names:
// strings in stable-ABI schemas change hands differently in torch 2.13 and 2.14 (pytorch#190493).
int64_t set_cpu_isa(int64_t cap) {
  const auto isa = std::min(static_cast<cpu::Isa>(cap), cpu::best_isa());
  selected_isa = isa;
  return static_cast<int64_t>(isa);
}

}  // namespace

// The archs this library has CUDA kernels for, as CMakeLists.txt spells them; read with ctypes, without the module _C,
// which is bound to one Python.
extern "C" __attribute__((visibility("default"))) const char* eagle_kernels_cuda_archs() {
  return EAGLE_KERNELS_CUDA_ARCHS;
}

STABLE_TORCH_LIBRARY(eagle_kernels_C, m) {
  m.def("set_cpu_isa(int cap) -> int");
  define_primitives(m);
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  m.impl("capture_hidden_out", TORCH_BOX(&capture_hidden_out));
  m.impl("add_rms_norm_out", TORCH_BOX(&add_rms_norm_out));
  m.impl("vocab_parallel_embedding_out", TORCH_BOX(&vocab_parallel_embedding_out));
  m.impl("norm_concat_out", TORCH_BOX(&norm_concat_out));
  m.impl("norm_concat_linear_out", TORCH_BOX(&norm_concat_linear_out));
}

#if defined(EAGLE_KERNELS_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CUDA, m) {
  m.impl("capture_hidden_out", TORCH_BOX(&cuda::capture_hidden_out));
  m.impl("add_rms_norm_out", TORCH_BOX(&cuda::add_rms_norm_out));
  m.impl("vocab_parallel_embedding_out", TORCH_BOX(&cuda::vocab_parallel_embedding_out));
  m.impl("norm_concat_out", TORCH_BOX(&cuda::norm_concat_out));
  m.impl("norm_concat_linear_out", TORCH_BOX(&cuda::norm_concat_linear_out));
}
#endif

}  // namespace eagle_kernels
