#include "kernels/sampling.h"

#include <set>

#include "autograd/ops.h"
#include "tests/kernels/sampling_reference.h"

namespace cohort::kernels {
namespace {

using namespace test;

int32_t token(const Samples& samples, int64_t i) {
  return samples.tokens.data<int32_t>()[i];
}

Samples samples_of(const Tensor& logits, const SamplingParams& params, int64_t first_stream = 0) {
  const int64_t n = logits.dim(0);
  Samples out = empty_samples(n, logits.dtype());
  SamplingState state = plain_state(params, n, first_stream);
  sample_logits({out, state, logits, own_slots(n), addresses(n, 100)});
  return out;
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  std::vector<double> p;
  double sum = 0;
  for (const float z : logits) {
    p.push_back(std::exp(static_cast<double>(z) / temperature));
    sum += p.back();
  }
  for (double& v : p) v /= sum;
  return p;
}

// The guarantee that makes ratio == 1 on the first minibatch, for other batches, chunks and
// threads.
TEST(Sampling, LogprobAndEntropyAreTheTrainersToTheBit) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const double temperature : {1.0, 0.7, 1.3, 0.0})
      for (const auto& [n, channels, vocab] : {std::tuple{5, 17, 9}, {37, 65, 1030}}) {
        const int64_t total = 400, first = 60;
        const Tensor all = random_tensor({total, channels}, dtype, 1);
        const Tensor w = random_tensor({vocab, channels}, dtype, 2, 0.3);
        const Tensor x = all.narrow(0, first, n);
        Samples out = empty_samples(n, dtype);
        SamplingState state =
            plain_state({.temperature = temperature, .top_k = 5, .seed = 6}, n, 3);
        {
          const Threads guard(2);
          head_sample({out, state, x, w, own_slots(n), addresses(n, 4), 3});
        }
        Tensor targets = Tensor::full({total}, 1, DType::kI32);
        targets.narrow(0, first, n).copy_(out.tokens);
        Tensor logprob = Tensor::empty({total}, dtype), entropy = logprob.clone();
        Tensor lse = logprob.clone();
        for (const int64_t chunk : {128, 256}) {
          head_logprob_forward(
              {logprob,
               entropy,
               lse,
               {all,
                w,
                targets,
                {.temperature = temperature == 0 ? 1 : temperature, .chunk_tokens = chunk}}});
          EXPECT_TRUE(bit_equal(logprob.narrow(0, first, n), out.logprob)) << temperature;
          EXPECT_TRUE(bit_equal(entropy.narrow(0, first, n), out.entropy)) << temperature;
        }
      }
}

TEST(Sampling, SamplesDoNotDependOnTheBatch) {
  const int64_t n = 50, vocab = 700;
  const Tensor x = random_tensor({n, 33}, DType::kF32, 1),
               w = random_tensor({vocab, 33}, DType::kF32, 2);
  const Tensor index = addresses(n, 4), slots = own_slots(n);
  for (const SamplingParams& base :
       {SamplingParams{.seed = 9}, {.top_k = 20, .top_p = 0.9, .seed = 9}}) {
    SamplingState state = plain_state(base, n, 3);
    Samples all = empty_samples(n, DType::kF32);
    head_sample({all, state, x, w, slots, index});
    for (const int64_t chunk : {1, 7, 1000})
      for (const auto& [first, count] : {std::pair{0, 50}, {13, 1}, {20, 30}}) {
        Samples part = empty_samples(count, DType::kF32);
        head_sample({part, state, x.narrow(0, first, count), w, slots.narrow(0, first, count),
                     index.narrow(0, first, count), chunk});
        EXPECT_TRUE(bit_equal(part.tokens, all.tokens.narrow(0, first, count)));
        for (const auto statistic : {&Samples::logprob, &Samples::entropy, &Samples::truncated_mass,
                                     &Samples::sampling_logprob})
          EXPECT_TRUE(bit_equal(part.*statistic, (all.*statistic).narrow(0, first, count)));
      }
    expect_thread_invariant([&] {
      Samples d = empty_samples(n, DType::kF32);
      head_sample({d, state, x, w, slots, index});
      return std::vector{d.tokens, d.logprob, d.entropy, d.truncated_mass, d.sampling_logprob};
    });
  }
}

TEST(Sampling, FrequenciesAreTheProbabilities) {
  const std::vector<float> logits = {0, 1, -1, 2, 0.5f, -INFINITY, 1.5f, -0.5f};
  for (const double temperature : {1.0, 0.5, 3.0}) {
    const Samples samples =
        samples_of(repeat(logits, 20000), {.temperature = temperature, .seed = 1});
    EXPECT_LE(chi_square(samples.tokens.to_vector<int32_t>(), softmax(logits, temperature)),
              chi_square_limit(7));
  }
}

TEST(Sampling, FrequenciesAreRightAcrossBlocks) {
  std::vector<float> logits(1300, -3);
  for (const size_t v : {0, 511, 512, 1023, 1024, 1299}) logits[v] = 6;
  const Samples samples = samples_of(repeat(logits, 4000), {.seed = 2});
  // Six heavy tokens, the others taken as one outcome.
  const double heavy = softmax(logits, 1)[0];
  std::vector<double> expected(7, heavy);
  expected[6] = 1 - 6 * heavy;
  Samples grouped = empty_samples(4000, DType::kF32);
  for (int64_t i = 0; i < 4000; ++i) {
    const int32_t v = token(samples, i);
    const int32_t ids[] = {0, 511, 512, 1023, 1024, 1299};
    const auto* at = std::find(ids, ids + 6, v);
    grouped.tokens.data<int32_t>()[i] = static_cast<int32_t>(at - ids);
  }
  EXPECT_LE(chi_square(grouped.tokens.to_vector<int32_t>(), expected), chi_square_limit(7));
}

TEST(Sampling, SampleIsTheInverseOfTheCdf) {
  const std::vector<float> logits = {0.3f, -0.2f, 1.1f, 0.9f, -2};
  const Samples samples = samples_of(repeat(logits, 500), {.seed = 3}, 40);
  const std::vector<double> p = softmax(logits, 1);
  for (int64_t i = 0; i < 500; ++i) {
    const auto words = philox(3, static_cast<uint64_t>(40 + i), static_cast<uint64_t>(100 + i));
    const double u = uniform_f64(words[0], words[1]);
    double cumulative = 0;
    int32_t expected = 0;
    while (cumulative += p[static_cast<size_t>(expected)], cumulative <= u) ++expected;
    EXPECT_EQ(token(samples, i), expected);
  }
}

// Lanes of f32 additions round 1 + 31 (1.5 2^-24) up to 1 + 31 2^-23, so the block's sum exceeds
// the sum of its tokens in f64 by 9e-7. A random number between the two gives the last possible
// token.
TEST(Sampling, RoundingNeverYieldsAnImpossibleToken) {
  std::vector<float> logits(512, std::log(1.5f * 0x1p-24f));
  std::fill_n(logits.begin(), 16, 0.0f);
  logits[511] = -INFINITY;
  const int64_t index = 27392119;  // found by search
  const auto words = philox(1, 0, index);
  ASSERT_GT(uniform_f64(words[0], words[1]), 1 - 1e-8);
  Samples out = empty_samples(1, DType::kF32);
  SamplingState state = plain_state({.seed = 1}, 1, 0);
  sample_logits({out, state, repeat(logits, 1), own_slots(1), addresses(1, index)});
  EXPECT_EQ(token(out, 0), 510);
}

TEST(Sampling, GreedyTakesTheLowestIdAmongEquals) {
  const Samples samples =
      samples_of(repeat({1, 3, 0, 3, 2}, 3), {.temperature = 0, .top_k = 2, .seed = 4});
  const double expected = std::log(softmax({1, 3, 0, 3, 2}, 1)[1]);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(token(samples, i), 1);
    EXPECT_NEAR(samples.logprob.to_vector<double>()[static_cast<size_t>(i)], expected, 1e-6);
  }
}

std::set<int32_t> support(const std::vector<float>& logits, const SamplingParams& desc) {
  const Samples samples = samples_of(repeat(logits, 3000), desc);
  const auto tokens = samples.tokens.to_vector<int32_t>();
  return {tokens.begin(), tokens.end()};
}

TEST(Sampling, TopKKeepsTheLowestIdsAmongEquals) {
  using Set = std::set<int32_t>;
  EXPECT_EQ(support({1, 2, 1, 2, 1, 0}, {.top_k = 3}), (Set{0, 1, 3}));
  EXPECT_EQ(support({1, 2, 1, 2, 1, 0}, {.top_k = 1}), (Set{1}));
  EXPECT_EQ(support({1, 2, 1, 2, 1, 0}, {.top_k = 60}), (Set{0, 1, 2, 3, 4, 5}));
  // A token without probability is not sampled even if k would admit it.
  EXPECT_EQ(support({1, -INFINITY, 1}, {.top_k = 2}), (Set{0, 2}));
}

TEST(Sampling, TopPKeepsTheSmallestSetThatReachesTheMass) {
  using Set = std::set<int32_t>;
  const float half = std::log(0.5f), quarter = std::log(0.25f), eighth = std::log(0.125f);
  const std::vector<float> logits = {eighth, quarter, eighth, half};
  EXPECT_EQ(support(logits, {.top_p = 0.4}), (Set{3}));
  EXPECT_EQ(support(logits, {.top_p = 0.6}), (Set{1, 3}));
  EXPECT_EQ(support(logits, {.top_p = 0.8}), (Set{0, 1, 3}));
  EXPECT_EQ(support(logits, {.top_p = 0.9}), (Set{0, 1, 2, 3}));
  // After top-k, the mass is that of what is left: 1/2 of 3/4 is two thirds.
  EXPECT_EQ(support(logits, {.top_k = 2, .top_p = 0.6}), (Set{3}));
  EXPECT_EQ(support(logits, {.top_k = 2, .top_p = 0.7}), (Set{1, 3}));
}

TEST(Sampling, TopPWorksBeyondTheFirstSortedPiece) {
  // The 300 lowest ids of 600 equal tokens have half the mass; 256 are sorted at first.
  const std::set<int32_t> seen = support(std::vector<float>(600, 0.5f), {.top_p = 0.5});
  EXPECT_EQ(*seen.rbegin(), 299);
  EXPECT_GT(seen.size(), 256u);
}

TEST(Sampling, RestrictedFrequenciesAreRenormalised) {
  const std::vector<float> logits = {0, 1, -1, 2, 0.5f};
  const Samples samples = samples_of(repeat(logits, 20000), {.top_k = 3, .seed = 7});
  std::vector<double> p = softmax(logits, 1);
  p[0] = p[2] = 0;
  const double kept = p[1] + p[3] + p[4];
  for (double& v : p) v /= kept;
  EXPECT_LE(chi_square(samples.tokens.to_vector<int32_t>(), p), chi_square_limit(3));
  // The recorded log-prob is still that of the full distribution.
  const double full = std::log(softmax(logits, 1)[3]);
  for (int64_t i = 0; i < 100; ++i) {
    if (token(samples, i) == 3) {
      EXPECT_NEAR(samples.logprob.to_vector<double>()[static_cast<size_t>(i)], full, 1e-6);
    }
  }
}

// Entropy is that of all tokens at the temperature, with any truncation.
TEST(Sampling, EntropyIsThatOfTheFullDistribution) {
  const std::vector<float> logits = {0, 1, -1, 2, 0.5f, -INFINITY};
  for (const SamplingParams& desc : {SamplingParams{.temperature = 0.5},
                                     {.temperature = 2, .top_k = 2},
                                     {.temperature = 1, .top_p = 0.5},
                                     {.temperature = 0}}) {
    double expected = 0;
    for (const double p : softmax(logits, desc.temperature == 0 ? 1 : desc.temperature))
      if (p > 0) expected -= p * std::log(p);
    for (const double entropy : samples_of(repeat(logits, 5), desc).entropy.to_vector<double>())
      EXPECT_NEAR(entropy, expected, 1e-6);
  }
}

TEST(Sampling, TruncatedMassIsTheProbabilityLeftOut) {
  const std::vector<float> logits = {std::log(0.125f), std::log(0.25f), std::log(0.125f),
                                     std::log(0.5f)};
  struct Case {
    SamplingParams desc;
    double truncated_mass;
  };
  for (const Case& c : {Case{{.top_k = 1}, 0.5},
                        {{.top_k = 3}, 0.125},
                        {{.top_p = 0.4}, 0.5},
                        {{.top_p = 0.6}, 0.25},
                        {{.top_k = 2, .top_p = 0.6}, 0.5},
                        {{.temperature = 0.5, .top_k = 1}, 1 - 0.25 / 0.34375}})
    for (const double truncated_mass :
         samples_of(repeat(logits, 5), c.desc).truncated_mass.to_vector<double>())
      EXPECT_NEAR(truncated_mass, c.truncated_mass, 1e-6) << c.desc.top_k << " " << c.desc.top_p;
  // Exactly 0 without truncation.
  for (const SamplingParams& desc : {SamplingParams{},
                                     {.top_k = 4},
                                     {.top_p = 0.999999},
                                     {.temperature = 0, .top_k = 1, .top_p = 0.1}})
    for (const double truncated_mass :
         samples_of(repeat(logits, 5), desc).truncated_mass.to_vector<double>())
      EXPECT_EQ(truncated_mass, 0);
}

TEST(Sampling, ARowWithoutADistributionIsAnErrorThatNamesIt) {
  for (const auto& [bad, position] : {std::pair{NAN, 3}, {NAN, 1299}, {INFINITY, 600}})
    for (const SamplingParams& desc :
         {SamplingParams{}, {.temperature = 0}, {.top_k = 3}, {.top_p = 0.5}}) {
      Tensor logits = random_tensor({6, 1300}, DType::kF32, 1);
      logits.data<float>()[2 * 1300 + position] = static_cast<float>(bad);
      logits.data<float>()[4 * 1300 + position] = static_cast<float>(bad);
      EXPECT_THROW_WITH(samples_of(logits, desc), NonFiniteError, "[sample_logits] row 2");
    }
  EXPECT_THROW_WITH(samples_of(repeat({-INFINITY, -INFINITY}, 1), {}), NonFiniteError, "row 0");
  Tensor x = random_tensor({9, 4}, DType::kF32, 1);
  x.data<float>()[7 * 4] = NAN;
  Samples out = empty_samples(9, DType::kF32);
  SamplingState state = plain_state({}, 9, 0);
  const Tensor w = random_tensor({5, 4}, DType::kF32, 2);
  EXPECT_THROW_WITH(head_sample({out, state, x, w, own_slots(9), addresses(9, 0), 2}),
                    NonFiniteError, "[head_sample] row 7");
}

TEST(Sampling, NoRowsAndOneTokenWork) {
  EXPECT_EQ(samples_of(Tensor::empty({0, 5}, DType::kF32), {}).tokens.numel(), 0);
  const Samples one = samples_of(repeat({3}, 2), {});
  EXPECT_EQ(token(one, 1), 0);
  EXPECT_EQ(one.logprob.to_vector<double>()[1], 0);
}

TEST(Sampling, SaysWhatIsWrong) {
  const Tensor logits = Tensor::zeros({2, 5}, DType::kF32);
  EXPECT_THROW_WITH(samples_of(logits, {.temperature = -1}), Error, "temperature of 0 or more");
  EXPECT_THROW_WITH(samples_of(logits, {.top_k = -1}), Error, "top_k of 0 or more");
  EXPECT_THROW_WITH(samples_of(logits, {.top_p = 0}), Error, "top_p in (0, 1]");
  EXPECT_THROW_WITH(samples_of(logits, {.min_p = 1.5}), Error, "row 0: expected min_p in [0, 1]");
  SamplingState state = plain_state({}, 2, 0);
  const Tensor slots = own_slots(2), index = addresses(2, 0);
  Samples out = empty_samples(3, DType::kF32);
  EXPECT_THROW_WITH(sample_logits({out, state, logits, slots, index}), Error,
                    "expected tokens i32[2]");
  Samples two = empty_samples(2, DType::kF32);
  EXPECT_THROW_WITH(sample_logits({two, state, logits, own_slots(3), index}), Error,
                    "expected slots i32[2]");
  EXPECT_THROW_WITH(sample_logits({two, state, logits, slots, addresses(3, 0)}), Error,
                    "expected rng_index i64[2]");
  two.truncated_mass = Tensor::empty({2}, DType::kF64);
  EXPECT_THROW_WITH(sample_logits({two, state, logits, slots, index}), Error,
                    "expected truncated_mass f32[2]");
}

}  // namespace
}  // namespace cohort::kernels
