// The rows of packed sequences, for the gated delta rule on the CPU.
#pragma once

#include "kernels/attention/cpu/tile.h"
#include "kernels/cpu/reduce.h"
#include "kernels/gated_delta/cpu/chunk.h"

namespace cohort::kernels {

template <class T>
struct DeltaInputRows {
  int64_t heads, key_heads, group, dim;
  const T *q, *k, *v, *g, *beta;

  explicit DeltaInputRows(const DeltaTensors& in)
      : heads(in.v.dim(1)),
        key_heads(in.k.dim(1)),
        group(heads / key_heads),
        dim(in.v.dim(2)),
        q(in.q.data<T>()),
        k(in.k.data<T>()),
        v(in.v.data<T>()),
        g(in.g.data<T>()),
        beta(in.beta.data<T>()) {}
  // The offsets of a value head in [T, Hv, D], and of its key head in [T, Hk, D].
  int64_t offset(int64_t t, int64_t head) const { return (t * heads + head) * dim; }
  int64_t key_offset(int64_t t, int64_t head) const { return (t * key_heads + head / group) * dim; }
  DeltaRow<T> row(int64_t t, int64_t head) const {
    return {q + key_offset(t, head), k + key_offset(t, head), v + offset(t, head),
            g[t * heads + head], beta[t * heads + head]};
  }
};

template <class T>
struct PackedDelta : DeltaInputRows<T> {
  PackedSequences sequences;

  template <class Args>
  PackedDelta(const Args& args, const char* op)
      : DeltaInputRows<T>(args.in), sequences(checked(args, op)) {}
  // fn(sequence, head) for each value head of each sequence, in parallel.
  template <class F>
  void for_heads(const F& fn) const {
    for_rows(sequences.count * this->heads, kElementGrain,
             [&](int64_t task) { fn(sequences[task / this->heads], task % this->heads); });
  }

 private:
  template <class Args>
  static PackedSequences checked(const Args& args, const char* op) {
    AttentionDesc desc;
    desc.prefixes = args.desc.prefixes;
    attention::check_sequences(args.cu_seqlens, desc, args.in.v.dim(0), op);
    return {args.cu_seqlens, desc};
  }
};

}  // namespace cohort::kernels
