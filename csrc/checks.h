// The only place in C++ that words an error: `op: argument has ..., expected ..., because ...`, the text of
// python/eagle_kernels/checks.py. The Python ops have checked everything before they call a primitive; these checks keep
// a primitive that is called directly from touching memory it should not.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <sstream>
#include <string>

namespace eagle_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << '(';
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) text << (dim ? ", " : "") << tensor.size(dim);
  text << ')';
  return text.str();
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns, op, ": ", name,
                  " has shape ", shape_text(tensor), ", expected (", rows, ", ", columns, ")");
}

inline void check_rows(const char* op, const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_cpu(), op, ": ", name, " is not on the CPU, expected a CPU tensor");
  STD_TORCH_CHECK(tensor.dim() == 2, op, ": ", name, " has shape ", shape_text(tensor), ", expected (T, H)");
  STD_TORCH_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1, op, ": ", name, " has last stride ", tensor.stride(1),
                  ", expected 1");
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, ScalarType expected) {
  STD_TORCH_CHECK(tensor.scalar_type() == expected, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", expected ",
                  torch::headeronly::toString(expected));
}

// A row operand of the op's dtype.
inline void check_operand(const char* op, const char* name, const Tensor& tensor, ScalarType dtype) {
  check_rows(op, name, tensor);
  check_dtype(op, name, tensor, dtype);
}

// A dense run of `length` values: a vector, or several vectors packed behind each other.
inline void check_dense(const char* op, const char* name, const Tensor& tensor, int64_t length) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() == length, op, ": ", name, " has shape ",
                  shape_text(tensor), ", expected ", length, " dense values on the CPU");
}

}  // namespace eagle_kernels
