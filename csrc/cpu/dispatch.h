// Which instruction set runs: the best of the machine, unless torch.ops.eagle_kernels_C.set_cpu_isa has capped it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>
#include <type_traits>
#include <utility>

#include "isa.h"

namespace eagle_kernels::cpu {

// The names, with a comma between two and no spaces.
#define EAGLE_KERNELS_TEXT(...) #__VA_ARGS__
#define EAGLE_KERNELS_EXPANDED_TEXT(...) EAGLE_KERNELS_TEXT(__VA_ARGS__)
constexpr std::string_view kIsaNames = EAGLE_KERNELS_EXPANDED_TEXT(EAGLE_KERNELS_ISAS);
#undef EAGLE_KERNELS_EXPANDED_TEXT
#undef EAGLE_KERNELS_TEXT

constexpr int32_t kNumIsas = static_cast<int32_t>(std::count(kIsaNames.begin(), kIsaNames.end(), ',')) + 1;

std::string_view isa_name(Isa isa);

// The best set that this build has and this machine runs (AMX only where the kernel grants the tile registers).
Isa best_isa();

// Takes effect in calls that begin later; at most best_isa().
extern std::atomic<Isa> active_isa;

// The kernels of one op, by instruction set: PerIsa([](auto isa) { return &<op>_cpu<isa>; }).
template <class Kernels>
class PerIsa {
 public:
  template <class Make>
  constexpr explicit PerIsa(Make make) : PerIsa(make, std::make_integer_sequence<int32_t, kNumIsas>{}) {}

  const Kernels& of(Isa isa) const { return kernels_[static_cast<size_t>(isa)]; }
  const Kernels& active() const { return of(active_isa.load(std::memory_order_relaxed)); }

 private:
  template <class Make, int32_t... kIsas>
  constexpr PerIsa(Make make, std::integer_sequence<int32_t, kIsas...>)
      : kernels_{make(std::integral_constant<Isa, Isa{kIsas}>{})...} {}

  std::array<Kernels, kNumIsas> kernels_;
};

template <class Make>
PerIsa(Make) -> PerIsa<std::invoke_result_t<Make, std::integral_constant<Isa, Isa{0}>>>;

}  // namespace eagle_kernels::cpu
