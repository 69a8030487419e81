#include "kernels/attention/cpu/tile.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include <cstring>

namespace cohort::kernels::attention {
namespace {

constexpr int kBlockRows = 4;  // rows that share loads of b

template <class T, int kBytes>
struct Vector {
  typedef T Type __attribute__((vector_size(kBytes), aligned(sizeof(T)), may_alias));
};
// a b + c, rounded once.
template <class T, int kBytes, class V>
inline V fused(T a, V b, V c) {
  [[maybe_unused]] constexpr bool kSingle = sizeof(T) == 4;
#if defined(__AVX512F__)
  if constexpr (kBytes == 64 && kSingle) return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c);
  if constexpr (kBytes == 64 && !kSingle) return _mm512_fmadd_pd(_mm512_set1_pd(a), b, c);
#endif
#if defined(__FMA__)
  if constexpr (kBytes == 32 && kSingle) return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c);
  if constexpr (kBytes == 32 && !kSingle) return _mm256_fmadd_pd(_mm256_set1_pd(a), b, c);
  if constexpr (kBytes == 16 && kSingle) return _mm_fmadd_ps(_mm_set1_ps(a), b, c);
  if constexpr (kBytes == 16 && !kSingle) return _mm_fmadd_pd(_mm_set1_pd(a), b, c);
#endif
  for (size_t i = 0; i < kBytes / sizeof(T); ++i) c[i] = std::fma(a, b[i], c[i]);
  return c;
}

// kRows rows by kVectors vectors from column x on, with accumulators in registers. The ranges of
// the rows overlap in [begin, end); what precedes and follows is accumulated row by row.
template <class T, int kRows, int kVectors, int kBytes = kVectorBytes>
void matmul_block(const MatmulRow<T>* rows, int64_t step, const T* const* b, int64_t x, Grad out) {
  using V = typename Vector<T, kBytes>::Type;
  V acc[kRows][kVectors] = {};
  int64_t begin = rows[0].begin, end = rows[0].end;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    begin = std::max(begin, rows[r].begin);
    end = std::min(end, rows[r].end);
    if (out == Grad::kAccumulate)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = reinterpret_cast<const V*>(rows[r].c + x)[v];
  }
  end = std::max(begin, end);
  const auto add = [&](int r, int64_t t) __attribute__((always_inline)) {
    const T a = rows[r].a[t * step];
    const V* const row = reinterpret_cast<const V*>(b[t] + x);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[r][v] = fused<T, kBytes>(a, row[v], acc[r][v]);
  };
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
    for (int64_t t = rows[r].begin; t < std::min(begin, rows[r].end); ++t) add(r, t);
  for (int64_t t = begin; t < end; ++t)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) add(r, t);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    for (int64_t t = end; t < rows[r].end; ++t) add(r, t);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) reinterpret_cast<V*>(rows[r].c + x)[v] = acc[r][v];
  }
}

// kRows rows, columns [x, end), at most kVectorsPerBlock vectors.
template <class T, int kRows>
void matmul_columns(const MatmulRow<T>* rows, int64_t step, const T* const* b, int64_t x,
                    int64_t end, Grad out) {
  constexpr int kBlock = kVectorsPerBlock * kVectorLanes<T>;
  if (end - x >= kBlock) return matmul_block<T, kRows, kVectorsPerBlock>(rows, step, b, x, out);
  for (; end - x >= 2 * kVectorLanes<T>; x += 2 * kVectorLanes<T>)
    matmul_block<T, kRows, 2>(rows, step, b, x, out);
  for (; end - x >= kVectorLanes<T>; x += kVectorLanes<T>)
    matmul_block<T, kRows, 1>(rows, step, b, x, out);
  constexpr int kFew = 16 / sizeof(T);  // head dims that are not multiples of a vector
  for (; end - x >= kFew; x += kFew) matmul_block<T, kRows, 1, 16>(rows, step, b, x, out);
  for (; x < end; ++x)
    for (int r = 0; r < kRows; ++r) {
      T acc = out == Grad::kAccumulate ? rows[r].c[x] : T{0};
      for (int64_t t = rows[r].begin; t < rows[r].end; ++t)
        acc = std::fma(rows[r].a[t * step], b[t][x], acc);
      rows[r].c[x] = acc;
    }
}

// to[d][j] = rows[j][d] for four rows and four d; `ld` is to's row length.
template <class T>
void transpose_four_by_four(T* to, int64_t ld, const T* const* rows, int64_t d) {
  typedef T V __attribute__((vector_size(4 * sizeof(T))));
  V r[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&r[i], rows[i] + d, sizeof(V));
  const V low01 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
  const V high01 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const V low23 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const V high23 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  const V columns[4] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5),
                        __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
                        __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
                        __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + (d + i) * ld, &columns[i], sizeof(V));
}

}  // namespace

// Loops over columns outermost, so that b's block of columns stays in the L1 cache.
template <class T>
void chain_matmul(std::span<const MatmulRow<T>> rows, int64_t step, const T* const* b, Grad out) {
  int64_t widest = 0;
  for (const MatmulRow<T>& row : rows) widest = std::max(widest, row.width);
  for (int64_t x = 0; x < widest; x += kVectorsPerBlock * kVectorLanes<T>)
    for (size_t r = 0; r < rows.size();) {
      const MatmulRow<T>* const first = &rows[r];
      if (rows.size() - r < kBlockRows) {
        matmul_columns<T, 1>(first, step, b, x, first->width, out);
        r += 1;
      } else {
        int64_t width = 0;
        for (int i = 0; i < kBlockRows; ++i) width = std::max(width, first[i].width);
        matmul_columns<T, kBlockRows>(first, step, b, x, width, out);
        r += kBlockRows;
      }
    }
}

template <class T>
KeyTile<T>::KeyTile(int64_t head_dim)
    : RowTile<T>(head_dim, attention_tile(head_dim)),
      transposed_memory(Tensor::empty({head_dim, score_stride(head_dim)}, dtype_of<T>)) {
  for (int64_t d = 0; d < head_dim; ++d)
    transposed.push_back(transposed_memory.data<T>() + d * score_stride(head_dim));
}

template <class T>
void KeyTile<T>::transpose() {
  T* const to = transposed_memory.data<T>();
  const T* const* const rows = this->rows.data();
  const int64_t count = this->count, end = round_up(count, kKeyRun);
  const int64_t head_dim = transposed_memory.dim(0), ld = transposed_memory.dim(1);
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    int64_t d = 0;
    for (; d + 4 <= head_dim; d += 4) transpose_four_by_four(to + j, ld, rows + j, d);
    for (; d < head_dim; ++d)
      for (int64_t i = 0; i < 4; ++i) to[d * ld + j + i] = rows[j + i][d];
  }
  for (int64_t d = 0; d < head_dim; ++d)
    for (int64_t i = j; i < end; ++i) to[d * ld + i] = i < count ? rows[i][d] : T{0};
}

void check_sequences(const Tensor& cu_seqlens, const AttentionDesc& desc, int64_t tokens,
                     const char* op) {
  const PackedSequences sequences(cu_seqlens, desc);
  const int32_t* const cu = sequences.cu;
  COHORT_CHECK(cu[0] == 0 && cu[sequences.count] == tokens, "[", op,
               "] expected cu_seqlens from 0 to ", tokens, ", got ", cu[0], " to ",
               cu[sequences.count]);
  int64_t parent = -1;  // the last sequence without a prefix
  for (int64_t s = 0; s < sequences.count; ++s) {
    COHORT_CHECK(cu[s] <= cu[s + 1], "[", op, "] expected ascending cu_seqlens, got ", cu[s],
                 " before ", cu[s + 1], " at sequence ", s);
    const PackedSequence sequence = sequences[s];
    if (sequence.prefix == 0) {
      parent = s;
      continue;
    }
    COHORT_CHECK(parent >= 0 && sequence.prefix_begin == cu[parent] &&
                     sequence.prefix == cu[parent + 1] - cu[parent],
                 "[", op, "] expected the prefix of sequence ", s,
                 " to be the last sequence before it without a prefix, got ", sequence.prefix,
                 " tokens from ", sequence.prefix_begin, " on");
  }
}

template void chain_matmul<float>(std::span<const MatmulRow<float>>, int64_t, const float* const*,
                                  Grad);
template void chain_matmul<double>(std::span<const MatmulRow<double>>, int64_t,
                                   const double* const*, Grad);
template struct KeyTile<float>;
template struct KeyTile<double>;

}  // namespace cohort::kernels::attention
