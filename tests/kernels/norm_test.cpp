#include "kernels/norm.h"

#include "kernels/elementwise.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

constexpr double kEps = 1e-5;
const Shape kNormShapes[] = {{0, 5}, {1, 1}, {3, 1}, {1, 17}, {5, 16}, {2, 3, 65}, {130, 33}};

struct NormInputs {
  Tensor x, w, b, dy;
  NormInputs(const Shape& shape, DType dtype)
      : x(random_tensor(shape, dtype, 1)),
        w(random_tensor({shape[-1]}, dtype, 2)),
        b(random_tensor({shape[-1]}, dtype, 3)),
        dy(random_tensor(shape, dtype, 4)) {}
  NormInputs to(DType dtype) const {
    NormInputs copy = *this;
    for (Tensor* t : {&copy.x, &copy.w, &copy.b, &copy.dy}) *t = t->to(dtype);
    return copy;
  }
};

struct NormOutputs {
  Tensor y, mean, rstd, dx, dw, db;
};

NormOutputs run_rms(const NormInputs& in) {
  NormOutputs out{.y = Tensor::empty_like(in.x),
                  .mean = {},
                  .rstd = Tensor::empty({in.x.rows()}, in.x.dtype()),
                  .dx = Tensor::empty_like(in.x),
                  .dw = Tensor::empty_like(in.w),
                  .db = {}};
  rms_norm_forward({out.y, out.rstd, in.x, in.w, kEps});
  rms_norm_backward({{out.dx}, {out.dw}, in.dy, in.x, in.w, out.rstd});
  return out;
}

NormOutputs run_layer(const NormInputs& in) {
  NormOutputs out{.y = Tensor::empty_like(in.x),
                  .mean = Tensor::empty({in.x.rows()}, in.x.dtype()),
                  .rstd = Tensor::empty({in.x.rows()}, in.x.dtype()),
                  .dx = Tensor::empty_like(in.x),
                  .dw = Tensor::empty_like(in.w),
                  .db = Tensor::empty_like(in.w)};
  layer_norm_forward({out.y, out.mean, out.rstd, in.x, in.w, in.b, kEps});
  layer_norm_backward({{out.dx}, {out.dw}, {out.db}, in.dy, in.x, in.w, out.mean, out.rstd});
  return out;
}

// The definition, in f64: mean is 0 for the RMS norm.
Tensor naive_norm(const NormInputs& in, bool layer) {
  const auto x = in.x.to_vector<double>(), w = in.w.to_vector<double>(),
             b = in.b.to_vector<double>();
  std::vector<double> y(x.size());
  const size_t cols = w.size();
  for (size_t row = 0; row < x.size(); row += cols) {
    double mean = 0, square = 0;
    for (size_t c = 0; layer && c < cols; ++c) mean += x[row + c] / static_cast<double>(cols);
    for (size_t c = 0; c < cols; ++c) square += (x[row + c] - mean) * (x[row + c] - mean);
    const double rstd = 1 / std::sqrt(square / static_cast<double>(cols) + kEps);
    for (size_t c = 0; c < cols; ++c)
      y[row + c] = (x[row + c] - mean) * rstd * w[c] + (layer ? b[c] : 0);
  }
  return Tensor::from(y, in.x.shape());
}

TEST(RmsNorm, ForwardIsTheDefinition) {
  for (const Shape& shape : kNormShapes) {
    const NormInputs in(shape, DType::kF32);
    const Tensor expected = naive_norm(in, false);
    EXPECT_LE(relative_error(run_rms(in).y, expected), kF32Tolerance) << shape.str();
    EXPECT_LE(relative_error(run_rms(in.to(DType::kF64)).y, expected), 1e-14) << shape.str();
  }
}

TEST(LayerNorm, ForwardIsTheDefinition) {
  for (const Shape& shape : kNormShapes) {
    if (shape[-1] == 1) continue;  // x - mean is 0: see OneColumn
    const NormInputs in(shape, DType::kF32);
    const Tensor expected = naive_norm(in, true);
    EXPECT_LE(relative_error(run_layer(in).y, expected), kF32Tolerance) << shape.str();
    EXPECT_LE(relative_error(run_layer(in.to(DType::kF64)).y, expected), 1e-14) << shape.str();
  }
}

TEST(LayerNorm, OneColumnGivesTheBias) {
  const NormInputs in({3, 1}, DType::kF64);
  const NormOutputs out = run_layer(in);
  for (const double y : out.y.to_vector<double>()) EXPECT_EQ(y, in.b.item());
  for (const double dx : out.dx.to_vector<double>()) EXPECT_EQ(dx, 0);
}

TEST(LayerNorm, BiasMayBeMissing) {
  NormInputs in({3, 17}, DType::kF64);
  in.b.zero_();
  const Tensor expected = run_layer(in).y;
  Tensor y = Tensor::empty_like(in.x), mean = Tensor::empty({3}, DType::kF64), rstd = mean.clone();
  layer_norm_forward({y, mean, rstd, in.x, in.w, none(), kEps});
  EXPECT_LE(relative_error(y, expected), 1e-15);
}

TEST(RmsNorm, BackwardIsTheDerivative) {
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 17}, Shape{2, 2, 5}, Shape{70, 3}}) {
    NormInputs in(shape, DType::kF64);
    const NormOutputs out = run_rms(in);
    Tensor y = Tensor::empty_like(in.x), rstd = Tensor::empty_like(out.rstd);
    const auto loss = [&] {
      rms_norm_forward({y, rstd, in.x, in.w, kEps});
      return dot(y, in.dy);
    };
    if (shape[-1] > 1) expect_gradient(in.x, out.dx, loss, "dx");  // else sign(x), up to eps
    expect_gradient(in.w, out.dw, loss, "dw");
  }
}

TEST(LayerNorm, BackwardIsTheDerivative) {
  for (const Shape& shape : {Shape{3, 17}, Shape{2, 2, 5}, Shape{70, 3}}) {
    NormInputs in(shape, DType::kF64);
    const NormOutputs out = run_layer(in);
    Tensor y = Tensor::empty_like(in.x), mean = out.mean.clone(), rstd = out.rstd.clone();
    const auto loss = [&] {
      layer_norm_forward({y, mean, rstd, in.x, in.w, in.b, kEps});
      return dot(y, in.dy);
    };
    expect_gradient(in.x, out.dx, loss, "dx");
    expect_gradient(in.w, out.dw, loss, "dw");
    expect_gradient(in.b, out.db, loss, "db");
  }
}

TEST(Norms, F32GradientsFollowF64) {
  for (const Shape& shape : {Shape{130, 33}, Shape{3, 384}})
    for (const auto run : {run_rms, run_layer}) {
      const NormInputs in(shape, DType::kF32);
      const NormOutputs a = run(in), b = run(in.to(DType::kF64));
      EXPECT_LE(relative_error(a.dx, b.dx), kF32Tolerance);
      EXPECT_LE(relative_error(a.dw, b.dw), kF32Tolerance);
      if (a.db.defined()) {
        EXPECT_LE(relative_error(a.db, b.db), kF32Tolerance);
      }
    }
}

void expect_sum(const Tensor& sum, double start, const Tensor& gradient) {
  for (int64_t i = 0; i < sum.numel(); ++i)
    EXPECT_EQ(sum.data<double>()[i], start + gradient.data<double>()[i]);
}

TEST(RmsNorm, BackwardAccumulatesAndSkips) {
  const NormInputs in({3, 17}, DType::kF64);
  const NormOutputs out = run_rms(in);
  Tensor dx = Tensor::full({3, 17}, 2, DType::kF64), dw = Tensor::full({17}, 3, DType::kF64);
  rms_norm_backward({{dx, Grad::kAccumulate}, {none()}, in.dy, in.x, in.w, out.rstd});
  rms_norm_backward({{none()}, {dw, Grad::kAccumulate}, in.dy, in.x, in.w, out.rstd});
  expect_sum(dx, 2, out.dx);
  expect_sum(dw, 3, out.dw);
}

TEST(LayerNorm, BackwardAccumulatesAndSkips) {
  const NormInputs in({3, 17}, DType::kF64);
  const NormOutputs out = run_layer(in);
  Tensor dx = Tensor::full({3, 17}, 2, DType::kF64), dw = Tensor::full({17}, 3, DType::kF64);
  Tensor db = Tensor::full({17}, 4, DType::kF64);
  const auto run = [&](Tensor& x, Tensor& w, Tensor& b) {
    layer_norm_backward({{x, Grad::kAccumulate},
                         {w, Grad::kAccumulate},
                         {b, Grad::kAccumulate},
                         in.dy,
                         in.x,
                         in.w,
                         out.mean,
                         out.rstd});
  };
  Tensor skip;
  run(dx, skip, skip);
  run(skip, dw, skip);
  run(skip, skip, db);
  expect_sum(dx, 2, out.dx);
  expect_sum(dw, 3, out.dw);
  expect_sum(db, 4, out.db);
}

TEST(Norms, FusedResidualEqualsTheTwoSteps) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const NormInputs in({5, 33}, dtype);
    NormInputs total = in;
    total.x = Tensor::empty_like(in.x);
    add_forward({total.x, in.x, in.dy});
    const NormOutputs rms = run_rms(total), layer = run_layer(total);
    Tensor sum = in.x.clone(), y = Tensor::empty_like(sum), rstd = Tensor::empty({5}, dtype);
    Tensor mean = rstd.clone();
    add_rms_norm_forward({sum, y, rstd, sum, in.dy, in.w, kEps});  // in place
    EXPECT_TRUE(bit_equal(sum, total.x) && bit_equal(y, rms.y) && bit_equal(rstd, rms.rstd));
    add_layer_norm_forward({sum, y, mean, rstd, in.x, in.dy, in.w, in.b, kEps});
    EXPECT_TRUE(bit_equal(sum, total.x) && bit_equal(y, layer.y));
    EXPECT_TRUE(bit_equal(mean, layer.mean) && bit_equal(rstd, layer.rstd));
    EXPECT_THROW_WITH(add_rms_norm_forward({mean, y, rstd, in.x, in.dy, in.w, kEps}), Error,
                      "[add_rms_norm] expected sum");
  }
}

// Heads and columns of a wider tensor give the bits of contiguous copies.
TEST(RmsNorm, RowsMayLieApart) {
  for (const Shape& shape : {Shape{0, 3, 4}, Shape{1, 2, 5}, Shape{7, 3, 16}, Shape{70, 33}}) {
    Shape wide = shape;
    wide[1] += 3;
    const auto part = [&](const Tensor& all) { return all.narrow(1, 2, shape[1]); };
    const auto random = [&](uint64_t seed) { return part(random_tensor(wide, DType::kF32, seed)); };
    const Tensor x = random(1), dy = random(2), old = random(4);
    const Tensor w = random_tensor({shape[-1]}, DType::kF32, 3);
    Tensor y_all = Tensor::full(wide, 42, DType::kF32), dx_all = y_all.clone();
    Tensor y = part(y_all), dx = part(dx_all), sum = part(Tensor::zeros(wide, DType::kF32));
    sum.copy_(old);
    Tensor rstd = Tensor::empty({x.rows()}, DType::kF32), rstd2 = rstd.clone();
    Tensor dw = Tensor::empty_like(w), dw2 = dw.clone(), dw3 = dw.clone();
    rms_norm_forward({y, rstd, x, w, kEps});
    rms_norm_backward({{dx}, {dw}, dy, x, w, rstd});
    rms_norm_backward({{sum, Grad::kAccumulate}, {dw3}, dy, x, w, rstd});

    Tensor y2 = Tensor::empty(shape, DType::kF32), dx2 = y2.clone(), sum2 = old.clone();
    rms_norm_forward({y2, rstd2, x.clone(), w, kEps});
    rms_norm_backward({{dx2}, {dw2}, dy.clone(), x.clone(), w, rstd2});
    rms_norm_backward({{sum2, Grad::kAccumulate}, {none()}, dy.clone(), x.clone(), w, rstd2});
    EXPECT_TRUE(bit_equal(y.clone(), y2) && bit_equal(rstd, rstd2)) << shape.str();
    EXPECT_TRUE(bit_equal(dx.clone(), dx2) && bit_equal(dw, dw2)) << shape.str();
    EXPECT_TRUE(bit_equal(sum.clone(), sum2) && bit_equal(dw3, dw2)) << shape.str();
    Tensor same = old;  // a view: y may be x
    same.copy_(x);
    rms_norm_forward({same, rstd2, same, w, kEps});
    EXPECT_TRUE(bit_equal(same.clone(), y2)) << shape.str();
    // The other columns are untouched.
    for (const Tensor& all : {y_all, dx_all})
      for (const int64_t column : {int64_t{0}, int64_t{1}, wide[1] - 1})
        for (const float v : all.narrow(1, column, 1).to_vector<float>()) EXPECT_EQ(v, 42);
  }
}

// The rows of y may have other columns after them, in every forward.
TEST(Norms, OutputsMayBeColumnsOfAWiderMatrix) {
  const Shape shape{37, 65};
  const NormInputs in(shape, DType::kF32);
  Tensor mean = Tensor::empty({37}, DType::kF32), rstd = mean.clone(),
         sum = Tensor::empty_like(in.x);
  const std::function<void(Tensor&)> forwards[] = {
      [&](Tensor& y) {
        rms_norm_forward({y, rstd, in.x, in.w, kEps});
      },
      [&](Tensor& y) {
        layer_norm_forward({y, mean, rstd, in.x, in.w, in.b, kEps});
      },
      [&](Tensor& y) {
        add_rms_norm_forward({sum, y, rstd, in.x, in.dy, in.w, kEps});
      },
      [&](Tensor& y) {
        add_layer_norm_forward({sum, y, mean, rstd, in.x, in.dy, in.w, in.b, kEps});
      }};
  for (const auto& forward : forwards) {
    Tensor expected = Tensor::empty(shape, DType::kF32);
    Tensor all = Tensor::full({37, 70}, 42, DType::kF32), y = all.narrow(1, 0, 65);
    forward(expected);
    forward(y);
    EXPECT_TRUE(bit_equal(y.clone(), expected));
    for (const float v : all.narrow(1, 65, 5).to_vector<float>()) EXPECT_EQ(v, 42);
  }
}

TEST(Norms, ThreadCountDoesNotChangeBits) {
  const NormInputs in({700, 65}, DType::kF32);
  for (const auto run : {run_rms, run_layer})
    expect_thread_invariant([&] {
      const NormOutputs out = run(in);
      return std::vector{out.y, out.rstd, out.dx, out.dw};
    });
}

TEST(Norms, RowsDoNotDependOnTheOtherRows) {
  const NormInputs in({37, 67}, DType::kF32);
  for (const auto run : {run_rms, run_layer}) {
    const NormOutputs all = run(in);
    for (const int64_t r : {0, 5, 36}) {
      NormInputs one = in;
      one.x = in.x.narrow(0, r, 1);
      one.dy = in.dy.narrow(0, r, 1);
      const NormOutputs out = run(one);
      EXPECT_TRUE(bit_equal(out.y, all.y.narrow(0, r, 1)));
      EXPECT_TRUE(bit_equal(out.dx, all.dx.narrow(0, r, 1)));
    }
  }
}

TEST(Norms, MismatchesNameTheTensor) {
  const NormInputs in({3, 4}, DType::kF32);
  NormOutputs out = run_layer(in);
  Tensor wrong = Tensor::zeros({5}, DType::kF32);
  EXPECT_THROW_WITH(rms_norm_forward({out.y, wrong, in.x, in.w, kEps}), Error,
                    "[rms_norm] expected rstd f32[3]");
  EXPECT_THROW_WITH(rms_norm_forward({out.y, out.rstd, in.x, wrong, kEps}), Error,
                    "[rms_norm] expected w f32[4]");
  EXPECT_THROW_WITH(rms_norm_backward({{out.dx}, {wrong}, in.dy, in.x, in.w, out.rstd}), Error,
                    "[rms_norm_backward] expected dw f32[4]");
  EXPECT_THROW_WITH(layer_norm_forward({out.y, out.mean, out.rstd, in.x, in.w, wrong, kEps}), Error,
                    "[layer_norm] expected b f32[4]");
}

}  // namespace
}  // namespace cohort::kernels
