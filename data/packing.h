// Packed batches: sequences laid end to end in [T] tensors with cu_seqlens, no padding between
// them.
#pragma once

#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "core/tensor.h"

namespace cohort {

// One training sequence, with targets of one of two forms:
//   loss_mask   token i is the target of position i - 1 if loss_mask[i] is nonzero (prompt tokens
//               are not targets; the end-of-sequence token is)
//   labels      labels[i] is the target of position i; -1: it has none
struct TokenSequence {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> loss_mask;  // same size as tokens; loss_mask[0] is never used
  int64_t index = 0;               // within the optimiser step: addresses dropout
  // Sequences of one group (0 or more) begin with the same `prefix` tokens, none of them a target.
  // If packed consecutively they share the prefix, which is computed once.
  int64_t group = -1, prefix = 0;
  int64_t lane = 0;  // sequences of different lanes (trainers/shards.h) are in different batches
  std::vector<int32_t> labels = {};  // same size as tokens; empty: the form of loss_mask
  std::vector<int32_t> types = {};   // same size as tokens; empty: 0
  // An image in place of tokens: its bytes and PackedBatch::pixel_values. It has the positions of
  // `labels`.
  std::vector<uint8_t> pixels = {};
  Tensor pixel_values = {};
  int64_t num_inputs() const {
    return labels.empty() ? std::ssize(tokens) - 1 : std::ssize(labels);
  }
  int64_t num_targets() const;
};

// n tokens give n - 1 inputs, with labels n. The L of the T inputs that have a target are target
// positions. A shared prefix is packed once, as a sequence of its own before those that share it.
struct PackedBatch {
  Tensor tokens;            // [T] i32
  Tensor positions;         // [T] i32, from 0 in each sequence, or from its prefix's length
  Tensor sequences;         // [T] i64, TokenSequence::index of each token
  Tensor cu_seqlens;        // [S + 1] i32
  Tensor prefixes;          // [S, 2] i32, as AttentionDesc::prefixes; undefined: nothing is shared
  Tensor target_positions;  // [L] i32: indices into `tokens`, ascending
  Tensor targets;           // [L] i32: the tokens that follow them, or their labels
  Tensor segments;          // [L] i32: the sequence of each target, from 0 in the batch, ascending
  Tensor target_sequences;  // [L] i64: TokenSequence::index of each target; undefined: no labels
  Tensor types;             // [T] i32: types of tokens; undefined: 0
  // Images instead of tokens, which are undefined: [N, H W c] u8, and the value of each byte by
  // channel, [c, 256] f32. Each has a class token before its patches.
  Tensor pixels, pixel_values;
  int64_t size() const { return positions.numel(); }
  int64_t num_targets() const { return targets.numel(); }
  int64_t lane = 0;  // that of its sequences
  PackedBatch to(Device device) const;
};

// Lays the sequences end to end in the given order. Each needs at least two tokens.
PackedBatch pack(std::span<const TokenSequence> sequences);

// kWhole: consecutive sequences of one group count as one longer sequence, which is never split.
enum class Groups : uint8_t { kMaySplit, kWhole };

// Splits sequences into consecutive micro batches of at most `budget` inputs each, shared prefixes
// counted once (a longer sequence gets a batch of its own): the index of each one's first sequence,
// then the number of sequences. In each lane, whose sequences are consecutive, it minimises the
// number of micro batches, then the size of the largest.
std::vector<size_t> split_micro_batches(std::span<const TokenSequence> sequences, int64_t budget,
                                        Groups groups = Groups::kMaySplit);

// pack() of each of those micro batches.
std::vector<PackedBatch> pack_micro_batches(std::span<const TokenSequence> sequences,
                                            int64_t budget, Groups groups = Groups::kMaySplit);

// The lane of each batch.
template <class Batches>
std::vector<int64_t> lanes_of(const Batches& batches) {
  std::vector<int64_t> out;
  for (const auto& batch : batches) out.push_back(batch.lane);
  return out;
}

}  // namespace cohort
