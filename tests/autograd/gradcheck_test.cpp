// gradcheck() itself: it accepts correct gradients and rejects wrong ones.
#include "autograd/gradcheck.h"

#include "autograd/ops.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using Inputs = std::span<const Variable>;

// y = x^2 with a backward that is wrong by `factor`, at all elements or at one.
Variable wrong_square(const Variable& x, double factor, int64_t only_element = -1) {
  Tensor y = Tensor::empty_like(x.value());
  kernels::square_forward({.y = y, .x = x.value()});
  return make_node("wrong_square", y, {x},
                   [x = x.value(), factor, only_element](const Tensor& dy, Gradients& g) {
                     GradSlot dx = g.slot(0);
                     Tensor right = Tensor::empty_like(x), y;
                     kernels::square_backward(
                         {.dx = {right, kernels::Grad::kOverwrite}, .dy = dy, .x = x, .y = x});
                     for (int64_t i = 0; i < right.numel(); ++i)
                       if (only_element < 0 || only_element == i) right.data<double>()[i] *= factor;
                     kernels::scale({.y = dx.tensor, .x = right, .factor = 1, .mode = dx.mode});
                   });
}

GradcheckResult check(const std::function<Variable(Inputs)>& fn, const Shape& shape = {3, 4}) {
  return gradcheck(fn, {test::random_tensor(shape, DType::kF64, 1)});
}

}  // namespace

TEST(Gradcheck, AcceptsACorrectGradient) {
  const GradcheckResult result = check([](Inputs in) { return wrong_square(in[0], 1); });
  EXPECT_TRUE(result.ok) << result.message;
  EXPECT_EQ(result.checks, 12 + 8);
  EXPECT_LT(result.worst, 0.1);
}

TEST(Gradcheck, CatchesAWrongGradient) {
  const GradcheckResult result = check([](Inputs in) { return wrong_square(in[0], 0.5); });
  EXPECT_FALSE(result.ok);
  EXPECT_GT(result.worst, 1);
  EXPECT_NE(result.message.find("analytic"), std::string::npos);
}

TEST(Gradcheck, CatchesAnErrorOfOneInTenThousandAtOneElement) {
  for (const int64_t element : {0, 11}) {
    const GradcheckResult result =
        gradcheck([&](Inputs in) { return wrong_square(in[0], 1.0001, element); },
                  {test::random_tensor({3, 4}, DType::kF64, 1)}, {.directions = 0});
    EXPECT_FALSE(result.ok);
    EXPECT_NE(result.message.find(str("input 0 element ", element, ":")), std::string::npos)
        << result.message;
  }
  EXPECT_FALSE(check([](Inputs in) { return wrong_square(in[0], 1 + 3e-6); }).ok);
}

TEST(Gradcheck, CatchesAnErrorAmongElementsItDoesNotVisit) {
  // One of 5000 elements is wrong and 64 are visited: the random directions cover the rest.
  for (const int64_t element : {17, 4999})
    EXPECT_FALSE(check([&](Inputs in) { return wrong_square(in[0], 1.2, element); }, {50, 100}).ok);
}

TEST(Gradcheck, CatchesAMissingGradient) {
  const auto detached = [](Inputs in) { return mul(in[0], in[0].detach()); };
  EXPECT_FALSE(check(detached).ok);
}

TEST(Gradcheck, CatchesNotANumber) {
  const auto nan = [](Inputs in) { return wrong_square(in[0], std::nan("")); };
  EXPECT_FALSE(check(nan).ok);
}

TEST(Gradcheck, RefusesWhatItCannotCheck) {
  const auto fn = [](Inputs in) { return square(in[0]); };
  EXPECT_THROW_WITH(gradcheck(fn, {Tensor::zeros({2}, DType::kF32)}), Error, "expected f64");
  EXPECT_THROW_WITH(check([](Inputs in) { return in[0].detach(); }), Error, "tape");
}

TEST(Gradcheck, LeavesTheInputsAsTheyWere) {
  const Tensor x = test::random_tensor({5}, DType::kF64, 1), before = x.clone();
  gradcheck([](Inputs in) { return square(in[0]); }, {x});
  EXPECT_TRUE(test::bit_equal(x, before));
}

}  // namespace cohort
