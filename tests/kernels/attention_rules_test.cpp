// Masks and modifications of scores: values and gradients against the definition, central
// differences in f64, and the invariances of bits.
#include "tests/kernels/attention_rules.h"
#include "core/parallel.h"
#include "kernels/attention/score_rule.h"
#include "tests/kernels/attention_paged_cases.h"

namespace cohort::test {
namespace {

using kernels::AttentionDesc;
using kernels::Grad;
using kernels::Mask;

const std::vector<SequenceSpec> kMixed = {{0, 0}, {1, 1}, {2, 130}, {3, 17}, {4, 270}};

TEST(AttentionRules, ForwardAndBackwardFollowTheDefinition) {
  const std::vector<SequenceSpec> few = {{1, 1}, {4, 150}};
  for (const int64_t dim : {8, 130})
    for (const RuleCase& rule :
         rule_cases({.heads = 2, .kv_heads = 1, .dim = dim}, dim == 8 ? kMixed : few)) {
      SCOPED_TRACE(rule.name);
      const AttentionCase& c = rule.attention;
      const EagerAttention expected = eager_attention(c, DType::kF64);
      const AttentionOutput out = run_forward(c);
      EXPECT_LT(relative_error(out.o, expected.out.o), 1e-12);
      const auto lse = out.lse.to_vector<double>(),
                 expected_lse = expected.out.lse.to_vector<double>();
      for (size_t i = 0; i < lse.size(); ++i)
        if (std::isinf(expected_lse[i]))
          ASSERT_EQ(lse[i], expected_lse[i]);
        else
          ASSERT_NEAR(lse[i], expected_lse[i], 1e-11);
      const RuleGrads g = run_rule_backward(c, out);
      EXPECT_LT(relative_error(g.grads.dq, expected.grads.dq), 1e-11);
      EXPECT_LT(relative_error(g.grads.dk, expected.grads.dk), 1e-11);
      EXPECT_LT(relative_error(g.grads.dv, expected.grads.dv), 1e-11);
      if (g.dbias.defined()) {
        EXPECT_LT(relative_error(g.dbias, expected.dbias), 1e-11);
      }
      if (g.dsinks.defined()) {
        EXPECT_LT(relative_error(g.dsinks, expected.dsinks), 1e-11);
      }
    }
}

TEST(AttentionRules, GradientsAreCentralDifferences) {
  for (const RuleCase& rule :
       rule_cases({.heads = 2, .kv_heads = 1, .dim = 6}, {{1, 3}, {2, 0}, {4, 270}})) {
    SCOPED_TRACE(rule.name);
    AttentionCase c = rule.attention;
    const RuleGrads g = run_rule_backward(c, run_forward(c));
    Rng rng(1, rng_stream(kTestPurpose, 6));
    const auto check = [&](const char* name, const Tensor& x, const Tensor& grad) {
      if (!grad.defined()) return;
      double largest = 0;
      for (const double e : grad.to_vector<double>()) largest = std::max(largest, std::fabs(e));
      for (int sample = 0; sample < 4; ++sample) {
        const int64_t i = rng.below(x.numel());
        const double a = grad.data<double>()[i],
                     n = numeric_gradient(c, const_cast<double*>(x.data<double>()) + i);
        EXPECT_LE(std::fabs(a - n), 1e-6 * std::max(std::fabs(a), std::fabs(n)) + 1e-8 * largest)
            << name << "[" << i << "]: " << a << " against " << n;
      }
    };
    check("dq", c.q, g.grads.dq);
    check("dk", c.k, g.grads.dk);
    check("dv", c.v, g.grads.dv);
    check("dbias", c.desc.bias, g.dbias);
    check("dsinks", c.desc.sinks, g.dsinks);
  }
}

TEST(AttentionRules, HoldUnderDropout) {
  for (RuleCase& rule : rule_cases({.heads = 2, .kv_heads = 1, .dim = 6, .p = 0.3}, {{4, 150}})) {
    SCOPED_TRACE(rule.name);
    AttentionCase& c = rule.attention;
    c.desc.dropout = make_case(c.shape, c.sequences).desc.dropout;
    const RuleGrads g = run_rule_backward(c, run_forward(c));
    const auto check = [&](const Tensor& x, const Tensor& grad) {
      if (!grad.defined()) return;
      const int64_t i = grad.numel() / 2 + 1;
      const double a = grad.data<double>()[i],
                   n = numeric_gradient(c, const_cast<double*>(x.data<double>()) + i);
      EXPECT_NEAR(a, n, 1e-6 * std::fabs(n) + 1e-8);
    };
    check(c.q, g.grads.dq);
    check(c.k, g.grads.dk);
    check(c.v, g.grads.dv);
    check(c.desc.bias, g.dbias);
  }
}

// Prefill and decode steps of random sizes; those of a causal mask without prefix-LM.
TEST(AttentionRules, PagedBitsAreThoseOfTheForward) {
  Rng rng(3, rng_stream(kTestPurpose, 7));
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const RuleCase& rule : rule_cases({.heads = 6, .kv_heads = 2, .dim = 20}, kMixed)) {
      const AttentionCase c = rule_case_in(rule.attention, dtype);
      if (c.desc.mask != Mask::kCausal || c.desc.prefix_lm.defined()) continue;
      SCOPED_TRACE(rule.name);
      EXPECT_TRUE(bit_equal(run_in_random_steps(c, 16, rng), run_forward(c).o));
    }
}

// Groups that share a prefix compute what separate sequences do.
TEST(AttentionRules, SharedPrefixesHaveTheBitsOfSeparateSequences) {
  for (const RuleCase& rule : rule_cases({.heads = 4, .kv_heads = 2, .dim = 10}, {{7, 210}})) {
    const AttentionCase& whole = rule.attention;
    if (whole.desc.mask != Mask::kCausal || whole.desc.prefix_lm.defined() ||
        whole.desc.tiles.defined())
      continue;
    SCOPED_TRACE(rule.name);
    AttentionCase split = whole;
    split.cu = Tensor::from(std::vector<int32_t>{0, 130, 210});
    split.desc.prefixes = Tensor::from(std::vector<int32_t>{0, 0, 0, 130}, {2, 2});
    const AttentionOutput out = run_forward(split), expected = run_forward(whole);
    EXPECT_TRUE(bit_equal(out.o, expected.o) && bit_equal(out.lse, expected.lse));
    const RuleGrads g = run_rule_backward(split, out), e = run_rule_backward(whole, expected);
    EXPECT_LT(relative_error(g.grads.dq, e.grads.dq), 1e-13);
    EXPECT_LT(relative_error(g.grads.dk, e.grads.dk), 1e-13);
    EXPECT_LT(relative_error(g.grads.dv, e.grads.dv), 1e-13);
    if (g.dbias.defined()) {
      EXPECT_LT(relative_error(g.dbias, e.dbias), 1e-13);
    }
  }
}

TEST(AttentionRules, BitsDoNotDependOnThreads) {
  const int before = num_threads();
  for (const RuleCase& rule : rule_cases({.heads = 6, .kv_heads = 2, .dim = 20}, kMixed)) {
    SCOPED_TRACE(rule.name);
    const AttentionCase c = rule_case_in(rule.attention, DType::kF32);
    const AttentionOutput out = run_forward(c);
    set_num_threads(1);
    const RuleGrads one = run_rule_backward(c, out);
    set_num_threads(3);
    const RuleGrads three = run_rule_backward(c, out);
    EXPECT_TRUE(bit_equal(one.grads.dq, three.grads.dq) &&
                bit_equal(one.grads.dk, three.grads.dk) && bit_equal(one.grads.dv, three.grads.dv));
    for (const auto& [a, b] : {std::pair(one.dbias, three.dbias), {one.dsinks, three.dsinks}})
      EXPECT_TRUE(!a.defined() || bit_equal(a, b));
  }
  set_num_threads(before);
}

// A tile that a row does not see leaves its state untouched: the keys of the visible tiles, moved
// together into a sequence of their own, give the same bits.
TEST(AttentionRules, InvisibleTilesChangeNoBit) {
  constexpr int64_t kTiles = 6, kTile = kernels::kMaskTile;
  AttentionCase c = in_f32(make_case({.heads = 2, .kv_heads = 1, .dim = 12, .mask = Mask::kFull},
                                     {{1, kTiles * kTile}}));
  c.desc.tiles = sparse_tiles(kTiles);
  const AttentionOutput out = run_forward(c);
  const AttentionGrads grads = run_backward(c, out);
  const Tensor words = c.desc.tiles;
  for (int64_t row = 0; row < kTiles; ++row) {
    std::vector<int64_t> tiles;
    for (int64_t t = 0; t < kTiles; ++t)
      if ((words.data<int32_t>()[row] >> t & 1) != 0) tiles.push_back(t);
    const Tensor own = out.o.narrow(0, row * kTile, kTile);
    if (tiles.empty()) {
      EXPECT_TRUE(bit_equal(own, Tensor::zeros(own.shape(), DType::kF32)));
      continue;
    }
    AttentionCase dense =
        in_f32(make_case({.heads = 2, .kv_heads = 1, .dim = 12, .mask = Mask::kFull},
                         {{1, std::ssize(tiles) * kTile}}));
    const auto gather = [&](Tensor to, const Tensor& from) {
      for (int64_t i = 0; i < std::ssize(tiles); ++i)
        to.narrow(0, i * kTile, kTile)
            .copy_(from.narrow(0, tiles[static_cast<size_t>(i)] * kTile, kTile));
    };
    gather(dense.k, c.k);
    gather(dense.v, c.v);
    dense.q.narrow(0, 0, kTile).copy_(c.q.narrow(0, row * kTile, kTile));
    dense.dout.narrow(0, 0, kTile).copy_(c.dout.narrow(0, row * kTile, kTile));
    const AttentionOutput expected = run_forward(dense);
    EXPECT_TRUE(bit_equal(own, expected.o.narrow(0, 0, kTile)));
    EXPECT_TRUE(bit_equal(grads.dq.narrow(0, row * kTile, kTile),
                          run_backward(dense, expected).dq.narrow(0, 0, kTile)));
  }
}

// Tiles that are all visible, and windows that hide nothing, are as good as none.
TEST(AttentionRules, RulesWithoutEffectChangeNoBit) {
  for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
    const AttentionCase plain = in_f32(make_case(
        {.heads = 2, .kv_heads = 1, .dim = 12, .mask = mask, .p = 0.2}, {{1, 300}, {2, 5}}));
    const AttentionOutput expected = run_forward(plain);
    const AttentionGrads grads = run_backward(plain, expected);
    std::vector<std::pair<int64_t, int64_t>> all;
    for (int64_t i = 0; i < 9; ++i) all.emplace_back(i / 3, i % 3);
    const Tensor zeros = Tensor::zeros({2}, DType::kF32);
    for (int rule = 0; rule < 5; ++rule) {
      AttentionCase c = plain;
      if (rule == 0) c.desc.tiles = kernels::make_tile_mask(all, 3);
      if (rule == 1) c.desc.window = 300;
      if (rule == 2 && mask == Mask::kFull) c.desc.window_right = 299;
      if (rule == 3) c.desc.slopes = zeros;
      if (rule == 4) c.desc.bias = Tensor::zeros({2, 7}, DType::kF32);
      const AttentionOutput out = run_forward(c);
      EXPECT_TRUE(bit_equal(out.o, expected.o) && bit_equal(out.lse, expected.lse)) << rule;
      const RuleGrads g = run_rule_backward(c, out);
      EXPECT_TRUE(bit_equal(g.grads.dq, grads.dq) && bit_equal(g.grads.dk, grads.dk) &&
                  bit_equal(g.grads.dv, grads.dv))
          << rule;
    }
  }
}

// The bits of the next row of the mask, and what follows it, do not count.
TEST(AttentionRules, SequencesMayBeLongerThanTheTileMask) {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (int64_t i = 0; i < 20 * 20; ++i) all.emplace_back(i / 20, i % 20);
  const Tensor tiles = kernels::make_tile_mask(all, 20);
  const kernels::MaskRule<double> rule({.mask = Mask::kFull, .tiles = tiles}, 16);
  EXPECT_EQ(rule.count_tiles(0, 1, 40), 19);
  EXPECT_EQ(rule.count_tiles(19 * kernels::kMaskTile, 0, 400), 20);
  EXPECT_EQ(rule.count_tiles(0, 32, 40), 0);
}

// Bits behind the last tile of a row are padding: with a value in them the mask stays the one of
// the tiles, in the loops over tiles and in the number of blocks that add to a tile of dQ.
TEST(AttentionRules, PaddingBitsOfATileMaskAreNoTiles) {
  constexpr int kTile = static_cast<int>(kernels::kMaskTile);
  for (const int tiles : {1, 5, 32, 33}) {
    SCOPED_TRACE(tiles);
    std::vector<std::pair<int64_t, int64_t>> visible;
    for (int i = 0; i < tiles; ++i) visible.emplace_back(i, 0);
    const Tensor mask = kernels::make_tile_mask(visible, tiles);
    Tensor padded = mask.clone();
    if (tiles % 32 != 0)
      for (int64_t i = padded.dim(1) - 1; i < padded.numel(); i += padded.dim(1))
        padded.data<int32_t>()[i] |= static_cast<int32_t>(~0u << tiles % 32);
    const int past = tiles * kTile, end = past + 40 * kTile;
    for (const Tensor* t : {&mask, static_cast<const Tensor*>(&padded)}) {
      const kernels::MaskRule<double> rule({.mask = Mask::kFull, .tiles = *t}, 16);
      EXPECT_EQ(rule.next_key({0, kTile}, 5, end), 5);
      for (const int key : {kTile, past - 1, past, past + 1, past + 35 * kTile})
        EXPECT_EQ(rule.next_key({0, kTile}, std::max(key, kTile), end), end) << key;
      EXPECT_EQ(rule.next_key({past, past + kTile}, 0, end), end);
      EXPECT_EQ(rule.count_tiles(0, 0, tiles + 40), 1);
      EXPECT_EQ(rule.count_tiles(0, 1, tiles + 40), 0);
      EXPECT_EQ(rule.count_tiles(0, tiles + 1, tiles + 40), 0);
    }
  }
}

TEST(AttentionRules, TransposedTileMasksExchangeQueriesAndKeys) {
  Rng rng(4, rng_stream(kTestPurpose, 12));
  for (const int64_t tiles : {0, 1, 5, 31, 32, 33, 64, 70}) {
    std::vector<std::pair<int64_t, int64_t>> visible, exchanged;
    for (int64_t i = 0; i < tiles * tiles; ++i)
      if (rng.uniform() < 0.3) {
        visible.emplace_back(i / tiles, i % tiles);
        exchanged.emplace_back(i % tiles, i / tiles);
      }
    const Tensor mask = kernels::make_tile_mask(visible, tiles);
    Tensor transposed = Tensor::empty_like(mask);
    kernels::transpose_tile_mask({.to = transposed, .from = mask});
    EXPECT_TRUE(bit_equal(transposed, kernels::make_tile_mask(exchanged, tiles))) << tiles;
  }
}

TEST(AttentionRules, TokensNeedASequence) {
  AttentionCase c = make_case({.heads = 2, .kv_heads = 1, .dim = 4}, {{1, 5}});
  const AttentionOutput out = run_forward(c);
  c.cu = Tensor::from(std::vector<int32_t>{0});
  EXPECT_THROW_WITH(run_forward(c), Error,
                    "expected cu_seqlens [S + 1] with a sequence for 5 tokens");
  EXPECT_THROW_WITH(run_backward(c, out), Error, "with a sequence for 5 tokens");
  AttentionCase none = make_case({.heads = 2, .kv_heads = 1, .dim = 4}, {});
  EXPECT_EQ(run_forward(none).o.numel(), 0);
}

TEST(AttentionRules, TermsAccumulate) {
  for (const RuleCase& rule : rule_cases({.heads = 2, .kv_heads = 1, .dim = 6}, {{4, 40}})) {
    const AttentionCase& c = rule.attention;
    if (!c.desc.bias.defined() || !c.desc.sinks.defined()) continue;
    const AttentionOutput out = run_forward(c);
    RuleGrads g = run_rule_backward(c, out), more = run_rule_backward(c, out);
    kernels::attention_backward({{g.grads.dq},
                                 {g.grads.dk},
                                 {g.grads.dv},
                                 c.dout,
                                 c.q,
                                 c.k,
                                 c.v,
                                 out.o,
                                 out.lse,
                                 c.cu,
                                 c.desc,
                                 kernels::GradOut{more.dbias, Grad::kAccumulate},
                                 kernels::GradOut{more.dsinks, Grad::kAccumulate}});
    for (const auto& [sum, once] : {std::pair(more.dbias, g.dbias), {more.dsinks, g.dsinks}})
      for (int64_t i = 0; i < sum.numel(); ++i)
        EXPECT_NEAR(sum.data<double>()[i], 2 * once.data<double>()[i], 1e-13);
  }
}

TEST(AttentionRules, SaysWhatIsWrong) {
  const AttentionCase c = make_case({.heads = 2, .kv_heads = 1, .dim = 4}, {{1, 5}});
  const auto expect = [&](const AttentionDesc& desc, const char* message) {
    AttentionCase bad = c;
    bad.desc = desc;
    EXPECT_THROW_WITH(run_forward(bad), Error, message);
  };
  expect({.window_right = 3}, "expected a right window of at least 0 with a full mask");
  expect({.soft_cap = -1}, "expected a soft cap above 0");
  expect({.distance = {1.5, 0}}, "expected a distance factor");
  expect({.distance = {0.5, -1}}, "expected a distance factor");
  expect({.slopes = Tensor::zeros({3}, DType::kF64)}, "slopes");
  expect({.bias = Tensor::zeros({2, 4}, DType::kF64)}, "expected bias f64[2, 3] = [H, 2 R + 1]");
  expect({.sinks = Tensor::zeros({2}, DType::kF32)}, "sinks");
  expect({.mask = Mask::kFull, .prefix_lm = Tensor::from(std::vector<int32_t>{2})},
         "expected a causal mask, no window");
  expect({.tiles = Tensor::zeros({3, 2}, DType::kI32)}, "expected tiles of make_tile_mask()");
  expect({.tiles = Tensor::zeros({3, 1}, DType::kI64)}, "tiles");
  const std::pair<int64_t, int64_t> outside[] = {{0, 4}};
  EXPECT_THROW_WITH(kernels::make_tile_mask(outside, 4), Error, "expected tiles from 0 to 3");
}

}  // namespace
}  // namespace cohort::test
