// Fingerprints of tensors' bits. They add up over the pieces of a tensor, in any order, so that
// ranks, slices and checkpoints are compared by numbers instead of contents.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// The share of a 2-byte word in a fingerprint: a bijection of the word for each address
// (splitmix64, Steele et al. 2014), so that a change of one word always changes the fingerprint.
COHORT_HD inline uint64_t mix_word(uint64_t address, uint16_t word) {
  uint64_t z = (address + 1) * 0x9e3779b97f4a7c15u ^ word;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// sum[0] (i64) += mix_word(address + i, word i) over the 2-byte words of `t`, modulo 2^64. An odd
// last byte is completed with zeros. `t` is contiguous, on sum's device and of any dtype. Integers
// are added, so that the sum has the same bits on any device and however `t` is cut into pieces.
COHORT_KERNEL(void fingerprint(Tensor& sum, const Tensor& t, int64_t address));

}  // namespace cohort::kernels
