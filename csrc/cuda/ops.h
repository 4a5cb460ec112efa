// The CUDA primitives, as ops.cpp registers them.
#pragma once

#include "../arguments.h"

namespace eagle_kernels::cuda {

void capture_hidden_out(const Tensor& hidden, const OptionalTensor& residual, Tensor out,
                        const OptionalTensor& sum_squares);

void add_rms_norm_out(const Tensor& hidden, const Tensor& residual, const Tensor& weight, double eps,
                      double norm_offset, Tensor out, Tensor out_sum);

void vocab_parallel_embedding_out(const Tensor& ids, const Tensor& weight, int64_t org_begin, int64_t org_end,
                                  int64_t added_begin, int64_t added_end, int64_t added_row,
                                  std::optional<double> scale, const OptionalTensor& scale_tensor, Tensor out);

void norm_concat_out(const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                     const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                     const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                     const OptionalTensor& sum_squares, Tensor out);

void norm_concat_linear_out(const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                            const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                            const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                            const OptionalTensor& sum_squares, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& post_norm_weight, double post_norm_eps, Tensor out);

}  // namespace eagle_kernels::cuda
