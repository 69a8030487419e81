// Dropout (Srivastava et al. 2014) with addressed random bits: the mask of an element depends on
// (seed, stream, sequence, position, element) only, so neither the split into micro batches, nor
// the number of ranks, nor a restart changes a bit.
#pragma once

#include "core/rng.h"
#include "kernels/common.h"

namespace cohort::kernels {

// The purpose of rng_stream() for all dropout masks.
inline constexpr uint64_t kDropoutPurpose = 4;

// Probability and random number addresses of a dropout. sequences: [T] i64, the number of each
// token's sequence within the optimiser step; positions: [T] i32, the token's position in its
// sequence. p = 0 turns dropout off; the tensors may be undefined then.
struct DropoutSpec {
  double p = 0;
  uint64_t seed = 0;
  uint64_t stream = 0;  // identifies the step and the layer
  Tensor sequences, positions;
};

// The Philox stream of one token's elements.
COHORT_HD inline uint64_t dropout_row(uint64_t stream, int64_t sequence, int64_t position) {
  return rng_stream(kDropoutPurpose, stream ^ static_cast<uint64_t>(sequence),
                    static_cast<uint64_t>(position));
}
// True if element `element` of token (sequence, position) is kept. For attention the element is
// head * 2^32 + key position.
COHORT_HD inline bool dropout_keep(uint64_t seed, uint64_t stream, int64_t sequence,
                                   int64_t position, uint64_t element, float p) {
  const uint64_t row = dropout_row(stream, sequence, position);
  return uniform_f32(philox(seed, row, element >> 2)[element & 3]) >= p;
}

// The smallest word whose uniform_f32() is not below p < 1: an element is kept exactly if its word
// is not below it.
inline uint32_t dropout_first_kept(float p) {
  return static_cast<uint32_t>(std::ceil(static_cast<double>(p) * 0x1p24)) << 8;
}

// y[t, c] (+)= keep ? x[t, c] s : 0, with s = 1 / (1 - p) rounded to the arithmetic of x. The
// backward is the same op on dy. CPU and CUDA drop the same elements, and agree to the bit in f32.
struct Dropout {
  Tensor& y;        // [T, C]
  const Tensor& x;  // [T, C]
  const DropoutSpec& spec;
  Grad mode = Grad::kOverwrite;
};
COHORT_KERNEL(void dropout(const Dropout& args));

}  // namespace cohort::kernels
