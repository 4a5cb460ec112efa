// The compiled primitives torch.ops.eagle_kernels_C.*: schemas, checks, and the split of rows over threads.
//
// They never choose: python/eagle_kernels decides which primitive runs. Everything here is on the libtorch stable ABI
// (target 2.11) and holds no Python, so that one build serves every torch from 2.11 on, CPU or CUDA.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "checks.h"
#include "cpu/kernels.h"

namespace eagle_kernels {
namespace {

using OptionalTensor = std::optional<Tensor>;

std::atomic<cpu::Isa> selected_isa{cpu::Isa::kScalar};

const cpu::Kernels& kernels() { return cpu::kernels(selected_isa.load(std::memory_order_relaxed)); }

// Rows per thread below which a second thread costs more than it saves: at::internal::GRAIN_SIZE elements.
int64_t row_grain(int64_t width) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(width, 1)); }

template <typename Function>
void parallel_over(int64_t count, int64_t grain, const Function& function) {
  if (count > 0) torch::stable::parallel_for(0, count, grain, function);
}

cpu::DType dtype_of(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return cpu::DType::kFloat32;
    case ScalarType::BFloat16:
      return cpu::DType::kBFloat16;
    case ScalarType::Half:
      return cpu::DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                      ", expected Float, BFloat16 or Half");
  }
}

// Dense values of the op's dtype or fp32: a vector, or several packed behind each other.
cpu::Vector dense_of(const char* op, const char* name, const Tensor& tensor, int64_t length, ScalarType dtype) {
  check_dense(op, name, tensor, length);
  if (tensor.scalar_type() != ScalarType::Float) check_dtype(op, name, tensor, dtype);
  return {tensor.const_data_ptr(), dtype_of(op, name, tensor)};
}

cpu::Vector vector_of(const char* op, const char* name, const Tensor& tensor, int64_t length, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.dim() == 1, op, ": ", name, " has shape ", shape_text(tensor), ", expected (", length, ",)");
  return dense_of(op, name, tensor, length, dtype);
}

cpu::Vector vector_of(const char* op, const char* name, const OptionalTensor& tensor, int64_t length,
                      ScalarType dtype) {
  return tensor ? vector_of(op, name, *tensor, length, dtype) : cpu::Vector{};
}

bool is_int64(const char* op, const char* name, const Tensor& ids) {
  const ScalarType dtype = ids.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(dtype), ", expected Int or Long");
  check_dense(op, name, ids, ids.numel());
  return dtype == ScalarType::Long;
}

size_t bytes(int64_t elements, const Tensor& tensor) { return elements * tensor.element_size(); }

const void* offset(const void* data, size_t byte_offset) { return static_cast<const char*>(data) + byte_offset; }

void capture_hidden_out(const Tensor& hidden, const OptionalTensor& residual, Tensor out,
                        const OptionalTensor& sum_squares) {
  constexpr const char* op = "capture_hidden";
  const ScalarType dtype = hidden.scalar_type();
  check_rows(op, "hidden", hidden);
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  check_output(op, "out", out, dtype);
  check_shape(op, "out", out, rows, width);
  check_no_overlap(op, "out", out, "hidden", hidden);

  cpu::CaptureHidden args{};
  args.dtype = dtype_of(op, "hidden", hidden);
  args.width = width;
  args.hidden = hidden.const_data_ptr();
  args.hidden_row_stride = hidden.stride(0);
  args.out = out.mutable_data_ptr();
  args.out_row_stride = out.stride(0);
  if (residual) {
    check_operand(op, "residual", *residual, dtype);
    check_shape(op, "residual", *residual, rows, width);
    check_no_overlap(op, "out", out, "residual", *residual);
    args.residual = residual->const_data_ptr();
    args.residual_row_stride = residual->stride(0);
  }
  if (sum_squares) {
    check_dtype(op, "sum_squares", *sum_squares, ScalarType::Float);
    STD_TORCH_CHECK(sum_squares->is_cpu() && sum_squares->dim() == 1 && sum_squares->size(0) == rows, op,
                    ": sum_squares has shape ", shape_text(*sum_squares), ", expected (", rows, ",)");
    args.sum_squares = static_cast<float*>(sum_squares->mutable_data_ptr());
    args.sum_squares_row_stride = sum_squares->stride(0);
  }
  parallel_over(rows, row_grain(width),
                [&](int64_t begin, int64_t end) { kernels().capture_hidden(args, begin, end); });
}

void add_rms_norm_out(const Tensor& hidden, const Tensor& residual, const Tensor& weight, double eps,
                      double norm_offset, Tensor out, Tensor out_sum) {
  constexpr const char* op = "add_rms_norm";
  const ScalarType dtype = hidden.scalar_type();
  check_rows(op, "hidden", hidden);
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  check_operand(op, "residual", residual, dtype);
  check_shape(op, "residual", residual, rows, width);
  check_output(op, "out", out, dtype);
  check_shape(op, "out", out, rows, width);
  check_output(op, "out_sum", out_sum, dtype);
  check_shape(op, "out_sum", out_sum, rows, width);
  check_no_overlap(op, "out", out, "out_sum", out_sum);
  for (const auto& [name, written] : {std::pair{"out", &out}, std::pair{"out_sum", &out_sum}}) {
    check_no_overlap(op, name, *written, "hidden", hidden);
    check_no_overlap(op, name, *written, "residual", residual);
    check_no_overlap(op, name, *written, "weight", weight);
  }

  cpu::AddRmsNorm args{};
  args.dtype = dtype_of(op, "hidden", hidden);
  args.width = width;
  args.hidden = hidden.const_data_ptr();
  args.hidden_row_stride = hidden.stride(0);
  args.residual = residual.const_data_ptr();
  args.residual_row_stride = residual.stride(0);
  args.gain = vector_of(op, "weight", weight, width, dtype);
  args.eps = static_cast<float>(eps);
  args.norm_offset = static_cast<float>(norm_offset);
  args.normed = out.mutable_data_ptr();
  args.normed_row_stride = out.stride(0);
  args.sum = out_sum.mutable_data_ptr();
  args.sum_row_stride = out_sum.stride(0);
  parallel_over(rows, row_grain(width), [&](int64_t begin, int64_t end) { kernels().add_rms_norm(args, begin, end); });
}

float scalar_value(const char* op, const Tensor& scalar) {
  check_dense(op, "scale", scalar, 1);
  STD_TORCH_CHECK(scalar.dim() == 0, op, ": scale has shape ", shape_text(scalar), ", expected a 0-d tensor");
  const void* data = scalar.const_data_ptr();
  switch (dtype_of(op, "scale", scalar)) {
    case cpu::DType::kFloat32:
      return *static_cast<const float*>(data);
    case cpu::DType::kBFloat16:
      return static_cast<float>(*static_cast<const torch::headeronly::BFloat16*>(data));
    case cpu::DType::kFloat16:
      return static_cast<float>(*static_cast<const torch::headeronly::Half*>(data));
  }
  return 0;
}

void vocab_parallel_embedding_out(const Tensor& ids, const Tensor& weight, int64_t org_begin, int64_t org_end,
                                  int64_t added_begin, int64_t added_end, int64_t added_row,
                                  std::optional<double> scale, const OptionalTensor& scale_tensor, Tensor out) {
  constexpr const char* op = "vocab_parallel_embedding";
  check_rows(op, "weight", weight);
  const int64_t width = weight.size(1), rows = weight.size(0);
  STD_TORCH_CHECK(ids.is_cpu() && ids.dim() == 1, op, ": ids has shape ", shape_text(ids), ", expected (N,) on the CPU");
  check_output(op, "out", out, weight.scalar_type());
  check_shape(op, "out", out, ids.size(0), width);
  check_no_overlap(op, "out", out, "weight", weight);
  check_no_overlap(op, "out", out, "ids", ids);
  STD_TORCH_CHECK(0 <= org_begin && org_begin <= org_end && 0 <= added_begin && added_begin <= added_end, op,
                  ": the shard holds ids [", org_begin, ", ", org_end, ") and [", added_begin, ", ", added_end,
                  "), expected ascending bounds from 0 on");
  STD_TORCH_CHECK(org_end - org_begin <= rows, op, ": the shard holds ", org_end - org_begin,
                  " original ids, expected at most the ", rows, " rows of weight");
  const int64_t added = added_end - added_begin;
  STD_TORCH_CHECK(added == 0 || (added <= rows && 0 <= added_row && added_row <= rows - added), op, ": the shard's ",
                  added, " added ids start at row ", added_row, ", expected all in the ", rows, " rows of weight");

  cpu::VocabParallelEmbedding args{};
  args.dtype = dtype_of(op, "weight", weight);
  args.element_size = static_cast<int64_t>(weight.element_size());
  args.width = width;
  args.ids_are_int64 = is_int64(op, "ids", ids);
  args.ids = ids.const_data_ptr();
  args.weight = weight.const_data_ptr();
  args.weight_row_stride = weight.stride(0);
  args.org_begin = org_begin;
  args.org_end = org_end;
  args.added_begin = added_begin;
  args.added_end = added_end;
  args.added_row = added_row;
  args.has_scale = scale || scale_tensor;
  args.scale = scale_tensor ? scalar_value(op, *scale_tensor) : static_cast<float>(scale.value_or(1.0));
  args.out = out.mutable_data_ptr();
  args.out_row_stride = out.stride(0);
  parallel_over(ids.size(0), row_grain(width),
                [&](int64_t begin, int64_t end) { kernels().vocab_parallel_embedding(args, begin, end); });
}

// The sources of norm_concat and norm_concat_linear, checked and turned into one record per chunk. A packed `chunks`
// (one tensor, num_chunks > 1) is split here by pointer arithmetic; Python slices would cost 1 us each.
class Sources {
 public:
  Sources(const char* op, const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
          const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
          const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
          const OptionalTensor& sum_squares, int64_t num_rows)
      : op_(op), num_chunks_(num_chunks), num_rows_(num_rows) {
    STD_TORCH_CHECK(!chunks.empty() && num_chunks >= 1, op, ": chunks is empty, expected K >= 1 tensors");
    STD_TORCH_CHECK(static_cast<int64_t>(chunks.size()) == num_chunks || chunks.size() == 1, op, ": chunks has ",
                    chunks.size(), " entries, expected 1 or K = ", num_chunks);
    STD_TORCH_CHECK(norm >= 0 && norm <= 2, op, ": norm is ", norm, ", expected 0, 1 or 2");
    dtype_ = chunks[0].scalar_type();
    chunks_.resize(num_chunks);
    add_chunks(chunks, residuals);
    add_indices(indices, static_cast<int64_t>(chunks.size()) != num_chunks);
    STD_TORCH_CHECK(norm != 0 || (gains.empty() && !sum_squares), op, ": norm is 0 (none), expected no norm_weight and ",
                    "no sum_squares");
    add_gains(gains, static_cast<cpu::Norm>(norm));
    add_eps(eps, static_cast<cpu::Norm>(norm));
    if (sum_squares) add_sum_squares(*sum_squares);

    record_.dtype = dtype_of(op, "chunks[0]", chunks[0]);
    record_.norm = static_cast<cpu::Norm>(norm);
    record_.chunks = chunks_.data();
    record_.num_chunks = num_chunks;
    record_.width = width_;
    record_.norm_offset = static_cast<float>(norm_offset);
  }

  cpu::NormConcat record_{};
  ScalarType dtype_;
  int64_t width_ = 0;

 private:
  void add_chunks(const std::vector<Tensor>& chunks, const std::vector<OptionalTensor>& residuals) {
    const bool packed = static_cast<int64_t>(chunks.size()) != num_chunks_;
    STD_TORCH_CHECK(residuals.empty() || residuals.size() == chunks.size(), op_, ": residuals has ", residuals.size(),
                    " entries, expected ", chunks.size());
    for (const Tensor& chunk : chunks) {
      check_operand(op_, "chunks", chunk, dtype_);
      STD_TORCH_CHECK(chunk.size(1) >= 1, op_, ": chunks has shape ", shape_text(chunk), ", expected (T, H) with H >= 1");
    }
    STD_TORCH_CHECK(!packed || chunks[0].size(1) % num_chunks_ == 0, op_, ": chunks has shape ", shape_text(chunks[0]),
                    ", expected a multiple of K = ", num_chunks_, " columns");
    for (int64_t k = 0; k < num_chunks_; ++k) {
      const size_t entry = packed ? 0 : k;
      const Tensor& source = chunks[entry];
      cpu::Chunk& chunk = chunks_[k];
      chunk.rows = source.size(0);
      chunk.width = packed ? source.size(1) / num_chunks_ : source.size(1);
      chunk.column = width_;
      const size_t skipped = packed ? bytes(chunk.column, source) : 0;
      chunk.x = offset(source.const_data_ptr(), skipped);
      chunk.x_row_stride = source.stride(0);
      if (!residuals.empty() && residuals[entry]) {
        const Tensor& residual = *residuals[entry];
        check_operand(op_, "residuals", residual, dtype_);
        check_shape(op_, "residuals", residual, source.size(0), source.size(1));
        chunk.residual = offset(residual.const_data_ptr(), skipped);
        chunk.residual_row_stride = residual.stride(0);
      }
      width_ += chunk.width;
    }
  }

  void add_indices(const std::vector<OptionalTensor>& indices, bool packed) {
    STD_TORCH_CHECK(indices.size() <= 1 || (!packed && static_cast<int64_t>(indices.size()) == num_chunks_), op_,
                    ": indices has ", indices.size(), " entries, expected ", packed ? "0 or 1" : "0, 1 or K = ",
                    packed ? "" : std::to_string(num_chunks_));
    for (int64_t k = 0; k < num_chunks_; ++k) {
      const OptionalTensor* index = indices.empty() ? nullptr : &indices[indices.size() == 1 ? 0 : k];
      if (index != nullptr && *index) {
        chunks_[k].index = {(*index)->const_data_ptr(), is_int64(op_, "indices", **index)};
        STD_TORCH_CHECK((*index)->dim() == 1 && (*index)->size(0) == num_rows_, op_, ": indices has shape ",
                        shape_text(**index), ", expected (", num_rows_, ",)");
      } else {
        STD_TORCH_CHECK(chunks_[k].rows == num_rows_, op_, ": chunks[", k, "] has ", chunks_[k].rows,
                        " rows and no index, expected ", num_rows_);
      }
    }
  }

  // One gain per chunk [H_k], or all packed: [K, H] for chunk norms, [K*H] for the concat norm.
  void add_gains(const std::vector<Tensor>& gains, cpu::Norm norm) {
    if (gains.empty()) return;
    const bool packed = gains.size() == 1;
    STD_TORCH_CHECK(packed || static_cast<int64_t>(gains.size()) == num_chunks_, op_, ": norm_weight has ",
                    gains.size(), " entries, expected 1 or K = ", num_chunks_);
    const bool flat = norm == cpu::Norm::kConcat || num_chunks_ == 1;
    STD_TORCH_CHECK(!packed || (flat && gains[0].dim() == 1) ||
                        (norm == cpu::Norm::kChunk && gains[0].dim() == 2 && gains[0].size(0) == num_chunks_ &&
                         equal_widths()),
                    op_, ": norm_weight has shape ", shape_text(gains[0]), ", expected (K, H) or (K*H,) with K = ",
                    num_chunks_, " and K*H = ", width_);
    for (int64_t k = 0; k < num_chunks_; ++k) {
      cpu::Chunk& chunk = chunks_[k];
      const Tensor& gain = gains[packed ? 0 : k];
      check_dtype(op_, "norm_weight", gain, gains[0].scalar_type());
      chunk.gain = packed ? dense_of(op_, "norm_weight", gain, width_, dtype_)
                          : vector_of(op_, "norm_weight", gain, chunk.width, dtype_);
      if (packed) chunk.gain.data = offset(chunk.gain.data, bytes(chunk.column, gain));
    }
  }

  bool equal_widths() const {
    return std::all_of(chunks_.begin(), chunks_.end(),
                       [&](const cpu::Chunk& chunk) { return chunk.width == chunks_[0].width; });
  }

  void add_eps(const std::vector<double>& eps, cpu::Norm norm) {
    const int64_t most = norm == cpu::Norm::kChunk ? num_chunks_ : 1;
    STD_TORCH_CHECK(eps.size() == 1 || static_cast<int64_t>(eps.size()) == most, op_, ": eps has ", eps.size(),
                    " entries, expected 1 or ", most);
    for (int64_t k = 0; k < num_chunks_; ++k) chunks_[k].eps = static_cast<float>(eps[eps.size() == 1 ? 0 : k]);
  }

  void add_sum_squares(const Tensor& sum_squares) {
    check_operand(op_, "sum_squares", sum_squares, ScalarType::Float);
    for (int64_t k = 0; k < num_chunks_; ++k) {
      check_shape(op_, "sum_squares", sum_squares, chunks_[k].rows, num_chunks_);
      chunks_[k].sum_squares = static_cast<const float*>(sum_squares.const_data_ptr()) + k;
      chunks_[k].sum_squares_row_stride = sum_squares.stride(0);
    }
  }

  const char* op_;
  int64_t num_chunks_;
  int64_t num_rows_;
  std::vector<cpu::Chunk> chunks_;
};

void check_no_overlap_with_sources(const char* op, const Tensor& out, const std::vector<Tensor>& chunks,
                                   const std::vector<OptionalTensor>& residuals) {
  for (const Tensor& chunk : chunks) check_no_overlap(op, "out", out, "chunks", chunk);
  for (const OptionalTensor& residual : residuals) {
    if (residual) check_no_overlap(op, "out", out, "residuals", *residual);
  }
}

void norm_concat_out(const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                     const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                     const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                     const OptionalTensor& sum_squares, Tensor out) {
  constexpr const char* op = "norm_concat";
  check_rows(op, "out", out);
  const int64_t rows = out.size(0);
  Sources sources(op, chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares, rows);
  check_output(op, "out", out, sources.dtype_);
  check_shape(op, "out", out, rows, sources.width_);
  check_no_overlap_with_sources(op, out, chunks, residuals);
  cpu::NormConcat args = sources.record_;
  args.out = out.mutable_data_ptr();
  args.out_row_stride = out.stride(0);
  parallel_over(rows, row_grain(args.width), [&](int64_t begin, int64_t end) { kernels().norm_concat(args, begin, end); });
}

void norm_concat_linear_out(const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                            const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                            const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                            const OptionalTensor& sum_squares, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& post_norm_weight, double post_norm_eps, Tensor out) {
  constexpr const char* op = "norm_concat_linear";
  check_rows(op, "out", out);
  const int64_t rows = out.size(0), columns = out.size(1);
  Sources sources(op, chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares, rows);
  check_output(op, "out", out, sources.dtype_);
  check_operand(op, "weight", weight, sources.dtype_);
  check_shape(op, "weight", weight, columns, sources.width_);
  check_no_overlap_with_sources(op, out, chunks, residuals);
  check_no_overlap(op, "out", out, "weight", weight);
  if (rows == 0 || columns == 0) return;

  cpu::NormConcatLinear args{};
  args.source = sources.record_;
  args.num_rows = rows;
  args.num_columns = columns;
  args.weight = weight.const_data_ptr();
  args.weight_row_stride = weight.stride(0);
  args.bias = vector_of(op, "bias", bias, columns, sources.dtype_);
  args.post_norm_gain = vector_of(op, "post_norm_weight", post_norm_weight, columns, sources.dtype_);
  args.post_norm_eps = static_cast<float>(post_norm_eps);
  args.out = out.mutable_data_ptr();
  args.out_row_stride = out.stride(0);

  const cpu::Kernels& table = kernels();
  const Tensor workspace =
      torch::stable::new_empty(out, {table.norm_concat_linear_workspace(args)}, std::make_optional(ScalarType::Byte));
  args.workspace = workspace.mutable_data_ptr();
  parallel_over(table.norm_concat_linear_row_groups(args), 1,
                [&](int64_t begin, int64_t end) { table.norm_concat_linear_pack(args, begin, end); });
  parallel_over(table.norm_concat_linear_panels(args), 1,
                [&](int64_t begin, int64_t end) { table.norm_concat_linear_project(args, begin, end); });
  if (post_norm_weight) {
    parallel_over(rows, row_grain(columns),
                  [&](int64_t begin, int64_t end) { table.norm_concat_linear_post_norm(args, begin, end); });
  }
}

// Caps the instruction set and returns the one in force: the best the machine has up to the cap. Numbers, not names:
// strings in stable-ABI schemas change hands differently in torch 2.13 and 2.14 (pytorch#190493).
int64_t set_cpu_isa(int64_t cap) {
  const auto isa = std::min(static_cast<cpu::Isa>(cap), cpu::best_isa());
  selected_isa = isa;
  return static_cast<int64_t>(isa);
}

constexpr const char* kSources =
    "(Tensor[] chunks, int num_chunks, int norm, Tensor[] gains, float[] eps, float norm_offset, Tensor?[] residuals, "
    "Tensor?[] indices, Tensor? sum_squares";

}  // namespace

STABLE_TORCH_LIBRARY(eagle_kernels_C, m) {
  m.def("set_cpu_isa(int cap) -> int");
  m.def("capture_hidden_out(Tensor hidden, Tensor? residual, Tensor(a!) out, Tensor(b!)? sum_squares) -> ()");
  m.def(
      "add_rms_norm_out(Tensor hidden, Tensor residual, Tensor weight, float eps, float norm_offset, Tensor(a!) out, "
      "Tensor(b!) out_sum) -> ()");
  m.def(
      "vocab_parallel_embedding_out(Tensor ids, Tensor weight, int org_begin, int org_end, int added_begin, "
      "int added_end, int added_row, float? scale, Tensor? scale_tensor, Tensor(a!) out) -> ()");
  m.def((std::string("norm_concat_out") + kSources + ", Tensor(a!) out) -> ()").c_str());
  m.def((std::string("norm_concat_linear_out") + kSources +
         ", Tensor weight, Tensor? bias, Tensor? post_norm_weight, float post_norm_eps, Tensor(a!) out) -> ()")
            .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CompositeExplicitAutograd, m) {
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  m.impl("capture_hidden_out", TORCH_BOX(&capture_hidden_out));
  m.impl("add_rms_norm_out", TORCH_BOX(&add_rms_norm_out));
  m.impl("vocab_parallel_embedding_out", TORCH_BOX(&vocab_parallel_embedding_out));
  m.impl("norm_concat_out", TORCH_BOX(&norm_concat_out));
  m.impl("norm_concat_linear_out", TORCH_BOX(&norm_concat_linear_out));
}

}  // namespace eagle_kernels
