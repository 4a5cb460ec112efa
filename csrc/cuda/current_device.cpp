#include "current_device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <atomic>

namespace eagle_kernels::cuda {
namespace {

// The one function of libtorch_cuda that is needed, looked up where torch has loaded it: a library that named it among
// its symbols would not load beside a CPU torch, and torch keeps it out of the global scope, where a weak symbol finds.
using GetCurrentStream = int32_t (*)(int32_t device, void** stream);

GetCurrentStream find_get_current_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr
                            : reinterpret_cast<GetCurrentStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
}

struct Facts {
  std::atomic<int> compute_capability{0};  // 90 for 9.0; 0: not asked yet
  std::atomic<int> shared_memory{0};
};

constexpr int kMostDevices = 64;
std::array<Facts, kMostDevices> known_facts;

// Two threads that ask at once write the same.
const Facts& facts_of(const char* op, int device) {
  Facts& facts = known_facts[device];
  if (facts.compute_capability == 0) {
    int major = 0, minor = 0, shared_memory = 0;
    check_cuda(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    check_cuda(op, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    check_cuda(op, cudaDeviceGetAttribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    facts.shared_memory = shared_memory;
    facts.compute_capability = 10 * major + minor;
  }
  return facts;
}

}  // namespace

void check_cuda(const char* op, int code) {
  if (code != cudaSuccess) {
    eagle_kernels::check_cuda(op, code, cudaGetErrorString(static_cast<cudaError_t>(code)));
  }
}

CurrentDevice::CurrentDevice(const char* op, const Tensor& tensor) {
  static const GetCurrentStream get_current_stream = find_get_current_stream();
  STD_TORCH_CHECK(get_current_stream != nullptr, op, ": libtorch_cuda.so is not loaded, expected a torch with CUDA");
  const int device = tensor.get_device_index();
  STD_TORCH_CHECK(device >= 0 && device < kMostDevices, op, ": the tensors are on cuda:", device,
                  ", expected an index below ", kMostDevices);
  int current = -1;
  check_cuda(op, cudaGetDevice(&current));
  const Facts& facts = facts_of(op, device);
  STD_TORCH_CHECK(get_current_stream(device, &device_.stream) == 0, op, ": cuda:", device,
                  " has no current stream, expected one");
  device_.pdl = facts.compute_capability >= 90;
  device_.shared_memory = facts.shared_memory;
  if (current != device) {
    check_cuda(op, cudaSetDevice(device));
    previous_ = current;
  }
}

CurrentDevice::~CurrentDevice() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace eagle_kernels::cuda
