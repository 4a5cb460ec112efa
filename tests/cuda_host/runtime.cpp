// The emulated GPUs: what the CUDA runtime and libtorch_cuda answer for them, and a record of every launch.
#include "runtime.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "device.cuh"
#include "runtime/cuda_runtime_api.h"
#include "runtime/dlfcn.h"

namespace eagle_kernels::cuda::host {
namespace {

std::vector<Gpu> gpus;
int device_of_tensors = 0;
int current = 0;
int64_t stream_number = 0;
int driver = CUDART_VERSION;
cudaError_t failure_of_next_launch = cudaSuccess;
std::map<std::pair<const void*, int>, int> allowed_shared_memory;  // by kernel and device
std::vector<Launch> launches;
bool kernels_run = true;

constexpr int64_t kStreams = 1000;  // of a device; 0 is its default stream

// A stream encodes its device, as CUDA's knows its own.
void* stream_of(int device) { return reinterpret_cast<void*>(device * kStreams + stream_number); }

}  // namespace

int use_gpu(const Gpu& gpu) {
  for (size_t i = 0; i < gpus.size(); ++i) {
    if (gpus[i] == gpu) return device_of_tensors = static_cast<int>(i);
  }
  gpus.push_back(gpu);
  return device_of_tensors = static_cast<int>(gpus.size()) - 1;
}

void use_stream(int64_t number) { stream_number = number; }
void use_tensors_device(int index) { device_of_tensors = index; }
void use_driver(int version) { driver = version; }
int current_device() { return current; }
void fail_next_launch(int error) { failure_of_next_launch = static_cast<cudaError_t>(error); }
void run_kernels(bool run) { kernels_run = run; }
std::vector<Launch> take_launches() { return std::exchange(launches, {}); }

cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  if (bytes > gpus[current].shared_bytes) return cudaErrorInvalidValue;
  allowed_shared_memory[{kernel, current}] = bytes;
  launches.push_back({current, 0, {0, 0}, 0, 0, 0, bytes, false, 0});
  return cudaSuccess;
}

cudaError_t launch(const void* kernel, const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  if (failure_of_next_launch != cudaSuccess) return std::exchange(failure_of_next_launch, cudaSuccess);
  const auto stream = reinterpret_cast<int64_t>(config.stream);
  if (stream / kStreams != current) return cudaErrorInvalidResourceHandle;
  const auto shared = static_cast<int64_t>(config.dynamicSmemBytes);
  const auto asked = allowed_shared_memory.find({kernel, current});
  if (shared > (asked == allowed_shared_memory.end() ? 48 << 10 : asked->second)) return cudaErrorInvalidValue;
  const Dim3 grid{static_cast<int>(config.gridDim.x), static_cast<int>(config.gridDim.y)};
  bool pdl = false;
  int cluster = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (gpus[current].capability < 90) return cudaErrorNotSupported;
    pdl |= attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization &&
           attribute.val.programmaticStreamSerializationAllowed == 1;
    if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
    const auto dim = attribute.val.clusterDim;
    cluster = static_cast<int>(dim.y);
    if (dim.x != 1 || dim.z != 1 || cluster < 1 || cluster > 8 || grid.y % cluster != 0) return cudaErrorInvalidValue;
  }
  const Dim3 block{static_cast<int>(config.blockDim.x), static_cast<int>(config.blockDim.y)};
  launches.push_back({current, stream % kStreams, {grid.x, grid.y}, block.x, block.y, cluster, shared, pdl, 0});
  if (kernels_run) run(thread, grid, block, shared, cluster);
  launches.back().early_copies = take_early_copies();
  return cudaSuccess;
}

}  // namespace eagle_kernels::cuda::host

using namespace eagle_kernels::cuda::host;

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return driver / 1000 < CUDART_VERSION / 1000 ? cudaErrorInsufficientDriver : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device >= static_cast<int>(gpus.size())) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device >= static_cast<int>(gpus.size())) return cudaErrorInvalidDevice;
  const Gpu& gpu = gpus[device];
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? gpu.capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? gpu.capability % 10
           : attribute == cudaDevAttrMultiProcessorCount    ? gpu.multiprocessors
                                                            : static_cast<int>(gpu.shared_bytes);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidDevice ? "invalid device ordinal" : "emulated error";
}

static int32_t get_current_cuda_stream(int32_t device, void** stream) {
  *stream = stream_of(device);
  return 0;
}

extern "C" void* emulated_dlopen(const char* file, int) {
  return std::strcmp(file, "libtorch_cuda.so") == 0 ? &gpus : nullptr;
}

// Like torch's allocator: on the current device, and uninitialized, which here is NaN.
static int32_t raw_alloc(uint64_t bytes, void** memory) {
  if (current != device_of_tensors) return 1;
  *memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::memset(*memory, 0xff, bytes);
  return 0;
}

static int32_t raw_delete(void* memory) {
  std::free(memory);
  return 0;
}

// For an overload of mm that only CUDA has: 16-bit operands and sums in fp32.
struct Matrix {
  explicit Matrix(AtenTensorHandle tensor) {
    aoti_torch_get_data_ptr(tensor, &data);
    aoti_torch_get_sizes(tensor, &sizes);
    aoti_torch_get_strides(tensor, &strides);
    int32_t dtype;
    aoti_torch_get_dtype(tensor, &dtype);
    is_bfloat16 = dtype == aoti_torch_dtype_bfloat16();
    is_float16 = dtype == aoti_torch_dtype_float16();
    is_float32 = dtype == aoti_torch_dtype_float32();
  }
  int64_t place(int64_t row, int64_t column) const { return row * strides[0] + column * strides[1]; }
  double at(int64_t row, int64_t column) const {
    const uint32_t bits = static_cast<const uint16_t*>(data)[place(row, column)];
    using namespace eagle_kernels::cuda;
    return is_bfloat16 ? widen(bits, BFloat16{}).first : widen(bits, Float16{}).first;
  }

  void* data;
  int64_t *sizes, *strides;
  bool is_bfloat16, is_float16, is_float32;
};

static int32_t mm_dtype_out(AtenTensorHandle out_handle, AtenTensorHandle a_handle, AtenTensorHandle b_handle,
                            int32_t dtype) {
  const Matrix out(out_handle), a(a_handle), b(b_handle);
  const bool is_same = (a.is_bfloat16 && b.is_bfloat16) || (a.is_float16 && b.is_float16);
  const bool fits = out.sizes[0] == a.sizes[0] && out.sizes[1] == b.sizes[1] && a.sizes[1] == b.sizes[0];
  if (!is_same || !fits || !out.is_float32 || dtype != aoti_torch_dtype_float32()) return 1;
  for (int64_t i = 0; i < out.sizes[0]; ++i) {
    for (int64_t j = 0; j < out.sizes[1]; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < a.sizes[1]; ++k) sum += a.at(i, k) * b.at(k, j);
      static_cast<float*>(out.data)[out.place(i, j)] = static_cast<float>(sum);
    }
  }
  return 0;
}

extern "C" void* emulated_dlsym(void*, const char* name) {
  static const std::map<std::string_view, void*> known{
      {"aoti_torch_cuda_mm_out", reinterpret_cast<void*>(&aoti_torch_cpu_mm_out)},
      {"aoti_torch_cuda_addmm_out", reinterpret_cast<void*>(&aoti_torch_cpu_addmm_out)},
      {"aoti_torch_cuda_mm_dtype_out", reinterpret_cast<void*>(&mm_dtype_out)},
      {"aoti_torch_get_current_cuda_stream", reinterpret_cast<void*>(&get_current_cuda_stream)},
      {"aoti_torch_cuda_caching_allocator_raw_alloc", reinterpret_cast<void*>(&raw_alloc)},
      {"aoti_torch_cuda_caching_allocator_raw_delete", reinterpret_cast<void*>(&raw_delete)},
  };
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}

// The host files call libtorch under these names (registration.h), since its own tensors are on the CPU.

extern "C" int32_t emulated_get_device_index(void*, int32_t* index) {
  *index = device_of_tensors;
  return 0;
}

extern "C" int32_t emulated_create_tensor_from_blob(void* data, int64_t dim, const int64_t* sizes,
                                                    const int64_t* strides, int64_t offset, int32_t dtype,
                                                    int32_t device_type, int32_t index, AtenTensorHandle* tensor) {
  return index != device_of_tensors ||
         aoti_torch_create_tensor_from_blob(data, dim, sizes, strides, offset, dtype, device_type, 0, tensor);
}
