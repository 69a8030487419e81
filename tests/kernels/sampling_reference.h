// Sampling by its definition in f64 (sort, cumulate), and helpers for the tests of both devices.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/rng.h"
#include "kernels/sampling.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::test {

inline Tensor addresses(int64_t n, int64_t first) {
  std::vector<int64_t> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), first);
  return Tensor::from(values);
}

// 0, 1, ..., n - 1: row i has slot i.
inline Tensor own_slots(int64_t n) {
  std::vector<int32_t> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 0);
  return Tensor::from(values);
}

// n rows with the same logits.
inline Tensor repeat(const std::vector<float>& row, int64_t n) {
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) values.insert(values.end(), row.begin(), row.end());
  return Tensor::from(values, {n, static_cast<int64_t>(row.size())});
}

// A sequence and the sampling options of its next token.
struct Sequence {
  SamplingParams params;
  std::vector<int32_t> prompt, completion;
  struct Bias {
    int32_t id;
    double value;
  };
  std::vector<Bias> bias;
};

// State of n slots with these parameters and streams from `first_stream` on; no counts, no biases.
inline SamplingState plain_state(const SamplingParams& params, int64_t n, int64_t first_stream,
                                 Device device = {}) {
  std::vector<SamplingParams> each(static_cast<size_t>(n), params);
  for (int64_t i = 0; i < n; ++i)
    each[static_cast<size_t>(i)].stream = static_cast<uint64_t>(first_stream + i);
  return {.params = pack_params(each).to(device)};
}

// State with counts and biases, even if no sequence needs them.
inline SamplingState state_of(const std::vector<Sequence>& sequences, int64_t vocab,
                              DType statistic, Device device) {
  const auto slots = static_cast<int64_t>(sequences.size());
  int64_t most = 1;
  for (const Sequence& s : sequences) most = std::max(most, static_cast<int64_t>(s.bias.size()));
  // Entries beyond a row's biases must not matter.
  Tensor ids = Tensor::full({slots, most}, 1, DType::kI32);
  Tensor values = Tensor::full({slots, most}, NAN, DType::kF64);
  Tensor counts = Tensor::zeros({slots, vocab}, DType::kI32);
  std::vector<SamplingParams> params;
  for (int64_t i = 0; i < slots; ++i) {
    const Sequence& s = sequences[static_cast<size_t>(i)];
    params.push_back(s.params);
    params.back().num_bias = static_cast<int32_t>(s.bias.size());
    for (size_t b = 0; b < s.bias.size(); ++b) {
      ids.data<int32_t>()[i * most + static_cast<int64_t>(b)] = s.bias[b].id;
      values.data<double>()[i * most + static_cast<int64_t>(b)] = s.bias[b].value;
    }
    int32_t* count = counts.data<int32_t>() + i * vocab;
    for (const int32_t v : s.prompt) count[v] |= kInPrompt;
    for (const int32_t v : s.completion) count[v] += 1;
  }
  return {.params = pack_params(params).to(device),
          .counts = counts.to(device),
          .bias_ids = ids.to(device),
          .bias_values = values.to(statistic).to(device)};
}

// Steps 1 to 3 of the contract.
inline std::vector<double> modified_logits(std::vector<double> z, const Sequence& s) {
  for (const auto& [id, value] : s.bias) z[static_cast<size_t>(id)] += value;
  for (size_t v = 0; v < z.size(); ++v) {
    const auto in = [&](const std::vector<int32_t>& tokens) {
      return static_cast<double>(std::count(tokens.begin(), tokens.end(), static_cast<int32_t>(v)));
    };
    const double r = static_cast<double>(s.params.repetition_penalty), count = in(s.completion);
    if (count + in(s.prompt) > 0) z[v] = z[v] > 0 ? z[v] / r : z[v] * r;
    z[v] -= static_cast<double>(s.params.frequency_penalty) * count;
    if (count > 0) z[v] -= static_cast<double>(s.params.presence_penalty);
  }
  return z;
}

// Probabilities of the tokens, and the mass that is truncated from the modified distribution.
struct Distribution {
  std::vector<double> p;
  double truncated_mass = 0;
};

// Steps 4 to 7 on modified logits; temperature > 0.
inline Distribution distribution(const std::vector<double>& z, const SamplingParams& params) {
  std::vector<size_t> order(z.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return z[a] > z[b]; });
  std::vector<double> weight(z.size());
  for (size_t v = 0; v < z.size(); ++v)
    weight[v] = std::exp((z[v] - z[order[0]]) / params.temperature);
  const auto sum = [&] {
    return std::accumulate(order.begin(), order.end(), 0.0,
                           [&](double a, size_t v) { return a + weight[v]; });
  };
  const double all = sum();
  if (params.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(params.top_k)));
  if (params.top_p < 1) {
    const double goal = params.top_p * sum();
    double mass = 0;
    size_t n = 0;
    while (n < order.size() && mass < goal) mass += weight[order[n++]];
    order.resize(n);
  }
  std::erase_if(order, [&](size_t v) { return weight[v] < params.min_p; });
  const double kept = sum();
  Distribution out{.p = std::vector<double>(z.size()), .truncated_mass = 1 - kept / all};
  for (const size_t v : order) out.p[v] = weight[v] / kept;
  return out;
}

// Samples on the host.
struct HostSamples {
  std::vector<int32_t> tokens;
  std::vector<double> logprobs, entropies, truncated_masses, sampling_logprobs;
};

inline Samples empty_samples(int64_t n, DType statistic, Device device = {}) {
  const auto nan = [&] { return Tensor::full({n}, NAN, statistic, device); };
  return {.tokens = Tensor::full({n}, -7, DType::kI32, device),
          .logprob = nan(),
          .entropy = nan(),
          .truncated_mass = nan(),
          .sampling_logprob = nan()};
}

inline HostSamples on_host(const Samples& samples) {
  return {samples.tokens.to_vector<int32_t>(), samples.logprob.to_vector<double>(),
          samples.entropy.to_vector<double>(), samples.truncated_mass.to_vector<double>(),
          samples.sampling_logprob.to_vector<double>()};
}

// Pearson's statistic of tokens whose expected frequencies are `p`.
inline double chi_square(const std::vector<int32_t>& tokens, const std::vector<double>& p) {
  std::vector<double> counts(p.size());
  for (const int32_t token : tokens) counts.at(static_cast<size_t>(token)) += 1;
  double statistic = 0;
  for (size_t v = 0; v < p.size(); ++v) {
    if (p[v] == 0) {
      EXPECT_EQ(counts[v], 0) << "impossible token " << v;
      continue;
    }
    const double mean = p[v] * static_cast<double>(tokens.size());
    statistic += (counts[v] - mean) * (counts[v] - mean) / mean;
  }
  return statistic;
}

// The quantile 1 - 1e-6 of the statistic for this number of outcomes (Wilson and Hilferty 1931: the
// cube root of chi-square over its degrees of freedom is nearly normal; 4.7534 is the normal
// quantile).
inline double chi_square_limit(int64_t outcomes) {
  const double k = static_cast<double>(std::max<int64_t>(outcomes - 1, 1)), v = 2 / (9 * k);
  return k * std::pow(1 - v + 4.7534 * std::sqrt(v), 3);
}

}  // namespace cohort::kernels::test
