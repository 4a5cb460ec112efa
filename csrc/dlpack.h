// The part of DLPack 1.3 that is used here. It is a C ABI that keeps its layout within a major version; torch's copy of
// its header (ATen/dlpack.h) refuses to be included by a library of the stable ABI.
#pragma once

#include <cstdint>

namespace eagle_kernels::dlpack {

constexpr uint32_t kMajorVersion = 1;
// DLDeviceType.
constexpr int32_t kCpu = 1, kCuda = 2;
// DLDataTypeCode.
constexpr int kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kFloat8E4M3FN = 10, kFloat8E8M0FNU = 14;

struct Device {
  int32_t type;
  int32_t index;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t dim;
  DataType dtype;
  int64_t* sizes;
  int64_t* strides;
  uint64_t byte_offset;
};

// DLPackExchangeAPI: `torch.Tensor.__dlpack_c_exchange_api__`.
struct Exchange {
  uint32_t major, minor;
  const Exchange* older;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*tensor_of)(void* object, Tensor* tensor);  // borrowed; not 0 with an exception set
  int (*current_stream)(int32_t device_type, int32_t index, void** stream);
};

}  // namespace eagle_kernels::dlpack
