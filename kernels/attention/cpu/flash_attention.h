// Core of training forward, prefill and decode: up to kQueryRows query rows against the keys they
// see, in the canonical order of attention.h. A row is a (token, head) pair; the rows of a call
// have only the key head in common.
#pragma once

#include <limits>

#include "kernels/attention/cpu/tile.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::attention {

inline constexpr int64_t kQueryRows = 128;

template <class T>
struct QueryRow {
  const T* q;
  T* o;
  T* lse;                       // null: not stored
  IndexRange<int64_t> visible;  // the keys that it sees, less those of invisible tiles
  int64_t token, position, head;
  int sequence;
  T scale = 1;  // multiplies its scores in int8 attention
};

// Keys or values of one head: row j starts at data + slot(j) * stride.
template <class T>
struct KeyRows {
  const T* data;
  int64_t stride;
  const int32_t* blocks = nullptr;  // the sequence's block table row; null: packed
  int64_t block_tokens = 1;
  PackedSequence packed = {};
  const float* scales = nullptr;  // int8 attention: those of packed tokens
  int64_t scale_stride = 0;

  const T* row(int64_t key) const {
    const int64_t slot = blocks == nullptr
                             ? packed.token(key)
                             : blocks[key / block_tokens] * block_tokens + key % block_tokens;
    return data + slot * stride;
  }
};

// s[j] = value for the masked keys of a tile: those before `first`, and from `last` up to the next
// multiple of kKeyRun. Stores whole vectors, so that later vector loads are forwarded from one
// store.
template <class T>
inline void fill_masked(T* s, int64_t first, int64_t last, T value) {
  std::fill(s, s + first, value);
  T* const run = s + last / kKeyRun * kKeyRun;
  const int64_t keep = last % kKeyRun;
  if (keep == 0) return;
#pragma omp simd simdlen(kVectorLanes <T>)
  for (int64_t j = 0; j < kKeyRun; ++j) run[j] = j < keep ? run[j] : value;
}

// Owns scratch memory of the size of a tile; reusable for any number of calls with this rule, a
// DropoutRule, and head dim. With is_fp8, P is rounded as FP8 attention does.
template <class Rule>
class FlashAttention {
 public:
  using T = typename Rule::Value;
  FlashAttention(int64_t head_dim, const Rule& rule, bool is_fp8)
      : head_dim_(head_dim),
        is_fp8_(is_fp8),
        rule_(rule),
        keys_(head_dim),
        values_(head_dim, attention_tile(head_dim)),
        scores_(Tensor::empty({kPassRows, score_stride(head_dim)}, dtype_of<T>)),
        factors_(Tensor::empty({score_stride(head_dim)}, dtype_of<T>)) {}
  // Writes o and lse of each row, for at most kQueryRows rows.
  void run(std::span<const QueryRow<T>> rows, const KeyRows<T>& keys, const KeyRows<T>& values) {
    const size_t count = rows.size();
    RowState states[kQueryRows];
    Combined combined[kQueryRows];
    IndexRange<int64_t> all = rows[0].visible;
    for (const QueryRow<T>& row : rows)
      all = {std::min(all.first, row.visible.first), std::max(all.end, row.visible.end)};
    for (int64_t begin = all.first / kAttentionChunk * kAttentionChunk; begin < all.end;
         begin += kAttentionChunk) {
      const IndexRange<int64_t> range = {std::max(begin, all.first),
                                         std::min(begin + kAttentionChunk, all.end)};
      for (size_t r = 0; r < count; ++r) {
        if (combined[r].any && !chunk_o_.defined())
          chunk_o_ = Tensor::empty({kQueryRows, head_dim_}, dtype_of<T>);
        T* const o = combined[r].any
                         ? chunk_o_.template data<T>() + static_cast<int64_t>(r) * head_dim_
                         : rows[r].o;
        states[r] = {o, -std::numeric_limits<T>::infinity(), {}, false};
        std::fill_n(o, head_dim_, T{0});
      }
      chunk(rows, states, keys, values, range);
      for (size_t r = 0; r < count; ++r)
        if (states[r].any_key) combine(rows[r], states[r], combined[r]);
    }
    for (size_t r = 0; r < count; ++r) finish(rows[r], combined[r]);
  }

 private:
  static constexpr int64_t kPassRows = 16;  // rows per pass over a tile in the L1 cache
  struct RowState {
    T* o;            // chunk output: the row's o in its first chunk, scratch in later ones
    T row_max_log2;  // m c, subtracted from exponents
    T partial[4];    // partial sums of l, by (key mod 8) / 2
    bool any_key;
  };
  // State of the chunks combined so far, whose O is in the row's o.
  struct Combined {
    bool any = false;
    T row_max_log2 = -std::numeric_limits<T>::infinity(), l = 0;
  };
  // Divides O by l, which includes the sink.
  void finish(const QueryRow<T>& row, const Combined& combined) const {
    T factor = combined.any ? 1 / combined.l : 0, row_max_log2 = combined.row_max_log2,
      l = combined.l;
    if (const T sink = rule_.sink_log2(static_cast<int>(row.head));
        sink > -std::numeric_limits<T>::infinity()) {
      row_max_log2 = std::max(combined.row_max_log2, sink);
      const T a = vexp2(combined.row_max_log2 - row_max_log2);
      l = std::fma(l, a, vexp2(sink - row_max_log2));
      factor = a * (1 / l);
    }
    for (int64_t d = 0; d < head_dim_; ++d) row.o[d] *= factor;
    if (row.lse != nullptr) *row.lse = std::fma(row_max_log2, static_cast<T>(kLn2), std::log(l));
  }
  // Processes the tiles of keys [range.first, range.end), which are in one chunk.
  void chunk(std::span<const QueryRow<T>> rows, RowState* states, const KeyRows<T>& keys,
             const KeyRows<T>& values, const IndexRange<int64_t>& range) {
    const auto tile = attention_tile(head_dim_), count = static_cast<int64_t>(rows.size());
    for (int64_t key0 = range.first / tile * tile; key0 < range.end; key0 += tile) {
      const auto sees = [&](const QueryRow<T>& row) { return sees_tile(row, key0); };
      if (std::none_of(rows.begin(), rows.end(), sees)) continue;
      const int64_t n = std::min(tile, range.end - key0);
      keys_.load(n, [&](int64_t j) { return keys.row(key0 + j); });
      values_.load(n, [&](int64_t j) { return values.row(key0 + j); });
      for (int64_t r = 0; r < count; r += kPassRows)
        tile_step(rows.subspan(static_cast<size_t>(r),
                               static_cast<size_t>(std::min(kPassRows, count - r))),
                  states + r, keys, key0);
    }
  }

  void combine(const QueryRow<T>& row, const RowState& chunk, Combined& combined) const {
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

  bool sees_tile(const QueryRow<T>& row, int64_t key0) const {
    return rule_.sees_tile(static_cast<int>(row.position), static_cast<int>(key0));
  }
  // Processes up to kPassRows rows against the tile in scratch. O accumulates each row's products
  // over exactly the keys it sees: a product with a masked key would turn -0 into +0, and an
  // infinite value into NaN.
  void tile_step(std::span<const QueryRow<T>> rows, RowState* states, const KeyRows<T>& keys,
                 int64_t key0) {
    MatmulRow<T> scores[kPassRows], values[kPassRows];
    const int64_t stride = factors_.numel();
    T* s = scores_.template data<T>();
    for (size_t r = 0; r < rows.size(); ++r, s += stride) {
      const auto [first, last] = rows[r].visible;
      const int64_t begin = std::clamp<int64_t>(first - key0, 0, keys_.count),
                    end = sees_tile(rows[r], key0)
                              ? std::clamp<int64_t>(last - key0, begin, keys_.count)
                              : begin;
      scores[r] = {rows[r].q, s, 0, head_dim_, begin < end ? round_up(end, kKeyRun) : 0};
      values[r] = {s, states[r].o, begin, end, head_dim_};
    }
    chain_matmul<T>({scores, rows.size()}, 1, keys_.transposed.data(), Grad::kOverwrite);
    for (size_t r = 0; r < rows.size(); ++r) {
      const int64_t begin = values[r].begin, end = values[r].end;
      if (begin == end) continue;
      T* const p = scores[r].c;
      states[r].any_key = true;
      for (int64_t j = 0; keys.scales != nullptr && j < end; ++j)
        p[j] *= static_cast<T>(keys.scales[keys.packed.token(key0 + j) * keys.scale_stride]);
      const int distance = static_cast<int>(key0 - rows[r].position);
      rule_.bind(rows[r].sequence, static_cast<int>(rows[r].head), Rule::kAllKeys)
          .modify([&](auto&& stage) {
            for (int64_t j = 0; j < end; ++j)
              p[j] = stage(p[j], KeyDistance<T>(distance + static_cast<int>(j)));
          });
      softmax(states[r], p, {begin, end}, rule_.exponent * rows[r].scale);
      if (!rule_.drops()) continue;
      T* const factors = factors_.template data<T>();
      rule_.fill_factors(factors, rows[r].token, rows[r].head, key0, end);
      for (int64_t j = begin; j < end; ++j) p[j] *= factors[j];
    }
    chain_matmul<T>({values, rows.size()}, 1, values_.rows.data(), Grad::kAccumulate);
  }

  // S of these keys of the tile becomes P; m, l and O of the row are updated. With m c rounded to
  // row_max_log2, exp2(S c - m c) and alpha refer to the same number, and alpha is exactly 1 while
  // m is unchanged.
  void softmax(RowState& state, T* s, const IndexRange<int64_t>& keys, T c) const {
    const auto [first, last] = keys;
    const int64_t end = round_up(last, kKeyRun);
    // Masked scores get a visible score: -inf would also work, but its exponential is slow.
    fill_masked(s, first, last, s[first]);
    T largest = s[first];
#pragma omp simd simdlen(kVectorLanes <T>) reduction(max : largest)
    for (int64_t j = 0; j < end; ++j) largest = s[j] > largest ? s[j] : largest;
    if (const T row_max_log2 = is_fp8_ ? std::fma(largest, c, T{-8}) : largest * c;
        row_max_log2 > state.row_max_log2) {
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
    if (is_fp8_)
      for (int64_t j = first; j < last; ++j)
        s[j] = static_cast<T>(static_cast<float>(e4m3(static_cast<float>(s[j]))));
  }

  const int64_t head_dim_;
  const bool is_fp8_;
  const Rule rule_;
  KeyTile<T> keys_;
  RowTile<T> values_;
  Tensor chunk_o_;  // [kQueryRows, head_dim]; allocated at the second chunk
  Tensor scores_;   // [kPassRows, score_stride]
  Tensor factors_;  // [score_stride]
};

}  // namespace cohort::kernels::attention
