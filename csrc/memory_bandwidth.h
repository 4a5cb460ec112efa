// The streaming loops that measure the bandwidth of memory: their records, and their kernels by instruction set.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace eagle_kernels {

// How memory is read: in pieces of `streams` runs that follow each other, `run_bytes` each. A step reads 8 / streams
// cache lines of every run, and prefetches those `ahead_bytes` further on. run_bytes and ahead_bytes are multiples of
// 512.
struct StreamPattern {
  int64_t streams;
  int64_t run_bytes;
  int64_t ahead_bytes;

  [[gnu::always_inline]] int64_t piece_bytes() const { return streams * run_bytes; }
};

// sums[piece] = the piece's 64-bit words added modulo 2^64; the last word of the data is filled up with zero bytes.
struct ReadStream {
  const char* data;
  int64_t bytes;
  StreamPattern pattern;
  uint64_t* sums;
};

// out = source, or source + other in 64-bit words modulo 2^64: two reads for a write, as many ops have.
struct CopyStream {
  const char* source;
  const char* other;  // or null
  int64_t bytes;
  StreamPattern pattern;
  char* out;
};

template <cpu::Isa isa>
void read_stream_cpu(const ReadStream&, int64_t piece_begin, int64_t piece_end);

template <cpu::Isa isa>
void copy_stream_cpu(const CopyStream&, int64_t piece_begin, int64_t piece_end);

}  // namespace eagle_kernels
