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

// Dropout of one call as its kernels use it. T: type of the arithmetic.
template <class T>
struct DropoutMask {
  const int64_t* sequences = nullptr;
  const int32_t* positions = nullptr;
  uint64_t seed = 0, stream = 0;
  uint32_t first_kept = 0;  // smallest random word that keeps its element; 0: no dropout
  T factor = 1;             // scale of kept elements

  explicit DropoutMask(const DropoutSpec& spec) {
    if (spec.p == 0) return;
    sequences = spec.sequences.data<int64_t>();
    positions = spec.positions.data<int32_t>();
    seed = spec.seed;
    stream = spec.stream;
    first_kept = dropout_first_kept(static_cast<float>(spec.p));
    factor = static_cast<T>(1 / (1 - spec.p));
  }

  // Philox stream of a token.
  COHORT_HD uint64_t row(int64_t token) const {
    return dropout_row(stream, sequences[token], positions[token]);
  }
  // For attention: bit i is set if key `first` + i is kept, for i < 4; `first` is a multiple of 4.
  // Same bits as dropout_keep() with element = head * 2^32 + key.
  template <class Int>
  COHORT_HD uint32_t keep_four(uint64_t row_stream, Int head, Int first) const {
    const uint64_t element = static_cast<uint64_t>(head) << 32 | static_cast<uint64_t>(first);
    const auto words = philox(seed, row_stream, element >> 2);
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 4; ++i) bits |= words[i] >= first_kept ? 1u << i : 0u;
    return bits;
  }
};

// Throws Error unless p is in [0, 1) and, if it is not 0, the spec is one of T tokens of the check.
void check_dropout(ArgumentCheck& check, const DropoutSpec& spec);

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
