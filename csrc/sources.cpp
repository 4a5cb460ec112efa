#include "sources.h"

#include <algorithm>
#include <limits>

namespace eagle_kernels {
namespace {

// Max width of a concat: the CUDA kernels count columns in int, up to 4095 past the end in their last stages.
constexpr int64_t kMaxWidth = std::numeric_limits<int32_t>::max() - 4095;

const View& first_of(const char* op, const std::vector<View>& chunks) {
  check(!chunks.empty(), op, "chunks", "count");
  return chunks[0];
}

int64_t size_of(const auto& list) { return static_cast<int64_t>(list.size()); }

}  // namespace

Sources::Sources(const char* op, const SourceArguments& arguments, const View& out)
    : first(first_of(op, arguments.chunks)), op_(op), arguments_(arguments), out_(out) {
  const int64_t num_chunks = arguments.num_chunks;
  check(num_chunks >= 1 && (size_of(arguments.chunks) == num_chunks || size_of(arguments.chunks) == 1), op,
        "num_chunks", "value");
  check(arguments.norm >= 0 && arguments.norm <= 2, op, "norm", "value");
  concat.norm = static_cast<Norm>(arguments.norm);
  check(concat.norm != Norm::kNone || arguments.gains.empty(), op, "norm_weight", "norm");
  check(concat.norm != Norm::kNone || !arguments.sum_squares, op, "sum_squares", "norm");
  check_floating(op, "chunks", first);
  check_output(op, "out", out, first);
  concat.dtype = first.type();
  concat.num_chunks = num_chunks;
  check_finite(op, "norm_offset", arguments.norm_offset);
  concat.norm_offset = static_cast<float>(arguments.norm_offset);
  packed_ = size_of(arguments.chunks) != num_chunks;

  add_chunks();
  if (arguments.residuals) add_residuals(*arguments.residuals);
  add_indices();
  if (!arguments.gains.empty()) add_gains();
  add_eps();
  if (arguments.sum_squares) add_sum_squares();
  concat.chunks = chunks_;
}

bool Sources::is_packed(const View& chunks) const {
  return chunks.dim == 2 && chunks.size(1) <= kMaxWidth && chunks.size(1) >= concat.num_chunks &&
         chunks.size(1) % concat.num_chunks == 0;
}

void Sources::add_chunks() {
  // Before K records are allocated, since K may be any number.
  if (packed_) check(is_packed(first), op_, "chunks", "columns");
  if (concat.num_chunks <= size_of(few_chunks_)) {
    chunks_ = few_chunks_.data();
  } else {
    many_chunks_.resize(static_cast<size_t>(concat.num_chunks));
    chunks_ = many_chunks_.data();
  }
  Chunk* chunk = chunks_;
  for (const View& source : arguments_.chunks) {
    check_operand(op_, "chunks", source, first);
    check(source.size(1) >= 1 && source.size(1) <= kMaxWidth - concat.width, op_, "chunks", "width");
    check_no_overlap(op_, "out", out_, source);
    const int64_t parts = packed_ ? concat.num_chunks : 1;
    for (int64_t part = 0; part < parts; ++part, ++chunk) {
      chunk->width = source.size(1) / parts;
      chunk->column = concat.width;
      chunk->rows = source.size(0);
      chunk->x = source.at(part * chunk->width);
      chunk->x_row_stride = source.stride(0);
      concat.width += chunk->width;
    }
  }
}

void Sources::add_residuals(const std::vector<OptionalView>& residuals) {
  check(residuals.size() == arguments_.chunks.size(), op_, "residuals", "count");
  for (int64_t k = 0; k < concat.num_chunks; ++k) {
    if (packed_ && k > 0) {
      chunks_[k].residual_row_stride = chunks_[0].residual_row_stride;
      if (chunks_[0].residual != nullptr) {
        const int64_t element_size = first.element_size;
        chunks_[k].residual = static_cast<const char*>(chunks_[0].residual) + chunks_[k].column * element_size;
      }
      continue;
    }
    if (!residuals[k]) continue;
    const View& residual = *residuals[k];
    check_operand(op_, "residuals", residual, first);
    check_shape(op_, "residuals", residual, chunks_[k].rows, packed_ ? concat.width : chunks_[k].width);
    check_no_overlap(op_, "out", out_, residual);
    chunks_[k].residual = residual.data;
    chunks_[k].residual_row_stride = residual.stride(0);
  }
}

// One index for all chunks, or one each; the chunks of a packed tensor share one.
void Sources::add_indices() {
  const int64_t rows = out_.size(0);
  static const std::vector<OptionalView> kNone;
  const std::vector<OptionalView>& indices = arguments_.indices ? *arguments_.indices : kNone;
  check(size_of(indices) <= 1 || (size_of(indices) == concat.num_chunks && !packed_), op_, "indices", "count");
  bool has_index = false;
  Integers index;
  for (int64_t k = 0; k < concat.num_chunks; ++k) {
    if (k < size_of(indices)) {
      has_index = indices[k].has_value();
      index = has_index ? index_of(*indices[k]) : Integers{};
    }
    check(has_index || chunks_[k].rows == rows, op_, "chunks", "rows");
    chunks_[k].index = index;
  }
}

Integers Sources::index_of(const View& index) const {
  check_device(op_, "indices", index, first);
  check_integer(op_, "indices", index);
  check(index.dim == 1 && index.size(0) == out_.size(0), op_, "indices", "shape");
  check(index.is_dense(), op_, "indices", "strides");
  check_no_overlap(op_, "out", out_, index);
  return index.integers();
}

// One gain per chunk [H_k], or all packed: [K, H] for chunk norms, [K*H] for the concat norm.
void Sources::add_gains() {
  const std::vector<View>& gains = arguments_.gains;
  check(gains.size() == 1 || size_of(gains) == concat.num_chunks, op_, "norm_weight", "count");
  const View& first_gain = gains[0];
  if (gains.size() == 1) {
    check_dense(op_, "norm_weight", first_gain, concat.width, first);
    check(is_packed_gain(first_gain), op_, "norm_weight", "dimensions");
    check_no_overlap(op_, "out", out_, first_gain);
    for (int64_t k = 0; k < concat.num_chunks; ++k) {
      chunks_[k].gain = {first_gain.at(chunks_[k].column), first_gain.type()};
    }
    return;
  }
  for (int64_t k = 0; k < concat.num_chunks; ++k) {
    const View& gain = gains[k];
    check_vector(op_, "norm_weight", gain, chunks_[k].width, first);
    check_dtype(op_, "norm_weight", gain, first_gain.dtype);
    check_no_overlap(op_, "out", out_, gain);
    chunks_[k].gain = {gain.data, gain.type()};
  }
}

bool Sources::is_packed_gain(const View& gain) const {
  const bool one_width = std::all_of(chunks_, chunks_ + concat.num_chunks,
                                     [&](const Chunk& chunk) { return chunk.width == chunks_[0].width; });
  const bool flat = gain.dim == 1 && (concat.norm == Norm::kConcat || concat.num_chunks == 1);
  const bool by_chunk =
      gain.dim == 2 && gain.size(0) == concat.num_chunks && concat.norm == Norm::kChunk && one_width;
  return flat || by_chunk;
}

void Sources::add_eps() {
  const std::vector<double>& eps = arguments_.eps;
  const int64_t max = concat.norm == Norm::kChunk ? concat.num_chunks : 1;
  check(eps.size() == 1 || size_of(eps) == max, op_, "eps", "count");
  for (const double value : eps) check_eps(op_, "eps", value);
  for (int64_t k = 0; k < concat.num_chunks; ++k) chunks_[k].eps = static_cast<float>(eps[eps.size() == 1 ? 0 : k]);
}

// Row sums of squares of every chunk [T, K], by row of the chunk.
void Sources::add_sum_squares() {
  const View& sum_squares = *arguments_.sum_squares;
  check_device(op_, "sum_squares", sum_squares, first);
  check_dtype(op_, "sum_squares", sum_squares, kTorchFloat);
  check_rows(op_, "sum_squares", sum_squares);
  check_no_overlap(op_, "out", out_, sum_squares);
  for (int64_t k = 0; k < concat.num_chunks; ++k) {
    check_shape(op_, "sum_squares", sum_squares, chunks_[k].rows, concat.num_chunks);
    chunks_[k].sum_squares = static_cast<const float*>(sum_squares.at(k));
    chunks_[k].sum_squares_row_stride = sum_squares.stride(0);
  }
}

}  // namespace eagle_kernels
