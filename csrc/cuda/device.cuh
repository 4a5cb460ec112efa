// All that the kernels ask of the machine, in one thin layer: 16-byte loads and stores, asynchronous copies into shared
// memory, conversions of packed 16-bit pairs, mma.sync, grid dependency control. Kernels are plain C++ above it, so
// that the same sources also compile with g++, where tests/cuda_host/device_host.h defines the same names.
//
// Between #if and #else is only what differs between the two; what follows #endif is written in terms of it.
#pragma once

#include <cstdint>

#include "../dtype.h"

namespace eagle_kernels::cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// 16 bytes: what one load or store of a thread moves.
struct alignas(16) Words {
  uint32_t x, y, z, w;
};

// Two values of a 16-bit type, widened. Packed, the first is in the lower half.
struct Pair {
  float first, second;
};

}  // namespace eagle_kernels::cuda

#if defined(__CUDACC__)

namespace eagle_kernels::cuda {

__device__ __forceinline__ Pair widen(uint32_t pair, BFloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ Pair widen(uint32_t pair, Float16) {
  Pair values;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
      : "=f"(values.first), "=f"(values.second)
      : "r"(pair));
  return values;
}

// Round to nearest even, subnormals kept.
__device__ __forceinline__ uint32_t narrow(Pair values, BFloat16) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values.second), "f"(values.first));
  return pair;
}
__device__ __forceinline__ uint32_t narrow(Pair values, Float16) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values.second), "f"(values.first));
  return pair;
}

// a * b + c of pairs, rounded once, subnormals kept.
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c, BFloat16) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c, Float16) {
  uint32_t pair;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}

// Byte i of the result is the one that nibble i of `selector` names: 0 to 3 are of `low`, 4 to 7 of `high`. With 8
// added it is that byte's sign bit, replicated.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t float_to_bits(float value) { return __float_as_uint(value); }

// Loads memory that another kernel may have written just before, so never by the read-only path (.nc): that forbids
// writes during the kernel's life, which under programmatic dependent launch begins before the writer's ends.
__device__ __forceinline__ Words load(const Words* p) {
  Words v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
template <class T>
__device__ __forceinline__ T load(const T* p) {
  return *p;
}
__device__ __forceinline__ void store(Words* p, Words v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
template <class T>
__device__ __forceinline__ void store(T* p, T value) {
  *p = value;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The functions below take addresses in shared memory, half a pointer's registers. is_new hides from the compiler how a
// value was computed, so that it stays in a register: a known one, such as the address of shared memory, is recomputed
// at each use.
__device__ __forceinline__ void is_new(uint32_t& value) { asm volatile("" : "+r"(value)); }
template <class T>
__device__ __forceinline__ void is_new(const T*& value) {
  asm volatile("" : "+l"(value));
}
__device__ __forceinline__ Words load_shared(uint32_t at) {
  Words v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ Pair load_shared_pair(uint32_t at) {
  Pair v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.first), "=f"(v.second) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t at, const Words& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t at, uint32_t first, uint32_t second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(first), "r"(second) : "memory");
}
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
// Loads four matrices of 8 rows of 16 bytes. Lanes give the addresses of the rows, eight lanes per matrix; each lane
// gets word lane % 4 of row lane / 4 of every matrix (PTX ISA, "ldmatrix").
__device__ __forceinline__ void load_matrices(uint32_t row, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row)
               : "memory");
}

// Copies 16 bytes from global to shared memory, past L1 and the registers; where not `inside` it stores zeros and reads
// nothing. A thread's copies complete in the order of its groups: commit_copies ends a group, and after
// wait_for_copies<n> all but the latest n have landed. Other threads see them after a barrier.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async(void* to, const void* from, bool inside) {
  copy_async(shared_address(to), from, inside);
}
// The same, allowed before wait_for_previous_kernel: only for a matrix that no kernel before this one writes. Without a
// cache hint: on sm_90 and later ptxas 12.8 and 13.0 (no longer 13.5) encode UR0 and UR1 in place of the registers that
// have the uniform part of the address and the policy, an illegal instruction on an H100.
__device__ __forceinline__ void copy_early(uint32_t to, const void* from, bool inside) { copy_async(to, from, inside); }
__device__ __forceinline__ void copy_early(void* to, const void* from, bool inside) { copy_async(to, from, inside); }
// Four bytes, through L1: cp.async has no way past it for fewer than 16.
__device__ __forceinline__ void copy_word_early(void* to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLatest>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
}

// Prefetches into L2 only, which is coherent with a kernel that still writes: allowed before wait_for_previous_kernel.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Programmatic dependent launch (sm_90 and later; without the launch attribute both are no-ops). After the first, what
// earlier kernels wrote is visible; the second lets the next kernel start and run up to its own wait.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier of one row of a block's threads. Since its number is in a register the block reserves all 16 there are.
template <int kThreads>
__device__ __forceinline__ void sync_row() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "n"(kThreads) : "memory");
}

// Clusters (sm_90 and later) are the blocks of one blockIdx.x, with blockIdx.y as their rank. sync_cluster is a barrier
// of all their threads, after which each sees what the others have written. load_from_block reads another block's
// shared memory, at the address that is `mine` here. That block must not end before: end_cluster is a barrier that
// orders nothing else.
__device__ __forceinline__ void sync_cluster() {
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  // Only one warp releases what the block has written: that waits for all its outstanding memory accesses (MEMBAR.GPU).
  if (threadIdx.x < 32) {
    asm volatile("barrier.cluster.arrive;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  }
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void end_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t address_in_block(const void* mine, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  return address;
}
#endif
__device__ __forceinline__ float load_from_block(const float* mine, int rank) {
  float value = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_in_block(mine, rank)) : "memory");
#endif
  return value;
}
__device__ __forceinline__ Words load_words_from_block(const float* mine, int rank) {
  Words v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address_in_block(mine, rank))
               : "memory");
#endif
  return v;
}

// In place of sync_cluster where blocks send to one another: every thread arrives once, when its block has begun and it
// has made the SentBarrier if that is its task, and waits for all others before it sends. Neither orders anything else.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}
// An mbarrier in shared memory (sm_90 and later) whose phase completes when all bytes have arrived that the cluster's
// blocks send to this one (PTX ISA, "st.async": a store completes its bytes on the mbarrier, and a thread that has
// waited sees them). One thread makes it. try_wait may time out, hence the loop ("mbarrier.test_wait,
// mbarrier.try_wait").
struct SentBarrier {
  uint64_t state;
  __device__ __forceinline__ void make(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;\n"
        "fence.proxy.async.shared::cta;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
#endif
  }
  // Without a scope, as in CUTLASS's ClusterTransactionBarrier: the bytes are in this block's own shared memory, which
  // no cache is in front of. `.acquire.cluster` would also invalidate L1.
  __device__ __forceinline__ void wait() const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred ended;\nTRY_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], 0;\n@!ended bra TRY_%=;\n}" ::"r"(shared_address(this))
        : "memory");
#endif
  }
};
// Stores to block `rank` of the cluster, at the address that is `mine` here, and completes its bytes on that block's
// `sent`.
__device__ __forceinline__ void send_to_block(float* mine, const SentBarrier& sent, const Words& v, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address_in_block(mine, rank)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(address_in_block(&sent, rank))
               : "memory");
#endif
}
__device__ __forceinline__ void send_to_block(float* mine, const SentBarrier& sent, float value, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   address_in_block(mine, rank)),
               "r"(float_to_bits(value)), "r"(address_in_block(&sent, rank))
               : "memory");
#endif
}

// sum[16, 8] += a[16, 16] @ b[16, 8] over a warp, in fp32. Fragments as in the PTX ISA, section "mma.m16n8k16", with
// lane = 4 g + q: a = rows g, g+8, g, g+8 at columns 2q and 2q+1, +8 in the last two; b = column g at rows 2q and 2q+1,
// +8; sum = row g at columns 2q and 2q+1, then row g+8.
__device__ __forceinline__ void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1, BFloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1, Float16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// wgmma, in code for sm_90a alone.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// sum[64, 64] += a[64, 16] @ b^T (= without kAdds), asynchronously by the four warps of a warpgroup, each for a quarter
// of the rows of a. b is as matrix_descriptor says; the fragments of sum and a are those of mma above, 16 rows per warp
// and a tile of sum for each 8 columns. Between fence_wgmma, which hands registers over, and wait_for_wgmma, after
// which b may be overwritten, neither a nor sum may be touched (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions"). A macro, since types and scale-d are part of the instruction's text.
#define EAGLE_KERNELS_TILE(n) "+f"(sum[n][0]), "+f"(sum[n][1]), "+f"(sum[n][2]), "+f"(sum[n][3])
#define EAGLE_KERNELS_WGMMA(type, adds)                                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                           \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "   \
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, " adds            \
               ", 1, 1, 0;"                                                                                          \
               : EAGLE_KERNELS_TILE(0), EAGLE_KERNELS_TILE(1), EAGLE_KERNELS_TILE(2), EAGLE_KERNELS_TILE(3),         \
                 EAGLE_KERNELS_TILE(4), EAGLE_KERNELS_TILE(5), EAGLE_KERNELS_TILE(6), EAGLE_KERNELS_TILE(7)          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool kAdds>
__device__ __forceinline__ void wgmma(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b, BFloat16) {
  if constexpr (kAdds) {
    EAGLE_KERNELS_WGMMA("bf16", "1");
  } else {
    EAGLE_KERNELS_WGMMA("bf16", "0");
  }
}
template <bool kAdds>
__device__ __forceinline__ void wgmma(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b, Float16) {
  if constexpr (kAdds) {
    EAGLE_KERNELS_WGMMA("f16", "1");
  } else {
    EAGLE_KERNELS_WGMMA("f16", "0");
  }
}
__device__ __forceinline__ void fence_wgmma() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_wgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all committed wgmma have ended.
__device__ __forceinline__ void wait_for_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// After a wait: tells the compiler that wgmma has changed this sum.
__device__ __forceinline__ void is_new(float& value) { asm volatile("" : "+f"(value)::"memory"); }
// Makes what this thread has written to shared memory, and its asynchronous copies that it has waited for, visible to
// wgmma: to that of other threads after a barrier.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];  // for wgmma's swizzled rows
  return memory;
}

}  // namespace eagle_kernels::cuda

#else
#include "device_host.h"
#endif

namespace eagle_kernels::cuda {

__device__ __forceinline__ uint32_t word(const Words& w, int i) {
  return i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w;
}

// a * b of pairs, rounded once: adding -0 leaves every product as it is.
template <class T>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b, T) {
  return multiply_add(a, b, 0x80008000u, T{});
}
template <class T>
__device__ __forceinline__ Words multiply(const Words& a, const Words& b, T) {
  return {multiply(a.x, b.x, T{}), multiply(a.y, b.y, T{}), multiply(a.z, b.z, T{}), multiply(a.w, b.w, T{})};
}
template <class T>
__device__ __forceinline__ Words multiply(const Words& a, uint32_t pair, T) {
  return multiply(a, Words{pair, pair, pair, pair}, T{});
}

// Describes wgmma's b: rows of 128 bytes from an address in shared memory, a multiple of 1024, whose 16-byte parts are
// permuted by an XOR with the lower three bits of the row (the 128-byte swizzle). PTX ISA, "Matrix Descriptor Format":
// the address and the stride of groups of 8 rows, both in units of 16 bytes, and 1 for that swizzle, under which the
// leading dimension's stride has no meaning. 16 columns further is 32 bytes.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t rows) {
  return static_cast<uint64_t>(rows >> 4) | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
constexpr uint64_t kDescriptorColumns = 32 >> 4;  // added to a descriptor: 16 columns

__device__ __forceinline__ int64_t load(const Integers& numbers, int64_t i) {
  return numbers.are_int64 ? load(static_cast<const int64_t*>(numbers.data) + i)
                           : load(static_cast<const int32_t*>(numbers.data) + i);
}

// The sum over the lanes of a warp, the same in all of them.
__device__ __forceinline__ float sum_over_warp(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// The sum over the threads of a row, which are those of one threadIdx.y, in an order that depends on their number
// alone. At most once per kernel: it takes 4 bytes of shared memory for each warp and leaves them in use. Where a
// thread stands for several, blockDim.x apart, it has the value of each, and the sum is that of as many threads with
// one each.
template <int kShare>
__device__ __forceinline__ float sum_over_row(const float (&values)[kShare]) {
  const int warps = blockDim.x / 32, all = kShare * warps;
  float* of_warp = reinterpret_cast<float*>(shared_memory()) + threadIdx.y * all;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const float value = sum_over_warp(values[i]);
    if (threadIdx.x % 32 == 0) of_warp[i * warps + threadIdx.x / 32] = value;
  }
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < all; ++warp) sum += of_warp[warp];
  return sum;
}
__device__ __forceinline__ float sum_over_row(float value) {
  const float values[] = {value};
  return sum_over_row(values);
}

// The row of this thread. Blocks have several rows, one where kSeveral is false; in the last block it may be past the
// last row.
template <bool kSeveral>
__device__ __forceinline__ int64_t row_of_thread() {
  if (!kSeveral) return blockIdx.x;
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

// 1/rms, but 0 where eps = 0 meets a row of zeros, which then stays zero.
__device__ __forceinline__ float rstd_of(float sum_squares, int64_t width, float eps) {
  const float mean_square = sum_squares / static_cast<float>(width) + eps;
  return mean_square == 0.0f ? 0.0f : 1.0f / sqrtf(mean_square);
}

}  // namespace eagle_kernels::cuda
