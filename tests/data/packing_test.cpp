// Packing: inputs, targets, positions and boundaries of sequences laid end to end.
#include "data/packing.h"

#include "tests/support/test_util.h"

namespace cohort {
namespace {

using I32 = std::vector<int32_t>;
using I64 = std::vector<int64_t>;

TEST(Pack, LaysSequencesEndToEnd) {
  const std::vector<TokenSequence> sequences = {
      {.tokens = {5, 6, 7, 8}, .loss_mask = {1, 0, 1, 1}, .number = 40},
      {.tokens = {9, 10}, .loss_mask = {0, 1}, .number = 7},
      {.tokens = {1, 2, 3}, .loss_mask = {0, 0, 0}, .number = int64_t{1} << 40}};
  const PackedBatch batch = pack(sequences);
  EXPECT_EQ(batch.size(), 6);
  EXPECT_EQ(batch.num_targets, 3);
  EXPECT_EQ(batch.tokens.to_vector<int32_t>(), (I32{5, 6, 7, 9, 1, 2}));
  EXPECT_EQ(batch.targets.to_vector<int32_t>(), (I32{-1, 7, 8, 10, -1, -1}));
  EXPECT_EQ(batch.positions.to_vector<int32_t>(), (I32{0, 1, 2, 0, 0, 1}));
  EXPECT_EQ(batch.sequences.to_vector<int64_t>(),
            (I64{40, 40, 40, 7, int64_t{1} << 40, int64_t{1} << 40}));
  EXPECT_EQ(batch.cu_seqlens.to_vector<int32_t>(), (I32{0, 3, 4, 6}));
  for (const Tensor& t : {batch.tokens, batch.targets, batch.positions, batch.cu_seqlens})
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

TEST(SplitByTokens, FillsRunsGreedilyInOrder) {
  EXPECT_EQ(split_by_tokens(I64{3, 4, 3, 1, 9, 2}, 7), (I64{0, 2, 4, 5, 6}));
  EXPECT_EQ(split_by_tokens(I64{3, 4}, 7), (I64{0, 2}));
  EXPECT_EQ(split_by_tokens(I64{100, 1}, 7), (I64{0, 1, 2}));
  EXPECT_EQ(split_by_tokens(I64{1, 100, 100, 1}, 7), (I64{0, 1, 2, 3, 4}));
  EXPECT_EQ(split_by_tokens(I64{}, 7), I64{0});
  EXPECT_THROW_WITH(split_by_tokens(I64{1}, 0), Error, "positive budget");
}

}  // namespace
}  // namespace cohort
