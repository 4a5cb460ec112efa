// The Python module of the emulation: configures the emulated GPUs and returns their launches. Importing it registers
// the CUDA primitives for CPU tensors, in torch.ops.eagle_kernels_emulated. Host files, launch layer, launchers and
// kernels are those of the wheel (registration.h); the CUDA runtime below them is runtime.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.cuh"
#include "h200.h"
#include "ranges.cuh"
#include "runtime.h"

namespace eagle_kernels::cuda::host {
namespace {

int set_device(int64_t shared_bytes, bool descending_warps, bool late_copies, int capability, int multiprocessors,
               uint32_t random) {
  set_warp_order(descending_warps);
  set_late_copies(late_copies);
  set_random(random);
  return use_gpu({capability, shared_bytes, multiprocessors});
}

// Registers of each thread.
template <class T>
using Registers = std::vector<std::vector<T>>;
using Bits = Registers<uint32_t>;

Registers<float> multiply_warp(const Bits& a, const Bits& b) {
  Registers<float> sums(32, std::vector<float>(4));
  const auto thread = [&] {
    const std::vector<uint32_t>&own_a = a[threadIdx.x], &own_b = b[threadIdx.x];
    float sum[4] = {};
    mma(sum, own_a[0], own_a[1], own_a[2], own_a[3], own_b[0], own_b[1], BFloat16{});
    sums[threadIdx.x].assign(sum, sum + 4);
  };
  run(thread, {}, {32, 1}, 16, 1);
  return sums;
}

// `b` is the content of shared memory.
Registers<float> multiply_warpgroup(const Bits& a, const std::vector<uint32_t>& b, uint64_t descriptor) {
  Registers<float> sums(128, std::vector<float>(32));
  const auto thread = [&] {
    const int i = threadIdx.x;
    if (i == 0) std::memcpy(shared_memory(), b.data(), b.size() * sizeof b[0]);
    const uint32_t registers[4] = {a[i][0], a[i][1], a[i][2], a[i][3]};
    float sum[8][4] = {};
    sync_block();
    fence_wgmma();
    wgmma<false>(sum, registers, descriptor, BFloat16{});
    commit_wgmma();
    wait_for_wgmma();
    sums[i].assign(sum[0], sum[0] + 32);
  };
  run(thread, {}, {128, 1}, b.size() * sizeof b[0], 1);
  return sums;
}

Bits load_matrices_at(const std::vector<uint32_t>& rows, const std::vector<uint32_t>& memory) {
  Bits words(32, std::vector<uint32_t>(4));
  const auto thread = [&] {
    if (threadIdx.x == 0) std::memcpy(shared_memory(), memory.data(), memory.size() * sizeof memory[0]);
    sync_block();
    uint32_t own[4];
    load_matrices(rows[threadIdx.x], own);
    words[threadIdx.x].assign(own, own + 4);
  };
  run(thread, {}, {32, 1}, memory.size() * sizeof memory[0], 1);
  return words;
}

// An H200, or another GPU with so many SMs.
Device gpu(int multiprocessors) {
  Device device{};
  device.multiprocessors = multiprocessors;
  return device;
}

int64_t clusters_at_once(int multiprocessors, int cluster, int blocks_on_an_sm) {
  return eagle_kernels::cuda::clusters_at_once(gpu(multiprocessors), cluster, blocks_on_an_sm);
}

float us_of_fused(bool is_codes, int64_t clusters, int ranges, int blocks_on_an_sm, bool in_pairs, int columns,
                  int longest, int units, bool has_second_part) {
  const FusedBlocks blocks{blocks_on_an_sm, in_pairs, columns};
  const FusedWork work{clusters, ranges, blocks, longest, units, has_second_part};
  return eagle_kernels::cuda::us_of_fused(gpu(132), is_codes, work);
}

float us_of_warpgroups(int64_t num_columns, int64_t width, int warpgroups, int ranges, int longest) {
  const WarpgroupWork work{num_columns, width, warpgroups, warpgroups <= 2 ? 2 : 1, ranges, longest};
  return eagle_kernels::cuda::us_of_warpgroups(gpu(132), work);
}

}  // namespace

PYBIND11_MODULE(eagle_kernels_emulated, m) {
  namespace py = pybind11;
  m.def("set_device", &set_device, py::arg("shared_bytes"), py::arg("descending_warps"),
        py::arg("late_copies") = false, py::arg("capability") = 90, py::arg("multiprocessors") = 132,
        py::arg("random") = 0,
        "Bytes of shared memory for a block, the order in which warps run, when asynchronous copies land, a seed that "
        "has both at random; returns the index of the tensors' GPU.");
  m.def("set_index", &use_tensors_device, "The tensors are on the GPU of this index.");
  m.def("set_stream", &use_stream, "The current stream, by number.");
  m.def("set_driver", &use_driver, "The driver's CUDA version, 13000 for 13.0.");
  m.def("current_device", &current_device, "Of this thread.");
  m.def("fail_next_launch", &fail_next_launch, "With this CUDA error.");
  m.def("run_kernels", &run_kernels, "False: launches are recorded and nothing runs.");
  m.def("take_launches", &take_launches, "What CUDA was asked for since the last call of this.");
  m.def("multiply_warp", &multiply_warp, "mma.m16n8k16 of the threads' registers of a and of b.");
  m.def("multiply_warpgroup", &multiply_warpgroup, "wgmma.m64n64k16 of registers and of described shared memory.");
  m.def("matrix_descriptor", &matrix_descriptor, "Of rows in shared memory that have 128 bytes, swizzled.");
  m.def("load_matrices", &load_matrices_at, "ldmatrix.x4 of the threads' addresses and of shared memory.");
  m.def("clusters_at_once", &clusters_at_once, "That a GPU is taken to run, by multiprocessors, size, blocks on one.");
  m.def("us_of_fused", &us_of_fused, "By whether the weight is codes, and h200.h's FusedWork.");
  m.def("us_of_warpgroups", &us_of_warpgroups, "By D, K*H, warpgroups of a block, ranges, stages of the longest.");
  m.def("wgmma_pays", &eagle_kernels::cuda::wgmma_pays, "By the number of chunks, their width, D, multiprocessors.");
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
