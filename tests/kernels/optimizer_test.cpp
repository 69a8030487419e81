#include "kernels/optimizer.h"

#include <bit>
#include <functional>

#include "core/rng.h"
#include "kernels/adamw.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

AdamWTensor parameter(int64_t n, DType dtype, uint64_t seed, double weight_decay) {
  return {.param = random_tensor({n}, dtype, seed),
          .grad = random_tensor({n}, dtype, seed + 1),
          .m = random_tensor({n}, dtype, seed + 2, 0.1),
          .v =
              [&] {
                Tensor v = random_tensor({n}, DType::kF64, seed + 3, 0.1);
                for (int64_t i = 0; i < n; ++i) v.data<double>()[i] *= v.data<double>()[i];
                return v.to(dtype);
              }(),
          .weight_decay = weight_decay};
}

AdamWTensor clone(const AdamWTensor& t, DType dtype) {
  const auto copy = [&](const Tensor& x) { return x.to(dtype).clone(); };
  return {copy(t.param), copy(t.grad), copy(t.m), copy(t.v), t.weight_decay};
}

// The formula of the header, in f64.
void naive_step(AdamWTensor& t, const AdamWDesc& d) {
  for (int64_t i = 0; i < t.param.numel(); ++i) {
    double &p = t.param.data<double>()[i], &m = t.m.data<double>()[i], &v = t.v.data<double>()[i];
    const double norm = d.norm.defined() ? d.norm.item() : 0;
    const double scale = d.max_norm > 0 && norm > d.max_norm ? d.max_norm / (norm + 1e-6) : 1;
    const double g = t.grad.data<double>()[i] * scale;
    p -= d.learning_rate * t.weight_decay * p;
    m = d.beta1 * m + (1 - d.beta1) * g;
    v = d.beta2 * v + (1 - d.beta2) * g * g;
    const double c1 = 1 - std::pow(d.beta1, d.step), c2 = 1 - std::pow(d.beta2, d.step);
    p -= d.learning_rate / c1 * m / (std::sqrt(v) / std::sqrt(c2) + d.eps);
  }
}

TEST(AdamW, StepIsTheFormula) {
  for (const AdamWDesc& desc : {AdamWDesc{.learning_rate = 1e-2},
                                {.learning_rate = 1e-3,
                                .beta1 = 0.8,
                                .beta2 = 0.95,
                                .eps = 1e-3,
                                .step = 7,
                                .norm = Tensor::full({1}, 8, DType::kF64),
                                .max_norm = 2}}) {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      std::vector<AdamWTensor> tensors, expected;
      for (const int64_t n : {0, 1, 3, 65, 40000}) {
        tensors.push_back(parameter(n, dtype, static_cast<uint64_t>(10 * n), n % 2 == 0 ? 0.1 : 0));
        expected.push_back(clone(tensors.back(), DType::kF64));
      }
      adamw_step(tensors, desc);
      const double tolerance = dtype == DType::kF64 ? 1e-14 : 1e-6;
      for (size_t i = 0; i < tensors.size(); ++i) {
        naive_step(expected[i], desc);
        EXPECT_LE(relative_error(tensors[i].param, expected[i].param), tolerance);
        EXPECT_LE(relative_error(tensors[i].m, expected[i].m), tolerance);
        EXPECT_LE(relative_error(tensors[i].v, expected[i].v), tolerance);
      }
    }
  }
}

// One parameter of 0.5 with gradients 0.3 and -0.2, default betas, worked by hand.
TEST(AdamW, TwoStepsByHand) {
  const auto one = [](double v) { return Tensor::full({1}, v, DType::kF64); };
  std::vector<AdamWTensor> t = {{one(0.5), one(0.3), one(0), one(0), 0.01}};
  adamw_step(t, {.learning_rate = 0.1, .step = 1});
  EXPECT_NEAR(t[0].param.item(), 0.4995 - 0.1 * 0.3 / (0.3 + 1e-8), 1e-15);
  t[0].grad.fill_(-0.2);
  adamw_step(t, {.learning_rate = 0.1, .step = 2});
  const double m = 0.9 * 0.03 - 0.1 * 0.2, v = 0.999 * 0.00009 + 0.001 * 0.04;
  const double before = 0.4995 - 0.1 * 0.3 / (0.3 + 1e-8);
  EXPECT_NEAR(t[0].param.item(), before * 0.999 - 0.1 / 0.19 * m / (std::sqrt(v / 0.001999) + 1e-8),
              1e-14);
}

TEST(AdamW, ClippingIsScalingTheGradient) {
  const AdamWTensor start = parameter(100, DType::kF32, 1, 0.1);
  const auto step = [&](float scale, const AdamWDesc& desc) {
    std::vector<AdamWTensor> t = {clone(start, DType::kF32)};
    for (int64_t i = 0; i < 100; ++i) t[0].grad.data<float>()[i] *= scale;
    adamw_step(t, desc);
    return t[0].param;
  };
  const auto norm = [](double v) { return Tensor::full({1}, v, DType::kF64); };
  const auto scale = static_cast<float>(0.5 / (3 + 1e-6));
  EXPECT_TRUE(bit_equal(step(1, {.learning_rate = 0.1, .norm = norm(3), .max_norm = 0.5}),
                        step(scale, {.learning_rate = 0.1})));
  // Not above the maximum, no maximum, no norm.
  const Tensor plain = step(1, {.learning_rate = 0.1});
  EXPECT_FALSE(bit_equal(plain, step(scale, {.learning_rate = 0.1})));
  for (const AdamWDesc& desc : {AdamWDesc{.learning_rate = 0.1, .norm = norm(3), .max_norm = 3},
                                {.learning_rate = 0.1, .norm = norm(3)},
                                {.learning_rate = 0.1, .max_norm = 0.5}})
    EXPECT_TRUE(bit_equal(step(1, desc), plain));
}

TEST(AdamW, ANormThatIsNotFiniteUpdatesNothing) {
  const AdamWTensor start = parameter(100, DType::kF32, 1, 0.1);
  for (const double norm : {NAN, INFINITY})
    for (const double max_norm : {0.0, 1.0}) {
      std::vector<AdamWTensor> t = {clone(start, DType::kF32)};
      adamw_step(t, {.learning_rate = 0.1,
                     .norm = Tensor::full({1}, norm, DType::kF64),
                     .max_norm = max_norm});
      EXPECT_TRUE(bit_equal(t[0].param, start.param));
      EXPECT_TRUE(bit_equal(t[0].m, start.m));
      EXPECT_TRUE(bit_equal(t[0].v, start.v));
    }
}

TEST(AdamW, FlagsWhatIsNotFinite) {
  const AdamWTensor start = parameter(40000, DType::kF32, 1, 0.1);
  struct Case {
    const char* name;
    std::function<void(AdamWTensor&)> spoil;
    double eps = 1e-8, learning_rate = 0.1;
    double expected = 1;
  };
  const auto set = [](Tensor& t, double value) { t.narrow(0, 39999, 1).fill_(value); };
  const Case cases[] = {
      {"nothing", [](AdamWTensor&) {}, 1e-8, 0.1, 0},
      {"weight", [&](AdamWTensor& t) { set(t.param, -INFINITY); }},
      {"first moment", [&](AdamWTensor& t) { set(t.m, INFINITY); }},
      {"second moment", [&](AdamWTensor& t) { set(t.v, INFINITY); }},
      {"NaN", [&](AdamWTensor& t) { set(t.grad, NAN); }},
      {"0 / 0",
       [&](AdamWTensor& t) {
         for (Tensor* x : {&t.grad, &t.m, &t.v}) set(*x, 0);
       },
       0},
      {"overflow", [](AdamWTensor&) {}, 1e-8, 1e38},
  };
  for (const Case& c : cases)
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      SCOPED_TRACE(str(c.name, " ", dtype_name(dtype)));
      std::vector<AdamWTensor> t = {clone(start, dtype), clone(start, dtype)};
      c.spoil(t[0]);
      std::vector<AdamWTensor> plain = {clone(t[0], dtype), clone(t[1], dtype)};
      Tensor flag = Tensor::zeros({1}, DType::kF64);
      AdamWDesc desc{.learning_rate = c.learning_rate, .eps = c.eps};
      adamw_step(plain, desc);
      desc.non_finite = flag;
      adamw_step(t, desc);
      const bool overflows_f64_too = c.learning_rate < 1;
      EXPECT_EQ(flag.item(), dtype == DType::kF32 || overflows_f64_too ? c.expected : 0);
      EXPECT_TRUE(bit_equal(t[0].param, plain[0].param));
      // It stays set.
      flag.fill_(1);
      std::vector<AdamWTensor> good = {clone(start, dtype)};
      adamw_step(good, {.learning_rate = 0.1, .non_finite = flag});
      EXPECT_EQ(flag.item(), 1);
    }
  std::vector<AdamWTensor> t = {clone(start, DType::kF32)};
  EXPECT_THROW_WITH(adamw_step(t, {.non_finite = Tensor::zeros({1}, DType::kF32)}), Error,
                    "expected non_finite f64[1]");
}

TEST(AdamW, ThreadsAndGroupingDoNotChangeBits) {
  const AdamWTensor start = parameter(70000, DType::kF32, 1, 0.1);
  expect_thread_invariant([&] {
    std::vector<AdamWTensor> t = {clone(start, DType::kF32)};
    adamw_step(t, {.learning_rate = 0.1, .step = 3});
    return std::vector{t[0].param, t[0].m, t[0].v};
  });
  std::vector<AdamWTensor> whole = {clone(start, DType::kF32)}, parts;
  AdamWTensor split = clone(start, DType::kF32);
  for (const auto& [first, count] : {std::pair{0, 17}, {17, 50000}, {50017, 19983}})
    parts.push_back({split.param.narrow(0, first, count), split.grad.narrow(0, first, count),
                     split.m.narrow(0, first, count), split.v.narrow(0, first, count), 0.1});
  adamw_step(whole, {.learning_rate = 0.1});
  adamw_step(parts, {.learning_rate = 0.1});
  EXPECT_TRUE(bit_equal(whole[0].param, split.param));
}

// A parameter with bf16 moments, and the same with these moments in f32.
std::pair<AdamWTensor, AdamWTensor> with_small_moments(int64_t n, uint64_t seed) {
  AdamWTensor small = parameter(n, DType::kF32, seed, 0.1);
  small.m = small.m.to(DType::kBF16);
  small.v = small.v.to(DType::kBF16);
  return {small, clone(small, DType::kF32)};
}

TEST(AdamW, Bf16MomentsRoundToANeighbour) {
  for (const int64_t n : {1, 3, 4, 7, 40001}) {
    auto [small, whole] = with_small_moments(n, 1);
    std::vector<AdamWTensor> s = {small}, w = {whole};
    const AdamWDesc desc{.learning_rate = 1e-2, .step = 5, .seed = 3};
    adamw_step(s, desc);
    adamw_step(w, desc);
    EXPECT_TRUE(bit_equal(s[0].param, w[0].param));  // the update has the unrounded moments
    for (const auto& [rounded, exact] : {std::pair{s[0].m, w[0].m}, {s[0].v, w[0].v}}) {
      const Tensor values = rounded.to(DType::kF32);
      int64_t up = 0, inexact = 0;
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(exact.data<float>()[i]);
        const uint32_t down = bits & 0xffff0000u,
                       got = std::bit_cast<uint32_t>(values.data<float>()[i]);
        ASSERT_TRUE(got == down || (got == down + 0x10000 && bits != down)) << i;
        inexact += bits != down;
        up += got != down;
      }
      if (n > 1000) {  // low bits are spread evenly: half of them go up
        EXPECT_GT(inexact, n / 2);
        EXPECT_NEAR(static_cast<double>(up) / static_cast<double>(inexact), 0.5, 0.02);
      }
    }
  }
}

// Changes below the resolution of bf16 are kept on average.
TEST(AdamW, Bf16MomentsAreUnbiased) {
  constexpr int64_t kCount = 20000;
  std::vector<AdamWTensor> t = {{.param = Tensor::zeros({kCount}, DType::kF32),
                                 .grad = Tensor::full({kCount}, 0.9, DType::kF32),
                                 .m = Tensor::full({kCount}, 1, DType::kBF16),
                                 .v = Tensor::full({kCount}, 1, DType::kBF16)}};
  double m = 1, v = 1;
  for (int64_t step = 1; step <= 20; ++step) {
    adamw_step(t, {.learning_rate = 0, .beta1 = 0.999, .step = step});
    m += 0.001 * (0.9 - m);
    v += 0.001 * (0.81 - v);
  }
  const auto mean = [](const Tensor& x) {
    double sum = 0;
    for (const double value : x.to(DType::kF64).to_vector<double>()) sum += value;
    return sum / kCount;
  };
  // Steps are 1/80 to 1/20 of the distance of neighbours, which is 1/256: to nearest, none would
  // move. The standard deviation of the mean is below 5e-5.
  EXPECT_LT(m, 0.9985);
  EXPECT_NEAR(mean(t[0].m), m, 2e-4);
  EXPECT_NEAR(mean(t[0].v), v, 2e-4);
}

// The random number of a moment is addressed by (update, unit; flat index / 4).
TEST(AdamW, DrawsOfBf16MomentsHaveAddresses) {
  const auto moments = [](const AdamWDesc& desc, uint64_t unit, int64_t flat_index) {
    std::vector<AdamWTensor> t = {with_small_moments(5000, 1).first};
    t[0].unit = unit;
    t[0].flat_index = flat_index;
    adamw_step(t, desc);
    return t[0].m;
  };
  const AdamWDesc desc{.learning_rate = 0.1, .step = 3, .seed = 2};
  std::vector<AdamWTensor> exact = {with_small_moments(5000, 1).second};
  adamw_step(exact, desc);
  const uint64_t stream = rng_stream(9, 3, 5);
  for (const int64_t first : {0, 126, 128}) {
    const Tensor m = moments(desc, 5, first);
    for (int64_t i = 0; i < 5000; ++i) {
      const auto flat = static_cast<uint64_t>(first + i);
      ASSERT_EQ(static_cast<const uint16_t*>(m.raw())[i],
                stochastic_bf16(exact[0].m.data<float>()[i],
                                philox(2, stream, flat / 4)[flat % 4] & 0xffff))
          << i;
    }
  }
  const Tensor m = moments(desc, 5, 128);
  EXPECT_TRUE(bit_equal(moments(desc, 5, 128), m));
  EXPECT_FALSE(bit_equal(moments(desc, 6, 128), m));
  EXPECT_FALSE(bit_equal(moments(desc, 5, 132), m));
  AdamWDesc other = desc;
  other.seed = 1;
  EXPECT_FALSE(bit_equal(moments(other, 5, 128), m));
  other = desc;
  other.step = 4;
  EXPECT_FALSE(bit_equal(moments(other, 5, 128), m));
  expect_thread_invariant([&] {
    std::vector<AdamWTensor> t = {with_small_moments(70001, 1).first};
    adamw_step(t, desc);
    return std::vector{t[0].param, t[0].m, t[0].v};
  });
}

// Slices of a tensor, in any order, have the bits of the whole.
TEST(AdamW, Bf16MomentsDoNotDependOnTheDivisionIntoTensors) {
  const AdamWDesc desc{.learning_rate = 0.1, .step = 3, .seed = 2};
  std::vector<AdamWTensor> whole = {with_small_moments(5003, 1).first}, parts;
  const AdamWTensor start = with_small_moments(5003, 1).first;
  whole[0].flat_index = 192;
  for (const auto& [first, count] : {std::pair{4101, 902}, {67, 4034}, {0, 67}})
    parts.push_back({.param = start.param.narrow(0, first, count),
                     .grad = start.grad.narrow(0, first, count),
                     .m = start.m.narrow(0, first, count),
                     .v = start.v.narrow(0, first, count),
                     .weight_decay = start.weight_decay,
                     .flat_index = 192 + first});
  adamw_step(whole, desc);
  adamw_step(parts, desc);
  EXPECT_TRUE(bit_equal(start.param, whole[0].param));
  EXPECT_TRUE(bit_equal(start.m, whole[0].m));
  EXPECT_TRUE(bit_equal(start.v, whole[0].v));
}

TEST(AdamW, Bf16MomentsThatAreNotFiniteAreFlagged) {
  for (const int64_t at : {0, 4999}) {
    std::vector<AdamWTensor> t = {with_small_moments(5000, 1).first};
    t[0].grad.narrow(0, at, 1).fill_(INFINITY);
    Tensor flag = Tensor::zeros({1}, DType::kF64);
    adamw_step(t, {.learning_rate = 0.1, .non_finite = flag});
    EXPECT_EQ(flag.item(), 1) << at;
  }
  auto wide = parameter(3, DType::kF64, 1, 0);
  wide.m = wide.v = Tensor::zeros({3}, DType::kBF16);
  std::vector<AdamWTensor> t = {wide};
  EXPECT_THROW_WITH(adamw_step(t, {}), Error, "[adamw] expected m f64[3]");
}

TEST(AdamW, SaysWhatIsWrongBeforeItWrites) {
  std::vector<AdamWTensor> t = {parameter(3, DType::kF32, 1, 0), parameter(4, DType::kF32, 2, 0)};
  const Tensor before = t[0].param.clone();
  t[1].m = Tensor::zeros({5}, DType::kF32);
  EXPECT_THROW_WITH(adamw_step(t, {.learning_rate = 0.1}), Error, "[adamw] expected m f32[4]");
  EXPECT_TRUE(bit_equal(t[0].param, before));
  t.pop_back();
  EXPECT_THROW_WITH(adamw_step(t, {.learning_rate = 0.1, .step = 0}), Error, "count from 1");
  EXPECT_THROW_WITH(adamw_step(t, {.learning_rate = 0.1, .beta1 = 1}), Error, "betas in [0, 1)");
  EXPECT_THROW_WITH(adamw_step(t, {.learning_rate = 0.1, .norm = Tensor::zeros({1}, DType::kF32)}),
                    Error, "expected norm f64[1]");
  EXPECT_THROW_WITH(adamw_step(t, {.learning_rate = 0.1, .max_norm = -1}), Error, "max_norm");
  t[0].low_bits = Tensor::zeros({6}, DType::kU8);
  EXPECT_THROW_WITH(adamw_step(t, {.learning_rate = 0.1}), Error, "needs no low bits");
}

// The weight is the nearest bf16, halves away from zero, and with the low bits restores the master.
TEST(AdamW, MastersAreTheirPartsTogether) {
  Rng rng(1, rng_stream(kTestPurpose));
  std::vector<float> masters = {0.0f,    -0.0f, 1.0f,     -1.0f,    1e-45f,
                                -1e-39f, 3e38f, INFINITY, -INFINITY};
  for (uint32_t high = 0; high < 0x7f80; high += 37)  // finite ones: around halves, of either sign
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      for (const uint32_t sign : {0u, 0x80000000u})
        masters.push_back(std::bit_cast<float>(sign | high << 16 | low));
  for (int i = 0; i < 100000; ++i)
    masters.push_back(
        static_cast<float>((rng.uniform() - 0.5) * std::exp(40 * rng.uniform() - 20)));
  const auto count = static_cast<int64_t>(masters.size());
  const Tensor all = Tensor::from(masters);
  Tensor param = Tensor::empty({count}, DType::kBF16), low = Tensor::empty({2 * count}, DType::kU8);
  split_master(param, low, all);
  EXPECT_TRUE(bit_equal(combine_master(param, low), all));
  const std::vector<double> weights = param.to_vector<double>();
  const std::vector<double> even = all.to(DType::kBF16).to_vector<double>();
  int64_t halves = 0;
  for (size_t i = 0; i < masters.size(); ++i) {
    const bool is_half = (std::bit_cast<uint32_t>(masters[i]) & 0xffff) == 0x8000;
    if (!is_half)
      EXPECT_EQ(weights[i], even[i]) << masters[i];
    else
      EXPECT_GT(std::fabs(weights[i]), std::fabs(static_cast<double>(masters[i])));
    halves += is_half;
  }
  EXPECT_GT(halves, 1000);
}

TEST(GradNorm, IsTheNormOverAllTensors) {
  std::vector<Tensor> tensors;
  double squares = 0;
  for (const int64_t n : {0, 1, 3, 65, 50000}) {
    tensors.push_back(random_tensor({n}, DType::kF32, static_cast<uint64_t>(n)));
    for (const double v : tensors.back().to_vector<double>()) squares += v * v;
  }
  Tensor norm = Tensor::empty({1}, DType::kF64);
  grad_norm(norm, tensors);
  EXPECT_NEAR(norm.item(), std::sqrt(squares), 1e-13 * std::sqrt(squares));
  expect_thread_invariant([&] {
    Tensor n = Tensor::empty({1}, DType::kF64);
    grad_norm(n, tensors);
    return std::vector{n};
  });
  grad_norm(norm, {});
  EXPECT_EQ(norm.item(), 0);
}

TEST(GradNorm, DoesNotOverflowInF32AndShowsNaN) {
  std::vector<Tensor> tensors = {Tensor::full({4}, 1e30, DType::kF32)};
  Tensor norm = Tensor::empty({1}, DType::kF64);
  grad_norm(norm, tensors);
  EXPECT_NEAR(norm.item(), 2e30, 1e24);  // 1e30 rounded to f32
  tensors.push_back(Tensor::full({2}, NAN, DType::kF32));
  grad_norm(norm, tensors);
  EXPECT_TRUE(std::isnan(norm.item()));
  tensors.back().fill_(-INFINITY);
  grad_norm(norm, tensors);
  EXPECT_EQ(norm.item(), INFINITY);
  Tensor single = Tensor::empty({1}, DType::kF32);
  EXPECT_THROW_WITH(grad_norm(single, tensors), Error, "expected norm f64[1]");
}

}  // namespace
}  // namespace cohort::kernels
