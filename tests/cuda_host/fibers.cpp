// The scheduler behind device_host.h: one fiber (ucontext) per thread of a block.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
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

enum class State { kReady, kInExchange, kAtBarrier, kAtClusterBarrier, kDone };

struct Warp {
  char slots[2][kLanes * kSlot];  // two, so that a lane ahead by one exchange does not overwrite what others still read
  int arrived = 0;
  int64_t exchanges = 0;  // completed ones
  Order order;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* thread = new_thread();  // ThreadSanitizer's
  State state = State::kReady;
  int64_t exchanges = 0;  // that this lane has joined
  bool waited = false;    // for the previous kernel
  std::vector<Copy> copies;  // of the group that is not committed yet
  std::deque<std::vector<Copy>> groups;
};

// A block of the cluster that runs.
struct Block {
  std::vector<Warp> warps;
  std::vector<char> shared;
  Order barrier;
};

bool descending_warps = false;
bool late_copies = false;
int64_t early_copies = 0;
std::vector<std::unique_ptr<Fiber>> fibers;  // of the cluster's threads; kept between clusters, with their stacks
std::vector<Block> blocks;
int running = 0;           // thread of the cluster
int threads_of_block = 0;
int first_block = 0;       // of the cluster, in y
const std::function<void()>* running_thread;
std::string failure;
ucontext_t scheduler;
void* scheduler_fake_stack;
const void* scheduler_stack;
size_t scheduler_stack_bytes;
void* scheduler_thread;
Order launch_begin, launch_end;
std::unique_ptr<Order> cluster_barrier;

Fiber& current() { return *fibers[running]; }
Block& block_of(int thread) { return blocks[thread / threads_of_block]; }
Warp& warp_of(int thread) { return block_of(thread).warps[thread % threads_of_block / kLanes]; }

// AddressSanitizer has to be told of every change of stacks.
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

void yield(State state) {
  Fiber& fiber = current();
  fiber.state = state;
  leave(state == State::kDone ? nullptr : &fiber.fake_stack, scheduler_stack, scheduler_stack_bytes);
  switch_to(scheduler_thread);
  swapcontext(&fiber.context, &scheduler);
  arrive(fiber.fake_stack, nullptr, nullptr);
}

// No exception crosses a change of stacks: the fiber stops for good and the scheduler throws.
[[noreturn]] void fail(const std::string& what) {
  failure = "thread " + std::to_string(running % threads_of_block) + " of block (" + std::to_string(blockIdx.x) + ", " +
            std::to_string(blockIdx.y) + "): " + what;
  yield(State::kDone);
  std::abort();
}

void run_thread() {
  arrive(nullptr, &scheduler_stack, &scheduler_stack_bytes);
  launch_begin.acquire();
  (*running_thread)();
  launch_end.release();
  yield(State::kDone);
}

void resume(int thread) {
  running = thread;
  threadIdx = {thread % threads_of_block % blockDim.x, thread % threads_of_block / blockDim.x};
  blockIdx.y = first_block + thread / threads_of_block;
  Fiber& fiber = *fibers[thread];
  fiber.state = State::kReady;
  leave(&scheduler_fake_stack, fiber.stack.get(), kStackBytes);
  switch_to(fiber.thread);
  swapcontext(&scheduler, &fiber.context);
  arrive(scheduler_fake_stack, nullptr, nullptr);
  if (!failure.empty()) throw std::runtime_error("emulated kernel: " + failure);
}

bool can_run(int thread) {
  const Fiber& fiber = *fibers[thread];
  return fiber.state == State::kReady ||
         (fiber.state == State::kInExchange && warp_of(thread).exchanges >= fiber.exchanges);
}

// Each warp of the block whose threads begin with this one, as far as it comes without the others.
void run_warps(int first_thread) {
  const int count = threads_of_block / kLanes;
  for (int i = 0; i < count; ++i) {
    const int first = first_thread + (descending_warps ? count - 1 - i : i) * kLanes;
    for (bool moved = true; moved;) {
      moved = false;
      for (int j = 0; j < kLanes; ++j) {
        const int thread = first + (descending_warps ? kLanes - 1 - j : j);
        if (!can_run(thread)) continue;
        resume(thread);
        moved = true;
      }
    }
  }
}

void allocate_cluster(int cluster, int64_t shared_bytes) {
  const FreshMemory fresh;
  blocks.clear();
  for (int i = 0; i < cluster; ++i) {
    blocks.push_back({std::vector<Warp>(threads_of_block / kLanes),
                      std::vector<char>(shared_bytes, static_cast<char>(0xff)),  // NaN in every format
                      Order()});
  }
  cluster_barrier = std::make_unique<Order>();
}

int count(State state, int begin, int end) {
  int found = 0;
  for (int thread = begin; thread < end; ++thread) found += fibers[thread]->state == state;
  return found;
}

// Lets the threads [begin, end) go on where all of them that have not ended wait at the barrier: from sm_70 on those
// that have are not waited for (CUDA C++ Programming Guide, "Independent Thread Scheduling").
bool passes(State barrier, int begin, int end) {
  const int waiting = count(barrier, begin, end);
  if (waiting == 0 || waiting + count(State::kDone, begin, end) != end - begin) return false;
  for (int thread = begin; thread < end; ++thread) {
    if (fibers[thread]->state == barrier) fibers[thread]->state = State::kReady;
  }
  return true;
}

void run_cluster(int cluster, int64_t shared_bytes) {
  allocate_cluster(cluster, shared_bytes);
  const int threads = cluster * threads_of_block;
  while (static_cast<int>(fibers.size()) < threads) fibers.push_back(std::make_unique<Fiber>());
  for (int thread = 0; thread < threads; ++thread) {
    Fiber& fiber = *fibers[thread];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, run_thread, 0);
    fiber.fake_stack = nullptr;
    fiber.state = State::kReady;
    fiber.exchanges = 0;
    fiber.waited = false;
    fiber.copies.clear();
    fiber.groups.clear();
  }
  while (true) {
    // Each block as far as it comes without the others: what it reads of one that has not run is NaN.
    for (int i = 0; i < cluster; ++i) {
      const int first = (descending_warps ? cluster - 1 - i : i) * threads_of_block;
      do {
        run_warps(first);
      } while (passes(State::kAtBarrier, first, first + threads_of_block));
    }
    const int done = count(State::kDone, 0, threads);
    if (done == threads) return;
    if (passes(State::kAtClusterBarrier, 0, threads)) continue;
    const int at_barrier = count(State::kAtBarrier, 0, threads) + count(State::kAtClusterBarrier, 0, threads);
    throw std::runtime_error("emulated kernel: " + std::to_string(at_barrier) + " of " + std::to_string(threads) +
                             " threads wait at a barrier, " + std::to_string(done) +
                             " have ended, the others wait for a lane that is not in their collective");
  }
}

}  // namespace

void set_warp_order(bool descending) { descending_warps = descending; }
void set_late_copies(bool late) { late_copies = late; }

bool lands_now(const Copy& copy) {
  early_copies += !current().waited && copy.from != nullptr;
  if (late_copies) current().copies.push_back(copy);
  return !late_copies;
}

int64_t take_early_copies() { return std::exchange(early_copies, 0); }

void commit_copies() {
  Fiber& fiber = current();
  fiber.groups.push_back(std::exchange(fiber.copies, {}));
}

std::vector<Copy> landing(size_t latest_groups) {
  // For the test of the test: a wait that was forgotten.
  static const bool forgotten = std::getenv("EAGLE_KERNELS_TEST_NO_WAITS") != nullptr;
  std::vector<Copy> copies;
  auto& groups = current().groups;
  for (; groups.size() > latest_groups && !forgotten; groups.pop_front()) {
    copies.insert(copies.end(), groups.front().begin(), groups.front().end());
  }
  return copies;
}

void run(const std::function<void()>& thread, Dim3 grid, Dim3 block, int64_t shared_bytes, int cluster) {
  threads_of_block = block.x * block.y;
  if (threads_of_block % kLanes != 0 || threads_of_block > 1024 || grid.x < 1 || grid.y < 1 || grid.y > 65535) {
    throw std::runtime_error("emulated kernel: no GPU launches this grid");
  }
  running_thread = &thread;
  failure.clear();
  gridDim = grid;
  blockDim = block;
  scheduler_thread = running_on();
  launch_begin.release();
  for (first_block = 0; first_block < grid.y; first_block += cluster) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_cluster(cluster, shared_bytes);
  }
  launch_end.acquire();
}

const char* exchange(const void* mine, size_t bytes) {
  const int lane = running % kLanes;
  Warp& warp = warp_of(running);
  Fiber& fiber = current();
  char* slots = warp.slots[fiber.exchanges++ % 2];
  std::memcpy(slots + lane * kSlot, mine, bytes);
  warp.order.release();
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    ++warp.exchanges;
  } else {
    yield(State::kInExchange);
  }
  warp.order.acquire();
  return slots;
}

char* shared_memory() { return block_of(running).shared.data(); }

void sync_block() {
  Order& barrier = block_of(running).barrier;
  if (barriers_order) barrier.release();
  yield(State::kAtBarrier);
  if (barriers_order) barrier.acquire();
}

void sync_cluster() {
  if (barriers_order) cluster_barrier->release();
  yield(State::kAtClusterBarrier);
  if (barriers_order) cluster_barrier->acquire();
}

const float* in_block(const float* mine, int rank) {
  if (rank < 0 || rank >= static_cast<int>(blocks.size())) fail("block " + std::to_string(rank) + " of the cluster");
  const int first = rank * threads_of_block;
  if (count(State::kDone, first, first + threads_of_block) > 0) fail("reads shared memory of a block that has ended");
  return reinterpret_cast<const float*>(blocks[rank].shared.data() +
                                        (reinterpret_cast<const char*>(mine) - shared_memory()));
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
