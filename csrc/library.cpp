// What torch.ops.eagle_kernels_C and libeagle_kernels.so have besides the ops, each of which registers itself.
//
// The primitives never choose: python/eagle_kernels decides which one runs. All of csrc is on the libtorch
// stable ABI (target 2.11) and linked to no Python (python_call.cpp is handed what it calls), so that one build serves
// every torch from 2.11 on, CPU or CUDA, and every Python.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>

#include "concat.h"
#include "cpu/dispatch.h"
#include "cpu/workspace.h"
#include "cuda/current_device.h"
#include "export.h"
#include "norm_concat_linear.h"

namespace eagle_kernels {
namespace {

// Caps the instruction set and returns the active one: the best that the machine has up to the cap. Numbers, not names:
// strings in stable-ABI schemas are passed differently in torch 2.13 and 2.14 (pytorch#190493).
int64_t set_cpu_isa(int64_t cap) {
  const int64_t isa = std::clamp<int64_t>(cap, 0, static_cast<int64_t>(cpu::best_isa()));
  cpu::active_isa = static_cast<cpu::Isa>(isa);
  return isa;
}

// Workspaces of up to so many bytes are kept; returns the number before. The calling thread's is freed.
int64_t keep_workspaces(int64_t max_bytes) { return cpu::Workspace::keep(max_bytes); }

}  // namespace

// Describes this build, one fact a line. CMakeLists.txt writes the list of archs that it has CUDA kernels for.
EAGLE_KERNELS_EXPORT const char* eagle_kernels_build_info() {
  static const std::string info = "version: " EAGLE_KERNELS_VERSION
                                  "\nnamespace: " EAGLE_KERNELS_NAMESPACE
                                  "\ncompiler: " __VERSION__
                                  "\ntorch_headers: " EAGLE_KERNELS_TORCH_VERSION
                                  "\ncuda_archs: " EAGLE_KERNELS_CUDA_ARCHS
                                  "\ncpu_isas: " + std::string(cpu::kIsaNames);
  return info.c_str();
}
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_max_cuda_chunks() { return cuda::kMaxChunks; }
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_max_cuda_decode_rows() { return cuda::kMaxDecodeRows; }
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_max_cuda_split_rows() { return cuda::kMaxSplitRows; }
#if defined(EAGLE_KERNELS_WITH_CUDA)
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_cuda_runtime_version() { return cuda::runtime_version(); }
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_cuda_driver_version() { return cuda::driver_version(); }
EAGLE_KERNELS_EXPORT bool eagle_kernels_wgmma_pays(int64_t num_chunks, int64_t width, int64_t num_columns,
                                                   int64_t multiprocessors) {
  return cuda::wgmma_pays(num_chunks, width, num_columns, static_cast<int32_t>(multiprocessors));
}
#else
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_cuda_runtime_version() { return 0; }
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_cuda_driver_version() { return 0; }
EAGLE_KERNELS_EXPORT bool eagle_kernels_wgmma_pays(int64_t, int64_t, int64_t, int64_t) { return false; }
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) {
  m.def("set_cpu_isa(int cap) -> int");
  m.def("keep_workspaces(int max_bytes) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("keep_workspaces", TORCH_BOX(&keep_workspaces));
}

}  // namespace eagle_kernels
