// The backward of an MLP's activation against the elementwise ops and bias_backward(), for both
// devices.
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

// Shapes of dy: no rows, one row, rows that are not multiples of 16 bytes, more columns than a CUDA
// block has, and more rows (a block has from 128 long to 4,096 short ones).
inline const Shape kActivationShapes[] = {{0, 5},    {7},       {1, 264},   {3, 5},     {2, 3, 72},
                                          {700, 65}, {9000, 3}, {300, 520}, {131, 1032}};

// activation_backward() has the bits of the single ops: with and without the gradient of the bias,
// which is overwritten or accumulated, and with the activation in a tensor of its own or in dy's.
inline void expect_bits_of_single_ops(const ActivationCase& test, const Shape& shape, DType dtype,
                                      Device device, Start start) {
  SCOPED_TRACE(str(test.name, " ", shape.str(), " in ", dtype_name(dtype),
                   start == Start::kOdd ? ", not aligned" : ""));
  Shape wide = shape;
  if (is_gated(test.op)) wide[-1] *= 2;
  const Shape columns{wide[-1]};
  const DType accumulate = accumulate_dtype(dtype);
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
      Guarded expected(old, accumulate, device), dbias(old, accumulate, device);
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

// Sizes of the matmuls fused with an activation: [rows, k] [k, cols], in the backward [rows, c]
// [c, cols]. The last `tail` of the k columns are a tail, see LinearForward.
struct LinearActivationSizes {
  int64_t rows, k, cols, c, tail = 0;
};
// Columns of `wide` before the last 64.
inline Tensor without_last_columns(const Tensor& wide) {
  return wide.narrow(1, 0, wide.dim(1) - 64);
}
// Fused matmuls have the bits of the single ops. `random` makes inputs, `output` makes outputs.
inline void expect_bits_of_composition(const ActivationCase& test,
                                       const LinearActivationSizes& size,
                                       const std::function<Tensor(const Shape&, uint64_t)>& random,
                                       const std::function<Tensor(const Shape&, DType)>& output) {
  const auto& [rows, k, cols, c, tail] = size;
  SCOPED_TRACE(str(test.name, " of ", rows, " x ", k, ", F = ", cols, ", C = ", c, ", ", tail));
  const int64_t wide = is_gated(test.op) ? 2 * cols : cols;
  const auto equal = [](const Tensor& a, const Tensor& b) {
    return bit_equal(a.to(Device{}), b.to(Device{}));
  };
  const Tensor x = random({rows, k}, 1), up = random({wide, k}, 2), some_bias = random({wide}, 3);
  const Tensor dy = random({rows, c}, 4), wide_down = random({c, cols + 64}, 5);
  const Tensor strided_down = without_last_columns(wide_down), down = strided_down.clone();
  const DType dtype = x.dtype(), accumulate = accumulate_dtype(dtype);
  Tensor u = Tensor::empty({rows, wide}, dtype, x.device()),
         f = Tensor::empty({rows, cols}, dtype, x.device());
  for (const Tensor& bias : {none(), some_bias}) {
    linear_forward({u, x, up, bias, tail});
    test.forward(f, u);
    Tensor got_u = output(u.shape(), dtype), got_f = output(f.shape(), dtype);
    const auto forward = [&, &tail = tail](Tensor& y, const Tensor& kept) {
      linear_activation(
          {.y = y, .x = x, .w = up, .bias = bias, .op = test.op, .u = kept, .tail = tail});
    };
    forward(got_f, got_u);
    EXPECT_TRUE(equal(got_u, u) && equal(got_f, f)) << bias.defined();
    Tensor alone = output(f.shape(), dtype);
    forward(alone, none());
    EXPECT_TRUE(equal(alone, f)) << bias.defined();
    for (const Tensor& kept : {got_u, none()}) {
      const Tensor wide = output({rows, cols + 64}, dtype);
      Tensor strided = without_last_columns(wide);
      forward(strided, kept);
      EXPECT_TRUE(equal(strided.clone(), f)) << bias.defined();
      for (const double x : wide.narrow(1, cols, 64).clone().to_vector<double>())
        ASSERT_TRUE(std::isnan(x));
    }
  }
  Tensor df = f.clone(), du = Tensor::empty_like(u),
         dbias = Tensor::empty({wide}, accumulate, x.device());
  matmul({.c = df, .a = dy, .b = down});
  activation_backward({.du = du, .dbias = {dbias}, .dy = df, .u = u, .op = test.op});
  for (const bool again : {false, true}) {
    Tensor got_du = output(u.shape(), dtype), got_dbias = output({wide}, accumulate),
           got_f = again ? output(f.shape(), dtype) : none();
    linear_activation_backward({.du = got_du,
                                .dbias = {again ? got_dbias : none()},
                                .dy = dy,
                                .w = again ? strided_down : down,
                                .u = u,
                                .op = test.op,
                                .y = got_f});
    EXPECT_TRUE(equal(got_du, du)) << again;
    EXPECT_TRUE(!again || (equal(got_f, f) && equal(got_dbias, dbias)));
  }
}

}  // namespace cohort::kernels::test
