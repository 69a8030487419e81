#include "kernels/attention/cpu/flash_attention.h"

#include "kernels/vector_math.h"

namespace cohort::kernels::attention {
namespace {

// s[j] = value for the masked keys of a tile: those before `first`, and from `last` up to the next
// multiple of kKeyRun. Stores whole vectors, so that later vector loads are forwarded from one
// store.
template <class T>
void fill_masked(T* s, int64_t first, int64_t last, T value) {
  std::fill(s, s + first, value);
  T* const run = s + last / kKeyRun * kKeyRun;
  const int64_t keep = last % kKeyRun;
  if (keep == 0) return;
#pragma omp simd simdlen(kVectorLanes <T>)
  for (int64_t j = 0; j < kKeyRun; ++j) run[j] = j < keep ? run[j] : value;
}

}  // namespace

template <class T>
FlashAttention<T>::FlashAttention(int64_t head_dim, const AttentionDesc& desc)
    : head_dim_(head_dim),
      exponent_scale_(static_cast<T>(softmax_scale(desc, head_dim) * kLog2e)),
      dropout_{desc.dropout},
      keys_(head_dim),
      values_(head_dim, attention_tile(head_dim)),
      scores_(Tensor::empty({kPassRows, score_stride(head_dim)}, dtype_of<T>)),
      factors_(Tensor::empty({score_stride(head_dim)}, dtype_of<T>)) {}

template <class T>
void FlashAttention<T>::run(std::span<const QueryRow<T>> rows, const KeyRows<T>& keys,
                            const KeyRows<T>& values) {
  const size_t count = rows.size();
  RowState states[kQueryRows];
  Combined combined[kQueryRows];
  VisibleKeys all = rows[0].visible;
  for (const QueryRow<T>& row : rows)
    all = {std::min(all.first, row.visible.first), std::max(all.last, row.visible.last)};
  for (int64_t begin = all.first / kAttentionChunk * kAttentionChunk; begin < all.last;
       begin += kAttentionChunk) {
    const VisibleKeys range = {std::max(begin, all.first),
                               std::min(begin + kAttentionChunk, all.last)};
    for (size_t r = 0; r < count; ++r) {
      if (combined[r].any && !chunk_o_.defined())
        chunk_o_ = Tensor::empty({kQueryRows, head_dim_}, dtype_of<T>);
      T* const o =
          combined[r].any ? chunk_o_.data<T>() + static_cast<int64_t>(r) * head_dim_ : rows[r].o;
      states[r] = {o, -std::numeric_limits<T>::infinity(), {}};
      std::fill_n(o, head_dim_, T{0});
    }
    chunk(rows, states, keys, values, range);
    for (size_t r = 0; r < count; ++r)
      if (rows[r].visible.first < range.last && rows[r].visible.last > range.first)
        combine(rows[r], states[r], combined[r]);
  }
  for (size_t r = 0; r < count; ++r) {
    const auto& [any, row_max_log2, l] = combined[r];
    const T inverse = 1 / l;
    for (int64_t d = 0; d < head_dim_; ++d) rows[r].o[d] *= inverse;
    if (rows[r].lse != nullptr)
      *rows[r].lse = std::fma(row_max_log2, static_cast<T>(kLn2), std::log(l));
  }
}

// Processes the tiles of keys [range.first, range.last), which are in one chunk.
template <class T>
void FlashAttention<T>::chunk(std::span<const QueryRow<T>> rows, RowState* states,
                              const KeyRows<T>& keys, const KeyRows<T>& values, VisibleKeys range) {
  const auto tile = attention_tile(head_dim_), count = static_cast<int64_t>(rows.size());
  for (int64_t key0 = range.first / tile * tile; key0 < range.last; key0 += tile) {
    const int64_t n = std::min(tile, range.last - key0);
    keys_.load(n, [&](int64_t j) { return keys.row(key0 + j); });
    values_.load(n, [&](int64_t j) { return values.row(key0 + j); });
    for (int64_t r = 0; r < count; r += kPassRows)
      tile_step(
          rows.subspan(static_cast<size_t>(r), static_cast<size_t>(std::min(kPassRows, count - r))),
          states + r, key0);
  }
}

template <class T>
void FlashAttention<T>::combine(const QueryRow<T>& row, const RowState& chunk,
                                Combined& combined) const {
  const T* const l4 = chunk.partial;
  const T l = (l4[0] + l4[1]) + (l4[2] + l4[3]);
  if (!combined.any) {
    combined = {true, chunk.row_max_log2, l};
    return;
  }
  const T row_max_log2 = std::max(combined.row_max_log2, chunk.row_max_log2);
  const T a = vexp2(combined.row_max_log2 - row_max_log2),
          b = vexp2(chunk.row_max_log2 - row_max_log2);
  combined.row_max_log2 = row_max_log2;
  combined.l = std::fma(l, b, combined.l * a);
  for (int64_t d = 0; d < head_dim_; ++d) row.o[d] = std::fma(chunk.o[d], b, row.o[d] * a);
}

// Processes up to kPassRows rows against the tile in scratch. O accumulates each row's products
// over exactly the keys it sees: a product with a masked key would turn -0 into +0, and an infinite
// value into NaN.
template <class T>
void FlashAttention<T>::tile_step(std::span<const QueryRow<T>> rows, RowState* states,
                                  int64_t key0) {
  MatmulRow<T> scores[kPassRows], values[kPassRows];
  const int64_t stride = factors_.numel();
  T* s = scores_.data<T>();
  for (size_t r = 0; r < rows.size(); ++r, s += stride) {
    const auto [first, last] = rows[r].visible;
    const int64_t begin = std::clamp<int64_t>(first - key0, 0, keys_.count),
                  end = std::clamp<int64_t>(last - key0, 0, keys_.count);
    scores[r] = {rows[r].q, s, 0, head_dim_, begin < end ? round_up(end, kKeyRun) : 0};
    values[r] = {s, states[r].o, begin, end, head_dim_};
  }
  chain_matmul<T>({scores, rows.size()}, 1, keys_.transposed.data(), Grad::kOverwrite);
  for (size_t r = 0; r < rows.size(); ++r) {
    const int64_t begin = values[r].begin, end = values[r].end;
    if (begin == end) continue;
    T* const p = scores[r].c;
    softmax(states[r], p, begin, end);
    if (dropout_.spec.p == 0) continue;
    T* const factors = factors_.data<T>();
    dropout_.fill(factors, rows[r].token, rows[r].head, key0, end);
    for (int64_t j = begin; j < end; ++j) p[j] *= factors[j];
  }
  chain_matmul<T>({values, rows.size()}, 1, values_.rows.data(), Grad::kAccumulate);
}

// S of keys [first, last) of the tile becomes P; m, l and O of the row are updated. With m c
// rounded to row_max_log2, exp2(S c - m c) and alpha refer to the same number, and alpha is exactly
// 1 while m is unchanged.
template <class T>
void FlashAttention<T>::softmax(RowState& state, T* s, int64_t first, int64_t last) const {
  const int64_t end = round_up(last, kKeyRun);
  const T c = exponent_scale_;
  // Masked scores get a visible score: -inf would also work, but its exponential is slow.
  fill_masked(s, first, last, s[first]);
  T largest = s[first];
#pragma omp simd simdlen(kVectorLanes <T>) reduction(max : largest)
  for (int64_t j = 0; j < end; ++j) largest = s[j] > largest ? s[j] : largest;
  if (const T row_max_log2 = largest * c; row_max_log2 > state.row_max_log2) {
    if (std::isfinite(state.row_max_log2)) {  // in the chunk's first tile l and O are 0
      const T alpha = vexp2(state.row_max_log2 - row_max_log2);
      for (T& l : state.partial) l *= alpha;
      for (int64_t d = 0; d < head_dim_; ++d) state.o[d] *= alpha;
    }
    state.row_max_log2 = row_max_log2;
  }
  const T minus = -state.row_max_log2;
#pragma omp simd simdlen(kVectorLanes <T>)
  for (int64_t j = 0; j < end; ++j) s[j] = vexp2(std::fma(s[j], c, minus));
  fill_masked(s, first, last, T{0});
  T partial[4];
  std::copy_n(state.partial, 4, partial);
  for (int64_t j = 0; j < end; j += 8)
    for (int64_t odd = 0; odd < 2; ++odd)
      for (int64_t l = 0; l < 4; ++l) partial[l] += s[j + 2 * l + odd];
  std::copy_n(partial, 4, state.partial);
}

template class FlashAttention<float>;
template class FlashAttention<double>;

}  // namespace cohort::kernels::attention
