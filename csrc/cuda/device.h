// Where a launch goes, and what a launcher has to know of it. A launcher (`<op>_cuda`, at the end of the op's .cu)
// picks the template instance and launches once; it returns a CUDA error code, 0 for success, and neither checks an
// argument nor allocates nor waits.
#pragma once

#include <cstdint>

namespace eagle_kernels::cuda {

constexpr int kMaxDevices = 64;

struct Device {
  void* stream;           // cudaStream_t
  int32_t index;          // below kMaxDevices
  bool has_clusters;      // and programmatic dependent launch: sm_90 and later
  bool wgmma;             // sm_90 alone
  int64_t shared_memory;  // bytes that a block can have
  int32_t multiprocessors;
};

}  // namespace eagle_kernels::cuda
