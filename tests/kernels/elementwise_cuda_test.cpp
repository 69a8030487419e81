// All ops of kernels/elementwise.h on CUDA compared with the CPU's f64; new ops are included.
#include "kernels/elementwise.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

struct CudaUnary {
  const char* name;
  void (*forward)(const UnaryForward&);
  void (*backward)(const UnaryBackward&);
};
struct CudaBinary {
  const char* name;
  void (*forward)(const BinaryForward&);
  void (*backward)(const BinaryBackward&);
};
#define ROW(Op, op) {#op, op##_forward, op##_backward},
const CudaUnary kCudaUnary[] = {COHORT_UNARY_OPS(ROW)};
const CudaBinary kCudaBinary[] = {COHORT_BINARY_OPS(ROW)};
struct CudaGated {
  const char* name;
  void (*forward)(const GatedForward&);
  void (*backward)(const GatedBackward&);
};
const CudaGated kCudaGated[] = {COHORT_GATED_OPS(ROW)};
#undef ROW

// The last size has several blocks of either element type, with a tail.
const Shape kCudaShapes[] = {{0}, {1}, {3, 3}, {17, 1}, {8197}};

// Values representable in `dtype`, positive if the op requires it, and not near zero (relu).
Tensor input_on_cuda(const char* name, const Shape& shape, DType dtype, uint64_t seed) {
  Tensor x = rounded_random(shape, dtype, seed);
  const std::string op = name;
  double* v = x.data<double>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (std::fabs(v[i]) < 0.125) v[i] = std::copysign(0.125, v[i]);
    if (op == "log" || op == "sqrt") v[i] = std::fabs(v[i]);
  }
  return x;
}

// a + b in f64.
Tensor plus(const Tensor& a, const Tensor& b) {
  Tensor total = Tensor::empty_like(a);
  add_forward({total, a, b});
  return total;
}

TEST(CudaElementwise, UnaryForwardFollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const CudaUnary& op : kCudaUnary)
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kCudaShapes)
        for (const Start start : kStarts) {
          const Tensor x = input_on_cuda(op.name, shape, dtype, 1);
          Tensor expected = Tensor::empty_like(x);
          op.forward({expected, x});
          Guarded in(x, dtype, device, start), y(shape, dtype, device, start);
          op.forward({y.tensor(), in.tensor()});
          expect_close(y.tensor(), expected, op.name);
          EXPECT_TRUE(y.intact()) << op.name;
        }
}

TEST(CudaElementwise, UnaryBackwardFollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const CudaUnary& op : kCudaUnary)
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kCudaShapes)
        for (const Start start : kStarts) {
          const Tensor x = input_on_cuda(op.name, shape, dtype, 1),
                       dy = rounded_random(shape, dtype, 2);
          const Tensor old = rounded_random(shape, dtype, 3);
          Tensor y = Tensor::empty_like(x), expected = Tensor::empty_like(x);
          op.forward({y, x});
          y = y.to(dtype).to(DType::kF64);
          op.backward({{expected}, dy, x, y});
          Guarded in(x, dtype, device, start), out(y, dtype, device), grad(dy, dtype, device);
          Guarded dx(shape, dtype, device, start), sum(old, dtype, device, start);
          op.backward({{dx.tensor()}, grad.tensor(), in.tensor(), out.tensor()});
          op.backward(
              {{sum.tensor(), Grad::kAccumulate}, grad.tensor(), in.tensor(), out.tensor()});
          expect_close(dx.tensor(), expected, op.name);
          expect_close(sum.tensor(), plus(old, expected), op.name);
          EXPECT_TRUE(dx.intact() && sum.intact()) << op.name;
        }
}

TEST(CudaElementwise, GatedOpsFollowTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const CudaGated& op : kCudaGated)
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape :
           {Shape{0, 4}, Shape{1}, Shape{3, 5}, Shape{17, 8}, Shape{2, 3, 72}, Shape{3, 4104}})
        for (const Start start : kStarts) {
          Shape wide = shape;
          wide[-1] *= 2;
          const Tensor x = rounded_random(wide, dtype, 1), dy = rounded_random(shape, dtype, 2);
          const Tensor old = rounded_random(wide, dtype, 3);
          Tensor expected = Tensor::empty_like(dy), gradient = Tensor::empty_like(x);
          op.forward({expected, x});
          op.backward({{gradient}, dy, x});
          Guarded in(x, dtype, device, start), grad(dy, dtype, device, start);
          Guarded y(shape, dtype, device, start), dx(wide, dtype, device, start);
          Guarded sum(old, dtype, device, start);
          op.forward({y.tensor(), in.tensor()});
          op.backward({{dx.tensor()}, grad.tensor(), in.tensor()});
          op.backward({{sum.tensor(), Grad::kAccumulate}, grad.tensor(), in.tensor()});
          expect_close(y.tensor(), expected, op.name);
          expect_close(dx.tensor(), gradient, op.name);
          expect_close(sum.tensor(), plus(old, gradient), op.name);
          // The recomputed value, which overwrites the gradient, has the forward's bits.
          Guarded other(wide, dtype, device, start);
          op.backward({{other.tensor()}, grad.tensor(), in.tensor(), grad.tensor()});
          EXPECT_TRUE(bit_equal(other.tensor().to(Device{}), dx.tensor().to(Device{}))) << op.name;
          EXPECT_TRUE(bit_equal(grad.tensor().to(Device{}), y.tensor().to(Device{}))) << op.name;
          EXPECT_TRUE(y.intact() && dx.intact() && sum.intact() && grad.intact() && other.intact())
              << op.name;
        }
}

TEST(CudaElementwise, BinaryForwardFollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const CudaBinary& op : kCudaBinary)
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kCudaShapes)
        for (const Start start : kStarts) {
          const Tensor a = input_on_cuda(op.name, shape, dtype, 1),
                       b = input_on_cuda(op.name, shape, dtype, 2);
          Tensor expected = Tensor::empty_like(a);
          op.forward({expected, a, b});
          Guarded left(a, dtype, device), right(b, dtype, device, start);
          Guarded y(shape, dtype, device, start);
          op.forward({y.tensor(), left.tensor(), right.tensor()});
          expect_close(y.tensor(), expected, op.name);
          EXPECT_TRUE(y.intact()) << op.name;
        }
}

TEST(CudaElementwise, BinaryBackwardFollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const CudaBinary& op : kCudaBinary)
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kCudaShapes)
        for (const Start start : kStarts) {
          const Tensor a = input_on_cuda(op.name, shape, dtype, 1),
                       b = input_on_cuda(op.name, shape, dtype, 2);
          const Tensor dy = rounded_random(shape, dtype, 3), old = rounded_random(shape, dtype, 4);
          Tensor da = Tensor::empty_like(a), db = Tensor::empty_like(a);
          op.backward({{da}, {db}, dy, a, b});
          Guarded left(a, dtype, device, start), right(b, dtype, device), grad(dy, dtype, device);
          Guarded got_a(shape, dtype, device, start), got_b(old, dtype, device, start);
          op.backward({{got_a.tensor()},
                       {got_b.tensor(), Grad::kAccumulate},
                       grad.tensor(),
                       left.tensor(),
                       right.tensor()});
          expect_close(got_a.tensor(), da, op.name);
          expect_close(got_b.tensor(), plus(old, db), op.name);
          // A gradient computed alone has the same bits.
          Guarded one_a(shape, dtype, device, start), one_b(old, dtype, device, start);
          op.backward({{one_a.tensor()},
                       {none(), Grad::kAccumulate},
                       grad.tensor(),
                       left.tensor(),
                       right.tensor()});
          op.backward({{none(), Grad::kAccumulate},
                       {one_b.tensor(), Grad::kAccumulate},
                       grad.tensor(),
                       left.tensor(),
                       right.tensor()});
          EXPECT_TRUE(bit_equal(one_a.tensor(), got_a.tensor())) << op.name;
          EXPECT_TRUE(bit_equal(one_b.tensor(), got_b.tensor())) << op.name;
          EXPECT_TRUE(got_a.intact() && got_b.intact() && one_a.intact() && one_b.intact());
        }
}

TEST(CudaElementwise, SpecialValuesFollowTheFormulas) {
  COHORT_REQUIRE_GPU(device);
  const Tensor x = Tensor::from<float>({NAN, INFINITY, -INFINITY, 0, 1000, -1000});
  Tensor y = Tensor::empty_like(x).to(device);
  exp_forward({y, x.to(device)});
  const auto e = y.to_vector<double>();
  EXPECT_TRUE(std::isnan(e[0]));
  EXPECT_EQ((std::vector<double>{e.begin() + 1, e.end()}),
            (std::vector<double>{INFINITY, 0, 1, INFINITY, 0}));
  silu_forward({y, x.to(device)});
  const auto s = y.to_vector<double>();
  EXPECT_TRUE(std::isnan(s[0]));
  EXPECT_EQ(s[1], INFINITY);
  EXPECT_EQ(s[3], 0);
  EXPECT_EQ(s[4], 1000);
  EXPECT_EQ(s[5], 0);
}

// Device-specific implementations of functions, element by element.
TEST(CudaElementwise, LogIsAccurateEverywhere) {
  COHORT_REQUIRE_GPU(device);
  std::vector<float> values = {1e-40f, 1};
  for (float v = 0x1p-126f; v < 1e38f; v *= 1.0371f) values.push_back(v);
  for (int i = 1; i < 4000; ++i) values.push_back(static_cast<float>(i) / 2048);
  for (int i = 1; i < 20; ++i)
    for (const float sign : {-1.0f, 1.0f}) values.push_back(1 + sign * std::ldexp(1.0f, -i));
  const Tensor x = Tensor::from(values).to(device);
  Tensor y = Tensor::empty_like(x);
  log_forward({y, x});
  const auto got = y.to_vector<double>();
  for (size_t i = 0; i < got.size(); ++i) {
    const double exact = std::log(static_cast<double>(values[i]));
    EXPECT_LE(std::fabs(got[i] - exact), 1e-6 * std::fabs(exact)) << values[i];
  }
  const Tensor odd = Tensor::from<float>({0, -1, INFINITY, NAN, -INFINITY}).to(device);
  Tensor special = Tensor::empty_like(odd);
  log_forward({special, odd});
  const auto s = special.to_vector<double>();
  EXPECT_EQ(s[0], -INFINITY);
  EXPECT_EQ(s[2], INFINITY);
  EXPECT_TRUE(std::isnan(s[1]) && std::isnan(s[3]) && std::isnan(s[4]));
}

TEST(CudaElementwise, GeluIsAccurateInBothTails) {
  COHORT_REQUIRE_GPU(device);
  std::vector<float> values;
  for (float v = -12; v < 12; v += 0.0037f) values.push_back(v);
  const Tensor x = Tensor::from(values).to(device);
  Tensor y = Tensor::empty_like(x);
  gelu_forward({y, x});
  const auto got = y.to_vector<double>();
  for (size_t i = 0; i < got.size(); ++i) {
    const auto v = static_cast<double>(values[i]);
    const double exact = 0.5 * v * std::erfc(-v * std::sqrt(0.5));
    // 2.5 roundings of the exponent x^2 / 2, and the error of normal_cdf().
    EXPECT_LE(std::fabs(got[i] - exact), (1.2e-6 + 1.25 * v * v * 0x1p-24) * std::fabs(exact)) << v;
  }
}

TEST(CudaElementwise, ScaleConvertsBetweenFloatTypes) {
  COHORT_REQUIRE_GPU(device);
  for (const DType from : kCudaTypes)
    for (const DType to : kCudaTypes)
      for (const Shape& shape : kCudaShapes)
        for (const Start start : kStarts) {
          const Tensor x = rounded_random(shape, from, 1), old = rounded_random(shape, to, 2);
          const Tensor factor = Tensor::full({1}, 0.75, DType::kF32).to(device);
          Tensor expected = Tensor::empty_like(x);
          scale({expected, x, 0.75});
          Guarded in(x, from, device, start), y(shape, to, device), sum(old, to, device, start);
          Guarded by(shape, to, device, start), by_sum(old, to, device, start);
          scale({y.tensor(), in.tensor(), 0.75});
          scale({sum.tensor(), in.tensor(), 0.75, Grad::kAccumulate});
          scale_by({by.tensor(), in.tensor(), factor});
          scale_by({by_sum.tensor(), in.tensor(), factor, Grad::kAccumulate});
          expect_close(y.tensor(), expected, "scale");
          expect_close(sum.tensor(), plus(old, expected), "scale, accumulating");
          EXPECT_TRUE(bit_equal(by.tensor(), y.tensor()));
          EXPECT_TRUE(bit_equal(by_sum.tensor(), sum.tensor()));
          EXPECT_TRUE(y.intact() && sum.intact() && by.intact() && by_sum.intact());
        }
}

TEST(CudaElementwise, ScaleRunsInPlace) {
  COHORT_REQUIRE_GPU(device);
  const Tensor x = rounded_random({8197}, DType::kF32, 1);
  Tensor y = x.to(DType::kF32).to(device);
  scale({y, y, -2});
  Tensor expected = Tensor::empty_like(x);
  scale({expected, x, -2});
  EXPECT_EQ(y.to_vector<double>(), expected.to_vector<double>());
}

TEST(CudaElementwise, SumHasOneOrder) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t n : {0, 1, 3, 17, 4097, 100003}) {
      const Tensor x = rounded_random({n}, dtype, 5);
      double expected = 0, magnitude = 0;
      for (const double v : x.to_vector<double>()) {
        expected += v;
        magnitude += std::fabs(v);
      }
      Guarded in(x, dtype, device), odd(x, dtype, device, Start::kOdd);
      Guarded y(Shape{1}, DType::kF32, device), other(Shape{}, DType::kF32, device);
      Guarded more(Tensor::full({1}, 1, DType::kF64), DType::kF32, device);
      sum({y.tensor(), in.tensor()});
      sum({other.tensor(), odd.tensor()});
      sum({more.tensor(), in.tensor(), Grad::kAccumulate});
      // 128 additions per thread and 16 across threads, then f64.
      const double got = y.tensor().item();
      EXPECT_LE(std::fabs(got - expected), 144 * 0x1p-24 * magnitude);
      EXPECT_EQ(other.tensor().item(), got);
      EXPECT_NEAR(more.tensor().item(), 1 + got, 2e-7 * (1 + std::fabs(got)));
      EXPECT_TRUE(y.intact() && other.intact() && more.intact());
      expect_reproducible([&] {
        Tensor again = Tensor::empty({1}, DType::kF32, device);
        sum({again, in.tensor()});
        return std::vector{again};
      });
    }
}

TEST(CudaElementwise, BroadcastScalarFillsOrAdds) {
  COHORT_REQUIRE_GPU(device);
  const Tensor value = Tensor::full({1}, 0.5, DType::kF32).to(device);
  for (const DType dtype : kCudaTypes)
    for (const Shape& shape : kCudaShapes)
      for (const Start start : kStarts) {
        const Tensor old = rounded_random(shape, dtype, 1);
        Guarded x(shape, dtype, device, start), sum(old, dtype, device, start);
        broadcast_scalar({x.tensor(), value, Grad::kOverwrite});
        broadcast_scalar({sum.tensor(), value, Grad::kAccumulate});
        const Tensor half = Tensor::full(shape, 0.5, DType::kF64);
        expect_close(x.tensor(), half, "fill");
        expect_close(sum.tensor(), plus(old, half), "add");
        EXPECT_TRUE(x.intact() && sum.intact());
      }
}

TEST(CudaElementwise, WrongDevicesAndTypesAreNamed) {
  COHORT_REQUIRE_GPU(device);
  Tensor y = Tensor::zeros({3}, DType::kF32, device);
  const Tensor x = Tensor::zeros({3}, DType::kF32), wide = Tensor::zeros({3}, DType::kF64, device);
  EXPECT_THROW_WITH(neg_forward({y, x}), Error, "[neg] expected y on cpu");
  EXPECT_THROW_WITH(add_forward({y, y, x}), Error, "[add] expected b on cuda:0");
  Tensor out = wide;
  EXPECT_THROW_WITH(neg_forward({out, wide}), Error, "expected f32 or bf16 on a CUDA device");
}

}  // namespace
}  // namespace cohort::kernels
