// Sampling on CUDA: log-probs are bitwise those of the fused head, and samples invert the CDF as
// defined in f64.
#include "kernels/sampling.h"

#include <set>

#include "autograd/ops.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/sampling_reference.h"

namespace cohort::kernels {
namespace {

using namespace test;

double uniform(uint64_t seed, int64_t stream, int64_t index) {
  const auto words = philox(seed, static_cast<uint64_t>(stream), static_cast<uint64_t>(index));
  return uniform_f64(words[0], words[1]);
}

// Samples from CPU logits [n, V], row i with the Philox address (i, 100 + i).
HostSamples sample_of(const Tensor& logits, const SamplingParams& params, Device device,
                      Start start = Start::kAligned) {
  const int64_t n = logits.dim(0);
  Guarded z(logits, DType::kF32, device, start), logprob(Shape{n}, DType::kF32, device, start);
  Guarded entropy(Shape{n}, DType::kF32, device, start),
      truncated_mass(Shape{n}, DType::kF32, device, start),
      sampling_logprob(Shape{n}, DType::kF32, device, start);
  Guarded tokens(Tensor::full({n}, -7, DType::kI32), DType::kI32, device, start);
  Samples out{.tokens = tokens.tensor(),
              .logprob = logprob.tensor(),
              .entropy = entropy.tensor(),
              .truncated_mass = truncated_mass.tensor(),
              .sampling_logprob = sampling_logprob.tensor()};
  SamplingState state = plain_state(params, n, 0, device);
  sample_logits({out, state, z.tensor(), own_slots(n).to(device), addresses(n, 100).to(device)});
  EXPECT_TRUE(z.intact() && tokens.intact() && logprob.intact() && entropy.intact() &&
              truncated_mass.intact() && sampling_logprob.intact());
  return on_host(out);
}

// Expects `token` to be where the CDF of p crosses u; f32 rounding moves its steps by less than
// 1e-5.
void expect_inverse(const std::vector<double>& p, double u, int32_t token) {
  ASSERT_TRUE(token >= 0 && token < static_cast<int32_t>(p.size())) << token;
  const auto at = p.begin() + token;
  const double before = std::accumulate(p.begin(), at, 0.0);
  EXPECT_GT(*at, 0) << "token " << token;
  EXPECT_GT(u, before - 1e-5) << "token " << token;
  EXPECT_LT(u, before + *at + 1e-5) << "token " << token;
}

// Guarantees ratio == 1 on the first minibatch, for other batches and chunks.
TEST(CudaSampling, LogprobAndEntropyAreTheTrainersToTheBit) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const double temperature : {1.0, 0.7, 0.0})
      for (const auto& [n, channels, vocab] :
           {std::tuple{5, 16, 9}, {37, 72, 1030}, {64, 64, 4096}, {1, 40, 5003}}) {
        const int64_t total = 400, first = 60;
        const Tensor all = random_tensor({total, channels}, dtype, 1).to(device);
        const Tensor w = random_tensor({vocab, channels}, dtype, 2, 0.3).to(device);
        Guarded logprob(Shape{n}, DType::kF32, device), sampled(Shape{n}, DType::kF32, device);
        Samples out = empty_samples(n, DType::kF32, device);
        out.logprob = logprob.tensor();
        out.entropy = sampled.tensor();
        SamplingState state =
            plain_state({.temperature = temperature, .top_k = 5, .seed = 6}, n, 3, device);
        head_sample({out, state, all.narrow(0, first, n), w, own_slots(n).to(device),
                     addresses(n, 4).to(device), 24});
        EXPECT_TRUE(logprob.intact() && sampled.intact());
        Tensor targets = Tensor::full({total}, 1, DType::kI32).to(device);
        targets.narrow(0, first, n).copy_(out.tokens);
        Tensor trained = Tensor::empty({total}, DType::kF32, device);
        Tensor entropy = trained.clone(), lse = trained.clone();
        head_logprob_forward(
            {trained,
             entropy,
             lse,
             {all, w, targets, {.temperature = temperature == 0 ? 1 : temperature}}});
        for (const auto& [theirs, ours] :
             {std::pair{&trained, &out.logprob}, {&entropy, &out.entropy}})
          EXPECT_TRUE(bit_equal(theirs->narrow(0, first, n).to(Device{}), ours->to(Device{})))
              << dtype_name(dtype) << " " << temperature << " " << vocab;
      }
}

TEST(CudaSampling, SamplesAreTheInverseOfTheCdf) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t vocab : {1, 2, 5, 127, 128, 129, 1030, 2049, 5003})
    for (const SamplingParams& params :
         {SamplingParams{.seed = 1},
          {.temperature = 0.5, .seed = 2},
          {.top_k = 3, .seed = 3},
          {.top_p = 0.8, .seed = 4},
          {.min_p = 0.1, .seed = 4},
          {.temperature = 2, .top_k = 40, .top_p = 0.6, .seed = 5}}) {
      const int64_t n = 50;
      const Tensor logits = random_tensor({n, vocab}, DType::kF32, 1, 2);
      for (const Start start : kStarts) {
        const HostSamples samples = sample_of(logits, params, device, start);
        for (int64_t i = 0; i < n; ++i) {
          const auto row = logits.select(0, i).to_vector<double>();
          const int32_t token = samples.tokens[static_cast<size_t>(i)];
          expect_inverse(distribution(row, params).p, uniform(params.seed, i, 100 + i), token);
          // The recorded log-prob is that of the full distribution.
          const auto full = distribution(row, {.temperature = params.temperature}).p;
          EXPECT_NEAR(samples.logprobs[static_cast<size_t>(i)],
                      std::log(full[static_cast<size_t>(token)]), 1e-5);
          double entropy = 0;
          for (const double p : full)
            if (p > 0) entropy -= p * std::log(p);
          EXPECT_NEAR(samples.entropies[static_cast<size_t>(i)], entropy, 1e-5);
          EXPECT_NEAR(samples.truncated_masses[static_cast<size_t>(i)],
                      distribution(row, params).truncated_mass, 1e-5);
          if (params.top_k == 0 && params.top_p == 1 && params.min_p == 0) {
            EXPECT_EQ(samples.truncated_masses[static_cast<size_t>(i)], 0);
          }
        }
      }
    }
}

TEST(CudaSampling, FrequenciesAreTheProbabilities) {
  COHORT_REQUIRE_GPU(device);
  const std::vector<float> logits = {0, 1, -1, 2, 0.5f, -INFINITY, 1.5f, -0.5f};
  const int64_t n = 20000;
  const HostSamples samples = sample_of(repeat(logits, n), {.seed = 1}, device);
  const auto p = distribution({logits.begin(), logits.end()}, {}).p;
  EXPECT_LE(chi_square(samples.tokens, p), chi_square_limit(7));
}

TEST(CudaSampling, GreedyTakesTheLowestIdAmongEquals) {
  COHORT_REQUIRE_GPU(device);
  const SamplingParams params{.temperature = 0, .top_k = 2, .seed = 4};
  const HostSamples samples = sample_of(repeat({1, 3, 0, 3, 2}, 2), params, device);
  EXPECT_EQ(samples.tokens, (std::vector{1, 1}));
  EXPECT_EQ(samples.truncated_masses, (std::vector{0.0, 0.0}));
  EXPECT_EQ(sample_of(repeat({-1, -0.0f, 0.0f}, 1), params, device).tokens, (std::vector{1}));
  std::vector<float> wide(5003, -1);
  wide[4100] = wide[3000] = wide[4999] = 7;
  EXPECT_EQ(sample_of(repeat(wide, 1), params, device).tokens, (std::vector{3000}));
}

std::set<int32_t> support(const std::vector<float>& logits, const SamplingParams& params,
                          Device device) {
  const HostSamples samples = sample_of(repeat(logits, 3000), params, device);
  return {samples.tokens.begin(), samples.tokens.end()};
}

TEST(CudaSampling, TopKKeepsTheLowestIdsAmongEquals) {
  COHORT_REQUIRE_GPU(device);
  using Set = std::set<int32_t>;
  EXPECT_EQ(support({1, 2, 1, 2, 1, 0}, {.top_k = 3}, device), (Set{0, 1, 3}));
  EXPECT_EQ(support({1, 2, 1, 2, 1, 0}, {.top_k = 1}, device), (Set{1}));
  EXPECT_EQ(support({1, 2, 1, 2, 1, 0}, {.top_k = 60}, device), (Set{0, 1, 2, 3, 4, 5}));
  // -0 and 0 are equal logits; an excluded token is not sampled even if k would allow it.
  EXPECT_EQ(support({-0.0f, 0.0f, -0.0f, 0.0f}, {.top_k = 2}, device), (Set{0, 1}));
  EXPECT_EQ(support({-1, -INFINITY, -1}, {.top_k = 2}, device), (Set{0, 2}));
  EXPECT_EQ(support(std::vector<float>(3000, 0.5f), {.top_k = 2}, device), (Set{0, 1}));
}

TEST(CudaSampling, TopPKeepsTheSmallestSetThatReachesTheMass) {
  COHORT_REQUIRE_GPU(device);
  using Set = std::set<int32_t>;
  const float half = std::log(0.5f), quarter = std::log(0.25f), eighth = std::log(0.125f);
  const std::vector<float> logits = {eighth, quarter, eighth, half};
  EXPECT_EQ(support(logits, {.top_p = 0.4}, device), (Set{3}));
  EXPECT_EQ(support(logits, {.top_p = 0.6}, device), (Set{1, 3}));
  EXPECT_EQ(support(logits, {.top_p = 0.8}, device), (Set{0, 1, 3}));
  EXPECT_EQ(support(logits, {.top_p = 0.9}, device), (Set{0, 1, 2, 3}));
  EXPECT_EQ(support(logits, {.top_p = 1e-9}, device), (Set{3}));
  // After top-k the mass is renormalised: 1/2 of 3/4 is two thirds.
  EXPECT_EQ(support(logits, {.top_k = 2, .top_p = 0.6}, device), (Set{3}));
  EXPECT_EQ(support(logits, {.top_k = 2, .top_p = 0.7}, device), (Set{1, 3}));
  // The 300 lowest ids of 600 equal tokens have half of the mass.
  const Set seen = support(std::vector<float>(600, 0.5f), {.top_p = 0.5}, device);
  EXPECT_EQ(*seen.rbegin(), 299);
  EXPECT_GT(seen.size(), 256u);
}

TEST(CudaSampling, ARowWithoutADistributionGivesNoToken) {
  COHORT_REQUIRE_GPU(device);
  for (const auto& [bad, position] : {std::pair{NAN, 3}, {NAN, 1299}, {INFINITY, 600}})
    for (const SamplingParams& params :
         {SamplingParams{}, {.temperature = 0}, {.top_k = 3}, {.top_p = 0.5}}) {
      Tensor logits = random_tensor({4, 1300}, DType::kF32, 1);
      logits.data<float>()[2 * 1300 + position] = bad;
      const HostSamples samples = sample_of(logits, params, device);
      for (size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(samples.tokens[i] == -1, i == 2) << i;
        for (const auto statistic :
             {&HostSamples::logprobs, &HostSamples::entropies, &HostSamples::truncated_masses,
              &HostSamples::sampling_logprobs})
          EXPECT_EQ(std::isnan((samples.*statistic)[i]), i == 2) << i;
      }
    }
  EXPECT_EQ(sample_of(repeat({-INFINITY, -INFINITY}, 1), {}, device).tokens, (std::vector{-1}));
  // A NaN among excluded tokens only, in one thread's ids and in a row.
  EXPECT_EQ(sample_of(repeat({NAN, -INFINITY, -INFINITY, -INFINITY, 1}, 1), {}, device).tokens,
            (std::vector{-1}));
}

TEST(CudaSampling, SamplesDoNotDependOnTheBatch) {
  COHORT_REQUIRE_GPU(device);
  const int64_t n = 50;
  for (const DType dtype : kCudaTypes)
    for (const int64_t vocab : {704, 1031}) {
      const Tensor x = random_tensor({n, 40}, dtype, 1).to(device);
      const Tensor w = random_tensor({vocab, 40}, dtype, 2).to(device);
      const Tensor slots = own_slots(n).to(device), index = addresses(n, 4).to(device);
      for (const SamplingParams& params :
           {SamplingParams{.seed = 9}, {.top_k = 20, .top_p = 0.9, .seed = 9}}) {
        SamplingState state = plain_state(params, n, 3, device);
        const auto run = [&](int64_t first, int64_t count, int64_t chunk) {
          Samples out = empty_samples(count, DType::kF32, device);
          head_sample({out, state, x.narrow(0, first, count), w, slots.narrow(0, first, count),
                       index.narrow(0, first, count), chunk});
          return std::vector{out.tokens.to(Device{}), out.logprob.to(Device{}),
                             out.entropy.to(Device{}), out.truncated_mass.to(Device{}),
                             out.sampling_logprob.to(Device{})};
        };
        const auto all = run(0, n, 0);
        expect_reproducible([&] { return run(0, n, 0); });
        for (const int64_t chunk : {1, 7, 1000})
          for (const auto& [first, count] : {std::pair{0, 50}, {13, 1}, {20, 30}}) {
            const auto part = run(first, count, chunk);
            for (size_t i = 0; i < part.size(); ++i)
              EXPECT_TRUE(bit_equal(part[i], all[i].narrow(0, first, count)))
                  << vocab << " " << chunk << " " << first;
          }
      }
    }
}

// A row as large as real vocabularies, in several tiles of 128 sums, with a heavy tail.
TEST(CudaSampling, LargeVocabulariesWork) {
  COHORT_REQUIRE_GPU(device);
  const int64_t vocab = 151936, n = 4;
  const Tensor logits = random_tensor({n, vocab}, DType::kF32, 1, 3);
  for (const SamplingParams& params :
       {SamplingParams{.seed = 1}, {.top_k = 5000, .seed = 1}, {.top_p = 0.9, .seed = 1}}) {
    const HostSamples samples = sample_of(logits, params, device);
    for (int64_t i = 0; i < n; ++i)
      expect_inverse(distribution(logits.select(0, i).to_vector<double>(), params).p,
                     uniform(1, i, 100 + i), samples.tokens[static_cast<size_t>(i)]);
  }
}

TEST(CudaSampling, EmptyBatchesWorkAndInvalidArgumentsAreRejected) {
  COHORT_REQUIRE_GPU(device);
  EXPECT_TRUE(sample_of(Tensor::empty({0, 5}, DType::kF32), {}, device).tokens.empty());
  const Tensor logits = Tensor::zeros({1, 5}, DType::kF32, device);
  const Tensor here = addresses(1, 0), there = here.to(device), slots = own_slots(1).to(device);
  Samples out = empty_samples(1, DType::kF32, device);
  SamplingState state = plain_state({}, 1, 0, device);
  EXPECT_THROW_WITH(sample_logits({out, state, logits, slots, here}), Error,
                    "expected rng_index on cuda:0");
  EXPECT_THROW_WITH(sample_logits({out, state, logits.to(DType::kBF16), slots, there}), Error,
                    "expected f32 logits");
  const Tensor wide = Tensor::zeros({1, (1 << 20) + 1}, DType::kF32, device);
  EXPECT_THROW_WITH(sample_logits({out, state, wide, slots, there}), Error,
                    "at most 1048576 tokens");
}

}  // namespace
}  // namespace cohort::kernels
