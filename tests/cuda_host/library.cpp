// torch.ops.eagle_kernels_emulated: the CUDA primitives on CPU tensors. csrc/cuda/ops.cpp, the launchers and the
// kernels are those of the wheel; only current_device.cpp is replaced, by the end of this file.
#include <torch/csrc/stable/library.h>

#include "../../csrc/cuda/current_device.h"
#include "../../csrc/cuda/ops.h"
#include "../../csrc/schemas.h"
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

STABLE_TORCH_LIBRARY(eagle_kernels_emulated, m) {
  m.def("set_device(int shared_bytes, bool descending_warps) -> ()");
  define_primitives(m);
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_emulated, CompositeExplicitAutograd, m) {
  m.impl("set_device", TORCH_BOX(&set_device));
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_emulated, CPU, m) {
  m.impl("capture_hidden_out", TORCH_BOX(&capture_hidden_out));
  m.impl("add_rms_norm_out", TORCH_BOX(&add_rms_norm_out));
  m.impl("vocab_parallel_embedding_out", TORCH_BOX(&vocab_parallel_embedding_out));
  m.impl("norm_concat_out", TORCH_BOX(&norm_concat_out));
  m.impl("norm_concat_linear_out", TORCH_BOX(&norm_concat_linear_out));
}

CurrentDevice::CurrentDevice(const char*, const Tensor&) { device_.shared_memory = shared_limit; }
CurrentDevice::~CurrentDevice() = default;

void check_cuda(const char* op, int code) { eagle_kernels::check_cuda(op, code, "emulated"); }

}  // namespace eagle_kernels::cuda
