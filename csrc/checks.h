// What the primitives check of their arguments, the same for CPU and CUDA: all that would make touching memory unsafe
// or a result wrong. A failure names the op, the argument, the rule and the line that asked for the check; nothing has
// been written then:
//
//   norm_concat_linear: weight: shape (norm_concat_linear.cpp:32)
//
// Users never read it: python/eagle_kernels/checks.py writes the message that they see. tests/test_primitives.py finds
// every call of a function named check... in csrc and requires a call of a primitive that it refuses. Only memory is
// checked before any op knows the tensor (`View`), in the name of eagle_kernels.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <source_location>

#include "dtype.h"

namespace eagle_kernels {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Throws if a call of libtorch failed; libtorch's macro for this has another name in each release from 2.11 to 2.13.
void expect_success(AOTITorchError failed);

[[noreturn]] void fail_check(const char* op, const char* argument, const char* rule, std::source_location where);

inline void check(bool ok, const char* op, const char* argument, const char* rule,
                  std::source_location where = std::source_location::current()) {
  if (!ok) [[unlikely]] fail_check(op, argument, rule, where);
}

// An element type as libtorch numbers it.
struct TorchDType {
  int32_t code;
  bool operator==(const TorchDType&) const = default;
};

extern const TorchDType kTorchFloat, kTorchBFloat16, kTorchHalf, kTorchInt, kTorchLong, kTorchInt8, kTorchByte,
    kTorchFloat8E4M3, kTorchFloat8E8M0;

// Device types as libtorch numbers them.
constexpr int32_t kCpuDevice = 0, kCudaDevice = 1, kAnyDevice = -1;

// What is read of a tensor, once: each accessor of the stable ABI is a call into libtorch.
struct View {
  View() = default;
  // Throws for a tensor on CPU or CUDA whose storage was released: null stands for an operand that is absent.
  explicit View(const Tensor& tensor);

  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  int64_t numel() const;
  bool is_dense() const;
  // For the types that the ops compute in and count with; others have been refused.
  DType type() const {
    return dtype == kTorchFloat ? DType::kFloat32 : dtype == kTorchHalf ? DType::kFloat16 : DType::kBFloat16;
  }
  Integers integers() const { return {data, dtype == kTorchLong}; }
  bool is_floating() const { return dtype == kTorchFloat || dtype == kTorchBFloat16 || dtype == kTorchHalf; }
  const void* at(int64_t element) const { return static_cast<const char*>(data) + element * element_size; }

  const void* data = nullptr;
  const int64_t* sizes = nullptr;  // these two are the tensor's own
  const int64_t* strides = nullptr;
  int64_t dim = 0;
  int64_t element_size = 0;
  TorchDType dtype{};
  int32_t device_type = 0, device_index = 0;
};

// What a primitive writes: memory that no lazy copy shares.
struct Output : View {
  Output() = default;
  explicit Output(const Tensor& tensor) : View(tensor) { data = tensor.mutable_data_ptr(); }

  void* mutable_data() const { return const_cast<void*>(data); }
};

using OptionalView = std::optional<View>;

// A tensor in memory that it does not own, on the device of `like`.
Tensor tensor_in_memory(const void* data, int64_t dim, const int64_t* sizes, const int64_t* strides, TorchDType dtype,
                        const View& like);

// Each argument, since the dispatcher chose the primitive by the devices of all of them together.
inline void check_device(const char* op, const char* name, const View& view, const View& like,
                         std::source_location where = std::source_location::current()) {
  check(view.device_type == like.device_type && view.device_index == like.device_index, op, name, "device", where);
}

inline void check_dtype(const char* op, const char* name, const View& view, TorchDType expected,
                        std::source_location where = std::source_location::current()) {
  check(view.dtype == expected, op, name, "dtype", where);
}

inline void check_floating(const char* op, const char* name, const View& view,
                           std::source_location where = std::source_location::current()) {
  check(view.is_floating(), op, name, "dtype", where);
}

inline void check_integer(const char* op, const char* name, const View& view,
                          std::source_location where = std::source_location::current()) {
  check(view.dtype == kTorchInt || view.dtype == kTorchLong, op, name, "dtype", where);
}

// [T, H], whose rows are dense.
inline void check_rows(const char* op, const char* name, const View& view,
                       std::source_location where = std::source_location::current()) {
  check(view.dim == 2, op, name, "dimensions", where);
  check(view.size(1) <= 1 || view.stride(1) == 1, op, name, "last stride", where);
}

// For a tensor of two dimensions.
inline void check_shape(const char* op, const char* name, const View& view, int64_t rows, int64_t columns,
                        std::source_location where = std::source_location::current()) {
  check(view.size(0) == rows && view.size(1) == columns, op, name, "shape", where);
}

// [T, H] of the device and dtype of `like`.
inline void check_operand(const char* op, const char* name, const View& view, const View& like,
                          std::source_location where = std::source_location::current()) {
  check_device(op, name, view, like, where);
  check_dtype(op, name, view, like.dtype, where);
  check_rows(op, name, view, where);
}

// [T, H] that is written: its rows must not overlap. A single row's stride is never used.
inline void check_output(const char* op, const char* name, const View& view, const View& like,
                         std::source_location where = std::source_location::current()) {
  check_operand(op, name, view, like, where);
  check(view.size(0) <= 1 || view.stride(0) >= view.size(1), op, name, "row stride", where);
}

// Dense values in the dtype of `like` or fp32: a vector, or several one after another.
inline void check_dense(const char* op, const char* name, const View& view, int64_t length, const View& like,
                        std::source_location where = std::source_location::current()) {
  check_device(op, name, view, like, where);
  check(view.dtype == like.dtype || view.dtype == kTorchFloat, op, name, "dtype", where);
  check(view.numel() == length, op, name, "shape", where);
  check(view.is_dense(), op, name, "strides", where);
}

inline void check_vector(const char* op, const char* name, const View& view, int64_t length, const View& like,
                         std::source_location where = std::source_location::current()) {
  check(view.dim == 1, op, name, "dimensions", where);
  check_dense(op, name, view, length, like, where);
}

// NaN is not >= 0, and is refused. The kernels add eps in fp32.
inline void check_eps(const char* op, const char* name, double eps,
                      std::source_location where = std::source_location::current()) {
  check(eps >= 0 && eps <= static_cast<double>(__FLT_MAX__), op, name, "value", where);
}

// NaN is refused. The kernels take the number in fp32.
inline void check_finite(const char* op, const char* name, double value,
                         std::source_location where = std::source_location::current()) {
  check(value >= -static_cast<double>(__FLT_MAX__) && value <= static_cast<double>(__FLT_MAX__), op, name, "value",
        where);
}

bool overlap(const View& a, const View& b);

// Kernels write rows while they read others.
inline void check_no_overlap(const char* op, const char* name, const View& written, const View& other,
                             std::source_location where = std::source_location::current()) {
  check(!overlap(written, other), op, name, "overlap", where);
}

}  // namespace eagle_kernels
