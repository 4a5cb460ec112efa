// How tests configure and query the emulated GPUs of runtime.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace eagle_kernels::cuda::host {

struct Gpu {
  int capability;  // 90 for 9.0
  int64_t shared_bytes;
  int multiprocessors;
  bool operator==(const Gpu&) const = default;
};

// A launch as it was requested; without a grid, a kernel's request for more shared memory.
struct Launch {
  int device;
  int64_t stream;
  std::array<int, 2> grid;
  int threads;  // in x
  int rows;     // of threads, in y
  int cluster;  // blocks, in y
  int64_t shared_bytes;
  bool pdl;
  int64_t early_copies;  // of 16 bytes, issued before the previous kernel has ended
};

// Puts the tensors on a GPU like this, and returns its index.
int use_gpu(const Gpu& gpu);
void use_tensors_device(int index);
// The current stream of every device.
void use_stream(int64_t number);
void use_driver(int version);
int current_device();
void fail_next_launch(int error);
// Whether kernels run, or launches are only recorded.
void run_kernels(bool run);
std::vector<Launch> take_launches();

}  // namespace eagle_kernels::cuda::host
