// torch.ops.eagle_kernels_emulated: the CUDA primitives on CPU tensors. The host files, the launchers and the kernels are
// those of the wheel (registration.h); only current_device.cpp is replaced, by the end of this file.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

#include "../../csrc/cuda/current_device.h"
#include "device.cuh"

namespace eagle_kernels::cuda {
namespace {

int64_t shared_limit = 0;

// What the emulated GPU is like: bytes of shared memory for a block, and the order in which warps run.
void set_device(int64_t shared_bytes, bool descending_warps) {
  shared_limit = shared_bytes;
  host::set_warp_order(descending_warps);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_emulated, m) {
  m.def("set_device(int shared_bytes, bool descending_warps) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_emulated, CompositeExplicitAutograd, m) {
  m.impl("set_device", TORCH_BOX(&set_device));
}

CurrentDevice::CurrentDevice(const char*, int32_t) { device_.shared_memory = shared_limit; }
CurrentDevice::~CurrentDevice() = default;

void expect_success(const char* op, int code) {
  if (code != 0) throw std::runtime_error(std::string(op) + ": CUDA has error " + std::to_string(code));
}

}  // namespace eagle_kernels::cuda
