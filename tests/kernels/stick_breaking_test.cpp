// Stick-breaking attention on the CPU, against a plain f64 computation and central differences.
#include "tests/kernels/kernel_test.h"
#include "tests/kernels/stick_breaking_cases.h"
#include "tests/kernels/stick_breaking_prefix_cases.h"

namespace cohort::test {
namespace {

using kernels::Grad;
using kernels::test::expect_gradient;
using kernels::test::expect_thread_invariant;

constexpr int64_t kLengths[] = {1, 63, 64, 65, 300};

std::vector<SequenceSpec> all_lengths() {
  std::vector<SequenceSpec> sequences{{9, 0}};
  for (const int64_t length : kLengths) sequences.push_back({length, length});
  return sequences;
}

TEST(StickBreaking, EqualsThePlainComputation) {
  for (const int64_t dim : {1, 16, 40, 64, 128, 256}) {
    const AttentionCase c = make_case({.heads = 4, .kv_heads = 2, .dim = dim}, all_lengths());
    const StickResults expected = naive_stick(c);
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim));
      const AttentionCase in = in_dtype(c, dtype);
      const double tolerance = dtype == DType::kF64 ? 1e-13 : 3e-6;
      EXPECT_LT(relative_error(stick_forward(in), expected.o), tolerance);
      const AttentionGrads g = stick_backward(in);
      EXPECT_LT(relative_error(g.dq, expected.grads.dq), tolerance);
      EXPECT_LT(relative_error(g.dk, expected.grads.dk), tolerance);
      EXPECT_LT(relative_error(g.dv, expected.grads.dv), tolerance);
    }
  }
}

TEST(StickBreaking, GradientsAreThoseOfCentralDifferences) {
  for (const AttentionShape& shape :
       {AttentionShape{.heads = 2, .kv_heads = 1, .dim = 3},
        AttentionShape{.heads = 1, .kv_heads = 1, .dim = 5, .scale = 2}}) {
    const AttentionCase c = make_case(shape, {{1, 1}, {2, 0}, {3, 67}, {4, 5}});
    const AttentionGrads g = stick_backward(c);
    const auto loss = [&] { return kernels::test::dot(stick_forward(c), c.dout); };
    expect_gradient(c.q, g.dq, loss, "dq");
    expect_gradient(c.k, g.dk, loss, "dk");
    expect_gradient(c.v, g.dv, loss, "dv");
  }
}

// The first token sees no key, and the second one gives the first what sigmoid says.
TEST(StickBreaking, BreaksTheStickFromTheClosestKeyOn) {
  AttentionCase c = make_case({.heads = 1, .kv_heads = 1, .dim = 1, .scale = 1}, {{1, 3}});
  c.q.fill_(1);
  c.k.copy_(Tensor::from(std::vector<double>{std::log(3.0), 0, 0}, {3, 1, 1}));
  c.v.copy_(Tensor::from(std::vector<double>{1, 100, 10000}, {3, 1, 1}));
  const auto o = stick_forward(c).to_vector<double>();
  EXPECT_EQ(o[0], 0);
  EXPECT_NEAR(o[1], 0.75, 1e-15);
  EXPECT_NEAR(o[2], 0.5 * 100 + 0.5 * 0.75, 1e-13);
}

TEST(StickBreaking, CacheGivesTheForwardsBits) {
  for (const DType dtype : {DType::kF64, DType::kF32})
    for (const int64_t dim : {16, 40, 130})
      for (const int64_t block_tokens : {1, 16, 24}) {
        const AttentionCase c = make_case({.heads = 6, .kv_heads = 2, .dim = dim, .dtype = dtype},
                                          {{1, 1}, {2, 150}, {3, 30}, {4, 270}});
        EXPECT_TRUE(bit_equal(stick_in_steps(c, block_tokens), stick_forward(c)))
            << dtype_name(dtype) << ", D " << dim << ", blocks of " << block_tokens;
      }
}

TEST(StickBreaking, RowsDoNotDependOnTheirCompanions) {
  for (const int64_t dim : {16, 130}) {
    const AttentionShape shape{.heads = 3, .kv_heads = 1, .dim = dim, .dtype = DType::kF32};
    const AttentionCase all = make_case(shape, {{1, 70}, {2, 1}, {3, 200}, {4, 64}});
    const Tensor o = stick_forward(all);
    const AttentionGrads g = stick_backward(all);
    for (size_t s = 0; s < all.sequences.size(); ++s) {
      const AttentionCase one = make_case(shape, {all.sequences[s]});
      const auto own = [&](const Tensor& t) {
        return t.narrow(0, all.start(s), one.tokens()).clone();
      };
      const AttentionGrads expected = stick_backward(one);
      EXPECT_TRUE(bit_equal(own(o), stick_forward(one)));
      EXPECT_TRUE(bit_equal(own(g.dq), expected.dq) && bit_equal(own(g.dk), expected.dk) &&
                  bit_equal(own(g.dv), expected.dv));
    }
    // A sequence that ends earlier has the same first rows.
    AttentionCase longer = make_case(shape, {{3, 200}}), shorter = make_case(shape, {{3, 90}});
    for (Tensor AttentionCase::*t : {&AttentionCase::q, &AttentionCase::k, &AttentionCase::v})
      (shorter.*t).copy_((longer.*t).narrow(0, 0, 90));
    EXPECT_TRUE(bit_equal(stick_forward(shorter), stick_forward(longer).narrow(0, 0, 90).clone()));
  }
}

TEST(StickBreaking, DoesNotDependOnTheNumberOfThreads) {
  const AttentionCase c = make_case({.heads = 4, .kv_heads = 2, .dim = 20, .dtype = DType::kF32},
                                    {{1, 170}, {2, 3}, {3, 90}});
  expect_thread_invariant([&] {
    const AttentionGrads g = stick_backward(c);
    return std::vector{stick_forward(c), g.dq, g.dk, g.dv};
  });
}

TEST(StickBreaking, SharedPrefixesEqualRepeatingThem) {
  for (const SharedStick& f :
       {SharedStick{2, 1, 8, 5, {3, 1, 7}}, SharedStick{4, 2, 16, 127, {2, 130}},
        SharedStick{1, 1, 4, 64, {1, 1, 0, 40}}, SharedStick{3, 3, 20, 100, {9, 60}},
        SharedStick{2, 1, 132, 70, {66, 1}}})
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      SCOPED_TRACE(str("prefix of ", f.prefix, ", ", dtype_name(dtype)));
      expect_stick_as_repeated(f, dtype, dtype == DType::kF64 ? 1e-13 : 1e-5, 0);
    }
}

TEST(StickBreaking, GradientsAreAddedIfAsked) {
  const AttentionCase c = make_case({.heads = 2, .kv_heads = 1, .dim = 8}, {{1, 70}, {2, 5}});
  const AttentionGrads fresh = stick_backward(c);
  for (const int accumulated : {0, 1, 2}) {
    Tensor old[3], grads[3];
    const Tensor* const expected[3] = {&fresh.dq, &fresh.dk, &fresh.dv};
    for (int i = 0; i < 3; ++i)
      grads[i] =
          (old[i] = random_tensor(expected[i]->shape(), DType::kF64, static_cast<uint64_t>(50 + i)))
              .clone();
    const auto mode = [&](int i) {
      return i == accumulated ? Grad::kAccumulate : Grad::kOverwrite;
    };
    kernels::stick_breaking_backward({{grads[0], mode(0)},
                                      {grads[1], mode(1)},
                                      {grads[2], mode(2)},
                                      c.dout,
                                      c.q,
                                      c.k,
                                      c.v,
                                      c.cu});
    for (int i = 0; i < 3; ++i) {
      auto sum = expected[i]->to_vector<double>();
      const auto before = old[i].to_vector<double>();
      for (size_t j = 0; j < sum.size() && i == accumulated; ++j) sum[j] += before[j];
      EXPECT_LT(relative_error(grads[i], Tensor::from(sum, grads[i].shape())), 1e-14) << i;
    }
  }
}

TEST(StickBreaking, TensorsMayBeColumnsOfWiderOnes) {
  const AttentionCase c =
      make_case({.heads = 4, .kv_heads = 2, .dim = 12, .dtype = DType::kF32}, {{1, 70}, {2, 9}});
  const AttentionCase in = merged(c);
  WideRows o(Tensor::full(c.q.shape(), NAN, c.q.dtype()));
  kernels::stick_breaking_forward({o.view, in.q, in.k, in.v, in.cu});
  EXPECT_TRUE(bit_equal(o.view, stick_forward(c)) && o.intact());
  AttentionCase grads = in;
  grads = merged(c);  // memory for the gradients
  kernels::stick_breaking_backward(
      {{grads.q}, {grads.k}, {grads.v}, in.dout, in.q, in.k, in.v, in.cu});
  const AttentionGrads expected = stick_backward(c);
  EXPECT_TRUE(bit_equal(grads.q.clone(), expected.dq) && bit_equal(grads.k.clone(), expected.dk) &&
              bit_equal(grads.v.clone(), expected.dv));
}

// Scores of -10^4, 0 and 10^4: a share of exactly 0 or 1.
TEST(StickBreaking, ExtremeScoresGiveNoNan) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const AttentionCase c = extreme_case(dtype);
    expect_finite_sticks(stick_forward(c), stick_backward(c), c);
  }
}

TEST(StickBreaking, SaysWhatIsWrong) {
  AttentionCase c = make_case({.heads = 2, .kv_heads = 2, .dim = 4}, {{1, 5}});
  Tensor o = Tensor::empty_like(c.q);
  EXPECT_THROW_WITH(kernels::stick_breaking_forward({o, c.q, c.k, c.v, c.cu, {.scale = -1}}), Error,
                    "[stick_breaking_forward] expected a scale of at least 0, got -1");
  EXPECT_THROW_WITH(kernels::stick_breaking_forward({o, c.q, c.k.narrow(1, 0, 1), c.v, c.cu}),
                    Error, "[stick_breaking_forward]");
  EXPECT_THROW_WITH(
      kernels::stick_breaking_forward(
          {o, c.q, c.k, c.v, c.cu, {.prefixes = Tensor::from(std::vector<int32_t>{0, 3}, {1, 2})}}),
      Error, "prefix of sequence 0");
  Tensor short_grad = Tensor::empty({4, 2, 4}, DType::kF64), dk = Tensor::empty_like(c.k),
         dv = Tensor::empty_like(c.v);
  EXPECT_THROW_WITH(
      kernels::stick_breaking_backward({{short_grad}, {dk}, {dv}, c.dout, c.q, c.k, c.v, c.cu}),
      Error, "[stick_breaking_backward]");
  Rng rng(3, rng_stream(kTestPurpose, 9));
  const kernels::PagedKV cache = make_cache(c, 4, rng);
  const Tensor sequences = Tensor::zeros({5}, DType::kI32);
  const Tensor positions = Tensor::from(std::vector<int32_t>{0, 1, 2, 3, 99});
  EXPECT_THROW_WITH(kernels::stick_breaking_paged({o, c.q, cache, sequences, positions}), Error,
                    "position 99 of sequence 0 is beyond its block table");
  EXPECT_THROW_WITH(
      kernels::stick_breaking_paged(
          {o, c.q, cache, sequences, sequences, {.prefixes = Tensor::zeros({1, 2}, DType::kI32)}}),
      Error, "expected no prefixes");
}

}  // namespace
}  // namespace cohort::test
