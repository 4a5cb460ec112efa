// Defines the names of csrc/cuda/device.cuh for a CPU: a block's threads are fibers of one OS thread; blocks run one
// after the other, those of a cluster in turns. Mistakes that a GPU shows only sometimes fail here every time: shared
// memory starts as NaN, warps run to their next barrier in ascending, descending or random order (`set_warp_order`,
// `set_random`), loads check their alignment, and global memory may be touched only after wait_for_previous_kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct Dim3 {
  int x = 1, y = 1;
};
// Those of the running fiber: the scheduler sets them before it resumes one.
extern Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace eagle_kernels::cuda {

namespace host {

// Runs `thread` once per thread of every block of the grid; `cluster` neighboring blocks in y run at the same time.
void run(const std::function<void()>& thread, Dim3 grid, Dim3 block, int64_t shared_bytes, int cluster);

// Warps run in ascending or descending order between barriers.
void set_warp_order(bool descending);
// Instead, warps, their lanes and a cluster's blocks take random turns, and each copy lands, and each product ends,
// early or late at random: this shows mistakes that both fixed orders hide. 0 turns it off.
void set_random(uint32_t seed);

// The functions below act for the running fiber. exchange is a collective of the warp: every lane gives `bytes` and
// gets those of all 32. With `orders` it also orders the lanes' memory accesses.
const char* exchange(const void* mine, size_t bytes, bool orders = false);
char* shared_memory();
void sync_block();
void sync_row(int threads);
void sync_cluster(bool orders);
void arrive_at_cluster();
void wait_for_cluster();
// The address in the shared memory of the cluster's block `rank` that corresponds to `mine` in this block's.
const char* in_block(const void* mine, int rank);
void wait_for_previous_kernel();
// Both fail where the address is not aligned, check_access also where global memory may not be touched yet.
void check_access(const void* p, size_t bytes);
void check_alignment(const void* p, size_t bytes);
// Ends the emulation with an error that names thread and block.
[[noreturn]] void fail(const std::string& what);

// What a thread copies into shared memory; zeros where `from` is null.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};
// On a GPU a copy lands at any time between its issue and the thread's wait. Here all land at their issue
// (`set_late_copies(false)`), which shows a buffer that is still read, or all at the wait, which shows a wait that is
// missing. lands_now returns whether the caller has to copy now.
void set_late_copies(bool late);
bool lands_now(const Copy& copy);
// How many were issued before the end of the previous kernel, since the last call of this function.
int64_t take_early_copies();
void commit_copies();
// The copies that land at a wait: those of all groups but the latest ones.
std::vector<Copy> landing(size_t latest_groups);

// The SentBarrier of device.cuh, identified by its address in the shared memory of its block. A wrong count of bytes,
// and bytes that nobody has waited for, fail. What a thread sends, `bytes` of `words`, lands when it is sent or when a
// thread of that block waits. The caller calls `landed` after it has stored it.
struct Sent {
  void* to;
  Words words;
  uint32_t bytes;
};
void make_barrier(const void* barrier, uint32_t bytes);
bool lands_now(const Sent& sent, const void* barrier, int rank);
void landed(const void* barrier, int rank, uint32_t bytes);
bool has_ended(const void* barrier);
// What lands when a thread waits, in its own block. If there is nothing, the thread first waits until another thread
// has changed the barrier.
std::vector<Sent> landing(const void* barrier);
int own_rank();

// A wgmma that has not ended. A GPU multiplies at any time between its issue and the thread's wait; here at the issue,
// which shows operands that are not there yet, or, where copies land late, at the wait, which shows operands that are
// overwritten too early. multiplies_now fails where a thread has not fenced its stores and copies for wgmma.
struct Product {
  void (*multiply)(const Product&);
  float (*sum)[4];
  const uint32_t* a;
  uint64_t b;
  bool adds;
};
bool multiplies_now(const Product& product);
void fence_products();
void commit_products();
std::vector<Product> ending_products();
void fence_async_proxy();
void has_stored();  // an ordinary store, which wgmma sees only after such a fence
uint32_t shared_address(const void* p);

constexpr size_t kSlot = 64;  // bytes per lane in an exchange

}  // namespace host

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float widen_one(uint16_t bits, BFloat16) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }
inline float widen_one(uint16_t bits, Float16) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline uint16_t narrow_one(float value, BFloat16) {
  const uint32_t bits = float_to_bits(value);
  if (value != value) return 0x7fff;  // the NaN that cvt gives
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t narrow_one(float value, Float16) {
  if (value != value) return 0x7fff;
  const _Float16 rounded = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}

template <class T>
Pair widen(uint32_t pair, T) {
  return {widen_one(pair & 0xffff, T{}), widen_one(pair >> 16, T{})};
}
template <class T>
uint32_t narrow(Pair values, T) {
  return narrow_one(values.first, T{}) | static_cast<uint32_t>(narrow_one(values.second, T{})) << 16;
}

// The products are exact in fp32, so there is one rounding where the sum is exact too, as it is in codes.cuh.
template <class T>
uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c, T) {
  const Pair x = widen(a, T{}), y = widen(b, T{}), z = widen(c, T{});
  return narrow(Pair{x.first * y.first + z.first, x.second * y.second + z.second}, T{});
}
inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = bytes >> (selector >> 4 * i & 7) * 8 & 0xff;
    const bool is_sign = (selector >> 4 * i & 8) != 0;
    result |= (is_sign ? byte >> 7 ? 0xffu : 0u : byte) << 8 * i;
  }
  return result;
}

template <class T>
T load(const T* p) {
  host::check_access(p, sizeof(T));
  return *p;
}
template <class T>
void store(T* p, T value) {
  host::check_access(p, sizeof(T));
  *p = value;
}
// Not in fibers.cpp, which ThreadSanitizer does not instrument.
inline void land(const host::Copy& copy) {
  if (copy.from == nullptr) {
    std::memset(copy.to, 0, copy.bytes);
  } else {
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
}
inline void land(const host::Sent& sent) { std::memcpy(sent.to, &sent.words, sent.bytes); }
struct SentBarrier {
  uint64_t state;
  void make(uint32_t bytes) { host::make_barrier(this, bytes); }
  void wait() const {
    while (!host::has_ended(this)) {
      for (const host::Sent& sent : host::landing(this)) {
        land(sent);
        host::landed(this, host::own_rank(), sent.bytes);
      }
    }
  }
};
inline void send(float* mine, const SentBarrier& barrier, const Words& words, uint32_t bytes, int rank) {
  host::check_alignment(mine, bytes);
  const host::Sent sent{const_cast<char*>(host::in_block(mine, rank)), words, bytes};
  if (!host::lands_now(sent, &barrier, rank)) return;
  land(sent);
  host::landed(&barrier, rank, bytes);
}
inline void send_to_block(float* mine, const SentBarrier& barrier, const Words& words, int rank) {
  send(mine, barrier, words, sizeof words, rank);
}
inline void send_to_block(float* mine, const SentBarrier& barrier, float value, int rank) {
  send(mine, barrier, {float_to_bits(value), 0, 0, 0}, sizeof value, rank);
}
inline void copy_bytes_early(void* to, const void* from, bool inside, size_t bytes) {
  host::check_alignment(to, bytes);
  if (inside) host::check_alignment(from, bytes);
  const host::Copy copy{to, inside ? from : nullptr, bytes};
  if (host::lands_now(copy)) land(copy);
}
inline void copy_early(void* to, const void* from, bool inside) { copy_bytes_early(to, from, inside, sizeof(Words)); }
inline void copy_word_early(void* to, const void* from, bool inside) { copy_bytes_early(to, from, inside, 4); }
inline void copy_early(uint32_t to, const void* from, bool inside) {
  copy_early(host::shared_memory() + to, from, inside);
}
inline void copy_async(void* to, const void* from, bool inside) {
  if (inside) host::check_access(from, sizeof(Words));
  copy_early(to, from, inside);
}
inline void copy_async(uint32_t to, const void* from, bool inside) {
  copy_async(host::shared_memory() + to, from, inside);
}
inline void commit_copies() { host::commit_copies(); }
template <int kLatest>
void wait_for_copies() {
  for (const host::Copy& copy : host::landing(kLatest)) land(copy);
}
// Nothing to check: a GPU ignores a prefetch of an invalid address.
inline void prefetch(const void*) {}

inline void wait_for_previous_kernel() { host::wait_for_previous_kernel(); }
inline void let_next_kernel_start() {}
template <int kThreads>
void sync_row() {
  host::sync_row(kThreads);
}
inline void sync_cluster() { host::sync_cluster(true); }
inline void end_cluster() { host::sync_cluster(false); }
inline void arrive_at_cluster() { host::arrive_at_cluster(); }
inline void wait_for_cluster() { host::wait_for_cluster(); }
inline float load_from_block(const float* mine, int rank) {
  float value;
  std::memcpy(&value, host::in_block(mine, rank), sizeof value);
  return value;
}
inline Words load_words_from_block(const float* mine, int rank) {
  host::check_alignment(mine, sizeof(Words));
  Words words;
  std::memcpy(&words, host::in_block(mine, rank), sizeof words);
  return words;
}

// An address in shared memory is its offset from the block's first byte.
inline uint32_t shared_address(const void* p) { return host::shared_address(p); }
template <class T>
T load_shared_as(uint32_t at) {
  host::check_alignment(host::shared_memory() + at, sizeof(T));
  T value;
  std::memcpy(&value, host::shared_memory() + at, sizeof value);
  return value;
}
inline Words load_shared(uint32_t at) { return load_shared_as<Words>(at); }
inline uint32_t load_shared_word(uint32_t at) { return load_shared_as<uint32_t>(at); }
inline Pair load_shared_pair(uint32_t at) { return load_shared_as<Pair>(at); }
inline void store_shared(uint32_t at, const Words& v) {
  host::check_alignment(host::shared_memory() + at, sizeof v);
  std::memcpy(host::shared_memory() + at, &v, sizeof v);
  host::has_stored();
}
inline void store_shared(uint32_t at, uint32_t first, uint32_t second) {
  host::check_alignment(host::shared_memory() + at, 8);
  const uint32_t words[2] = {first, second};
  std::memcpy(host::shared_memory() + at, words, sizeof words);
  host::has_stored();
}
inline void sync_warp() { host::exchange("", 1, true); }
inline void load_matrices(uint32_t row, uint32_t (&words)[4]) {
  const char* rows = host::exchange(&row, sizeof row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint32_t at;
    std::memcpy(&at, rows + (8 * i + lane / 4) * host::kSlot, sizeof at);
    const Words all = load_shared(at);
    const uint32_t of_row[4] = {all.x, all.y, all.z, all.w};
    words[i] = of_row[lane % 4];
  }
}
template <class T>
void is_new(T&) {}
inline char* shared_memory() { return host::shared_memory(); }

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": with lane = 4 g + q, register i of A is row
// g + 8 (i % 2), columns 2q + 8 (i / 2) and the next; register i of B is rows 2q + 8 i and the next, column g; C is
// rows g and g + 8, columns 2q and the next. Products are exact in fp32, and are summed by column.
template <class T>
void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, T) {
  const Pair own[6] = {widen(a0, T{}), widen(a1, T{}), widen(a2, T{}), widen(a3, T{}), widen(b0, T{}), widen(b1, T{})};
  static_assert(sizeof own <= host::kSlot);
  const char* slots = host::exchange(own, sizeof own);
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int lower_row = i / 2, column = 2 * q + i % 2;
    float total = sum[i];
    for (int half = 0; half < 2; ++half) {
      for (int pair = 0; pair < 4; ++pair) {
        Pair a, b;
        std::memcpy(&a, slots + (4 * g + pair) * host::kSlot + (lower_row + 2 * half) * sizeof(Pair), sizeof a);
        std::memcpy(&b, slots + (4 * column + pair) * host::kSlot + (4 + half) * sizeof(Pair), sizeof b);
        total += a.first * b.first + a.second * b.second;
      }
    }
    sum[i] = total;
  }
}

// PTX ISA, "Register Fragments and Shared Memory Matrix Layouts" of wgmma.m64nNk16: a warp has 16 rows of a and of the
// sum, in mma's fragments. b is in shared memory, in rows of 128 bytes with the 128-byte swizzle; a descriptor of any
// other layout fails.
template <class T>
void multiply_now(const host::Product& product) {
  constexpr uint64_t kSwizzled = uint64_t{1} << 62 | uint64_t{64} << 32;
  if ((product.b & ~uint64_t{0x3fff}) != kSwizzled) host::fail("a matrix that is described otherwise");
  const char* begin = shared_memory() + ((product.b & 0x3fff) << 4);
  const Pair own[4] = {widen(product.a[0], T{}), widen(product.a[1], T{}), widen(product.a[2], T{}),
                       widen(product.a[3], T{})};
  const char* slots = host::exchange(own, sizeof own);
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  for (int at = 0; at < 32; ++at) {
    const int i = at % 4, lower_row = i / 2, row = at / 4 * 8 + 2 * q + i % 2;
    float total = product.adds ? product.sum[at / 4][i] : 0;
    for (int pair = 0; pair < 8; ++pair) {
      Pair a;
      const int reg = lower_row + pair / 4 * 2;
      std::memcpy(&a, slots + (4 * g + pair % 4) * host::kSlot + reg * sizeof(Pair), sizeof a);
      const uintptr_t place = reinterpret_cast<uintptr_t>(begin + row * 128 + pair * 4);
      uint32_t b_bits;
      std::memcpy(&b_bits, reinterpret_cast<const char*>(place ^ (place >> 7 & 7) << 4), sizeof b_bits);
      const Pair b = widen(b_bits, T{});
      total += a.first * b.first + a.second * b.second;
    }
    product.sum[at / 4][i] = total;
  }
}
constexpr bool kHasWgmma = true;
inline void trap() { host::fail("a trap"); }
template <bool kAdds, class T>
void wgmma(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b, T) {
  const host::Product product{&multiply_now<T>, sum, a, b, kAdds};
  if (host::multiplies_now(product)) product.multiply(product);
}
inline void fence_wgmma() { host::fence_products(); }
inline void commit_wgmma() { host::commit_products(); }
inline void wait_for_wgmma() {
  for (const host::Product& product : host::ending_products()) product.multiply(product);
}
inline void fence_async_proxy() { host::fence_async_proxy(); }

}  // namespace eagle_kernels::cuda

inline void __syncthreads() { eagle_kernels::cuda::host::sync_block(); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  const char* slots = eagle_kernels::cuda::host::exchange(&value, sizeof value);
  T other;
  std::memcpy(&other, slots + lane * eagle_kernels::cuda::host::kSlot, sizeof other);
  return other;
}

inline float __shfl_xor_sync(unsigned, float value, int distance) {
  const char* slots = eagle_kernels::cuda::host::exchange(&value, sizeof value);
  float other;
  std::memcpy(&other, slots + ((threadIdx.x % 32) ^ distance) * eagle_kernels::cuda::host::kSlot, sizeof other);
  return other;
}
