// What torch.ops.eagle_kernels_C and libeagle_kernels.so have besides the ops, each of which registers itself.
//
// The primitives never choose: python/eagle_kernels decides which one runs. All of csrc but module.cpp is on the
// libtorch stable ABI (target 2.11) and has no Python in it, so that one build serves every torch from 2.11 on, CPU or
// CUDA.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "concat.h"
#include "cpu/dispatch.h"
#include "norm_concat_linear.h"

namespace eagle_kernels {
namespace {

// Caps the instruction set and returns the active one: the best that the machine has up to the cap. Numbers, not names:
// strings in stable-ABI schemas change hands differently in torch 2.13 and 2.14 (pytorch#190493).
int64_t set_cpu_isa(int64_t cap) {
  const int64_t isa = std::clamp<int64_t>(cap, 0, static_cast<int64_t>(cpu::best_isa()));
  cpu::active_isa = static_cast<cpu::Isa>(isa);
  return isa;
}

}  // namespace

// Read with ctypes, without the module _C, which is bound to one Python.
#define EAGLE_KERNELS_EXPORT extern "C" __attribute__((visibility("default")))

// The archs this library has CUDA kernels for, as CMakeLists.txt spells them.
EAGLE_KERNELS_EXPORT const char* eagle_kernels_cuda_archs() { return EAGLE_KERNELS_CUDA_ARCHS; }
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_max_cuda_chunks() { return cuda::kMaxChunks; }
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_max_cuda_decode_rows() { return cuda::kMaxDecodeRows; }

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) { m.def("set_cpu_isa(int cap) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}

}  // namespace eagle_kernels
