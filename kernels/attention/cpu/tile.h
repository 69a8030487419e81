// Building blocks of the attention passes on the CPU: matmuls whose every element is one fma chain
// over an ascending index, and tiles of keys. Vectors run over independent elements only, so bits
// depend neither on the vector width nor on how rows are grouped into blocks.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "core/parallel.h"
#include "core/sizes.h"
#include "kernels/attention/score_rule.h"
#include "kernels/attention/sizes.h"

namespace cohort::kernels::attention {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64, kVectorsPerBlock = 4;  // times 4 rows; 32 registers
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32, kVectorsPerBlock = 2;  // 16 registers
#else
inline constexpr int kVectorBytes = 16, kVectorsPerBlock = 2;
#endif
template <class T>
inline constexpr int kVectorLanes = kVectorBytes / static_cast<int>(sizeof(T));

// Scores are computed for runs of this many keys.
inline constexpr int64_t kKeyRun = 16;
// Row length of a matrix over the keys of a tile, off the powers of two: those would map a column
// to few cache sets.
inline int64_t score_stride(int64_t head_dim) {
  return attention_tile(head_dim) + kKeyRun;
}

// One row of a matmul: c[x] (+)= sum over t = begin .. end - 1 of a[t step] b[t][x], x < width.
template <class T>
struct MatmulRow {
  const T* a;
  T* c;
  int64_t begin, end, width;
};
// Every element is one fma chain in ascending t. The rows share b: one pointer per t.
template <class T>
void chain_matmul(std::span<const MatmulRow<T>> rows, int64_t step, const T* const* b, Grad out);

// Rows of one head, copied to be contiguous: their original stride is often a power of two, which
// would map them to few cache sets.
template <class T>
struct RowTile {
  RowTile(int64_t head_dim, int64_t capacity)
      : memory(Tensor::empty({capacity, head_dim}, dtype_of<T>)),
        rows(static_cast<size_t>(capacity)) {
    for (int64_t r = 0; r < capacity; ++r)
      rows[static_cast<size_t>(r)] = memory.data<T>() + r * head_dim;
  }
  // row(r): start of row r, for r < n.
  template <class Row>
  void load(int64_t n, Row&& row) {
    count = n;
    const int64_t head_dim = memory.dim(1);
    T* to = memory.data<T>();
    for (int64_t r = 0; r < n; ++r, to += head_dim) {
      const T* const from = row(r);
#pragma omp simd simdlen(kVectorLanes <T>)
      for (int64_t d = 0; d < head_dim; ++d) to[d] = from[d];
    }
  }
  Tensor memory;
  std::vector<const T*> rows;
  int64_t count = 0;
};

// Tile of keys or values with its transpose.
template <class T>
struct KeyTile : RowTile<T> {
  explicit KeyTile(int64_t head_dim);
  // Columns of the transpose from n up to the next multiple of kKeyRun are set to zero.
  template <class Row>
  void load(int64_t n, Row&& row) {
    RowTile<T>::load(n, row);
    transpose();
  }
  void transpose();
  Tensor transposed_memory;          // [head_dim, score_stride]
  std::vector<const T*> transposed;  // its rows
};

// Throws unless the sequences ascend from 0 to `tokens`, and are what AttentionDesc expects.
void check_sequences(const Tensor& cu_seqlens, const AttentionDesc& desc, int64_t tokens,
                     const char* op);

// Runs fn(begin, end) over consecutive items, in chunks large enough for a thread. `cost`: total
// multiply-adds of all items.
template <class F>
void parallel_items(size_t items, int64_t cost, F&& fn) {
  constexpr int64_t kChunkCost = 400'000;
  const auto count = static_cast<int64_t>(items);
  const int64_t chunks = std::clamp<int64_t>(cost / kChunkCost, 1, std::max<int64_t>(count, 1));
  parallel_for(count, ceil_div(count, chunks), fn);
}

}  // namespace cohort::kernels::attention
