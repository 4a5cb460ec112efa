// One kernel launch, and what decides its shape.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>

#include "device.cuh"
#include "device.h"

namespace eagle_kernels::cuda {

struct Shape {
  int64_t x, y;
  int64_t threads;  // per row of a block
  int64_t shared_bytes;
  int64_t rows = 1;  // of a block
  int64_t cluster = 1;  // blocks in y of a cluster, on sm_90 and later; 1: no clusters
};

template <auto kernel, class Record>
int launch(const Shape& shape, const Record& record, const Device& device) {
  // From 2^32 blocks on the grid would be cut to 32 bits, and most rows would not be written. CUDA itself refuses what
  // is between its limits and that.
  if (shape.x > std::numeric_limits<int32_t>::max() || shape.y > 65535) return cudaErrorInvalidConfiguration;
  // Above 48 KB of shared memory a kernel has to opt in, once on each device: to all that a block can have, so that the
  // order of two launches does not matter.
  if (shape.shared_bytes > 48 << 10) {
    static std::array<std::atomic<bool>, kMaxDevices> allowed;
    if (!allowed[device.index]) {
      const cudaError_t refused = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(device.shared_memory));
      if (refused != cudaSuccess) return refused;
      allowed[device.index] = true;
    }
  }
  std::array<cudaLaunchAttribute, 2> attributes{};
  unsigned count = 0;
  if (device.has_clusters) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {1, static_cast<unsigned>(shape.cluster), 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.x), static_cast<unsigned>(shape.y));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.rows));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(device.stream);
  config.attrs = attributes.data();
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, record);
}

// Calls launch(T{}) with the element type of a record.
template <class Launch>
int with_dtype(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::kBFloat16:
      return launch(BFloat16{});
    case DType::kFloat16:
      return launch(Float16{});
    case DType::kFloat32:
      return launch(float{});
  }
  return 0;
}

// Collects whether every address and row stride is a multiple of 16 bytes, and every width of 8 values.
class Alignment {
 public:
  explicit Alignment(int64_t element_size) : element_size_(element_size) {}
  void add(const void* data) { bits_ |= reinterpret_cast<uintptr_t>(data); }
  // The stride of a single row is not used: a view may have any number there.
  void add(const void* data, int64_t row_stride, int64_t rows) {
    add(data);
    if (data != nullptr && rows > 1) bits_ |= static_cast<uintptr_t>(row_stride * element_size_);
  }
  void add_width(int64_t width) { bits_ |= static_cast<uintptr_t>(width * 2); }
  bool holds() const { return bits_ % 16 == 0; }

 private:
  int64_t element_size_;
  uintptr_t bits_ = 0;
};

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Threads for a row of `width` values in packs of 8, two packs per thread: 256 at 4096. A function of the width alone,
// like the order of the row's sums.
inline int64_t threads_of(int64_t width) {
  const int64_t wanted = (width + 15) / 16;
  return std::clamp<int64_t>((wanted + 31) / 32 * 32, 32, 512);
}

// Shared memory of sum_over_row.
inline int64_t sum_bytes(int64_t threads) { return threads / 32 * 4; }

// Blocks for rows of this width, in the memory-bound kernels. Up to 2048 columns a row has too few loads for a block of
// its own: rows share one of 256 threads, as long as every SM has two blocks. No sum depends on which rows share a
// block. Unaligned rows do not share: where the row depends on the thread, the norm of a sum in fp32 takes 71 registers
// on sm_100.
inline Shape shape_of_rows(int64_t rows, int64_t width, bool aligned, const Device& device) {
  const int64_t threads = threads_of(width), most = aligned ? std::max<int64_t>(1, 256 / threads) : 1;
  const int64_t of_block = std::clamp<int64_t>(rows / (2 * device.multiprocessors), 1, most);
  return {(rows + of_block - 1) / of_block, 1, threads, of_block * sum_bytes(threads), of_block};
}

}  // namespace eagle_kernels::cuda
