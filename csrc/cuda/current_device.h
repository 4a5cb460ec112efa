// The tensors' device as the current one of this thread, and torch's current stream on it.
#pragma once

#include "device.h"

struct AtenTensorOpaque;  // libtorch's

namespace eagle_kernels::cuda {

// CUDA versions as 13000 for 13.0: of the runtime in this library, and the newest that the driver supports, 0 without
// a driver. Neither creates a context.
int64_t runtime_version();
int64_t driver_version();

// torch's products of CUDA tensors into `out`, without the dispatcher; libtorch's error code, 0 for success. In order:
// a @ b; bias + a @ b, rounded once; a @ b of 16-bit operands, unrounded, where `dtype` is libtorch's number of fp32.
int32_t mm_out(AtenTensorOpaque* out, AtenTensorOpaque* a, AtenTensorOpaque* b);
int32_t addmm_out(AtenTensorOpaque* out, AtenTensorOpaque* bias, AtenTensorOpaque* a, AtenTensorOpaque* b);
int32_t mm_dtype_out(AtenTensorOpaque* out, AtenTensorOpaque* a, AtenTensorOpaque* b, int32_t dtype);

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

// Memory of torch's caching allocator and its graph pools, for what runs on the current stream. Not a tensor, whose
// creation takes the host 0.5 us more.
class Workspace {
 public:
  Workspace(const char* op, const CurrentDevice& device, int64_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
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
