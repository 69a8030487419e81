// Products on CUDA: against the CPU's f64, and the property that exactness stands on: a row has the
// same bits among any number of rows.
#include "kernels/matmul.h"

#include <array>

#include "tests/kernels/cuda_test.h"

namespace cohort::kernels::test {
namespace {

using cohort::test::bit_equal;

Shape stored(int64_t rows, int64_t cols, Transpose t) {
  return t == Transpose::kYes ? Shape{cols, rows} : Shape{rows, cols};
}

struct Types {
  DType in, out;
};
constexpr Types kTypes[] = {
    {DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kBF16, DType::kF32}};

TEST(CudaMatmul, MatchesTheCpuForEveryTranspositionAndSize) {
  COHORT_REQUIRE_GPU(device);
  struct Size {
    int64_t m, n, k;
  };
  for (const Types& types : kTypes)
    for (const Transpose ta : {Transpose::kNo, Transpose::kYes})
      for (const Transpose tb : {Transpose::kNo, Transpose::kYes})
        for (const auto& [m, n, k] : {Size{1, 1, 1},
                                      {5, 7, 3},
                                      {19, 2, 33},
                                      {64, 72, 40},
                                      {130, 65, 257},
                                      {1, 300, 64},
                                      {256, 128, 512}}) {
          const Tensor a = random_tensor(stored(m, k, ta), DType::kF64, 1).to(types.in);
          const Tensor b = random_tensor(stored(k, n, tb), DType::kF64, 2).to(types.in);
          const Tensor start = random_tensor({m, n}, DType::kF64, 3).to(types.out);
          for (const Grad mode : {Grad::kOverwrite, Grad::kAccumulate}) {
            Tensor expected = start.to(DType::kF64);
            matmul(
                {expected, a.to(DType::kF64), b.to(DType::kF64), {.a = ta, .b = tb, .out = mode}});
            Tensor c = start.to(device);
            matmul({c, a.to(device), b.to(device), {.a = ta, .b = tb, .out = mode}});
            // cuBLAS rounds a product to bf16 before it adds it to c: measured, 1.45 times.
            const bool twice = mode == Grad::kAccumulate && types.out == DType::kBF16;
            expect_close(c, expected,
                         str(dtype_name(types.in), ", k = ", k, twice ? ", added" : "").c_str(),
                         twice ? 1.5 : kRoundingSlack);
          }
        }
}

TEST(CudaMatmul, AddsTheBiasBeforeTheOneRounding) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const auto& [t, n, k] : {std::array<int64_t, 3>{1, 1, 1}, {7, 13, 5}, {96, 200, 72}}) {
      const Tensor x = random_tensor({t, k}, DType::kF64, 1).to(dtype),
                   w = random_tensor({n, k}, DType::kF64, 2).to(dtype),
                   bias = random_tensor({n}, DType::kF64, 3).to(dtype);
      Tensor expected = Tensor::empty({t, n}, DType::kF64),
             y = Tensor::empty({t, n}, dtype, device);
      linear_forward({expected, x.to(DType::kF64), w.to(DType::kF64), bias.to(DType::kF64)});
      linear_forward({y, x.to(device), w.to(device), bias.to(device)});
      expect_close(y, expected, "y");
    }
}

TEST(CudaMatmul, EmptySizesAreZerosOrNothing) {
  COHORT_REQUIRE_GPU(device);
  Tensor c = Tensor::full({3, 4}, 7, DType::kF32, device);
  const Tensor a = Tensor::empty({0, 3}, DType::kF32, device),
               b = Tensor::empty({0, 4}, DType::kF32, device);
  matmul({c, a, b, {.a = Transpose::kYes, .out = Grad::kAccumulate}});
  EXPECT_EQ(c.to_vector<double>(), std::vector<double>(12, 7));
  matmul({c, a, b, {.a = Transpose::kYes}});
  EXPECT_EQ(c.to_vector<double>(), std::vector<double>(12, 0));
  Tensor none = Tensor::empty({0, 4}, DType::kF32, device);
  matmul({none, Tensor::empty({0, 2}, DType::kF32, device),
          Tensor::zeros({2, 4}, DType::kF32, device)});
}

TEST(CudaMatmul, OtherElementTypesAreRefused) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF64, DType::kU8}) {
    const Tensor a = Tensor::full({8, 8}, 1, dtype, device);
    for (const int64_t rows : {8, 0}) {
      Tensor c = Tensor::full({rows, 8}, 7, dtype, device);
      EXPECT_THROW_WITH(matmul({c, a.narrow(0, 0, rows), a}), Error,
                        "[matmul] expected f32 or bf16 on a CUDA device, got a");
      EXPECT_THROW_WITH(linear_forward({c, a.narrow(0, 0, rows), a, {}}), Error,
                        "[matmul] expected f32 or bf16 on a CUDA device, got a");
      EXPECT_EQ(c.to_vector<double>(), std::vector<double>(static_cast<size_t>(rows * 8), 7));
    }
  }
}

// y = x x^T + bias on the device, each tensor from where it is told to start.
Tensor linear_from(Device device, DType dtype, int64_t size, Start y, Start x, Start w,
                   Start bias) {
  const Tensor values = rounded_random({size, size}, dtype, 1);
  Guarded in(values, dtype, device, x), weight(values, dtype, device, w);
  Guarded b(rounded_random({size}, dtype, 2), dtype, device, bias);
  Guarded out(values.shape(), dtype, device, y);
  linear_forward({out.tensor(), in.tensor(), weight.tensor(), b.tensor()});
  EXPECT_TRUE(out.intact());
  return out.tensor();
}

// Where rows are of 16 bytes an algorithm may read that much at a time, and none is chosen anew for
// a matrix that starts elsewhere.
TEST(CudaMatmul, AMatrixStartsWhereItsRowsMay) {
  COHORT_REQUIRE_GPU(device);
  constexpr Start kAligned = Start::kAligned, kOdd = Start::kOdd;
  for (const DType dtype : kCudaTypes) {
    EXPECT_TRUE(bit_equal(linear_from(device, dtype, 31, kOdd, kOdd, kOdd, kOdd),
                          linear_from(device, dtype, 31, kAligned, kAligned, kAligned, kAligned)));
    const auto run = [&](Start y, Start x, Start w, Start bias) {
      linear_from(device, dtype, 32, y, x, w, bias);
    };
    run(kAligned, kAligned, kAligned, kAligned);
    EXPECT_THROW_WITH(run(kOdd, kAligned, kAligned, kAligned), Error, "expected c");
    EXPECT_THROW_WITH(run(kAligned, kOdd, kAligned, kAligned), Error, "expected a");
    EXPECT_THROW_WITH(run(kAligned, kAligned, kOdd, kAligned), Error, "expected b");
    EXPECT_THROW_WITH(run(kAligned, kAligned, kAligned, kOdd), Error,
                      "to start at a multiple of 16 bytes, as its rows do");
  }
}

// Shapes of small and of large models, with long sums among them.
TEST(CudaMatmul, ARowHasTheSameBitsAmongAnyNumberOfRows) {
  COHORT_REQUIRE_GPU(device);
  struct Weight {
    int64_t n, k;
  };
  const int64_t most = 2100;
  for (const Types& types : kTypes)
    for (const auto& [n, k] : {Weight{64, 64},
                               {384, 384},
                               {66, 384},
                               {768, 3072},
                               {2304, 768},
                               {896, 4864},
                               {4864, 896},
                               {1536, 8960},
                               {100, 33},
                               {5000, 896}}) {
      SCOPED_TRACE(str(n, " x ", k, " ", dtype_name(types.in), " to ", dtype_name(types.out)));
      const Tensor x = random_tensor({most, k}, DType::kF64, 1).to(types.in).to(device);
      const Tensor w = random_tensor({n, k}, DType::kF64, 2).to(types.in).to(device);
      const Tensor flipped = w.reshape({k, n});
      const Tensor bias = random_tensor({n}, DType::kF64, 3).to(types.in).to(device);
      const auto expect_same_rows = [&](const char* name, auto&& product) {
        Tensor all = Tensor::empty({most, n}, types.out, device);
        product(all, x);
        for (const int64_t rows : {1,   2,   3,   8,   17,  32,  63,  64,   65,   96,
                                   127, 128, 129, 200, 256, 300, 511, 1000, 1024, 2048}) {
          const int64_t begin = (most - rows) / 2;
          Tensor some = Tensor::empty({rows, n}, types.out, device);
          product(some, x.narrow(0, begin, rows));
          ASSERT_TRUE(bit_equal(some, all.narrow(0, begin, rows))) << name << ", " << rows;
        }
      };
      expect_same_rows("x w^T", [&](Tensor& c, const Tensor& a) {
        matmul({c, a, w, {.b = Transpose::kYes}});
      });
      expect_same_rows("x w", [&](Tensor& c, const Tensor& a) { matmul({c, a, flipped}); });
      if (types.in == types.out)
        expect_same_rows("x w^T + bias", [&](Tensor& c, const Tensor& a) {
          linear_forward({c, a, w, bias});
        });
    }
}

TEST(CudaMatmul, RepeatsToTheBitAndLeavesTheRestAlone) {
  COHORT_REQUIRE_GPU(device);
  for (const Types& types : kTypes) {
    const Tensor dy = random_tensor({3000, 96}, DType::kF64, 1).to(types.in).to(device);
    const Tensor x = random_tensor({3000, 200}, DType::kF64, 2).to(types.in).to(device);
    Tensor first;
    for (int i = 0; i < 20; ++i) {
      Tensor around = Tensor::full({98, 200}, 5, types.out, device);
      Tensor dw = around.narrow(0, 1, 96);
      matmul({dw, dy, x, {.a = Transpose::kYes}});
      for (const int64_t edge : {0, 97})
        EXPECT_EQ(around.narrow(0, edge, 1).to_vector<double>(), std::vector<double>(200, 5));
      if (i == 0) first = dw.clone();
      ASSERT_TRUE(bit_equal(dw, first));
    }
  }
}

}  // namespace
}  // namespace cohort::kernels::test
