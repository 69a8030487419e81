#include "kernels/embedding.h"

#include "core/rng.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

Tensor random_ids(int64_t n, int64_t vocab, uint64_t seed) {
  Rng rng(seed, rng_stream(kTestPurpose));
  std::vector<int32_t> values(static_cast<size_t>(n));
  for (int32_t& v : values) v = static_cast<int32_t>(rng.below(vocab));
  return ids(values);
}

TEST(Embedding, ForwardCopiesRows) {
  for (const auto& [n, vocab, cols] :
       {std::tuple{0, 3, 4}, {1, 1, 1}, {17, 5, 3}, {300, 1000, 65}}) {
    const Tensor table = random_tensor({vocab, cols}, DType::kF32, 1);
    const Tensor index = random_ids(n, vocab, 2);
    Tensor y = Tensor::empty({n, cols}, DType::kF32);
    embedding_forward({y, table, index});
    for (int64_t t = 0; t < n; ++t)
      EXPECT_TRUE(bit_equal(y.select(0, t), table.select(0, index.data<int32_t>()[t])));
  }
}

// The contract fixes the order of additions (t ascending), so the naive loop gives the same bits.
TEST(Embedding, BackwardAddsTokensInOrder) {
  for (const auto& [n, vocab, cols] :
       {std::tuple{0, 3, 4}, {1, 1, 1}, {17, 5, 3}, {900, 7, 65}, {300, 1000, 20}}) {
    const Tensor index = random_ids(n, vocab, 3), dy = random_tensor({n, cols}, DType::kF32, 4);
    Tensor expected = random_tensor({vocab, cols}, DType::kF32, 5), sum = expected.clone();
    Tensor overwritten = Tensor::full({vocab, cols}, NAN, DType::kF32);
    Tensor zeros = Tensor::zeros({vocab, cols}, DType::kF32);
    for (int64_t t = 0; t < n; ++t)
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t at = index.data<int32_t>()[t] * cols + c;
        expected.data<float>()[at] += dy.data<float>()[t * cols + c];
        zeros.data<float>()[at] += dy.data<float>()[t * cols + c];
      }
    embedding_backward({{sum, Grad::kAccumulate}, dy, index});
    embedding_backward({{overwritten}, dy, index});
    EXPECT_TRUE(bit_equal(sum, expected));
    EXPECT_TRUE(bit_equal(overwritten, zeros));
    expect_thread_invariant([&] {
      Tensor dtable = Tensor::empty({vocab, cols}, DType::kF32);
      embedding_backward({{dtable}, dy, index});
      return std::vector{dtable};
    });
  }
}

TEST(Embedding, BackwardIsTheDerivative) {
  Tensor table = random_tensor({4, 3}, DType::kF64, 1), y = Tensor::empty({5, 3}, DType::kF64);
  const Tensor index = ids({2, 0, 2, 3, 2}), dy = random_tensor({5, 3}, DType::kF64, 2);
  Tensor dtable = Tensor::empty({4, 3}, DType::kF64);
  embedding_backward({{dtable}, dy, index});
  expect_gradient(
      table, dtable,
      [&] {
        embedding_forward({y, table, index});
        return dot(y, dy);
      },
      "dtable");
}

TEST(Embedding, BadIdsAreNamedBeforeAnythingIsWritten) {
  const Tensor table = Tensor::zeros({4, 3}, DType::kF32);
  Tensor y = Tensor::full({3, 3}, 7, DType::kF32), dtable = Tensor::full({4, 3}, 7, DType::kF32);
  EXPECT_THROW_WITH(embedding_forward({y, table, ids({0, 4, -1})}), Error, "id 4 at position 1");
  EXPECT_THROW_WITH(embedding_backward({{dtable}, y, ids({0, 1, -1})}), Error,
                    "id -1 at position 2");
  EXPECT_TRUE(bit_equal(y, Tensor::full({3, 3}, 7, DType::kF32)));
  EXPECT_TRUE(bit_equal(dtable, Tensor::full({4, 3}, 7, DType::kF32)));
  EXPECT_THROW_WITH(embedding_forward({y, table, Tensor::zeros({3}, DType::kI64)}), Error,
                    "expected ids i32[3]");
  EXPECT_THROW_WITH(embedding_forward({y, table, ids({0})}), Error, "expected y f32[1, 3]");
}

}  // namespace
}  // namespace cohort::kernels
