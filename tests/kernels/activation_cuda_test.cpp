// On CUDA the backward of gelu and gelu_tanh is fused with the gradient of the bias.
#include <array>

#include "core/cuda.h"
#include "kernels/cuda/accumulation_order.h"
#include "tests/kernels/activation_cases.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(CudaActivation, BackwardHasTheBitsOfTheSingleOps) {
  COHORT_REQUIRE_GPU(device);
  for (const ActivationCase& test : activation_cases())
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kActivationShapes)
        for (const Start start : kStarts)
          expect_bits_of_single_ops(test, shape, dtype, device, start);
}

// Compared with the CPU's f64 on the same values; dbias sums the rounded du.
TEST(CudaActivation, BackwardFollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const ActivationCase& test : kUnaryActivations)
    for (const DType dtype : kCudaTypes)
      for (const Shape& shape : kActivationShapes) {
        const Tensor u = rounded_random(shape, dtype, 1, 2), dy = rounded_random(shape, dtype, 2);
        Tensor expected_du = Tensor::empty_like(u), expected_y = Tensor::empty_like(u);
        activation_backward({.du = expected_du,
                             .dbias = {none()},
                             .dy = dy,
                             .u = u,
                             .op = test.op,
                             .y = expected_y});
        Guarded in(u, dtype, device), gradient(dy, dtype, device), du(shape, dtype, device);
        Guarded dbias(Shape{shape[-1]}, DType::kF32, device);
        activation_backward({.du = du.tensor(),
                             .dbias = {dbias.tensor()},
                             .dy = gradient.tensor(),
                             .u = in.tensor(),
                             .op = test.op,
                             .y = gradient.tensor()});
        expect_close(du.tensor(), expected_du, test.name);
        expect_close(gradient.tensor(), expected_y, test.name);
        Tensor sums = Tensor::empty({shape[-1]}, DType::kF64);
        bias_backward({.dbias = {sums}, .dy = du.tensor().to(Device{}).to(DType::kF64)});
        expect_close(dbias.tensor(), sums, test.name);
      }
}

// One kernel computes du and dbias, unless the activation is gated or dbias is not wanted.
TEST(CudaActivation, BackwardIsFusedWithTheBiasOnly) {
  COHORT_REQUIRE_GPU(device);
  for (const ActivationCase& test : activation_cases()) {
    const int64_t cols = is_gated(test.op) ? 16 : 8;
    const Tensor u = Tensor::zeros({3, cols}, DType::kF32, device);
    const Tensor dy = Tensor::zeros({3, 8}, DType::kF32, device);
    const Tensor sevens = Tensor::full({3, cols}, 7, DType::kF32, device);
    Tensor dbias = Tensor::zeros({cols}, DType::kF32, device), unwanted;
    for (Tensor* const bias : {&dbias, &unwanted}) {
      Tensor du = sevens.clone();
      const bool expected = !is_gated(test.op) && bias->defined();
      EXPECT_EQ(cuda::fused_activation_backward({du, {*bias}, dy, u, test.op}), expected);
      EXPECT_EQ(bit_equal(du.to(Device{}), sevens.to(Device{})), !expected) << test.name;
    }
  }
}

TEST(CudaActivation, BackwardIsReproducible) {
  COHORT_REQUIRE_GPU(device);
  for (const ActivationCase& test : kUnaryActivations) {
    const Shape shape{1000, 264};
    const Tensor u = random_tensor(shape, DType::kF32, 1).to(DType::kBF16).to(device);
    const Tensor dy = random_tensor(shape, DType::kF32, 2).to(DType::kBF16).to(device);
    expect_reproducible([&] {
      Tensor du = Tensor::empty_like(u), y = dy.clone();
      Tensor dbias = Tensor::empty({shape[-1]}, DType::kF32, device);
      activation_backward({.du = du, .dbias = {dbias}, .dy = y, .u = u, .op = test.op, .y = y});
      return std::vector{du, dbias, y};
    });
  }
}

// Sizes of models and others; on sm_90 those with enough tiles use fused kernels. Partial tiles,
// from one step of K to many, with NaN around all outputs.
TEST(CudaActivation, FusedGemmsHaveTheBitsOfTheSingleOps) {
  COHORT_REQUIRE_GPU(device);
  constexpr int64_t kMargin = 4096;
  std::vector<std::pair<Tensor, int64_t>>
      written;  // tensor with margins, number of elements inside
  const auto random_in = [&](DType dtype) {
    return [&, dtype](const Shape& shape, uint64_t seed) {
      Tensor t = Tensor::empty(shape, DType::kBF16, device);
      cuda::fill_for_comparison(t, seed);
      return t.to(dtype);
    };
  };
  const auto output = [&](const Shape& shape, DType dtype) {
    const int64_t count = shape.numel();
    written.emplace_back(Tensor::full({count + 2 * kMargin}, NAN, dtype, device), count);
    return written.back().first.narrow(0, kMargin, count).reshape(shape);
  };
  const auto check = [&](const ActivationCase& test, const LinearActivationSizes& size,
                         DType dtype) {
    expect_bits_of_composition(test, size, random_in(dtype), output);
    for (const auto& [t, count] : written)
      for (const int64_t begin : {int64_t{0}, kMargin + count})
        for (const double x : t.narrow(0, begin, kMargin).to_vector<double>())
          ASSERT_TRUE(std::isnan(x)) << test.name << ", written outside of a tensor";
    written.clear();
  };
  for (const ActivationCase& test : activation_cases()) {
    // Few rows: sizes of models, small sizes, and partial tiles.
    for (const auto& [cols, k] : {std::pair<int64_t, int64_t>{4864, 896},
                                  {8960, 1536},
                                  {2644, 256},
                                  {256, 896},
                                  {264, 128},
                                  {4864, 72}})
      for (const int64_t rows : {1, 2, 3, 8, 15, 16, 17, 31, 33, 64, 65, 256})
        check(test, {rows, k, cols, 24}, DType::kBF16);
    for (const auto& [cols, k] :
         {std::pair<int64_t, int64_t>{4864, 896}, {8960, 1536}, {2648, 64}, {264, 128}, {4864, 72}})
      for (const int64_t rows : {1, 16, 17, 33, 64, 65, 256})
        check(test, {rows, k + 64, cols, 24, 64}, DType::kBF16);
    for (const LinearActivationSizes& size : {LinearActivationSizes{2051, 896, 4864, 896},
                                              {9001, 8, 1048, 24},
                                              {131, 64, 60000, 72},
                                              {70000, 200, 136, 136},
                                              {8192, 1536, 1000, 768},
                                              {3000, 136, 2304, 2008},
                                              {2051, 960, 4864, 896, 64},
                                              {3000, 136 + 128, 2304, 40, 128}})
      check(test, size, DType::kBF16);
    for (const LinearActivationSizes& size : {LinearActivationSizes{0, 8, 16, 8},
                                              {5, 8, 16, 8},
                                              {300, 40, 72, 24},
                                              {300, 104, 72, 24, 64}})
      for (const DType dtype : kCudaTypes) check(test, size, dtype);
  }
}

// du of dy w + dh a, and of the joined matrices, [dy | dh] [w; a].
void check_backward_of_an_adapter(Device device, int64_t rows, int64_t c, int64_t p) {
  constexpr int64_t kCols = 960;  // enough tiles with 2,051 rows
  const bool is_fused = rows > 2000 && fits(kSm90a, ::cohort::cuda::gpu_properties(device));
  const auto random = [&](const Shape& shape, uint64_t seed) {
    Tensor t = Tensor::empty(shape, DType::kBF16, device);
    cuda::fill_for_comparison(t, seed);
    return t;
  };
  const auto exact_of = [](const Tensor& t) { return t.to(Device{}).to(DType::kF64); };
  const Tensor dy_dh = random({rows, c + p}, 1), w_a = random({c + p, kCols}, 2);
  const Tensor dy = dy_dh.narrow(1, 0, c).clone(), dh = dy_dh.narrow(1, c, p).clone();
  Tensor w = without_last_columns(random({c, kCols + 64}, 3));
  w.copy_(w_a.narrow(0, 0, c));
  const Tensor a = w_a.narrow(0, c, p);
  Tensor df = Tensor::empty({rows, kCols}, DType::kF64);
  matmul({df, exact_of(dy_dh), exact_of(w_a)});
  for (const ActivationCase& test : activation_cases()) {
    SCOPED_TRACE(str(test.name, " of ", rows, " x ", c, " + ", p));
    const Tensor u = random({rows, is_gated(test.op) ? 2 * kCols : kCols}, 4);
    Tensor du = Tensor::empty_like(u), joined = du.clone(), y = random({rows, kCols}, 5);
    Tensor exact = Tensor::empty(u.shape(), DType::kF64), unwanted;
    const LinearActivationBackward args{.du = du,
                                        .dbias = {unwanted},
                                        .dy = dy,
                                        .w = w,
                                        .u = u,
                                        .op = test.op,
                                        .y = y,
                                        .dh = dh,
                                        .a = a};
    linear_activation_backward(args);
    activation_backward(
        {.du = exact, .dbias = {unwanted}, .dy = df, .u = exact_of(u), .op = test.op});
    EXPECT_LE(relative_error(du, exact), 0.008);  // three roundings, or two
    if (!is_fused || !is_gated(test.op)) continue;
    EXPECT_TRUE(cuda::fused_linear_activation_backward(args));
    if (c % 16 != 0) continue;  // a step of 16 rows would have some of both
    linear_activation_backward(
        {.du = joined, .dbias = {unwanted}, .dy = dy_dh, .w = w_a, .u = u, .op = test.op});
    EXPECT_TRUE(bit_equal(du.to(Device{}), joined.to(Device{})));
  }
}

TEST(CudaActivation, BackwardOfAnAdapterAddsItsGradient) {
  COHORT_REQUIRE_GPU(device);
  for (const auto& [rows, c, p] : {std::array<int64_t, 3>{2051, 896, 64},
                                   {2051, 72, 64},
                                   {4100, 48, 192},
                                   {2051, 80, 128},
                                   {40, 80, 64}})
    check_backward_of_an_adapter(device, rows, c, p);
}

// Otherwise the tests above would compare the single ops with themselves.
TEST(CudaActivation, FusedGemmsAcceptSupportedSizesOnly) {
  COHORT_REQUIRE_GPU(device);
  if (!fits(kSm90a, ::cohort::cuda::gpu_properties(device))) GTEST_SKIP() << "needs an sm_90 GPU";
  const auto zeros = [&, device = device](int64_t rows, int64_t cols, DType dtype) {
    return Tensor::zeros({rows, cols}, dtype, device);
  };
  const auto accepts = [&](Activation op, int64_t rows, int64_t k, int64_t cols,
                           DType dtype = DType::kBF16) {
    const int64_t wide = is_gated(op) ? 2 * cols : cols;
    Tensor u = zeros(rows, wide, dtype), y = zeros(rows, cols, dtype), du = u.clone(), unwanted;
    const Tensor x = zeros(rows, k, dtype), w = zeros(wide, k, dtype), down = zeros(k, cols, dtype);
    const bool forward = cuda::fused_linear_activation({y, x, w, none(), op, u});
    const bool backward =
        cuda::fused_linear_activation_backward({du, {unwanted}, x, down, u, op, y});
    return std::pair{forward, backward};
  };
  for (const Activation op : {Activation::kSwiGlu, Activation::kGeGlu, Activation::kGeGluTanh})
    EXPECT_EQ(accepts(op, 2051, 896, 4864), (std::pair{true, true}));
  constexpr std::pair kNeither{false, false};
  EXPECT_EQ(accepts(Activation::kGelu, 2051, 896, 4864), kNeither);
  EXPECT_EQ(accepts(Activation::kSwiGlu, 2051, 896, 4864, DType::kF32), kNeither);
  EXPECT_EQ(accepts(Activation::kSwiGlu, 2051, 896, 4860), kNeither);  // unaligned rows
  EXPECT_EQ(accepts(Activation::kSwiGlu, 2051, 4104, 4864), (std::pair{false, true}));
  // The limit of channels is without the tail, and y may be columns of a wider matrix.
  const Tensor x = zeros(2051, 4096 + 64, DType::kBF16), w = zeros(2048, 4096 + 64, DType::kBF16);
  const Tensor all = zeros(2051, 1024 + 64, DType::kBF16);
  Tensor y = without_last_columns(all);
  EXPECT_TRUE(cuda::fused_linear_activation(
      {.y = y, .x = x, .w = w, .bias = none(), .op = Activation::kSwiGlu, .tail = 64}));
  if (::cohort::cuda::gpu_properties(device).multiprocessors > 50) {  // 11 tiles are too few
    EXPECT_EQ(accepts(Activation::kSwiGlu, 64, 896, 1024), kNeither);
  }
  EXPECT_EQ(accepts(Activation::kSwiGlu, 0, 896, 4864), kNeither);
}

TEST(CudaActivation, FusedGemmsAreReproducible) {
  COHORT_REQUIRE_GPU(device);
  const auto random = [&, device = device](const Shape& shape, uint64_t seed) {
    return random_tensor(shape, DType::kF32, seed).to(DType::kBF16).to(device);
  };
  const Tensor x = random({5000, 128}, 1), up = random({2 * 1200, 128}, 2), no_bias;
  const Tensor dy = random({5000, 128}, 3), down = random({128, 1200}, 4);
  expect_reproducible([&] {
    Tensor u = Tensor::empty({5000, 2400}, DType::kBF16, device), du = Tensor::empty_like(u);
    Tensor y = Tensor::empty({5000, 1200}, DType::kBF16, device), again = Tensor::empty_like(y),
           unwanted;
    linear_activation({y, x, up, no_bias, Activation::kSwiGlu, u});
    linear_activation_backward({.du = du,
                                .dbias = {unwanted},
                                .dy = dy,
                                .w = down,
                                .u = u,
                                .op = Activation::kSwiGlu,
                                .y = again});
    return std::vector{u, y, du, again};
  });
}

}  // namespace
}  // namespace cohort::kernels
