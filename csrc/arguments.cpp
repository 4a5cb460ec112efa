#include "arguments.h"

#include <algorithm>
#include <utility>

namespace eagle_kernels {
namespace {

DType dtype_of(const char* op, const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                      ", expected Float, BFloat16 or Half");
  }
}

// Dense values of the op's dtype or fp32: a vector, or several packed behind each other.
Vector dense_of(const char* op, const char* name, const Tensor& tensor, int64_t length, const Tensor& like) {
  check_dense(op, name, tensor, length, like);
  if (tensor.scalar_type() != ScalarType::Float) check_dtype(op, name, tensor, like.scalar_type());
  return {tensor.const_data_ptr(), dtype_of(op, name, tensor)};
}

Vector vector_of(const char* op, const char* name, const Tensor& tensor, int64_t length, const Tensor& like) {
  STD_TORCH_CHECK(tensor.dim() == 1, op, ": ", name, " has shape ", shape_text(tensor), ", expected (", length, ",)");
  return dense_of(op, name, tensor, length, like);
}

Vector vector_of(const char* op, const char* name, const OptionalTensor& tensor, int64_t length, const Tensor& like) {
  return tensor ? vector_of(op, name, *tensor, length, like) : Vector{};
}

bool is_int64(const char* op, const char* name, const Tensor& ids) {
  const ScalarType dtype = ids.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op, ": ", name, " has dtype ",
                  torch::headeronly::toString(dtype), ", expected Int or Long");
  return dtype == ScalarType::Long;
}

const void* offset(const Tensor& tensor, int64_t elements) {
  return static_cast<const char*>(tensor.const_data_ptr()) + elements * static_cast<int64_t>(tensor.element_size());
}

const Tensor& first_of(const char* op, const std::vector<Tensor>& chunks) {
  STD_TORCH_CHECK(!chunks.empty(), op, ": chunks is empty, expected K >= 1 tensors");
  return chunks[0];
}

}  // namespace

CaptureHidden capture_hidden_record(const Tensor& hidden, const OptionalTensor& residual, const Tensor& out,
                                    const OptionalTensor& sum_squares) {
  constexpr const char* op = "capture_hidden";
  check_rows(op, "hidden", hidden);
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  check_output(op, "out", out, hidden);
  check_shape(op, "out", out, rows, width);
  check_no_overlap(op, "out", out, "hidden", hidden);

  CaptureHidden record{};
  record.dtype = dtype_of(op, "hidden", hidden);
  record.width = width;
  record.hidden = hidden.const_data_ptr();
  record.hidden_row_stride = hidden.stride(0);
  record.out = out.mutable_data_ptr();
  record.out_row_stride = out.stride(0);
  if (residual) {
    check_operand(op, "residual", *residual, hidden);
    check_shape(op, "residual", *residual, rows, width);
    check_no_overlap(op, "out", out, "residual", *residual);
    record.residual = residual->const_data_ptr();
    record.residual_row_stride = residual->stride(0);
  }
  if (sum_squares) {
    check_device(op, "sum_squares", *sum_squares, hidden);
    check_dtype(op, "sum_squares", *sum_squares, ScalarType::Float);
    STD_TORCH_CHECK(sum_squares->dim() == 1 && sum_squares->size(0) == rows, op, ": sum_squares has shape ",
                    shape_text(*sum_squares), ", expected (", rows, ",)");
    record.sum_squares = static_cast<float*>(sum_squares->mutable_data_ptr());
    record.sum_squares_row_stride = sum_squares->stride(0);
  }
  return record;
}

AddRmsNorm add_rms_norm_record(const Tensor& hidden, const Tensor& residual, const Tensor& weight, double eps,
                               double norm_offset, const Tensor& out, const Tensor& out_sum) {
  constexpr const char* op = "add_rms_norm";
  check_rows(op, "hidden", hidden);
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  check_operand(op, "residual", residual, hidden);
  check_shape(op, "residual", residual, rows, width);
  for (const auto& [name, written] : {std::pair{"out", &out}, std::pair{"out_sum", &out_sum}}) {
    check_output(op, name, *written, hidden);
    check_shape(op, name, *written, rows, width);
    check_no_overlap(op, name, *written, "hidden", hidden);
    check_no_overlap(op, name, *written, "residual", residual);
    check_no_overlap(op, name, *written, "weight", weight);
  }
  check_no_overlap(op, "out", out, "out_sum", out_sum);

  AddRmsNorm record{};
  record.dtype = dtype_of(op, "hidden", hidden);
  record.width = width;
  record.hidden = hidden.const_data_ptr();
  record.hidden_row_stride = hidden.stride(0);
  record.residual = residual.const_data_ptr();
  record.residual_row_stride = residual.stride(0);
  record.gain = vector_of(op, "weight", weight, width, hidden);
  record.eps = static_cast<float>(eps);
  record.norm_offset = static_cast<float>(norm_offset);
  record.normed = out.mutable_data_ptr();
  record.normed_row_stride = out.stride(0);
  record.sum = out_sum.mutable_data_ptr();
  record.sum_row_stride = out_sum.stride(0);
  return record;
}

VocabParallelEmbedding vocab_parallel_embedding_record(const Tensor& ids, const Tensor& weight, int64_t org_begin,
                                                       int64_t org_end, int64_t added_begin, int64_t added_end,
                                                       int64_t added_row, std::optional<double> scale,
                                                       const OptionalTensor& scale_tensor, const Tensor& out) {
  constexpr const char* op = "vocab_parallel_embedding";
  check_rows(op, "weight", weight);
  const int64_t width = weight.size(1), rows = weight.size(0);
  check_device(op, "ids", ids, weight);
  STD_TORCH_CHECK(ids.dim() == 1, op, ": ids has shape ", shape_text(ids), ", expected (N,)");
  check_output(op, "out", out, weight);
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

  VocabParallelEmbedding record{};
  record.dtype = dtype_of(op, "weight", weight);
  record.element_size = static_cast<int64_t>(weight.element_size());
  record.width = width;
  record.ids_are_int64 = is_int64(op, "ids", ids);
  record.ids = ids.const_data_ptr();
  record.ids_stride = ids.stride(0);
  record.weight = weight.const_data_ptr();
  record.weight_row_stride = weight.stride(0);
  record.org_begin = org_begin;
  record.org_end = org_end;
  record.added_begin = added_begin;
  record.added_end = added_end;
  record.added_row = added_row;
  record.has_scale = scale || scale_tensor;
  record.scale = static_cast<float>(scale.value_or(1.0));
  if (scale_tensor) {
    STD_TORCH_CHECK(scale_tensor->dim() == 0, op, ": scale has shape ", shape_text(*scale_tensor),
                    ", expected a 0-d tensor");
    check_dense(op, "scale", *scale_tensor, 1, weight);
    record.scale_tensor = {scale_tensor->const_data_ptr(), dtype_of(op, "scale", *scale_tensor)};
  }
  record.out = out.mutable_data_ptr();
  record.out_row_stride = out.stride(0);
  return record;
}

Sources::Sources(const char* op, const std::vector<Tensor>& chunks, int64_t num_chunks, int64_t norm,
                 const std::vector<Tensor>& gains, const std::vector<double>& eps, double norm_offset,
                 const std::vector<OptionalTensor>& residuals, const std::vector<OptionalTensor>& indices,
                 const OptionalTensor& sum_squares, int64_t num_rows)
    : op_(op),
      tensors_(chunks),
      residuals_(residuals),
      first_(first_of(op, chunks)),
      num_chunks_(num_chunks),
      num_rows_(num_rows) {
  STD_TORCH_CHECK(num_chunks >= 1 && (static_cast<int64_t>(chunks.size()) == num_chunks || chunks.size() == 1), op,
                  ": chunks has ", chunks.size(), " entries, expected 1 or K = ", num_chunks);
  STD_TORCH_CHECK(norm >= 0 && norm <= 2, op, ": norm is ", norm, ", expected 0, 1 or 2");
  record.norm = static_cast<Norm>(norm);
  record.dtype = dtype_of(op, "chunks[0]", first_);
  STD_TORCH_CHECK(norm != 0 || (gains.empty() && !sum_squares), op,
                  ": norm is 0 (none), expected neither norm_weight nor sum_squares");
  chunks_.resize(num_chunks);
  add_chunks();
  add_indices(indices);
  add_gains(gains);
  add_eps(eps);
  if (sum_squares) add_sum_squares(*sum_squares);
  record.chunks = chunks_.data();
  record.num_chunks = num_chunks;
  record.norm_offset = static_cast<float>(norm_offset);
}

void Sources::add_chunks() {
  const bool packed = is_packed();
  STD_TORCH_CHECK(residuals_.empty() || residuals_.size() == tensors_.size(), op_, ": residuals has ",
                  residuals_.size(), " entries, expected ", tensors_.size());
  for (const Tensor& chunk : tensors_) {
    check_operand(op_, "chunks", chunk, first_);
    STD_TORCH_CHECK(chunk.size(1) >= 1, op_, ": chunks has shape ", shape_text(chunk), ", expected (T, H) with H >= 1");
  }
  STD_TORCH_CHECK(!packed || first_.size(1) % num_chunks_ == 0, op_, ": chunks has shape ", shape_text(first_),
                  ", expected a multiple of K = ", num_chunks_, " columns");
  for (int64_t k = 0; k < num_chunks_; ++k) {
    const size_t entry = packed ? 0 : k;
    const Tensor& source = tensors_[entry];
    Chunk& chunk = chunks_[k];
    chunk.rows = source.size(0);
    chunk.width = packed ? source.size(1) / num_chunks_ : source.size(1);
    chunk.column = record.width;
    const int64_t skipped = packed ? chunk.column : 0;
    chunk.x = offset(source, skipped);
    chunk.x_row_stride = source.stride(0);
    if (!residuals_.empty() && residuals_[entry]) {
      const Tensor& residual = *residuals_[entry];
      check_operand(op_, "residuals", residual, first_);
      check_shape(op_, "residuals", residual, source.size(0), source.size(1));
      chunk.residual = offset(residual, skipped);
      chunk.residual_row_stride = residual.stride(0);
    }
    record.width += chunk.width;
  }
}

void Sources::add_indices(const std::vector<OptionalTensor>& indices) {
  const int64_t most = is_packed() ? 1 : num_chunks_;
  STD_TORCH_CHECK(indices.size() <= 1 || static_cast<int64_t>(indices.size()) == most, op_, ": indices has ",
                  indices.size(), " entries, expected at most ", most);
  for (int64_t k = 0; k < num_chunks_; ++k) {
    const OptionalTensor* index = indices.empty() ? nullptr : &indices[indices.size() == 1 ? 0 : k];
    if (index != nullptr && *index) {
      STD_TORCH_CHECK((*index)->dim() == 1, op_, ": indices has shape ", shape_text(**index), ", expected (N,)");
      check_dense(op_, "indices", **index, num_rows_, first_);
      chunks_[k].index = {(*index)->const_data_ptr(), is_int64(op_, "indices", **index)};
    } else {
      STD_TORCH_CHECK(chunks_[k].rows == num_rows_, op_, ": chunks[", k, "] has ", chunks_[k].rows,
                      " rows and no index, expected ", num_rows_);
    }
  }
}

// One gain per chunk [H_k], or all packed: [K, H] for chunk norms, [K*H] for the concat norm.
void Sources::add_gains(const std::vector<Tensor>& gains) {
  if (gains.empty()) return;
  const bool packed = gains.size() == 1;
  STD_TORCH_CHECK(packed || static_cast<int64_t>(gains.size()) == num_chunks_, op_, ": norm_weight has ", gains.size(),
                  " entries, expected 1 or K = ", num_chunks_);
  if (packed) check_packed_gain(gains[0]);
  for (int64_t k = 0; k < num_chunks_; ++k) {
    Chunk& chunk = chunks_[k];
    const Tensor& gain = gains[packed ? 0 : k];
    check_dtype(op_, "norm_weight", gain, gains[0].scalar_type());
    if (packed) {
      chunk.gain = dense_of(op_, "norm_weight", gain, record.width, first_);
      chunk.gain.data = offset(gain, chunk.column);
    } else {
      chunk.gain = vector_of(op_, "norm_weight", gain, chunk.width, first_);
    }
  }
}

void Sources::check_packed_gain(const Tensor& gain) const {
  const bool one_width = std::all_of(chunks_.begin(), chunks_.end(),
                                     [&](const Chunk& chunk) { return chunk.width == chunks_[0].width; });
  const bool flat = gain.dim() == 1 && (record.norm == Norm::kConcat || num_chunks_ == 1);
  const bool by_chunk = gain.dim() == 2 && gain.size(0) == num_chunks_ && record.norm == Norm::kChunk && one_width;
  STD_TORCH_CHECK(flat || by_chunk, op_, ": norm_weight has shape ", shape_text(gain),
                  ", expected (K, H) or (K*H,) with K = ", num_chunks_, " and K*H = ", record.width);
}

void Sources::add_eps(const std::vector<double>& eps) {
  const int64_t most = record.norm == Norm::kChunk ? num_chunks_ : 1;
  STD_TORCH_CHECK(eps.size() == 1 || static_cast<int64_t>(eps.size()) == most, op_, ": eps has ", eps.size(),
                  " entries, expected 1 or ", most);
  for (int64_t k = 0; k < num_chunks_; ++k) chunks_[k].eps = static_cast<float>(eps[eps.size() == 1 ? 0 : k]);
}

void Sources::add_sum_squares(const Tensor& sum_squares) {
  check_device(op_, "sum_squares", sum_squares, first_);
  check_rows(op_, "sum_squares", sum_squares);
  check_dtype(op_, "sum_squares", sum_squares, ScalarType::Float);
  for (int64_t k = 0; k < num_chunks_; ++k) {
    check_shape(op_, "sum_squares", sum_squares, chunks_[k].rows, num_chunks_);
    chunks_[k].sum_squares = static_cast<const float*>(sum_squares.const_data_ptr()) + k;
    chunks_[k].sum_squares_row_stride = sum_squares.stride(0);
  }
}

void Sources::check_no_overlap_with(const Tensor& out) const {
  for (const Tensor& chunk : tensors_) check_no_overlap(op_, "out", out, "chunks", chunk);
  for (const OptionalTensor& residual : residuals_) {
    if (residual) check_no_overlap(op_, "out", out, "residuals", *residual);
  }
}

NormConcat norm_concat_record(const Sources& sources, const Tensor& first_chunk, const Tensor& out) {
  constexpr const char* op = "norm_concat";
  check_output(op, "out", out, first_chunk);
  check_shape(op, "out", out, out.size(0), sources.record.width);
  sources.check_no_overlap_with(out);
  NormConcat record = sources.record;
  record.out = out.mutable_data_ptr();
  record.out_row_stride = out.stride(0);
  return record;
}

NormConcatLinear norm_concat_linear_record(const Sources& sources, const Tensor& first_chunk, const Tensor& weight,
                                           const OptionalTensor& bias, const OptionalTensor& post_norm_weight,
                                           double post_norm_eps, const Tensor& out) {
  constexpr const char* op = "norm_concat_linear";
  check_output(op, "out", out, first_chunk);
  const int64_t columns = out.size(1);
  check_operand(op, "weight", weight, first_chunk);
  check_shape(op, "weight", weight, columns, sources.record.width);
  sources.check_no_overlap_with(out);
  check_no_overlap(op, "out", out, "weight", weight);

  NormConcatLinear record{};
  record.source = sources.record;
  record.num_rows = out.size(0);
  record.num_columns = columns;
  record.weight = weight.const_data_ptr();
  record.weight_row_stride = weight.stride(0);
  record.bias = vector_of(op, "bias", bias, columns, first_chunk);
  record.post_norm_gain = vector_of(op, "post_norm_weight", post_norm_weight, columns, first_chunk);
  record.post_norm_eps = static_cast<float>(post_norm_eps);
  record.out = out.mutable_data_ptr();
  record.out_row_stride = out.stride(0);
  return record;
}

}  // namespace eagle_kernels
