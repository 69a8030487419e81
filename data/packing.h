// Packed batches: sequences laid end to end in [T] tensors with cu_seqlens, no padding between
// them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor.h"

namespace cohort {

// One training sequence. `loss_mask[i]` says whether token i is a target (prompt tokens are not;
// the end-of-sequence token is).
struct TokenSequence {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> loss_mask;  // same size as tokens; loss_mask[0] is never used
  int64_t number = 0;              // of the sequence within the optimiser step: addresses dropout
  int64_t inputs() const { return static_cast<int64_t>(tokens.size()) - 1; }
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

// Micro batches: sequences cut in this way by their inputs().
template <class Sequence>
std::vector<std::span<const Sequence>> micro_batches(std::span<const Sequence> sequences,
                                                     int64_t budget) {
  std::vector<int64_t> lengths;
  for (const Sequence& s : sequences) lengths.push_back(s.inputs());
  const std::vector<int64_t> begins = split_by_tokens(lengths, budget);
  std::vector<std::span<const Sequence>> out;
  for (size_t i = 0; i + 1 < begins.size(); ++i)
    out.push_back(sequences.subspan(static_cast<size_t>(begins[i]),
                                    static_cast<size_t>(begins[i + 1] - begins[i])));
  return out;
}

}  // namespace cohort
