// The scheduler behind device_host.h: one fiber per thread of a block.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device.cuh"
#include "racecheck.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace eagle_kernels::cuda::host {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr int kLanes = 32;

enum class State { kReady, kInExchange, kAtArrivals, kAtBarrier, kAtRowBarrier, kAtCluster, kAtClusterBarrier, kDone };

struct Warp {
  char slots[2][kLanes * kSlot];  // two, so that a lane ahead by one exchange does not overwrite what others still read
  int arrived = 0;
  int64_t exchanges = 0;  // completed ones
  Order order;
};

// A SentBarrier.
struct Arrivals {
  int64_t bytes = 0;  // still to land
  int64_t changes = 0;
  std::vector<Sent> late;
  Order order;
};

// Where a suspended fiber or the scheduler goes on: a stack and an address.
struct Place {
  void* of[5];
};

struct Fiber {
  Place place;
  bool has_begun = false;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* thread = new_thread();  // ThreadSanitizer's
  State state = State::kReady;
  int64_t exchanges = 0;  // joined by this lane
  bool waited = false;    // has waited for the previous kernel
  std::vector<Copy> copies;  // of the group that is not committed yet
  std::deque<std::vector<Copy>> groups;
  bool fenced = true;     // its stores and landed copies, for wgmma
  std::vector<Product> products;
  bool has_fenced_products = false;  // has fenced since its last wait for products
  int uncommitted_products = 0;
  int asked_products = 0;
  const Arrivals* awaited = nullptr;
  int64_t seen_changes = 0;  // of `awaited`
  bool has_arrived = false;  // at arrive_at_cluster

  ~Fiber() { end_thread(thread); }
};

// A block of the running cluster.
struct Block {
  std::vector<Warp> warps;
  std::unique_ptr<char, decltype(&std::free)> shared;
  Order barrier;
  std::vector<Order> row_barriers;
  std::map<const void*, Arrivals> arrivals;
  // A thread that reached the barrier, and one that reached the barrier before it, without a fence; or -1.
  int unfenced = -1, unfenced_before = -1;
};

bool descending_warps = false;
bool late_copies = false;
bool is_random = false;
std::minstd_rand random_numbers;
uint32_t late_products = 0;  // one bit per wgmma, the same in all threads: those of a warp multiply together
int64_t early_copies = 0;
std::vector<std::unique_ptr<Fiber>> fibers;  // of the cluster's threads; each runs a thread of every cluster
std::vector<Block> blocks;
int running = 0;           // the running thread's index in the cluster
int threads_of_block = 0;
int64_t shared_bytes_of_block = 0;
int first_block = 0;       // of the cluster, in y
const std::function<void()>* running_thread;
std::string failure;
Place scheduler;
void* scheduler_fake_stack;
const void* scheduler_stack;
size_t scheduler_stack_bytes;
void* scheduler_thread;
Order launch_begin, launch_end;
std::unique_ptr<Order> cluster_barrier;
int arrived_at_cluster = 0;  // threads

Fiber& current() { return *fibers[running]; }
Block& block_of(int thread) { return blocks[thread / threads_of_block]; }
Warp& warp_of(int thread) { return block_of(thread).warps[thread % threads_of_block / kLanes]; }

// AddressSanitizer has to be told of every switch of stacks.
void leave(void** fake_stack, const void* to_stack, size_t to_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, to_stack, to_bytes);
#else
  (void)fake_stack, (void)to_stack, (void)to_bytes;
#endif
}
void arrive(void* fake_stack, const void** from_stack, size_t* from_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, from_stack, from_bytes);
#else
  (void)fake_stack, (void)from_stack, (void)from_bytes;
#endif
}

// ucontext begins a fiber and does not switch to it again: swapcontext asks the system for the signal mask each time,
// which took three fifths of the tests' time. Not instrumented, since AddressSanitizer takes a jump for the end of all
// frames of the stack.
[[noreturn, gnu::noinline, gnu::no_sanitize("address")]] void go_to(Place& place) { __builtin_longjmp(place.of, 1); }
[[gnu::noinline, gnu::no_sanitize("address")]] void switch_places(Place& from, Place& to) {
  if (__builtin_setjmp(from.of) == 0) go_to(to);
}
[[gnu::noinline, gnu::no_sanitize("address")]] void begin(Place& from, ucontext_t& fiber) {
  ucontext_t never;
  if (__builtin_setjmp(from.of) == 0) swapcontext(&never, &fiber);
}

void yield(State state) {
  Fiber& fiber = current();
  fiber.state = state;
  leave(&fiber.fake_stack, scheduler_stack, scheduler_stack_bytes);
  switch_to(scheduler_thread);
  switch_places(fiber.place, scheduler);
  arrive(fiber.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
}

void run_threads() {
  arrive(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  while (true) {
    launch_begin.acquire();
    (*running_thread)();
    if (!current().products.empty()) fail("a thread has ended before its products");
    launch_end.release();
    yield(State::kDone);
  }
}

void begin(Fiber& fiber) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, run_threads, 0);
  fiber.has_begun = true;
  begin(scheduler, context);
}

void resume(int thread) {
  running = thread;
  threadIdx = {thread % threads_of_block % blockDim.x, thread % threads_of_block / blockDim.x};
  blockIdx.y = first_block + thread / threads_of_block;
  Fiber& fiber = *fibers[thread];
  fiber.state = State::kReady;
  leave(&scheduler_fake_stack, fiber.stack.get(), kStackBytes);
  switch_to(fiber.thread);
  if (fiber.has_begun) {
    switch_places(scheduler, fiber.place);
  } else {
    begin(fiber);
  }
  arrive(scheduler_fake_stack, nullptr, nullptr);
  if (!failure.empty()) throw std::runtime_error("emulated kernel: " + failure);
}

// Whether all threads of the cluster have called arrive_at_cluster.
bool has_begun() { return arrived_at_cluster == static_cast<int>(blocks.size()) * threads_of_block; }

bool can_run(int thread) {
  const Fiber& fiber = *fibers[thread];
  return fiber.state == State::kReady ||
         (fiber.state == State::kAtArrivals && fiber.awaited->changes > fiber.seen_changes) ||
         (fiber.state == State::kAtCluster && has_begun()) ||
         (fiber.state == State::kInExchange && warp_of(thread).exchanges >= fiber.exchanges);
}

// The order in which `count` blocks, warps or lanes, at most 32, take turns.
struct Turns {
  int of[kLanes];
  explicit Turns(int count) {
    for (int i = 0; i < count; ++i) of[i] = descending_warps ? count - 1 - i : i;
    for (int i = is_random ? count - 1 : 0; i > 0; --i) std::swap(of[i], of[random_numbers() % (i + 1)]);
  }
};

// Runs each warp of the block that begins with this thread, as far as it gets without the other warps.
void run_warps(int first_thread) {
  const int count = threads_of_block / kLanes;
  const Turns warps(count);
  for (int i = 0; i < count; ++i) {
    const int first = first_thread + warps.of[i] * kLanes;
    for (bool moved = true; moved;) {
      moved = false;
      const Turns lanes(kLanes);
      for (int j = 0; j < kLanes; ++j) {
        const int thread = first + lanes.of[j];
        if (!can_run(thread)) continue;
        resume(thread);
        moved = true;
      }
    }
  }
}

// With the largest alignment that a kernel may ask for, and NaN in every format.
std::unique_ptr<char, decltype(&std::free)> new_shared_memory(int64_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 1024, static_cast<size_t>(bytes)) != 0) throw std::bad_alloc();
  std::memset(memory, 0xff, static_cast<size_t>(bytes));
  return {static_cast<char*>(memory), &std::free};
}

void allocate_cluster(int cluster, int64_t shared_bytes) {
  const FreshMemory fresh;
  blocks.clear();
  for (int i = 0; i < cluster; ++i) {
    blocks.push_back({std::vector<Warp>(threads_of_block / kLanes),
                      new_shared_memory(shared_bytes),
                      Order(),
                      std::vector<Order>(blockDim.y),
                      {}});
  }
  cluster_barrier = std::make_unique<Order>();
  arrived_at_cluster = 0;
}

int count(State state, int begin, int end) {
  int found = 0;
  for (int thread = begin; thread < end; ++thread) found += fibers[thread]->state == state;
  return found;
}

bool can_run(int begin, int end) {
  for (int thread = begin; thread < end; ++thread) {
    if (can_run(thread)) return true;
  }
  return false;
}

// Nothing may land in a block that has ended: its memory is another block's then.
void check_arrivals() {
  for (const Block& block : blocks) {
    for (const auto& [at, arrivals] : block.arrivals) {
      if (arrivals.bytes != 0 || !arrivals.late.empty()) {
        throw std::runtime_error("emulated kernel: a block has ended before what it is sent has come");
      }
    }
  }
}

// Lets the threads [begin, end) go on if all of them that have not ended wait at the barrier, and returns whether:
// since sm_70 it does not wait for ended threads (CUDA C++ Programming Guide, "Independent Thread Scheduling").
bool passes(State barrier, int begin, int end) {
  const int waiting = count(barrier, begin, end);
  if (waiting == 0 || waiting + count(State::kDone, begin, end) != end - begin) return false;
  for (int thread = begin; thread < end; ++thread) {
    if (fibers[thread]->state == barrier) fibers[thread]->state = State::kReady;
  }
  if (barrier == State::kAtBarrier) {
    Block& block = block_of(begin);
    block.unfenced_before = std::exchange(block.unfenced, -1);
  }
  return true;
}

// The same of the barriers of each row of the threads of the block that begins with this one, which wait for ended
// threads too: for as many as bar.sync names.
bool a_row_passes(int first_thread) {
  bool passed = false;
  for (int first = first_thread; first < first_thread + threads_of_block; first += blockDim.x) {
    if (count(State::kAtRowBarrier, first, first + blockDim.x) != blockDim.x) continue;
    passed |= passes(State::kAtRowBarrier, first, first + blockDim.x);
  }
  return passed;
}

void run_cluster(int cluster, int64_t shared_bytes) {
  allocate_cluster(cluster, shared_bytes);
  late_products = is_random ? random_numbers() : late_copies ? ~0u : 0;
  const int threads = cluster * threads_of_block;
  while (static_cast<int>(fibers.size()) < threads) fibers.push_back(std::make_unique<Fiber>());
  for (int thread = 0; thread < threads; ++thread) {
    Fiber& fiber = *fibers[thread];
    fiber.state = State::kReady;
    fiber.exchanges = 0;
    fiber.waited = false;
    fiber.copies.clear();
    fiber.groups.clear();
    fiber.fenced = true;
    fiber.products.clear();
    fiber.has_fenced_products = false;
    fiber.uncommitted_products = 0;
    fiber.asked_products = 0;
    fiber.has_arrived = false;
  }
  while (true) {
    // Runs each block as far as it gets without the others: what it reads from one that has not run is NaN. With
    // random turns it may stop before that, so that other blocks send to it while it still multiplies.
    const Turns turns(cluster);
    bool may_go_on = false;
    for (int i = 0; i < cluster; ++i) {
      const int first = turns.of[i] * threads_of_block;
      bool moves = true;
      while (moves && !(is_random && random_numbers() % 4 == 0)) {
        run_warps(first);
        moves = can_run(first, first + threads_of_block) || a_row_passes(first) ||
                passes(State::kAtBarrier, first, first + threads_of_block);
      }
      may_go_on |= moves;
    }
    const int done = count(State::kDone, 0, threads);
    if (done == threads) return check_arrivals();
    if (passes(State::kAtClusterBarrier, 0, threads) || may_go_on || can_run(0, threads)) continue;
    int at_barrier = 0;
    for (const State barrier : {State::kAtBarrier, State::kAtRowBarrier, State::kAtClusterBarrier}) {
      at_barrier += count(barrier, 0, threads);
    }
    throw std::runtime_error("emulated kernel: " + std::to_string(at_barrier) + " of " + std::to_string(threads) +
                             " threads wait at a barrier, " + std::to_string(done) +
                             " have ended, " + std::to_string(count(State::kAtArrivals, 0, threads)) +
                             " wait for what nobody sends, the others for a lane that is not in their"
                             " collective");
  }
}

Arrivals& arrivals_of(Block& block, const void* barrier) {
  const auto found = block.arrivals.find(barrier);
  if (found == block.arrivals.end()) fail("a barrier is used before it is made");
  return found->second;
}

// Whether what is issued now lands as late as possible.
bool is_late() { return is_random ? random_numbers() % 2 == 0 : late_copies; }

// These drop all waits or all fences: tests of the tests, which must notice a forgotten one.
bool forgets_waits() {
  static const bool forgotten = std::getenv("EAGLE_KERNELS_TEST_NO_WAITS") != nullptr;
  return forgotten;
}
bool forgets_fences() {
  static const bool forgotten = std::getenv("EAGLE_KERNELS_TEST_NO_FENCES") != nullptr;
  return forgotten;
}

}  // namespace

// No exception may cross a switch of stacks: the fiber stops for good and the scheduler throws.
[[noreturn]] void fail(const std::string& what) {
  failure = "thread " + std::to_string(running % threads_of_block) + " of block (" + std::to_string(blockIdx.x) + ", " +
            std::to_string(blockIdx.y) + "): " + what;
  yield(State::kDone);
  std::abort();
}

void set_warp_order(bool descending) { descending_warps = descending; }
void set_late_copies(bool late) { late_copies = late; }
void set_random(uint32_t seed) {
  is_random = seed != 0;
  random_numbers.seed(seed);
}

bool lands_now(const Copy& copy) {
  early_copies += !current().waited && copy.from != nullptr;
  const bool late = is_late();
  if (late) current().copies.push_back(copy);
  return !late;
}

int64_t take_early_copies() { return std::exchange(early_copies, 0); }

void commit_copies() {
  Fiber& fiber = current();
  fiber.groups.push_back(std::exchange(fiber.copies, {}));
}

std::vector<Copy> landing(size_t latest_groups) {
  std::vector<Copy> copies;
  auto& groups = current().groups;
  current().fenced &= groups.size() <= latest_groups;
  for (; groups.size() > latest_groups && !forgets_waits(); groups.pop_front()) {
    copies.insert(copies.end(), groups.front().begin(), groups.front().end());
  }
  return copies;
}

bool multiplies_now(const Product& product) {
  const int unfenced = block_of(running).unfenced_before;
  if (unfenced >= 0) fail("wgmma reads what thread " + std::to_string(unfenced) + " has not fenced");
  if (!current().has_fenced_products) fail("wgmma without a fence of its registers");
  ++current().uncommitted_products;
  // The products of one sum end in their order.
  const bool late = (late_products >> current().asked_products++ % 32 & 1) != 0 || !current().products.empty();
  if (late) current().products.push_back(product);
  return !late;
}

void fence_products() { current().has_fenced_products = true; }
void commit_products() { current().uncommitted_products = 0; }

std::vector<Product> ending_products() {
  if (current().uncommitted_products > 0) fail("products that were not committed are waited for");
  current().has_fenced_products = false;
  return forgets_waits() ? std::vector<Product>{} : std::exchange(current().products, {});
}

void fence_async_proxy() {
  if (!forgets_fences()) current().fenced = true;
}
void has_stored() { current().fenced = false; }

uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - shared_memory());
}

// compute-sanitizer's memcheck refuses what a block of a cluster of one sends (on an H100), and none of the rest does
// anything for it but cost time.
void check_not_alone() {
  if (blocks.size() < 2) fail("a block that is alone uses its cluster");
}

void make_barrier(const void* barrier, uint32_t bytes) {
  check_not_alone();
  check_alignment(barrier, sizeof(uint64_t));
  if (current().has_arrived) fail("a barrier is made when others may have sent already");
  const auto [made, is_new] = block_of(running).arrivals.try_emplace(barrier);
  if (!is_new) fail("a barrier is made twice");
  made->second.bytes = bytes;
}

bool lands_now(const Sent& sent, const void* barrier, int rank) {
  if (!has_begun()) fail("sends to a block that may not have begun");
  Arrivals& arrivals = arrivals_of(blocks[rank], in_block(barrier, rank));
  if (!is_late()) return true;
  arrivals.order.release();
  arrivals.late.push_back(sent);
  ++arrivals.changes;
  return false;
}

void landed(const void* barrier, int rank, uint32_t bytes) {
  Arrivals& arrivals = arrivals_of(blocks[rank], in_block(barrier, rank));
  arrivals.order.release();
  arrivals.bytes -= bytes;
  if (arrivals.bytes < 0) fail("more is sent than a barrier expects");
  ++arrivals.changes;
}

bool has_ended(const void* barrier) {
  if (forgets_waits()) return true;
  Arrivals& arrivals = arrivals_of(block_of(running), barrier);
  if (arrivals.bytes > 0) return false;
  arrivals.order.acquire();
  return true;
}

std::vector<Sent> landing(const void* barrier) {
  Arrivals& arrivals = arrivals_of(block_of(running), barrier);
  if (arrivals.late.empty()) {
    current().awaited = &arrivals;
    current().seen_changes = arrivals.changes;
    yield(State::kAtArrivals);
  }
  arrivals.order.acquire();
  return std::exchange(arrivals.late, {});
}

int own_rank() { return running / threads_of_block; }

void run(const std::function<void()>& thread, Dim3 grid, Dim3 block, int64_t shared_bytes, int cluster) {
  threads_of_block = block.x * block.y;
  shared_bytes_of_block = shared_bytes;
  if (threads_of_block % kLanes != 0 || threads_of_block > 1024 || grid.x < 1 || grid.y < 1 || grid.y > 65535) {
    throw std::runtime_error("emulated kernel: no GPU launches this grid");
  }
  running_thread = &thread;
  failure.clear();
  gridDim = grid;
  blockDim = block;
  scheduler_thread = running_on();
  launch_begin.release();
  try {
    for (first_block = 0; first_block < grid.y; first_block += cluster) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_cluster(cluster, shared_bytes);
    }
  } catch (...) {
    fibers.clear();  // they may have stopped in the middle of a thread
    throw;
  }
  launch_end.acquire();
}

const char* exchange(const void* mine, size_t bytes, bool orders) {
  const int lane = running % kLanes;
  Warp& warp = warp_of(running);
  Fiber& fiber = current();
  char* slots = warp.slots[fiber.exchanges++ % 2];
  // Byte by byte: ThreadSanitizer would see a call of memcpy even here, and lanes read each other's slots.
  for (size_t i = 0; i < bytes; ++i) slots[lane * kSlot + i] = static_cast<const char*>(mine)[i];
  if (orders) warp.order.release();
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    ++warp.exchanges;
  } else {
    yield(State::kInExchange);
  }
  if (orders) warp.order.acquire();
  return slots;
}

char* shared_memory() { return block_of(running).shared.get(); }

void sync_block() {
  if (!barriers_order && !kRacecheck) return;
  Order& barrier = block_of(running).barrier;
  if (!current().fenced) block_of(running).unfenced = running % threads_of_block;
  if (barriers_order) barrier.release();
  yield(State::kAtBarrier);
  if (barriers_order) barrier.acquire();
}

void sync_row(int threads) {
  if (blockDim.x != threads || blockDim.y != 2) fail("a barrier of " + std::to_string(threads) + " threads of a row");
  if (!barriers_order && !kRacecheck) return;
  Order& barrier = block_of(running).row_barriers[threadIdx.y];
  if (barriers_order) barrier.release();
  yield(State::kAtRowBarrier);
  if (barriers_order) barrier.acquire();
}

void sync_cluster(bool orders) {
  check_not_alone();
  if (orders && barriers_order) cluster_barrier->release();
  yield(State::kAtClusterBarrier);
  if (orders && barriers_order) cluster_barrier->acquire();
}

void arrive_at_cluster() {
  check_not_alone();
  if (std::exchange(current().has_arrived, true)) fail("a thread arrives at its cluster twice");
  ++arrived_at_cluster;
}

void wait_for_cluster() {
  if (!current().has_arrived) fail("a thread waits for its cluster and has not arrived");
  if (!has_begun()) yield(State::kAtCluster);
}

const char* in_block(const void* mine, int rank) {
  check_not_alone();
  if (rank < 0 || rank >= static_cast<int>(blocks.size())) fail("block " + std::to_string(rank) + " of the cluster");
  const int64_t at = static_cast<const char*>(mine) - shared_memory();
  // Each row of a block's threads has its share of the memory.
  const int first = rank * threads_of_block + static_cast<int>(at / (shared_bytes_of_block / blockDim.y)) * blockDim.x;
  if (count(State::kDone, first, first + blockDim.x) > 0) fail("shared memory of a block that has ended");
  return blocks[rank].shared.get() + at;
}

void wait_for_previous_kernel() { current().waited = true; }

void check_alignment(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) fail(std::to_string(bytes) + " bytes off alignment");
}

void check_access(const void* p, size_t bytes) {
  check_alignment(p, bytes);
  if (!current().waited) fail("global memory is touched before wait_for_previous_kernel");
}

}  // namespace eagle_kernels::cuda::host
