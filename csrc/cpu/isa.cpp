// Which instruction sets this build holds (EAGLE_KERNELS_HAVE_*) and this machine can run.
#include "kernels.h"

#if defined(EAGLE_KERNELS_HAVE_AMX_BF16) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace eagle_kernels::cpu {

namespace {

#if defined(EAGLE_KERNELS_HAVE_AMX_BF16)
// Linux traps the first tile instruction of a process that has not asked for the 8 KB of tile state. The permission
// holds for every thread of the process, those already running included.
bool amx_granted() {
#if defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // CPUID leaf 7, EDX
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
#else
  return false;
#endif
}
#endif

// __builtin_cpu_supports also asks whether the operating system saves the registers.
Isa detect() {
  Isa isa = Isa::kScalar;
#if defined(EAGLE_KERNELS_HAVE_AVX2)
  __builtin_cpu_init();
  // F16C has no name in GCC 12's list; every processor with AVX2 has it.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return isa;
  isa = Isa::kAvx2;
#endif
#if defined(EAGLE_KERNELS_HAVE_AVX512)
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return isa;
  }
  isa = Isa::kAvx512;
#endif
#if defined(EAGLE_KERNELS_HAVE_AVX512_BF16)
  if (!__builtin_cpu_supports("avx512bf16")) return isa;
  isa = Isa::kAvx512Bf16;
#endif
#if defined(EAGLE_KERNELS_HAVE_AMX_BF16)
  if (!amx_granted()) return isa;
  isa = Isa::kAmxBf16;
#endif
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kAmxBf16: return "amx_bf16";
  }
  return "unknown";
}

}  // namespace eagle_kernels::cpu
