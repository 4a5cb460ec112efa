// The tensors' device as the current one of this thread, and torch's current stream on it.
#pragma once

#include "../checks.h"
#include "launchers.h"

namespace eagle_kernels::cuda {

class CurrentDevice {
 public:
  // Makes the tensor's device the current one where it is not.
  CurrentDevice(const char* op, const Tensor& tensor);
  // Puts back the device that was current.
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;

  const Device& get() const { return device_; }

 private:
  Device device_{};
  int previous_ = -1;
};

// Raises where a CUDA call returned an error.
void check_cuda(const char* op, int code);

}  // namespace eagle_kernels::cuda
