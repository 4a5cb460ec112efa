// The sources of norm_concat and norm_concat_linear: from tensors to the record of the concat.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "concat.h"

namespace eagle_kernels {

// Absent where no chunk has one: to pass an empty list takes 0.3 us of a call's 4.
using OptionalViews = std::optional<std::vector<OptionalView>>;

// The arguments that both ops begin with, as their schemas name them and as their primitives get them.
inline const std::string kSourcesSchema =
    "Tensor[] chunks, int num_chunks, int norm, Tensor[] gains, float[] eps, float norm_offset, "
    "Tensor?[]? residuals, Tensor?[]? indices, Tensor? sum_squares";

struct SourceArguments {
  const std::vector<View>& chunks;
  int64_t num_chunks;
  int64_t norm;
  const std::vector<View>& gains;
  const std::vector<double>& eps;
  double norm_offset;
  const OptionalViews& residuals;
  const OptionalViews& indices;
  const OptionalView& sum_squares;
};

// with_sources<function> is the primitive that passes these arguments and all others on: function(SourceArguments,
// others...).
template <auto function>
struct WithSources;

template <class... Others, void (*function)(const SourceArguments&, Others...)>
struct WithSources<function> {
  static void call(const std::vector<View>& chunks, int64_t num_chunks, int64_t norm, const std::vector<View>& gains,
                   const std::vector<double>& eps, double norm_offset, const OptionalViews& residuals,
                   const OptionalViews& indices, const OptionalView& sum_squares, Others... others) {
    function({chunks, num_chunks, norm, gains, eps, norm_offset, residuals, indices, sum_squares}, others...);
  }
};

template <auto function>
inline constexpr auto with_sources = &WithSources<function>::call;

// Checks the arguments, against `out` as well, and fills the record. A packed `chunks` (one tensor, num_chunks > 1) is
// split by pointer arithmetic: slices in Python would cost 1 us each.
class Sources {
 public:
  Sources(const char* op, const SourceArguments& arguments, const View& out);
  Sources(const Sources&) = delete;  // concat points into it

  Concat concat{};
  View first;  // chunk 0, whose dtype and device all chunks have

 private:
  bool is_packed(const View& chunks) const;
  void add_chunks();
  void add_residuals(const std::vector<OptionalView>& residuals);
  void add_indices();
  Integers index_of(const View& index) const;
  void add_gains();
  bool is_packed_gain(const View& gain) const;
  void add_eps();
  void add_sum_squares();

  const char* op_;
  const SourceArguments& arguments_;
  const View& out_;
  bool packed_;
  Chunk* chunks_;
  std::array<Chunk, cuda::kMaxChunks> few_chunks_;  // up to this many chunks need no allocation
  std::vector<Chunk> many_chunks_;
};

}  // namespace eagle_kernels
