// The tensors' device as the current one of this thread, and torch's current stream on it.
#pragma once

#include "device.h"

namespace eagle_kernels::cuda {

class CurrentDevice {
 public:
  // Makes the device the current one where it is not.
  CurrentDevice(const char* op, int32_t index);
  // Puts back the device that was current.
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;

  const Device& get() const { return device_; }

 private:
  Device device_{};
  int previous_ = -1;
};

// Raises where a CUDA call, or a launcher, returned an error.
void expect_success(const char* op, int code);

// One launch on the tensors' device and torch's stream.
template <class Record>
void launch(const char* op, int (*launcher)(const Record&, const Device&), const Record& record, int32_t device_index) {
  const CurrentDevice device(op, device_index);
  expect_success(op, launcher(record, device.get()));
}

}  // namespace eagle_kernels::cuda
