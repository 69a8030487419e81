// Norms and the bias gradient on CUDA compared with the CPU's f64.
#include "kernels/norm.h"

#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

constexpr double kCudaEps = 1e-5;
// Rows of partial warps, warps and blocks; 9000 (f32) and 17000 (bf16) columns exceed the registers
// of a block, and so do 4104 and 9000 in the backward.
const Shape kCudaNormShapes[] = {{0, 5},     {1, 1},    {3, 1},    {1, 17},
                                 {2, 3, 65}, {130, 33}, {37, 128}, {700, 64},
                                 {9, 1000},  {3, 4104}, {2, 9000}, {2, 17000}};

enum class Norm { kRms, kLayer };
enum class Residual { kNo, kYes };

// Inputs on the CPU in f64, with values representable in `dtype`.
struct Inputs {
  Tensor x, w, b, dy;
  Inputs(const Shape& shape, DType dtype)
      : x(rounded_random(shape, dtype, 1)),
        w(rounded_random({shape[-1]}, dtype, 2)),
        b(rounded_random({shape[-1]}, dtype, 3)),
        dy(rounded_random(shape, dtype, 4)) {}
};

struct Outputs {
  Tensor y, mean, rstd, dx, dw, db;
};

void forward(Norm norm, Tensor& y, Tensor& mean, Tensor& rstd, const Tensor& x, const Tensor& w,
             const Tensor& b) {
  if (norm == Norm::kRms)
    rms_norm_forward({y, rstd, x, w, kCudaEps});
  else
    layer_norm_forward({y, mean, rstd, x, w, b, kCudaEps});
}
void backward(Norm norm, Tensor& dx, Tensor& dw, Tensor& db, Grad mode, const Tensor& dy,
              const Tensor& x, const Tensor& w, const Tensor& mean, const Tensor& rstd) {
  if (norm == Norm::kRms)
    rms_norm_backward({{dx, mode}, {dw, mode}, dy, x, w, rstd});
  else
    layer_norm_backward({{dx, mode}, {dw, mode}, {db, mode}, dy, x, w, mean, rstd});
}

// Forward and backward of x, w, b and dy on their device and in their dtype.
Outputs run(Norm norm, const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& dy) {
  const Device device = x.device();
  const DType sums = accumulate_dtype(x.dtype());
  Outputs out{.y = Tensor::empty_like(x),
              .mean = Tensor::empty({x.rows()}, sums, device),
              .rstd = Tensor::empty({x.rows()}, sums, device),
              .dx = Tensor::empty_like(x),
              .dw = Tensor::empty({x.cols()}, sums, device),
              .db = Tensor::empty({x.cols()}, sums, device)};
  forward(norm, out.y, out.mean, out.rstd, x, w, b);
  backward(norm, out.dx, out.dw, out.db, Grad::kOverwrite, dy, x, w, out.mean, out.rstd);
  return out;
}

Tensor sum_of(const Tensor& a, const Tensor& b) {
  Tensor total = Tensor::empty_like(a);
  add_forward({total, a, b});
  return total;
}

void check_norm(Norm norm, const Shape& shape, DType dtype, Device device, Start start) {
  SCOPED_TRACE(shape.str() + dtype_name(dtype) + (norm == Norm::kRms ? " rms" : " layer"));
  const Inputs in(shape, dtype);
  const Outputs exact = run(norm, in.x, in.w, in.b, in.dy);
  const int64_t rows = in.x.rows();
  Guarded x(in.x, dtype, device, start), w(in.w, dtype, device), b(in.b, dtype, device, start);
  Guarded dy(in.dy, dtype, device, start), y(shape, dtype, device, start);
  Guarded mean(Shape{rows}, DType::kF32, device), rstd(Shape{rows}, DType::kF32, device);
  forward(norm, y.tensor(), mean.tensor(), rstd.tensor(), x.tensor(), w.tensor(), b.tensor());
  expect_close(y.tensor(), exact.y, "y");
  expect_close(rstd.tensor(), exact.rstd, "rstd");
  EXPECT_TRUE(y.intact() && mean.intact() && rstd.intact());

  Guarded dx(shape, dtype, device, start), dw(in.w.shape(), DType::kF32, device, start);
  Guarded db(in.w.shape(), DType::kF32, device);
  backward(norm, dx.tensor(), dw.tensor(), db.tensor(), Grad::kOverwrite, dy.tensor(), x.tensor(),
           w.tensor(), mean.tensor(), rstd.tensor());
  // With one column the RMS gradient is the difference of two equal numbers, up to eps.
  if (norm == Norm::kLayer || shape[-1] > 1) expect_close(dx.tensor(), exact.dx, "dx");
  // With one column x - mean is 0.
  if (norm == Norm::kRms || shape[-1] > 1) expect_close(dw.tensor(), exact.dw, "dw");
  if (norm == Norm::kLayer) expect_close(db.tensor(), exact.db, "db");
  EXPECT_TRUE(dx.intact() && dw.intact() && db.intact());
}

TEST(CudaNorm, FollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const Norm norm : {Norm::kRms, Norm::kLayer})
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kCudaNormShapes)
        for (const Start start : kStarts) check_norm(norm, shape, dtype, device, start);
}

TEST(CudaNorm, BackwardAccumulatesAndSkips) {
  COHORT_REQUIRE_GPU(device);
  for (const Norm norm : {Norm::kRms, Norm::kLayer})
    for (const DType dtype : kCudaTypes)
      // The last five are more rows than the backward processes concurrently.
      for (const Shape& shape :
           {Shape{37, 128}, Shape{5, 33}, Shape{2, 9000}, Shape{300, 4104}, Shape{300, 9000},
            Shape{450, 2056}, Shape{1700, 520}, Shape{3300, 320}}) {
        const Inputs in(shape, dtype);
        const Outputs exact = run(norm, in.x, in.w, in.b, in.dy);
        const Tensor x = in.x.to(dtype).to(device), w = in.w.to(dtype).to(device),
                     b = in.b.to(dtype).to(device), dy = in.dy.to(dtype).to(device);
        const Outputs base = run(norm, x, w, b, dy);
        expect_close(base.dx, exact.dx, "dx, overwritten");
        expect_close(base.dw, exact.dw, "dw, overwritten");
        if (norm == Norm::kLayer) expect_close(base.db, exact.db, "db, overwritten");
        const Tensor old = rounded_random(shape, dtype, 7);
        const Tensor old_w = rounded_random({shape[-1]}, DType::kF32, 8);
        Guarded dx(old, dtype, device), dw(old_w, DType::kF32, device);
        Guarded db(old_w, DType::kF32, device);
        Tensor skip;
        const auto add = [&](Tensor& to_x, Tensor& to_w, Tensor& to_b) {
          backward(norm, to_x, to_w, to_b, Grad::kAccumulate, dy, x, w, base.mean, base.rstd);
        };
        add(dx.tensor(), skip, skip);
        add(skip, dw.tensor(), skip);
        if (norm == Norm::kLayer) add(skip, skip, db.tensor());
        expect_close(dx.tensor(), sum_of(old, exact.dx), "dx");
        expect_close(dw.tensor(), sum_of(old_w, exact.dw), "dw");
        if (norm == Norm::kLayer) expect_close(db.tensor(), sum_of(old_w, exact.db), "db");
        EXPECT_TRUE(dx.intact() && dw.intact() && db.intact());
      }
}

// The order of the sums depends on the shape only, not on alignment or on other requested outputs.
TEST(CudaNorm, WeightGradientsHaveOneOrder) {
  COHORT_REQUIRE_GPU(device);
  for (const Norm norm : {Norm::kRms, Norm::kLayer})
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : {Shape{1700, 64}, Shape{1700, 520}, Shape{130, 17000}}) {
        const Inputs in(shape, dtype);
        const Tensor x = in.x.to(dtype).to(device), w = in.w.to(dtype).to(device),
                     b = in.b.to(dtype).to(device);
        Guarded dy(in.dy, dtype, device), odd(in.dy, dtype, device, Start::kOdd);
        const Outputs base = run(norm, x, w, b, dy.tensor()),
                      other = run(norm, x, w, b, odd.tensor());
        EXPECT_TRUE(bit_equal(other.dx, base.dx));
        EXPECT_TRUE(bit_equal(other.dw, base.dw));
        Tensor skip, dw = Tensor::empty_like(base.dw);
        backward(norm, skip, dw, skip, Grad::kOverwrite, dy.tensor(), x, w, base.mean, base.rstd);
        EXPECT_TRUE(bit_equal(dw, base.dw));
        if (norm == Norm::kLayer) {
          EXPECT_TRUE(bit_equal(other.db, base.db));
        }
      }
}

TEST(CudaNorm, LayerNormBiasMayBeMissing) {
  COHORT_REQUIRE_GPU(device);
  const Inputs in({5, 65}, DType::kF32);
  Tensor exact = Tensor::empty_like(in.x), mean = Tensor::empty({5}, DType::kF64), rstd = mean;
  layer_norm_forward({exact, mean, rstd, in.x, in.w, none(), kCudaEps});
  Tensor y = Tensor::empty({5, 65}, DType::kF32, device);
  Tensor m = Tensor::empty({5}, DType::kF32, device), s = m.clone();
  layer_norm_forward({y, m, s, in.x.to(DType::kF32).to(device), in.w.to(DType::kF32).to(device),
                      none(), kCudaEps});
  expect_close(y, exact, "y");
}

// Heads and column ranges of a wider tensor give the same bits as copies of them.
TEST(CudaNorm, RowsOfRmsNormsMayBeStrided) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Shape& shape : {Shape{0, 3, 8}, Shape{1, 2, 5}, Shape{37, 3, 64}, Shape{130, 6, 128},
                               Shape{70, 520}, Shape{5, 9000}, Shape{3, 17000}}) {
      Shape wide = shape;
      wide[1] += 24;  // whole packs of both types
      const auto part = [&](const Tensor& all) { return all.narrow(1, 16, shape[1]); };
      const auto random = [&](uint64_t seed) {
        return part(random_tensor(wide, DType::kF64, seed).to(dtype).to(device));
      };
      const Tensor x = random(1), dy = random(2), old = random(4);
      const Tensor w = random_tensor({shape[-1]}, DType::kF64, 3).to(dtype).to(device);
      Guarded y_all(wide, dtype, device), dx_all(wide, dtype, device);
      Tensor y = part(y_all.tensor()), dx = part(dx_all.tensor()), sum = random(5);
      sum.copy_(old);
      Tensor rstd = Tensor::empty({x.rows()}, DType::kF32, device), rstd2 = rstd.clone();
      Tensor dw = Tensor::empty({shape[-1]}, DType::kF32, device), dw2 = dw.clone();
      Tensor dw3 = dw.clone(), dw4 = dw.clone();
      rms_norm_forward({y, rstd, x, w, kCudaEps});
      rms_norm_backward({{dx}, {dw}, dy, x, w, rstd});
      rms_norm_backward({{sum, Grad::kAccumulate}, {dw3}, dy, x, w, rstd});

      Tensor y2 = Tensor::empty(shape, dtype, device), dx2 = y2.clone(), sum2 = old.clone();
      rms_norm_forward({y2, rstd2, x.clone(), w, kCudaEps});
      rms_norm_backward({{dx2}, {dw2}, dy.clone(), x.clone(), w, rstd2});
      rms_norm_backward({{sum2, Grad::kAccumulate}, {dw4}, dy.clone(), x.clone(), w, rstd2});
      EXPECT_TRUE(bit_equal(y.clone(), y2) && bit_equal(rstd, rstd2)) << shape.str();
      EXPECT_TRUE(bit_equal(dx.clone(), dx2) && bit_equal(dw, dw2)) << shape.str();
      EXPECT_TRUE(bit_equal(sum.clone(), sum2) && bit_equal(dw3, dw4)) << shape.str();
      Tensor same = old;  // a view: y may be x
      same.copy_(x);
      rms_norm_forward({same, rstd2, same, w, kCudaEps});
      EXPECT_TRUE(bit_equal(same.clone(), y2)) << shape.str();
      EXPECT_TRUE(y_all.intact() && dx_all.intact());
      // The other columns are unchanged (NaN).
      for (const Tensor& all : {y_all.tensor(), dx_all.tensor()})
        for (const int64_t column : {int64_t{15}, 16 + shape[1]})
          for (const double v : all.narrow(1, column, 1).clone().to_vector<double>())
            EXPECT_TRUE(std::isnan(v));
    }
}

// The rows of y may have other columns after them, in every forward: aligned or not, in registers
// or too long for them.
TEST(CudaNorm, OutputsMayBeColumnsOfAWiderMatrix) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t cols : {65, 896, 17000})
      for (const int64_t tail : {64, 3}) {
        const Shape shape{37, cols};
        const Inputs values(shape, dtype);
        const auto on_device = [&, device = device](const Tensor& t) {
          return t.to(dtype).to(device);
        };
        const Tensor x = on_device(values.x), w = on_device(values.w), b = on_device(values.b),
                     dy = on_device(values.dy);
        Tensor mean = Tensor::empty({37}, DType::kF32, device), rstd = mean.clone();
        Tensor sum = Tensor::empty_like(x);
        const std::function<void(Tensor&)> forwards[] = {
            [&](Tensor& y) {
              rms_norm_forward({y, rstd, x, w, kCudaEps});
            },
            [&](Tensor& y) {
              layer_norm_forward({y, mean, rstd, x, w, b, kCudaEps});
            },
            [&](Tensor& y) {
              add_rms_norm_forward({sum, y, rstd, x, dy, w, kCudaEps});
            },
            [&](Tensor& y) {
              add_layer_norm_forward({sum, y, mean, rstd, x, dy, w, b, kCudaEps});
            }};
        for (const auto& forward : forwards) {
          Tensor expected = Tensor::empty(shape, dtype, device);
          Guarded all(Shape{37, cols + tail}, dtype, device);
          Tensor y = all.tensor().narrow(1, 0, cols);
          forward(expected);
          forward(y);
          EXPECT_TRUE(bit_equal(y.clone(), expected)) << dtype_name(dtype) << " " << cols;
          EXPECT_TRUE(all.intact());
          for (const double v : all.tensor().narrow(1, cols, tail).clone().to_vector<double>())
            EXPECT_TRUE(std::isnan(v));
        }
      }
}

TEST(CudaNorm, RowsDependOnThemselvesOnly) {
  COHORT_REQUIRE_GPU(device);
  for (const Norm norm : {Norm::kRms, Norm::kLayer})
    for (const DType dtype : kCudaTypes)
      for (const int64_t cols : {7, 64, 128, 1000, 4104, 17000}) {
        const Inputs in({5, cols}, dtype);
        const Tensor w = in.w.to(dtype).to(device), b = in.b.to(dtype).to(device);
        const Outputs all = run(norm, in.x.to(dtype).to(device), w, b, in.dy.to(dtype).to(device));
        for (const int64_t r : {0, 3})
          for (const Start start : kStarts) {
            Guarded x(in.x.narrow(0, r, 1), dtype, device, start);
            Guarded dy(in.dy.narrow(0, r, 1), dtype, device, start);
            const Outputs one = run(norm, x.tensor(), w, b, dy.tensor());
            EXPECT_TRUE(bit_equal(one.y, all.y.narrow(0, r, 1))) << cols;
            EXPECT_TRUE(bit_equal(one.rstd, all.rstd.narrow(0, r, 1))) << cols;
            EXPECT_TRUE(bit_equal(one.dx, all.dx.narrow(0, r, 1))) << cols;
          }
      }
}

TEST(CudaNorm, IsReproducible) {
  COHORT_REQUIRE_GPU(device);
  for (const Norm norm : {Norm::kRms, Norm::kLayer})
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : {Shape{1700, 520}, Shape{130, 17000}}) {
        const Inputs in(shape, dtype);
        const Tensor x = in.x.to(dtype).to(device), w = in.w.to(dtype).to(device),
                     b = in.b.to(dtype).to(device), dy = in.dy.to(dtype).to(device);
        expect_reproducible([&] {
          const Outputs out = run(norm, x, w, b, dy);
          std::vector<Tensor> all{out.y, out.rstd, out.dx, out.dw};
          if (norm == Norm::kLayer) all.push_back(out.db);
          return all;
        });
      }
}

void check_residual(Norm norm, const Shape& shape, DType dtype, Device device) {
  SCOPED_TRACE(shape.str() + dtype_name(dtype));
  const Inputs in(shape, dtype);
  const Tensor a = in.x.to(dtype).to(device), b = in.dy.to(dtype).to(device);
  const Tensor w = in.w.to(dtype).to(device), bias = in.b.to(dtype).to(device);
  Tensor total = Tensor::empty_like(a), y = Tensor::empty_like(a);
  Tensor mean = Tensor::empty({a.rows()}, DType::kF32, device), rstd = mean.clone();
  add_forward({total, a, b});
  forward(norm, y, mean, rstd, total, w, bias);

  const auto fused = [&](Tensor& sum, Tensor& out, Tensor& m, Tensor& s, const Tensor& left) {
    if (norm == Norm::kRms)
      add_rms_norm_forward({sum, out, s, left, b, w, kCudaEps});
    else
      add_layer_norm_forward({sum, out, m, s, left, b, w, bias, kCudaEps});
  };
  Guarded sum({shape, dtype, device}), out(shape, dtype, device, Start::kOdd);
  Tensor m = Tensor::empty_like(mean), s = Tensor::empty_like(mean);
  fused(sum.tensor(), out.tensor(), m, s, a);
  EXPECT_TRUE(bit_equal(sum.tensor(), total));
  EXPECT_TRUE(bit_equal(out.tensor(), y));
  EXPECT_TRUE(bit_equal(s, rstd));
  if (norm == Norm::kLayer) {
    EXPECT_TRUE(bit_equal(m, mean));
  }
  EXPECT_TRUE(sum.intact() && out.intact());
  Tensor in_place = a.clone(), again = Tensor::empty_like(a);
  fused(in_place, again, m, s, in_place);
  EXPECT_TRUE(bit_equal(in_place, total));
  EXPECT_TRUE(bit_equal(again, y));
}

TEST(CudaNorm, FusedResidualEqualsTheTwoSteps) {
  COHORT_REQUIRE_GPU(device);
  for (const Norm norm : {Norm::kRms, Norm::kLayer})
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kCudaNormShapes) check_residual(norm, shape, dtype, device);
}

// 17000 rows of 128 columns need three levels of f32 sums.
TEST(CudaBias, BackwardSumsColumns) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Shape& shape : {Shape{0, 5}, Shape{1, 1}, Shape{3, 1000}, Shape{700, 33},
                               Shape{5000, 3}, Shape{17000, 128}})
      for (const Start start : kStarts) {
        SCOPED_TRACE(shape.str() + dtype_name(dtype));
        const Tensor dy = rounded_random(shape, dtype, 1);
        const Tensor old = rounded_random({shape[-1]}, DType::kF32, 2);
        Tensor exact = Tensor::empty({shape[-1]}, DType::kF64);
        bias_backward({{exact}, dy});
        Guarded grad(dy, dtype, device, start), sum(old, DType::kF32, device, start);
        Guarded db(Shape{shape[-1]}, DType::kF32, device, start);
        bias_backward({{db.tensor()}, grad.tensor()});
        bias_backward({{sum.tensor(), Grad::kAccumulate}, grad.tensor()});
        expect_close(db.tensor(), exact, "db");
        expect_close(sum.tensor(), sum_of(old, exact), "db, accumulated");
        EXPECT_TRUE(db.intact() && sum.intact());
        expect_reproducible([&] {
          Tensor again = Tensor::empty({shape[-1]}, DType::kF32, device);
          bias_backward({{again}, grad.tensor()});
          return std::vector{again};
        });
      }
}

}  // namespace
}  // namespace cohort::kernels
