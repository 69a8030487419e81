// Packing of training sequences: plain copies into host vectors, then one tensor per field.
#include "data/packing.h"

#include <algorithm>
#include <limits>

#include "data/parallel_try.h"

namespace cohort {
namespace {

// True if b, packed directly after a, shares its prefix.
bool shares_prefix(const TokenSequence& a, const TokenSequence& b) {
  return b.group >= 0 && b.group == a.group && b.prefix > 0;
}

void check(const TokenSequence& s) {
  const size_t n = s.tokens.size();
  COHORT_CHECK(s.types.empty() || s.types.size() == n, "[pack] sequence ", s.index, " has ", n,
               " tokens and ", s.types.size(), " types");
  if (!s.labels.empty()) {
    COHORT_CHECK((s.labels.size() == n || !s.pixels.empty()) && s.prefix == 0, "[pack] sequence ",
                 s.index, " has ", n, " tokens, ", s.labels.size(), " labels and a prefix of ",
                 s.prefix);
    return;
  }
  COHORT_CHECK(n >= 2, "[pack] expected at least two tokens in sequence ", s.index, ", got ", n);
  COHORT_CHECK(s.loss_mask.size() == n, "[pack] sequence ", s.index, " has ", n, " tokens and ",
               s.loss_mask.size(), " flags of the loss mask");
  COHORT_CHECK(
      s.prefix >= 0 && s.prefix < s.num_inputs() &&
          std::count(s.loss_mask.begin() + 1, s.loss_mask.begin() + 1 + s.prefix, 0) == s.prefix,
      "[pack] sequence ", s.index, " has a prefix of ", s.prefix, " of its ", n,
      " tokens: expected a target beyond it, and none up to the token that follows it");
}

// Index of the first sequence of each micro batch of at most `budget` inputs, then the number of
// sequences.
std::vector<size_t> micro_batch_begins(std::span<const TokenSequence> sequences, int64_t budget,
                                       Groups groups) {
  const auto shared_with_previous = [&](size_t i) {
    return i > 0 && shares_prefix(sequences[i - 1], sequences[i]) ? sequences[i].prefix : 0;
  };
  std::vector<size_t> begins;
  int64_t used = 0;
  for (size_t i = 0, end = 0; i < sequences.size(); i = end) {
    int64_t all = sequences[i].num_inputs();
    for (end = i + 1; groups == Groups::kWhole && end < sequences.size() &&
                      sequences[i].group >= 0 && sequences[end].group == sequences[i].group;
         ++end)
      all += sequences[end].num_inputs() - shared_with_previous(end);
    const int64_t more = all - shared_with_previous(i);
    if (i > 0 && more <= budget - used) {
      used += more;
    } else {
      begins.push_back(i);
      used = all;
    }
  }
  begins.push_back(sequences.size());
  return begins;
}

// micro_batch_begins() of the smallest budget that gives as few micro batches as `budget` does.
std::vector<size_t> even_begins(std::span<const TokenSequence> sequences, int64_t budget,
                                Groups groups) {
  std::vector<size_t> begins = micro_batch_begins(sequences, budget, groups);
  int64_t too_small = 0;
  while (budget - too_small > 1) {
    const int64_t middle = too_small + (budget - too_small) / 2;
    if (std::vector<size_t> even = micro_batch_begins(sequences, middle, groups);
        even.size() == begins.size()) {
      budget = middle;
      begins = std::move(even);
    } else {
      too_small = middle;
    }
  }
  return begins;
}

// Number of inputs of valid sequences.
int64_t checked_total(std::span<const TokenSequence> sequences) {
  int64_t total = 0;
  for (const TokenSequence& s : sequences) {
    check(s);
    total += s.num_inputs();
  }
  COHORT_CHECK(total <= std::numeric_limits<int32_t>::max(), "[pack] ", total,
               " tokens exceed what cu_seqlens can address");
  return total;
}

// Sets the images of sequences, all of which must have one of the same size.
void add_pixels(std::span<const TokenSequence> sequences, PackedBatch& batch) {
  const size_t size = sequences[0].pixels.size();
  batch.pixels = Tensor::empty({std::ssize(sequences), static_cast<int64_t>(size)}, DType::kU8);
  batch.pixel_values = sequences[0].pixel_values;
  auto* to = batch.pixels.data<uint8_t>();
  for (const TokenSequence& s : sequences) {
    COHORT_CHECK(s.pixels.size() == size, "[pack] sequence ", s.index, " has ", s.pixels.size(),
                 " bytes of an image, expected ", size);
    to = std::ranges::copy(s.pixels, to).out;
  }
}

}  // namespace

int64_t TokenSequence::num_targets() const {
  int64_t count = std::ranges::count_if(labels, [](int32_t label) { return label >= 0; });
  for (size_t i = 1; labels.empty() && i < loss_mask.size(); ++i) count += loss_mask[i] != 0;
  return count;
}

PackedBatch pack(std::span<const TokenSequence> sequences) {
  std::vector<int32_t> tokens, positions, cu_seqlens{0}, prefixes, target_positions, targets,
      segments, types;
  std::vector<int64_t> indices, target_sequences;
  const auto capacity = static_cast<size_t>(checked_total(sequences));
  const bool typed = std::ranges::any_of(sequences, [](auto& s) { return !s.types.empty(); });
  for (auto* values : {&tokens, &positions, &target_positions, &targets, &segments})
    values->reserve(capacity);
  indices.reserve(capacity);
  // Appends inputs [begin, end) of a sequence whose prefix is at `prefix_begin`.
  const auto add = [&](const TokenSequence& s, int64_t begin, int64_t end, int32_t prefix_begin) {
    for (int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      const bool labeled = !s.labels.empty();
      if (labeled ? s.labels[at] >= 0 : s.loss_mask[at + 1] != 0) {
        target_positions.push_back(static_cast<int32_t>(positions.size()));
        targets.push_back(labeled ? s.labels[at] : s.tokens[at + 1]);
        segments.push_back(static_cast<int32_t>(&s - sequences.data()));
        if (labeled) target_sequences.push_back(s.index);
      }
      if (typed) types.push_back(s.types.empty() ? 0 : s.types[at]);
      if (s.pixels.empty()) tokens.push_back(s.tokens[at]);
      positions.push_back(static_cast<int32_t>(i));
      indices.push_back(s.index);
    }
    cu_seqlens.push_back(static_cast<int32_t>(positions.size()));
    prefixes.insert(prefixes.end(), {prefix_begin, static_cast<int32_t>(begin)});
  };
  bool any_shared = false;
  for (size_t begin = 0, end = 0; begin < sequences.size(); begin = end) {
    const TokenSequence& first = sequences[begin];
    for (end = begin + 1; end < sequences.size() && shares_prefix(first, sequences[end]); ++end)
      COHORT_CHECK(sequences[end].prefix == first.prefix &&
                       std::equal(first.tokens.begin(), first.tokens.begin() + first.prefix,
                                  sequences[end].tokens.begin()),
                   "[pack] sequences ", first.index, " and ", sequences[end].index, " of group ",
                   first.group, " begin with other tokens");
    const bool shared = end > begin + 1;
    const auto root = static_cast<int32_t>(positions.size());
    any_shared = any_shared || shared;
    if (shared) add(first, 0, first.prefix, 0);
    for (size_t i = begin; i < end; ++i)
      add(sequences[i], shared ? first.prefix : 0, sequences[i].num_inputs(), shared ? root : 0);
  }
  PackedBatch batch{.lane = sequences.empty() ? 0 : sequences[0].lane};
  if (sequences.empty() || sequences[0].pixels.empty())
    batch.tokens = Tensor::from(tokens);
  else
    add_pixels(sequences, batch);
  batch.positions = Tensor::from(positions);
  batch.sequences = Tensor::from(indices);
  batch.cu_seqlens = Tensor::from(cu_seqlens);
  if (any_shared)
    batch.prefixes = Tensor::from(prefixes, {static_cast<int64_t>(prefixes.size()) / 2, 2});
  batch.target_positions = Tensor::from(target_positions);
  batch.targets = Tensor::from(targets);
  batch.segments = Tensor::from(segments);
  if (!target_sequences.empty()) batch.target_sequences = Tensor::from(target_sequences);
  if (typed) batch.types = Tensor::from(types);
  return batch;
}

std::vector<size_t> split_micro_batches(std::span<const TokenSequence> sequences, int64_t budget,
                                        Groups groups) {
  COHORT_CHECK(budget > 0, "[pack_micro_batches] expected a positive budget, got ", budget);
  std::vector<size_t> out;
  for (size_t begin = 0, end = 0; begin < sequences.size(); begin = end) {
    while (end < sequences.size() && sequences[end].lane == sequences[begin].lane) ++end;
    for (const size_t first : even_begins(sequences.subspan(begin, end - begin), budget, groups))
      if (begin + first < end) out.push_back(begin + first);
  }
  out.push_back(sequences.size());
  return out;
}

std::vector<PackedBatch> pack_micro_batches(std::span<const TokenSequence> sequences,
                                            int64_t budget, Groups groups) {
  const std::vector<size_t> begins = split_micro_batches(sequences, budget, groups);
  std::vector<PackedBatch> batches(begins.size() - 1);
  parallel_try(static_cast<int64_t>(batches.size()), 1, [&](int64_t i) {
    const auto b = static_cast<size_t>(i);
    batches[b] = pack(sequences.subspan(begins[b], begins[b + 1] - begins[b]));
  });
  return batches;
}

PackedBatch PackedBatch::to(Device device) const {
  PackedBatch out = *this;
  for (Tensor* t : {&out.tokens, &out.positions, &out.sequences, &out.cu_seqlens, &out.prefixes,
                    &out.target_positions, &out.targets, &out.segments, &out.target_sequences,
                    &out.types, &out.pixels, &out.pixel_values})
    if (t->defined()) *t = t->to(device);
  return out;
}

}  // namespace cohort
