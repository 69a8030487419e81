// Packed batches: sequences laid end to end in [T] tensors with cu_seqlens, no padding between
// them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"

namespace cohort {

// One training sequence. `learn[i]` says whether token i is a target (prompt tokens are not; the
// end-of-sequence token is).
struct TokenSequence {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> learn;  // same size as tokens; learn[0] is never used
  int64_t number = 0;          // of the sequence within the optimiser step: addresses dropout
};

// n tokens give n - 1 inputs, each with the next token as its target.
struct PackedBatch {
  Tensor tokens;      // [T] i32
  Tensor targets;     // [T] i32; -1: not learned
  Tensor positions;   // [T] i32, from 0 in each sequence
  Tensor sequences;   // [T] i64, TokenSequence::number of each token
  Tensor cu_seqlens;  // [S + 1] i32
  int64_t num_targets = 0;
  int64_t size() const { return tokens.numel(); }
  PackedBatch to(Device device) const;
};

// Lays the sequences end to end in the given order. Sequences need at least two tokens.
PackedBatch pack(std::span<const TokenSequence> sequences);

// Cuts [0, lengths.size()) into consecutive runs of at most `budget` tokens each (a longer sequence
// gets a run of its own). Returns the begin index of each run, and the end: k runs give k + 1
// numbers.
std::vector<int64_t> split_by_tokens(std::span<const int64_t> lengths, int64_t budget);

}  // namespace cohort
