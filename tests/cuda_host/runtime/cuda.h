// What csrc/cuda asks of the CUDA driver, under its names and numbers.
#pragma once

#include <cstdint>
#include <cstring>

struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank, void* data,
                                const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                                const uint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill);

// What the emulated driver leaves in a map.
struct EncodedBoxes {
  const char* data;
  int64_t sizes[2];  // columns, rows
  int64_t row_bytes;
  uint32_t box[2];
  uint32_t value_bytes;
};
static_assert(sizeof(EncodedBoxes) <= sizeof(CUtensorMap));

inline EncodedBoxes encoded(const CUtensorMap& map) {
  EncodedBoxes boxes;
  std::memcpy(&boxes, map.opaque, sizeof boxes);
  return boxes;
}
