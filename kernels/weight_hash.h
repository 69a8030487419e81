// A hash of many tensors' bits, by which two states of a model's weights are compared.
#pragma once

#include <span>

#include "kernels/common.h"

namespace cohort::kernels {

// The share of a 4-byte word in the hash: a bijection of the word for each index (splitmix64,
// Steele et al. 2014), so that a change of one word always changes the hash.
COHORT_HD inline uint64_t hashed_word(uint32_t word, uint64_t index) {
  uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u ^ word;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// hash[0] (i64) = the sum modulo 2^64 of hashed_word() over the 4-byte words of all tensors, which
// are numbered through. The last word of a tensor is completed with zeros. The tensors are
// contiguous, on hash's device and of any dtype; the sum does not depend on the order of its terms,
// so it has the same bits on any device.
COHORT_KERNEL(void weight_hash(Tensor& hash, std::span<const Tensor> tensors));

}  // namespace cohort::kernels
