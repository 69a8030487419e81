// FP8 attention (AttentionDesc::fp8_scales) on the CPU.
#include "tests/kernels/attention_fp8.h"
#include "tests/kernels/attention_paged_cases.h"
#include "tests/kernels/attention_prefix_cases.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::test {
namespace {

using kernels::kAttentionChunk;

TEST(AttentionFp8, IsItsDefinition) {
  struct Row {
    int64_t heads, kv_heads, dim, window;
    std::vector<SequenceSpec> sequences;
  };
  for (const Row& row :
       {Row{2, 2, 16, 0, {{1, 1}, {2, 300}, {3, 17}}}, Row{6, 2, 132, 0, {{4, 129}}},
        Row{3, 1, 8, 70, {{5, 300}}}, Row{1, 1, 4, 0, {{6, kAttentionChunk + 300}}}}) {
    SCOPED_TRACE(str("heads of ", row.dim, ", window ", row.window));
    const AttentionCase c = rounded(
        make_case(
            {.heads = row.heads, .kv_heads = row.kv_heads, .dim = row.dim, .window = row.window},
            row.sequences),
        some_scales(row.kv_heads, row.heads));
    const AttentionOutput got = run_forward(c), expected = fp8_attention(c);
    EXPECT_LT(relative_error(got.o, expected.o), 1e-13);
    EXPECT_LT(relative_error(got.lse, expected.lse), 1e-13);
    // Rounding P moves O by far more than that, and the log-sum-exp not at all.
    const AttentionOutput exact = fp8_attention(c, false);
    EXPECT_GT(relative_error(got.o, exact.o), 1e-3);
    EXPECT_LT(relative_error(got.lse, exact.lse), 1e-13);
  }
}

// The scores' own scale comes before their modification.
TEST(AttentionFp8, ModifiesScores) {
  AttentionCase c = rounded(make_case({.heads = 6, .kv_heads = 2, .dim = 16}, {{1, 200}, {2, 9}}),
                            some_scales(2, 6));
  c.desc.soft_cap = 0.3;
  c.desc.slopes = random_tensor({6}, DType::kF64, 5);
  const AttentionOutput got = run_forward(c), expected = fp8_attention(c);
  EXPECT_LT(relative_error(got.o, expected.o), 1e-13);
  EXPECT_LT(relative_error(got.lse, expected.lse), 1e-13);
}

// A sink is a key whose P is not rounded.
TEST(AttentionFp8, SinksAddToTheSum) {
  AttentionCase c =
      rounded(make_case({.heads = 2, .kv_heads = 1, .dim = 16}, {{1, 150}}), some_scales(1, 2));
  const AttentionOutput without = run_forward(c);
  c.desc.sinks = Tensor::from(std::vector<double>{0.5, -2});
  const AttentionOutput got = run_forward(c);
  const auto o = without.o.to_vector<double>(), lse = without.lse.to_vector<double>();
  std::vector<double> expected;
  for (size_t i = 0; i < o.size(); ++i) {
    const size_t head = i / 16 % 2, at = head * 150 + i / 32;
    const double sink = head == 0 ? 0.5 : -2;
    expected.push_back(o[i] / (1 + std::exp(sink - lse[at])));
  }
  EXPECT_LT(relative_error(got.o, Tensor::from(expected, got.o.shape())), 1e-13);
}

TEST(AttentionFp8, PagedBitsAreThoseOfTheForwardPass) {
  Rng rng(11, rng_stream(kTestPurpose, 9));
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const int64_t window : {0, 100}) {
      const AttentionCase c =
          make_case({.heads = 6, .kv_heads = 2, .dim = 20, .dtype = dtype, .window = window},
                    {{1, 1}, {2, 290}, {3, 30}, {4, 129}});
      const Tensor scales = some_scales(2, 6);
      AttentionCase cached = c;  // queries are rounded by rope_kv_write()
      cached.desc.fp8_scales = scales;
      EXPECT_TRUE(bit_equal(run_in_random_steps(cached, 16, rng, {}, scales),
                            run_forward(rounded(c, scales)).o));
    }
}

TEST(AttentionFp8, SharedPrefixesEqualRepeatingThem) {
  for (const int64_t prefix : {5, 128, 145})
    kernels::test::expect_as_repeated({4, 2, 20, 0, prefix, {2, 130, 16}}, DType::kF64, 1e-12, {},
                                      some_scales(2, 4));
}

// The gradients are those of attention that does not round P, at the same O and log-sum-exp.
TEST(AttentionFp8, TheBackwardIsThatOfTheRoundedOperands) {
  AttentionCase c = rounded(make_case({.heads = 4, .kv_heads = 2, .dim = 16}, {{1, 200}, {2, 9}}),
                            some_scales(2, 4));
  const AttentionOutput out = run_forward(c);
  const AttentionGrads got = run_backward(c, out);
  c.desc.fp8_scales = {};
  const AttentionGrads expected = run_backward(c, out);
  EXPECT_TRUE(bit_equal(got.dq, expected.dq) && bit_equal(got.dk, expected.dk) &&
              bit_equal(got.dv, expected.dv));
}

TEST(AttentionFp8, WrongScalesAreErrors) {
  AttentionCase c = make_case({.heads = 4, .kv_heads = 2, .dim = 16}, {{1, 20}});
  c.desc.fp8_scales = some_scales(2);
  EXPECT_THROW(run_forward(c), Error);
  c.desc.fp8_scales = some_scales(2, 4).to(DType::kF64);
  EXPECT_THROW(run_forward(c), Error);
  // A cache of rounded keys and values only, and one of all with attention that is not in FP8.
  for (const bool of_queries : {false, true}) {
    AttentionCase cached = make_case({.heads = 4, .kv_heads = 2, .dim = 16}, {{1, 20}});
    if (!of_queries) cached.desc.fp8_scales = some_scales(2, 4);
    Rng rng(1, rng_stream(kTestPurpose, 9));
    EXPECT_THROW(run_in_random_steps(cached, 16, rng, {}, some_scales(2, of_queries ? 4 : 0)),
                 Error);
  }
  AttentionCase dropped = make_case({.heads = 4, .kv_heads = 2, .dim = 16, .p = 0.1}, {{1, 20}});
  dropped.desc.fp8_scales = some_scales(2, 4);
  EXPECT_THROW(run_forward(dropped), Error);
}

}  // namespace
}  // namespace cohort::test
