// A primitive and its two callers: torch's dispatcher, and Python without it.
//
// In a call of norm_concat_linear with three chunks the dispatcher takes 4 us (schema, boxing, a handle for each tensor
// of a list), more than the checks and the launch together. So Python may pass its arguments to C directly: torch's
// DLPack exchange table (torch 2.11 and later, `torch.Tensor.__dlpack_c_exchange_api__`) describes a tensor in 0.05 us,
// without a handle. A call with anything but plain tensors still goes to the dispatcher.
//
// This uses no header and no symbol of Python: functions of its stable ABI arrive as addresses (python_call.cpp).
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"

struct _object;  // Python's PyObject

namespace eagle_kernels {

// Type is an argument as the dispatcher has it; open turns it into what a primitive takes.
template <class T>
struct Boxed {
  using Type = T;
  static const T& open(const T& value) { return value; }
};

template <class T>
  requires std::is_base_of_v<View, T>
struct Boxed<T> {
  using Type = Tensor;
  static T open(const Tensor& tensor) { return T(tensor); }
};

template <class T>
struct Boxed<std::optional<T>> {
  using Type = std::optional<typename Boxed<T>::Type>;
  static std::optional<T> open(const Type& value) {
    return value ? std::optional<T>(Boxed<T>::open(*value)) : std::nullopt;
  }
};

template <class T>
  requires(!std::is_arithmetic_v<T>)
struct Boxed<std::vector<T>> {
  using Type = std::vector<typename Boxed<T>::Type>;
  static std::vector<T> open(const Type& values) {
    std::vector<T> opened;
    opened.reserve(values.size());
    for (const auto& value : values) opened.push_back(Boxed<T>::open(value));
    return opened;
  }
};

// Reads the arguments of one call. Where it cannot read one, it has failed: the dispatcher then takes the call and
// raises the errors.
class PythonArguments {
 public:
  // For a primitive of this device type, which the first tensor must have; kAnyDevice if it may have any.
  PythonArguments(_object* const* arguments, int64_t count, int32_t device_type)
      : arguments_(arguments), count_(count), device_type_(device_type) {}
  ~PythonArguments();
  PythonArguments(const PythonArguments&) = delete;

  int64_t size() const { return count_; }
  bool failed() const { return failed_; }

  template <class T>
  T at(size_t i) {
    T value{};
    if (!failed_) read(arguments_[i], value);
    return value;
  }

 private:
  void read(_object* object, bool& value);
  void read(_object* object, int64_t& value);
  void read(_object* object, double& value);
  void read(_object* object, View& view);

  template <class T>
  void read(_object* object, std::optional<T>& value) {
    if (!is_none(object)) read(object, value.emplace());
  }

  template <class T>
  void read(_object* object, std::vector<T>& values) {
    const int64_t size = size_of(object);
    values.resize(static_cast<size_t>(size));
    for (int64_t i = 0; i < size && !failed_; ++i) read(item(object, i), values[i]);
  }

  bool is_none(const _object* object) const;
  int64_t size_of(_object* sequence);
  _object* item(_object* sequence, int64_t i);

  _object* const* arguments_;
  int64_t count_;
  int32_t device_type_;
  bool is_first_ = true;
  bool failed_ = false;
  std::vector<_object*> items_;  // of sequences, kept: another thread may change a list while a kernel runs
};

// Releases the GIL while it lives, as the dispatcher does.
class WithoutPython {
 public:
  WithoutPython();
  ~WithoutPython();
  WithoutPython(const WithoutPython&) = delete;

 private:
  void* thread_;
};

template <auto function>
struct Primitive;

template <class... Arguments, void (*function)(Arguments...)>
struct Primitive<function> {
  template <class T>
  using Value = std::remove_cvref_t<T>;

  static void from_dispatcher(const typename Boxed<Value<Arguments>>::Type&... arguments) {
    function(Boxed<Value<Arguments>>::open(arguments)...);
  }

  // Whether it could read the arguments and ran; the caller gets what the primitive throws.
  static bool from_python(PythonArguments& arguments) {
    return arguments.size() == sizeof...(Arguments) && call(arguments, std::index_sequence_for<Arguments...>());
  }

 private:
  template <size_t... i>
  static bool call(PythonArguments& arguments, std::index_sequence<i...>) {
    // Braces, so that the arguments are read in order.
    std::tuple<Value<Arguments>...> values{arguments.at<Value<Arguments>>(i)...};
    if (arguments.failed()) return false;
    const WithoutPython released;
    std::apply(function, values);
    return true;
  }
};

using PythonFunction = bool (*)(PythonArguments& arguments);

// For a primitive that only checks, <op>_checks_out beside <op>_out: Triton's launchers call that one, since checks in
// Python take 10 to 60 us of a call.
inline constexpr auto run_nothing = [](const auto&...) {};

inline void define_alike(torch::stable::detail::StableLibrary& library, std::initializer_list<const char*> primitives,
                         const std::string& arguments) {
  for (const std::string name : primitives) library.def((name + "(" + arguments + ") -> ()").c_str());
}

void add_python_function(std::string_view name, int32_t device_type, PythonFunction function);

bool launch_triton(PythonArguments& arguments);  // csrc/triton_launches.cpp

// Registers the primitive of this name for tensors of a device type.
template <auto function>
void implement(torch::stable::detail::StableLibrary& library, const char* name, int32_t device_type) {
  library.impl(name, TORCH_BOX(&Primitive<function>::from_dispatcher));
  add_python_function(name, device_type, &Primitive<function>::from_python);
}

}  // namespace eagle_kernels
