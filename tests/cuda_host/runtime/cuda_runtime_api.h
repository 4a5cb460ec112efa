// The part of the CUDA runtime that csrc/cuda uses, with its names and numbers, on the emulated GPUs of runtime.cpp, so
// that the wheel's own launch layer (launch.cuh, current_device.cpp) runs here. As strict as CUDA where that layer may
// be wrong: shared memory that was not asked for, a stream of another device, an attribute that a GPU lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#define CUDART_VERSION 13000

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotSupported = 801,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};

using cudaStream_t = struct CUstream_st*;

struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int* version);
const char* cudaGetErrorString(cudaError_t error);

namespace eagle_kernels::cuda::host {

cudaError_t allow_shared_memory(const void* kernel, int bytes);
cudaError_t launch(const void* kernel, const cudaLaunchConfig_t& config, const std::function<void()>& thread);

}  // namespace eagle_kernels::cuda::host

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  return eagle_kernels::cuda::host::allow_shared_memory(reinterpret_cast<const void*>(kernel), value);
}

template <class Record>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Record), const Record& record) {
  return eagle_kernels::cuda::host::launch(reinterpret_cast<const void*>(kernel), *config, [&] { kernel(record); });
}
