// Sampling options of a row on the CPU in f32 and f64, and their errors.
#include "tests/kernels/sampling_options.h"

#include <cstring>

namespace cohort::kernels {
namespace {

using namespace test;

constexpr DType kTypes[] = {DType::kF32, DType::kF64};

TEST(SamplingOptions, FrequenciesAreThoseOfTheDefinition) {
  expect_frequencies_by_definition(DType::kF32, {});
}
TEST(SamplingOptions, PaddingOfLogitsTakesNoPart) {
  for (const DType dtype : kTypes) expect_padding_takes_no_part(dtype, {});
}
TEST(SamplingOptions, RowsDoNotDependOnTheOtherRows) {
  for (const DType dtype : kTypes) expect_rows_as_if_alone(dtype, {});
}
TEST(SamplingOptions, LogprobAndEntropyStayTheTrainersToTheBit) {
  for (const DType dtype : kTypes) expect_the_trainers_statistics(dtype, {});
}
TEST(SamplingOptions, IdleRowsAreUntouched) {
  for (const DType dtype : kTypes) expect_idle_rows_untouched(dtype, {});
}
TEST(SamplingOptions, PenaltiesFollowTheSamples) {
  for (const DType dtype : kTypes) expect_counts_follow_the_samples(dtype, {});
}
TEST(SamplingOptions, BiasesOfAnyTokenCount) {
  for (const DType dtype : kTypes) expect_biases_anywhere(dtype, {});
}

TEST(SamplingOptions, SamplesDoNotDependOnThreads) {
  const Tensor logits = random_tensor({60, 2000}, DType::kF32, 1, 2);
  expect_thread_invariant([&] {
    SamplingState state = state_of(many_sequences(60), 2000, DType::kF32, {});
    const Samples d = sample(logits, state, DType::kF32, {});
    return std::vector{d.tokens,         d.logprob,          d.entropy,
                       d.truncated_mass, d.sampling_logprob, state.counts};
  });
}

TEST(SamplingOptions, BiasesThatLeaveNoTokenAreAnError) {
  const Sequence none{.bias = {{0, -INFINITY}, {1, -INFINITY}}};
  SamplingState state = state_of({{}, none}, 2, DType::kF32, {});
  EXPECT_THROW_WITH(sample(repeat({1, 2}, 2), state, DType::kF32, {}), NonFiniteError,
                    "[sample_logits] row 1");
}

// Writes parameters that pack_params() rejects.
void overwrite(SamplingState& state, int64_t slot, const SamplingParams& params) {
  std::memcpy(state.params.select(0, slot).raw(), &params, sizeof params);
}

TEST(SamplingOptions, SaysWhatIsWrongBeforeAnythingIsSampled) {
  const Tensor logits = repeat({1, 2, 3}, 2);
  const Sequence biased{.bias = {{2, 1}, {1, 1}}};
  const auto expect_error = [&](const char* text, auto&& spoil) {
    SamplingState state = state_of({biased, biased}, 3, DType::kF32, {});
    Tensor slots = own_slots(2);
    spoil(state, slots);
    const Tensor counts = state.counts.defined() ? state.counts.clone() : Tensor();
    Samples out = empty_samples(2, DType::kF32);
    EXPECT_THROW_WITH(sample_logits({out, state, logits, slots, addresses(2, 0)}), Error, text);
    EXPECT_EQ(out.tokens.to_vector<int32_t>(), (std::vector{-7, -7}));
    if (counts.defined()) {
      EXPECT_TRUE(bit_equal(state.counts, counts));
    }
  };
  using State = SamplingState;
  expect_error("expected slots below 2, got 2",
               [](State&, Tensor& slots) { slots.data<int32_t>()[1] = 2; });
  expect_error("expected slots below 2, got -2",
               [](State&, Tensor& slots) { slots.data<int32_t>()[1] = -2; });
  expect_error("slot 0 has counts and two rows",
               [](State&, Tensor& slots) { slots.data<int32_t>()[1] = 0; });
  expect_error("slot 1: expected top_p in (0, 1]",
               [](State& s, Tensor&) { overwrite(s, 1, {.top_p = 0}); });
  expect_error("slot 1: expected a temperature of 0 or more",
               [](State& s, Tensor&) { overwrite(s, 1, {.temperature = NAN}); });
  expect_error("slot 1: expected at most 2 biases, got 3",
               [](State& s, Tensor&) { overwrite(s, 1, {.num_bias = 3}); });
  expect_error("slot 1: bias of 3, which is outside the vocabulary of 3",
               [](State& s, Tensor&) { s.bias_ids.data<int32_t>()[2] = 3; });
  expect_error("slot 1: expected counts for its penalties", [](State& s, Tensor&) {
    overwrite(s, 1, {.presence_penalty = 1});
    s.counts = {};
  });
  expect_error("expected counts i32[2, 3]", [](State& s, Tensor&) {
    s.counts = Tensor::zeros({2, 4}, DType::kI32);
  });
  expect_error("expected bias_values f32[2, 2]",
               [](State& s, Tensor&) { s.bias_values = s.bias_values.to(DType::kF64); });
  expect_error("expected params u8[S, 64]", [](State& s, Tensor&) { s.params = {}; });
}

TEST(SamplingOptions, ParametersOutOfRangeAreRefused) {
  const auto pack = [](const SamplingParams& params) {
    const SamplingParams rows[] = {{}, params};
    return pack_params(rows);
  };
  EXPECT_THROW_WITH(pack({.temperature = INFINITY}), Error, "row 1: expected a temperature");
  EXPECT_THROW_WITH(pack({.top_k = -1}), Error, "top_k of 0 or more");
  EXPECT_THROW_WITH(pack({.top_p = NAN}), Error, "top_p in (0, 1]");
  EXPECT_THROW_WITH(pack({.min_p = -0.1}), Error, "min_p in [0, 1]");
  EXPECT_THROW_WITH(pack({.repetition_penalty = 0}), Error, "repetition_penalty above 0");
  EXPECT_THROW_WITH(pack({.presence_penalty = NAN}), Error, "finite presence_penalty");
  EXPECT_THROW_WITH(pack({.frequency_penalty = -INFINITY}), Error, "finite frequency_penalty");
  EXPECT_THROW_WITH(pack({.num_bias = -1}), Error, "num_bias of 0 or more");
  EXPECT_EQ(pack({}).shape(), (Shape{2, 64}));
}

TEST(SamplingOptions, PromptsAreCountedOrRefused) {
  Tensor counts = Tensor::full({3, 4}, 9, DType::kI32);
  count_prompt({counts, ids({3, 1, 3}), 1});
  EXPECT_EQ(counts.to_vector<int32_t>(), (std::vector{9, 9, 9, 9, 0, kInPrompt, 0, kInPrompt,  //
                                                      9, 9, 9, 9}));
  count_prompt({counts, Tensor::empty({0}, DType::kI32), 0});
  EXPECT_EQ(counts.select(0, 0).to_vector<int32_t>(), (std::vector{0, 0, 0, 0}));
  EXPECT_THROW_WITH(count_prompt({counts, ids({0, 4}), 1}), Error, "token 4 at position 1");
  EXPECT_THROW_WITH(count_prompt({counts, ids({0}), 3}), Error, "a slot below 3, got 3");
  EXPECT_THROW_WITH(count_prompt({counts, addresses(1, 0), 0}), Error, "expected tokens i32[1]");
  EXPECT_EQ(counts.select(0, 1).to_vector<int32_t>(), (std::vector{0, kInPrompt, 0, kInPrompt}));
}

}  // namespace
}  // namespace cohort::kernels
