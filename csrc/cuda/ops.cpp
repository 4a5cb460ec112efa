// The CUDA primitives: arguments.h turns tensors into a record, a launcher runs it on the tensors' device and stream.
#include "ops.h"

#include "current_device.h"
#include "launchers.h"

namespace eagle_kernels::cuda {
namespace {

// A kernel parameter holds the chunks' records.
void check_num_chunks(const char* op, int64_t num_chunks) {
  STD_TORCH_CHECK(num_chunks <= kMostChunks, op, ": chunks has K = ", num_chunks, ", expected at most ", kMostChunks,
                  " on CUDA");
}

}  // namespace

void capture_hidden_out(const Tensor& hidden, const OptionalTensor& residual, Tensor out,
                        const OptionalTensor& sum_squares) {
  constexpr const char* op = "capture_hidden";
  const CaptureHidden record = capture_hidden_record(hidden, residual, out, sum_squares);
  if (hidden.numel() == 0) return;
  const CurrentDevice device(op, hidden);
  check_cuda(op, capture_hidden(record, hidden.size(0), device.get()));
}

void add_rms_norm_out(const Tensor& hidden, const Tensor& residual, const Tensor& weight, double eps,
                      double norm_offset, Tensor out, Tensor out_sum) {
  constexpr const char* op = "add_rms_norm";
  const AddRmsNorm record = add_rms_norm_record(hidden, residual, weight, eps, norm_offset, out, out_sum);
  if (hidden.numel() == 0) return;
  const CurrentDevice device(op, hidden);
  check_cuda(op, add_rms_norm(record, hidden.size(0), device.get()));
}

void vocab_parallel_embedding_out(const Tensor& ids, const Tensor& weight, int64_t org_begin, int64_t org_end,
                                  int64_t added_begin, int64_t added_end, int64_t added_row,
                                  std::optional<double> scale, const OptionalTensor& scale_tensor, Tensor out) {
  constexpr const char* op = "vocab_parallel_embedding";
  const VocabParallelEmbedding record = vocab_parallel_embedding_record(
      ids, weight, org_begin, org_end, added_begin, added_end, added_row, scale, scale_tensor, out);
  if (out.numel() == 0) return;
  const CurrentDevice device(op, weight);
  check_cuda(op, vocab_parallel_embedding(record, out.size(0), device.get()));
}

void norm_concat_out(const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                     const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                     const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                     const OptionalTensor& sum_squares, Tensor out) {
  constexpr const char* op = "norm_concat";
  check_num_chunks(op, num_chunks);
  check_rows(op, "out", out);
  const int64_t rows = out.size(0);
  const Sources sources(op, chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares, rows);
  const NormConcat record = norm_concat_record(sources, chunks[0], out);
  if (out.numel() == 0) return;
  const CurrentDevice device(op, out);
  check_cuda(op, norm_concat(record, rows, device.get()));
}

void norm_concat_linear_out(const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                            const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                            const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                            const OptionalTensor& sum_squares, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& post_norm_weight, double post_norm_eps, Tensor out) {
  constexpr const char* op = "norm_concat_linear";
  check_num_chunks(op, num_chunks);
  check_rows(op, "out", out);
  const Sources sources(op, chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares,
                        out.size(0));
  const NormConcatLinear record =
      norm_concat_linear_record(sources, chunks[0], weight, bias, post_norm_weight, post_norm_eps, out);
  STD_TORCH_CHECK(norm_concat_linear_takes(record), op,
                  ": an operand does not fit the fused CUDA kernel, expected a 16-bit dtype, no post_norm_weight, "
                  "widths that are multiples of 8, and addresses and row strides that are multiples of 16 bytes");
  if (out.numel() == 0) return;
  const CurrentDevice device(op, out);
  check_cuda(op, norm_concat_linear(record, device.get()));
}

}  // namespace eagle_kernels::cuda
