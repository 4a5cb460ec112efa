// The instruction sets of the CPU kernels. CMakeLists.txt has the only list of them, compiles the kernels of this
// folder once for each, and passes the names of those that it built as EAGLE_KERNELS_ISAS: scalar, avx2, ...
//
// A kernel is a function template over the set, `<op>_cpu<isa>`, specialized at the end of csrc/cpu/<op>.cpp. It works
// on a range [begin, end) of rows (or of output columns), starts no thread and checks no argument.
#pragma once

#include <cstdint>

namespace eagle_kernels::cpu {

// Ascending: a set includes those before it. amx_bf16 is AVX-512-BF16, GFNI and the AMX tile unit.
#if defined(EAGLE_KERNELS_ISAS)
enum class Isa : int32_t { EAGLE_KERNELS_ISAS };
#else  // the sources of csrc/cuda, which name no set
enum class Isa : int32_t;
#endif

}  // namespace eagle_kernels::cpu
