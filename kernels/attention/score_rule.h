// The rule of attention says which keys a query sees, and what becomes of its scores: the one place
// that all kernels ask. It gives the keys of a block of rows and the rows of a block of keys, from
// which loops over tiles are made, the mask of a single score, its modifications and their
// derivative.
// A kernel is compiled for each type of rule that it is launched with (with_rule()), so that an
// option that a call does not use costs nothing.
//
// A row has a position in its sequence, whose keys are those of its shared prefix and then its own.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "core/host_device.h"
#include "kernels/attention/attention.h"
#include "kernels/vector_math.h"

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

  PackedSequences(const Tensor& cu_seqlens, const AttentionDesc& desc)
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

// Distance from a query to a key, j - i, as an integer and as a number.
template <class T>
struct KeyDistance {
  int whole;
  T value;

  COHORT_HD explicit KeyDistance(int distance) : whole(distance), value(static_cast<T>(distance)) {}
  COHORT_HD KeyDistance(int distance, T number) : whole(distance), value(number) {}
  // A step by a compile-time constant needs no conversion.
  COHORT_HD KeyDistance operator+(int step) const {
    return {whole + step, value + static_cast<T>(step)};
  }
};

// A mask says which keys a row sees. kMasks: beyond causal masks, it may have tiles and sinks, and
// is bound to a sequence; kPlain: sequences have no prefix.

// The mask of causal or full attention. kWindow: causal rows may see their last `window` keys
// alone, and sequences may have shared prefixes. Kernels with neither need fewer registers.
template <bool kWindow>
struct CausalMask {
  static constexpr bool kMasks = false, kPlain = !kWindow;
  static constexpr int kAllKeys = 1 << 29;

  int window;  // number of keys that a causal row sees at most; kAllKeys without a limit
  bool causal;

  explicit CausalMask(const AttentionDesc& desc)
      : window(desc.window > 0 ? static_cast<int>(std::min<int64_t>(desc.window, kAllKeys))
                               : kAllKeys),
        causal(desc.mask == Mask::kCausal) {}
  // True if the mask serves calls on so many tokens.
  static bool applies(const AttentionDesc& desc, int64_t tokens) {
    const bool full_window =
        desc.mask == Mask::kFull && (desc.window > 0 || desc.window_right >= 0);
    if (full_window || desc.sinks.defined() || desc.prefix_lm.defined() || desc.tiles.defined())
      return false;
    return kWindow || (!desc.prefixes.defined() && (desc.window == 0 || desc.window >= tokens));
  }

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
  // The keys that a row sees end here.
  COHORT_HD int visible_end(int end) const { return end; }
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
    if constexpr (!kWindow) return is_later(position, key);
    return causal && static_cast<uint32_t>(position - key) >= static_cast<uint32_t>(window);
  }
  // masked() for rows at positions from `first` on; hides all of them if the key does not exist.
  COHORT_HD KeyMask key_mask(int first, int key, bool exists) const {
    return {causal ? first - key : 0, static_cast<uint32_t>(exists ? window : 0)};
  }
  // False if some row at positions [first, end) does not see all keys [first, end).
  COHORT_HD bool sees_all(const IndexRange<int>& positions, const IndexRange<int>& keys) const {
    return !causal || (keys.end - 1 <= positions.first &&
                       (!kWindow || positions.end - 1 - keys.first < window));
  }
};

// Word `word` of row `row` of the transpose of a tile mask.
COHORT_HD inline uint32_t transposed_word(const uint32_t* mask, int tiles, int row, int word) {
  const int words = (tiles + 31) / 32;
  uint32_t out = 0;
  for (int bit = 0; bit < 32 && 32 * word + bit < tiles; ++bit)
    out |= (mask[(32 * word + bit) * words + row / 32] >> row % 32 & 1) << bit;
  return out;
}

// The mask of any call: causal or full, with two-sided windows, prefix-LM and tiles, and rows may
// have a sink. The `end` of a row is that of its window, which may lie behind the last key;
// visible_end() is not.
template <class T>
struct AnyMask {
  static constexpr bool kMasks = true, kPlain = false;
  static constexpr int kAllKeys = CausalMask<true>::kAllKeys;

  // Members that all sequences and heads share.
  int window, right;         // keys up to its own, and after it, that a row sees at most
  const T* all_sinks;        // or null
  const int32_t* prefix_lm;  // or null
  const uint32_t *tiles_by_query, *tiles_by_key;  // or null
  int tiles, words;                               // rows of the tile mask, and words per row
  // Set by bind().
  int keys = kAllKeys, prefix = 0;

  explicit AnyMask(const AttentionDesc& desc)
      : window(CausalMask<true>(desc).window),
        right(desc.mask == Mask::kCausal
                  ? 0
                  : static_cast<int>(std::min<int64_t>(
                        desc.window_right < 0 ? kAllKeys : desc.window_right, kAllKeys))),
        all_sinks(pointer<T>(desc.sinks)),
        prefix_lm(pointer<int32_t>(desc.prefix_lm)),
        tiles_by_query(pointer<uint32_t>(desc.tiles)),
        tiles_by_key(pointer<uint32_t>(desc.tiles_by_key)),
        tiles(tiles_by_query == nullptr ? 0 : static_cast<int>(desc.tiles.dim(0))),
        words(tiles_by_query == nullptr ? 0 : static_cast<int>(desc.tiles.dim(1))) {}

  static bool applies(const AttentionDesc&, int64_t /*tokens*/) { return true; }

  COHORT_HD void bind_sequence(int sequence, int all_keys) {
    keys = all_keys;
    if (prefix_lm != nullptr) prefix = std::min(prefix_lm[sequence], all_keys);
  }
  // -infinity without one; in base 2.
  COHORT_HD T sink_log2(int head) const {
    return all_sinks == nullptr ? -static_cast<T>(INFINITY)
                                : all_sinks[head] * static_cast<T>(kLog2e);
  }

  template <class Int>
  COHORT_HD Int end_key(Int position, Int /*keys*/) const {
    return std::max<Int>(position + right + 1, prefix);
  }
  template <class Int>
  COHORT_HD Int first_key(Int end) const {
    return end - right - window;
  }
  COHORT_HD int visible_end(int end) const { return std::min(end, keys); }
  COHORT_HD bool outside(int key, int end) const {
    return key >= visible_end(end) || key < first_key(end);
  }
  template <class Int>
  COHORT_HD IndexRange<Int> keys_of(const IndexRange<Int>& positions, Int all_keys) const {
    return {std::max<Int>(0, positions.first + 1 - window),
            std::min<Int>(all_keys, std::max<Int>(positions.end + right, prefix))};
  }
  template <class Int>
  COHORT_HD IndexRange<Int> positions_of(const IndexRange<Int>& of, Int count) const {
    return {of.first < prefix ? 0 : std::max<Int>(0, of.first - right),
            std::min<Int>(count, of.end - 1 + std::min<Int>(window, count))};
  }
  COHORT_HD bool is_later(int position, int key) const {
    return key >= std::max(position + right + 1, prefix);
  }
  COHORT_HD bool masked(int position, int key) const {
    return is_later(position, key) || key <= position - window;
  }
  COHORT_HD KeyMask key_mask(int first, int key, bool exists) const {
    if (key < prefix) return {0, static_cast<uint32_t>(exists ? kAllKeys : 0)};
    return {first + right - key, static_cast<uint32_t>(exists ? window + right : 0)};
  }
  COHORT_HD bool sees_all(const IndexRange<int>& positions, const IndexRange<int>& of) const {
    return !is_later(positions.first, of.end - 1) && positions.end - 1 - of.first < window;
  }

  // True if the tile of a query and a key is visible.
  COHORT_HD bool sees_tile(int position, int key) const {
    return tiles_by_query == nullptr || bit(tiles_by_query, position / kTile, key / kTile);
  }
  // Number of visible tiles of the query at `position`, of the tiles [first, end) of keys.
  COHORT_HD int count_tiles(int position, int first, int end) const {
    if (tiles_by_query != nullptr) end = std::min(end, tiles);
    if (tiles_by_query == nullptr || first >= end) return std::max(0, end - first);
    int count = 0;
    for (int word = first / 32; word <= (end - 1) / 32; ++word) {
      uint32_t bits = tiles_by_query[position / kTile * words + word];
      if (word == first / 32) bits &= ~0u << first % 32;
      if (word == (end - 1) / 32) bits &= ~0u >> (31 - (end - 1) % 32);
      for (; bits != 0; bits &= bits - 1) ++count;
    }
    return count;
  }
  // The first key from `key` on, in a tile that some row at these positions sees, the start of the
  // tile or `key` itself; `end` if there is none before it.
  COHORT_HD int next_key(const IndexRange<int>& positions, int key, int end) const {
    return next(tiles_by_query, positions, key, end);
  }
  // As next_key(), of queries that see some of the keys.
  COHORT_HD int next_query(const IndexRange<int>& of, int query, int end) const {
    return next(tiles_by_key, of, query, end);
  }

 private:
  static constexpr int kTile = static_cast<int>(kMaskTile);

  COHORT_HD bool bit(const uint32_t* mask, int row, int column) const {
    return row < tiles && column < tiles &&
           (mask[row * words + column / 32] >> column % 32 & 1) != 0;
  }
  COHORT_HD int next(const uint32_t* mask, const IndexRange<int>& rows, int at, int end) const {
    if (mask == nullptr) return at;
    const IndexRange<int> of = rows.tiles(kTile);
    const int column = at / kTile;
    for (int word = column / 32; word < words && word * 32 * kTile < end; ++word) {
      uint32_t bits = 0;
      for (int row = of.first; row < std::min(of.end, tiles); ++row)
        bits |= mask[row * words + word];
      if (word == column / 32) bits &= ~0u << column % 32;
      if (bits == 0) continue;
      const int found = word * 32 + lowest_bit(bits);
      return found < tiles ? std::min(end, std::max(at, found * kTile)) : end;  // else padding
    }
    return end;
  }
  COHORT_HD static int lowest_bit(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __ffs(static_cast<int>(bits)) - 1;
#else
    return std::countr_zero(bits);
#endif
  }
};

// Modifications of scores: none, or those of a call in the head to which bind() binds them.
struct Unmodified {
  static constexpr bool kModifies = false;
  Unmodified(const AttentionDesc& /*desc*/, int64_t /*head_dim*/) {}
  static bool applies(const AttentionDesc& desc) {
    return desc.soft_cap <= 0 && desc.distance.floor >= 1 && !desc.slopes.defined() &&
           !desc.bias.defined();
  }
};
template <class T>
struct Modified {
  static constexpr bool kModifies = true;

  // Members that all heads share.
  T cap, inverse_cap;  // without the scale; 0: none
  T floor, rate_log2;  // distance factor; a floor of 1: none
  T inverse_scale, inverse_exponent;
  int radius;                // R
  const T *slopes, *biases;  // or null
  // Set by bind().
  T slope = 0;
  const T* bias = nullptr;  // points to distance 0

  Modified(const AttentionDesc& desc, int64_t head_dim)
      : cap(static_cast<T>(desc.soft_cap / softmax_scale(desc, head_dim))),
        inverse_cap(cap > 0 ? 1 / cap : 0),
        floor(static_cast<T>(desc.distance.floor)),
        rate_log2(static_cast<T>(-desc.distance.rate * kLog2e)),
        inverse_scale(static_cast<T>(1 / softmax_scale(desc, head_dim))),
        inverse_exponent(static_cast<T>(kLn2 / softmax_scale(desc, head_dim))),
        radius(desc.bias.defined() ? static_cast<int>(desc.bias.dim(1) / 2) : 0),
        slopes(pointer<T>(desc.slopes)),
        biases(pointer<T>(desc.bias)) {}
  static bool applies(const AttentionDesc&) { return true; }

  COHORT_HD void bind_head(int head) {
    if (slopes != nullptr) slope = slopes[head];
    if (biases != nullptr) bias = biases + int64_t{head} * (2 * radius + 1) + radius;
  }

  // Calls fn(stage) for each modification in use, in order; stage(score, distance) gives the
  // modified score. Both are without the scale.
  template <class F>
  COHORT_HD void modify(F&& fn) const {
    using D = KeyDistance<T>;
    if (cap > 0) fn([this](T s, const D&) { return cap * tanh_of(s * inverse_cap); });
    if (floor < 1) fn([this](T s, const D& d) { return s * factor(d); });
    if (slopes != nullptr)
      fn([by = -slope * inverse_scale](T s, const D& d) { return fma_of(by, abs_of(d.value), s); });
    if (bias != nullptr) fn([this](T s, const D& d) { return s + bias_of(d); });
  }
  // Calls fn(derivative) if the derivative of the modified score is not 1 everywhere:
  // derivative(p, lse_log2, distance), recomputed from the probability that the score gave.
  template <class F>
  COHORT_HD void differentiate(F&& fn) const {
    using D = KeyDistance<T>;
    if (cap > 0 && (floor < 1 || slopes != nullptr || bias != nullptr))
      fn([this](T p, T lse_log2, const D& d) {
        T s = (log2_of(p) + lse_log2) * inverse_exponent;
        if (bias != nullptr) s -= bias_of(d);
        s += slope * inverse_scale * abs_of(d.value);
        const T by = floor < 1 ? factor(d) : 1, t = quotient(s * inverse_cap, by);
        return p > 0 ? by * (1 - t * t) : 0;
      });
    else if (cap > 0)
      fn([by = inverse_exponent * inverse_cap](T p, T lse_log2, const D&) {
        const T t = (log2_of(p) + lse_log2) * by;
        return p > 0 ? 1 - t * t : 0;
      });
    else if (floor < 1)
      fn([this](T, T, const D& d) { return factor(d); });
  }

 private:
  // The CUDA versions are of f32 and a few instructions; that of tanh errs by 2^-23.
  COHORT_HD static T abs_of(T x) { return x < 0 ? -x : x; }
  COHORT_HD static T fma_of(T a, T b, T c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return std::fma(a, b, c);
#endif
  }
  COHORT_HD static T quotient(T a, T b) {
#ifdef __CUDA_ARCH__
    return __fdividef(a, b);
#else
    return a / b;
#endif
  }
  COHORT_HD static T exp2_of(T x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return vexp2(x);
#endif
  }
  COHORT_HD static T log2_of(T x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return std::log2(x);
#endif
  }
  COHORT_HD static T tanh_of(T x) {
#ifdef __CUDA_ARCH__
    return 1 - quotient(2, 1 + exp2_of(static_cast<T>(2 * kLog2e) * x));
#else
    return std::tanh(x);
#endif
  }
  COHORT_HD T factor(const KeyDistance<T>& d) const {
    return fma_of(1 - floor, exp2_of(rate_log2 * abs_of(d.value)), floor);
  }
  COHORT_HD T bias_of(const KeyDistance<T>& d) const {
    return bias[std::min(std::max(d.whole, -radius), radius)] * inverse_scale;
  }
};

// Dropout of probabilities: none, or that of a call.
struct WithoutDropout {
  static constexpr bool kDrops = false;
  explicit WithoutDropout(const AttentionDesc& /*desc*/) {}
  static bool applies(const AttentionDesc& desc) { return desc.dropout.p == 0; }
};
template <class T>
struct WithDropout {
  static constexpr bool kDrops = true;
  DropoutMask<T> drop;

  explicit WithDropout(const AttentionDesc& desc) : drop(desc.dropout) {}
  static bool applies(const AttentionDesc&) { return true; }
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

// A rule: a mask, modifications and dropout, with the scale of the scores. T: type of the
// arithmetic.
template <class T, class KeyMasks, class Modifications = Unmodified, class Drops = WithoutDropout>
struct ScoreRule : KeyMasks, Modifications, Drops {
  using Value = T;
  T scale;     // softmax scale
  T exponent;  // c of the canonical order: base-2 exponent per unit of score

  ScoreRule(const AttentionDesc& desc, int64_t head_dim)
      : KeyMasks(desc),
        Modifications(desc, head_dim),
        Drops(desc),
        scale(static_cast<T>(softmax_scale(desc, head_dim))),
        exponent(static_cast<T>(softmax_scale(desc, head_dim) * kLog2e)) {}
  // True if this rule does for calls on so many tokens.
  static bool applies(const AttentionDesc& desc, int64_t tokens) {
    return KeyMasks::applies(desc, tokens) && Modifications::applies(desc) && Drops::applies(desc);
  }

  // The rule for the rows of a sequence, which has `keys` keys, in a head.
  using Bound = std::conditional_t<KeyMasks::kMasks, ScoreRule, const ScoreRule&>;
  COHORT_HD Bound bind(int sequence, int head, int keys) const {
    if constexpr (!KeyMasks::kMasks) {
      return *this;
    } else {
      ScoreRule bound = *this;
      bound.bind_sequence(sequence, keys);
      if constexpr (Modifications::kModifies) bound.bind_head(head);
      return bound;
    }
  }
};

// The rules for which kernels are compiled, each named by what it adds to the one before.
template <class T>
using PlainRule = ScoreRule<T, CausalMask<false>>;
template <class T>
using WindowRule = ScoreRule<T, CausalMask<true>>;
template <class T>
using MaskRule = ScoreRule<T, AnyMask<T>>;
template <class T>
using ModifyRule = ScoreRule<T, AnyMask<T>, Modified<T>>;
template <class T>
using DropoutRule = ScoreRule<T, AnyMask<T>, Modified<T>, WithDropout<T>>;

// Arguments of a kernel with the rule of the call.
template <class Args, class Rule>
struct WithRule : Args {
  Rule rule;
};

// Calls fn with `args` and the first of these rules that does for the call, on so many tokens.
template <class Rule, class... Others, class Args, class F>
void with_rule(const Args& args, const AttentionDesc& desc, int64_t head_dim, int64_t tokens,
               F&& fn) {
  if (Rule::applies(desc, tokens)) return fn(WithRule<Args, Rule>{args, Rule(desc, head_dim)});
  if constexpr (sizeof...(Others) > 0) with_rule<Others...>(args, desc, head_dim, tokens, fn);
}

}  // namespace cohort::kernels
