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

TEST(SelectAdapters, KeepsTheColumnsOfEachRowsAdapter) {
  const Tensor wide = Tensor::full({4, 7}, 5, DType::kF64);
  Tensor h = wide.narrow(1, 1, 6);
  const Tensor rows = Tensor::from(std::vector<int32_t>{2, 0, -1, 1}),
               table = Tensor::from(std::vector<int32_t>{1, 0, 2});
  select_adapters({h, 2, rows, table});
  EXPECT_EQ(wide.to_vector<double>(),
            (std::vector<double>{5, 0, 0, 0, 0, 5, 5, 5, 0, 0, 5, 5, 0, 0,  //
                                 5, 0, 0, 0, 0, 0, 0, 5, 5, 5, 0, 0, 0, 0}));
  h.fill_(5);
  select_adapters({h, 3, {}, {}});
  EXPECT_EQ(h.narrow(0, 0, 1).to_vector<double>(), (std::vector<double>{5, 5, 5, 0, 0, 0}));
  EXPECT_THROW_WITH(select_adapters({h, 4, {}, {}}), Error, "expected a multiple of 4 columns");
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

// Two modules with rows of no module between them; s B is 0 outside of their blocks.
TEST(LoraOutputGradients, AreTheProductsOfTheModules) {
  constexpr int64_t kTokens = 9, kRank = 3, kColumns = 8;
  const std::vector<AdapterSlice> modules = {{0, 5}, {7, 4}};
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Tensor dy = random_tensor({kTokens, 11}, dtype, 1);
    const Tensor h = random_tensor({kTokens, kColumns}, dtype, 2);
    const Tensor weight = Tensor::zeros({11, 6 + kColumns}, dtype),
                 sb = weight.narrow(1, 6, kColumns);
    Tensor dh = Tensor::full({kTokens, kColumns}, NAN, dtype),
           db = random_tensor({9, kRank}, dtype, 3), expected_db = db.clone();
    Tensor expected_dh = Tensor::zeros(dh.shape(), dtype);
    int64_t row = 0, column = 0;
    for (const AdapterSlice& module : modules) {
      const Tensor b = random_tensor({module.rows, kRank}, dtype, 4 + static_cast<uint64_t>(row));
      const Tensor part = dy.narrow(1, module.row, module.rows).clone();
      sb.narrow(0, module.row, module.rows).narrow(1, column, kRank).copy_(b);
      Tensor product = Tensor::empty({kTokens, kRank}, dtype);
      matmul({product, part, b});
      expected_dh.narrow(1, column, kRank).copy_(product);
      Tensor rows = expected_db.narrow(0, row, module.rows);
      matmul({rows,
              part,
              h.narrow(1, column, kRank),
              {.a = Transpose::kYes, .out = Grad::kAccumulate, .scale = 0.5}});
      row += module.rows;
      column += kRank;
    }
    lora_output_gradients({.dh = dh,
                           .db = {db, Grad::kAccumulate},
                           .dy = dy,
                           .h = h,
                           .sb = sb,
                           .modules = modules,
                           .scale = 0.5});
    EXPECT_LE(relative_error(dh, expected_dh), kF32Tolerance);
    EXPECT_LE(relative_error(db, expected_db), kF32Tolerance);
    Tensor alone = dh.clone();
    const auto call = [&](Tensor& to, std::span<const AdapterSlice> of) {
      lora_output_gradients({.dh = alone, .db = {to}, .dy = dy, .h = h, .sb = sb, .modules = of});
    };
    call(none(), {});
    EXPECT_TRUE(bit_equal(alone, dh));
    EXPECT_THROW_WITH(call(db, std::vector<AdapterSlice>{{0, 5}, {8, 4}}), Error,
                      "modules among 11 rows");
    EXPECT_THROW_WITH(call(db, std::vector<AdapterSlice>{{0, 5}}), Error, "expected db");
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
  EXPECT_THROW_WITH(call({3, 2}, {3, 5}, {2, 4}, {3, 2}), Error,
                    "expected a f32[2, 5] = [P, K], where K = 5 as in x");
  EXPECT_THROW_WITH(call({3, 3}, {3, 5}, {2, 5}, {3, 2}), Error, "expected h f32[3, 2]");
  EXPECT_THROW_WITH(call({3, 2}, {3, 5}, {2, 5}, {2, 2}), Error, "expected copy f32[3, 2]");
}

}  // namespace
}  // namespace cohort::kernels
