#include "kernels/divergence.h"

#include <cmath>
#include <functional>
#include <limits>

#include "kernels/head.h"
#include "tests/kernels/divergence_case.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;
using cohort::test::norm;

constexpr double kInf = std::numeric_limits<double>::infinity();

void expect_near(const Tensor& got, const std::vector<double>& expected, double tolerance) {
  const auto values = got.to_vector<double>();
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], tolerance) << i;
}

// Computed by hand.
TEST(Divergence, OfFourTokens) {
  const Tensor z = Tensor::from(std::vector{2.0, 1.0, 0.0, -1.0}).reshape({1, 4}),
               teacher = Tensor::from(std::vector{1.0, 2.0, 0.0, 0.0}).reshape({1, 4});
  struct Case {
    DivergenceDesc desc;
    double temperature, value;
    std::vector<double> gradient;
  };
  using enum KlEstimator;
  for (const Case& c :
       {Case{{kReverse}, 1, 0.42859485, {0.40246390, -0.32570744, -0.03267675, -0.04407971}},
        Case{{kForward}, 1, 0.41475298, {0.41939902, -0.37341287, 0.00454978, -0.05053594}},
        Case{{kJsd}, 1, 0.10120585, {0.09475535, -0.08064848, -0.00319228, -0.01091458}},
        Case{{kReverse}, 2, 0.10254700, {}},
        Case{
            {kReverse, 0.5, 2}, 1, 0.41536999, {0.41097958, -0.32257470, -0.06462914, -0.02377573}},
        Case{{kForward, 0.5, 2}, 1, 0.39491137, {}}}) {
    const DivergenceOutputs out = run_divergence(z, teacher, c.desc, c.temperature);
    expect_near(out.divergence, {c.value}, 1e-8);
    if (!c.gradient.empty()) expect_near(out.gradient, c.gradient, 1e-8);
  }
}

// The sum over three tokens, and of the gradients times cos(2.1 i), by TRL 1.16's
// generalized_jsd_loss in f64.
TEST(Divergence, EqualsTrl) {
  constexpr int64_t kTokens = 3, kVocab = 37;
  Tensor z = Tensor::empty({kTokens, kVocab}, DType::kF64), teacher = Tensor::empty_like(z);
  for (int64_t i = 0; i < z.numel(); ++i) {
    z.data<double>()[i] = 3 * std::sin(1.7 * static_cast<double>(i) + 0.3);
    teacher.data<double>()[i] = 3 * std::cos(0.9 * static_cast<double>(i));
  }
  struct Case {
    double temperature;
    DivergenceDesc desc;
    double value, gradient;
  };
  using enum KlEstimator;
  for (const Case& c : {Case{0.7, {kReverse}, 11.2398868594281, 2.41561658519498},
                        Case{0.7, {kForward}, 12.1106329286541, -0.166288247107941},
                        Case{0.7, {kJsd, 0.1}, 0.621889070918663, -0.0204656518842679},
                        Case{0.7, {kJsd, 0.5}, 1.3689006009275, -0.000174382932098149},
                        Case{0.7, {kJsd, 0.9}, 0.604446407658939, 0.0331892994033643},
                        Case{1.3, {kReverse}, 5.1377232255369, 0.259165015343617},
                        Case{1.3, {kForward}, 5.38330699170038, -0.0522504263391448},
                        Case{1.3, {kJsd, 0.1}, 0.395082262023798, -0.0057471025785535},
                        Case{1.3, {kJsd, 0.5}, 0.928790783937212, -0.0127651185353561},
                        Case{1.3, {kJsd, 0.9}, 0.385394747973127, 0.00354764958539112}}) {
    const DivergenceOutputs out = run_divergence(z, teacher, c.desc, c.temperature);
    double value = 0, gradient = 0;
    for (const double d : out.divergence.to_vector<double>()) value += d;
    const auto dz = out.gradient.to_vector<double>();
    for (size_t i = 0; i < dz.size(); ++i)
      gradient += dz[i] * std::cos(2.1 * static_cast<double>(i));
    EXPECT_NEAR(value, c.value, 1e-9) << c.temperature;
    EXPECT_NEAR(gradient, c.gradient, 1e-9) << c.temperature;
  }
}

// A student equal to its teacher has no divergence and no gradient, to the bit.
TEST(Divergence, OfEqualLogitsIsZero) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const DivergenceDesc& desc : divergence_kinds()) {
      const Tensor z = random_tensor({9, 300}, dtype, 3, 5);
      const DivergenceOutputs out = run_divergence(z, z, desc, 0.7);
      EXPECT_TRUE(bit_equal(out.divergence, Tensor::zeros({9}, dtype))) << desc.top_k;
      EXPECT_EQ(norm(out.gradient), 0) << desc.top_k;
    }
}

TEST(Divergence, GradientsAreThoseOfDifferences) {
  const Tensor teacher = random_tensor({4, 23}, DType::kF64, 2, 2);
  for (const DivergenceDesc& desc : divergence_kinds())
    for (const double temperature : {0.6, 1.0, 1.7}) {
      Tensor z = random_tensor({4, 23}, DType::kF64, 1, 2);
      const auto analytic =
          run_divergence(z, teacher, desc, temperature).gradient.to_vector<double>();
      for (int64_t i = 0; i < z.numel(); ++i) {
        constexpr double kStep = 1e-5;
        double& x = z.data<double>()[i];
        const double at = x;
        const auto value = [&](double to) {
          x = to;
          const auto values = run_divergence(z, teacher, desc, temperature).divergence;
          return values.to_vector<double>()[static_cast<size_t>(i / 23)];
        };
        const double slope = (value(at + kStep) - value(at - kStep)) / (2 * kStep);
        x = at;
        EXPECT_NEAR(analytic[static_cast<size_t>(i)], slope, 1e-8) << desc.top_k << " at " << i;
      }
    }
}

// Only the teacher's likeliest tokens are entries; of equal ones, those with lower ids.
TEST(Divergence, TopKMergesTheOtherTokens) {
  const Tensor teacher = Tensor::from(std::vector{1.0, 3.0, 1.0, -2.0, 1.0}).reshape({1, 5}),
               z = Tensor::from(std::vector{0.3, -1.0, 0.7, 1.9, -0.4}).reshape({1, 5});
  const auto softmax = [](const Tensor& logits) {
    auto p = logits.to_vector<double>();
    double sum = 0;
    for (double& x : p) sum += x = std::exp(x);
    for (double& x : p) x /= sum;
    return p;
  };
  const auto p = softmax(z), q = softmax(teacher);
  const double rest_p = p[2] + p[3] + p[4], rest_q = q[2] + q[3] + q[4];
  const double expected = p[0] * std::log(p[0] / q[0]) + p[1] * std::log(p[1] / q[1]) +
                          rest_p * std::log(rest_p / rest_q);
  const DivergenceDesc desc{KlEstimator::kReverse, 0.5, 2};
  expect_near(run_divergence(z, teacher, desc, 1).divergence, {expected}, 1e-14);
  // With as many as there are, or more, it is the whole divergence.
  const Tensor whole = run_divergence(z, teacher, {KlEstimator::kReverse}, 1).divergence;
  for (const int64_t top_k : {5, 6, 1000})
    expect_near(run_divergence(z, teacher, {KlEstimator::kReverse, 0.5, top_k}, 1).divergence,
                whole.to_vector<double>(), 1e-15);
}

// Probabilities that round to 0 give finite numbers; a token that the student excludes and the
// teacher does not gives an infinite forward divergence, which the update reports.
TEST(Divergence, OfExtremeLogits) {
  const auto run = [](std::vector<double> student, std::vector<double> teacher, DType dtype,
                      const DivergenceDesc& desc) {
    return run_divergence(Tensor::from(student).to(dtype).reshape({1, 3}),
                          Tensor::from(teacher).to(dtype).reshape({1, 3}), desc, 1);
  };
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const DivergenceDesc& desc : divergence_kinds())
      for (const double size : {80.0, 300.0}) {
        const DivergenceOutputs out = run({size, 0, -size}, {-size, 0, size}, dtype, desc);
        EXPECT_TRUE(std::isfinite(out.divergence.to_vector<double>()[0])) << size;
        for (const double dz : out.gradient.to_vector<double>()) EXPECT_TRUE(std::isfinite(dz));
      }
  const auto excluded = [&](KlEstimator kind) {
    return run({-kInf, 0, 1}, {0, 0, 1}, DType::kF64, {kind}).divergence.to_vector<double>()[0];
  };
  EXPECT_EQ(excluded(KlEstimator::kForward), kInf);
  EXPECT_TRUE(std::isfinite(excluded(KlEstimator::kReverse)));
  EXPECT_TRUE(std::isfinite(excluded(KlEstimator::kJsd)));
}

}  // namespace
}  // namespace cohort::kernels
