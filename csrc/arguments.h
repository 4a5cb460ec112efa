// From tensors to records: what the CPU and the CUDA primitives check and read of their arguments, once for both.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "records.h"

namespace eagle_kernels {

using OptionalTensor = std::optional<Tensor>;

CaptureHidden capture_hidden_record(const Tensor& hidden, const OptionalTensor& residual, const Tensor& out,
                                    const OptionalTensor& sum_squares);

AddRmsNorm add_rms_norm_record(const Tensor& hidden, const Tensor& residual, const Tensor& weight, double eps,
                               double norm_offset, const Tensor& out, const Tensor& out_sum);

// A scale that is a tensor stays where it is: `scale_tensor` of the record points to it.
VocabParallelEmbedding vocab_parallel_embedding_record(const Tensor& ids, const Tensor& weight, int64_t org_begin,
                                                       int64_t org_end, int64_t added_begin, int64_t added_end,
                                                       int64_t added_row, std::optional<double> scale,
                                                       const OptionalTensor& scale_tensor, const Tensor& out);

// The sources of norm_concat and norm_concat_linear; a packed `chunks` (one tensor, num_chunks > 1) is split here by
// pointer arithmetic, since Python slices would cost 1 us each. `record.chunks` points into `chunks`.
struct Sources {
  Sources(const char* op, const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
          const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
          const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
          const OptionalTensor& sum_squares, int64_t num_rows);
  Sources(const Sources&) = delete;

  void check_no_overlap_with(const Tensor& out) const;

  NormConcat record{};

 private:
  bool is_packed() const { return static_cast<int64_t>(tensors_.size()) != num_chunks_; }
  void add_chunks();
  void add_indices(const std::vector<OptionalTensor>& indices);
  void add_gains(const std::vector<Tensor>& gains);
  void check_packed_gain(const Tensor& gain) const;
  void add_eps(const std::vector<double>& eps);
  void add_sum_squares(const Tensor& sum_squares);

  const char* op_;
  const std::vector<Tensor>& tensors_;
  const std::vector<OptionalTensor>& residuals_;
  const Tensor& first_;  // its dtype and device are everyone's
  int64_t num_chunks_;
  int64_t num_rows_;
  std::vector<Chunk> chunks_;
};

NormConcat norm_concat_record(const Sources& sources, const Tensor& first_chunk, const Tensor& out);

NormConcatLinear norm_concat_linear_record(const Sources& sources, const Tensor& first_chunk, const Tensor& weight,
                                           const OptionalTensor& bias, const OptionalTensor& post_norm_weight,
                                           double post_norm_eps, const Tensor& out);

}  // namespace eagle_kernels
