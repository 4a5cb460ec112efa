// read_stream, copy_stream and add_stream: the bandwidth that ops are compared with, measured by `eagle-kernels bench`
// beside them.
//
//   read_stream(data, streams, run_bytes, ahead_bytes, sums)   sums[piece] = the words of a piece added up, mod 2^64
//   copy_stream(source, streams, run_bytes, ahead_bytes, out)  out = source, around the caches as the memory ops do
//   add_stream(a, b, streams, run_bytes, ahead_bytes, out)     out = a + b in 64-bit words, likewise: two reads a write
//
// A torch reduction is not an upper bound: max over int32 reads 25 GB/s where norm_concat_linear streams its weight at
// 30. These use the best instruction set of the machine, whatever EAGLE_KERNELS_CPU_ISA says: they measure the memory.
#include "memory_bandwidth.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"

namespace eagle_kernels {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kStep = 8 * kLine;  // max bytes that a step reads of one run
constexpr int64_t kMaxRunBytes = int64_t{1} << 40;  // so that the bytes of all runs are an int64

constexpr cpu::PerIsa kRead([](auto isa) { return &read_stream_cpu<isa>; });
constexpr cpu::PerIsa kCopy([](auto isa) { return &copy_stream_cpu<isa>; });

StreamPattern checked_pattern(const char* op, int64_t streams, int64_t run_bytes, int64_t ahead_bytes) {
  const bool known = streams == 1 || streams == 2 || streams == 4 || streams == 6 || streams == 8 || streams == 16;
  check(known, op, "streams", "value");
  const bool fits = run_bytes > 0 && run_bytes <= kMaxRunBytes && run_bytes % kStep == 0;
  check(fits, op, "run_bytes", "value");
  check(ahead_bytes >= 0 && ahead_bytes <= run_bytes && ahead_bytes % kStep == 0, op, "ahead_bytes", "value");
  return {streams, run_bytes, ahead_bytes};
}

int64_t num_pieces(int64_t bytes, const StreamPattern& pattern) {
  return (bytes + pattern.piece_bytes() - 1) / pattern.piece_bytes();
}

template <class Record>
void run(const cpu::PerIsa<void (*)(const Record&, int64_t, int64_t)>& kernels, const Record& record) {
  const int64_t pieces = num_pieces(record.bytes, record.pattern);
  if (pieces == 0) return;
  const auto kernel = kernels.of(cpu::best_isa());
  cpu::fork_and_join(pieces, 1, [&](int64_t begin, int64_t end) { kernel(record, begin, end); });
}

void read_stream(const Tensor& data_tensor, int64_t streams, int64_t run_bytes, int64_t ahead_bytes,
                 const Tensor& sums_tensor) {
  constexpr const char* op = "read_stream";
  const StreamPattern pattern = checked_pattern(op, streams, run_bytes, ahead_bytes);
  const View data(data_tensor), sums(sums_tensor);
  check(data.is_dense(), op, "data", "strides");
  const int64_t bytes = data.numel() * data.element_size;
  check_dtype(op, "sums", sums, kTorchLong);
  check(sums.numel() == num_pieces(bytes, pattern), op, "sums", "shape");
  check(sums.is_dense(), op, "sums", "strides");
  check_no_overlap(op, "sums", sums, data);
  run(kRead, ReadStream{static_cast<const char*>(data.data), bytes, pattern,
                        static_cast<uint64_t*>(sums_tensor.mutable_data_ptr())});
}

void check_like(const char* op, const char* name, const View& view, const View& source) {
  check_dtype(op, name, view, source.dtype);
  check(view.numel() == source.numel(), op, name, "shape");
  check(view.is_dense(), op, name, "strides");
}

void run_copy(const char* op, const View& source, const std::optional<View>& other, const StreamPattern& pattern,
              const Tensor& out_tensor) {
  const View out(out_tensor);
  check(source.is_dense(), op, "source", "strides");
  check_like(op, "out", out, source);
  check_no_overlap(op, "out", out, source);
  if (other) {
    check_like(op, "b", *other, source);
    check_no_overlap(op, "out", out, *other);
  }
  run(kCopy, CopyStream{static_cast<const char*>(source.data),
                        other ? static_cast<const char*>(other->data) : nullptr,
                        source.numel() * source.element_size, pattern,
                        static_cast<char*>(out_tensor.mutable_data_ptr())});
}

void copy_stream(const Tensor& source, int64_t streams, int64_t run_bytes, int64_t ahead_bytes, const Tensor& out) {
  constexpr const char* op = "copy_stream";
  run_copy(op, View(source), std::nullopt, checked_pattern(op, streams, run_bytes, ahead_bytes), out);
}

void add_stream(const Tensor& a, const Tensor& b, int64_t streams, int64_t run_bytes, int64_t ahead_bytes,
                const Tensor& out) {
  constexpr const char* op = "add_stream";
  run_copy(op, View(a), View(b), checked_pattern(op, streams, run_bytes, ahead_bytes), out);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kernels_C, m) {
  m.def("read_stream(Tensor data, int streams, int run_bytes, int ahead_bytes, Tensor(a!) sums) -> ()");
  m.def("add_stream(Tensor a, Tensor b, int streams, int run_bytes, int ahead_bytes, Tensor(a!) out) -> ()");
  m.def("copy_stream(Tensor source, int streams, int run_bytes, int ahead_bytes, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kernels_C, CPU, m) {
  m.impl("read_stream", TORCH_BOX(&read_stream));
  m.impl("add_stream", TORCH_BOX(&add_stream));
  m.impl("copy_stream", TORCH_BOX(&copy_stream));
}

}  // namespace eagle_kernels
