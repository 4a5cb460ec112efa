// Which instruction sets this machine runs, of those that this build has.
#include "dispatch.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace eagle_kernels::cpu {
namespace {

// Linux traps the first tile instruction of a process that has not asked for the 8 KB of tile state. The permission
// holds for every thread of the process, those already running included.
bool grants_amx() {
#if defined(__x86_64__) && defined(__linux__)
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

// What a set adds to the one below it. __builtin_cpu_supports also asks whether the operating system saves the
// registers.
bool runs(std::string_view isa) {
  if (isa == "scalar") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // F16C has no name in GCC 12's list; every processor with AVX2 has it.
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (isa == "avx512_bf16") return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (isa == "amx_bf16") return __builtin_cpu_supports("gfni") && grants_amx();
#endif
  return false;
}

Isa detect() {
  int32_t isa = 0;
  while (isa + 1 < kNumIsas && runs(isa_name(Isa{isa + 1}))) ++isa;
  return Isa{isa};
}

}  // namespace

std::atomic<Isa> active_isa{Isa{0}};

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

std::string_view isa_name(Isa isa) {
  std::string_view names = kIsaNames;
  for (int32_t skipped = 0; skipped < static_cast<int32_t>(isa); ++skipped) names.remove_prefix(names.find(',') + 1);
  return names.substr(0, names.find(','));
}

}  // namespace eagle_kernels::cpu
