// The only place in C++ that words an error: `op: argument has ..., expected ..., because ...`, the text of
// python/eagle_kernels/checks.py. The Python ops have checked everything before they call a primitive; these checks keep
// a primitive that is called directly from touching memory it should not.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
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

inline std::string device_text(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : (tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(tensor.get_device_index());
}

// The primitive was chosen by the device of one argument; the others may still lie elsewhere.
inline void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() == like.is_cuda() && tensor.get_device_index() == like.get_device_index(), op, ": ",
                  name, " is on ", device_text(tensor), ", expected ", device_text(like),
                  ", because the other arguments are there");
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns, op, ": ", name,
                  " has shape ", shape_text(tensor), ", expected (", rows, ", ", columns, ")");
}

inline void check_rows(const char* op, const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 2, op, ": ", name, " has shape ", shape_text(tensor), ", expected (T, H)");
  STD_TORCH_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1, op, ": ", name, " has last stride ", tensor.stride(1),
                  ", expected 1");
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, ScalarType expected) {
  STD_TORCH_CHECK(tensor.scalar_type() == expected, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()), ", expected ",
                  torch::headeronly::toString(expected));
}

// A row operand of another one's dtype, on its device.
inline void check_operand(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  check_device(op, name, tensor, like);
  check_rows(op, name, tensor);
  check_dtype(op, name, tensor, like.scalar_type());
}

// A dense run of `length` values: a vector, or several vectors packed behind each other.
inline void check_dense(const char* op, const char* name, const Tensor& tensor, int64_t length, const Tensor& like) {
  check_device(op, name, tensor, like);
  STD_TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == length, op, ": ", name, " has shape ",
                  shape_text(tensor), ", expected ", length, " dense values");
}

// What a CUDA call returned, 0 for success.
inline void check_cuda(const char* op, int code, const char* message) {
  STD_TORCH_CHECK(code == 0, op, ": CUDA has error ", code, " (", message, "), expected none");
}

// The bytes a tensor spans, from its first element to behind its last; none for an empty one.
struct ByteRange {
  uintptr_t begin, end;
};

inline ByteRange byte_range(const Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return {0, 0};
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + elements * tensor.element_size()};
}

// Whether rows of one pitch lie beside each other, as the slots of one packed buffer do.
inline bool interleave(const Tensor& a, const Tensor& b, int64_t distance) {
  if (a.dim() != 2 || b.dim() != 2) return false;
  const int64_t a_row = a.size(1) * a.element_size(), b_row = b.size(1) * b.element_size();
  const int64_t pitch = a.stride(0) * a.element_size();
  if (pitch < std::max(a_row, b_row) || b.stride(0) * static_cast<int64_t>(b.element_size()) != pitch) return false;
  distance = (distance % pitch + pitch) % pitch;
  return a_row <= distance && distance + b_row <= pitch;
}

// An output [T, H] in another one's dtype, on its device: rows that do not run into each other.
inline void check_output(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  check_operand(op, name, tensor, like);
  STD_TORCH_CHECK(tensor.size(0) <= 1 || tensor.stride(0) >= tensor.size(1), op, ": ", name, " has strides (",
                  tensor.stride(0), ", ", tensor.stride(1), "), expected rows that do not overlap each other");
}

inline void check_no_overlap(const char* op, const char* name, const Tensor& written, const char* read_name,
                             const Tensor& read) {
  const ByteRange out = byte_range(written), in = byte_range(read);
  const bool apart = out.begin >= in.end || in.begin >= out.end;
  STD_TORCH_CHECK(apart || interleave(written, read, static_cast<int64_t>(in.begin - out.begin)), op, ": ", name,
                  " overlaps ", read_name,
                  ", expected disjoint memory, because rows are written while others are read");
}

}  // namespace eagle_kernels
