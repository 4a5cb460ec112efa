// norm_concat_linear: from tensors to the record, and the primitives of both devices, for a weight in the chunks' dtype
// (in one pass or in two steps) and for a quantized one.
#include "norm_concat_linear.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <array>

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/norm_concat.h"
#include "cpu/parallel.h"
#include "cpu/workspace.h"
#include "cuda/current_device.h"
#include "norm_concat.h"
#include "python_call.h"
#include "sources.h"

namespace eagle_kernels {
namespace {

constexpr const char* kOp = "norm_concat_linear";
constexpr const char* kQuantizedOp = "norm_concat_linear_quantized";

// All of the record but the weight.
NormConcatLinear record_of(const char* op, const Sources& sources, const OptionalView& bias,
                           const OptionalView& post_norm_gain, double post_norm_eps, const Output& out) {
  const int64_t columns = out.size(1);
  NormConcatLinear record{};
  record.source = sources.concat;
  record.num_rows = out.size(0);
  record.num_columns = columns;
  if (bias) {
    check_vector(op, "bias", *bias, columns, sources.first);
    check_no_overlap(op, "out", out, *bias);
    record.bias = {bias->data, bias->type()};
  }
  if (post_norm_gain) {
    check_vector(op, "post_norm_weight", *post_norm_gain, columns, sources.first);
    check_no_overlap(op, "out", out, *post_norm_gain);
    check_eps(op, "post_norm_eps", post_norm_eps);
    record.post_norm_gain = {post_norm_gain->data, post_norm_gain->type()};
    record.post_norm_eps = static_cast<float>(post_norm_eps);
  }
  record.out = out.mutable_data();
  record.out_row_stride = out.stride(0);
  return record;
}

template <class Run>
void run_checked(const Run& run, const SourceArguments& arguments, const View& weight, const OptionalView& bias,
                 const OptionalView& post_norm_gain, double post_norm_eps, const Output& out) {
  const Sources sources(kOp, arguments, out);
  check_operand(kOp, "weight", weight, sources.first);
  check_shape(kOp, "weight", weight, out.size(1), sources.concat.width);
  check_no_overlap(kOp, "out", out, weight);

  NormConcatLinear record = record_of(kOp, sources, bias, post_norm_gain, post_norm_eps, out);
  record.weight = weight.data;
  record.weight_row_stride = weight.stride(0);
  run(record, weight, out);
}

template <auto run>
void dense_out(const SourceArguments& arguments, const View& weight, const OptionalView& bias,
               const OptionalView& post_norm_gain, double post_norm_eps, const Output& out) {
  run_checked(run, arguments, weight, bias, post_norm_gain, post_norm_eps, out);
}

template <auto run>
constexpr auto norm_concat_linear_out = with_sources<&dense_out<run>>;

struct CpuKernels {
  int64_t (*workspace)(const NormConcatLinear&);
  int64_t (*pack_units)(const NormConcatLinear&);
  void (*pack)(const NormConcatLinear&, int64_t unit_begin, int64_t unit_end);
  int64_t (*panels)(const NormConcatLinear&);
  void (*project)(const NormConcatLinear&, int64_t panel_begin, int64_t panel_end);
  void (*post_norm)(const NormConcatLinear&, int64_t row_begin, int64_t row_end);
};

constexpr cpu::PerIsa kCpu([](auto isa) {
  return CpuKernels{
      .workspace = norm_concat_linear_workspace<isa>,
      .pack_units = norm_concat_linear_pack_units<isa>,
      .pack = norm_concat_linear_pack<isa>,
      .panels = norm_concat_linear_panels<isa>,
      .project = norm_concat_linear_project<isa>,
      .post_norm = norm_concat_linear_post_norm<isa>,
  };
});

void run_on_cpu(NormConcatLinear record, const View&, const Output&) {
  if (record.num_rows == 0 || record.num_columns == 0) return;
  const CpuKernels& kernels = kCpu.active();
  const cpu::Workspace workspace(kOp, kernels.workspace(record));
  record.workspace = workspace.data();
  const int64_t units = kernels.pack_units(record), panels = kernels.panels(record);
  const int64_t width = record.source.width;
  cpu::parallel_over(units, record.num_rows * width / units,
                     [&](int64_t begin, int64_t end) { kernels.pack(record, begin, end); });
  cpu::parallel_over(panels, record.num_rows * record.num_columns * width / panels,
                     [&](int64_t begin, int64_t end) { kernels.project(record, begin, end); });
  if (record.post_norm_gain.data == nullptr) return;
  cpu::parallel_over(record.num_rows, record.num_columns,
                     [&](int64_t begin, int64_t end) { kernels.post_norm(record, begin, end); });
}

void run_few_rows_on_cpu(NormConcatLinear record, const View& weight, const Output& out) {
  record.kernel = ProductKernel::kFewRows;
  run_on_cpu(record, weight, out);
}

// With codes in bytes, `scales` in bytes are not scales: they are what a row of bf16 in 12 bits has besides its codes.
WeightType weight_type_of(TorchDType codes, TorchDType scales) {
  if (codes == kTorchByte) return scales == kTorchByte ? WeightType::kBFloat16In12 : WeightType::kFloat4E2M1;
  return codes == kTorchInt8 ? WeightType::kInt8 : WeightType::kFloat8E4M3;
}

ScaleType scale_type_of(TorchDType scales) {
  if (scales == kTorchFloat) return ScaleType::kFloat32;
  return scales == kTorchFloat8E8M0 ? ScaleType::kFloat8E8M0 : ScaleType::kFloat8E4M3;
}

bool is_block_width(int64_t columns, int64_t width) {
  return columns >= width || columns == 16 || columns == 32 || columns == 64 || (columns > 0 && columns % 128 == 0);
}

int64_t num_blocks(int64_t size, int64_t block) { return size / block + (size % block != 0); }

// The bytes of a row of codes.
int64_t row_bytes(WeightType type, int64_t width) {
  switch (type) {
    case WeightType::kFloat4E2M1: return width / 2;
    case WeightType::kBFloat16In12: return num_blocks(width, 128) * 192;
    default: return width;
  }
}

void add_codes(const Sources& sources, const View& codes, TorchDType scales, const View& out,
               NormConcatLinear& record) {
  const char* op = kQuantizedOp;
  const int64_t width = sources.concat.width;
  const WeightType type = weight_type_of(codes.dtype, scales);
  check_device(op, "codes", codes, sources.first);
  check(codes.dtype == kTorchFloat8E4M3 || codes.dtype == kTorchInt8 || codes.dtype == kTorchByte, op, "codes",
        "dtype");
  check_rows(op, "codes", codes);
  check(type != WeightType::kFloat4E2M1 || width % 2 == 0, op, "codes", "columns");
  check(type != WeightType::kBFloat16In12 || record.source.dtype == DType::kBFloat16, op, "chunks", "dtype");
  check_shape(op, "codes", codes, out.size(1), row_bytes(type, width));
  check_no_overlap(op, "out", out, codes);
  record.weight = codes.data;
  record.weight_row_stride = codes.stride(0);
  record.weight_type = type;
}

Scales scales_of(const Sources& sources, WeightType type, const View& scales, const std::optional<View>& global_scale,
                 int64_t block_rows, int64_t block_columns, const View& out) {
  const char* op = kQuantizedOp;
  const int64_t columns = out.size(1), width = sources.concat.width;
  check(block_rows >= 1 && is_block_width(block_columns, width), op, "block", "value");
  check_device(op, "scales", scales, sources.first);
  check(scales.dtype == kTorchFloat || scales.dtype == kTorchFloat8E8M0 || scales.dtype == kTorchFloat8E4M3 ||
            type == WeightType::kBFloat16In12,
        op, "scales", "dtype");
  check_rows(op, "scales", scales);
  if (type == WeightType::kBFloat16In12) {
    check(scales.size(1) >= 32 && scales.size(1) % 4 == 0, op, "scales", "columns");
    check_shape(op, "scales", scales, columns, scales.size(1));
  } else {
    check_shape(op, "scales", scales, num_blocks(columns, block_rows), num_blocks(width, block_columns));
  }
  check_no_overlap(op, "out", out, scales);
  if (global_scale) {
    check_device(op, "global_scale", *global_scale, sources.first);
    check_dtype(op, "global_scale", *global_scale, kTorchFloat);
    check(global_scale->numel() == 1, op, "global_scale", "shape");
    check_no_overlap(op, "out", out, *global_scale);
  }
  return {.data = scales.data,
          .type = scale_type_of(scales.dtype),
          .row_stride = scales.stride(0),
          .row_size = scales.size(1),
          .block_rows = block_rows,
          .block_columns = block_columns,
          .global = global_scale ? static_cast<const float*>(global_scale->data) : nullptr};
}

// For any other number `run_codes_on_cuda` would write nothing, and a CPU would take the first kernel.
ProductKernel kernel_of(int64_t number) {
  check(number >= 0 && number <= static_cast<int64_t>(ProductKernel::kWgmma), kQuantizedOp, "kernel", "number");
  return static_cast<ProductKernel>(number);
}

template <auto run>
void quantized_out(const SourceArguments& arguments, const View& codes, const View& scales,
                   const OptionalView& global_scale, int64_t block_rows, int64_t block_columns,
                   const OptionalView& bias, const OptionalView& post_norm_gain, double post_norm_eps, int64_t kernel,
                   bool early_weight, const Output& out) {
  const Sources sources(kQuantizedOp, arguments, out);
  NormConcatLinear record = record_of(kQuantizedOp, sources, bias, post_norm_gain, post_norm_eps, out);
  add_codes(sources, codes, scales.dtype, out, record);
  record.scales = scales_of(sources, record.weight_type, scales, global_scale, block_rows, block_columns, out);
  record.kernel = kernel_of(kernel);
  record.early_weight = early_weight;
  run(record, codes, out);
}

template <auto run>
constexpr auto norm_concat_linear_quantized_out = with_sources<&quantized_out<run>>;

template <size_t dim>
Tensor tensor(const void* data, const int64_t (&sizes)[dim], const int64_t (&strides)[dim], TorchDType dtype,
              const View& like) {
  return tensor_in_memory(data, dim, sizes, strides, dtype, like);
}

Tensor matrix(const void* data, int64_t rows, int64_t columns, int64_t row_stride, const View& like) {
  return tensor(data, {rows, columns}, {row_stride, 1}, like.dtype, like);
}

Tensor matrix_of(const Output& out) { return matrix(out.data, out.size(0), out.size(1), out.stride(0), out); }

// [width, D]: the weight as the second operand of a product.
Tensor transposed(const NormConcatLinear& op, const View& weight) {
  return tensor(weight.data, {op.source.width, op.num_columns}, {1, op.weight_row_stride}, weight.dtype, weight);
}

// norm_concat, then torch's own product, called as a function: through the dispatcher it takes 2 us more.
void run_two_steps_on_cpu(const NormConcatLinear& op, const View& weight, const Output& out) {
  const int64_t rows = op.num_rows, width = op.source.width;
  check(op.bias.data == nullptr && op.post_norm_gain.data == nullptr, kOp, "bias", "CPU");
  const cpu::Workspace workspace(kOp, rows * width * weight.element_size);
  cpu::norm_concat({op.source, rows, workspace.data(), width});
  const Tensor normed = matrix(workspace.data(), rows, width, width, weight);
  expect_success(aoti_torch_cpu_mm_out(matrix_of(out).get(), normed.get(), transposed(op, weight).get()));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) {
  define_alike(m,
               {"norm_concat_linear_out", "norm_concat_linear_few_rows_out", "norm_concat_linear_checks_out",
                "norm_concat_linear_two_step_out", "norm_concat_linear_wgmma_out"},
               kSourcesSchema + ", Tensor weight, Tensor? bias, Tensor? post_norm_weight, float post_norm_eps, "
                                "Tensor(a!) out");
  define_alike(m, {"norm_concat_linear_quantized_out", "norm_concat_linear_quantized_checks_out"},
               kSourcesSchema + ", Tensor codes, Tensor scales, Tensor? global_scale, int block_rows, "
                                "int block_columns, Tensor? bias, Tensor? post_norm_weight, float post_norm_eps, "
                                "int kernel, bool early_weight, Tensor(a!) out");
  const std::string projection = kSourcesSchema +
                                 ", Tensor weight, Tensor? bias, Tensor? post_norm_weight, float post_norm_eps, "
                                 "bool early_weight, ";
  for (const char* name : {"norm_concat_linear_fused_out(", "norm_concat_linear_split_out("}) {
    m.def((name + projection + "Tensor(a!) out) -> ()").c_str());
  }
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  implement<norm_concat_linear_out<run_nothing>>(m, "norm_concat_linear_checks_out", kCudaDevice);
  implement<norm_concat_linear_quantized_out<run_nothing>>(m, "norm_concat_linear_quantized_checks_out", kCudaDevice);
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  implement<norm_concat_linear_out<run_on_cpu>>(m, "norm_concat_linear_out", kCpuDevice);
  implement<norm_concat_linear_out<run_few_rows_on_cpu>>(m, "norm_concat_linear_few_rows_out", kCpuDevice);
  implement<norm_concat_linear_quantized_out<run_on_cpu>>(m, "norm_concat_linear_quantized_out", kCpuDevice);
  implement<norm_concat_linear_out<run_two_steps_on_cpu>>(m, "norm_concat_linear_two_step_out", kCpuDevice);
}

#if defined(EAGLE_KERNELS_WITH_CUDA)
namespace {

void refuse_many_chunks(const char* op, const NormConcatLinear& record) {
  check(record.source.num_chunks <= cuda::kMaxChunks, op, "chunks", "count on CUDA");
}

void refuse_unsupported(const char* op, const NormConcatLinear& record) {
  refuse_many_chunks(op, record);
  check(record.source.dtype != DType::kFloat32, op, "chunks", "dtype on CUDA");
  check(norm_concat_linear_is_aligned(record), op, "operands", "alignment");
}

template <auto launcher>
void run_one_launch(const char* op, const NormConcatLinear& record, const Output& out) {
  refuse_unsupported(op, record);
  check(record.post_norm_gain.data == nullptr, op, "post_norm_weight", "CUDA");
  if (record.num_rows == 0 || record.num_columns == 0) return;
  cuda::launch(op, launcher, record, out.device_index);
}

// Result rows [begin, begin + num_rows) of 16-bit chunks without an index, or of their rows by index. The record reads
// `chunks`, which have room for its chunks.
NormConcatLinear some_rows(const NormConcatLinear& record, int64_t begin, int64_t num_rows, Chunk* chunks) {
  const auto advanced = [](const void* data, int64_t bytes) {
    return data == nullptr ? data : static_cast<const char*>(data) + bytes;
  };
  std::copy_n(record.source.chunks, record.source.num_chunks, chunks);
  for (int64_t k = 0; k < record.source.num_chunks; ++k) {
    Chunk& chunk = chunks[k];
    if (chunk.index.data != nullptr) {
      chunk.index.data = advanced(chunk.index.data, begin * (chunk.index.are_int64 ? 8 : 4));
      continue;
    }
    chunk.x = advanced(chunk.x, begin * chunk.x_row_stride * 2);
    chunk.residual = advanced(chunk.residual, begin * chunk.residual_row_stride * 2);
    if (chunk.sum_squares != nullptr) chunk.sum_squares += begin * chunk.sum_squares_row_stride;
    chunk.rows = num_rows;
  }
  NormConcatLinear rows = record;
  rows.source.chunks = chunks;
  rows.num_rows = num_rows;
  rows.out = static_cast<char*>(record.out) + begin * record.out_row_stride * 2;
  return rows;
}

// In rounds of at most 512 rows, since a range of columns takes fp32 sums of all of them: 100 MB at K = 3, H = D = 4096
// on 132 SMs, where 16384 rows at once would take 3.2 GB.
void run_split_kernels(const char* op, const NormConcatLinear& record, const Output& out) {
  constexpr int64_t kMaxRows = 512;
  refuse_unsupported(op, record);
  if (record.num_rows == 0 || record.num_columns == 0) return;
  const cuda::CurrentDevice device(op, out.device_index);
  NormConcatLinear rows = record;
  rows.num_rows = std::min(record.num_rows, kMaxRows);
  const SplitRanges ranges = norm_concat_linear_split_ranges(rows, device.get());
  const cuda::Workspace workspace(op, device, ranges.workspace * static_cast<int64_t>(sizeof(float)));
  std::array<Chunk, cuda::kMaxChunks> chunks;
  for (int64_t begin = 0; begin < record.num_rows; begin += kMaxRows) {
    rows = some_rows(record, begin, std::min(record.num_rows - begin, kMaxRows), chunks.data());
    rows.workspace = workspace.data();
    cuda::expect_success(op, norm_concat_linear_split_cuda(rows, ranges, device.get()));
  }
}

void run_codes_on_cuda(const NormConcatLinear& record, const View&, const Output& out) {
  check(norm_concat_linear_reads_codes(record), kQuantizedOp, "block", "CUDA");
  switch (record.kernel) {
    case ProductKernel::kAnyRows:
      return run_split_kernels(kQuantizedOp, record, out);
    case ProductKernel::kFewRows:
      return run_one_launch<norm_concat_linear_fused_cuda>(kQuantizedOp, record, out);
    case ProductKernel::kWgmma:
      return run_one_launch<norm_concat_linear_wgmma_cuda>(kQuantizedOp, record, out);
  }
}

template <auto run_kernels>
void early_out(const SourceArguments& arguments, const View& weight, const OptionalView& bias,
               const OptionalView& post_norm_gain, double post_norm_eps, bool early_weight, const Output& out) {
  const auto run = [&](NormConcatLinear record, const View&, const Output& into) {
    record.early_weight = early_weight;
    run_kernels(kOp, record, into);
  };
  run_checked(run, arguments, weight, bias, post_norm_gain, post_norm_eps, out);
}

template <auto run_kernels>
constexpr auto norm_concat_linear_early_out = with_sources<&early_out<run_kernels>>;

void run_wgmma_kernel(const NormConcatLinear& record, const View&, const Output& out) {
  run_one_launch<norm_concat_linear_wgmma_cuda>(kOp, record, out);
}

// Whether the rows already lie concatenated and need no change, as in a static buffer that capture has written.
bool is_concatenated(const Concat& source) {
  const char* end = static_cast<const char*>(source.chunks[0].x);
  for (int64_t k = 0; k < source.num_chunks; ++k) {
    const Chunk& chunk = source.chunks[k];
    const bool as_it_is = source.norm == Norm::kNone && chunk.residual == nullptr && chunk.index.data == nullptr;
    if (!as_it_is || chunk.x != end || chunk.x_row_stride != source.chunks[0].x_row_stride) return false;
    end += chunk.width * (source.dtype == DType::kFloat32 ? 4 : 2);
  }
  return true;
}

Tensor concat_of(const NormConcatLinear& op, const View& like) {
  const Chunk& first = op.source.chunks[0];
  return matrix(first.x, op.num_rows, op.source.width, first.x_row_stride, like);
}

// Whether torch's product is the result: a bias that it adds is added to the sums before they are rounded.
bool ends_in_product(const NormConcatLinear& op) {
  return op.post_norm_gain.data == nullptr && (op.bias.data == nullptr || op.bias.dtype == op.source.dtype);
}

void multiply_on_cuda(const NormConcatLinear& op, const Tensor& x, const View& weight, const Output& out_view) {
  const Tensor out = matrix_of(out_view), w = transposed(op, weight);
  if (op.bias.data == nullptr) return expect_success(cuda::mm_out(out.get(), x.get(), w.get()));
  const Tensor bias = tensor(op.bias.data, {op.num_columns}, {1}, weight.dtype, weight);
  expect_success(cuda::addmm_out(out.get(), bias.get(), x.get(), w.get()));
}

// The product in fp32, into the op's workspace, then the bias and the post norm.
void multiply_and_end_on_cuda(const NormConcatLinear& op, const Tensor& x, const View& weight,
                              const cuda::CurrentDevice& device) {
  const int64_t stride = epilogue_row_stride(op);
  const Tensor sums = tensor(op.workspace, {op.num_rows, op.num_columns}, {stride, 1}, kTorchFloat, weight);
  const Tensor w = transposed(op, weight);
  expect_success(weight.dtype == kTorchFloat ? cuda::mm_out(sums.get(), x.get(), w.get())
                                             : cuda::mm_dtype_out(sums.get(), x.get(), w.get(), kTorchFloat.code));
  cuda::expect_success(kOp, norm_concat_linear_epilogue_cuda(op, device.get()));
}

// norm_concat and torch's own product, all rows at once: unless indices repeat rows, the normed rows take no more
// memory than the sources.
void run_two_steps_on_cuda(NormConcatLinear op, const View& weight, const Output& out) {
  refuse_many_chunks(kOp, op);
  const int64_t rows = op.num_rows, width = op.source.width;
  if (rows == 0 || op.num_columns == 0) return;
  const bool concatenated = is_concatenated(op.source), ends = ends_in_product(op);
  if (concatenated && ends) return multiply_on_cuda(op, concat_of(op, weight), weight, out);

  const cuda::CurrentDevice device(kOp, weight.device_index);
  const int64_t sums_bytes = ends ? 0 : rows * epilogue_row_stride(op) * static_cast<int64_t>(sizeof(float));
  const int64_t normed_bytes = concatenated ? 0 : rows * width * weight.element_size;
  const int64_t normed_begin = (sums_bytes + 255) / 256 * 256;  // as torch aligns a tensor
  const cuda::Workspace workspace(kOp, device, normed_begin + normed_bytes);
  op.workspace = workspace.data();
  void* normed = static_cast<char*>(workspace.data()) + normed_begin;
  if (!concatenated) cuda::expect_success(kOp, norm_concat_cuda({op.source, rows, normed, width}, device.get()));
  const Tensor x = concatenated ? concat_of(op, weight) : matrix(normed, rows, width, width, weight);
  ends ? multiply_on_cuda(op, x, weight, out) : multiply_and_end_on_cuda(op, x, weight, device);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CUDA, m) {
  constexpr auto run_fused_kernel = run_one_launch<norm_concat_linear_fused_cuda>;
  implement<norm_concat_linear_early_out<run_fused_kernel>>(m, "norm_concat_linear_fused_out", kCudaDevice);
  implement<norm_concat_linear_early_out<run_split_kernels>>(m, "norm_concat_linear_split_out", kCudaDevice);
  implement<norm_concat_linear_out<run_wgmma_kernel>>(m, "norm_concat_linear_wgmma_out", kCudaDevice);
  implement<norm_concat_linear_out<run_two_steps_on_cuda>>(m, "norm_concat_linear_two_step_out", kCudaDevice);
  implement<norm_concat_linear_quantized_out<run_codes_on_cuda>>(m, "norm_concat_linear_quantized_out", kCudaDevice);
}
#endif

}  // namespace eagle_kernels
