// The element types of the ops, and a vector in one of them. Here and in every record: plain pointers, strides in
// elements, the last dimension contiguous, so that no kernel knows a torch header.
#pragma once

#include <cstdint>

namespace eagle_kernels {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// A per-column vector (gain, bias) in the op's dtype or in fp32; null data means absent.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

}  // namespace eagle_kernels
