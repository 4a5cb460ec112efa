// The CUDA kernels as ops.cpp sees them: one launcher per op, which picks the template instance and launches once.
// Each returns a CUDA error code, 0 for success; none checks an argument, allocates or waits.
#pragma once

#include <cstdint>

#include "../records.h"

namespace eagle_kernels::cuda {

// Where a launch goes, and what the launchers need to know of it.
struct Device {
  void* stream;           // cudaStream_t
  bool pdl;               // sm_90 and later: programmatic dependent launch
  int64_t shared_memory;  // bytes that a block can have
};

constexpr int64_t kMostChunks = 8;  // of one call: their records travel as a kernel parameter, of 4 KB at most

// Rows of x that the fused kernel of norm_concat_linear multiplies at once; more take it several times over the weight.
constexpr int64_t kDecodeRows = 16;

int capture_hidden(const CaptureHidden& record, int64_t rows, const Device& device);
int add_rms_norm(const AddRmsNorm& record, int64_t rows, const Device& device);
int vocab_parallel_embedding(const VocabParallelEmbedding& record, int64_t rows, const Device& device);
int norm_concat(const NormConcat& record, int64_t rows, const Device& device);

int norm_concat_linear(const NormConcatLinear& record, const Device& device);

// Whether norm_concat_linear can run this: a 16-bit type, no post norm, every width a multiple of 8, and the addresses
// and row strides of chunks, residuals, gains and weight multiples of 16 bytes.
bool norm_concat_linear_takes(const NormConcatLinear& record);

}  // namespace eagle_kernels::cuda
