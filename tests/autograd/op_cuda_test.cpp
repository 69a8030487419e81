// Every row of the op table on CUDA, forward and all gradients, against the CPU's f64 on the same
// inputs.
//
// f32: 1e-5 of the norm. bf16: the error may be at most 1.5 times that of rounding the f64 result
// at the op's rounding points. For most ops that is the result alone; an op that rounds a matmul's
// operand (the logits' gradient) has a second independent error of the same size, hence sqrt(2)
// times it, within the factor of 1.5. Cases of several ops get 1.0 more for each further one, and
// so does attention, whose rounding points tests/kernels/attention_*_cuda_test.cpp check one by
// one.
#include <array>
#include <cmath>

#include "autograd/ops.h"
#include "core/rng.h"
#include "tests/support/op_cases.h"
#include "tests/support/test_util.h"

namespace cohort {

void PrintTo(const OpCase& test, std::ostream* out) {
  *out << test.op << ", " << test.variant;
}

namespace {

using test::bit_equal;
using test::norm;
using test::random_tensor;
using test::relative_error;

struct Results {
  Tensor y;
  std::vector<Tensor> gradients;
};

// Runs a case on `inputs` in `dtype` on `device`. All runs have the same seed of the backward.
Results run(const OpCase& test, const std::vector<Tensor>& inputs, DType dtype, Device device) {
  std::vector<Variable> leaves;
  for (const Tensor& t : inputs) leaves.push_back(Variable::parameter(t.to(dtype).to(device)));
  const Variable y = test.fn(leaves);
  const Tensor seed = random_tensor(y.shape(), DType::kF64, 17).to(DType::kBF16);
  backward(y, seed.to(y.value().dtype()).to(device));
  Results out{.y = y.value(), .gradients = {}};
  for (const Variable& leaf : leaves) out.gradients.push_back(leaf.grad());
  return out;
}

std::vector<OpCase> cases_on_gpus() {
  std::vector<OpCase> cases = op_cases();
  std::erase_if(cases, [](const OpCase& test) { return !test.on_gpus; });
  return cases;
}

bool starts_with(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

// Number of successive roundings to bf16 in a case.
int rounding_points(const OpCase& test) {
  if (test.op == "attention" || test.op == "mlp" || test.variant == "its input used outside too")
    return 4;
  if (starts_with(test.op, "add_") || test.op == "lora_linear" ||
      test.variant == "two overlapping rows")
    return 3;
  for (const char* two : {"one variable as both operands", "x x^T", "the table as input and head"})
    if (test.variant == two) return 2;
  if (test.op == "rope" && test.variant.ends_with("in place")) return 2;
  // Their backward reads the rounded output.
  for (const char* two : {"exp", "sqrt", "tanh", "sigmoid"})
    if (test.op == two) return 2;
  return 1;
}

// Tolerance of the error in bf16, relative to the f64 result's norm. A few values may happen to be
// near representable ones: one rounding counts as its expected size at least.
double bf16_tolerance(const OpCase& test, const Tensor& exact) {
  constexpr double kExpected = 0.0017;
  const double rounding = relative_error(exact.to(DType::kBF16).to(DType::kF64), exact);
  return (rounding_points(test) + 0.5) * std::max(rounding, kExpected);
}

class CudaOp : public testing::TestWithParam<OpCase> {};

void expect_close(const OpCase& test, const Tensor& got, const Tensor& exact, DType dtype,
                  const std::string& what) {
  ASSERT_EQ(got.shape(), exact.shape()) << what;
  const double error = norm(exact) > 0 ? relative_error(got.to(Device{}).to(DType::kF64), exact)
                                       : norm(got.to(Device{}));
  const double tolerance = dtype == DType::kF32 ? 1e-5 : bf16_tolerance(test, exact);
  EXPECT_LE(error, tolerance) << what << " in " << dtype_name(dtype);
}

TEST_P(CudaOp, MatchesTheCpu) {
  COHORT_REQUIRE_GPU(device);
  const OpCase& test = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    // Composites round at many points, and a policy loss is never bf16.
    const bool f32_only = starts_with(test.op, "composite") || test.op == "checkpoint" ||
                          test.op == "policy_loss" || test.variant.ends_with("behind a norm");
    if (dtype == DType::kBF16 && f32_only) continue;
    std::vector<Tensor> inputs;
    for (const Tensor& t : test.inputs(0)) inputs.push_back(t.to(dtype).to(DType::kF64));
    const Results exact = run(test, inputs, DType::kF64, {});
    const Results got = run(test, inputs, dtype, device);
    expect_close(test, got.y, exact.y, dtype, "y");
    for (size_t i = 0; i < inputs.size(); ++i)
      expect_close(test, got.gradients[i], exact.gradients[i], dtype, str("gradient ", i));
  }
}

TEST_P(CudaOp, GivesTheSameBitsEveryTime) {
  COHORT_REQUIRE_GPU(device);
  const OpCase& test = GetParam();
  if (test.op == "policy_loss") return;
  const std::vector<Tensor> inputs = test.inputs(1);
  const Results first = run(test, inputs, DType::kBF16, device);
  for (int i = 1; i < 20; ++i) {
    const Results again = run(test, inputs, DType::kBF16, device);
    ASSERT_TRUE(bit_equal(again.y, first.y));
    for (size_t k = 0; k < inputs.size(); ++k)
      ASSERT_TRUE(bit_equal(again.gradients[k], first.gradients[k])) << "gradient " << k;
  }
}

// Weights in f32 beside rows in bf16 are rounded once, and have their gradient in f32.
TEST(CudaRmsNorm, TakesWeightsInF32) {
  COHORT_REQUIRE_GPU(device);
  const Tensor x = random_tensor({7, 48}, DType::kF64, 1).to(DType::kBF16).to(device),
               w = random_tensor({48}, DType::kF64, 2).to(DType::kF32).to(device),
               dy = random_tensor({7, 48}, DType::kF64, 3).to(DType::kBF16).to(device);
  const auto run = [&](const Tensor& weight) {
    const Variable in = Variable::parameter(x), leaf = Variable::parameter(weight);
    const Variable y = rms_norm(in, leaf, {.eps = 1e-6});
    backward(y, dy);
    return std::array{y.value(), in.grad(), leaf.grad()};
  };
  const auto found = run(w), expected = run(w.to(DType::kBF16));
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(bit_equal(found[i], expected[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaOp, testing::ValuesIn(cases_on_gpus()),
                         [](const testing::TestParamInfo<OpCase>& info) {
                           std::string name;
                           for (const char c : info.param.op + "_" + info.param.variant)
                             name += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name + "_" + std::to_string(info.index);
                         });

}  // namespace
}  // namespace cohort
