// Int8 attention (AttentionDesc::q_scales) on the CPU.
#include "tests/kernels/attention_int8.h"

#include <functional>
#include <numbers>

#include "kernels/vector_math.h"
#include "tests/kernels/attention_paged_cases.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::test {
namespace {

using kernels::AttentionDesc;
using kernels::Mask;

TEST(AttentionInt8, IsAttentionOfWhatItsOperandsStandFor) {
  struct Row {
    int64_t heads, kv_heads, dim;
    Mask mask;
    std::vector<SequenceSpec> sequences;
  };
  for (const Row& row :
       {Row{2, 2, 16, Mask::kCausal, {{1, 1}, {2, 300}, {3, 0}, {4, 17}}},
        Row{6, 2, 128, Mask::kFull, {{1, 127}, {2, 129}}}, Row{3, 1, 132, Mask::kCausal, {{5, 70}}},
        Row{1, 1, 4, Mask::kCausal, {{6, kernels::kAttentionChunk + 200}}}})
    for (const double scale : {0.0, 0.7}) {
      SCOPED_TRACE(str("heads of ", row.dim, ", scale ", scale));
      const AttentionCase c = in_int8(make_case({.heads = row.heads,
                                                 .kv_heads = row.kv_heads,
                                                 .dim = row.dim,
                                                 .mask = row.mask,
                                                 .scale = scale},
                                                row.sequences));
      const AttentionOutput expected = naive_attention(int8_operands(c)), got = run_forward(c);
      EXPECT_LT(relative_error(got.o, expected.o), 1e-12);
      EXPECT_LT(relative_error(got.lse, expected.lse), 1e-12);
      AttentionCase narrow = c;
      narrow.v = c.v.to(DType::kF32);
      EXPECT_LT(relative_error(run_forward(narrow).o, expected.o), 1e-5);
    }
}

// The log-sum-exp of a row of one key is its score: the exact sum, and two products, each rounded.
TEST(AttentionInt8, SumsOfIntegersAreExact) {
  const int64_t tokens = 50, dim = 256;
  AttentionCase c = in_int8(make_case({.heads = 1, .kv_heads = 1, .dim = dim, .dtype = DType::kF32},
                                      std::vector<SequenceSpec>(tokens, {1, 1})));
  Rng rng(3, rng_stream(kTestPurpose, 9));
  for (Tensor* t : {&c.q, &c.k})
    for (int64_t i = 0; i < t->numel(); ++i)
      t->data<int8_t>()[i] = static_cast<int8_t>(i < dim ? -128 : rng.below(256) - 128);
  for (int64_t t = 0; t < tokens; ++t) {
    c.desc.q_scales.data<float>()[t] = static_cast<float>(0.001 + 0.1 * rng.uniform());
    c.desc.k_scales.data<float>()[t] = static_cast<float>(0.001 + 0.1 * rng.uniform());
  }
  const std::vector<float> lse = run_forward(c).lse.to_vector<float>();
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t sum = 0;
    for (int64_t d = 0; d < dim; ++d)
      sum += int64_t{c.q.data<int8_t>()[t * dim + d]} * c.k.data<int8_t>()[t * dim + d];
    const float z = static_cast<float>(sum) * c.desc.k_scales.data<float>()[t],
                factor =
                    static_cast<float>(std::numbers::log2e / 16) * c.desc.q_scales.data<float>()[t];
    const float r = z * factor, l = kernels::vexp2(std::fma(z, factor, -r));
    EXPECT_EQ(lse[static_cast<size_t>(t)],
              std::fma(r, static_cast<float>(std::numbers::ln2), std::log(l)));
  }
}

TEST(AttentionInt8, IsNearAttentionInFullPrecision) {
  for (const Mask mask : {Mask::kCausal, Mask::kFull})
    for (const int64_t dim : {64, 128}) {
      const AttentionCase c = make_case({.heads = 4, .kv_heads = 2, .dim = dim, .mask = mask},
                                        {{1, 200}, {2, 5}, {3, 130}});
      const double error = relative_error(run_forward(in_int8(c)).o, run_forward(c).o);
      EXPECT_LT(error, 2e-2);
      EXPECT_GT(error, 1e-3);
    }
}

// The mean of all keys changes no probability, but takes most of the range of i8.
TEST(AttentionInt8, KeysWithoutTheirMeanAreNearer) {
  const AttentionCase c = make_case({.heads = 2, .kv_heads = 1, .dim = 64}, {{1, 200}});
  AttentionCase shifted = c;
  const Tensor mean = random_tensor({64}, DType::kF64, 77, 8);
  shifted.k = c.k.clone();
  for (int64_t i = 0; i < shifted.k.numel(); ++i)
    shifted.k.data<double>()[i] += mean.data<double>()[i % 64];
  const Tensor expected = run_forward(c).o;
  EXPECT_LT(relative_error(run_forward(shifted).o, expected), 1e-12);
  const double with = relative_error(run_forward(in_int8(shifted)).o, expected),
               without = relative_error(run_forward(in_int8(c)).o, expected);
  EXPECT_LT(3 * without, with);
}

TEST(AttentionInt8, RowsThatSeeAScaleOfNaNAreNaN) {
  const int64_t chunk = kernels::kAttentionChunk;
  const AttentionCase c =
      in_int8(make_case({.heads = 2, .kv_heads = 2, .dim = 8, .dtype = DType::kF32},
                        {{1, 9}, {2, chunk + 3}, {3, 20}}));
  const AttentionOutput expected = run_forward(c);
  for (const int64_t at : {int64_t{0}, int64_t{5}, chunk, chunk + 2}) {
    SCOPED_TRACE(str("position ", at));
    const int64_t token = 9 + at;
    expect_nan_rows(run_forward(with_nan_scale(c, &AttentionDesc::k_scales, token, 1)), expected,
                    {.token = token, .end = 9 + chunk + 3, .head = 1, .heads = 1});
    expect_nan_rows(run_forward(with_nan_scale(c, &AttentionDesc::q_scales, token, 1)), expected,
                    {.token = token, .end = token + 1, .head = 1, .heads = 1});
  }
}

TEST(AttentionInt8, WhatItDoesNotSupportIsAnError) {
  const AttentionCase plain = make_case({.heads = 4, .kv_heads = 2, .dim = 16}, {{1, 20}, {2, 9}}),
                      c = in_int8(plain);
  const std::function<void(AttentionDesc&)> changes[] = {
      [](auto& d) { d.window = 30; },
      [](auto& d) { d.mask = Mask::kFull, d.window_right = 3; },
      [](auto& d) { d.soft_cap = 5; },
      [](auto& d) {
        d.distance = {0.5, 0.1};
      },
      [](auto& d) { d.slopes = random_tensor({4}, DType::kF64, 1); },
      [](auto& d) {
        d.bias = random_tensor({4, 5}, DType::kF64, 1);
      },
      [](auto& d) { d.sinks = random_tensor({4}, DType::kF64, 1); },
      [](auto& d) {
        d.prefix_lm = Tensor::from(std::vector<int32_t>{3, 2});
      },
      [](auto& d) {
        d.prefixes = Tensor::zeros({2, 2}, DType::kI32);
      },
      [](auto& d) { d.tiles = kernels::make_tile_mask({}, 1); },
      [](auto& d) { d.fp8_scales = some_scales(2, 4); }};
  for (const auto& change : changes) {
    AttentionCase bad = c;
    change(bad.desc);
    EXPECT_THROW_WITH(run_forward(bad), Error, "int8 attention has a causal or full mask only");
  }
  AttentionCase dropped = make_case({.heads = 4, .kv_heads = 2, .dim = 16, .p = 0.1}, {{1, 20}});
  EXPECT_THROW_WITH(run_forward(in_int8(dropped)), Error, "no window, dropout");
  for (Tensor AttentionDesc::*scales : {&AttentionDesc::q_scales, &AttentionDesc::k_scales}) {
    AttentionCase without = c, with = plain, wrong = c;
    without.desc.*scales = {};
    EXPECT_THROW_WITH(run_forward(without), Error, "with q and k in i8, and only then");
    with.desc.*scales = c.desc.*scales;
    EXPECT_THROW_WITH(run_forward(with), Error, "with q and k in i8, and only then");
    wrong.desc.*scales = Tensor::full({29, 3}, 1, DType::kF32);
    EXPECT_THROW(run_forward(wrong), Error);
  }
  AttentionCase mixed = c;
  mixed.k = plain.k;
  EXPECT_THROW(run_forward(mixed), Error);
  AttentionOutput out = run_forward(c);
  EXPECT_THROW_WITH(run_backward(c, out), Error, "attention_backward");
  AttentionCase cached = make_case({.heads = 4, .kv_heads = 2, .dim = 16}, {{1, 20}});
  cached.desc.q_scales = Tensor::full({20, 4}, 1, DType::kF32);
  Rng rng(1, rng_stream(kTestPurpose, 9));
  EXPECT_THROW(run_in_random_steps(cached, 16, rng), Error);
}

}  // namespace
}  // namespace cohort::test
