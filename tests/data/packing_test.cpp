// Packing: inputs, targets, positions and boundaries of sequences laid end to end.
#include "data/packing.h"

#include "tests/support/test_util.h"

namespace cohort {
namespace {

using I32 = std::vector<int32_t>;
using I64 = std::vector<int64_t>;

TEST(Pack, LaysSequencesEndToEnd) {
  const std::vector<TokenSequence> sequences = {
      {.tokens = {5, 6, 7, 8}, .loss_mask = {1, 0, 1, 1}, .index = 40},
      {.tokens = {9, 10}, .loss_mask = {0, 1}, .index = 7},
      {.tokens = {1, 2, 3}, .loss_mask = {0, 0, 0}, .index = int64_t{1} << 40}};
  const PackedBatch batch = pack(sequences);
  EXPECT_EQ(batch.size(), 6);
  EXPECT_EQ(batch.num_targets(), 3);
  EXPECT_EQ(batch.tokens.to_vector<int32_t>(), (I32{5, 6, 7, 9, 1, 2}));
  EXPECT_EQ(batch.positions.to_vector<int32_t>(), (I32{0, 1, 2, 0, 0, 1}));
  EXPECT_EQ(batch.sequences.to_vector<int64_t>(),
            (I64{40, 40, 40, 7, int64_t{1} << 40, int64_t{1} << 40}));
  EXPECT_EQ(batch.cu_seqlens.to_vector<int32_t>(), (I32{0, 3, 4, 6}));
  EXPECT_EQ(batch.target_positions.to_vector<int32_t>(), (I32{1, 2, 3}));
  EXPECT_EQ(batch.targets.to_vector<int32_t>(), (I32{7, 8, 10}));
  for (const Tensor& t :
       {batch.tokens, batch.positions, batch.cu_seqlens, batch.target_positions, batch.targets})
    EXPECT_EQ(t.dtype(), DType::kI32);
  EXPECT_EQ(batch.sequences.dtype(), DType::kI64);
}

TEST(Pack, RefusesBrokenSequences) {
  const std::vector<TokenSequence> one_token = {{.tokens = {1}, .loss_mask = {1}}};
  EXPECT_THROW_WITH(pack(one_token), Error, "at least two tokens");
  const std::vector<TokenSequence> few_flags = {{.tokens = {1, 2, 3}, .loss_mask = {1, 1}}};
  EXPECT_THROW_WITH(pack(few_flags), Error, "3 tokens and 2 flags of the loss mask");
}

TEST(Pack, NothingGivesAnEmptyBatch) {
  const PackedBatch batch = pack({});
  EXPECT_EQ(batch.size(), 0);
  EXPECT_EQ(batch.cu_seqlens.to_vector<int32_t>(), I32{0});
}

// Each target's sequence, by its place in the batch; a sequence without a target has none, and a
// shared prefix is no sequence of its own.
TEST(Pack, SegmentsAreTheSequencesOfTheTargets) {
  const std::vector<TokenSequence> sequences = {
      {.tokens = {5, 6, 7, 1}, .loss_mask = {0, 0, 1, 1}, .index = 9, .group = 2, .prefix = 1},
      {.tokens = {5, 8, 9}, .loss_mask = {0, 0, 1}, .index = 8, .group = 2, .prefix = 1},
      {.tokens = {1, 2}, .loss_mask = {1, 0}, .index = 7},
      {.tokens = {3, 4}, .loss_mask = {0, 1}, .index = 6}};
  const PackedBatch batch = pack(sequences);
  EXPECT_EQ(batch.targets.to_vector<int32_t>(), (I32{7, 1, 9, 4}));
  EXPECT_EQ(batch.segments.to_vector<int32_t>(), (I32{0, 0, 1, 3}));
  EXPECT_EQ(batch.segments.dtype(), DType::kI32);
}

// Consecutive sequences of a group are preceded by their shared prefix, packed once.
TEST(Pack, SharesPrefixesWithinAGroup) {
  const auto of_group = [](int64_t group, I32 tokens, int64_t prefix) {
    std::vector<uint8_t> mask(tokens.size(), 0);
    std::fill(mask.begin() + prefix + 1, mask.end(), uint8_t{1});
    return TokenSequence{.tokens = tokens,
                         .loss_mask = mask,
                         .index = tokens.back(),
                         .group = group,
                         .prefix = prefix};
  };
  const std::vector<TokenSequence> sequences = {
      of_group(0, {1, 2, 3, 4, 5}, 2), of_group(0, {1, 2, 3, 6}, 2),    // a prompt of 1, 2, 3
      of_group(1, {7, 8, 9, 10}, 1),                                    // the only one of its group
      of_group(-1, {1, 2, 3, 11}, 2),  of_group(-1, {1, 2, 3, 12}, 2),  // no group
      of_group(2, {13, 14}, 0),        of_group(2, {13, 15}, 0)};       // with nothing to share
  const PackedBatch batch = pack(sequences);
  EXPECT_EQ(batch.tokens.to_vector<int32_t>(),
            (I32{1, 2, 3, 4, 3, 7, 8, 9, 1, 2, 3, 1, 2, 3, 13, 13}));
  EXPECT_EQ(batch.positions.to_vector<int32_t>(),
            (I32{0, 1, 2, 3, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0}));
  EXPECT_EQ(batch.cu_seqlens.to_vector<int32_t>(), (I32{0, 2, 4, 5, 8, 11, 14, 15, 16}));
  EXPECT_EQ(batch.prefixes.to_vector<int32_t>(),
            (I32{0, 0, 0, 2, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(batch.target_positions.to_vector<int32_t>(), (I32{2, 3, 4, 6, 7, 10, 13, 14, 15}));
  EXPECT_EQ(batch.targets.to_vector<int32_t>(), (I32{4, 5, 6, 9, 10, 11, 12, 14, 15}));
  EXPECT_FALSE(pack({sequences.begin() + 1, sequences.end()}).prefixes.defined());
}

TEST(Pack, RefusesPrefixesThatDiffer) {
  std::vector<TokenSequence> two(
      2, {.tokens = {1, 2, 3}, .loss_mask = {0, 0, 1}, .index = 4, .group = 0, .prefix = 1});
  two[1].tokens[0] = 9;
  EXPECT_THROW_WITH(pack(two), Error, "sequences 4 and 4 of group 0 begin with other tokens");
  two[1].tokens[0] = 1;
  two[1].loss_mask[1] = 1;
  EXPECT_THROW_WITH(pack(two), Error, "prefix of 1 of its 3 tokens");
  two[1].loss_mask = {0, 0, 1};
  two[1].prefix = 2;
  EXPECT_THROW_WITH(pack(two), Error, "prefix of 2 of its 3 tokens");
}

// The number of inputs of each sequence, by micro batch.
std::vector<I64> micro_batches(const I64& inputs, int64_t budget) {
  std::vector<TokenSequence> sequences;
  for (const int64_t n : inputs) {
    const auto tokens = static_cast<size_t>(n + 1);
    sequences.push_back({.tokens = I32(tokens), .loss_mask = std::vector<uint8_t>(tokens, 1)});
  }
  std::vector<I64> out;
  for (const PackedBatch& batch : pack_micro_batches(sequences, budget)) {
    const auto begins = batch.cu_seqlens.to_vector<int32_t>();
    I64& lengths = out.emplace_back();
    for (size_t s = 0; s + 1 < begins.size(); ++s) lengths.push_back(begins[s + 1] - begins[s]);
  }
  return out;
}

TEST(PackMicroBatches, AreAsFewAndAsEvenAsTheOrderAllows) {
  using Batches = std::vector<I64>;
  EXPECT_EQ(micro_batches({2, 2, 2, 2, 2}, 8), (Batches{{2, 2, 2}, {2, 2}}));
  EXPECT_EQ(micro_batches({1, 1, 5, 1, 1}, int64_t{1} << 62), (Batches{{1, 1, 5, 1, 1}}));
  EXPECT_EQ(micro_batches({3, 4, 3, 1, 9, 2}, 7), (Batches{{3, 4}, {3, 1}, {9}, {2}}));
  EXPECT_EQ(micro_batches({3, 4}, 7), (Batches{{3, 4}}));
  EXPECT_EQ(micro_batches({100, 1}, 7), (Batches{{100}, {1}}));
  EXPECT_EQ(micro_batches({1, 100, 100, 1}, 7), (Batches{{1}, {100}, {100}, {1}}));
  EXPECT_EQ(micro_batches({}, 7), Batches{});
  EXPECT_THROW_WITH(micro_batches({1}, 0), Error, "positive budget");
}

// Pairs with a shared prefix of 2: their number of sequences, and of inputs, by micro batch.
TEST(PackMicroBatches, GroupsThatAreWholeAreNeverSplit) {
  const auto packed = [](const std::vector<std::pair<int, int>>& pairs, int64_t budget,
                         Groups groups) {
    std::vector<TokenSequence> sequences;
    for (const auto& [chosen, rejected] : pairs)
      for (const int inputs : {chosen, rejected}) {
        const auto tokens = static_cast<size_t>(inputs + 1);
        std::vector<uint8_t> mask(tokens, 1);
        std::fill_n(mask.begin(), 3, 0);
        sequences.push_back({.tokens = I32(tokens),
                             .loss_mask = mask,
                             .group = std::ssize(sequences) / 2,
                             .prefix = 2});
      }
    std::vector<I64> out;
    for (const PackedBatch& batch : pack_micro_batches(sequences, budget, groups))
      out.push_back({batch.segments.to_vector<int32_t>().back() + 1, batch.size()});
    return out;
  };
  using Batches = std::vector<I64>;
  // 4 + 5 - 2 = 7, 6 + 4 - 2 = 8 and 3 + 3 - 2 = 4 inputs.
  const std::vector<std::pair<int, int>> pairs = {{4, 5}, {6, 4}, {3, 3}};
  EXPECT_EQ(packed(pairs, 100, Groups::kWhole), (Batches{{6, 19}}));
  EXPECT_EQ(packed(pairs, 15, Groups::kWhole), (Batches{{2, 7}, {4, 12}}));
  EXPECT_EQ(packed(pairs, 8, Groups::kWhole), (Batches{{2, 7}, {2, 8}, {2, 4}}));
  EXPECT_EQ(packed(pairs, 1, Groups::kWhole), (Batches{{2, 7}, {2, 8}, {2, 4}}));
  EXPECT_EQ(packed(pairs, 1, Groups::kMaySplit).size(), 6u);
}

}  // namespace
}  // namespace cohort
