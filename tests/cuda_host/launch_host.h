// A launch on the CPU; see device_host.h.
#pragma once

namespace eagle_kernels::cuda {

template <class Record>
int launch(void (*kernel)(Record), const Shape& shape, const Record& record, const Device& device) {
  if (shape.shared_bytes > device.shared_memory) return 1;  // cudaErrorInvalidValue
  host::run([&] { kernel(record); }, {static_cast<int>(shape.x), static_cast<int>(shape.y)},
            static_cast<int>(shape.threads), shape.shared_bytes);
  return 0;
}

}  // namespace eagle_kernels::cuda
