// The Python module of the emulation: what the emulated GPU is like. Importing it registers the CUDA primitives on CPU
// tensors, torch.ops.eagle_kernels_emulated. The host files, the launchers and the kernels are those of the wheel
// (registration.h); only current_device.cpp is replaced, by the end of this file.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "../../csrc/cuda/current_device.h"
#include "device.cuh"

namespace eagle_kernels::cuda {
namespace {

int64_t shared_limit = 0;

void set_device(int64_t shared_bytes, bool descending_warps) {
  shared_limit = shared_bytes;
  host::set_warp_order(descending_warps);
}

}  // namespace

PYBIND11_MODULE(eagle_kernels_emulated, m) {
  m.def("set_device", &set_device, pybind11::arg("shared_bytes"), pybind11::arg("descending_warps"),
        "Bytes of shared memory for a block, and the order in which warps run.");
}

CurrentDevice::CurrentDevice(const char*, int32_t) { device_.shared_memory = shared_limit; }
CurrentDevice::~CurrentDevice() = default;

void expect_success(const char* op, int code) {
  if (code != 0) throw std::runtime_error(std::string(op) + ": CUDA has error " + std::to_string(code));
}

}  // namespace eagle_kernels::cuda
