// Iterates over the op lists: an op added to kernels/elementwise.h needs no change here.
#include "kernels/elementwise.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

struct Unary {
  const char* name;
  void (*forward)(const UnaryForward&);
  void (*backward)(const UnaryBackward&);
  double (*formula)(double);
};
struct Binary {
  const char* name;
  void (*forward)(const BinaryForward&);
  void (*backward)(const BinaryBackward&);
  double (*formula)(double, double);
};

#define ROW(Op, op) {#op, op##_forward, op##_backward, [](double x) { return Op::forward(x); }},
const Unary kUnary[] = {COHORT_UNARY_OPS(ROW)};
#undef ROW
#define ROW(Op, op) \
  {#op, op##_forward, op##_backward, [](double a, double b) { return Op::forward(a, b); }},
const Binary kBinary[] = {COHORT_BINARY_OPS(ROW)};
#undef ROW

struct Gated {
  const char* name;
  void (*forward)(const GatedForward&);
  void (*backward)(const GatedBackward&);
  double (*formula)(double, double);
};
#define ROW(Op, op) \
  {#op, op##_forward, op##_backward, [](double a, double b) { return Op::forward(a, b); }},
const Gated kGated[] = {COHORT_GATED_OPS(ROW)};
#undef ROW

const Shape kElementwiseShapes[] = {{0}, {1}, {3}, {17, 1}, {1, 65}, {3, 5, 7}, {40000}};

// Positive if the op needs it (every op is tested there), of both signs otherwise, and away from
// zero, where relu has a kink.
Tensor input(const char* name, const Shape& shape, DType dtype, uint64_t seed) {
  Tensor x = random_tensor(shape, DType::kF64, seed, 2);
  const std::string op = name;
  const bool positive = op == "log" || op == "sqrt";
  double* v = x.data<double>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (std::fabs(v[i]) < 0.1) v[i] = std::copysign(0.1, v[i]);
    if (positive) v[i] = std::fabs(v[i]);
  }
  return x.to(dtype);
}

TEST(Elementwise, UnaryForwardIsTheFormula) {
  for (const Unary& op : kUnary)
    for (const Shape& shape : kElementwiseShapes) {
      const Tensor x = input(op.name, shape, DType::kF32, 1);
      Tensor expected = x.to(DType::kF64).clone();
      double* e = expected.data<double>();
      for (int64_t i = 0; i < x.numel(); ++i) e[i] = op.formula(e[i]);
      Tensor y = Tensor::empty(shape, DType::kF64), y32 = Tensor::empty(shape, DType::kF32);
      op.forward({y, x.to(DType::kF64)});
      EXPECT_TRUE(bit_equal(y, expected)) << op.name;
      op.forward({y32, x});
      EXPECT_LE(relative_error(y32, expected), kF32Tolerance) << op.name;
    }
}

TEST(Elementwise, UnaryBackwardIsTheDerivative) {
  for (const Unary& op : kUnary) {
    const Shape shape{5, 13};
    Tensor x = input(op.name, shape, DType::kF64, 2), y = Tensor::empty_like(x);
    const Tensor dy = random_tensor(shape, DType::kF64, 3);
    op.forward({y, x});
    Tensor dx = Tensor::full(shape, NAN, DType::kF64), sum = Tensor::full(shape, 2, DType::kF64);
    op.backward({{dx}, dy, x, y});
    op.backward({{sum, Grad::kAccumulate}, dy, x, y});
    for (int64_t i = 0; i < dx.numel(); ++i)
      EXPECT_EQ(sum.data<double>()[i], 2 + dx.data<double>()[i]) << op.name;
    Tensor dx32 = Tensor::empty(shape, DType::kF32);
    op.backward({{dx32}, dy.to(DType::kF32), x.to(DType::kF32), y.to(DType::kF32)});
    EXPECT_LE(relative_error(dx32, dx), kF32Tolerance) << op.name;
    Tensor scratch = Tensor::empty_like(x);
    expect_gradient(
        x, dx,
        [&] {
          op.forward({scratch, x});
          return dot(scratch, dy);
        },
        op.name);
  }
}

TEST(Elementwise, BinaryForwardIsTheFormula) {
  for (const Binary& op : kBinary)
    for (const Shape& shape : kElementwiseShapes) {
      const Tensor a = input(op.name, shape, DType::kF32, 1),
                   b = input(op.name, shape, DType::kF32, 2);
      const auto va = a.to_vector<double>(), vb = b.to_vector<double>();
      Tensor expected = Tensor::empty(shape, DType::kF64);
      for (size_t i = 0; i < va.size(); ++i) expected.data<double>()[i] = op.formula(va[i], vb[i]);
      Tensor y = Tensor::empty(shape, DType::kF64), y32 = Tensor::empty(shape, DType::kF32);
      op.forward({y, a.to(DType::kF64), b.to(DType::kF64)});
      EXPECT_TRUE(bit_equal(y, expected)) << op.name;
      op.forward({y32, a, b});
      EXPECT_LE(relative_error(y32, expected), kF32Tolerance) << op.name;
    }
}

TEST(Elementwise, BinaryBackwardIsTheDerivative) {
  for (const Binary& op : kBinary) {
    const Shape shape{3, 17};
    Tensor a = input(op.name, shape, DType::kF64, 2), b = input(op.name, shape, DType::kF64, 3);
    // Away from zero: with |b| = 0.1 the quotient's fifth derivative is 1e8, too much for the step.
    for (int64_t i = 0; i < b.numel(); ++i)
      b.data<double>()[i] += std::copysign(1.0, b.data<double>()[i]);
    const Tensor dy = random_tensor(shape, DType::kF64, 4);
    Tensor da = Tensor::full(shape, NAN, DType::kF64), db = da.clone(), y = da.clone();
    op.backward({{da}, {db}, dy, a, b});
    const auto loss = [&] {
      op.forward({y, a, b});
      return dot(y, dy);
    };
    expect_gradient(a, da, loss, op.name);
    expect_gradient(b, db, loss, op.name);

    Tensor sum_a = Tensor::full(shape, 2, DType::kF64), sum_b = Tensor::full(shape, 3, DType::kF64);
    op.backward({{sum_a, Grad::kAccumulate}, {none()}, dy, a, b});
    op.backward({{none()}, {sum_b, Grad::kAccumulate}, dy, a, b});
    for (int64_t i = 0; i < da.numel(); ++i) {
      EXPECT_EQ(sum_a.data<double>()[i], 2 + da.data<double>()[i]) << op.name;
      EXPECT_EQ(sum_b.data<double>()[i], 3 + db.data<double>()[i]) << op.name;
    }
    Tensor da32 = Tensor::empty(shape, DType::kF32), db32 = Tensor::empty(shape, DType::kF32);
    op.backward({{da32}, {db32}, dy.to(DType::kF32), a.to(DType::kF32), b.to(DType::kF32)});
    EXPECT_LE(relative_error(da32, da), kF32Tolerance) << op.name;
    EXPECT_LE(relative_error(db32, db), kF32Tolerance) << op.name;
  }
}

TEST(Elementwise, GatedForwardIsTheFormulaOfTheHalvesOfRows) {
  for (const Gated& op : kGated)
    for (const Shape& shape :
         {Shape{0, 3}, Shape{1}, Shape{5, 1}, Shape{2, 3, 17}, Shape{9, 4000}}) {
      Shape wide = shape;
      wide[-1] *= 2;
      const Tensor x = random_tensor(wide, DType::kF32, 1, 2);
      const auto in = x.to_vector<double>();
      Tensor expected = Tensor::empty(shape, DType::kF64);
      const int64_t half = shape[-1];
      for (int64_t i = 0; i < expected.numel(); ++i) {
        const auto at = static_cast<size_t>(i + i / half * half);
        expected.data<double>()[i] = op.formula(in[at], in[at + static_cast<size_t>(half)]);
      }
      Tensor y = Tensor::empty(shape, DType::kF64), y32 = Tensor::empty(shape, DType::kF32);
      op.forward({y, x.to(DType::kF64)});
      EXPECT_TRUE(bit_equal(y, expected)) << op.name;
      op.forward({y32, x});
      EXPECT_LE(relative_error(y32, expected), kF32Tolerance) << op.name;
    }
}

TEST(Elementwise, GatedBackwardRecomputesTheValue) {
  for (const Gated& op : kGated)
    for (const DType dtype : {DType::kF32, DType::kF64})
      for (const Shape& shape : {Shape{0, 3}, Shape{5, 1}, Shape{2, 3, 17}, Shape{9, 4000}}) {
        Shape wide = shape;
        wide[-1] *= 2;
        const Tensor x = random_tensor(wide, dtype, 1, 2), dy = random_tensor(shape, dtype, 2);
        Tensor y = Tensor::empty(shape, dtype), dx = Tensor::empty(wide, dtype);
        op.forward({y, x});
        op.backward({{dx}, dy, x});
        // In a tensor of its own, and in dy's.
        for (const bool in_place : {false, true}) {
          const Tensor grad = dy.clone();
          Tensor again = in_place ? grad : Tensor::empty(shape, dtype);
          Tensor other = Tensor::empty(wide, dtype);
          op.backward({{other}, grad, x, again});
          EXPECT_TRUE(bit_equal(again, y)) << op.name;
          EXPECT_TRUE(bit_equal(other, dx)) << op.name;
        }
        EXPECT_THROW_WITH(op.backward({{dx}, dy, x, dx}), Error, "expected y");
      }
}

TEST(Elementwise, GatedBackwardIsTheDerivative) {
  for (const Gated& op : kGated) {
    Tensor x = random_tensor({3, 34}, DType::kF64, 2);
    const Tensor dy = random_tensor({3, 17}, DType::kF64, 4);
    Tensor dx = Tensor::full({3, 34}, NAN, DType::kF64), y = Tensor::empty_like(dy);
    op.backward({{dx}, dy, x});
    expect_gradient(
        x, dx,
        [&] {
          op.forward({y, x});
          return dot(y, dy);
        },
        op.name);
    Tensor sum = Tensor::full({3, 34}, 2, DType::kF64);
    op.backward({{sum, Grad::kAccumulate}, dy, x});
    for (int64_t i = 0; i < dx.numel(); ++i)
      EXPECT_EQ(sum.data<double>()[i], 2 + dx.data<double>()[i]) << op.name;
    Tensor dx32 = Tensor::empty({3, 34}, DType::kF32);
    op.backward({{dx32}, dy.to(DType::kF32), x.to(DType::kF32)});
    EXPECT_LE(relative_error(dx32, dx), kF32Tolerance) << op.name;
  }
}

TEST(Elementwise, ThreadCountDoesNotChangeBits) {
  const Tensor a = input("log", {50001}, DType::kF32, 1), b = input("log", {50001}, DType::kF32, 2);
  for (const Unary& op : kUnary)
    expect_thread_invariant([&] {
      Tensor y = Tensor::empty_like(a), dx = Tensor::empty_like(a);
      op.forward({y, a});
      op.backward({{dx}, b, a, y});
      return std::vector{y, dx};
    });
  for (const Binary& op : kBinary)
    expect_thread_invariant([&] {
      Tensor y = Tensor::empty_like(a), da = Tensor::empty_like(a), db = Tensor::empty_like(a);
      op.forward({y, a, b});
      op.backward({{da}, {db}, a, a, b});
      return std::vector{y, da, db};
    });
  const Tensor halves = random_tensor({77, 1300}, DType::kF32, 5),
               dy = random_tensor({77, 650}, DType::kF32, 6);
  for (const Gated& op : kGated)
    expect_thread_invariant([&] {
      Tensor y = Tensor::empty_like(dy), dx = Tensor::empty_like(halves);
      op.forward({y, halves});
      op.backward({{dx}, dy, halves});
      return std::vector{y, dx};
    });
}

// A loop's vector body and its scalar tail must agree, or a value would depend on its index.
TEST(Elementwise, BitsDoNotDependOnTheIndex) {
  const Tensor x = input("log", {67}, DType::kF32, 1);
  for (const Unary& op : kUnary) {
    Tensor all = Tensor::empty_like(x);
    op.forward({all, x});
    for (int64_t i = 0; i < x.numel(); ++i) {
      Tensor one = Tensor::empty({1}, DType::kF32);
      op.forward({one, x.narrow(0, i, 1)});
      EXPECT_TRUE(bit_equal(one, all.narrow(0, i, 1))) << op.name << " " << i;
    }
  }
}

TEST(Elementwise, OutputMayBeTheInput) {
  const Tensor x = input("log", {100}, DType::kF32, 1);
  for (const Unary& op : kUnary) {
    Tensor y = Tensor::empty_like(x), same = x.clone();
    op.forward({y, x});
    op.forward({same, same});
    EXPECT_TRUE(bit_equal(y, same)) << op.name;
  }
  Tensor same = x.clone(), twice = Tensor::empty_like(x);
  scale({twice, x, 2});
  scale({same, same, 2});
  EXPECT_TRUE(bit_equal(twice, same));
}

TEST(Elementwise, ActivationsAreFiniteFarOut) {
  for (const Unary& op : kUnary) {
    const std::string name = op.name;
    if (name == "exp" || name == "log" || name == "sqrt") continue;
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const Tensor x = Tensor::from<double>({-1e4, -200, -100, 100, 200, 1e4}, {6}).to(dtype);
      Tensor y = Tensor::empty_like(x), dx = Tensor::empty_like(x);
      op.forward({y, x});
      op.backward({{dx}, Tensor::full({6}, 1, dtype), x, y});
      for (const double v : y.to_vector<double>()) EXPECT_TRUE(std::isfinite(v)) << name;
      for (const double v : dx.to_vector<double>()) EXPECT_TRUE(std::isfinite(v)) << name;
    }
  }
}

TEST(Elementwise, ActivationsHaveTheKnownValues) {
  // Phi(1) and Phi(-2) from tables of the normal distribution.
  EXPECT_NEAR(Gelu::forward(1.0), 0.8413447460685429, 1e-15);
  EXPECT_NEAR(Gelu::forward(-2.0), -2 * 0.0227501319481792, 1e-15);
  EXPECT_NEAR(GeluTanh::forward(1.0), 0.5 * (1 + std::tanh(0.7978845608028654 * (1 + 0.044715))),
              1e-15);
  EXPECT_NEAR(Sigmoid::forward(1.0), 0.7310585786300049, 1e-15);
  EXPECT_NEAR(Silu::forward(-1.0), -0.2689414213699951, 1e-15);
  EXPECT_NEAR(SwiGlu::forward(1.0, 3.0), 3 * 0.7310585786300049, 1e-15);
}

TEST(Elementwise, MismatchesNameTheOpAndTheTensor) {
  Tensor y = Tensor::zeros({3}, DType::kF32);
  const Tensor x = Tensor::zeros({4}, DType::kF32);
  for (const Unary& op : kUnary) {
    EXPECT_THROW_WITH(op.forward({y, x}), Error,
                      std::string("[") + op.name + "] expected y f32[4]");
    EXPECT_THROW_WITH(op.backward({{y}, x, x, x}), Error,
                      std::string(op.name) + "_backward] expected dx");
  }
  for (const Binary& op : kBinary) {
    EXPECT_THROW_WITH(op.forward({y, x, y}), Error,
                      std::string("[") + op.name + "] expected b f32[4]");
    EXPECT_THROW_WITH(op.backward({{y}, {none()}, x, x, x}), Error,
                      std::string(op.name) + "_backward] expected da");
  }
  y = Tensor::zeros({3}, DType::kBF16);
  EXPECT_THROW_WITH(neg_forward({y, y}), Error, "expected f64 or f32");
}

TEST(Elementwise, ScaleOverwritesOrAccumulates) {
  const Tensor x = Tensor::from<double>({1, -2}, {2});
  Tensor y = Tensor::from<double>({10, 20}, {2});
  scale({y, x, 3, Grad::kAccumulate});
  EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{13, 14}));
  scale({y, x, 3});
  EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{3, -6}));
}

TEST(Elementwise, ScaleByTakesItsFactorFromATensor) {
  const Tensor x = Tensor::from<double>({1, -2}, {2}), factor = Tensor::full({1}, 3, DType::kF64);
  Tensor y = Tensor::from<double>({10, 20}, {2});
  scale_by({y, x, factor, Grad::kAccumulate});
  EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{13, 14}));
  scale_by({y, x, factor});
  EXPECT_EQ(y.to_vector<double>(), (std::vector<double>{3, -6}));
  EXPECT_THROW_WITH(scale_by({y, x, x}), Error, "[scale_by] expected factor f64[1, 1]");
}

TEST(Elementwise, SumIsBlockedAndAccurate) {
  for (const int64_t n : {0, 1, 3, 17, 4095, 4097, 100003}) {
    const Tensor x = random_tensor({n}, DType::kF32, 5);
    double expected = 0, magnitude = 0;
    for (const double v : x.to_vector<double>()) {
      expected += v;
      magnitude += std::fabs(v);
    }
    Tensor y = Tensor::full({1}, 1, DType::kF32), scalar = Tensor::empty({}, DType::kF32);
    sum({y, x, Grad::kAccumulate});
    sum({scalar, x});
    // 256 additions per lane within a block, f64 between blocks.
    EXPECT_LE(std::fabs(scalar.item() - expected), 256 * 0x1p-24 * magnitude + 1e-30);
    EXPECT_NEAR(y.item(), 1 + scalar.item(), 2e-7 * (1 + std::fabs(scalar.item())));
    expect_thread_invariant([&] {
      Tensor s = Tensor::empty({1}, DType::kF32);
      sum({s, x});
      return std::vector{s};
    });
  }
}

TEST(Elementwise, BroadcastScalarFillsOrAdds) {
  Tensor x = Tensor::from<double>({1, 2, 3}, {3});
  broadcast_scalar({x, Tensor::full({1}, 5, DType::kF64), Grad::kAccumulate});
  EXPECT_EQ(x.to_vector<double>(), (std::vector<double>{6, 7, 8}));
  broadcast_scalar({x, Tensor::full({}, 5, DType::kF64), Grad::kOverwrite});
  EXPECT_EQ(x.to_vector<double>(), (std::vector<double>{5, 5, 5}));
}

}  // namespace
}  // namespace cohort::kernels
