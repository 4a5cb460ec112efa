// The schemas of the primitives, the same for every device.
#pragma once

#include <string>

namespace eagle_kernels {

template <class Library>
void define_primitives(Library& library) {
  const std::string sources =
      "(Tensor[] chunks, int num_chunks, int norm, Tensor[] gains, float[] eps, float norm_offset, "
      "Tensor?[] residuals, Tensor?[] indices, Tensor? sum_squares";
  library.def("capture_hidden_out(Tensor hidden, Tensor? residual, Tensor(a!) out, Tensor(b!)? sum_squares) -> ()");
  library.def(
      "add_rms_norm_out(Tensor hidden, Tensor residual, Tensor weight, float eps, float norm_offset, Tensor(a!) out, "
      "Tensor(b!) out_sum) -> ()");
  library.def(
      "vocab_parallel_embedding_out(Tensor ids, Tensor weight, int org_begin, int org_end, int added_begin, "
      "int added_end, int added_row, float? scale, Tensor? scale_tensor, Tensor(a!) out) -> ()");
  library.def(("norm_concat_out" + sources + ", Tensor(a!) out) -> ()").c_str());
  library.def(("norm_concat_linear_out" + sources +
               ", Tensor weight, Tensor? bias, Tensor? post_norm_weight, float post_norm_eps, Tensor(a!) out) -> ()")
                  .c_str());
}

}  // namespace eagle_kernels
