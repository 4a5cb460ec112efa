// The CUDA runtime, cuBLAS and cuBLASLt for a machine without a GPU, preloaded into a torch with CUDA: memory is the
// host's, copies and memsets happen, kernels and products do nothing. So every line of Python and C++ runs as it would
// on a GPU, and only what kernels compute is missing. stub.py adds what is not here, as functions that return 0.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static const size_t kMemory = (size_t)64 << 30;  // what the GPU claims to have; untouched pages take none
// Larger memsets and copies to the GPU are skipped: they took 9 GB of host memory in a rehearsal of the accuracy tests.
static const size_t kMaxBytes = 1 << 20;
static size_t used;
static __thread int capturing;
static __thread unsigned long long captures;
static unsigned long long next_handle = 4096;

static void* new_handle(void) { return (void*)(next_handle += 16); }

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// Memory: an mmap each, with its size in the page before it.

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (used + bytes > kMemory) return cudaErrorMemoryAllocation;
  char* pages = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) return cudaErrorMemoryAllocation;
  *(size_t*)pages = bytes;
  used += bytes;
  *memory = pages + 4096;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  if (memory == NULL) return cudaSuccess;
  char* pages = (char*)memory - 4096;
  const size_t bytes = *(size_t*)pages;
  used -= bytes;
  munmap(pages, bytes + 4096);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  (void)flags;
  *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return free(memory), cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = kMemory - used;
  *total = kMemory;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
  if (bytes <= kMaxBytes || kind == cudaMemcpyDeviceToHost) memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)stream;
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind, (void)stream;
  for (size_t row = 0; row < height; ++row) {
    memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  if (bytes <= kMaxBytes) memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  (void)stream;
  return cudaMemset(memory, value, bytes);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeDevice;
  attributes->devicePointer = attributes->hostPointer = (void*)pointer;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) { return *address = (void*)symbol, cudaSuccess; }

// The device, whose attributes are in driver.c.

int cuDeviceGetAttribute(int* value, int attribute, int device);

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  return (cudaError_t)cuDeviceGetAttribute(value, attribute, device);
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* facts, int device) {
  (void)device;
  memset(facts, 0, sizeof *facts);
  strcpy(facts->name, "Stub of an H200");
  facts->totalGlobalMem = kMemory;
  facts->sharedMemPerBlock = 48 << 10;
  facts->sharedMemPerBlockOptin = 227 << 10;
  facts->sharedMemPerMultiprocessor = 228 << 10;
  facts->regsPerBlock = facts->regsPerMultiprocessor = 1 << 16;
  facts->warpSize = 32;
  facts->maxThreadsPerBlock = facts->maxThreadsDim[0] = facts->maxThreadsDim[1] = 1024;
  facts->maxThreadsDim[2] = 64;
  facts->maxGridSize[0] = 0x7fffffff;
  facts->maxGridSize[1] = facts->maxGridSize[2] = 65535;
  facts->major = 9;
  facts->multiProcessorCount = 132;
  facts->maxThreadsPerMultiProcessor = 2048;
  facts->l2CacheSize = 60 << 20;
  facts->memoryBusWidth = 6144;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  return snprintf(id, (size_t)length, "0000:00:%02d.0", device), cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return (void)device, (void)peer, *can = 0, cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t error) { return (void)error, "cudaErrorStub"; }
const char* cudaGetErrorString(cudaError_t error) { return (void)error, "error of the stub"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult* found) {
  (void)version, (void)flags;
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == NULL) *function = (void*)&cudaGetLastError;  // returns 0
  if (found != NULL) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Streams and events: an event is the time at which it was recorded.

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = new_handle(), cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return (void)flags, (void)priority, cudaStreamCreate(stream);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return (void)stream, *priority = 0, cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  (void)flags;
  *event = (cudaEvent_t)calloc(1, sizeof(double));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  (void)stream;
  *(double*)event = now_ms();
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return (void)flags, cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = (float)(*(double*)to - *(double*)from) + 1e-3f;
  return cudaSuccess;
}

// Graphs.

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  (void)stream, (void)mode;
  capturing = 1;
  ++captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  (void)stream;
  capturing = 0;
  *graph = new_handle();
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  (void)stream;
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  if (id != NULL) *id = captures;
  if (graph != NULL) *graph = new_handle();
  if (dependencies != NULL) *dependencies = NULL;
  if (edges != NULL) *edges = NULL;
  if (count != NULL) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* graph, cudaGraph_t from, unsigned long long flags) {
  return (void)from, (void)flags, *graph = new_handle(), cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return (void)graph, (void)nodes, *count = 1, cudaSuccess;
}

// Kernels.

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* kernel) {
  (void)kernel;
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void* kernel, int threads,
                                                                   size_t shared_bytes, unsigned flags) {
  return (void)kernel, (void)threads, (void)shared_bytes, (void)flags, *count = 2, cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t run, void* argument) {
  (void)stream;
  run(argument);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t run, void* argument, unsigned flags) {
  (void)flags;
  run(stream, cudaSuccess, argument);
  return cudaSuccess;
}

// What nvcc puts around a launch.

static __thread struct {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
} configuration;

void** __cudaRegisterFatBinary(void* binary) { return (void)binary, (void**)new_handle(); }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st* stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared_bytes = shared_bytes;
  configuration.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void** kernel, const void* function) { return *kernel = (void*)function, cudaSuccess; }

// Functions of cuBLAS and cuBLASLt whose results a caller reads.

int cublasCreate_v2(void** blas) { return *blas = new_handle(), 0; }
int cublasGetMathMode(void* blas, int* mode) { return (void)blas, *mode = 0, 0; }
int cublasGetPointerMode_v2(void* blas, int* mode) { return (void)blas, *mode = 0, 0; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtCreate(void** blas) { return *blas = new_handle(), 0; }
int cublasLtMatmulDescCreate(void** description, int compute, int scale) {
  return (void)compute, (void)scale, *description = new_handle(), 0;
}
int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  return (void)type, (void)rows, (void)columns, (void)stride, *layout = new_handle(), 0;
}
int cublasLtMatmulPreferenceCreate(void** preference) { return *preference = new_handle(), 0; }
int cublasLtMatmulAlgoGetHeuristic(void* blas, void* description, void* a, void* b, void* c, void* d, void* preference,
                                   int wanted, void* results, int* found) {
  (void)blas, (void)description, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted, (void)results;
  return *found = 1, 0;
}
