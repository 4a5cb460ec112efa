// The CPU kernels' entry points, implemented once per instruction set (CMakeLists.txt compiles the sources of this folder
// once for each).
//
// A kernel works on a range [begin, end) of rows (or of output columns) and never starts a thread: ops.cpp splits the
// range with the stable ABI's parallel_for. Nothing here checks an argument; arguments.cpp has done so.
#pragma once

#include "../records.h"

namespace eagle_kernels::cpu {

// Ordered: an instruction set includes those before it. kAmxBf16 is AVX-512-BF16 plus the AMX tile unit.
enum class Isa : int32_t { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

struct Kernels {
  void (*capture_hidden)(const CaptureHidden&, int64_t row_begin, int64_t row_end);
  void (*add_rms_norm)(const AddRmsNorm&, int64_t row_begin, int64_t row_end);
  void (*vocab_parallel_embedding)(const VocabParallelEmbedding&, int64_t row_begin, int64_t row_end);
  void (*norm_concat)(const NormConcat&, int64_t row_begin, int64_t row_end);

  // norm_concat_linear runs in up to three parallel passes over one workspace: the rows are normed and laid out for
  // the product, then every panel of panel_columns output columns streams its rows of the weight once, then (post
  // norm only) the fp32 result rows are normed into out.
  int64_t (*norm_concat_linear_workspace)(const NormConcatLinear&);
  int64_t (*norm_concat_linear_row_groups)(const NormConcatLinear&);
  void (*norm_concat_linear_pack)(const NormConcatLinear&, int64_t group_begin, int64_t group_end);
  int64_t (*norm_concat_linear_panels)(const NormConcatLinear&);
  void (*norm_concat_linear_project)(const NormConcatLinear&, int64_t panel_begin, int64_t panel_end);
  void (*norm_concat_linear_post_norm)(const NormConcatLinear&, int64_t row_begin, int64_t row_end);
};

// The best instruction set this machine has (AMX only where the kernel grants the tile registers).
Isa best_isa();
const char* isa_name(Isa isa);

// The table for one instruction set; isa must not exceed best_isa().
const Kernels& kernels(Isa isa);

}  // namespace eagle_kernels::cpu
