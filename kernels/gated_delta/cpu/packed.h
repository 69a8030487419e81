// The rows of packed sequences, for the gated delta rule on the CPU.
#pragma once

#include <utility>
#include <vector>

#include "kernels/cpu/reduce.h"
#include "kernels/gated_delta/cpu/chunk.h"

namespace cohort::kernels {

// A sequence of `length` tokens from `begin` on, which continues the `prefix` tokens from
// `prefix_begin` on. Its positions include these.
struct PackedSegment {
  int64_t begin = 0, length = 0, prefix_begin = 0, prefix = 0;

  int64_t end() const { return prefix + length; }
  int64_t token(int64_t position) const {
    return position < prefix ? prefix_begin + position : begin + position - prefix;
  }
};
// Throws Error for offsets that do not ascend from 0 to `tokens`, and for a prefix that is not the
// whole of the closest preceding sequence without one.
inline std::vector<PackedSegment> packed_segments(const Tensor& cu_seqlens, const Tensor& prefixes,
                                                  int64_t tokens) {
  const auto ends = cu_seqlens.to_vector<int32_t>();
  COHORT_CHECK(std::ranges::is_sorted(ends) && ends.front() == 0 && ends.back() == tokens,
               "[gated_delta] cu_seqlens do not ascend from 0 to ", tokens);
  std::vector<int32_t> shared(2 * (ends.size() - 1));
  if (prefixes.defined()) shared = prefixes.to_vector<int32_t>();
  std::vector<PackedSegment> out;
  PackedSegment last;  // without a prefix
  for (size_t s = 0; s + 1 < ends.size(); ++s) {
    const PackedSegment segment{ends[s], ends[s + 1] - ends[s], shared[2 * s], shared[2 * s + 1]};
    COHORT_CHECK(segment.prefix == 0 || (segment.prefix_begin == last.begin &&
                                         segment.prefix == last.length),
                 "[gated_delta] the prefix of sequence ", s, ", ", segment.prefix, " tokens from ",
                 segment.prefix_begin, ", is not the whole of the sequence before");
    if (segment.prefix == 0) last = segment;
    out.push_back(segment);
  }
  return out;
}

template <class T>
struct DeltaInputRows {
  int64_t heads, key_heads, group, dim;
  const T *q, *k, *v, *g, *beta;

  DeltaInputRows(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& beta)
      : heads(v.dim(1)),
        key_heads(k.dim(1)),
        group(heads / key_heads),
        dim(v.dim(2)),
        q(q.data<T>()),
        k(k.data<T>()),
        v(v.data<T>()),
        g(g.data<T>()),
        beta(beta.data<T>()) {}
  // Of a head of v in [T, Hv, D], and of its head of k in [T, Hk, D].
  int64_t offset(int64_t t, int64_t head) const { return (t * heads + head) * dim; }
  int64_t key_offset(int64_t t, int64_t head) const {
    return (t * key_heads + head / group) * dim;
  }
  DeltaRow<T> row(int64_t t, int64_t head) const {
    return {q + key_offset(t, head), k + key_offset(t, head), v + offset(t, head),
            g[t * heads + head], beta[t * heads + head]};
  }
};

template <class T>
struct PackedDelta : DeltaInputRows<T> {
  std::vector<PackedSegment> segments;

  template <class Args>
  explicit PackedDelta(const Args& args)
      : DeltaInputRows<T>(args.q, args.k, args.v, args.g, args.beta),
        segments(packed_segments(args.cu_seqlens, args.desc.prefixes, args.v.dim(0))) {}
  // fn(segment, head) for each head of v of each sequence, in parallel.
  template <class F>
  void for_heads(const F& fn) const {
    for_rows(static_cast<int64_t>(segments.size()) * this->heads, kElementGrain, [&](int64_t task) {
      fn(segments[static_cast<size_t>(task / this->heads)], task % this->heads);
    });
  }
};

}  // namespace cohort::kernels
