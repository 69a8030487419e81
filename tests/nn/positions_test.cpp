// The schemes of positions against their definitions.
#include "nn/positions.h"
#include "nn/mixing.h"

#include <array>
#include <cmath>
#include <numbers>
#include <numeric>

#include "kernels/rope.h"
#include "tests/nn/models.h"

namespace cohort {
namespace {

using test::random_tensor;

// ExpoSB's attention by its definition, of one sequence: interleaved pairs, a naive softmax.
// x: [T, C]; q, k, v: [H D, C], [Hkv D, C], [Hkv D, C], with the rows of interleaved pairs.
std::vector<double> naive_exposb(const ModelConfig& c, const Tensor& x,
                                 const std::array<Tensor, 3>& weights) {
  const int64_t tokens = x.dim(0), width = x.dim(1), dim = c.head_dim, half = dim / 2;
  const ExposbConfig& e = c.exposb;
  const auto number = [](int64_t i) { return static_cast<double>(i); };
  // Channel d of head h of the token's queries, keys or values.
  const auto project = [&](size_t which, int64_t t, int64_t h, int64_t d) {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i)
      sum += x.data<double>()[t * width + i] *
             weights[which].data<double>()[(h * dim + d) * width + i];
    return sum;
  };
  const auto rotated = [&](size_t which, int64_t t, int64_t h) {
    std::vector<double> out;
    for (int64_t d = 0; d < dim; ++d) {
      const int64_t pair = d / 2;
      const double angle = number(t) * std::pow(c.rope_theta, -2.0 * number(pair) / number(dim));
      const double even = project(which, t, h, 2 * pair), odd = project(which, t, h, 2 * pair + 1);
      const double y = d % 2 == 0 ? even * std::cos(angle) - odd * std::sin(angle)
                                  : odd * std::cos(angle) + even * std::sin(angle);
      const double center = number(d) - e.channel_center * number(dim),
                   sigma = e.channel_width * number(dim);
      out.push_back(
          y * (1 + e.position_gain * std::exp(-number(t) / e.position_decay)) *
          (e.channel_base + e.channel_gain * std::exp(-center * center / (2 * sigma * sigma))));
    }
    return out;
  };
  std::vector<double> out;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < c.num_heads; ++h) {
      const int64_t kv = h * c.num_kv_heads / c.num_heads;
      const std::vector<double> q = rotated(0, t, h);
      std::vector<double> head(static_cast<size_t>(2 * half)), p;
      double total = 0;
      for (int64_t j = 0; j <= t; ++j) {
        const std::vector<double> k = rotated(1, j, kv);
        const double score = std::inner_product(q.begin(), q.end(), k.begin(), 0.0) /
                             std::sqrt(number(dim)) *
                             (e.distance_floor +
                              (1 - e.distance_floor) * std::exp(-e.distance_rate * number(t - j)));
        p.push_back(std::exp(score));
        total += p.back();
      }
      for (int64_t j = 0; j <= t; ++j)
        for (int64_t d = 0; d < dim; ++d)
          head[static_cast<size_t>(d)] += p[static_cast<size_t>(j)] / total * project(2, j, kv, d);
      out.insert(out.end(), head.begin(), head.end());
    }
  return out;
}

// Rows of the stored order (i, i + D/2) of each head from those of interleaved pairs.
Tensor stored_rows(const Tensor& weight, int64_t dim) {
  Tensor out = Tensor::empty_like(weight);
  for (int64_t row = 0; row < weight.dim(0); ++row) {
    const int64_t head = row / dim, i = row % dim;
    const int64_t from = i < dim / 2 ? 2 * i : 2 * (i - dim / 2) + 1;
    out.select(0, row).copy_(weight.select(0, head * dim + from));
  }
  return out;
}

}  // namespace

// Keeps the output of attention.
struct RecordedMixing : PackedMixing {
  using PackedMixing::PackedMixing;
  mutable Tensor o;
  Variable attention(AttentionCall call) const override {
    const Variable y = PackedMixing::attention(std::move(call));
    o = y.value();
    return y;
  }
};

TEST(Exposb, AttentionIsThatOfItsDefinition) {
  for (const bool defaults : {true, false}) {
    ModelConfig c = test::model_config("exposb");
    c.d_model = 5;
    c.head_dim = 8;
    c.exposb = {};
    if (!defaults) c.exposb = {0.7, 3, 0.5, 0.9, 0.4, 0.3, 0.2, 0.5};
    const int64_t tokens = 9, q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
    ParameterSet set(DType::kF64, {}, 1);
    const SelfAttention attention_layer(set, "a", c, AdapterTargets(c), 0);
    const Tensor x = random_tensor({tokens, c.d_model}, DType::kF64, 3);
    const std::array<Tensor, 3> weights{random_tensor({q, c.d_model}, DType::kF64, 4),
                                        random_tensor({kv, c.d_model}, DType::kF64, 5),
                                        random_tensor({kv, c.d_model}, DType::kF64, 6)};
    for (size_t i = 0; i < 3; ++i) {
      Tensor value = set[i].value;
      value.copy_(i < 2 ? stored_rows(weights[i], c.head_dim) : weights[i]);
    }
    std::vector<int32_t> positions(tokens);
    std::iota(positions.begin(), positions.end(), 0);
    const Tensor at = Tensor::from(positions);
    const Tensor starts = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(tokens)});
    const PackedBatch batch{.positions = at, .cu_seqlens = starts};
    const auto mixing = std::make_shared<RecordedMixing>(batch);
    const Pass pass{.batch = batch,
                    .mixing = mixing,
                    .position_terms = {.rope_table = rotary_table(c, DType::kF64)}};
    attention_layer(Variable(x), pass);
    const std::vector<double> expected = naive_exposb(c, x, weights),
                              got = mixing->o.to_vector<double>();
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-12) << i;
  }
}

TEST(Exposb, ItsDefaultsAreThoseOfTheDefinition) {
  const ExposbConfig e;
  EXPECT_EQ(e.gain(0, 16, 64), 1.2 * (0.8 + 0.4));
  EXPECT_NEAR(e.gain(1000, 24, 64), (1 + 0.2 / std::numbers::e) * (0.8 + 0.4 * std::exp(-0.5)),
              1e-15);
  EXPECT_EQ(e.distance_floor, 0.7);
  EXPECT_EQ(e.distance_rate, 0.005);
}

TEST(Sinusoidal, ChannelsAlternateBetweenSinesAndCosines) {
  for (const int64_t channels : {6, 7}) {
    const Tensor table = sinusoidal_table(30, channels);
    for (int64_t t = 0; t < 30; ++t)
      for (int64_t i = 0; i < channels; ++i) {
        const double angle =
            static_cast<double>(t) /
            std::pow(10000.0, static_cast<double>(i - i % 2) / static_cast<double>(channels));
        EXPECT_NEAR(table.data<double>()[t * channels + i],
                    i % 2 == 0 ? std::sin(angle) : std::cos(angle), 1e-13);
      }
  }
}

TEST(Alibi, SlopesAreThoseOfThePaper) {
  const auto expect_exponents = [](int64_t heads, const std::vector<double>& exponents) {
    const auto slopes = alibi_slopes(heads).to_vector<double>();
    ASSERT_EQ(slopes.size(), exponents.size());
    for (size_t i = 0; i < slopes.size(); ++i) EXPECT_EQ(slopes[i], std::exp2(-exponents[i])) << i;
  };
  expect_exponents(1, {8});
  expect_exponents(8, {1, 2, 3, 4, 5, 6, 7, 8});
  expect_exponents(12, {1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5});
}

// First distances of the logarithmic buckets: exact (max / exact)^(k / exact), rounded up.
TEST(T5, BucketsAreThoseOfThePaper) {
  const auto expect_starts = [](int64_t buckets, int64_t max_distance,
                                const std::vector<int64_t>& starts) {
    const auto got = t5_buckets(buckets, max_distance, MaskType::kCausal).to_vector<int64_t>();
    ASSERT_EQ(static_cast<int64_t>(got.size()), 2 * max_distance + 1);
    for (int64_t distance = -max_distance; distance <= max_distance; ++distance) {
      int64_t expected = std::max<int64_t>(distance, 0);
      if (distance >= starts[0])
        expected = starts[0] - 1 +
                   (std::upper_bound(starts.begin(), starts.end(), distance) - starts.begin());
      EXPECT_EQ(got[static_cast<size_t>(max_distance - distance)], expected) << distance;
    }
  };
  expect_starts(32, 128, {16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113});
  expect_starts(8, 64, {4, 8, 16, 32});
  expect_starts(2, 5, {1});
}

// A larger context changes no bit: what a model may be run with beyond its own.
TEST(Positions, SchemesWithoutATableOfTheirOwnExtendToLargerContexts) {
  for (const auto& [name, config] : test::rule_cases()) {
    ModelConfig larger = config;
    larger.context = 4 * config.context;
    const Transformer model(config, DType::kF32, 1), extended(larger, DType::kF32, 1);
    const PackedBatch batch = pack(test::random_sequences({40, 160}, config.vocab_size, 2));
    EXPECT_TRUE(test::bit_equal(model.forward(batch).value(), extended.forward(batch).value()))
        << name;
    const auto sequences = test::random_sequences({600}, config.vocab_size, 2);
    for (const double x : extended.forward(pack(sequences)).value().to_vector<double>())
      ASSERT_TRUE(std::isfinite(x)) << name;
  }
}

}  // namespace cohort
