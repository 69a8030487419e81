// Every row of the op table: gradients against central differences, and the properties of every
// backward: overwriting equals accumulating onto zero, an input's gradient does not depend on which
// others are needed, two backwards add up, threads change no bit, f32 follows f64.
#include <filesystem>
#include <set>
#include <sstream>

#include "autograd/ops.h"
#include "core/parallel.h"
#include "tests/support/op_cases.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

struct Outcome {
  Tensor y;
  std::vector<Tensor> gradients;  // undefined for an input that is constant
};

enum class Through { kDirect, kCopy };

// Runs a case on its inputs in `dtype` and its backward from a fixed random seed. `wanted` is the
// differentiated input, -1 for all. With kCopy each input is an intermediate value of the tape,
// whose gradient ops overwrite, while they accumulate into that of a parameter.
Outcome run(const OpCase& test, DType dtype, int wanted = -1, Through through = Through::kDirect) {
  std::vector<Variable> leaves, inputs;
  const std::vector<Tensor> values = test.inputs(1);
  for (size_t i = 0; i < values.size(); ++i) {
    const Tensor value = values[i].to(dtype).clone();
    const bool differentiated = wanted < 0 || static_cast<size_t>(wanted) == i;
    leaves.push_back(differentiated ? Variable::parameter(value) : Variable(value));
    inputs.push_back(through == Through::kCopy ? scale(leaves[i], 1) : leaves[i]);
  }
  const Variable y = test.fn(inputs);
  backward(y, test::random_tensor(y.shape(), dtype, 2));
  Outcome outcome{y.value(), {}};
  for (const Variable& leaf : leaves)
    outcome.gradients.push_back(leaf.requires_grad() ? leaf.grad() : Tensor());
  return outcome;
}

// Equal as numbers: 0 + -0 is 0.
bool equal_values(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.to_vector<double>() == b.to_vector<double>();
}

std::string name(const OpCase& test) {
  return test.op + " (" + test.variant + ")";
}

}  // namespace

TEST(OpTable, GradientsMatchDifferences) {
  for (const OpCase& test : op_cases()) {
    const GradcheckResult result = run_op_case(test);
    EXPECT_TRUE(result.ok) << name(test) << ": " << result.message;
    EXPECT_GE(result.checks, 9) << name(test);
  }
}

TEST(OpTable, CoversEveryDifferentiableOp) {
  std::set<std::string> covered, names;
  for (const OpCase& test : op_cases()) {
    covered.insert(test.op);
    EXPECT_TRUE(names.insert(name(test)).second) << "two rows are called " << name(test);
  }
#define COHORT_EXPECT_ROW(Op, name) EXPECT_TRUE(covered.count(#name)) << #name;
  COHORT_UNARY_OPS(COHORT_EXPECT_ROW)
  COHORT_BINARY_OPS(COHORT_EXPECT_ROW)
  COHORT_GATED_OPS(COHORT_EXPECT_ROW)
#undef COHORT_EXPECT_ROW
  const auto root = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
  std::istringstream header(test::read_file(root / "autograd" / "ops.h") +
                            test::read_file(root / "nn" / "feed_forward.h"));
  int declared = 0;
  // Declarations start in the first column: "Variable sum(const Variable& x);".
  for (std::string line; std::getline(header, line);) {
    const size_t space = line.find(' '), bracket = line.find("(const Variable&");
    if (bracket == std::string::npos || space == 0 || line[0] == '#' || line[0] == '/') continue;
    const std::string op = line.substr(space + 1, bracket - space - 1);
    EXPECT_TRUE(covered.count(op)) << op << " has no row in tests/support/op_cases.cpp";
    ++declared;
  }
  EXPECT_GE(declared, 18);
}

TEST(OpTable, OverwrittenGradientsEqualAccumulatedOnes) {
  for (const OpCase& test : op_cases()) {
    const Outcome direct = run(test, DType::kF64);
    // Recycled memory then holds garbage, which shows if an op does not overwrite it.
    { const Tensor garbage = Tensor::full({1 << 14}, 1e6, DType::kF64); }
    const Outcome copied = run(test, DType::kF64, -1, Through::kCopy);
    for (size_t i = 0; i < direct.gradients.size(); ++i)
      EXPECT_LT(test::relative_error(copied.gradients[i], direct.gradients[i]), 1e-14)
          << name(test) << " input " << i;
  }
}

TEST(OpTable, OneInputsGradientDoesNotDependOnTheOthers) {
  for (const OpCase& test : op_cases()) {
    const Outcome all = run(test, DType::kF64);
    for (size_t i = 0; i < all.gradients.size(); ++i) {
      const Outcome one = run(test, DType::kF64, static_cast<int>(i));
      EXPECT_TRUE(equal_values(one.gradients[i], all.gradients[i])) << name(test) << " input " << i;
    }
  }
}

TEST(OpTable, TwoBackwardsAddUp) {
  for (const OpCase& test : op_cases()) {
    std::vector<Variable> leaves;
    for (const Tensor& value : test.inputs(1)) leaves.push_back(Variable::parameter(value));
    std::vector<Tensor> once;
    for (int pass = 0; pass < 2; ++pass) {
      const Variable y = test.fn(leaves);
      backward(y, test::random_tensor(y.shape(), DType::kF64, 2));
      for (size_t i = 0; i < leaves.size(); ++i) {
        if (pass == 0) {
          once.push_back(leaves[i].grad().clone());
          continue;
        }
        Tensor twice = Tensor::empty_like(once[i]);
        kernels::scale({.y = twice, .x = once[i], .factor = 2});
        EXPECT_LT(test::relative_error(leaves[i].grad(), twice), 1e-14) << name(test);
      }
    }
  }
}

TEST(OpTable, ThreadsChangeNoBit) {
  const int before = num_threads();
  for (const OpCase& test : op_cases())
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      set_num_threads(1);
      const Outcome one = run(test, dtype);
      for (const int threads : {2, 3}) {
        set_num_threads(threads);
        const Outcome more = run(test, dtype);
        EXPECT_TRUE(test::bit_equal(one.y, more.y)) << name(test);
        for (size_t i = 0; i < one.gradients.size(); ++i)
          EXPECT_TRUE(test::bit_equal(one.gradients[i], more.gradients[i])) << name(test);
      }
    }
  set_num_threads(before);
}

// 6e-8 for each of some sixty roundings in a block, times ten as norms and attention subtract means
// of similar size.
TEST(OpTable, SinglePrecisionFollowsDouble) {
  for (const OpCase& test : op_cases()) {
    const Outcome exact = run(test, DType::kF64), single = run(test, DType::kF32);
    EXPECT_EQ(single.y.dtype(), DType::kF32) << name(test);
    EXPECT_LT(test::relative_error(single.y, exact.y), 4e-5) << name(test);
    for (size_t i = 0; i < exact.gradients.size(); ++i)
      EXPECT_LT(test::relative_error(single.gradients[i], exact.gradients[i]), 4e-5)
          << name(test) << " input " << i;
  }
}

}  // namespace cohort
