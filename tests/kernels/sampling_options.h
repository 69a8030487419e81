// Tests of the sampling options of a row, for both devices. `dtype` is that of the logits.
#pragma once

#include "autograd/ops.h"
#include "tests/kernels/sampling_reference.h"

namespace cohort::kernels::test {

// One sequence per option and some with several options; ids below 12.
inline std::vector<Sequence> option_cases() {
  const std::vector<int32_t> prompt = {0, 2, 2, 5, 11}, completion = {1, 2, 2, 7, 7, 7};
  const double inf = INFINITY;
  return {
      {.params = {.temperature = 0.6}},
      {.params = {.top_k = 4}},
      {.params = {.top_p = 0.7}},
      {.params = {.min_p = 0.15}},
      {.params = {.min_p = 1}},
      {.params = {.top_k = 6, .top_p = 0.8, .min_p = 0.3}},
      {.params = {.temperature = 2, .top_p = 0.85, .min_p = 0.25}},
      {.params = {.repetition_penalty = 1.7f}, .prompt = prompt, .completion = completion},
      {.params = {.repetition_penalty = 0.6f}, .prompt = prompt},
      {.params = {.presence_penalty = 0.9f}, .prompt = prompt, .completion = completion},
      {.params = {.presence_penalty = -0.7f}, .prompt = prompt, .completion = completion},
      {.params = {.frequency_penalty = 0.4f}, .prompt = prompt, .completion = completion},
      {.bias = {{3, 2.5}, {8, -inf}, {0, -1}, {3, -0.75}}},
      {.params = {.repetition_penalty = 1.5f},
       .completion = completion,
       .bias = {{7, 1.25}, {1, -3}}},
      {.params = {.temperature = 0.8, .top_p = 0.75, .frequency_penalty = 0.5f},
       .prompt = prompt,
       .completion = completion},
      {.params = {.temperature = 1.3,
                  .top_k = 9,
                  .top_p = 0.9,
                  .min_p = 0.2,
                  .repetition_penalty = 1.2f,
                  .presence_penalty = 0.3f,
                  .frequency_penalty = 0.2f},
       .prompt = prompt,
       .completion = completion,
       .bias = {{4, 1}, {2, 0.5}}},
  };
}

inline Samples sample(const Tensor& logits, SamplingState& state, DType dtype, Device device) {
  const int64_t n = logits.dim(0);
  Samples out = empty_samples(n, dtype, device);
  sample_logits({out, state, logits.to(dtype).to(device), own_slots(n).to(device),
                 addresses(n, 100).to(device)});
  return out;
}

// Logits with padding that holds `poison` give the bits of those without, for every option.
inline void expect_padding_takes_no_part(DType dtype, Device device) {
  std::vector<Sequence> sequences = option_cases();
  sequences.push_back({.params = {.temperature = 0}});
  const auto n = static_cast<int64_t>(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) sequences[i].params.stream = i;
  for (const int64_t vocab : {12, 61, 64, 65, 1000})
    for (const double poison : {double{NAN}, double{INFINITY}, 9.0})
      for (const double scale : {0.0, 1.5}) {  // 0: all logits are equal
        const Tensor logits = random_tensor({n, vocab}, DType::kF32, 3, scale).to(dtype).to(device);
        const auto run = [&](const Tensor& z) {
          Samples out = empty_samples(n, dtype, device);
          SamplingState state = state_of(sequences, vocab, dtype, device);
          sample_logits({out, state, z, own_slots(n).to(device), addresses(n, 100).to(device)});
          return std::vector{out.tokens,         out.logprob,          out.entropy,
                             out.truncated_mass, out.sampling_logprob, state.counts};
        };
        const auto expected = run(logits), got = run(padded(logits, 1, 1088, poison));
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(bit_equal(got[i].to(Device{}), expected[i].to(Device{})))
              << vocab << " " << poison << " output " << i;
        for (const int32_t token : got[0].to_vector<int32_t>())
          EXPECT_TRUE(token >= 0 && token < vocab) << token;
      }
}

inline void expect_frequencies_by_definition(DType dtype, Device device) {
  const int64_t n = 50000;
  for (const int64_t vocab : {12, 40}) {
    const Tensor row = random_tensor({1, vocab}, DType::kF32, 3, 1.5);
    const auto z = row.to_vector<double>();
    const Tensor logits = repeat(row.to_vector<float>(), n);
    uint64_t seed = 0;
    for (const Sequence& option : option_cases()) {
      SCOPED_TRACE(testing::Message() << "case " << seed << ", " << vocab << " tokens");
      std::vector<Sequence> sequences(static_cast<size_t>(n), option);
      for (size_t i = 0; i < sequences.size(); ++i) {
        sequences[i].params.seed = seed;
        sequences[i].params.stream = i;
      }
      ++seed;
      SamplingState state = state_of(sequences, vocab, dtype, device);
      const HostSamples samples = on_host(sample(logits, state, dtype, device));
      const Distribution expected = distribution(modified_logits(z, option), option.params);
      const auto possible =
          std::count_if(expected.p.begin(), expected.p.end(), [](double p) { return p > 0; });
      EXPECT_LE(chi_square(samples.tokens, expected.p), chi_square_limit(possible));
      const auto full = distribution(z, {.temperature = option.params.temperature}).p;
      for (size_t i = 0; i < 50; ++i) {
        // Sums of f32 exponentials, some 1e-7 each.
        EXPECT_NEAR(samples.truncated_masses[i], expected.truncated_mass, 3e-6);
        EXPECT_NEAR(samples.logprobs[i], std::log(full[static_cast<size_t>(samples.tokens[i])]),
                    3e-6);
        EXPECT_NEAR(samples.sampling_logprobs[i],
                    std::log(expected.p[static_cast<size_t>(samples.tokens[i])]), 6e-6);
      }
    }
  }
}

// n sequences that cycle through the cases, each with its own stream.
inline std::vector<Sequence> many_sequences(size_t n) {
  const std::vector<Sequence> cases = option_cases();
  std::vector<Sequence> out;
  for (size_t i = 0; i < n; ++i) {
    out.push_back(cases[i % cases.size()]);
    if (i % 5 == 4) out.back().params.temperature = 0;
    out.back().params.seed = i / 3;
    out.back().params.stream = i;
  }
  return out;
}

inline void expect_rows_as_if_alone(DType dtype, Device device) {
  const int64_t n = 60;
  for (const int64_t vocab : {13, 1031, 9000}) {
    const Tensor logits = random_tensor({n, vocab}, DType::kF32, 1, 2);
    const auto sequences = many_sequences(static_cast<size_t>(n));
    SamplingState state = state_of(sequences, vocab, dtype, device);
    const Samples all = sample(logits, state, dtype, device);
    const Tensor counts = state.counts.to(Device{});
    state = state_of(sequences, vocab, dtype, device);
    for (int64_t i = n - 1; i >= 0; --i) {
      Samples alone = empty_samples(1, dtype, device);
      sample_logits({alone, state, logits.narrow(0, i, 1).to(dtype).to(device),
                     own_slots(n).narrow(0, i, 1).to(device), addresses(1, 100 + i).to(device)});
      for (const auto tensor : {&Samples::tokens, &Samples::logprob, &Samples::entropy,
                                &Samples::truncated_mass, &Samples::sampling_logprob})
        EXPECT_TRUE(
            bit_equal((alone.*tensor).to(Device{}), (all.*tensor).narrow(0, i, 1).to(Device{})))
            << i << ", " << vocab << " tokens";
    }
    EXPECT_TRUE(bit_equal(state.counts.to(Device{}), counts)) << vocab;
  }
}

// The guarantee that makes ratio == 1 on the first minibatch, for any modified distribution.
inline void expect_the_trainers_statistics(DType dtype, Device device) {
  const int64_t n = 40, channels = 24;
  for (const int64_t vocab : {12, 1030, 5003})
    for (const double temperature : {1.0, 0.7}) {
      const Tensor x = random_tensor({n, channels}, DType::kF32, 1).to(dtype).to(device);
      const Tensor w = random_tensor({vocab, channels}, DType::kF32, 2, 0.3).to(dtype).to(device);
      auto sequences = many_sequences(static_cast<size_t>(n));
      for (Sequence& s : sequences) s.params.temperature = temperature;
      const DType statistic = accumulate_dtype(dtype);
      SamplingState state = state_of(sequences, vocab, statistic, device);
      Samples out = empty_samples(n, statistic, device);
      head_sample({out, state, x, w, own_slots(n).to(device), addresses(n, 4).to(device), 7});
      Tensor logprob = Tensor::empty({n}, statistic, device), entropy = logprob.clone();
      Tensor lse = logprob.clone();
      head_logprob_forward(
          {logprob, entropy, lse, {x, w, out.tokens, {.temperature = temperature}}});
      EXPECT_TRUE(bit_equal(logprob.to(Device{}), out.logprob.to(Device{}))) << vocab;
      EXPECT_TRUE(bit_equal(entropy.to(Device{}), out.entropy.to(Device{}))) << vocab;
    }
}

inline void expect_idle_rows_untouched(DType dtype, Device device) {
  Tensor logits = random_tensor({5, 300}, DType::kF32, 1);
  logits.data<float>()[0] = logits.data<float>()[2 * 300] = NAN;  // idle rows are not read
  SamplingState state = state_of(many_sequences(3), 300, dtype, device);
  const Tensor counts = state.counts.to(Device{}).clone();
  Samples out = empty_samples(5, dtype, device);
  const Tensor slots = Tensor::from(std::vector<int32_t>{-1, 2, -1, 0, -1});
  sample_logits(
      {out, state, logits.to(dtype).to(device), slots.to(device), addresses(5, 0).to(device)});
  const HostSamples samples = on_host(out);
  for (size_t i = 0; i < 5; ++i) {
    const bool idle = i % 2 == 0;
    EXPECT_EQ(samples.tokens[i] == -7, idle);
    for (const auto values : {&HostSamples::logprobs, &HostSamples::entropies,
                              &HostSamples::truncated_masses, &HostSamples::sampling_logprobs})
      EXPECT_EQ(std::isnan((samples.*values)[i]), idle);
  }
  Tensor expected = counts;
  expected.data<int32_t>()[2 * 300 + samples.tokens[1]] += 1;
  expected.data<int32_t>()[samples.tokens[3]] += 1;
  EXPECT_TRUE(bit_equal(state.counts.to(Device{}), expected));
}

// Greedy decoding of one sequence, whose penalties depend on its own samples.
inline void expect_counts_follow_the_samples(DType dtype, Device device) {
  const std::vector<float> row = {2, 1.9f, -0.5f, 1.5f, 1.7f};
  Sequence s{.params = {.temperature = 0,
                        .repetition_penalty = 1.1f,
                        .presence_penalty = 0.2f,
                        .frequency_penalty = 0.07f},
             .prompt = {4, 0, 4}};
  SamplingState state = state_of({s, s}, 5, dtype, device);
  state.counts.fill_(77);  // counts of an earlier sequence
  count_prompt({state.counts, Tensor::from(s.prompt).to(device), 1});
  for (int step = 0; step < 25; ++step) {
    const auto z = modified_logits({row.begin(), row.end()}, s);
    Samples out = empty_samples(1, dtype, device);
    sample_logits({out, state, repeat(row, 1).to(dtype).to(device),
                   Tensor::from(std::vector<int32_t>{1}).to(device),
                   addresses(1, step).to(device)});
    const int32_t token = out.tokens.to_vector<int32_t>()[0];
    EXPECT_EQ(token, std::max_element(z.begin(), z.end()) - z.begin()) << "step " << step;
    EXPECT_EQ(out.truncated_mass.to_vector<double>()[0], 0);
    EXPECT_EQ(out.sampling_logprob.to_vector<double>()[0], 0);
    s.completion.push_back(token);
  }
  const SamplingState expected = state_of({s, s}, 5, dtype, {});
  EXPECT_TRUE(bit_equal(state.counts.select(0, 1).to(Device{}), expected.counts.select(0, 1)));
  EXPECT_EQ(state.counts.select(0, 0).to_vector<int32_t>(), std::vector<int32_t>(5, 77));
}

// Biases at the boundaries of what one block or thread writes.
inline void expect_biases_anywhere(DType dtype, Device device) {
  const int64_t vocab = 20011;
  const Tensor logits = random_tensor({1, vocab}, DType::kF32, 5);
  for (const int32_t id : {0, 1, 511, 512, 8191, 8192, 16383, 16384, 20010}) {
    Sequence s{.params = {.temperature = 0, .repetition_penalty = 2}, .prompt = {id}};
    for (int32_t other = 0; other < 700; ++other) s.bias.push_back({other * 28, -5});
    s.bias.push_back({id, 50});
    s.bias.push_back({id, 1000});
    SamplingState state = state_of({s}, vocab, dtype, device);
    const auto z = modified_logits(logits.to_vector<double>(), s);
    ASSERT_EQ(std::max_element(z.begin(), z.end()) - z.begin(), id);
    EXPECT_EQ(sample(logits, state, dtype, device).tokens.to_vector<int32_t>()[0], id);
    // Half of the biased logit is more than the others: all of them are left out.
    s.params.temperature = 1;
    s.params.min_p = 0.5;
    state = state_of({s}, vocab, dtype, device);
    const HostSamples samples = on_host(sample(logits, state, dtype, device));
    EXPECT_EQ(samples.tokens[0], id);
    EXPECT_NEAR(samples.truncated_masses[0], 0, 1e-100);
  }
}

}  // namespace cohort::kernels::test
