// AdamW and the gradient norm on CUDA: f32 updates have the CPU's bits, bf16 parameters are rounded
// masters.
#include "kernels/optimizer.h"

#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

// Less than a pack, whole packs, about one block of the kernel, several blocks.
const int64_t kSizes[] = {0, 1, 3, 4, 65, 4095, 4096, 4097, 40001};

// A parameter in f32 on the CPU.
AdamWTensor parameter(int64_t n, uint64_t seed) {
  Tensor v = random_tensor({n}, DType::kF64, seed + 3, 0.1);
  for (int64_t i = 0; i < n; ++i) v.data<double>()[i] *= v.data<double>()[i];
  return {.param = random_tensor({n}, DType::kF32, seed),
          .grad = random_tensor({n}, DType::kF32, seed + 1),
          .m = random_tensor({n}, DType::kF32, seed + 2, 0.1),
          .v = v.to(DType::kF32),
          .weight_decay = n % 2 == 0 ? 0.1 : 0};
}

// A bf16 parameter of f32 masters, with its low bits.
struct Split {
  Tensor param, low_bits;

  explicit Split(const Tensor& masters)
      : param(Tensor::empty(masters.shape(), DType::kBF16)),
        low_bits(Tensor::empty({2 * masters.numel()}, DType::kU8)) {
    split_master(param, low_bits, masters);
  }
};

// A parameter on the device between sentinels; if it is bf16, the f32 values are its masters.
struct Placed {
  Guarded weights, low_bits, grad, m, v;

  Placed(const AdamWTensor& t, DType dtype, Device device, Start start)
      : weights(dtype == DType::kBF16 ? Split(t.param).param : t.param, dtype, device, start),
        low_bits(Split(t.param).low_bits, DType::kU8, device),
        grad(t.grad, DType::kF32, device, start),
        m(t.m, DType::kF32, device, start),
        v(t.v, DType::kF32, device, start) {}
  AdamWTensor tensors(double weight_decay) {
    AdamWTensor t{.param = weights.tensor(),
                  .grad = grad.tensor(),
                  .m = m.tensor(),
                  .v = v.tensor(),
                  .weight_decay = weight_decay};
    if (t.param.dtype() == DType::kBF16) t.low_bits = low_bits.tensor();
    return t;
  }
  bool intact() const {
    return weights.intact() && low_bits.intact() && grad.intact() && m.intact() && v.intact();
  }
};

// The f32 weights or masters, on the CPU.
Tensor master_of(const AdamWTensor& t) {
  const Tensor param = t.param.to(Device{});
  return t.low_bits.defined() ? combine_master(param, t.low_bits.to(Device{})) : param;
}

Tensor norm_of(double value, Device device) {
  return Tensor::full({1}, value, DType::kF64).to(device);
}

TEST(CudaAdamW, HasTheBitsOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  struct Setting {
    AdamWDesc desc;
    double norm;  // 0: none
  };
  const Setting settings[] = {
      {{.learning_rate = 1e-2}, 0},
      {{.learning_rate = 1e-3, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .step = 7, .max_norm = 2},
       8},
      {{.learning_rate = 1e-3, .step = 2, .max_norm = 2}, 1.5}};
  for (const Setting& setting : settings)
    for (const Start start : kStarts) {
      std::vector<AdamWTensor> expected, tensors;
      std::vector<Placed> placed;
      for (const int64_t n : kSizes)
        for (const DType dtype : kCudaTypes) {
          expected.push_back(parameter(n, static_cast<uint64_t>(10 * n)));
          placed.emplace_back(expected.back(), dtype, device, start);
          tensors.push_back(placed.back().tensors(expected.back().weight_decay));
        }
      AdamWDesc here = setting.desc, there = setting.desc;
      if (setting.norm > 0) {
        here.norm = norm_of(setting.norm, {});
        there.norm = norm_of(setting.norm, device);
      }
      adamw_step(expected, here);
      adamw_step(tensors, there);
      for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor master = master_of(tensors[i]);
        EXPECT_TRUE(bit_equal(master, expected[i].param)) << master.str();
        EXPECT_TRUE(bit_equal(tensors[i].m.to(Device{}), expected[i].m)) << master.str();
        EXPECT_TRUE(bit_equal(tensors[i].v.to(Device{}), expected[i].v)) << master.str();
        if (tensors[i].low_bits.defined()) {
          EXPECT_TRUE(bit_equal(tensors[i].param.to(Device{}), Split(master).param));
        }
        EXPECT_TRUE(placed[i].intact()) << master.str();
      }
    }
}

TEST(CudaAdamW, MastersHaveTheBitsOfF32Weights) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t n : {1, 4097}) {
    const AdamWTensor start = parameter(n, 5);
    const Tensor weights = start.param.to(DType::kBF16);
    std::vector<AdamWTensor> whole, split;
    for (auto* tensors : {&whole, &split})
      tensors->push_back({.param = weights.to(DType::kF32).to(device),
                          .grad = start.grad.to(device),
                          .m = start.m.to(device),
                          .v = start.v.to(device),
                          .weight_decay = 0.1});
    split[0].param = weights.to(device);
    split[0].low_bits = Tensor::zeros({2 * n}, DType::kU8, device);
    for (int64_t step = 1; step <= 1000; ++step) {
      const Tensor grad = random_tensor({n}, DType::kF32, static_cast<uint64_t>(step)).to(device);
      for (auto* tensors : {&whole, &split}) {
        (*tensors)[0].grad = grad;
        adamw_step(*tensors, {.learning_rate = 1e-3, .step = step});
      }
    }
    const Tensor master = master_of(split[0]);
    EXPECT_TRUE(bit_equal(master, whole[0].param.to(Device{})));
    EXPECT_TRUE(bit_equal(split[0].param.to(Device{}), Split(master).param));
  }
}

TEST(CudaAdamW, Bf16MomentsHaveTheBitsOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const Start start : kStarts)
    for (const DType dtype : kCudaTypes) {
      std::vector<AdamWTensor> expected, tensors;
      std::vector<Guarded> moments;
      moments.reserve(2 * std::size(kSizes));
      for (const int64_t n : kSizes) {
        AdamWTensor t = parameter(n, static_cast<uint64_t>(10 * n));
        t.m = t.m.to(DType::kBF16);
        t.v = t.v.to(DType::kBF16);
        for (const Tensor& moment : {t.m, t.v})
          moments.emplace_back(moment, DType::kBF16, device, start);
        AdamWTensor there{.param = t.param.to(device),
                          .grad = t.grad.to(device),
                          .m = moments[moments.size() - 2].tensor(),
                          .v = moments.back().tensor(),
                          .weight_decay = t.weight_decay};
        t.unit = there.unit = static_cast<uint64_t>(n);
        t.flat_index = there.flat_index = (int64_t{1} << 33) + 4 * n;
        if (dtype == DType::kBF16) {
          const Split split(t.param);
          there.param = split.param.to(device);
          there.low_bits = split.low_bits.to(device);
        }
        expected.push_back(std::move(t));
        tensors.push_back(std::move(there));
      }
      for (int64_t step = 1; step <= 3; ++step) {
        const AdamWDesc desc{.learning_rate = 1e-2, .step = step, .seed = 9};
        adamw_step(expected, desc);
        adamw_step(tensors, desc);
      }
      for (size_t i = 0; i < tensors.size(); ++i) {
        const AdamWTensor& t = tensors[i];
        EXPECT_TRUE(bit_equal(master_of(t), expected[i].param)) << t.param.str();
        EXPECT_TRUE(bit_equal(t.m.to(Device{}), expected[i].m)) << t.param.str();
        EXPECT_TRUE(bit_equal(t.v.to(Device{}), expected[i].v)) << t.param.str();
      }
      for (const Guarded& moment : moments) EXPECT_TRUE(moment.intact());
    }
}

TEST(CudaAdamW, ManyTensorsTakeSeveralTables) {
  COHORT_REQUIRE_GPU(device);
  std::vector<AdamWTensor> expected, tensors;
  for (uint64_t i = 0; i < 1100; ++i) {
    expected.push_back(parameter(static_cast<int64_t>(i % 4), i));
    const AdamWTensor& t = expected.back();
    tensors.push_back(
        {t.param.to(device), t.grad.to(device), t.m.to(device), t.v.to(device), t.weight_decay});
  }
  adamw_step(expected, {.learning_rate = 0.1});
  adamw_step(tensors, {.learning_rate = 0.1});
  for (size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(bit_equal(tensors[i].param.to(Device{}), expected[i].param)) << i;
  adamw_step({}, {.learning_rate = 0.1});
}

TEST(CudaAdamW, ANonFiniteNormSkipsTheUpdate) {
  COHORT_REQUIRE_GPU(device);
  const AdamWTensor start = parameter(5000, 1);
  for (const double norm : {NAN, INFINITY})
    for (const double max_norm : {0.0, 1.0}) {
      Placed placed(start, DType::kBF16, device, Start::kAligned);
      std::vector<AdamWTensor> t = {placed.tensors(0.1)};
      adamw_step(t, {.learning_rate = 0.1, .norm = norm_of(norm, device), .max_norm = max_norm});
      EXPECT_TRUE(bit_equal(t[0].param.to(Device{}), Split(start.param).param));
      EXPECT_TRUE(bit_equal(master_of(t[0]), start.param));
      EXPECT_TRUE(bit_equal(t[0].m.to(Device{}), start.m));
      EXPECT_TRUE(bit_equal(t[0].v.to(Device{}), start.v));
    }
}

TEST(CudaAdamW, FlagsNonFiniteResults) {
  COHORT_REQUIRE_GPU(device);
  enum class Field { kNone, kWeight, kFirst, kSecond, kGradient };
  const auto flag_of = [&](Field field, int64_t at, float value, DType dtype, double eps) {
    AdamWTensor start = parameter(4097, 1);
    Tensor* const fields[] = {nullptr, &start.param, &start.m, &start.v, &start.grad};
    if (Tensor* x = fields[static_cast<int>(field)]) x->narrow(0, at, 1).fill_(value);
    if (eps == 0)  // 0 / 0
      for (Tensor* x : {&start.grad, &start.m, &start.v}) x->zero_();
    Placed placed(start, dtype, device, Start::kAligned);
    Guarded flag(Tensor::zeros({1}, DType::kF64), DType::kF64, device);
    std::vector<AdamWTensor> t = {placed.tensors(0.1)};
    adamw_step(t, {.learning_rate = 1e-3, .eps = eps, .non_finite = flag.tensor()});
    EXPECT_TRUE(placed.intact() && flag.intact());
    return flag.tensor().item();
  };
  for (const DType dtype : kCudaTypes) {
    EXPECT_EQ(flag_of(Field::kNone, 0, 0, dtype, 1e-8), 0);
    EXPECT_EQ(flag_of(Field::kNone, 0, 0, dtype, 0), 1);
    for (const int64_t at : {0, 4095, 4096}) {  // inside a pack, and past the last one
      for (const Field field : {Field::kWeight, Field::kFirst, Field::kSecond, Field::kGradient})
        for (const float value : {INFINITY, NAN})
          EXPECT_EQ(flag_of(field, at, value, dtype, 1e-8), 1) << at << " " << value;
      // Finite in f32, but infinite when rounded to bf16.
      EXPECT_EQ(flag_of(Field::kWeight, at, 3.4025e38f, dtype, 1e-8), dtype == DType::kBF16);
    }
  }
}

TEST(CudaAdamW, IsReproducible) {
  COHORT_REQUIRE_GPU(device);
  const AdamWTensor start = parameter(40001, 1);
  expect_reproducible([&] {
    std::vector<AdamWTensor> t = {{start.param.to(device), start.grad.to(device),
                                   start.m.to(device), start.v.to(device), 0.1}};
    adamw_step(t, {.learning_rate = 0.1, .step = 3});
    return std::vector{t[0].param, t[0].m, t[0].v};
  });
}

TEST(CudaAdamW, RejectsInvalidArguments) {
  COHORT_REQUIRE_GPU(device);
  const AdamWTensor cpu = parameter(4, 1);
  std::vector<AdamWTensor> t = {
      {cpu.param.to(device), cpu.grad.to(device), cpu.m.to(device), cpu.v.to(device), 0}};
  EXPECT_THROW_WITH(adamw_step(t, {.norm = norm_of(1, {})}), Error, "expected norm on cuda:0");
  t[0].m = cpu.m;
  EXPECT_THROW_WITH(adamw_step(t, {}), Error, "expected m on cuda:0");
  t[0].m = cpu.m.to(device);
  t[0].param = t[0].param.to(DType::kBF16);
  EXPECT_THROW_WITH(adamw_step(t, {}), Error, "expected low_bits u8[8]");
  t[0].low_bits = Tensor::zeros({8}, DType::kU8, device);
  t[0].grad = t[0].grad.to(DType::kBF16);
  EXPECT_THROW_WITH(adamw_step(t, {}), Error, "expected grad f32[4]");
}

TEST(CudaGradNorm, IsTheNormOverAllTensors) {
  COHORT_REQUIRE_GPU(device);
  for (const Start start : kStarts) {
    std::vector<Guarded> guarded;
    std::vector<Tensor> tensors;
    double squares = 0;
    for (const int64_t n : {0, 1, 3, 65, 32767, 32768, 32769, 150001}) {
      const Tensor values = random_tensor({n}, DType::kF32, static_cast<uint64_t>(n));
      for (const double v : values.to_vector<double>()) squares += v * v;
      guarded.emplace_back(values, DType::kF32, device, start);
      tensors.push_back(guarded.back().tensor());
    }
    Guarded norm(Shape{1}, DType::kF64, device);
    grad_norm(norm.tensor(), tensors);
    EXPECT_NEAR(norm.tensor().item(), std::sqrt(squares), 1e-13 * std::sqrt(squares));
    EXPECT_TRUE(norm.intact());
    expect_reproducible([&] {
      Tensor n = Tensor::empty({1}, DType::kF64, device);
      grad_norm(n, tensors);
      return std::vector{n};
    });
  }
}

TEST(CudaGradNorm, BitsDoNotDependOnTheAlignment) {
  COHORT_REQUIRE_GPU(device);
  const Tensor values = random_tensor({40003}, DType::kF32, 1);
  std::vector<Tensor> norms;
  for (const Start start : kStarts) {
    Guarded guarded(values, DType::kF32, device, start);
    norms.push_back(Tensor::empty({1}, DType::kF64, device));
    grad_norm(norms.back(), std::vector{guarded.tensor()});
  }
  EXPECT_TRUE(bit_equal(norms[0].to(Device{}), norms[1].to(Device{})));
}

TEST(CudaGradNorm, ManyTensorsNoTensorsAndNonFiniteValues) {
  COHORT_REQUIRE_GPU(device);
  Tensor norm = Tensor::full({1}, NAN, DType::kF64).to(device);
  grad_norm(norm, {});
  EXPECT_EQ(norm.item(), 0);
  std::vector<Tensor> tensors(2100, Tensor::full({4}, 0.5, DType::kF32).to(device));
  grad_norm(norm, tensors);
  EXPECT_EQ(norm.item(), std::sqrt(2100.0));
  tensors.push_back(Tensor::full({4}, 1e30, DType::kF32).to(device));
  grad_norm(norm, tensors);
  EXPECT_NEAR(norm.item(), 2e30, 1e24);
  tensors.push_back(Tensor::full({2}, -INFINITY, DType::kF32).to(device));
  grad_norm(norm, tensors);
  EXPECT_EQ(norm.item(), INFINITY);
  tensors.push_back(Tensor::full({2}, NAN, DType::kF32).to(device));
  grad_norm(norm, tensors);
  EXPECT_TRUE(std::isnan(norm.item()));
  tensors.push_back(Tensor::zeros({2}, DType::kBF16, device));
  EXPECT_THROW_WITH(grad_norm(norm, tensors), Error, "expected tensor f32[2]");
}

}  // namespace
}  // namespace cohort::kernels
