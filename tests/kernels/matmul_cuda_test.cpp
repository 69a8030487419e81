// Matmul on CUDA compared with the CPU's f64, and the property required for exactness: the bits of
// a row do not depend on the number of rows.
#include "kernels/matmul.h"

#include <array>

#include "core/allocator.h"
#include "core/graph.h"
#include "kernels/cuda/accumulation_order.h"
#include "kernels/cuda/sm90/skinny_gemm.h"
#include "kernels/head.h"
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
constexpr Types kMatmulTypes[] = {
    {DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kBF16, DType::kF32}};

TEST(CudaMatmul, MatchesTheCpuForEveryTranspositionAndSize) {
  COHORT_REQUIRE_GPU(device);
  struct Size {
    int64_t m, n, k;
  };
  for (const Types& types : kMatmulTypes)
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
            // cuBLAS rounds to bf16 before it adds to c, which was measured as a ratio of 1.45.
            const bool twice = mode == Grad::kAccumulate && types.out == DType::kBF16;
            expect_close(c, expected,
                         str(dtype_name(types.in), ", k = ", k, twice ? ", added" : "").c_str(),
                         twice ? 1.5 : kRoundingSlack);
          }
        }
}

// Columns `first` and later of a matrix with `more` columns more, the others NaN.
Tensor columns_of_wider(const Tensor& t, int64_t first, int64_t more) {
  const Tensor wide = Tensor::full({t.dim(0), t.dim(1) + more}, NAN, t.dtype(), t.device());
  return wide.narrow(1, first, t.dim(1)).copy_(t);
}

// Strides that keep the alignment of rows keep the bits; others select other algorithms.
TEST(CudaMatmul, OperandsMayBeColumnsOfWiderMatrices) {
  COHORT_REQUIRE_GPU(device);
  struct Size {
    int64_t m, n, k;
  };
  for (const Types& types : kMatmulTypes)
    for (const Transpose ta : {Transpose::kNo, Transpose::kYes})
      for (const Transpose tb : {Transpose::kNo, Transpose::kYes})
        for (const auto& [m, n, k] :
             {Size{1, 256, 64}, {5, 7, 3}, {40, 960, 896}, {130, 65, 257}, {300, 4864, 128}})
          for (const Grad mode : {Grad::kOverwrite, Grad::kAccumulate}) {
            SCOPED_TRACE(str(m, " x ", k, " x ", n, " in ", dtype_name(types.in)));
            const MatmulDesc desc{.a = ta, .b = tb, .out = mode, .scale = 0.5};
            const Tensor a = random_tensor(stored(m, k, ta), DType::kF64, 1).to(types.in);
            const Tensor b = random_tensor(stored(k, n, tb), DType::kF64, 2).to(types.in);
            const Tensor start = random_tensor({m, n}, DType::kF64, 3).to(types.out);
            Tensor exact = start.to(DType::kF64);
            matmul({exact, a.to(DType::kF64), b.to(DType::kF64), desc});
            Tensor expected = start.to(device), same = expected.clone(), odd = expected.clone();
            const Tensor x = a.to(device), w = b.to(device);
            matmul({expected, x, w, desc});
            matmul({same, columns_of_wider(x, 64, 128), columns_of_wider(w, 64, 128), desc});
            EXPECT_TRUE(bit_equal(same, expected));
            matmul({odd, columns_of_wider(x, 1, 3), columns_of_wider(w, 3, 5), desc});
            const bool twice = mode == Grad::kAccumulate && types.out == DType::kBF16;
            for (const Tensor& c : {same, odd})
              expect_close(c, exact, "c", twice ? 1.65 : kRoundingSlack);
          }
}

TEST(CudaMatmul, RowsMustStartWhereTheirStrideSays) {
  COHORT_REQUIRE_GPU(device);
  const Tensor a = Tensor::zeros({8, 64}, DType::kBF16, device);
  Tensor c = Tensor::zeros({8, 8}, DType::kBF16, device);
  matmul({c, columns_of_wider(a, 8, 16), a, {.b = Transpose::kYes}});
  EXPECT_THROW_WITH(matmul({c, columns_of_wider(a, 1, 16), a, {.b = Transpose::kYes}}), Error,
                    "to start at a multiple of 16 bytes");
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

// Each request for memory of the first GEMM of its sizes, which selects an algorithm, fails once.
TEST(CudaMatmul, AFailedRequestForMemoryLeavesTheNextCallAsItWouldBe) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    int64_t failed = 0;
    for (bool fails = true; fails; ++failed) {
      const int64_t k = 1024 + 8 * failed;
      const Tensor a = random_tensor({70, k}, DType::kF64, 1).to(dtype),
                   b = random_tensor({k, 72}, DType::kF64, 2).to(dtype);
      Tensor expected = Tensor::empty({70, 72}, DType::kF64),
             c = Tensor::full({70, 72}, NAN, dtype, device);
      matmul({expected, a.to(DType::kF64), b.to(DType::kF64)});
      const Tensor on_device[] = {a.to(device), b.to(device)};
      {
        const AllocationFaults faults(device, failed);
        try {
          matmul({c, on_device[0], on_device[1]});
          fails = false;
        } catch (const OutOfMemoryError&) {
        }
      }
      matmul({c, on_device[0], on_device[1]});
      expect_close(c, expected, str(dtype_name(dtype), ", request ", failed).c_str());
    }
    EXPECT_GT(failed, dtype == DType::kBF16 ? 3 : 0);  // in f32 no algorithm is compared
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

// y = x x^T + bias on the device, with the given starts of the tensors.
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

// If rows are multiples of 16 bytes an algorithm may read 16 bytes at a time, and the selection
// does not depend on the start of a matrix.
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

// Shapes of small and large models, including long K.
TEST(CudaMatmul, ARowHasTheSameBitsAmongAnyNumberOfRows) {
  COHORT_REQUIRE_GPU(device);
  struct Weight {
    int64_t n, k;
  };
  const int64_t max_rows = 2100;
  for (const Types& types : kMatmulTypes)
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
      const Tensor x = random_tensor({max_rows, k}, DType::kF64, 1).to(types.in).to(device);
      const Tensor w = random_tensor({n, k}, DType::kF64, 2).to(types.in).to(device);
      const Tensor flipped = w.reshape({k, n});
      const Tensor bias = random_tensor({n}, DType::kF64, 3).to(types.in).to(device);
      const auto expect_same_rows = [&](const char* name, auto&& gemm) {
        Tensor all = Tensor::empty({max_rows, n}, types.out, device);
        gemm(all, x);
        for (const int64_t rows : {1,   2,   3,   8,   17,  32,  63,  64,   65,   96,
                                   127, 128, 129, 200, 256, 300, 511, 1000, 1024, 2048}) {
          const int64_t begin = (max_rows - rows) / 2;
          Tensor some = Tensor::empty({rows, n}, types.out, device);
          gemm(some, x.narrow(0, begin, rows));
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

Tensor random_on(Device device, const Shape& shape, uint64_t seed) {
  Tensor t = Tensor::empty(shape, DType::kBF16, device);
  cuda::fill_for_comparison(t, seed);
  return t;
}

// Number of elements of y = x w^T + bias that differ from the reference order.
int out_of_order(const Tensor& y, const Tensor& x, const Tensor& w, const Tensor& bias) {
  Tensor differing = Tensor::zeros({1}, DType::kI32, y.device());
  cuda::count_out_of_order({.differing = differing,
                            .c = y,
                            .a = x,
                            .b = w,
                            .bias = bias,
                            .transpose_b = Transpose::kYes});
  return differing.to_vector<int32_t>()[0];
}

// A layer with a tail: zeros change no bit of the layer without it (of zeros, the sign), in x or in
// w. Otherwise a row depends on itself only, and where there is one order, the tail continues it.
TEST(CudaMatmul, ATailContinuesTheSumOfALayer) {
  COHORT_REQUIRE_GPU(device);
  struct Size {
    int64_t n, k, tail;
  };
  const int64_t max_rows = 2100;
  for (const DType dtype : kCudaTypes)
    for (const auto& [n, k, tail] : {Size{896, 896, 64},
                                     {1152, 896, 192},
                                     {9728, 896, 128},
                                     {896, 4864, 64},
                                     {576, 576, 64},
                                     {66, 384, 64},
                                     {4096, 136, 64},
                                     {100, 33, 64},
                                     {64, 100, 64}}) {
      SCOPED_TRACE(str(n, " x ", k, " + ", tail, " in ", dtype_name(dtype)));
      const auto random = [&, device = device](const Shape& shape, uint64_t seed) {
        return random_tensor(shape, DType::kF64, seed).to(dtype).to(device);
      };
      const Tensor bias = random({n}, 3), w = random({n, k + tail}, 2);
      const Tensor x = random({max_rows, k + tail}, 1);
      const Tensor zero_w = w.clone(), zero_x = x.clone();
      zero_w.narrow(1, k, tail).zero_();
      zero_x.narrow(1, k, tail).zero_();
      const Tensor body_w = w.narrow(1, 0, k).clone(), body_x = x.narrow(1, 0, k).clone();
      Tensor all = Tensor::empty({max_rows, n}, dtype, device);
      linear_forward({all, x, w, bias, tail});
      if (dtype == DType::kBF16 && k % 8 == 0 && n % 8 == 0) {
        EXPECT_EQ(out_of_order(all, x, w, bias), 0);
      }
      for (const int64_t rows : {1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 511, 2048, 2100}) {
        const int64_t begin = (max_rows - rows) / 2;
        const auto part = [&](const Tensor& t) { return t.narrow(0, begin, rows); };
        Tensor y = Tensor::empty({rows, n}, dtype, device), expected = y.clone();
        linear_forward({y, part(x), w, bias, tail});
        ASSERT_TRUE(bit_equal(y, part(all))) << rows;
        linear_forward({expected, part(body_x), body_w, bias});
        synchronize(device);  // as if a copy had just written the tail
        linear_forward({y, part(zero_x), w, bias, tail});
        ASSERT_TRUE(bit_equal(y, expected)) << rows;
        linear_forward({y, part(x), zero_w, bias, tail});
        ASSERT_TRUE(bit_equal(y, expected)) << rows;
      }
    }
}

TEST(CudaMatmul, ATailIsAddedInEveryType) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t k : {896, 100, 33})
      for (const int64_t rows : {3, 200}) {
        const Tensor x = rounded_random({rows, k + 64}, dtype, 1),
                     w = rounded_random({72, k + 64}, dtype, 2),
                     bias = rounded_random({72}, dtype, 3);
        Tensor exact = Tensor::empty({rows, 72}, DType::kF64),
               y = Tensor::empty({rows, 72}, dtype, device);
        linear_forward({exact, x, w, bias});
        const auto on_device = [&, device = device](const Tensor& t) {
          return t.to(dtype).to(device);
        };
        linear_forward({y, on_device(x), on_device(w), on_device(bias), 64});
        expect_close(y, exact, "y", dtype == DType::kBF16 && k % 8 != 0 ? 1.5 : kRoundingSlack);
      }
}

TEST(CudaAccumulationOrder, DetectsAnotherOrderAndAnotherElement) {
  COHORT_REQUIRE_GPU(device);
  const int64_t m = 128, n = 256, k = 2048;
  // Reversed k gives the same sum in the opposite order.
  const Tensor x = random_on(device, {m, k}, 1), w = random_on(device, {n, k}, 2);
  const auto reversed = [&](const Tensor& t) {
    const auto values = t.to_vector<double>();
    std::vector<double> out(values.size());
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t row = i / static_cast<size_t>(k);
      out[i] = values[(2 * row + 1) * static_cast<size_t>(k) - 1 - i];
    }
    return Tensor::from(out).reshape(t.shape()).to(DType::kBF16).to(device);
  };
  for (const DType out : {DType::kF32, DType::kBF16}) {
    Tensor y = Tensor::empty({m, n}, out, device);
    matmul({y, x, w, {.b = Transpose::kYes}});
    EXPECT_EQ(out_of_order(y, x, w, {}), 0);
    EXPECT_GT(out_of_order(y, reversed(x), reversed(w), {}), 0);
    Tensor one = y.narrow(0, 77, 1).narrow(1, 200, 1);
    one.copy_(Tensor::full({1, 1}, 9, out, device));
    EXPECT_EQ(out_of_order(y, x, w, {}), 1);
  }
}

// Weights of layers of models with 0.5 and 1.5 billion parameters, some of them merged.
struct Layer {
  int64_t n, k;
  bool with_bias;
};
constexpr Layer kLayers[] = {{1152, 896, true},    {896, 896, false},   {128, 896, true},
                             {4864, 896, false},   {9728, 896, false},  {896, 4864, false},
                             {2048, 1536, true},   {1536, 1536, false}, {8960, 1536, false},
                             {17920, 1536, false}, {1536, 8960, false}};

TEST(CudaMatmul, LayersOfAModelAddInOrderForAnyNumberOfRows) {
  COHORT_REQUIRE_GPU(device);
  std::vector<int64_t> sizes;
  for (int64_t m = 1; m <= 256; ++m) sizes.push_back(m);
  for (const int64_t m : {768, 2560, 8192, 12345, 32768}) sizes.push_back(m);
  for (const auto& [n, k, with_bias] : kLayers) {
    const Tensor w = random_on(device, {n, k}, 1);
    const Tensor bias = with_bias ? random_on(device, {n}, 2) : Tensor();
    const Tensor all = random_on(device, {sizes.back(), k}, 3);
    for (const int64_t m : sizes) {
      const Tensor x = all.narrow(0, (sizes.back() - m) / 2, m);
      Tensor y = Tensor::full({m, n}, NAN, DType::kBF16, device);
      linear_forward({y, x, w, bias});
      ASSERT_EQ(out_of_order(y, x, w, bias), 0) << m << " rows, " << n << " x " << k;
    }
  }
}

// The fastest algorithm is selected by time, so all candidates must have the same bits. An output
// that fills the device needs no split-K over tokens.
TEST(CudaMatmul, GradientsOfLargeWeightsAddInOrder) {
  COHORT_REQUIRE_GPU(device);
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{9728, 896}, {17920, 1536}, {50304, 768}})
    for (const int64_t tokens : {2048, 8192, 10000}) {
      Tensor dy = Tensor::empty({tokens, n}, DType::kBF16, device),
             x = Tensor::empty({tokens, k}, DType::kBF16, device),
             dw = Tensor::empty({n, k}, DType::kF32, device);
      cuda::fill_for_comparison(dy, 1);
      cuda::fill_for_comparison(x, 2);
      for (int call = 0; call < 3; ++call) {  // the first one measures
        matmul({dw, dy, x, {.a = Transpose::kYes}});
        Tensor differing = Tensor::zeros({1}, DType::kI32, device);
        cuda::count_out_of_order({.differing = differing,
                                  .c = dw,
                                  .a = dy,
                                  .b = x,
                                  .bias = {},
                                  .transpose_a = Transpose::kYes});
        EXPECT_EQ(differing.to_vector<int32_t>()[0], 0) << n << " " << tokens;
      }
    }
}

TEST(CudaMatmul, HeadsAddInOrderForAnyNumberOfRows) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t k : {896, 1536}) {
    const int64_t n = 151936, max_rows = 2560;
    const Tensor w = random_on(device, {n, k}, 1), all = random_on(device, {max_rows, k}, 2);
    for (const int64_t m : {1,  2,  3,  8,  15,  16,  17,  31,  32,  33,  48,
                            63, 64, 65, 96, 127, 128, 129, 255, 256, 768, 2560}) {
      const Tensor x = all.narrow(0, (max_rows - m) / 2, m);
      Tensor y = Tensor::full({m, n}, NAN, DType::kF32, device);
      matmul({y, x, w, {.b = Transpose::kYes}});
      ASSERT_EQ(out_of_order(y, x, w, {}), 0) << m << " rows, " << n << " x " << k;
    }
  }
}

// Every number of rows of a decode step, and more rows than a chunk of the head.
TEST(CudaMatmulSlow, HeadsAddInOrderForAnyNumberOfRows) {
  COHORT_REQUIRE_GPU(device);
  std::vector<int64_t> sizes = {768, 2560, 8192};
  for (int64_t m = 1; m <= 256; ++m) sizes.push_back(m);
  for (const int64_t k : {896, 1536}) {
    const int64_t n = 151936, max_rows = 8192;
    const Tensor w = random_on(device, {n, k}, 1), all = random_on(device, {max_rows, k}, 2);
    for (const int64_t m : sizes) {
      const Tensor x = all.narrow(0, (max_rows - m) / 2, m);
      Tensor y = Tensor::full({m, n}, NAN, DType::kF32, device);
      matmul({y, x, w, {.b = Transpose::kYes}});
      ASSERT_EQ(out_of_order(y, x, w, {}), 0) << m << " rows, " << n << " x " << k;
    }
  }
}

// The chunks of a packed forward's logits, which share their memory.
TEST(CudaMatmulSlow, ChunksOfHeadsAddInOrder) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t k : {896, 1536}) {
    const int64_t n = 151936, max_rows = 32768;
    const Tensor w = random_on(device, {n, k}, 1), all = random_on(device, {max_rows, k}, 2);
    for (const int64_t m : {8192, 12345, 32768}) {
      const Tensor x = all.narrow(0, (max_rows - m) / 2, m);
      int64_t compared = 0;
      for_logit_chunks({x, w}, head_chunk_tokens(n, 0, device), [&](int64_t begin, Tensor& logits) {
        const int64_t rows = logits.dim(0);
        EXPECT_EQ(out_of_order(logits, x.narrow(0, begin, rows), w, {}), 0)
            << rows << " of " << m << " rows, from " << begin << ", " << n << " x " << k;
        logits.fill_(NAN);
        compared += rows;
      });
      EXPECT_EQ(compared, m);
    }
  }
}

// Partial tiles, with NaN around all inputs.
TEST(CudaSkinnyGemm, HandlesPartialTiles) {
  COHORT_REQUIRE_GPU(device);
  if (!cuda::is_skinny({1, 8, 128}, device)) GTEST_SKIP() << "needs an sm_90 GPU";
  for (const int64_t n : {8, 24, 1056, 1064, 2200, 8192, 8200})
    for (const int64_t k : {64, 128, 192, 256, 896, 960})
      for (const int64_t m : {1, 7, 8, 9, 16, 17, 31, 33, 63, 64})
        for (const DType out : {DType::kBF16, DType::kF32}) {
          SCOPED_TRACE(str(m, " x ", k, " times ", k, " x ", n, " to ", dtype_name(out)));
          if (!cuda::is_skinny({m, n, k}, device)) continue;
          const auto guarded = [&](const Shape& shape, uint64_t seed) {
            Guarded g(Tensor::zeros(shape, DType::kF64), DType::kBF16, device, Start::kAligned,
                      NAN);
            cuda::fill_for_comparison(g.tensor(), seed);
            return g;
          };
          Guarded x = guarded({m, k}, 1), w = guarded({n, k}, 2), bias = guarded({n}, 3);
          Guarded y(Shape{m, n}, out, device);
          for (const int64_t tail : {int64_t{0}, int64_t{40}, k / 2, k}) {
            y.tensor().fill_(NAN);
            cuda::skinny_gemm({.y = y.tensor(),
                               .x = x.tensor(),
                               .w = w.tensor(),
                               .bias = bias.tensor(),
                               .tail = tail});
            ASSERT_EQ(out_of_order(y.tensor(), x.tensor(), w.tensor(), bias.tensor()), 0) << tail;
            ASSERT_TRUE(y.intact());
          }
        }
}

TEST(CudaSkinnyGemm, MatricesMayBeColumnsOfWiderOnes) {
  COHORT_REQUIRE_GPU(device);
  if (!cuda::is_skinny({1, 8, 128}, device)) GTEST_SKIP() << "needs an sm_90 GPU";
  for (const int64_t n : {24, 1056, 8200})
    for (const int64_t m : {1, 17, 64}) {
      const Tensor x = random_on(device, {m, 192}, 1), w = random_on(device, {n, 192}, 2);
      const Tensor wide = Tensor::full({m, n + 64}, 42, DType::kBF16, device);
      Tensor y = wide.narrow(1, 0, n), expected = Tensor::empty({m, n}, DType::kBF16, device);
      cuda::skinny_gemm({.y = expected, .x = x, .w = w, .bias = {}});
      cuda::skinny_gemm(
          {.y = y, .x = columns_of_wider(x, 8, 16), .w = columns_of_wider(w, 64, 128), .bias = {}});
      EXPECT_TRUE(bit_equal(y.clone(), expected)) << m << " x " << n;
      for (const double v : wide.narrow(1, n, 64).clone().to_vector<double>()) ASSERT_EQ(v, 42);
    }
}

TEST(CudaSkinnyGemm, AcceptsSupportedSizesOnly) {
  COHORT_REQUIRE_GPU(device);
  if (!cuda::is_skinny({1, 8, 128}, device)) GTEST_SKIP() << "needs an sm_90 GPU";
  EXPECT_TRUE(cuda::is_skinny({64, 896, 4864}, device));
  for (const cuda::GemmSize& size : {cuda::GemmSize{65, 896, 896},
                                     {0, 896, 896},
                                     {1, 896, 0},
                                     {1, 896, 72},
                                     {1, 896, 136},
                                     {17, 4864, 896},
                                     {33, 1536, 8960},
                                     {1, 4, 128}})
    EXPECT_FALSE(cuda::is_skinny(size, device)) << size.m << " " << size.n << " " << size.k;
  // Gated: half the number of outputs.
  for (const auto& [m, n, k] : {cuda::GemmSize{1, 9728, 896}, {64, 17920, 1536}, {33, 5288, 256}})
    EXPECT_TRUE(cuda::is_gated_skinny({m, n, k}, device)) << m << " " << n << " " << k;
  for (const auto& [m, n, k] : {cuda::GemmSize{65, 9728, 896}, {1, 512, 896}, {1, 9728, 72}})
    EXPECT_FALSE(cuda::is_gated_skinny({m, n, k}, device)) << m << " " << n << " " << k;
}

// The kernel starts while the previous one is still running: it may read x and w and overwrite y
// only after that has completed. Also inside a captured graph.
TEST(CudaSkinnyGemm, WaitsForThePreviousKernel) {
  COHORT_REQUIRE_GPU(device);
  const int64_t m = 64, size = 2048;
  const Tensor source = random_on(device, {size, size}, 1), x = random_on(device, {m, size}, 2);
  Tensor w = Tensor::empty({size, size}, DType::kBF16, device);
  Tensor y = Tensor::empty({m, size}, DType::kBF16, device), before = y.clone(), h = y.clone();
  Tensor expected_y = y.clone(), expected_h = y.clone();
  matmul({expected_y, x, source, {.b = Transpose::kYes}});
  matmul({expected_h, expected_y, source, {.b = Transpose::kYes}});
  GraphRunner work(device, [&] {
    w.copy_(source);                                 // writes w
    matmul({y, x, w, {.b = Transpose::kYes}});       // reads w, writes y
    matmul({h, y, w, {.b = Transpose::kYes}});       // reads y
    before.copy_(y);                                 // reads y
    matmul({y, h, source, {.b = Transpose::kYes}});  // overwrites y
    w.zero_();
  });
  for (int i = 0; i < 50; ++i) {
    y.zero_();
    h.zero_();
    work.run();
    ASSERT_TRUE(bit_equal(before, expected_y)) << i;
    ASSERT_TRUE(bit_equal(h, expected_h)) << i;
  }
}

TEST(CudaMatmul, IsReproducibleAndWritesOnlyItsOutput) {
  COHORT_REQUIRE_GPU(device);
  for (const Types& types : kMatmulTypes) {
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
