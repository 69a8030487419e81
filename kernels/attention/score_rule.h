// The rule of attention says which keys a query sees, and what becomes of its scores: the one place
// that all kernels ask. It gives the keys of a block of rows and the rows of a block of keys, from
// which loops over tiles are made, the mask of a single score, the score itself and its derivative.
// A kernel is compiled for each type of rule that it is launched with (with_rule()), so that an
// option that a call does not use costs nothing.
//
// A row has a position in its sequence, whose keys are those of its shared prefix and then its own.
#pragma once

#include <algorithm>

#include "core/host_device.h"
#include "kernels/attention/attention.h"

namespace cohort::kernels {

inline constexpr double kLog2e = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

// Indices [first, end) of rows, keys or tiles.
template <class Int>
struct IndexRange {
  Int first, end;
  // The tiles that have some of these rows or keys.
  COHORT_HD IndexRange tiles(Int per_tile) const {
    return {first / per_tile, (end + per_tile - 1) / per_tile};
  }
};

// Offsets of the keys of a sequence from the first one, in elements. Keys from `own` on are `shift`
// further than if all tokens were adjacent.
struct KeyOffsets {
  int64_t stride, shift = 0;
  int own = 0;

  COHORT_HD int64_t operator()(int key) const { return key * stride + (key < own ? 0 : shift); }
  // True if the keys [first, end) are adjacent tokens.
  COHORT_HD bool adjacent(int first, int end) const { return first >= own || end <= own; }
};

// A sequence of a packed batch: its rows are tokens [begin, begin + length), and its keys are the
// tokens [prefix_begin, prefix_begin + prefix) followed by these.
struct PackedSequence {
  int begin = 0, length = 0;
  int prefix_begin = 0, prefix = 0;

  COHORT_HD int keys() const { return prefix + length; }
  template <class Int>
  COHORT_HD Int position(Int row) const {
    return prefix + row;
  }
  // The rows at these positions, without those in the prefix.
  template <class Int>
  COHORT_HD IndexRange<Int> rows(const IndexRange<Int>& positions) const {
    return {std::max<Int>(0, positions.first - prefix), std::max<Int>(0, positions.end - prefix)};
  }
  // Token of a key, and of the first one.
  template <class Int>
  COHORT_HD Int token(Int key) const {
    return key < prefix ? prefix_begin + key : begin + key - prefix;
  }
  COHORT_HD int first_token() const { return prefix_begin; }
  // Twice the number of keys that the rows see under a causal mask, more or less.
  int64_t visible_keys() const { return int64_t{length} * (prefix + keys()); }
  // Offsets of the keys in a tensor with this token stride.
  COHORT_HD KeyOffsets offsets(int64_t stride) const {
    return {stride, (begin - prefix - prefix_begin) * stride, prefix};
  }
};

// The sequences of a packed batch; see AttentionForward and AttentionDesc::prefixes.
struct PackedSequences {
  const int32_t *cu, *prefixes;  // prefixes: null, or [count, 2]
  int count;

  explicit PackedSequences(const Tensor& cu_seqlens, const AttentionDesc& desc)
      : cu(static_cast<const int32_t*>(cu_seqlens.raw())),
        prefixes(desc.prefixes.defined() ? static_cast<const int32_t*>(desc.prefixes.raw())
                                         : nullptr),
        count(static_cast<int>(cu_seqlens.numel() - 1)) {}
  COHORT_HD PackedSequence operator[](int64_t s) const {
    PackedSequence sequence{.begin = cu[s], .length = cu[s + 1] - cu[s], .prefix_begin = cu[s]};
    if (has_prefix(s)) {
      sequence.prefix_begin = prefixes[2 * s];
      sequence.prefix = prefixes[2 * s + 1];
    }
    return sequence;
  }
  // True if sequence s has a prefix, which is the last sequence before it that has none.
  COHORT_HD bool has_prefix(int64_t s) const {
    return prefixes != nullptr && prefixes[2 * s + 1] != 0;
  }
};

// Masks one key for rows at consecutive positions.
struct KeyMask {
  int distance;    // from the key to the first row
  uint32_t limit;  // rows at this distance and beyond do not see the key
  COHORT_HD bool hides(int row) const { return static_cast<uint32_t>(distance + row) >= limit; }
};

// The rule of a call without dropout. T: type of the arithmetic.
template <class T>
struct ScoreRule {
  using Value = T;
  static constexpr bool kDrops = false;     // see AnyRule
  static constexpr bool kModifies = false;  // apply() is not the identity
  static constexpr bool kPlain = false;     // see PlainRule
  static constexpr int kAllKeys = 1 << 30;

  T scale;     // softmax scale
  T exponent;  // c of the canonical order: base-2 exponent per unit of score
  int window;  // number of keys that a causal row sees at most; kAllKeys without a limit
  bool causal;

  ScoreRule(const AttentionDesc& desc, int64_t head_dim)
      : scale(static_cast<T>(softmax_scale(desc, head_dim))),
        exponent(static_cast<T>(softmax_scale(desc, head_dim) * kLog2e)),
        window(desc.window > 0 ? static_cast<int>(std::min<int64_t>(desc.window, kAllKeys))
                               : kAllKeys),
        causal(desc.mask == Mask::kCausal) {}

  // The score that the softmax sees, from the product of a query and a key; both without the scale.
  COHORT_HD T apply(T score) const { return score; }
  // Derivative of apply(), from its result.
  COHORT_HD T derivative(T) const { return 1; }

  // A row sees keys [first_key(end), end) of its sequence, with end = end_key(), and not those
  // outside; first_key() may be negative.
  template <class Int>
  COHORT_HD Int end_key(Int position, Int keys) const {
    return causal ? position + 1 : keys;
  }
  template <class Int>
  COHORT_HD Int first_key(Int end) const {
    return end - window;
  }
  COHORT_HD bool outside(int key, int end) const { return key >= end || key < first_key(end); }
  // The keys, of a sequence of `keys` keys, that some row at positions [first, end) sees.
  template <class Int>
  COHORT_HD IndexRange<Int> keys_of(const IndexRange<Int>& positions, Int keys) const {
    if (!causal) return {0, keys};
    return {std::max<Int>(0, first_key(positions.first + 1)), positions.end};
  }
  // The positions, of `count` positions, whose rows see some of the keys [first, end).
  template <class Int>
  COHORT_HD IndexRange<Int> positions_of(const IndexRange<Int>& keys, Int count) const {
    if (!causal) return {0, count};
    return {keys.first, std::min<Int>(count, keys.end - 1 + std::min<Int>(window, count))};
  }
  // True if a key of the sequence is later than the row at `position`, which then does not see it.
  COHORT_HD bool is_later(int position, int key) const { return causal && key > position; }
  // True if the row at `position` does not see a key of its sequence.
  COHORT_HD bool masked(int position, int key) const {
    return causal && static_cast<uint32_t>(position - key) >= static_cast<uint32_t>(window);
  }
  // masked() for rows at positions from `first` on; hides all of them if the key does not exist.
  COHORT_HD KeyMask key_mask(int first, int key, bool exists) const {
    return {causal ? first - key : 0, static_cast<uint32_t>(exists ? window : 0)};
  }
  // False if some row at positions [first, end) does not see all keys [first, end).
  COHORT_HD bool sees_all(const IndexRange<int>& positions, const IndexRange<int>& keys) const {
    return !causal || (keys.end - 1 <= positions.first && positions.end - 1 - keys.first < window);
  }
};

// The rule of any call: probabilities may be dropped.
template <class T>
struct AnyRule : ScoreRule<T> {
  static constexpr bool kDrops = true;
  DropoutMask<T> drop;

  AnyRule(const AttentionDesc& desc, int64_t head_dim)
      : ScoreRule<T>(desc, head_dim), drop(desc.dropout) {}
  COHORT_HD bool drops() const { return drop.first_kept > 0; }
  // factors[j] = 0 or 1 / (1 - p) for the query `token` and key first + j, j < count. `first` is a
  // multiple of 4; writes up to the next multiple of 4.
  void fill_factors(T* factors, int64_t token, int64_t head, int64_t first, int64_t count) const {
    const uint64_t stream = drop.row(token);
    for (int64_t j = 0; j < count; j += 4) {
      const uint32_t keep = drop.keep_four(stream, head, first + j);
      for (int64_t i = 0; i < 4; ++i) factors[j + i] = (keep >> i & 1) != 0 ? drop.factor : T{0};
    }
  }
};

// The rule of calls without window, prefixes and dropout, for kernels that then need fewer
// registers.
template <class T>
struct PlainRule : ScoreRule<T> {
  static constexpr bool kPlain = true;
  using ScoreRule<T>::ScoreRule;
  static bool applies(const AttentionDesc& desc, int64_t tokens) {
    return desc.dropout.p == 0 && !desc.prefixes.defined() &&
           (desc.window == 0 || desc.window >= tokens);
  }
  COHORT_HD bool masked(int position, int key) const { return this->is_later(position, key); }
  COHORT_HD bool sees_all(const IndexRange<int>& positions, const IndexRange<int>& keys) const {
    return !this->causal || keys.end - 1 <= positions.first;
  }
};

// Arguments of a kernel with the rule of the call.
template <class Args, class Rule>
struct WithRule : Args {
  Rule rule;
};

// Calls fn with `args` and the rule of the call, which is a `Rule` or, if the call modifies scores,
// derived from it.
template <class Rule, class Args, class F>
void with_rule(const Args& args, const AttentionDesc& desc, int64_t head_dim, F&& fn) {
  fn(WithRule<Args, Rule>{args, Rule(desc, head_dim)});
}

}  // namespace cohort::kernels
