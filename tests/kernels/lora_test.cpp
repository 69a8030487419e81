#include "kernels/lora.h"

#include "kernels/matmul.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

// [x | h] with h to be written.
struct Rows {
  Tensor all, x, h;
  Rows(const Tensor& values, int64_t p)
      : all(Tensor::full({values.dim(0), values.dim(1) + p}, NAN, values.dtype())),
        x(all.narrow(1, 0, values.dim(1))),
        h(all.narrow(1, values.dim(1), p)) {
    x.copy_(values);
  }
};

TEST(LoraInput, IsTheProductWithTheRowsOfA) {
  for (const auto& [rows, k, p] : {std::tuple{1, 5, 64}, {37, 64, 64}, {0, 8, 64}, {3, 100, 7}})
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const Tensor x = random_tensor({rows, k}, dtype, 1), a = random_tensor({p, k}, dtype, 2);
      Tensor expected = Tensor::empty({rows, p}, dtype), copy = expected.clone();
      matmul({expected, x, a, {.b = Transpose::kYes}});
      Rows in(x, p);
      lora_input({.h = in.h, .x = in.x, .a = a, .copy = copy});
      EXPECT_TRUE(bit_equal(in.h.clone(), expected) && bit_equal(copy, expected));
      EXPECT_TRUE(bit_equal(in.x.clone(), x));
    }
}

TEST(LoraInput, RowsDoNotDependOnTheOtherRows) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Tensor x = random_tensor({300, 130}, dtype, 1), a = random_tensor({64, 130}, dtype, 2);
    Tensor all = Tensor::empty({300, 64}, dtype);
    lora_input({.h = all, .x = x, .a = a});
    for (const int64_t rows : {1, 2, 15, 16, 17, 64, 65, 257}) {
      Rows in(x.narrow(0, 11, rows), 64);
      lora_input({.h = in.h, .x = in.x, .a = a});
      EXPECT_TRUE(bit_equal(in.h.clone(), all.narrow(0, 11, rows))) << rows;
    }
  }
}

TEST(LoraInput, MismatchesNameTheTensor) {
  const auto call = [](const Shape& h, const Shape& x, const Shape& a, const Shape& copy) {
    Tensor out = Tensor::zeros(h, DType::kF32);
    lora_input({.h = out,
                .x = Tensor::zeros(x, DType::kF32),
                .a = Tensor::zeros(a, DType::kF32),
                .copy = Tensor::zeros(copy, DType::kF32)});
  };
  call({3, 2}, {3, 5}, {2, 5}, {3, 2});
  EXPECT_THROW_WITH(call({3, 2}, {3, 5}, {2, 4}, {3, 2}), Error, "rows of x and a of one length");
  EXPECT_THROW_WITH(call({3, 3}, {3, 5}, {2, 5}, {3, 2}), Error, "expected h f32[3, 2]");
  EXPECT_THROW_WITH(call({3, 2}, {3, 5}, {2, 5}, {2, 2}), Error, "expected copy f32[3, 2]");
}

}  // namespace
}  // namespace cohort::kernels
