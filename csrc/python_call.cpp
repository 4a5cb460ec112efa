#include "python_call.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>

#include "dlpack.h"
#include "export.h"

namespace eagle_kernels {
namespace {

using Object = _object*;

// The functions of Python's stable ABI that are called, in the order of `kPythonNames`.
struct Python {
  Object (*type_of)(Object);
  void (*increase)(Object);
  void (*decrease)(Object);
  long long (*as_integer)(Object);
  double (*as_double)(Object);
  int (*is_true)(Object);
  ptrdiff_t (*length)(Object);
  Object (*item)(Object, ptrdiff_t);
  ptrdiff_t (*list_size)(Object);
  Object (*list_item)(Object, ptrdiff_t);  // borrowed
  Object (*call)(Object function, ...);
  Object (*call_with)(Object function, Object tuple);
  Object (*new_tuple)(ptrdiff_t);
  int (*set_item)(Object tuple, ptrdiff_t, Object stolen);
  Object (*error)();
  void (*clear_error)();
  void (*raise)(Object type, const char* text);
  void* (*save_thread)();
  void (*restore_thread)(void*);
};
constexpr const char* kPythonNames =
    "PyObject_Type Py_IncRef Py_DecRef PyLong_AsLongLong PyFloat_AsDouble PyObject_IsTrue PySequence_Size "
    "PySequence_GetItem PyList_Size PyList_GetItem PyObject_CallFunctionObjArgs PyObject_CallObject PyTuple_New "
    "PyTuple_SetItem PyErr_Occurred PyErr_Clear PyErr_SetString PyEval_SaveThread PyEval_RestoreThread";

// Objects that outlive every call: python/eagle_kernels/library.py keeps them.
struct Objects {
  Object none, true_object, false_object, list, tensor, parameter, runtime_error, is_neg, is_profiling;
};

Python python;
Objects objects;
const dlpack::Exchange* tensors;

// PyMethodDef of the stable ABI.
struct Method {
  const char* name;
  Object (*function)(Object self, Object const* arguments, ptrdiff_t count);
  int flags;
  const char* doc;
};
constexpr int kFastCall = 0x80;

// A primitive. The `self` of its method is torch's packet of its overloads.
struct Entry {
  std::string name;
  std::array<PythonFunction, 2> by_device_type{};
  Method method{};
};
constexpr size_t kMaxEntries = 24;

// A function, since any file of the library may be the first to add an entry while it is loaded.
std::array<Entry, kMaxEntries>& entries() {
  static std::array<Entry, kMaxEntries> all;
  return all;
}

// For an object that is alive: no reference is kept.
Object type_of(Object object) {
  const Object type = python.type_of(object);
  python.decrease(type);
  return type;
}

bool is_plain_tensor(Object object) {
  const Object type = type_of(object);
  return type == objects.tensor || type == objects.parameter;
}

// The memory of a lazily negated tensor does not have its values; the dispatcher computes them. Such a tensor is the
// imaginary part of a complex tensor's conjugate, which is never in bf16, integers or codes: asking takes 0.07 us a
// tensor.
bool is_negated(Object tensor, const dlpack::DataType& type) {
  if (type.code != dlpack::kFloat) return false;
  const Object answer = python.call(objects.is_neg, tensor, nullptr);
  if (answer == nullptr) return true;
  python.decrease(answer);
  return answer == objects.true_object;
}

TorchDType dtype_of(const dlpack::DataType& type) {
  switch (type.code << 8 | type.bits) {
    case dlpack::kFloat << 8 | 32:
      return kTorchFloat;
    case dlpack::kFloat << 8 | 16:
      return kTorchHalf;
    case dlpack::kBFloat << 8 | 16:
      return kTorchBFloat16;
    case dlpack::kInt << 8 | 32:
      return kTorchInt;
    case dlpack::kInt << 8 | 64:
      return kTorchLong;
    case dlpack::kInt << 8 | 8:
      return kTorchInt8;
    case dlpack::kUInt << 8 | 8:
      return kTorchByte;
    case dlpack::kFloat8E4M3FN << 8 | 8:
      return kTorchFloat8E4M3;
    case dlpack::kFloat8E8M0FNU << 8 | 8:
      return kTorchFloat8E8M0;
    default:
      return {-1};  // which every check refuses
  }
}

// False unless this is a plain tensor on CPU or CUDA whose memory has its values.
bool view_of(Object object, View& view) {
  dlpack::Tensor tensor;
  if (!is_plain_tensor(object) || tensors->tensor_of(object, &tensor) != 0) return false;
  const bool on_cpu = tensor.device.type == dlpack::kCpu;
  if ((!on_cpu && tensor.device.type != dlpack::kCuda) || is_negated(object, tensor.dtype)) return false;
  view.data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  view.sizes = tensor.sizes;
  view.strides = tensor.strides;
  view.dim = tensor.dim;
  view.element_size = tensor.dtype.bits / 8;
  view.dtype = dtype_of(tensor.dtype);
  view.device_type = on_cpu ? kCpuDevice : kCudaDevice;
  view.device_index = tensor.device.index;
  // Without memory: torch._efficientzerotensor, which the dispatcher gives some, or a storage that was released.
  return tensor.data != nullptr || view.numel() == 0;
}

// Calls the primitive through `self`, torch's packet of its overloads.
Object call_dispatcher(Object self, Object const* arguments, ptrdiff_t count) {
  const Object tuple = python.new_tuple(count);
  if (tuple == nullptr) return nullptr;
  for (ptrdiff_t i = 0; i < count; ++i) {
    python.increase(arguments[i]);
    python.set_item(tuple, i, arguments[i]);
  }
  const Object result = python.call_with(self, tuple);
  python.decrease(tuple);
  return result;
}

// A profiler shows only what the dispatcher has called.
bool is_profiling() {
  const Object answer = python.call(objects.is_profiling, nullptr);
  if (answer == nullptr) return true;
  python.decrease(answer);
  return answer == objects.true_object;
}

bool call_directly(const Entry& entry, Object const* arguments, ptrdiff_t count) {
  if (count == 0 || is_profiling()) return false;
  for (const int32_t device_type : {kCudaDevice, kCpuDevice}) {
    const PythonFunction function = entry.by_device_type[device_type];
    if (function == nullptr) continue;
    PythonArguments read(arguments, count, device_type);
    if (function(read)) return true;
    python.clear_error();
  }
  return false;
}

template <size_t i>
Object call(Object self, Object const* arguments, ptrdiff_t count) {
  try {
    if (call_directly(entries()[i], arguments, count)) {
      python.increase(objects.none);
      return objects.none;
    }
  } catch (const std::exception& failure) {
    python.raise(objects.runtime_error, failure.what());
    return nullptr;
  }
  return call_dispatcher(self, arguments, count);
}

// Not a primitive: it has no tensors of its own, and no dispatcher behind it.
Object call_launch_triton(Object, Object const* arguments, ptrdiff_t count) {
  constexpr ptrdiff_t kNumArguments = 5;
  try {
    PythonArguments read(arguments, count, kAnyDevice);
    if (count == kNumArguments && launch_triton(read)) {
      python.increase(objects.true_object);
      return objects.true_object;
    }
  } catch (const std::exception& failure) {
    python.raise(objects.runtime_error, failure.what());
    return nullptr;
  }
  python.clear_error();
  python.increase(objects.none);
  return objects.none;
}

bool is_operand(Object object) { return object == objects.none || is_plain_tensor(object); }

// Whether an argument is an operand, which is None or a tensor of torch's own classes, or a list of operands.
bool is_plain(Object argument) {
  if (is_operand(argument)) return true;
  if (type_of(argument) != objects.list) return false;
  const ptrdiff_t size = python.list_size(argument);
  for (ptrdiff_t i = 0; i < size; ++i) {
    if (!is_operand(python.list_item(argument, i))) return false;
  }
  return true;
}
Object call_are_plain(Object, Object const* arguments, ptrdiff_t count) {
  const bool plain = std::all_of(arguments, arguments + count, is_plain);
  const Object answer = plain ? objects.true_object : objects.false_object;
  python.increase(answer);
  return answer;
}

// Functions that are no primitives and have no `self`.
constexpr Method kOthers[] = {{"launch_triton", &call_launch_triton, kFastCall, nullptr},
                              {"are_plain", &call_are_plain, kFastCall, nullptr}};

template <size_t... i>
void add_methods(std::index_sequence<i...>) {
  ((entries()[i].method = {entries()[i].name.c_str(), &call<i>, kFastCall, nullptr}), ...);
}

}  // namespace

void add_python_function(std::string_view name, int32_t device_type, PythonFunction function) {
  const auto entry = std::find_if(entries().begin(), entries().end(), [&](const Entry& known) {
    return known.name.empty() || known.name == name;
  });
  if (entry == entries().end()) throw std::runtime_error("eagle-kernels: more primitives than kMaxEntries");
  entry->name = name;
  entry->by_device_type[device_type] = function;
}

PythonArguments::~PythonArguments() {
  for (const Object item : items_) python.decrease(item);
}

void PythonArguments::read(Object object, bool& value) {
  const int answer = python.is_true(object);
  failed_ |= answer < 0;
  value = answer == 1;
}

void PythonArguments::read(Object object, int64_t& value) {
  value = python.as_integer(object);
  failed_ |= value == -1 && python.error() != nullptr;
}

void PythonArguments::read(Object object, double& value) {
  value = python.as_double(object);
  failed_ |= value == -1 && python.error() != nullptr;
}

void PythonArguments::read(Object object, View& view) {
  failed_ |= !view_of(object, view);
  failed_ |= is_first_ && device_type_ != kAnyDevice && view.device_type != device_type_;
  is_first_ = false;
}

bool PythonArguments::is_none(const _object* object) const { return object == objects.none; }

int64_t PythonArguments::size_of(Object sequence) {
  const ptrdiff_t size = python.length(sequence);
  failed_ |= size < 0;
  return std::max<ptrdiff_t>(size, 0);
}

Object PythonArguments::item(Object sequence, int64_t i) {
  const Object item = python.item(sequence, i);
  failed_ |= item == nullptr;
  if (items_.empty()) items_.reserve(16);  // one allocation, not one for each power of two
  if (item != nullptr) items_.push_back(item);
  return item;
}

WithoutPython::WithoutPython() : thread_(python.save_thread()) {}
WithoutPython::~WithoutPython() { python.restore_thread(thread_); }

}  // namespace eagle_kernels

// The names whose addresses library.py passes to `eagle_kernels_set_python`.
EAGLE_KERNELS_EXPORT const char* eagle_kernels_python_names() { return eagle_kernels::kPythonNames; }

// How many objects `eagle_kernels_set_python` reads.
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_num_python_objects() {
  return sizeof(eagle_kernels::Objects) / sizeof(eagle_kernels::Object);
}

// Returns 0 where the version of torch's exchange table is not known here.
EAGLE_KERNELS_EXPORT int64_t eagle_kernels_set_python(const void* functions, const void* objects,
                                                      const void* exchange) {
  using namespace eagle_kernels;
  const auto* table = static_cast<const dlpack::Exchange*>(exchange);
  if (table->major != dlpack::kMajorVersion || table->tensor_of == nullptr) return 0;
  std::memcpy(&python, functions, sizeof(python));
  std::memcpy(&eagle_kernels::objects, objects, sizeof(eagle_kernels::objects));
  tensors = table;
  add_methods(std::make_index_sequence<kMaxEntries>());
  return 1;
}

// The PyMethodDef of function i; null past the last one.
EAGLE_KERNELS_EXPORT const void* eagle_kernels_python_method(int64_t i) {
  using namespace eagle_kernels;
  constexpr int64_t kNumOthers = std::size(kOthers);
  if (i < kNumOthers) return &kOthers[i];
  const int64_t entry = i - kNumOthers;
  return entry < static_cast<int64_t>(kMaxEntries) && !entries()[entry].name.empty() ? &entries()[entry].method
                                                                                     : nullptr;
}
