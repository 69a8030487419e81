// FP8 attention computed by its definition in kernels/attention/attention.h, and the sums of wgmma.
#pragma once

#include <bit>
#include <numbers>

#include "tests/kernels/attention_cases.h"

namespace cohort::test {

// FP8 attention by its definition, tile by tile in f64, with exact sums; `rounds`: P, as it does.
inline AttentionOutput fp8_attention(const AttentionCase& c, bool rounds = true) {
  const auto q = c.q.to_vector<double>(), k = c.k.to_vector<double>(), v = c.v.to_vector<double>();
  const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1), dim = c.q.dim(2), tokens = c.tokens();
  const int64_t tile = kernels::attention_tile(dim);
  const double scale = kernels::softmax_scale(c.desc, dim), cap = c.desc.soft_cap;
  const std::vector<double> slopes =
      c.desc.slopes.defined() ? c.desc.slopes.to_vector<double>() : std::vector<double>();
  std::vector<double> all_o(q.size()), all_lse(static_cast<size_t>(heads * tokens));
  for (size_t s = 0; s < c.sequences.size(); ++s)
    for (int64_t i = 0; i < c.sequences[s].length; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t t = c.start(s) + i, kv = h / (heads / kv_heads);
        const int64_t first = c.shape.window > 0 ? std::max<int64_t>(0, i + 1 - c.shape.window) : 0;
        const auto row = [&](const std::vector<double>& x, int64_t key) {
          return &x[static_cast<size_t>(((c.start(s) + key) * kv_heads + kv) * dim)];
        };
        std::vector<double> total_o(static_cast<size_t>(dim));
        double total_r = -INFINITY, total_l = 0;
        for (int64_t chunk = 0; chunk <= i; chunk += kernels::kAttentionChunk) {
          std::vector<double> o(static_cast<size_t>(dim));
          double r = -INFINITY, l = 0;
          for (int64_t key0 = chunk; key0 <= std::min(i, chunk + kernels::kAttentionChunk - 1);
               key0 += tile) {
            const int64_t begin = std::max(key0, first), end = std::min(key0 + tile, i + 1);
            if (begin >= end) continue;
            std::vector<double> z;
            for (int64_t j = begin; j < end; ++j) {
              double sum = 0;
              for (int64_t d = 0; d < dim; ++d)
                sum += q[static_cast<size_t>((t * heads + h) * dim + d)] * row(k, j)[d];
              sum *= scale;
              if (cap > 0) sum = cap * std::tanh(sum / cap);
              if (!slopes.empty())
                sum -= slopes[static_cast<size_t>(h)] * static_cast<double>(i - j);
              z.push_back(sum * std::numbers::log2e);
            }
            const double next = std::max(r, *std::max_element(z.begin(), z.end()) - 8);
            const double alpha = std::exp2(r - next);
            l *= alpha;
            for (double& x : o) x *= alpha;
            for (int64_t j = begin; j < end; ++j) {
              double p = std::exp2(z[static_cast<size_t>(j - begin)] - next);
              l += p;
              if (rounds) p = static_cast<float>(e4m3(static_cast<float>(p)));
              for (int64_t d = 0; d < dim; ++d) o[static_cast<size_t>(d)] += p * row(v, j)[d];
            }
            r = next;
          }
          if (r == -INFINITY) continue;
          const double both = std::max(total_r, r), a = std::exp2(total_r - both),
                       b = std::exp2(r - both);
          total_r = both;
          total_l = total_l * a + l * b;
          for (size_t d = 0; d < o.size(); ++d) total_o[d] = total_o[d] * a + o[d] * b;
        }
        all_lse[static_cast<size_t>(h * tokens + t)] =
            (total_r + std::log2(total_l)) * std::numbers::ln2;
        for (size_t d = 0; d < total_o.size(); ++d)
          all_o[static_cast<size_t>((t * heads + h) * dim) + d] = total_o[d] / total_l;
      }
  return {Tensor::from(all_o, c.q.shape()), Tensor::from(all_lse, {heads, tokens})};
}

// A step of wgmma in e4m3 on sm_90: c plus 32 products. Products and c are cut, toward zero, 13
// bits below the largest exponent among them, summed exactly, and the sum is cut to 13 bits below
// its leading one. The exponent of a product is the sum of those of its factors. As measured on an
// H200 (docs/precision.md).
inline float wgmma_step(float c, const e4m3* a, const e4m3* b, int64_t stride = 1) {
  constexpr int kBits = 13;
  struct Term {
    int64_t significand;  // the value is this times 2^(exponent - fraction)
    int exponent, fraction;
  };
  std::vector<Term> terms;
  const auto add = [&](int64_t significand, int exponent, int fraction) {
    if (significand != 0) terms.push_back({significand, exponent, fraction});
  };
  const auto split = [](e4m3 x) {
    const int exponent = x.bits >> 3 & 15,
              significand = exponent > 0 ? 8 + (x.bits & 7) : x.bits & 7;
    return std::pair(x.bits & 128 ? -significand : significand, std::max(exponent, 1) - 7);
  };
  for (int64_t k = 0; k < 32; ++k) {
    const auto [x, x_exponent] = split(a[k * stride]);
    const auto [y, y_exponent] = split(b[k * stride]);
    add(int64_t{x} * y, x_exponent + y_exponent, 6);
  }
  const auto bits = std::bit_cast<uint32_t>(c);
  const int exponent = bits >> 23 & 255;
  const int64_t significand = (bits & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
  add(bits >> 31 ? -significand : significand, std::max(exponent, 1) - 127, 23);
  int largest = -1000;
  for (const Term& t : terms) largest = std::max(largest, t.exponent);
  int64_t sum = 0;  // in units of 2^(largest - kBits)
  for (const Term& t : terms) {
    const int shift = kBits - t.fraction + t.exponent - largest;
    const int64_t size = std::abs(t.significand), cut = shift >= 0    ? size << shift
                                                        : -shift > 62 ? 0
                                                                      : size >> -shift;
    sum += t.significand < 0 ? -cut : cut;
  }
  const auto size = static_cast<uint64_t>(std::abs(sum));
  const int excess = std::max(63 - std::countl_zero(size | 1) - kBits, 0);
  const double value = std::ldexp(static_cast<double>(size >> excess << excess), largest - kBits);
  return static_cast<float>(sum < 0 ? -value : value);
}

}  // namespace cohort::test
