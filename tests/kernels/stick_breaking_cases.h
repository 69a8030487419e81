// Packed inputs for the tests of stick-breaking attention, and a plain f64 computation of it and of
// its gradients as the oracle.
#pragma once

#include <cmath>

#include "kernels/attention/stick_breaking.h"
#include "tests/kernels/attention_paged_cases.h"

namespace cohort::test {

// Writes over NaN.
inline Tensor stick_forward(const AttentionCase& c) {
  Tensor o = Tensor::full(c.q.shape(), NAN, c.q.dtype(), c.q.device());
  kernels::stick_breaking_forward(
      {o, c.q, c.k, c.v, c.cu, {.scale = c.desc.scale, .prefixes = c.desc.prefixes}});
  return o;
}

inline AttentionGrads stick_backward(const AttentionCase& c) {
  const auto nan = [&](const Tensor& t) {
    return Tensor::full(t.shape(), NAN, t.dtype(), t.device());
  };
  AttentionGrads g{nan(c.q), nan(c.k), nan(c.v)};
  kernels::stick_breaking_backward({{g.dq},
                                    {g.dk},
                                    {g.dv},
                                    c.dout,
                                    c.q,
                                    c.k,
                                    c.v,
                                    c.cu,
                                    {.scale = c.desc.scale, .prefixes = c.desc.prefixes}});
  return g;
}

struct StickResults {
  Tensor o;
  AttentionGrads grads;
};

// Materializes every matrix of a head and rounds each to `storage`, as a framework without a fused
// kernel does; the logarithms of the stick are summed in f64. Without prefixes.
inline StickResults naive_stick(const AttentionCase& c, DType storage = DType::kF64) {
  const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1), dim = c.q.dim(2);
  const double scale = kernels::softmax_scale(c.desc, dim);
  const auto round = [&](double x) {
    return storage == DType::kBF16 ? static_cast<double>(bf16(static_cast<float>(x))) : x;
  };
  const auto zeros = [](const Tensor& t) { return Tensor::zeros(t.shape(), DType::kF64); };
  StickResults out{zeros(c.q), {zeros(c.q), zeros(c.k), zeros(c.v)}};
  const auto row = [&](const Tensor& t, int64_t token, int64_t head) {
    return const_cast<double*>(t.data<double>()) + (token * t.dim(1) + head) * dim;
  };
  const auto dot = [&](const double* a, const double* b) {
    double sum = 0;
    for (int64_t d = 0; d < dim; ++d) sum += a[d] * b[d];
    return sum;
  };
  const auto add = [&](double* to, double weight, const double* from) {
    for (int64_t d = 0; d < dim; ++d) to[d] += weight * from[d];
  };
  for (size_t s = 0; s < c.sequences.size(); ++s)
    for (int64_t i = 0; i < c.sequences[s].length; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t start = c.start(s), t = start + i, kv = h / (heads / kv_heads);
        std::vector<double> z(static_cast<size_t>(i)), a(z), w(z);
        double log_left = 0;
        for (int64_t j = i - 1; j >= 0; --j) {
          const auto at = static_cast<size_t>(j);
          z[at] = round(round(dot(row(c.q, t, h), row(c.k, start + j, kv))) * scale);
          const double more = std::log1p(std::exp(-std::fabs(z[at])));
          a[at] = round(std::exp(std::fmin(z[at], 0) - more + log_left));
          log_left -= std::fmax(z[at], 0) + more;
          add(row(out.o, t, h), a[at], row(c.v, start + j, kv));
          w[at] = a[at] * round(dot(row(c.dout, t, h), row(c.v, start + j, kv)));
        }
        double before = 0;
        for (int64_t j = 0; j < i; ++j) {
          const auto at = static_cast<size_t>(j);
          const double beta = 1 / (1 + std::exp(-z[at])), left = 1 / (1 + std::exp(z[at]));
          const double dz = round(round(left * w[at] - beta * before) * scale);
          before += w[at];
          add(row(out.grads.dq, t, h), dz, row(c.k, start + j, kv));
          add(row(out.grads.dk, start + j, kv), dz, row(c.q, t, h));
          add(row(out.grads.dv, start + j, kv), a[at], row(c.dout, t, h));
        }
      }
  for (Tensor* t : {&out.o, &out.grads.dq, &out.grads.dk, &out.grads.dv})
    *t = t->to(storage).to(DType::kF64);
  return out;
}

// Writes the tokens [begin, end) of every sequence s = steps[i].sequence to the cache and computes
// their rows; returns them in the order of the steps.
inline void stick_step(kernels::PagedKV& cache, const AttentionCase& c,
                       const std::vector<Step>& steps, Tensor& all) {
  std::vector<int32_t> sequences{-1}, positions{3};  // the first token is idle
  std::vector<int64_t> tokens{0};
  for (const Step& s : steps)
    for (int64_t p = s.begin; p < s.end; ++p) {
      sequences.push_back(static_cast<int32_t>(s.sequence));
      positions.push_back(static_cast<int32_t>(p));
      tokens.push_back(c.start(static_cast<size_t>(s.sequence)) + p);
    }
  const Device device = cache.k.device();
  Tensor qkv = side_by_side(c.q, c.k, c.v),
         rows = Tensor::empty({static_cast<int64_t>(tokens.size()), qkv.dim(1), qkv.dim(2)},
                              qkv.dtype());
  for (size_t i = 0; i < tokens.size(); ++i)
    rows.select(0, static_cast<int64_t>(i)).copy_(qkv.select(0, tokens[i]));
  rows = rows.to(device);
  const Tensor seq = Tensor::from(sequences).to(device), pos = Tensor::from(positions).to(device);
  kernels::rope_kv_write({cache, rows, seq, pos, {}});
  const Tensor q = rows.narrow(1, 0, c.q.dim(1));
  WideRows wide(Tensor::full(q.shape(), NAN, q.dtype(), device));
  kernels::stick_breaking_paged({wide.view, q, cache, seq, pos, {.scale = c.desc.scale}});
  EXPECT_TRUE(wide.intact());
  const Tensor o = wide.view.to(Device{});
  for (const double x : o.select(0, 0).to_vector<double>()) EXPECT_EQ(x, 0);
  for (size_t i = 1; i < tokens.size(); ++i)
    all.select(0, tokens[i]).copy_(o.select(0, static_cast<int64_t>(i)));
}

// Computes all rows over a cache, in steps of one token and in pieces of several sequences.
inline Tensor stick_in_steps(const AttentionCase& c, int64_t block_tokens, Device device = {}) {
  Rng rng(11, rng_stream(kTestPurpose, 9));
  kernels::PagedKV cache = make_cache(c, block_tokens, rng, device);
  Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
  std::vector<int64_t> done(c.sequences.size());
  for (bool left = true; left;) {
    std::vector<Step> steps;
    left = false;
    for (size_t s = 0; s < done.size(); ++s) {
      const int64_t rest = c.sequences[s].length - done[s];
      const int64_t n = std::min(rest, rng.below(2) == 0 ? 1 : rng.between(1, 90));
      left = left || rest > n;
      if (n > 0) steps.push_back({static_cast<int64_t>(s), done[s], done[s] + n});
      done[s] += n;
    }
    if (!steps.empty()) stick_step(cache, c, steps, all);
  }
  return all;
}

}  // namespace cohort::test
