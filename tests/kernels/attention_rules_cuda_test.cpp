// Masks and modifications of scores on CUDA: against the definition, the bits of the generic
// kernels and of the paged cache.
#include <map>

#include "tests/kernels/attention_paged_cases.h"
#include "tests/kernels/attention_rules.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

using kernels::Mask;

const std::vector<SequenceSpec> kMixedOnCuda = {{0, 0}, {1, 1}, {2, 140}, {3, 17}, {4, 290}};

double largest_error(const Tensor& got, const Tensor& exact) {
  const auto a = got.to(DType::kF64).to_vector<double>(), b = exact.to_vector<double>();
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i]) largest = std::fmax(largest, std::fabs(a[i] - b[i]));
  return largest;
}

// Calls fn(name, result, expected, rounded) for each result of a call.
template <class F>
void for_results(const AttentionOutput& out, const RuleGrads& g, const EagerAttention& exact,
                 const EagerAttention& rounded, F&& fn) {
  const auto host = [](const Tensor& t) { return t.to(Device{}); };
  fn("O", host(out.o), exact.out.o, rounded.out.o);
  fn("log-sum-exp", host(out.lse), exact.out.lse, rounded.out.lse);
  fn("dQ", host(g.grads.dq), exact.grads.dq, rounded.grads.dq);
  fn("dK", host(g.grads.dk), exact.grads.dk, rounded.grads.dk);
  fn("dV", host(g.grads.dv), exact.grads.dv, rounded.grads.dv);
  if (g.dbias.defined()) fn("dbias", host(g.dbias), exact.dbias, rounded.dbias);
  if (g.dsinks.defined()) fn("dsinks", host(g.dsinks), exact.dsinks, rounded.dsinks);
}

TEST(CudaAttentionRules, F32FollowsTheDefinition) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {20, 64, 128, 200})
    for (const RuleCase& rule : rule_cases({.heads = 2, .kv_heads = 1, .dim = dim}, kMixedOnCuda)) {
      SCOPED_TRACE(str(rule.name, ", D ", dim));
      const AttentionCase c = in_dtype(in_f32(rule.attention), DType::kF64);
      const EagerAttention exact = eager_attention(c, DType::kF64);
      const AttentionCase on = rule_case_in(c, DType::kF32, device);
      const AttentionOutput out = run_forward(on);
      for_results(out, run_rule_backward(on, out), exact, exact,
                  [](const char* name, const Tensor& got, const Tensor& expected, const Tensor&) {
                    double largest = 1e-3;
                    for (const double x : expected.to_vector<double>())
                      if (std::isfinite(x)) largest = std::fmax(largest, std::fabs(x));
                    EXPECT_LT(largest_error(got, expected), 3e-5 * largest) << name;
                  });
    }
}

// The maximum error in bf16 is at most twice that of rounding after each operation; of the terms,
// which have few elements, it is the root mean square over all cases.
TEST(CudaAttentionRules, Bf16ErrorsAreThoseOfEagerComputationOrSmaller) {
  COHORT_REQUIRE_GPU(device);
  std::map<std::string, std::pair<double, double>> squares;  // (ours, eager)
  for (const int64_t dim : {40, 64, 96, 128, 192, 256})
    for (const RuleCase& rule : rule_cases({.heads = 2, .kv_heads = 1, .dim = dim}, kMixedOnCuda)) {
      SCOPED_TRACE(str(rule.name, ", D ", dim));
      const AttentionCase c = in_dtype(in_dtype(rule.attention, DType::kBF16), DType::kF64);
      const EagerAttention exact = eager_attention(c, DType::kF64);
      const EagerAttention eager = eager_attention(c, DType::kBF16);
      const AttentionCase on = rule_case_in(c, DType::kBF16, device);
      const AttentionOutput out = run_forward(on);
      for_results(out, run_rule_backward(on, out), exact, eager,
                  [&](const std::string& name, const Tensor& got, const Tensor& expected,
                      const Tensor& rounded) {
                    const double ours = largest_error(got, expected),
                                 theirs = largest_error(rounded, expected);
                    if (name == "dbias" || name == "dsinks") {
                      squares[name].first += ours * ours;
                      squares[name].second += theirs * theirs;
                    } else {
                      EXPECT_LE(ours, 2 * theirs + 2e-5) << name;
                    }
                  });
    }
  EXPECT_EQ(squares.size(), 2u);
  for (const auto& [name, errors] : squares)
    EXPECT_LE(std::sqrt(errors.first), 2 * std::sqrt(errors.second)) << name;
}

TEST(CudaAttentionRules, HoldUnderDropout) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 128})
    for (const RuleCase& rule :
         rule_cases({.heads = 4, .kv_heads = 2, .dim = dim, .p = 0.3}, kMixedOnCuda)) {
      SCOPED_TRACE(str(rule.name, ", D ", dim));
      AttentionCase c = in_dtype(in_dtype(rule.attention, DType::kBF16), DType::kF64);
      c.desc.dropout = make_case(c.shape, c.sequences).desc.dropout;
      const AttentionOutput expected = run_forward(c);
      const RuleGrads e = run_rule_backward(c, expected);
      const AttentionCase on = rule_case_in(c, DType::kBF16, device);
      const AttentionOutput out = run_forward(on);
      const RuleGrads g = run_rule_backward(on, out);
      const auto expect = [](const char* name, const Tensor& got, const Tensor& want) {
        EXPECT_LT(relative_error(got.to(Device{}).to(DType::kF64), want), 0.02) << name;
      };
      expect("O", out.o, expected.o);
      expect("dQ", g.grads.dq, e.grads.dq);
      expect("dK", g.grads.dk, e.grads.dk);
      expect("dV", g.grads.dv, e.grads.dv);
      if (g.dbias.defined()) expect("dbias", g.dbias, e.dbias);
    }
}

// The order in which blocks add to dQ counts the visible tiles of the mask alone.
TEST(CudaAttentionRules, SequencesMayBeLongerThanTheTileMask) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 128}) {
    AttentionCase c = make_case({.heads = 2, .kv_heads = 1, .dim = dim, .mask = Mask::kFull},
                                {{0, 4500}, {1, 100}});
    c.desc.tiles = sparse_tiles(20, true);
    c = in_dtype(in_dtype(c, DType::kBF16), DType::kF64);
    const AttentionOutput expected = run_forward(c);
    const RuleGrads e = run_rule_backward(c, expected);
    const AttentionCase on = rule_case_in(c, DType::kBF16, device);
    const RuleGrads g = run_rule_backward(on, run_forward(on));
    const auto expect = [](const Tensor& got, const Tensor& want) {
      EXPECT_LT(relative_error(got.to(Device{}).to(DType::kF64), want), 0.02);
    };
    expect(g.grads.dq, e.grads.dq);
    expect(g.grads.dk, e.grads.dk);
    expect(g.grads.dv, e.grads.dv);
    // The bits of a row behind its 20 tiles are padding: blocks of later keys add nothing to dQ,
    // and none may wait for them.
    AttentionCase padded = on;
    Tensor mask = c.desc.tiles.clone();
    for (int64_t i = 0; i < mask.numel(); ++i)
      mask.data<int32_t>()[i] |= static_cast<int32_t>(~0u << 20);
    padded.desc.tiles = mask.to(device);
    const AttentionOutput out = run_forward(padded);
    EXPECT_TRUE(bit_equal(out.o.to(Device{}), run_forward(on).o.to(Device{})));
    EXPECT_TRUE(
        bit_equal(run_rule_backward(padded, out).grads.dq.to(Device{}), g.grads.dq.to(Device{})));
  }
}

// The long sequence crosses a chunk of keys.
TEST(CudaAttentionRules, AllForwardsHaveTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(5, rng_stream(kTestPurpose, 9));
  for (const int64_t dim : {64, 96, 128, 256})
    for (const RuleCase& rule : rule_cases({.heads = 2, .kv_heads = 1, .dim = dim},
                                           {{0, 0}, {1, 4500}, {2, 129}, {3, 64}})) {
      SCOPED_TRACE(str(rule.name, ", D ", dim));
      const AttentionCase on = rule_case_in(rule.attention, DType::kBF16, device);
      AttentionCase odd = on;
      for (Tensor* t : {&odd.q, &odd.k, &odd.v}) *t = at_odd_address(*t);
      const AttentionOutput out = run_forward(on), generic = run_forward(odd);
      EXPECT_TRUE(bit_equal(out.o.to(Device{}), generic.o.to(Device{})));
      EXPECT_TRUE(bit_equal(out.lse.to(Device{}), generic.lse.to(Device{})));
      if (on.desc.mask != Mask::kCausal || on.desc.prefix_lm.defined()) continue;
      AttentionCase paged = rule_case_in(rule.attention, DType::kBF16);
      paged.desc = on.desc;
      kernels::PagedKV cache = make_cache(paged, 16, rng, device);
      Tensor all = Tensor::full(paged.q.shape(), NAN, DType::kBF16);
      // Prefill in two pieces, then a decode step of each sequence.
      run_step(cache, paged, {{1, 0, 4000}, {2, 0, 100}}, all);
      run_step(cache, paged, {{1, 4000, 4499}, {2, 100, 128}, {3, 0, 63}}, all);
      run_step(cache, paged, {{1, 4499, 4500}, {2, 128, 129}, {3, 63, 64}}, all);
      EXPECT_TRUE(bit_equal(all, out.o.to(Device{})));
    }
}

// Tests by head dim, which a sanitizer ends in time.
class CudaAttentionRulesByDim : public testing::TestWithParam<int64_t> {};

TEST_P(CudaAttentionRulesByDim, PagedBitsAreThoseOfTheForward) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(3, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kernels::test::kCudaTypes)
    for (const RuleCase& rule :
         rule_cases({.heads = 6, .kv_heads = 2, .dim = GetParam()}, kMixedOnCuda)) {
      const AttentionCase on = rule_case_in(rule.attention, dtype, device);
      if (on.desc.mask != Mask::kCausal || on.desc.prefix_lm.defined()) continue;
      SCOPED_TRACE(str(dtype_name(dtype), ", ", rule.name));
      AttentionCase paged = rule_case_in(rule.attention, dtype);
      paged.desc = on.desc;
      EXPECT_TRUE(
          bit_equal(run_in_random_steps(paged, 16, rng, device), run_forward(on).o.to(Device{})));
    }
}

TEST_P(CudaAttentionRulesByDim, BackwardsHaveTheSameBitsEachTime) {
  COHORT_REQUIRE_GPU(device);
  for (const RuleCase& rule :
       rule_cases({.heads = 4, .kv_heads = 2, .dim = GetParam()}, {{1, 700}, {2, 300}})) {
    SCOPED_TRACE(rule.name);
    const AttentionCase on = rule_case_in(rule.attention, DType::kBF16, device);
    const AttentionOutput out = run_forward(on);
    kernels::test::expect_reproducible([&] {
      const RuleGrads g = run_rule_backward(on, out);
      std::vector<Tensor> all = {g.grads.dq, g.grads.dk, g.grads.dv};
      if (g.dbias.defined()) all.push_back(g.dbias);
      if (g.dsinks.defined()) all.push_back(g.dsinks);
      return all;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, CudaAttentionRulesByDim, testing::Values(20, 64, 128, 256));

}  // namespace
}  // namespace cohort::test
