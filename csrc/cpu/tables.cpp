// The kernel table of an instruction set. Apart from isa.cpp, which the module _C links without any kernel.
#include "kernels.h"

namespace eagle_kernels::cpu {

namespace scalar {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace amx_bf16 {
extern const Kernels kKernels;
}

// An instruction set that this build lacks falls to the one below it.
const Kernels& kernels(Isa isa) {
#if defined(EAGLE_KERNELS_HAVE_AMX_BF16)
  if (isa >= Isa::kAmxBf16) return amx_bf16::kKernels;
#endif
#if defined(EAGLE_KERNELS_HAVE_AVX512_BF16)
  if (isa >= Isa::kAvx512Bf16) return avx512_bf16::kKernels;
#endif
#if defined(EAGLE_KERNELS_HAVE_AVX512)
  if (isa >= Isa::kAvx512) return avx512::kKernels;
#endif
#if defined(EAGLE_KERNELS_HAVE_AVX2)
  if (isa >= Isa::kAvx2) return avx2::kKernels;
#endif
  return scalar::kKernels;
}

}  // namespace eagle_kernels::cpu
