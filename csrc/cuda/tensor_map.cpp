#include "tensor_map.h"

#include <cuda_runtime_api.h>

namespace eagle_kernels::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime: a library linked to the driver would not load without one.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

int encode(const Boxes& boxes, CUtensorMap& map) {
  static const Encode function = find_encode();
  if (function == nullptr) return cudaErrorNotSupported;
  const CUtensorMapDataType type =
      boxes.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t sizes[]{static_cast<cuuint64_t>(boxes.columns), static_cast<cuuint64_t>(boxes.rows)};
  // A single row has no stride: its view may have left anything there.
  const cuuint64_t stride = 2 * static_cast<cuuint64_t>(boxes.rows > 1 ? boxes.row_stride : boxes.columns);
  const cuuint32_t box[]{boxes.box_columns, boxes.box_rows}, steps[]{1, 1};
  const CUresult result =
      function(&map, type, 2, const_cast<void*>(boxes.data), sizes, &stride, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace eagle_kernels::cuda
