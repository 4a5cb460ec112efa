// The element types of the ops, a vector in one of them, and integers. Here and in every record: plain pointers,
// strides in elements, the last dimension contiguous, so that no kernel knows a torch header.
#pragma once

#include <cstdint>

namespace eagle_kernels {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// A per-column vector (gain, bias) in the op's dtype or in fp32; null data means absent.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// Row numbers, token ids, positions: int32 or int64. Null data means there are none.
struct Integers {
  const void* data = nullptr;
  bool are_int64 = false;
  // On the host; CUDA kernels load them (cuda/device.cuh). Always inlined, since the linker would keep one copy for all
  // instruction sets (cpu/simd.h).
  [[gnu::always_inline]] int64_t operator[](int64_t i) const {
    return are_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace eagle_kernels
