// eagle_kernels._C: what this build is. No kernel is reached through it: the ops register those without Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "cpu/dispatch.h"

namespace {

namespace cpu = eagle_kernels::cpu;

std::map<std::string, std::string> build_info() {
  return {
      {"version", EAGLE_KERNELS_VERSION},
      {"compiler", __VERSION__},
      {"cuda_archs", EAGLE_KERNELS_CUDA_ARCHS},
      {"torch_headers", EAGLE_KERNELS_TORCH_VERSION},
  };
}

// The instruction sets this build has kernels for and this machine can run, in ascending order.
std::vector<std::string> cpu_features() {
  std::vector<std::string> names;
  for (int32_t isa = 0; isa <= static_cast<int32_t>(cpu::best_isa()); ++isa) {
    names.emplace_back(cpu::isa_name(static_cast<cpu::Isa>(isa)));
  }
  return names;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information of the compiled eagle-kernels.";
  m.def("build_info", &build_info, "Version, compiler, CUDA architectures and the torch whose headers were used.");
  m.def("cpu_features", &cpu_features, "Usable instruction sets of the CPU kernels, in ascending order.");
}
