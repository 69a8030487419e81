// What the attention passes on the CPU are made of: products whose every element is one fma chain
// over an ascending index, tiles of keys and values gathered into scratch, and the cutting of work
// into chunks worth a thread's while. Vectors run over independent elements only, so bits depend
// neither on the vector width nor on how rows are grouped into blocks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "core/sizes.h"
#include "kernels/attention/sizes.h"

namespace cohort::kernels::attention {

#if defined(__AVX512F__)
inline constexpr int64_t kVectorBytes = 64;
inline constexpr int kMaxVectors = 4;  // times kRows accumulators, out of 32 registers
#else
inline constexpr int64_t kVectorBytes = 32;
inline constexpr int kMaxVectors = 2;  // out of 16 registers
#endif
inline constexpr int kRows = 4;      // rows of a product that share loads
inline constexpr int64_t kPad = 16;  // scores are computed in runs of this many keys
inline constexpr double kLog2e = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

template <class T>
inline constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));

// Row length of scratch matrices over the head dim, and over the keys of a tile. The latter is off
// the powers of two, which would put a column into few cache sets.
template <class T>
int64_t padded_dim(int64_t head_dim) {
  return round_up(head_dim, kLanes<T>);
}
inline int64_t score_stride(int64_t head_dim) {
  return attention_tile(head_dim) + kPad;
}

// Four elements in one register.
template <class T>
struct Four {
  typedef T Type __attribute__((vector_size(4 * sizeof(T))));
};

// c[r][x] (+)= sum over t = 0 .. count + extra[r] - 1 of a[r][t a_step] b[t][x], each element one
// fma chain in ascending t. rows: 1 to kRows; width: a multiple of kLanes.
template <class T>
struct ChainProduct {
  int64_t rows, width, count;
  const T* a[kRows];
  int64_t a_step;
  const T* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  Grad out;
  int64_t extra[kRows] = {};

  void set_a(const T* first, int64_t lda) {
    for (int64_t r = 0; r < rows; ++r) a[r] = first + r * lda;
  }
  // Row r takes counts[r] terms.
  void set_counts(const int64_t* counts) {
    count = *std::min_element(counts, counts + rows);
    for (int64_t r = 0; r < rows; ++r) extra[r] = counts[r] - count;
  }
};
template <class T>
void chain_product(const ChainProduct<T>& product);
extern template void chain_product<float>(const ChainProduct<float>&);
extern template void chain_product<double>(const ChainProduct<double>&);

// Keys or values of one head: key j's vector starts at data + slot(j) * stride.
template <class T>
struct KeyRows {
  const T* data;
  int64_t stride;
  const int32_t* blocks = nullptr;  // null: slot(j) = j
  int64_t block_tokens = 1;

  const T* row(int64_t key) const {
    const int64_t slot =
        blocks == nullptr ? key : blocks[key / block_tokens] * block_tokens + key % block_tokens;
    return data + slot * stride;
  }
};

// to[d][j] = element d of key `first + j` for j < count, 0 up to the next multiple of kPad; rows of
// length score_stride(head_dim).
template <class T>
void gather_transposed(T* to, const KeyRows<T>& from, int64_t first, int64_t count,
                       int64_t head_dim);
// to[j][d] likewise, rows padded with zeros to padded_dim.
template <class T>
void gather_rows(T* to, const KeyRows<T>& from, int64_t first, int64_t count, int64_t head_dim);
// One row, padded with zeros to padded_dim.
template <class T>
inline void copy_row(T* to, const T* from, int64_t head_dim) {
  int64_t d = 0;
  for (; d + kLanes<T> <= head_dim; d += kLanes<T>)
    std::memcpy(to + d, from + d, kVectorBytes);  // of a constant size: no call
  if (d == head_dim) return;
  for (int64_t i = 0; i < kLanes<T>; ++i) to[d + i] = d + i < head_dim ? from[d + i] : T{0};
}

// The other way: the head dim's elements only.
template <class T>
inline void store_row(T* to, const T* from, int64_t head_dim) {
  int64_t d = 0;
  for (; d + kLanes<T> <= head_dim; d += kLanes<T>) std::memcpy(to + d, from + d, kVectorBytes);
  for (; d < head_dim; ++d) to[d] = from[d];
}
// s[seen .. end - 1] = value, where end - seen < kPad and end is a multiple of kPad.
template <class T>
inline void fill_tail(T* s, int64_t seen, int64_t end, T value) {
  if (seen == end) return;
  T* const last = s + end - kPad;
  const int64_t keep = seen - (end - kPad);
#pragma omp simd simdlen(kLanes <T>)
  for (int64_t i = 0; i < kPad; ++i) last[i] = i < keep ? last[i] : value;
}

extern template void gather_transposed<float>(float*, const KeyRows<float>&, int64_t, int64_t,
                                              int64_t);
extern template void gather_transposed<double>(double*, const KeyRows<double>&, int64_t, int64_t,
                                               int64_t);
extern template void gather_rows<float>(float*, const KeyRows<float>&, int64_t, int64_t, int64_t);
extern template void gather_rows<double>(double*, const KeyRows<double>&, int64_t, int64_t,
                                         int64_t);

// Dropout of the probabilities of one call; off while p is 0.
struct ProbabilityDropout {
  double p = 0;
  uint64_t seed = 0, stream = 0;
  const int64_t* sequences = nullptr;
  const int32_t* positions = nullptr;

  ProbabilityDropout() = default;
  explicit ProbabilityDropout(const DropoutSpec& spec);
  // factors[j] = keep / (1 - p) for query `token`, keys first .. first + count - 1 (first a
  // multiple of 4); writes up to the next multiple of 4.
  template <class T>
  void fill(T* factors, int64_t token, int64_t head, int64_t first, int64_t count) const;
};
extern template void ProbabilityDropout::fill<float>(float*, int64_t, int64_t, int64_t,
                                                     int64_t) const;
extern template void ProbabilityDropout::fill<double>(double*, int64_t, int64_t, int64_t,
                                                      int64_t) const;

// Throws unless the sequences ascend from 0 to `tokens`.
void check_cu_seqlens(const Tensor& cu_seqlens, int64_t tokens, const char* op);

// Scratch of one chunk of work, handed out in pieces aligned to 64 bytes.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t elements) : memory_(Tensor::empty({elements}, dtype_of<T>)) {}
  static int64_t piece(int64_t elements) { return round_up(elements, 16); }
  T* take(int64_t elements) {
    T* start = memory_.data<T>() + used_;
    used_ += piece(elements);
    COHORT_CHECK(used_ <= memory_.numel(), "[attention] scratch of ", memory_.numel(),
                 " elements is too small");
    return start;
  }

 private:
  Tensor memory_;
  int64_t used_ = 0;
};

// Runs fn(begin, end) over chunks of consecutive items, each of about this many multiply-adds.
inline constexpr int64_t kChunkCost = 400'000;
template <class Item, class F>
void parallel_items(const std::vector<Item>& items, F&& fn) {
  std::vector<int64_t> starts = {0};
  int64_t cost = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    cost += items[i].cost;
    if (cost < kChunkCost && i + 1 < items.size()) continue;
    starts.push_back(static_cast<int64_t>(i) + 1);
    cost = 0;
  }
  parallel_for(static_cast<int64_t>(starts.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c)
      fn(starts[static_cast<size_t>(c)], starts[static_cast<size_t>(c) + 1]);
  });
}

}  // namespace cohort::kernels::attention
