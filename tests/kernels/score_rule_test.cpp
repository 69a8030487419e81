// The rule of attention's kernels against the definition, row by row and key by key.
#include "kernels/attention/score_rule.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

constexpr int kKeys = 40;

// The definition (AttentionDesc).
bool sees(const AttentionDesc& desc, int position, int key) {
  if (desc.mask == Mask::kFull) return true;
  return key <= position && (desc.window == 0 || key > position - desc.window);
}

std::vector<AttentionDesc> descs() {
  return {{},
          {.window = 1},
          {.window = 7},
          {.window = kKeys - 1},
          {.window = int64_t{1} << 40},
          {.mask = Mask::kFull}};
}

TEST(ScoreRule, MasksWhatARowDoesNotSee) {
  for (const AttentionDesc& desc : descs()) {
    const WindowRule<float> rule(desc, 16);
    for (int position = 0; position < kKeys; ++position)
      for (int key = 0; key < kKeys; ++key) {
        const bool hidden = !sees(desc, position, key);
        EXPECT_EQ(rule.masked(position, key), hidden) << position << " " << key;
        EXPECT_EQ(rule.outside(key, rule.end_key(position, kKeys)), hidden);
        EXPECT_EQ(rule.is_later(position, key), desc.mask == Mask::kCausal && key > position);
        EXPECT_EQ(rule.key_mask(position - 5, key, true).hides(5), hidden);
        EXPECT_TRUE(rule.key_mask(position - 5, key, false).hides(5));
        const PlainRule<float> plain(desc, 16);
        EXPECT_TRUE(!plain.applies(desc, kKeys) || plain.masked(position, key) == hidden);
      }
  }
}

// Ranges of keys and of positions, from which loops over tiles are made, are as short as possible.
TEST(ScoreRule, RangesHoldWhatIsSeenAndNoMore) {
  for (const AttentionDesc& desc : descs()) {
    const WindowRule<double> rule(desc, 16);
    const PlainRule<double> plain(desc, 16);
    for (int first = 0; first < kKeys; ++first)
      for (int end = first + 1; end <= kKeys; ++end) {
        IndexRange<int> keys{kKeys, 0}, positions{kKeys, 0};
        bool all = true;
        for (int i = first; i < end; ++i)
          for (int j = 0; j < kKeys; ++j) {
            if (sees(desc, i, j)) keys = {std::min(keys.first, j), std::max(keys.end, j + 1)};
            if (sees(desc, j, i))
              positions = {std::min(positions.first, j), std::max(positions.end, j + 1)};
          }
        const IndexRange<int> range{first, end}, half{first, (first + end + 1) / 2};
        EXPECT_EQ(rule.keys_of(range, kKeys).first, keys.first);
        EXPECT_EQ(rule.keys_of(range, kKeys).end, keys.end);
        EXPECT_EQ(rule.positions_of(range, kKeys).first, positions.first);
        EXPECT_EQ(rule.positions_of(range, kKeys).end, positions.end);
        for (int i = first; i < end; ++i)
          for (int j = half.first; j < half.end; ++j) all = all && sees(desc, i, j);
        EXPECT_EQ(rule.sees_all(range, half), all);
        EXPECT_TRUE(!plain.applies(desc, kKeys) || plain.sees_all(range, half) == all);
      }
  }
  const IndexRange<int> tiles = IndexRange<int>{130, 257}.tiles(128);
  EXPECT_EQ(tiles.first, 1);
  EXPECT_EQ(tiles.end, 3);
}

TEST(ScoreRule, SequencesFollowTheirPrefix) {
  const Tensor cu = Tensor::from(std::vector<int32_t>{0, 5, 8, 10});
  const AttentionDesc desc{.prefixes =
                               Tensor::from(std::vector<int32_t>{0, 0, 0, 5, 0, 5}, {3, 2})};
  const PackedSequences sequences(cu, desc);
  EXPECT_EQ(sequences.count, 3);
  EXPECT_FALSE(sequences.has_prefix(0));
  EXPECT_TRUE(sequences.has_prefix(2));
  EXPECT_EQ(sequences[0].keys(), 5);
  const PackedSequence second = sequences[2];
  EXPECT_EQ(second.keys(), 7);
  EXPECT_EQ(second.position(1), 6);
  const KeyOffsets offsets = second.offsets(10);
  const int tokens[] = {0, 1, 2, 3, 4, 8, 9};
  for (int key = 0; key < 7; ++key) {
    EXPECT_EQ(second.token(key), tokens[key]);
    EXPECT_EQ(offsets(key), 10 * (tokens[key] - second.first_token()));
  }
  EXPECT_TRUE(offsets.adjacent(1, 5));
  EXPECT_FALSE(offsets.adjacent(4, 6));
  EXPECT_TRUE(offsets.adjacent(5, 7));
  const IndexRange<int> rows = second.rows(IndexRange<int>{3, 7});
  EXPECT_EQ(rows.first, 0);
  EXPECT_EQ(rows.end, 2);
}

TEST(ScoreRule, HasTheScale) {
  const WindowRule<double> rule({}, 16), scaled({.scale = 0.5}, 16);
  EXPECT_EQ(rule.scale, 0.25);
  EXPECT_EQ(scaled.exponent, 0.5 * kLog2e);
}

TEST(ScoreRule, DropsTheAddressedElements) {
  const AttentionDesc desc{.dropout = {.p = 0.3,
                                       .seed = 11,
                                       .stream = 5,
                                       .sequences = Tensor::from(std::vector<int64_t>{4, 9}),
                                       .positions = Tensor::from(std::vector<int32_t>{0, 3})}};
  const DropoutRule<double> rule(desc, 16);
  EXPECT_TRUE(rule.drops());
  EXPECT_FALSE((DropoutRule<double>({}, 16).drops()));
  double factors[12];
  rule.fill_factors(factors, 1, 2, 8, 10);
  for (uint64_t j = 0; j < 12; ++j)
    EXPECT_EQ(factors[j],
              dropout_keep(11, 5, 9, 3, uint64_t{2} << 32 | (8 + j), 0.3f) ? 1 / 0.7 : 0);
}

// Each call by the first of the rules that serves it; those behind it serve it too.
TEST(ScoreRule, EachCallHasItsRules) {
  const Tensor one = Tensor::zeros({1}, DType::kF32);
  const auto first_rule = [](const AttentionDesc& desc) {
    const bool serves[] = {
        PlainRule<float>::applies(desc, kKeys), WindowRule<float>::applies(desc, kKeys),
        MaskRule<float>::applies(desc, kKeys), ModifyRule<float>::applies(desc, kKeys),
        DropoutRule<float>::applies(desc, kKeys)};
    EXPECT_TRUE(std::is_sorted(std::begin(serves), std::end(serves)));
    return std::find(std::begin(serves), std::end(serves), true) - std::begin(serves);
  };
  EXPECT_EQ(first_rule({}), 0);
  EXPECT_EQ(first_rule({.mask = Mask::kFull}), 0);
  EXPECT_EQ(first_rule({.window = kKeys}), 0);
  EXPECT_EQ(first_rule({.window = kKeys - 1}), 1);
  EXPECT_EQ(first_rule({.prefixes = Tensor::from(std::vector<int32_t>{0, 0}, {1, 2})}), 1);
  EXPECT_EQ(first_rule({.mask = Mask::kFull, .window = 3}), 2);
  EXPECT_EQ(first_rule({.mask = Mask::kFull, .window_right = 0}), 2);
  AttentionDesc desc;
  for (Tensor AttentionDesc::*option :
       {&AttentionDesc::sinks, &AttentionDesc::prefix_lm, &AttentionDesc::tiles}) {
    desc = {};
    desc.*option = one;
    EXPECT_EQ(first_rule(desc), 2);
  }
  for (Tensor AttentionDesc::*option : {&AttentionDesc::slopes, &AttentionDesc::bias}) {
    desc = {};
    desc.*option = one;
    EXPECT_EQ(first_rule(desc), 3);
  }
  EXPECT_EQ(first_rule({.soft_cap = 5}), 3);
  EXPECT_EQ(first_rule({.distance = {.floor = 0.5}}), 3);
  EXPECT_EQ(first_rule({.dropout = {.p = 0.1}}), 4);
  desc.dropout.p = 0.1;
  EXPECT_EQ(first_rule(desc), 4);
}

}  // namespace
}  // namespace cohort::kernels
