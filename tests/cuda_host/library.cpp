// The Python module of the emulation: what the emulated GPUs are like, and what they were asked. Importing it registers
// the CUDA primitives on CPU tensors, torch.ops.eagle_kernels_emulated. The host files, the launch layer, the launchers
// and the kernels are those of the wheel (registration.h); the CUDA runtime below them is runtime.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.cuh"
#include "runtime.h"

namespace eagle_kernels::cuda::host {
namespace {

int set_device(int64_t shared_bytes, bool descending_warps, bool late_copies, int capability, int multiprocessors) {
  set_warp_order(descending_warps);
  set_late_copies(late_copies);
  return use_gpu({capability, shared_bytes, multiprocessors});
}

}  // namespace

PYBIND11_MODULE(eagle_kernels_emulated, m) {
  namespace py = pybind11;
  m.def("set_device", &set_device, py::arg("shared_bytes"), py::arg("descending_warps"),
        py::arg("late_copies") = false, py::arg("capability") = 90, py::arg("multiprocessors") = 132,
        "Bytes of shared memory for a block, the order in which warps run, when asynchronous copies land; returns the "
        "index of the tensors' GPU.");
  m.def("set_index", &use_tensors_device, "The tensors are on the GPU of this index.");
  m.def("set_stream", &use_stream, "The current stream, by number.");
  m.def("set_driver", &use_driver, "The driver's CUDA version, 13000 for 13.0.");
  m.def("current_device", &current_device, "Of this thread.");
  m.def("fail_next_launch", &fail_next_launch, "With this CUDA error.");
  m.def("run_kernels", &run_kernels, "False: launches are recorded and nothing runs.");
  m.def("take_launches", &take_launches, "What CUDA was asked for since the last call of this.");
  py::class_<Launch>(m, "Launch")
      .def_readonly("device", &Launch::device)
      .def_readonly("stream", &Launch::stream)
      .def_readonly("grid", &Launch::grid)
      .def_readonly("threads", &Launch::threads)
      .def_readonly("rows", &Launch::rows)
      .def_readonly("cluster", &Launch::cluster)
      .def_readonly("shared_bytes", &Launch::shared_bytes)
      .def_readonly("pdl", &Launch::pdl)
      .def_readonly("early_copies", &Launch::early_copies);
}

}  // namespace eagle_kernels::cuda::host
