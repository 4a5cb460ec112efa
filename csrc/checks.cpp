#include "checks.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>

namespace eagle_kernels {
namespace {

// The bytes of a tensor as rows; for [T, S, H] the rows of one stream. A dense tensor is one row, which has no pitch.
struct ByteRows {
  uintptr_t begin;
  int64_t rows, row_bytes, pitch;

  explicit ByteRows(const View& view, int64_t stream = 0)
      : begin(reinterpret_cast<uintptr_t>(view.at(view.dim == 3 ? stream * view.stride(1) : 0))) {
    const bool dense = view.dim != 2 && view.is_dense();
    rows = dense ? 1 : view.size(0);
    row_bytes = (dense ? view.numel() : view.dim >= 2 ? view.size(view.dim - 1) : 1) * view.element_size;
    pitch = dense ? 0 : view.stride(0) * view.element_size;
  }

  bool empty() const { return rows == 0 || row_bytes == 0; }
  uintptr_t end() const { return begin + (rows - 1) * pitch + row_bytes; }
};

bool overlap(const ByteRows& a, const ByteRows& b) {
  if (a.empty() || b.empty() || a.end() <= b.begin || b.end() <= a.begin) return false;
  // Slots of one packed buffer do not overlap: their rows have one pitch and lie beside each other.
  const int64_t pitch = a.rows > 1 ? a.pitch : b.pitch;
  if ((a.rows == 1 && b.rows == 1) || (a.rows > 1 && b.rows > 1 && a.pitch != b.pitch)) return true;
  if (pitch < std::max(a.row_bytes, b.row_bytes)) return true;
  int64_t distance = static_cast<int64_t>(b.begin - a.begin) % pitch;
  if (distance < 0) distance += pitch;
  return distance < a.row_bytes || distance + b.row_bytes > pitch;
}

}  // namespace

void expect_success(AOTITorchError failed) {
  if (failed) throw std::runtime_error("eagle-kernels: libtorch reported an error, which it has printed");
}

void fail_check(const char* op, const char* argument, const char* rule, std::source_location where) {
  const std::string_view file = where.file_name();
  throw std::runtime_error(std::string(op) + ": " + argument + ": " + rule + " (" +
                           std::string(file.substr(file.rfind('/') + 1)) + ":" + std::to_string(where.line()) + ")");
}

const TorchDType kTorchFloat{aoti_torch_dtype_float32()}, kTorchBFloat16{aoti_torch_dtype_bfloat16()},
    kTorchHalf{aoti_torch_dtype_float16()}, kTorchInt{aoti_torch_dtype_int32()}, kTorchLong{aoti_torch_dtype_int64()},
    kTorchInt8{aoti_torch_dtype_int8()}, kTorchByte{aoti_torch_dtype_uint8()},
    kTorchFloat8E4M3{aoti_torch_dtype_float8_e4m3fn()}, kTorchFloat8E8M0{torch_dtype_float8_e8m0fnu()};

View::View(const Tensor& tensor) {
  const AtenTensorHandle handle = tensor.get();
  int64_t *own_sizes = nullptr, *own_strides = nullptr;
  expect_success(torch_get_const_data_ptr(handle, &data));
  expect_success(aoti_torch_get_sizes(handle, &own_sizes));
  expect_success(aoti_torch_get_strides(handle, &own_strides));
  expect_success(aoti_torch_get_dim(handle, &dim));
  expect_success(aoti_torch_get_dtype(handle, &dtype.code));
  expect_success(aoti_torch_get_device_type(handle, &device_type));
  expect_success(aoti_torch_get_device_index(handle, &device_index));
  sizes = own_sizes;
  strides = own_strides;
  element_size = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype.code));
  // No memory on another device is ever touched: the checks of devices refuse it.
  const bool is_touched = device_type == kCpuDevice || device_type == kCudaDevice;
  check(data != nullptr || !is_touched || numel() == 0, "eagle_kernels", "tensor", "memory");
}

Tensor tensor_in_memory(const void* data, int64_t dim, const int64_t* sizes, const int64_t* strides, TorchDType dtype,
                        const View& like) {
  AtenTensorHandle handle;
  expect_success(aoti_torch_create_tensor_from_blob(const_cast<void*>(data), dim, sizes, strides, 0, dtype.code,
                                                    like.device_type, like.device_index, &handle));
  return Tensor(handle);
}

int64_t View::numel() const {
  int64_t elements = 1;
  for (int64_t i = 0; i < dim; ++i) elements *= size(i);
  return elements;
}

bool View::is_dense() const {
  int64_t elements = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    if (size(i) != 1 && stride(i) != elements) return numel() == 0;
    elements *= size(i);
  }
  return true;
}

bool overlap(const View& a, const View& b) {
  const int64_t streams = b.dim == 3 && !b.is_dense() ? b.size(1) : 1;
  for (int64_t stream = 0; stream < streams; ++stream) {
    if (overlap(ByteRows(a), ByteRows(b, stream))) return true;
  }
  return false;
}

}  // namespace eagle_kernels
