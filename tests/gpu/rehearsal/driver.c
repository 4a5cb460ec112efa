// libcuda.so.1 for a machine without a GPU, as far as Triton's launchers and torch need it: every call succeeds,
// nothing runs, and what the last launch passed can be read. It describes itself as an H200.
#include <stdint.h>
#include <string.h>

enum { kMaxArguments = 256 };

// stub_expect sets what the next launch is expected to pass; the other stub functions read what it passed.
static int num_expected, sizes[kMaxArguments], launches;
static unsigned char values[kMaxArguments][8];
static struct {
  int grid[3], threads, shared_bytes, num_attributes, attribute, attribute_value;
} last;

void stub_expect(int count, const int* bytes) {
  num_expected = count < kMaxArguments ? count : kMaxArguments;
  memcpy(sizes, bytes, num_expected * sizeof *bytes);
}
void stub_argument(int i, void* out) { memcpy(out, values[i], 8); }
void stub_last(void* out) { memcpy(out, &last, sizeof last); }
int stub_launches(void) { return launches; }

typedef int CUresult;
typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  void* attributes;
  unsigned num_attributes;
} LaunchConfig;

static void* const handle = (void*)64;  // any but null

static CUresult record(const unsigned* grid, unsigned threads, unsigned shared_bytes, void** arguments) {
  ++launches;
  memset(&last, 0, sizeof last);
  for (int i = 0; i < 3; ++i) last.grid[i] = (int)grid[i];
  last.threads = (int)threads;
  last.shared_bytes = (int)shared_bytes;
  for (int i = 0; i < num_expected; ++i) {
    memset(values[i], 0, sizeof values[i]);
    memcpy(values[i], arguments[i], (size_t)sizes[i]);
  }
  return 0;
}

CUresult cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
  (void)function, (void)extra;
  const unsigned grid[] = {config->grid_x, config->grid_y, config->grid_z};
  record(grid, config->block_x, config->shared_bytes, arguments);
  last.num_attributes = (int)config->num_attributes;
  if (config->num_attributes > 0) {  // CUlaunchAttribute: an id, padding, a value
    last.attribute = ((const int*)config->attributes)[0];
    last.attribute_value = ((const int*)config->attributes)[2];
  }
  return 0;
}
CUresult cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned block_y,
                        unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra) {
  (void)function, (void)block_y, (void)block_z, (void)stream, (void)extra;
  const unsigned grid[] = {x, y, z};
  return record(grid, threads, shared_bytes, arguments);
}

// CUdevice_attribute, by number.
CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 8:  // shared memory of a block that does not opt in for more
      *value = 48 << 10;
      return 0;
    case 10:  // warp
      *value = 32;
      return 0;
    case 16:  // multiprocessors
      *value = 132;
      return 0;
    case 38:  // L2
      *value = 60 << 20;
      return 0;
    case 39:  // threads of a multiprocessor
      *value = 2048;
      return 0;
    case 75:
      *value = 9;
      return 0;
    case 76:
      *value = 0;
      return 0;
    case 81:  // shared memory of a multiprocessor
      *value = 228 << 10;
      return 0;
    case 82:  // registers of a multiprocessor
      *value = 1 << 16;
      return 0;
    case 97:  // shared memory of a block that opts in
      *value = 227 << 10;
      return 0;
    default:
      *value = 1024;
      return 0;
  }
}
CUresult cuInit(unsigned flags) { return (void)flags, 0; }
CUresult cuDriverGetVersion(int* version) { return *version = 13000, 0; }
CUresult cuDeviceGetCount(int* count) { return *count = 1, 0; }
CUresult cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
CUresult cuCtxGetCurrent(void** context) { return *context = handle, 0; }
CUresult cuCtxSetCurrent(void* context) { return (void)context, 0; }
CUresult cuCtxGetDevice(int* device) { return *device = 0, 0; }
CUresult cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, 0; }
CUresult cuCtxGetLimit(size_t* value, int limit) { return (void)limit, *value = 0, 0; }
CUresult cuDevicePrimaryCtxRetain(void** context, int device) { return (void)device, *context = handle, 0; }
CUresult cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  return (void)device, *flags = 0, *active = 1, 0;
}
CUresult cuModuleLoadData(void** module, const void* image) { return (void)image, *module = handle, 0; }
CUresult cuModuleUnload(void* module) { return (void)module, 0; }
CUresult cuModuleGetFunction(void** function, void* module, const char* name) {
  return (void)module, (void)name, *function = handle, 0;
}
CUresult cuFuncGetAttribute(int* value, int attribute, void* function) {
  return (void)function, *value = attribute == 0 ? 1024 : 0, 0;  // 0: threads of a block
}
CUresult cuFuncSetAttribute(void* function, int attribute, int value) {
  return (void)function, (void)attribute, (void)value, 0;
}
CUresult cuFuncSetCacheConfig(void* function, int config) { return (void)function, (void)config, 0; }
CUresult cuGetErrorString(int error, const char** text) { return (void)error, *text = "stub", 0; }
CUresult cuPointerGetAttribute(void* value, int attribute, uint64_t pointer) {
  (void)attribute;
  memcpy(value, &pointer, sizeof pointer);
  return 0;
}
// As on six GPCs of 16 multiprocessors and two of 18; two blocks fit where each takes at most half the shared memory.
CUresult cuOccupancyMaxActiveClusters(int* count, void* function, const LaunchConfig* config) {
  (void)function;
  const int* attribute = config->attributes;  // the dimensions of the cluster, behind an id and padding
  const int blocks = attribute[2] * attribute[3] * attribute[4], on_each = config->shared_bytes > 113 << 10 ? 1 : 2;
  return *count = 6 * (16 * on_each / blocks) + 2 * (18 * on_each / blocks), 0;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void* function, int threads, size_t shared_bytes) {
  return (void)function, (void)threads, (void)shared_bytes, *count = 2, 0;
}
CUresult cuStreamIsCapturing(void* stream, int* status) { return (void)stream, *status = 0, 0; }
CUresult cuTensorMapEncodeTiled(void) { return 0; }
CUresult cuTensorMapEncodeIm2col(void) { return 0; }
