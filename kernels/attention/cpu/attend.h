// The one routine behind training forward, prefill and decode: up to kQueryRows query rows against
// the keys they see, in the canonical order of attention.h. A row is a (token, head) pair; the rows
// of a call share a key head and nothing else.
#pragma once

#include "kernels/attention/cpu/tile.h"

namespace cohort::kernels::attention {

inline constexpr int64_t kQueryRows = 128;

template <class T>
struct QueryRow {
  const T* q;
  T* o;
  T* lse;               // null: not wanted
  VisibleKeys visible;  // at least one
  int64_t token, head;
};

// Keys or values of one head: key j's vector starts at data + slot(j) * stride.
template <class T>
struct KeyRows {
  const T* data;
  int64_t stride;
  const int32_t* blocks = nullptr;  // null: the keys of packed sequences, of which
  int64_t block_tokens = 1;
  KeyTokens tokens = {};

  const T* row(int64_t key) const {
    const int64_t slot = blocks == nullptr
                             ? tokens(key)
                             : blocks[key / block_tokens] * block_tokens + key % block_tokens;
    return data + slot * stride;
  }
};

// Scratch of O(tile); may be used for any number of calls with this head dim.
template <class T>
class Attend {
 public:
  Attend(int64_t head_dim, const AttentionDesc& desc);
  // Writes o and lse of each row. At most kQueryRows rows.
  void run(std::span<const QueryRow<T>> rows, const KeyRows<T>& keys, const KeyRows<T>& values);

 private:
  static constexpr int64_t kGroup = 16;  // rows between which a tile stays in the nearest cache
  struct RowState {
    T* o;            // of the chunk: the row's own in its first, scratch in those after it
    T row_max_log2;  // m c: what the exponents are relative to
    T partial[4];    // l, by (key mod 8) / 2
  };
  // Of the chunks so far, whose O is the row's own.
  struct Joined {
    bool any = false;
    T row_max_log2 = 0, l = 0;
  };
  void chunk(std::span<const QueryRow<T>> rows, RowState* states, const KeyRows<T>& keys,
             const KeyRows<T>& values, VisibleKeys range);
  void join(const QueryRow<T>& row, const RowState& chunk, Joined& joined) const;
  void tile_step(std::span<const QueryRow<T>> rows, RowState* states, int64_t key0);
  void softmax(RowState& state, T* s, int64_t first, int64_t last) const;

  const int64_t head_dim_;
  const T exponent_scale_;  // c = scale log2(e)
  const ProbabilityDropout dropout_;
  KeyTile<T> keys_;
  RowTile<T> values_;
  Tensor chunk_o_;  // [kQueryRows, head_dim]; made when a second chunk is seen
  Tensor scores_;   // [kGroup, score_stride]
  Tensor factors_;  // [score_stride]
};
extern template class Attend<float>;
extern template class Attend<double>;

}  // namespace cohort::kernels::attention
