// Included before each host file of csrc, when it is compiled for the emulated library: what it registers for CUDA
// tensors is registered for CPU tensors, in torch.ops.eagle_kernels_emulated; what it registers for CPU tensors is left
// out.
#pragma once

#include <torch/csrc/stable/library.h>

#define eagle_kernels_C eagle_kernels_emulated

#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(library, key, m) EAGLE_KERNELS_REGISTER_##key(m)
#define EAGLE_KERNELS_REGISTER_CUDA(m) _STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_emulated, CPU, m, C10_UID)
// A function that nobody calls and the linker does not see, since it would need the CPU kernels.
#define EAGLE_KERNELS_REGISTER_CPU(m) \
  [[maybe_unused]] static void C10_CONCATENATE(left_out_, C10_UID)(torch::stable::detail::StableLibrary & m)

#define EAGLE_KERNELS_REGISTER_CompositeExplicitAutograd(m) EAGLE_KERNELS_REGISTER_CPU(m)

// Replace libtorch's functions that give a tensor's device and make a tensor on it: with the emulated GPU that a CPU
// tensor stands for (runtime.cpp).
extern "C" int32_t emulated_get_device_index(void* tensor, int32_t* index);
extern "C" int32_t emulated_create_tensor_from_blob(void* data, int64_t dim, const int64_t* sizes,
                                                    const int64_t* strides, int64_t offset, int32_t dtype,
                                                    int32_t device_type, int32_t device_index,
                                                    AtenTensorHandle* tensor);
#define aoti_torch_get_device_index emulated_get_device_index
#define aoti_torch_create_tensor_from_blob emulated_create_tensor_from_blob
