#include "current_device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__GLIBC__)
// glibc 2.34 gave both functions new versions, which manylinux_2_28's older glibc lacks; every glibc has these.
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5\n.symver dlsym,dlsym@GLIBC_2.2.5");
#endif

namespace eagle_kernels::cuda {
namespace {

// A function of libtorch_cuda, looked up if torch has loaded it. A library that linked to it would not load beside a
// CPU torch, and a weak symbol would not find it, since torch keeps it out of the global scope.
template <class Function>
Function find_in_torch(const char* name) {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

using GetCurrentStream = int32_t (*)(int32_t device, void** stream);
using RawAlloc = int32_t (*)(uint64_t bytes, void** memory);
using RawDelete = int32_t (*)(void* memory);

struct Facts {
  std::atomic<int> compute_capability{0};  // 90 for 9.0; 0: not asked yet
  std::atomic<int> shared_memory{0};
  std::atomic<int> multiprocessors{0};
};

std::array<Facts, kMaxDevices> known_facts;

// For faults of the machine, not of an argument: what CUDA said goes to the user.
[[noreturn]] void fail(const char* op, const std::string& text) { throw std::runtime_error(op + (": " + text)); }

// Two threads that ask at once write the same values.
const Facts& facts_of(const char* op, int device) {
  Facts& facts = known_facts[device];
  if (facts.compute_capability == 0) {
    int major = 0, minor = 0, shared_memory = 0, multiprocessors = 0;
    expect_success(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    expect_success(op, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    expect_success(op, cudaDeviceGetAttribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    expect_success(op, cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    facts.shared_memory = shared_memory;
    facts.multiprocessors = multiprocessors;
    facts.compute_capability = 10 * major + minor;
  }
  return facts;
}

}  // namespace

void expect_success(const char* op, int code) {
  if (code == cudaSuccess) return;
  const std::string text = cudaGetErrorString(static_cast<cudaError_t>(code));
  fail(op, "CUDA has error " + std::to_string(code) + " (" + text + "), expected none");
}

int32_t mm_out(AtenTensorOpaque* out, AtenTensorOpaque* a, AtenTensorOpaque* b) {
  static const auto function = find_in_torch<decltype(&mm_out)>("aoti_torch_cuda_mm_out");
  return function == nullptr ? 1 : function(out, a, b);
}

int32_t addmm_out(AtenTensorOpaque* out, AtenTensorOpaque* bias, AtenTensorOpaque* a, AtenTensorOpaque* b) {
  using Function = int32_t (*)(AtenTensorOpaque*, AtenTensorOpaque*, AtenTensorOpaque*, AtenTensorOpaque*, double beta,
                               double alpha);
  static const auto function = find_in_torch<Function>("aoti_torch_cuda_addmm_out");
  return function == nullptr ? 1 : function(out, bias, a, b, 1, 1);
}

int32_t mm_dtype_out(AtenTensorOpaque* out, AtenTensorOpaque* a, AtenTensorOpaque* b, int32_t dtype) {
  static const auto function = find_in_torch<decltype(&mm_dtype_out)>("aoti_torch_cuda_mm_dtype_out");
  return function == nullptr ? 1 : function(out, a, b, dtype);
}

int64_t runtime_version() { return CUDART_VERSION; }

int64_t driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

CurrentDevice::CurrentDevice(const char* op, int32_t index) {
  static const auto get_current_stream = find_in_torch<GetCurrentStream>("aoti_torch_get_current_cuda_stream");
  if (get_current_stream == nullptr) fail(op, "libtorch_cuda.so is not loaded, expected a torch with CUDA");
  if (index < 0 || index >= kMaxDevices) {
    fail(op, "the tensors are on cuda:" + std::to_string(index) + ", expected an index below " +
                 std::to_string(kMaxDevices));
  }
  int current = -1;
  expect_success(op, cudaGetDevice(&current));
  const Facts& facts = facts_of(op, index);
  if (get_current_stream(index, &device_.stream) != 0) {
    fail(op, "cuda:" + std::to_string(index) + " has no current stream, expected one");
  }
  device_.index = index;
  device_.has_clusters = facts.compute_capability >= 90;
  device_.wgmma = facts.compute_capability == 90;
  device_.shared_memory = facts.shared_memory;
  device_.multiprocessors = facts.multiprocessors;
  if (current != index) {
    expect_success(op, cudaSetDevice(index));
    previous_ = current;
  }
}

CurrentDevice::~CurrentDevice() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

Workspace::Workspace(const char* op, const CurrentDevice&, int64_t bytes) {
  static const auto allocate = find_in_torch<RawAlloc>("aoti_torch_cuda_caching_allocator_raw_alloc");
  if (allocate == nullptr || allocate(static_cast<uint64_t>(bytes), &data_) != 0) {
    fail(op, "torch gave no workspace of " + std::to_string(bytes) + " bytes");
  }
}

Workspace::~Workspace() {
  static const auto free = find_in_torch<RawDelete>("aoti_torch_cuda_caching_allocator_raw_delete");
  if (free != nullptr) free(data_);
}

}  // namespace eagle_kernels::cuda
