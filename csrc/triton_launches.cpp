// Launches Triton's kernels, and torch's products between them, from the operands of a call as Python has them:
// gathering the numbers of norm_concat_linear's two launches takes 9 us in Python, and 1 here. A record that
// triton_kernels/launch.py, `Launches`, prepares once says which number comes from which operand; nothing here knows a
// kernel or its arguments.
//
// This uses no header and no library of CUDA: its functions arrive as addresses, so that a build for CPUs has this too.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "checks.h"
#include "python_call.h"

namespace eagle_kernels {
namespace {

using Views = std::vector<OptionalView>;

enum class Kind : int64_t { kConstant, kInteger, kFloat, kAddress, kRowStride, kRows };

struct Origin {
  Kind kind;
  int64_t value;    // a position, or the constant
  int64_t of_rows;  // whether the rows are aligned only if this is a multiple of 16
};

struct Binary {
  void* function;  // null where none is compiled yet
  int64_t shared_bytes;
  int64_t starts_early;
};

// The origins follow in memory: three of the grid, then `num_numbers`. For a product they are the places of its
// operands.
struct Step {
  int64_t threads;  // 0: a product
  int64_t num_numbers;
  Binary binaries[2];  // by whether the rows are aligned

  const Origin* origins() const { return reinterpret_cast<const Origin*>(this + 1); }
  int64_t num_origins() const { return 3 + num_numbers; }
  const Step* next() const { return reinterpret_cast<const Step*>(origins() + num_origins()); }
};

// CUlaunchAttribute and CUlaunchConfig.
struct Attribute {
  int32_t id, padding;
  int32_t value[16];
};
struct Config {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t num_attributes;
};
constexpr int32_t kProgrammaticStreamSerialization = 6;

// The driver's launch, and torch's products of CUDA tensors: libtorch_cuda's aoti_torch_cuda_{mm,addmm,mm_dtype}_out.
struct Functions {
  int (*launch)(const Config*, void* function, void** parameters, void** extra);
  AOTITorchError (*mm)(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b);
  AOTITorchError (*addmm)(AtenTensorHandle out, AtenTensorHandle bias, AtenTensorHandle a, AtenTensorHandle b,
                          double beta, double alpha);
  AOTITorchError (*mm_dtype)(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b, int32_t dtype);
};

// The widths and the steps follow in memory.
struct Record {
  Functions functions;
  int64_t must_be_aligned;
  int64_t num_widths;  // of the first operands
  int64_t num_steps;

  const int64_t* widths() const { return reinterpret_cast<const int64_t*>(this + 1); }
  const Step* steps() const { return reinterpret_cast<const Step*>(widths() + num_widths); }
};

struct Operands {
  Views tensors;
  std::vector<int64_t> integers;
  std::vector<double> floats;

  int64_t row_stride(const OptionalView& view) const { return view && view->size(0) > 1 ? view->stride(0) : 0; }

  int64_t number(const Origin& origin) const {
    const auto i = static_cast<size_t>(origin.value);
    switch (origin.kind) {
      case Kind::kConstant: return origin.value;
      case Kind::kInteger: return integers[i];
      case Kind::kAddress: return reinterpret_cast<int64_t>(tensors[i]->data);
      case Kind::kRowStride: return row_stride(tensors[i]);
      case Kind::kRows: return tensors[i]->size(0);
      case Kind::kFloat: break;
    }
    const float value = static_cast<float>(floats[i]);
    int64_t number = 0;
    std::memcpy(&number, &value, sizeof(value));
    return number;
  }
};

// out = x @ weight^T + bias, rounded once; or the sums of the product in fp32.
bool multiply(const Functions& functions, const View& x, const View& weight, const OptionalView& bias,
              const View& out) {
  const auto tensor_of = [](const View& view) {
    return tensor_in_memory(view.data, view.dim, view.sizes, view.strides, view.dtype, view);
  };
  const int64_t sizes[] = {weight.size(1), weight.size(0)}, strides[] = {weight.stride(1), weight.stride(0)};
  const Tensor transposed = tensor_in_memory(weight.data, 2, sizes, strides, weight.dtype, weight);
  const Tensor a = tensor_of(x), c = tensor_of(out);
  if (bias) return functions.addmm(c.get(), tensor_of(*bias).get(), a.get(), transposed.get(), 1, 1) == 0;
  if (out.dtype == x.dtype) return functions.mm(c.get(), a.get(), transposed.get()) == 0;
  return functions.mm_dtype(c.get(), a.get(), transposed.get(), out.dtype.code) == 0;
}

// The numbers of one step, in memory that lasts until it is run.
class Packed {
 public:
  static constexpr int64_t kMaxNumbers = 120;

  // Returns false where this step cannot be run.
  bool pack(const Step& step, const Operands& operands, bool must_be_aligned) {
    if (step.num_origins() > kMaxNumbers) return false;
    int64_t of_rows = 0;
    for (int64_t i = 0; i < step.num_origins(); ++i) {
      const Origin& origin = step.origins()[i];
      numbers_[i] = operands.number(origin);
      if (origin.of_rows) of_rows |= numbers_[i];
    }
    // A driver's grid has 32 bits: it would be cut. Python raises the error.
    constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();
    if (*std::max_element(&numbers_[0], &numbers_[3]) > kMaxExtent) return false;
    // After the arguments Triton's kernels take pointers to Triton's scratch memory: null where they use none.
    std::fill_n(&numbers_[step.num_origins()], kUnused, 0);
    const bool aligned = of_rows % 16 == 0;
    step_ = &step;
    binary_ = &step.binaries[aligned];
    return step.threads == 0 || (binary_->function != nullptr && (aligned || !must_be_aligned));
  }

  bool run(const Functions& functions, const Views& operands, void* stream) {
    return step_->threads == 0 ? multiply(functions, operands) : launch(functions, stream);
  }

 private:
  static constexpr int64_t kUnused = 4;

  bool multiply(const Functions& functions, const Views& operands) const {
    const int64_t* place = &numbers_[3];
    const OptionalView bias = place[2] < 0 ? std::nullopt : operands[place[2]];
    return eagle_kernels::multiply(functions, *operands[place[0]], *operands[place[1]], bias, *operands[place[3]]);
  }

  bool launch(const Functions& functions, void* stream) {
    std::array<void*, kMaxNumbers + kUnused> parameters;
    const int64_t count = step_->num_numbers + kUnused;
    for (int64_t i = 0; i < count; ++i) parameters[i] = &numbers_[3 + i];
    Attribute attribute{.id = kProgrammaticStreamSerialization, .padding = 0, .value = {1}};
    const Config config{.grid = {extent(0), extent(1), extent(2)},
                        .block = {static_cast<uint32_t>(step_->threads), 1, 1},
                        .shared_bytes = static_cast<uint32_t>(binary_->shared_bytes),
                        .stream = stream,
                        .attributes = &attribute,
                        .num_attributes = binary_->starts_early ? 1u : 0u};
    return functions.launch(&config, binary_->function, parameters.data(), nullptr) == 0;
  }

  uint32_t extent(int64_t i) const { return static_cast<uint32_t>(numbers_[i]); }

  const Step* step_ = nullptr;
  const Binary* binary_ = nullptr;
  std::array<int64_t, kMaxNumbers + kUnused> numbers_;
};

// Codes in one slice take 4 steps, and slices of two products 3 each: 23 for K=3, H=D=8192 in blocks. Python runs more.
constexpr int64_t kMaxSteps = 32;

bool run_all(const Record& record, const Operands& operands, void* stream) {
  for (int64_t i = 0; i < record.num_widths; ++i) {
    if (operands.tensors[i]->size(1) != record.widths()[i]) return false;
  }
  if (record.num_steps > kMaxSteps) return false;
  std::array<Packed, kMaxSteps> packed;
  const Step* step = record.steps();
  // All are packed before the first is run: a call that this leaves to Python has run nothing.
  for (int64_t i = 0; i < record.num_steps; ++i, step = step->next()) {
    if (!packed[i].pack(*step, operands, record.must_be_aligned)) return false;
  }
  for (int64_t i = 0; i < record.num_steps; ++i) {
    if (!packed[i].run(record.functions, operands.tensors, stream)) return false;
  }
  return true;
}

}  // namespace

// Arguments: the record's address, the operands, the call's integers and floats, the stream. Returns whether all was
// run; where not, Python runs it or raises the error.
bool launch_triton(PythonArguments& arguments) {
  const auto* record = reinterpret_cast<const Record*>(arguments.at<int64_t>(0));
  const Operands operands{arguments.at<Views>(1), arguments.at<std::vector<int64_t>>(2),
                          arguments.at<std::vector<double>>(3)};
  auto* stream = reinterpret_cast<void*>(arguments.at<int64_t>(4));
  return !arguments.failed() && run_all(*record, operands, stream);
}

}  // namespace eagle_kernels
