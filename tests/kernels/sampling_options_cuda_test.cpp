// Sampling options on CUDA: as on the CPU, except for errors that the host cannot detect.
#include <cstring>

#include "tests/kernels/cuda_test.h"
#include "tests/kernels/sampling_options.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(CudaSamplingOptions, FrequenciesAreThoseOfTheDefinition) {
  COHORT_REQUIRE_GPU(device);
  expect_frequencies_by_definition(DType::kF32, device);
}
TEST(CudaSamplingOptions, PaddingOfLogitsTakesNoPart) {
  COHORT_REQUIRE_GPU(device);
  expect_padding_takes_no_part(DType::kF32, device);
}
TEST(CudaSamplingOptions, RowsDoNotDependOnTheOtherRows) {
  COHORT_REQUIRE_GPU(device);
  expect_rows_as_if_alone(DType::kF32, device);
}
TEST(CudaSamplingOptions, LogprobAndEntropyStayTheTrainersToTheBit) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) expect_the_trainers_statistics(dtype, device);
}
TEST(CudaSamplingOptions, IdleRowsAreUntouched) {
  COHORT_REQUIRE_GPU(device);
  expect_idle_rows_untouched(DType::kF32, device);
}
TEST(CudaSamplingOptions, PenaltiesFollowTheSamples) {
  COHORT_REQUIRE_GPU(device);
  expect_counts_follow_the_samples(DType::kF32, device);
}
TEST(CudaSamplingOptions, BiasesOfAnyTokenCount) {
  COHORT_REQUIRE_GPU(device);
  expect_biases_anywhere(DType::kF32, device);
}

// Modified logits have the CPU's bits, so samples differ at edges of the CDF only. Roundings of f32
// exponentials and of their sums move an edge by about 1e-8 of the interval of u: with 40,000 edges
// and 500 samples, 0.2 differences are expected.
TEST(CudaSamplingOptions, SamplesMatchTheCpu) {
  COHORT_REQUIRE_GPU(device);
  const int64_t n = 500;
  for (const int64_t vocab : {50, 3001, 40000}) {
    const Tensor logits = random_tensor({n, vocab}, DType::kF32, 7, 2);
    const auto sequences = many_sequences(static_cast<size_t>(n));
    SamplingState here = state_of(sequences, vocab, DType::kF32, {});
    SamplingState there = state_of(sequences, vocab, DType::kF32, device);
    const HostSamples cpu = on_host(sample(logits, here, DType::kF32, {}));
    const HostSamples gpu = on_host(sample(logits, there, DType::kF32, device));
    int different = 0;
    for (size_t i = 0; i < cpu.tokens.size(); ++i) different += cpu.tokens[i] != gpu.tokens[i];
    EXPECT_LE(different, 2) << vocab;
  }
}

// Long runs of excluded tokens: whole warps have no weight, or very little.
TEST(CudaSamplingOptions, RunsWithoutWeightAreNeverChosen) {
  COHORT_REQUIRE_GPU(device);
  std::vector<float> row(6000, -INFINITY);
  row[5] = 0;
  row[300] = -80;  // e^-80 rounds to 0 relative to 1, and its run has no other weight
  row[3000] = row[5999] = 1;
  const int64_t n = 3000;
  for (const double min_p : {0.0, 1e-30}) {
    SamplingState state = plain_state({.min_p = min_p, .seed = 3}, n, 0, device);
    const HostSamples samples = on_host(sample(repeat(row, n), state, DType::kF32, device));
    const auto p = distribution({row.begin(), row.end()}, {}).p;
    int counts[3] = {};
    for (const int32_t token : samples.tokens) {
      ASSERT_TRUE(token == 5 || token == 3000 || token == 5999) << token;
      ++counts[token == 5 ? 0 : token == 3000 ? 1 : 2];
    }
    // Five standard deviations of a count.
    for (const auto& [i, v] : {std::pair{0, 5}, {1, 3000}, {2, 5999}}) {
      const double mean = p[static_cast<size_t>(v)] * n;
      EXPECT_NEAR(counts[i], mean, 5 * std::sqrt(mean));
    }
  }
}

// Errors that the CPU throws are reported by token -1 and NaN on the device.
TEST(CudaSamplingOptions, RowsThatCannotBeSampledGiveNoToken) {
  COHORT_REQUIRE_GPU(device);
  const Sequence biased{.bias = {{2, 1}, {1, 1}}};
  const auto expect_no_token = [&](auto&& spoil) {
    SamplingState state = state_of(std::vector(3, biased), 3, DType::kF32, {});
    Tensor slots = own_slots(3);
    spoil(state, slots);
    for (Tensor* t : {&state.params, &state.counts, &state.bias_ids, &state.bias_values})
      if (t->defined()) *t = t->to(device);
    Samples out = empty_samples(3, DType::kF32, device);
    sample_logits({out, state, repeat({1, 2, 3}, 3).to(device), slots.to(device),
                   addresses(3, 0).to(device)});
    const HostSamples samples = on_host(out);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(samples.tokens[i] == -1, i == 1);
      for (const auto values : {&HostSamples::logprobs, &HostSamples::entropies,
                                &HostSamples::truncated_masses, &HostSamples::sampling_logprobs})
        EXPECT_EQ(std::isnan((samples.*values)[i]), i == 1);
    }
  };
  const auto with_params = [](const SamplingParams& params) {
    return [params](SamplingState& s, Tensor&) {
      std::memcpy(s.params.select(0, 1).raw(), &params, sizeof params);
    };
  };
  for (const int32_t slot : {3, -2, 1 << 30})
    expect_no_token([&](SamplingState&, Tensor& slots) { slots.data<int32_t>()[1] = slot; });
  expect_no_token(with_params({.temperature = NAN}));
  expect_no_token(with_params({.top_p = 0}));
  expect_no_token(with_params({.min_p = 2}));
  expect_no_token(with_params({.repetition_penalty = -1}));
  expect_no_token(with_params({.num_bias = 3}));
  expect_no_token([&](SamplingState& s, Tensor& slots) {
    with_params({.presence_penalty = 1})(s, slots);
    s.counts = {};
  });
  expect_no_token([](SamplingState& s, Tensor&) {
    // Biases of slot 1 that exclude all tokens; its third logit is already excluded.
    s.bias_values.data<float>()[2] = s.bias_values.data<float>()[3] = INFINITY;
  });
}

TEST(CudaSamplingOptions, PromptsAreCounted) {
  COHORT_REQUIRE_GPU(device);
  Tensor counts = Tensor::full({3, 4}, 9, DType::kI32, device);
  count_prompt(
      {counts, ids({3, 1, 3, 4, -1}).to(device), 1});  // 4 and -1 are not in the vocabulary
  EXPECT_EQ(counts.to_vector<int32_t>(), (std::vector{9, 9, 9, 9, 0, kInPrompt, 0, kInPrompt,  //
                                                      9, 9, 9, 9}));
  count_prompt({counts, Tensor::empty({0}, DType::kI32, device), 2});
  EXPECT_EQ(counts.select(0, 2).to_vector<int32_t>(), (std::vector{0, 0, 0, 0}));
}

}  // namespace
}  // namespace cohort::kernels
