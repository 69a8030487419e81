// Policy loss on CUDA compared with the CPU: the same formula in f64, so only the last bits of
// exponentials differ.
#include "tests/support/policy_loss_call.h"

#include <functional>

#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

struct CudaTokens {
  Tensor logprob, old, ref, advantage, weight;
  Tensor sampling = {}, entropy = {}, segments = {};

  CudaTokens each(const std::function<Tensor(const Tensor&)>& change) const {
    CudaTokens out = *this;
    for (Tensor* t : {&out.logprob, &out.old, &out.ref, &out.advantage, &out.weight, &out.sampling,
                      &out.entropy, &out.segments})
      if (t->defined()) *t = change(*t);
    return out;
  }
  CudaTokens to(Device device) const {
    return each([&](const Tensor& t) { return t.to(device); });
  }
  CudaTokens narrow(int64_t first, int64_t count) const {
    return each([&](const Tensor& t) { return t.narrow(0, first, count); });
  }
};

enum class Reference { kNone, kGiven };

// About every fourth token has weight 0 and NaN in all other inputs. Some deviate strongly from the
// reference in either direction.
CudaTokens random_tokens_on_cuda(int64_t n, Reference reference) {
  const auto random = [&](uint64_t seed, double scale) {
    return random_tensor({n}, DType::kF32, seed, scale);
  };
  CudaTokens t{random(1, 0.3), random(2, 0.3), random(3, 0.3), random(4, 1), random(5, 1)};
  for (int64_t i = 0; i < n; ++i) {
    if (i % 64 == 1) t.ref.data<float>()[i] -= 30;
    if (i % 64 == 33) t.ref.data<float>()[i] += 4;
    float& weight = t.weight.data<float>()[i];
    weight = i % 4 == 2 ? 0 : std::fabs(weight);
    if (weight == 0)
      for (Tensor* x : {&t.logprob, &t.old, &t.ref, &t.advantage}) x->data<float>()[i] = NAN;
  }
  if (reference == Reference::kNone) t.ref = Tensor();
  return t;
}

struct CudaResult {
  double loss;
  Tensor gradient;  // on the CPU
  PolicyLossStats stats;
  Tensor dentropy = {};  // on the CPU
};

constexpr PolicyLossDesc kDesc{.epsilon_low = 0.2, .epsilon_high = 0.28};

CudaResult run(const CudaTokens& t, const PolicyLossDesc& desc) {
  const Device device = t.logprob.device();
  Guarded loss(Shape{1}, DType::kF32, device), gradient(t.logprob.shape(), DType::kF32, device);
  Guarded stats(Tensor::zeros({PolicyLossStats::kSize}, DType::kF64), DType::kF64, device);
  Guarded dentropy(t.logprob.shape(), DType::kF32, device);
  const bool with_entropy = desc.entropy_coef != 0;
  policy_loss({loss.tensor(), gradient.tensor(), stats.tensor(), t.logprob, t.old, t.ref,
               t.advantage, t.weight, desc, t.sampling, t.segments,
               with_entropy ? t.entropy : Tensor(), with_entropy ? dentropy.tensor() : Tensor()});
  EXPECT_TRUE(loss.intact() && gradient.intact() && stats.intact() && dentropy.intact());
  return {loss.tensor().item(), gradient.tensor().to(Device{}).clone(),
          PolicyLossStats::from(stats.tensor()),
          with_entropy ? dentropy.tensor().to(Device{}).clone() : Tensor()};
}

void expect_equal_to_cpu(const CudaTokens& t, const PolicyLossDesc& desc, Device device) {
  const int64_t n = t.logprob.numel();
  const CudaResult got = run(t.to(device), desc), expected = run(t, desc);
  EXPECT_NEAR(got.loss, expected.loss, 1e-6 * std::fabs(expected.loss)) << n;
  EXPECT_LE(relative_error(got.gradient, expected.gradient), 1e-7) << n;
  for (int64_t i = 2; i < n; i += 4) {
    const float g = got.gradient.data<float>()[i];
    EXPECT_TRUE(g == 0 && !std::signbit(g)) << i;
  }
  EXPECT_EQ(got.stats.tokens, expected.stats.tokens);
  EXPECT_EQ(got.stats.clipped_low, expected.stats.clipped_low);
  EXPECT_EQ(got.stats.clipped_high, expected.stats.clipped_high);
  EXPECT_TRUE(desc.entropy_coef == 0 || bit_equal(got.dentropy, expected.dentropy)) << n;
  for (const auto field : {&PolicyLossStats::max_ratio_deviation, &PolicyLossStats::kl_to_old,
                           &PolicyLossStats::kl_to_reference, &PolicyLossStats::importance})
    EXPECT_NEAR(got.stats.*field, expected.stats.*field, 1e-12 * expected.stats.*field) << n;
}

TEST(CudaPolicyLoss, MatchesTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t n : {0, 1, 31, 255, 256, 257, 3000, 70000})
    for (const Reference reference : {Reference::kNone, Reference::kGiven}) {
      PolicyLossDesc desc = kDesc;
      if (reference == Reference::kGiven) desc.beta = 0.05;
      expect_equal_to_cpu(random_tokens_on_cuda(n, reference), desc, device);
    }
}

constexpr PolicyLossDesc kVariantsOnCuda[] = {
    {.dual_clip = 1.4},
    {.delta = 1.3},
    {.surrogate = Surrogate::kCispo},
    {.surrogate = Surrogate::kReinforce},
    {.surrogate = Surrogate::kSapo, .tau_pos = 1.5, .tau_neg = 4},
};

TEST(CudaPolicyLoss, EveryChoiceMatchesTheCpu) {
  COHORT_REQUIRE_GPU(device);
  const CudaTokens t = random_tokens_on_cuda(3000, Reference::kGiven);
  for (const PolicyLossDesc& desc : kVariantsOnCuda) {
    SCOPED_TRACE(&desc - kVariantsOnCuda);
    expect_equal_to_cpu(t, desc, device);
  }
  for (const KlEstimator kl : {KlEstimator::kK1, KlEstimator::kK2, KlEstimator::kK3})
    for (const bool unbiased : {false, true})
      expect_equal_to_cpu(t, {.beta = 0.5, .kl = kl, .kl_unbiased = unbiased}, device);
}

// Tokens in sequences of 1 to 300, drawn from another distribution than the old policy's.
CudaTokens in_sequences(int64_t n) {
  CudaTokens t = random_tokens_on_cuda(n, Reference::kGiven);
  t.sampling = random_tensor({n}, DType::kF32, 6, 0.3);
  for (Tensor* x : {&t.logprob, &t.old, &t.ref, &t.sampling})  // log-probs are negative
    for (int64_t i = 0; i < n; ++i) x->data<float>()[i] -= 2;
  t.entropy = random_tensor({n}, DType::kF32, 7, 1);
  std::vector<int32_t> segments;
  for (int32_t s = 0; static_cast<int64_t>(segments.size()) < n; s += 1 + s % 2)
    segments.insert(segments.end(), static_cast<size_t>(1 + s * 37 % 300), s);
  segments.resize(static_cast<size_t>(n));
  t.segments = Tensor::from(segments);
  return t;
}

TEST(CudaPolicyLoss, SequencesWeightsAndEntropiesMatchTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t n : {1, 2, 33, 257, 5000, 70000}) {
    const CudaTokens t = in_sequences(n);
    for (const PolicyLossDesc& desc :
         {PolicyLossDesc{.level = RatioLevel::kSequence, .entropy_coef = 0.1},
          {.epsilon_low = 0.02, .epsilon_high = 0.02, .level = RatioLevel::kSequence},
          {.epsilon_low = 0.1, .epsilon_high = 0.2, .level = RatioLevel::kClipped},
          {.beta = 0.1,
          .surrogate = Surrogate::kReinforce,
          .importance = Importance::kTruncate,
          .importance_max = 1.2},
          {.importance = Importance::kMask, .importance_min = 0.8, .importance_max = 1.2},
          {.importance = Importance::kReject,
          .importance_level = ImportanceLevel::kGeometric,
          .importance_min = 0.99,
          .importance_max = 1.01},
          {.surrogate = Surrogate::kReinforce,
          .importance = Importance::kMask,
          .importance_level = ImportanceLevel::kSequence,
          .importance_max = 3},
          {.surrogate = Surrogate::kVespo},
          {.trust_region = TrustRegion::kTv, .trust_high = 0.05, .old_kl_coef = 0.1},
          {.trust_region = TrustRegion::kKl, .trust_low = 0.01},
          {.trust_region = TrustRegion::kIpo, .trust_high = 0.05},
          {.off_policy_mask = 0.01}})
      expect_equal_to_cpu(t, desc, device);
  }
}

// The means of a sequence do not depend on where it lies in a batch.
TEST(CudaPolicyLoss, MeansOfSequencesAreThoseOfTheSequenceAlone) {
  COHORT_REQUIRE_GPU(device);
  const CudaTokens t = in_sequences(5000).to(device);
  const PolicyLossDesc desc{.level = RatioLevel::kSequence};
  const CudaResult all = run(t, desc);
  const std::vector<int32_t> segments = t.segments.to(Device{}).to_vector<int32_t>();
  for (int64_t begin = 0, end = 0; begin < 5000; begin = end) {
    while (end < 5000 && segments[static_cast<size_t>(end)] == segments[static_cast<size_t>(begin)])
      ++end;
    EXPECT_TRUE(bit_equal(run(t.narrow(begin, end - begin), desc).gradient,
                          all.gradient.narrow(0, begin, end - begin)));
  }
}

TEST(CudaPolicyLoss, OnPolicyItIsExact) {
  COHORT_REQUIRE_GPU(device);
  CudaTokens t = random_tokens_on_cuda(1000, Reference::kNone).to(device);
  t.old = t.logprob;
  const CudaResult r = run(t, {});
  EXPECT_EQ(r.stats.max_ratio_deviation, 0);
  EXPECT_EQ(r.stats.kl_to_old, 0);
  EXPECT_EQ(r.stats.clipped_low + r.stats.clipped_high, 0);
  for (const PolicyLossDesc& desc : kVariantsOnCuda)
    EXPECT_TRUE(bit_equal(run(t, desc).gradient, r.gradient)) << &desc - kVariantsOnCuda;
}

TEST(CudaPolicyLoss, StatsAccumulateOverCalls) {
  COHORT_REQUIRE_GPU(device);
  const CudaTokens t = random_tokens_on_cuda(600, Reference::kGiven).to(device);
  const PolicyLossStats once = run(t, kDesc).stats;
  Tensor sums = PolicyLossStats::zeros(device), loss = Tensor::empty({1}, DType::kF32, device);
  Tensor gradient = Tensor::empty({600}, DType::kF32, device);
  for (int i = 0; i < 2; ++i)
    policy_loss({loss, gradient, sums, t.logprob, t.old, t.ref, t.advantage, t.weight, kDesc});
  const PolicyLossStats twice = PolicyLossStats::from(sums);
  EXPECT_EQ(twice.tokens, 2 * once.tokens);
  EXPECT_EQ(twice.clipped_low, 2 * once.clipped_low);
  EXPECT_EQ(twice.clipped_high, 2 * once.clipped_high);
  EXPECT_EQ(twice.kl_to_old, 2 * once.kl_to_old);
  EXPECT_EQ(twice.kl_to_reference, 2 * once.kl_to_reference);
  EXPECT_EQ(twice.max_ratio_deviation, once.max_ratio_deviation);
}

TEST(CudaPolicyLoss, NaNInAWeightedTokenPropagates) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t at : {0, 1, 300, 599}) {
    CudaTokens t = random_tokens_on_cuda(600, Reference::kNone);
    t.weight.data<float>()[at] = 1;
    t.logprob.data<float>()[at] = NAN;
    const CudaResult r = run(t.to(device), kDesc);
    EXPECT_TRUE(std::isnan(r.loss)) << at;
    EXPECT_TRUE(std::isnan(r.gradient.data<float>()[at])) << at;
    EXPECT_TRUE(std::isnan(r.stats.max_ratio_deviation)) << at;
  }
}

TEST(CudaPolicyLoss, AnInvalidWeightGivesNaN) {
  COHORT_REQUIRE_GPU(device);
  for (const float weight : {-1.0f, NAN}) {
    CudaTokens t = random_tokens_on_cuda(600, Reference::kNone);
    t.weight.data<float>()[301] = weight;
    const CudaResult r = run(t.to(device), kDesc);
    EXPECT_TRUE(std::isnan(r.loss));
    EXPECT_TRUE(std::isnan(r.gradient.data<float>()[301]));
    EXPECT_FALSE(std::isnan(r.gradient.data<float>()[300]));
  }
}

TEST(CudaPolicyLoss, IsReproducibleAndIndependentOfTheBatch) {
  COHORT_REQUIRE_GPU(device);
  PolicyLossDesc desc = kDesc;
  desc.beta = 0.05;
  const CudaTokens t = random_tokens_on_cuda(3000, Reference::kGiven).to(device);
  const CudaResult all = run(t, desc);
  for (const auto& [first, count] : {std::pair{0, 1}, {255, 2}, {1001, 700}})
    EXPECT_TRUE(bit_equal(run(t.narrow(first, count), desc).gradient,
                          all.gradient.narrow(0, first, count)));
  expect_reproducible([&] {
    Tensor sums = PolicyLossStats::zeros(device), loss = Tensor::empty({1}, DType::kF32, device);
    Tensor gradient = Tensor::empty({3000}, DType::kF32, device);
    policy_loss({loss, gradient, sums, t.logprob, t.old, t.ref, t.advantage, t.weight, desc});
    return std::vector{loss, gradient, sums};
  });
}

TEST(CudaPolicyLoss, RejectsInvalidArguments) {
  COHORT_REQUIRE_GPU(device);
  CudaTokens t = random_tokens_on_cuda(3, Reference::kNone).to(device);
  EXPECT_THROW_WITH(run(t, {.beta = 0.1}), Error, "no reference log-probs");
  Tensor loss = Tensor::empty({1}, DType::kF32, device), gradient = Tensor::empty_like(t.old);
  Tensor here = PolicyLossStats::zeros();
  EXPECT_THROW_WITH(
      policy_loss({loss, gradient, here, t.logprob, t.old, {}, t.advantage, t.weight, {}}), Error,
      "expected stats on cuda:0");
  t.old = t.old.to(Device{});
  EXPECT_THROW_WITH(run(t, {}), Error, "expected old_logprob on cuda:0");
}

}  // namespace
}  // namespace cohort::kernels
