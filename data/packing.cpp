// Packing of training sequences: plain copies into host vectors, then one tensor per field.
#include "data/packing.h"

#include <limits>

namespace cohort {
namespace {

int64_t inputs(const TokenSequence& sequence) {
  return static_cast<int64_t>(sequence.tokens.size()) - 1;
}

void check(const TokenSequence& s, const TokenSequence& first) {
  const size_t n = s.tokens.size();
  COHORT_CHECK(n >= 2, "[pack] expected at least two tokens in sequence ", s.index, ", got ", n);
  COHORT_CHECK(s.loss_mask.size() == n, "[pack] sequence ", s.index, " has ", n, " tokens and ",
               s.loss_mask.size(), " flags of the loss mask");
  COHORT_CHECK(s.columns.size() == first.columns.size(), "[pack] sequence ", s.index, " has ",
               s.columns.size(), " columns, sequence ", first.index, " ", first.columns.size());
  for (const auto& [name, values] : s.columns) {
    COHORT_CHECK(first.columns.contains(name), "[pack] sequence ", first.index, " has no ", name);
    COHORT_CHECK(values.size() == n, "[pack] sequence ", s.index, " has ", n, " tokens and ",
                 values.size(), " values of ", name);
  }
}

// The values of a column at the targets.
Tensor column_of(std::span<const TokenSequence> sequences, const std::string& name) {
  std::vector<double> out;
  for (const TokenSequence& s : sequences) {
    const std::vector<double>& values = s.columns.at(name);
    for (size_t i = 1; i < values.size(); ++i)
      if (s.loss_mask[i]) out.push_back(values[i]);
  }
  return Tensor::from(out);
}

}  // namespace

int64_t TokenSequence::num_targets() const {
  int64_t count = 0;
  for (size_t i = 1; i < loss_mask.size(); ++i) count += loss_mask[i] != 0;
  return count;
}

PackedBatch pack(std::span<const TokenSequence> sequences, DType column_dtype) {
  int64_t total = 0;
  for (const TokenSequence& s : sequences) {
    check(s, sequences.front());
    total += inputs(s);
  }
  COHORT_CHECK(total <= std::numeric_limits<int32_t>::max(), "[pack] ", total,
               " tokens exceed what cu_seqlens can address");

  const auto n = static_cast<size_t>(total);
  std::vector<int32_t> tokens, positions, cu_seqlens{0}, learned, targets;
  std::vector<int64_t> indices;
  for (auto* v : {&tokens, &positions}) v->reserve(n);
  indices.reserve(n);
  PackedBatch batch;
  for (const TokenSequence& s : sequences) {
    for (size_t i = 0; i + 1 < s.tokens.size(); ++i) {
      if (s.loss_mask[i + 1]) {
        learned.push_back(static_cast<int32_t>(tokens.size()));
        targets.push_back(s.tokens[i + 1]);
      }
      tokens.push_back(s.tokens[i]);
      positions.push_back(static_cast<int32_t>(i));
      indices.push_back(s.index);
    }
    cu_seqlens.push_back(static_cast<int32_t>(tokens.size()));
  }
  batch.tokens = Tensor::from(tokens);
  batch.positions = Tensor::from(positions);
  batch.sequences = Tensor::from(indices);
  batch.cu_seqlens = Tensor::from(cu_seqlens);
  batch.learned = Tensor::from(learned);
  batch.targets = Tensor::from(targets);
  if (!sequences.empty())
    for (const auto& [name, values] : sequences.front().columns)
      batch.columns[name] = column_of(sequences, name).to(column_dtype);
  return batch;
}

std::vector<PackedBatch> pack_micro_batches(std::span<const TokenSequence> sequences,
                                            int64_t budget, DType column_dtype) {
  COHORT_CHECK(budget > 0, "[pack_micro_batches] expected a positive budget, got ", budget);
  std::vector<PackedBatch> batches;
  for (size_t begin = 0, end = 0; begin < sequences.size(); begin = end) {
    int64_t used = 0;
    while (end < sequences.size() && (end == begin || inputs(sequences[end]) <= budget - used))
      used += inputs(sequences[end++]);
    batches.push_back(pack(sequences.subspan(begin, end - begin), column_dtype));
  }
  return batches;
}

const Tensor& PackedBatch::column(const std::string& name) const {
  const auto found = columns.find(name);
  COHORT_CHECK(found != columns.end(), "[packed_batch] no column ", name);
  return found->second;
}

PackedBatch PackedBatch::to(Device device) const {
  PackedBatch out = *this;
  for (Tensor* t :
       {&out.tokens, &out.positions, &out.sequences, &out.cu_seqlens, &out.learned, &out.targets})
    *t = t->to(device);
  for (auto& [name, values] : out.columns) values = values.to(device);
  return out;
}

}  // namespace cohort
