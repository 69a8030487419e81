// The backward of an MLP's activation against the elementwise ops and bias_backward(), which both
// devices have.
#pragma once

#include "kernels/activation.h"
#include "kernels/matmul.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels::test {

struct ActivationCase {
  const char* name;
  Activation op;
  void (*forward)(Tensor& y, const Tensor& u);
  void (*backward)(Tensor& du, const Tensor& dy, const Tensor& u);
};
#define COHORT_CASE(Op, op)                            \
  {#op, Activation::k##Op,                             \
   [](Tensor& y, const Tensor& u) {                    \
     op##_forward({y, u});                             \
   },                                                  \
   [](Tensor& du, const Tensor& dy, const Tensor& u) { \
     op##_backward({{du}, dy, u, u});                  \
   }},
inline const ActivationCase kUnaryActivations[] = {COHORT_UNARY_ACTIVATIONS(COHORT_CASE)};
#undef COHORT_CASE
#define COHORT_CASE(Op, op)                            \
  {#op, Activation::k##Op,                             \
   [](Tensor& y, const Tensor& u) {                    \
     op##_forward({y, u});                             \
   },                                                  \
   [](Tensor& du, const Tensor& dy, const Tensor& u) { \
     op##_backward({{du}, dy, u});                     \
   }},
inline const ActivationCase kGatedActivations[] = {COHORT_GATED_OPS(COHORT_CASE)};
#undef COHORT_CASE

inline std::vector<ActivationCase> activation_cases() {
  std::vector<ActivationCase> all(std::begin(kUnaryActivations), std::end(kUnaryActivations));
  all.insert(all.end(), std::begin(kGatedActivations), std::end(kGatedActivations));
  return all;
}

// dy's shape: no rows, one row, rows that are no multiples of 16 bytes, more columns than a block
// has on CUDA, and more rows (from 128 of long ones to 4,096 of short ones).
inline const Shape kActivationShapes[] = {{0, 5},    {7},       {1, 264},   {3, 5},     {2, 3, 72},
                                          {700, 65}, {9000, 3}, {300, 520}, {131, 1032}};

// What the one call writes has the bits of the calls it stands for: with and without the gradient
// of the bias, which is written or added to, and the activation, beside dy or in its place.
inline void expect_bits_of_single_ops(const ActivationCase& test, const Shape& shape, DType dtype,
                                      Device device, Start start) {
  SCOPED_TRACE(str(test.name, " ", shape.str(), " in ", dtype_name(dtype),
                   start == Start::kOdd ? ", not aligned" : ""));
  Shape wide = shape;
  if (is_gated(test.op)) wide[-1] *= 2;
  const Shape columns{wide[-1]};
  const DType sums = accumulate_dtype(dtype);
  const Tensor old = random_tensor(columns, DType::kF64, 3);
  Guarded u(random_tensor(wide, DType::kF64, 1, 2), dtype, device, start);
  const Tensor dy = random_tensor(shape, DType::kF64, 2);
  Tensor y = Tensor::empty(shape, dtype, device), du = Tensor::empty(wide, dtype, device);
  {
    Guarded gradient(dy, dtype, device, start);
    test.forward(y, u.tensor());
    test.backward(du, gradient.tensor(), u.tensor());
  }
  enum class Bias { kNone, kOverwrite, kAccumulate };
  enum class Value { kNone, kBeside, kInPlace };
  for (const Bias bias : {Bias::kNone, Bias::kOverwrite, Bias::kAccumulate})
    for (const Value value : {Value::kNone, Value::kBeside, Value::kInPlace}) {
      const Grad mode = bias == Bias::kAccumulate ? Grad::kAccumulate : Grad::kOverwrite;
      Guarded expected(old, sums, device), dbias(old, sums, device);
      Guarded gradient(dy, dtype, device, start), out(wide, dtype, device, start);
      Guarded beside(shape, dtype, device, start);
      bias_backward({.dbias = {expected.tensor(), mode}, .dy = du});
      activation_backward({.du = out.tensor(),
                           .dbias = {bias == Bias::kNone ? none() : dbias.tensor(), mode},
                           .dy = gradient.tensor(),
                           .u = u.tensor(),
                           .op = test.op,
                           .y = value == Value::kNone     ? Tensor()
                                : value == Value::kBeside ? beside.tensor()
                                                          : gradient.tensor()});
      const auto equal = [](const Tensor& a, const Tensor& b) {
        return bit_equal(a.to(Device{}), b.to(Device{}));
      };
      EXPECT_TRUE(equal(out.tensor(), du));
      EXPECT_TRUE(bias == Bias::kNone || equal(dbias.tensor(), expected.tensor()));
      EXPECT_TRUE(value != Value::kBeside || equal(beside.tensor(), y));
      EXPECT_TRUE(value != Value::kInPlace || equal(gradient.tensor(), y));
      EXPECT_TRUE(u.intact() && out.intact() && dbias.intact() && gradient.intact() &&
                  beside.intact());
    }
}

}  // namespace cohort::kernels::test
