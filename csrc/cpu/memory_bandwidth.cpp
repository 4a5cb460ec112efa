// The bandwidth of memory: every byte loaded once, or loaded and stored once, and nothing else done.
//
// No one access pattern is the fastest everywhere. The weight of a projection is read as 6 or 16 rows at once
// (project_dot.h, project_amx.h), which the prefetchers of some machines follow better than a single run: there the op
// reads faster than one sequential loop. The number of runs, their length and the distance of the software prefetch are
// therefore arguments: `eagle-kernels bench` tries several and keeps the fastest.
#include "../memory_bandwidth.h"

#include <type_traits>

#include "simd.h"

namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA {
namespace {

typedef uint64_t Words __attribute__((vector_size(4 * kLanes)));

constexpr int64_t kVectorsPerLine = kCacheLine / static_cast<int64_t>(sizeof(Words));

// Cache lines in flight in a step: 8 sums hide the latency of an addition, and leave room for the loads themselves.
constexpr int kLinesPerStep = 8;

// What is prefetched from further away than this goes to L2: it would be gone from L1 before it is read.
constexpr int64_t kFarBytes = 4096;

template <int kStreams>
constexpr int kLines = kStreams < kLinesPerStep ? kLinesPerStep / kStreams : 1;

inline uint64_t sum_words(const char* data, int64_t bytes) {
  uint64_t sum = 0;
  for (; bytes > 0; data += sizeof sum, bytes -= sizeof sum) {
    uint64_t word = 0;
    __builtin_memcpy(&word, data, bytes < static_cast<int64_t>(sizeof word) ? bytes : sizeof word);
    sum += word;
  }
  return sum;
}

// Calls f(sum, offset) for each line of a piece, kLines of every run in turn. What is `ahead_bytes` past the end of a
// run is prefetched from the beginning of the same run of the next piece, which is read next.
template <int kStreams, class F>
inline void walk(const char* piece, StreamPattern pattern, F f) {
  constexpr int64_t kStep = kLines<kStreams> * kCacheLine;
  const int64_t run = pattern.run_bytes;
  for (int64_t i = 0; i < run; i += kStep) {
    if (pattern.ahead_bytes > 0) {
      const bool within = i + pattern.ahead_bytes < run;
      const char* ahead = piece + i + pattern.ahead_bytes + (within ? 0 : pattern.piece_bytes() - run);
#pragma GCC unroll 16
      for (int stream = 0; stream < kStreams; ++stream) {
#pragma GCC unroll 8
        for (int line = 0; line < kLines<kStreams>; ++line) {
          const char* fetched = ahead + stream * run + line * kCacheLine;
          if (pattern.ahead_bytes > kFarBytes) {
            __builtin_prefetch(fetched, 0, 2);
          } else {
            __builtin_prefetch(fetched, 0, 3);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int stream = 0; stream < kStreams; ++stream) {
#pragma GCC unroll 8
      for (int line = 0; line < kLines<kStreams>; ++line) {
        f(stream * kLines<kStreams> + line, stream * run + i + line * kCacheLine);
      }
    }
  }
}

template <int kStreams>
uint64_t read_piece(const char* piece, StreamPattern pattern) {
  constexpr int kSums = kStreams * kLines<kStreams>;
  Words sums[kSums] = {};
  walk<kStreams>(piece, pattern, [&](int sum, int64_t offset) {
#pragma GCC unroll 4
    for (int64_t vector = 0; vector < kVectorsPerLine; ++vector) {
      sums[sum] += load_lanes<Words>(piece + offset + vector * sizeof(Words), Whole{});
    }
  });
  for (int sum = 1; sum < kSums; ++sum) sums[0] += sums[sum];
  uint64_t total = 0;
  for (int64_t lane = 0; lane < kLanes / 2; ++lane) total += sums[0][lane];
  return total;
}

inline void put(char* out, Words words, Cached) { store_lanes(out, words, Whole{}); }
inline void put(char* out, Words words, Streamed) { stream_lanes(out, (Float)words); }

template <int kStreams, bool kAdds, class Store>
void copy_piece(const char* piece, const char* other, char* out, StreamPattern pattern, Store how) {
  walk<kStreams>(piece, pattern, [&](int, int64_t offset) {
#pragma GCC unroll 4
    for (int64_t vector = 0; vector < kVectorsPerLine; ++vector) {
      const int64_t at = offset + vector * sizeof(Words);
      Words words = load_lanes<Words>(piece + at, Whole{});
      if constexpr (kAdds) words += load_lanes<Words>(other + at, Whole{});
      put(out + at, words, how);
    }
  });
}

// The end of the data, where no whole piece is left.
inline void copy_rest(const char* source, const char* other, char* out, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const int64_t left = bytes - at, size = left < static_cast<int64_t>(sizeof(uint64_t)) ? left : sizeof(uint64_t);
    uint64_t word = 0, addend = 0;
    __builtin_memcpy(&word, source + at, size);
    if (other != nullptr) __builtin_memcpy(&addend, other + at, size);
    word += addend;
    __builtin_memcpy(out + at, &word, size);
  }
}

// Calls f(the number of streams as a constant).
template <class F>
inline auto with_streams(int64_t streams, F f) {
  switch (streams) {
    case 16: return f(std::integral_constant<int, 16>{});
    case 8: return f(std::integral_constant<int, 8>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 2: return f(std::integral_constant<int, 2>{});
    default: return f(std::integral_constant<int, 1>{});
  }
}

}  // namespace
}  // namespace eagle_kernels::cpu::EAGLE_KERNELS_ISA

namespace eagle_kernels {

using namespace cpu::EAGLE_KERNELS_ISA;

template <>
void read_stream_cpu<kIsa>(const ReadStream& stream, int64_t piece_begin, int64_t piece_end) {
  const int64_t piece_bytes = stream.pattern.piece_bytes();
  with_streams(stream.pattern.streams, [&](auto streams) {
    for (int64_t piece = piece_begin; piece < piece_end; ++piece) {
      const char* data = stream.data + piece * piece_bytes;
      const int64_t left = stream.bytes - piece * piece_bytes;
      stream.sums[piece] = left < piece_bytes ? sum_words(data, left) : read_piece<streams>(data, stream.pattern);
    }
  });
}

template <>
void copy_stream_cpu<kIsa>(const CopyStream& stream, int64_t piece_begin, int64_t piece_end) {
  const int64_t piece_bytes = stream.pattern.piece_bytes();
  with_streams(stream.pattern.streams, [&](auto streams) {
    with_store(stream.out, stream.bytes, [&](auto how) {
      for (int64_t piece = piece_begin; piece < piece_end; ++piece) {
        const int64_t at = piece * piece_bytes, left = stream.bytes - at;
        const char *source = stream.source + at, *other = stream.other == nullptr ? nullptr : stream.other + at;
        if (left < piece_bytes) {
          copy_rest(source, other, stream.out + at, left);
        } else if (other == nullptr) {
          copy_piece<streams, false>(source, other, stream.out + at, stream.pattern, how);
        } else {
          copy_piece<streams, true>(source, other, stream.out + at, stream.pattern, how);
        }
      }
    });
  });
  finish_streaming();
}

}  // namespace eagle_kernels
