// Scales of keys and values: powers of two whose grids hold every key and value that the weights
// can give, and not many more.
#include "kernels/kv_scales.h"

#include "core/rng.h"
#include "kernels/rope.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;
using ::cohort::test::random_tensor;

constexpr int64_t kHeads = 3, kDim = 8, kColumns = 40, kWeightRows = 2 * kHeads * kDim;
constexpr int64_t kQueries = 6;  // heads of queries

// Weights of a layer, and what its input is made of.
struct Layer {
  Tensor w = random_tensor({kWeightRows, kColumns}, DType::kF64, 1),
         bias = random_tensor({kWeightRows}, DType::kF64, 2),
         norm = random_tensor({kColumns}, DType::kF64, 3),
         norm_bias = random_tensor({kColumns}, DType::kF64, 4),
         sb = random_tensor({kWeightRows, 4}, DType::kF64, 5),
         a = random_tensor({4, kColumns}, DType::kF64, 6);

  Tensor scales(DType dtype = DType::kF64, Device device = {}) const {
    Tensor out = Tensor::empty({2 * kHeads}, DType::kF32, device);
    const auto to = [&](const Tensor& t) { return t.to(dtype).to(device); };
    const Tensor weights = to(w), biases = to(bias), gains = to(norm), shifts = to(norm_bias);
    kv_scales({.scales = out,
               .w = weights,
               .bias = biases,
               .norm = gains,
               .norm_bias = shifts,
               .kv_heads = kHeads,
               .norm_offset = 0.5,
               .rotary_gain = 1.25,
               .sb = to(sb),
               .a = to(a)});
    return out.to(Device{});
  }
};

// The largest |k| / 448 s and |v| / 448 s of inputs x with |x| = sqrt(C): random ones, and those
// that a row of the weights, with the adapter, makes largest. In the last layer only the adapter
// sees anything: the norm's weight of one column, and its biases of all others.
TEST(KvScales, NoKeyAndNoValueIsClipped) {
  Rng rng(1, rng_stream(kTestPurpose, 40));
  std::vector<Layer> layers(3);
  for (int64_t i = 0; i < 5; ++i) layers[1].w.data<double>()[rng.below(layers[1].w.numel())] *= 30;
  layers[2].w.zero_();
  layers[2].norm.fill_(-0.5);
  layers[2].norm.data<double>()[0] = std::sqrt(kColumns) - 0.5;
  layers[2].norm_bias.fill_(std::sqrt(kColumns));
  layers[2].norm_bias.data<double>()[0] = 0;
  layers[2].a.fill_(1);
  double largest = 0;
  for (const Layer& layer : layers) {
    const Tensor scales = layer.scales();
    const double *const sb = layer.sb.data<double>(), *const a = layer.a.data<double>(),
                        *const b = layer.norm_bias.data<double>();
    std::vector<double> w = layer.w.to_vector<double>(), gain = layer.norm.to_vector<double>();
    for (double& g : gain) g += 0.5;
    for (int64_t row = 0; row < kWeightRows; ++row)
      for (int64_t r = 0; r < 4; ++r)
        for (int64_t c = 0; c < kColumns; ++c)
          w[size_t(row * kColumns + c)] += sb[row * 4 + r] * a[r * kColumns + c];
    for (int64_t n = 0; n < 500; ++n) {
      std::vector<double> x(kColumns), y = layer.bias.to_vector<double>();
      double square = 0, shift = 0;
      for (int64_t c = 0; c < kColumns && n < kWeightRows; ++c)
        shift += w[size_t(n * kColumns + c)] * b[c];
      for (int64_t c = 0; c < kColumns; ++c) {
        double& x_c = x[size_t(c)];
        x_c = n < kWeightRows
                  ? std::copysign(1.0, shift) * w[size_t(n * kColumns + c)] * gain[size_t(c)]
                  : rng.uniform() - 0.5;
        square += x_c * x_c;
      }
      for (int64_t c = 0; c < kColumns; ++c)
        x[size_t(c)] = x[size_t(c)] * std::sqrt(kColumns / square) * gain[size_t(c)] + b[c];
      for (int64_t row = 0; row < kWeightRows; ++row)
        for (int64_t c = 0; c < kColumns; ++c)
          y[size_t(row)] += w[size_t(row * kColumns + c)] * x[size_t(c)];
      for (int64_t head = 0; head < 2 * kHeads; ++head)
        for (int64_t d = 0; d < kDim; ++d) {
          // The largest rotation of a key's pair of channels.
          const double* const of_head = y.data() + head * kDim;
          const double value = head < kHeads
                                   ? 1.25 * std::hypot(of_head[d], of_head[(d + kDim / 2) % kDim])
                                   : std::abs(of_head[d]);
          const double share = value / 448 / scales.data<float>()[head];
          EXPECT_LE(share, 1) << head;
          largest = std::max(largest, share);
        }
    }
  }
  EXPECT_GT(largest, 0.05);  // the bound is not arbitrarily large
}

TEST(KvScales, ArePowersOfTwo) {
  const Tensor scales = Layer().scales();
  for (const float s : scales.to_vector<float>()) EXPECT_EQ(std::exp2(std::round(std::log2(s))), s);
}

TEST(KvScales, NormedKeysHaveTheBoundOfTheirNorm) {
  Layer layer;
  Tensor scales = Tensor::empty({2 * kHeads}, DType::kF32);
  const Tensor k_norm = Tensor::from(std::vector<double>{1, 1, 1, -700, 1, 1, 1, 1}), none;
  kv_scales({.scales = scales,
             .w = layer.w,
             .bias = none,
             .norm = layer.norm,
             .norm_bias = none,
             .kv_heads = kHeads,
             .k_norm = k_norm});
  // 1.07 sqrt(8) 700 = 2118 = 4.7 times 448.
  for (int64_t head = 0; head < kHeads; ++head) EXPECT_EQ(scales.data<float>()[head], 8);
}

// Heads of queries have the bounds of keys with the same weights; of RMSNorm, their own.
void expect_scales_of_queries(DType dtype, Device device) {
  Layer layer;
  const Tensor none, q_norm = Tensor::full({kDim}, 700, dtype, device),
                     k_norm = Tensor::full({kDim}, 1, dtype, device);
  const auto to = [&](const Tensor& t) { return t.to(dtype).to(device); };
  const Tensor rows = layer.w.narrow(0, 0, kHeads * kDim);
  Tensor all = Tensor::empty({kQueries * kDim + kWeightRows, kColumns}, layer.w.dtype());
  all.narrow(0, 0, kHeads * kDim).copy_(rows);
  all.narrow(0, kHeads * kDim, kHeads * kDim).fill_(0.25);
  all.narrow(0, kQueries * kDim, kWeightRows).copy_(layer.w);
  const Tensor w = to(all), few = to(layer.w), norm = to(layer.norm);
  Tensor scales = Tensor::empty({kQueries + 2 * kHeads}, DType::kF32, device),
         of_keys = Tensor::empty({2 * kHeads}, DType::kF32, device);
  const auto make = [&](Tensor& out, const Tensor& weights, const Tensor& q, const Tensor& k) {
    kv_scales({.scales = out,
               .w = weights,
               .bias = none,
               .norm = norm,
               .norm_bias = none,
               .kv_heads = kHeads,
               .q_norm = q,
               .k_norm = k});
    return out.to_vector<float>();
  };
  const std::vector<float> keys = make(of_keys, few, none, none), got = make(scales, w, none, none);
  EXPECT_EQ(std::vector(got.begin() + kQueries, got.end()), keys);
  EXPECT_EQ(std::vector(got.begin(), got.begin() + kHeads),
            std::vector(keys.begin(), keys.begin() + kHeads));
  const std::vector<float> normed = make(scales, w, q_norm, k_norm);
  for (int64_t head = 0; head < kQueries + kHeads; ++head)
    EXPECT_EQ(normed[static_cast<size_t>(head)], head < kQueries ? 8 : 0x1p-7f) << head;
  EXPECT_EQ(std::vector(normed.end() - kHeads, normed.end()),
            std::vector(keys.end() - kHeads, keys.end()));
}

TEST(KvScales, QueriesHaveTheirOwn) {
  expect_scales_of_queries(DType::kF64, {});
}

TEST(CudaKvScales, QueriesHaveTheirOwn) {
  COHORT_REQUIRE_GPU(device);
  expect_scales_of_queries(DType::kBF16, device);
}

TEST(KvScales, WhatIsNotFiniteOrTooLargeGivesNan) {
  for (const double bad : {std::nan(""), HUGE_VAL, 1e6}) {
    Layer layer;
    layer.w.data<double>()[kDim * kColumns] = bad;             // the second key head
    layer.bias.data<double>()[(kHeads + 2) * kDim + 3] = bad;  // the third head of values
    const std::vector<float> scales = layer.scales().to_vector<float>();
    for (size_t head = 0; head < scales.size(); ++head)
      EXPECT_EQ(std::isnan(scales[head]), head == 1 || head == 5) << bad << ", " << head;
  }
}

TEST(KvScales, ZerosHaveScaleOne) {
  Layer layer;
  for (Tensor* t : {&layer.w, &layer.bias, &layer.sb}) t->zero_();
  for (const float s : layer.scales().to_vector<float>()) EXPECT_EQ(s, 1);
}

TEST(KvScales, WrongArgumentsAreErrors) {
  Layer layer;
  Tensor scales = Tensor::empty({10}, DType::kF32);
  const Tensor none;
  EXPECT_THROW(kv_scales({scales, layer.w, none, layer.norm, none, 5}), Error);  // 48 rows
  scales = Tensor::empty({2 * kHeads}, DType::kF32);
  EXPECT_THROW(kv_scales({scales, layer.w, none, layer.norm, none, kHeads + 1}), Error);
  EXPECT_THROW(kv_scales({scales, layer.w, none, layer.norm, none, 0}), Error);
  EXPECT_THROW(kv_scales({.scales = scales,
                          .w = layer.w,
                          .bias = none,
                          .norm = layer.norm,
                          .norm_bias = none,
                          .kv_heads = kHeads,
                          .sb = layer.sb}),
               Error);
}

TEST(CudaKvScales, AreThoseOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Layer layer;
    for (Tensor* t : {&layer.w, &layer.bias, &layer.norm, &layer.norm_bias, &layer.sb, &layer.a})
      *t = t->to(dtype).to(DType::kF64);
    EXPECT_TRUE(::cohort::test::bit_equal(layer.scales(dtype, device), layer.scales()));
    layer.w.data<double>()[0] = std::nan("");
    EXPECT_TRUE(std::isnan(layer.scales(dtype, device).data<float>()[0]));
  }
}

// rope() with scales on every device and with either table: the rounded results of rope() without.
void expect_rounded(DType dtype, Device device) {
  const int64_t tokens = 5, heads = 7, kv_heads = 2;
  for (const int64_t dim : {int64_t{6}, int64_t{64}}) {
    const Tensor x = random_tensor({tokens, heads, dim}, DType::kF32, 7).to(dtype).to(device);
    const Tensor positions = ids({3, 0, 9, 4, 4}).to(device);
    const Tensor rotary =
        rope_table(10, rope_frequencies(dim, 10000), 1, accumulate_dtype(dtype)).to(device);
    const std::vector<float> all = {0.5f, 4, 0.125f, 0.25f, 1, 2, 0.0625f};  // or keys and values
    for (const auto& [table, count] :
         {std::pair{rotary, 4}, {rotary, 7}, {Tensor(), 4}, {Tensor(), 7}}) {
      const Tensor scales = Tensor::from(std::vector(all.end() - count, all.end()));
      Tensor plain = Tensor::empty_like(x), y = x.clone();
      rope({.y = plain, .x = x, .positions = positions, .table = table, .plain_heads = kv_heads});
      rope({.y = y,
            .x = y,
            .positions = positions,
            .table = table,
            .plain_heads = kv_heads,
            .scales = scales.to(device)});
      std::vector<double> expected = plain.to_vector<double>();
      for (size_t i = 0; i < expected.size(); ++i) {
        const int64_t head = static_cast<int64_t>(i) / dim % heads - (heads - count);
        if (head >= 0)
          expected[i] = E4m3Grid(scales.data<float>()[head])(
              static_cast<float>(bf16(static_cast<float>(expected[i]))));
      }
      EXPECT_EQ(y.to_vector<double>(), expected) << dim;
      EXPECT_NE(y.to_vector<double>(), plain.to_vector<double>());
    }
  }
}

TEST(Rope, RoundsKeysAndValues) {
  for (const DType dtype : {DType::kF32, DType::kF64}) expect_rounded(dtype, {});
}
TEST(CudaRope, RoundsKeysAndValues) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) expect_rounded(dtype, device);
}

}  // namespace
}  // namespace cohort::kernels
