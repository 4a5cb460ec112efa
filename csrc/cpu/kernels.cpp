// The table of this instruction set's entry points.
#include "kernels.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {

void capture_hidden(const CaptureHidden&, int64_t, int64_t);
void add_rms_norm(const AddRmsNorm&, int64_t, int64_t);
void vocab_parallel_embedding(const VocabParallelEmbedding&, int64_t, int64_t);
void norm_concat(const NormConcat&, int64_t, int64_t);
int64_t norm_concat_linear_workspace(const NormConcatLinear&);
int64_t norm_concat_linear_row_groups(const NormConcatLinear&);
void norm_concat_linear_pack(const NormConcatLinear&, int64_t, int64_t);
int64_t norm_concat_linear_panels(const NormConcatLinear&);
void norm_concat_linear_project(const NormConcatLinear&, int64_t, int64_t);
void norm_concat_linear_post_norm(const NormConcatLinear&, int64_t, int64_t);

extern const Kernels kKernels;
const Kernels kKernels = {
    .capture_hidden = capture_hidden,
    .add_rms_norm = add_rms_norm,
    .vocab_parallel_embedding = vocab_parallel_embedding,
    .norm_concat = norm_concat,
    .norm_concat_linear_workspace = norm_concat_linear_workspace,
    .norm_concat_linear_row_groups = norm_concat_linear_row_groups,
    .norm_concat_linear_pack = norm_concat_linear_pack,
    .norm_concat_linear_panels = norm_concat_linear_panels,
    .norm_concat_linear_project = norm_concat_linear_project,
    .norm_concat_linear_post_norm = norm_concat_linear_post_norm,
};

}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA
