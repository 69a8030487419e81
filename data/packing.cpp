// Packing of training sequences: plain copies into host vectors, then one tensor per field.
#include "data/packing.h"

#include <limits>

namespace cohort {

PackedBatch pack(std::span<const TokenSequence> sequences) {
  int64_t total = 0;
  for (const TokenSequence& s : sequences) {
    COHORT_CHECK(s.tokens.size() >= 2, "[pack] expected at least two tokens in sequence ", s.number,
                 ", got ", s.tokens.size());
    COHORT_CHECK(s.loss_mask.size() == s.tokens.size(), "[pack] sequence ", s.number, " has ",
                 s.tokens.size(), " tokens and ", s.loss_mask.size(), " flags of the loss mask");
    total += s.inputs();
  }
  COHORT_CHECK(total <= std::numeric_limits<int32_t>::max(), "[pack] ", total,
               " tokens exceed what cu_seqlens can address");

  const auto n = static_cast<size_t>(total);
  std::vector<int32_t> tokens, targets, positions, cu_seqlens{0};
  std::vector<int64_t> numbers;
  for (auto* v : {&tokens, &targets, &positions}) v->reserve(n);
  numbers.reserve(n);
  PackedBatch batch;
  for (const TokenSequence& s : sequences) {
    for (size_t i = 0; i + 1 < s.tokens.size(); ++i) {
      tokens.push_back(s.tokens[i]);
      targets.push_back(s.loss_mask[i + 1] ? s.tokens[i + 1] : -1);
      positions.push_back(static_cast<int32_t>(i));
      numbers.push_back(s.number);
      batch.num_targets += s.loss_mask[i + 1] != 0;
    }
    cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
  }
  batch.tokens = Tensor::from(tokens);
  batch.targets = Tensor::from(targets);
  batch.positions = Tensor::from(positions);
  batch.sequences = Tensor::from(numbers);
  batch.cu_seqlens = Tensor::from(cu_seqlens);
  return batch;
}

PackedBatch PackedBatch::to(Device device) const {
  return {.tokens = tokens.to(device),
          .targets = targets.to(device),
          .positions = positions.to(device),
          .sequences = sequences.to(device),
          .cu_seqlens = cu_seqlens.to(device),
          .num_targets = num_targets};
}

std::vector<int64_t> split_by_tokens(std::span<const int64_t> lengths, int64_t budget) {
  COHORT_CHECK(budget > 0, "[split_by_tokens] expected a positive budget, got ", budget);
  std::vector<int64_t> begins{0};
  int64_t used = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    COHORT_CHECK(lengths[i] >= 0, "[split_by_tokens] length ", i, " is ", lengths[i]);
    const auto run_begin = static_cast<size_t>(begins.back());
    if (i > run_begin && lengths[i] > budget - used) {
      begins.push_back(static_cast<int64_t>(i));
      used = 0;
    }
    used += lengths[i];
  }
  if (!lengths.empty()) begins.push_back(static_cast<int64_t>(lengths.size()));
  return begins;
}

}  // namespace cohort
