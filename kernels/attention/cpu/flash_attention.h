// Core of training forward, prefill and decode: up to kQueryRows query rows against the keys they
// see, in the canonical order of attention.h. A row is a (token, head) pair; the rows of a call
// have only the key head in common.
#pragma once

#include "kernels/attention/cpu/tile.h"

namespace cohort::kernels::attention {

inline constexpr int64_t kQueryRows = 128;

template <class T>
struct QueryRow {
  const T* q;
  T* o;
  T* lse;               // null: not stored
  VisibleKeys visible;  // at least one key
  int64_t token, head;
};

// Keys or values of one head: row j starts at data + slot(j) * stride.
template <class T>
struct KeyRows {
  const T* data;
  int64_t stride;
  const int32_t* blocks = nullptr;  // the sequence's block table row; null: packed, see `tokens`
  int64_t block_tokens = 1;
  KeyTokens tokens = {};

  const T* row(int64_t key) const {
    const int64_t slot = blocks == nullptr
                             ? tokens(key)
                             : blocks[key / block_tokens] * block_tokens + key % block_tokens;
    return data + slot * stride;
  }
};

// Owns scratch memory of the size of a tile; reusable for any number of calls with this head dim.
template <class T>
class FlashAttention {
 public:
  FlashAttention(int64_t head_dim, const AttentionDesc& desc);
  // Writes o and lse of each row, for at most kQueryRows rows.
  void run(std::span<const QueryRow<T>> rows, const KeyRows<T>& keys, const KeyRows<T>& values);

 private:
  static constexpr int64_t kPassRows = 16;  // rows per pass over a tile in the L1 cache
  struct RowState {
    T* o;            // chunk output: the row's o in its first chunk, scratch in later ones
    T row_max_log2;  // m c, subtracted from exponents
    T partial[4];    // partial sums of l, by (key mod 8) / 2
  };
  // State of the chunks combined so far, whose O is in the row's o.
  struct Combined {
    bool any = false;
    T row_max_log2 = 0, l = 0;
  };
  void chunk(std::span<const QueryRow<T>> rows, RowState* states, const KeyRows<T>& keys,
             const KeyRows<T>& values, VisibleKeys range);
  void combine(const QueryRow<T>& row, const RowState& chunk, Combined& combined) const;
  void tile_step(std::span<const QueryRow<T>> rows, RowState* states, int64_t key0);
  void softmax(RowState& state, T* s, int64_t first, int64_t last) const;

  const int64_t head_dim_;
  const T exponent_scale_;  // c = scale log2(e)
  const ProbabilityDropout dropout_;
  KeyTile<T> keys_;
  RowTile<T> values_;
  Tensor chunk_o_;  // [kQueryRows, head_dim]; allocated at the second chunk
  Tensor scores_;   // [kPassRows, score_stride]
  Tensor factors_;  // [score_stride]
};
extern template class FlashAttention<float>;
extern template class FlashAttention<double>;

}  // namespace cohort::kernels::attention
