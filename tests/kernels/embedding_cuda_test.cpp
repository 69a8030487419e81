// Embedding lookup on CUDA compared with the CPU.
#include "kernels/embedding.h"

#include "core/rng.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

struct EmbeddingCase {
  int64_t tokens, vocab, cols;
};
// Frequent and unused ids, a single id, odd row sizes, columns over several blocks; the last two
// vocabularies need two and three passes of the sort.
constexpr EmbeddingCase kCases[] = {{0, 3, 4},     {1, 1, 1},       {17, 5, 3},
                                    {900, 7, 64},  {2500, 1, 40},   {70, 3, 2056},
                                    {5000, 65, 8}, {300, 1000, 72}, {3000, 300000, 1}};

Tensor random_ids_on_cuda(int64_t n, int64_t vocab, uint64_t seed) {
  Rng rng(seed, rng_stream(kTestPurpose));
  std::vector<int32_t> values(static_cast<size_t>(n));
  for (int32_t& v : values) v = static_cast<int32_t>(rng.below(vocab));
  return ids(values);
}

TEST(CudaEmbedding, ForwardCopiesRows) {
  COHORT_REQUIRE_GPU(device);
  for (const EmbeddingCase& c : kCases)
    for (const DType dtype : kCudaTypes)
      for (const Start start : kStarts) {
        const Tensor table = rounded_random({c.vocab, c.cols}, dtype, 1);
        const Tensor index = random_ids_on_cuda(c.tokens, c.vocab, 2);
        Tensor expected = Tensor::empty({c.tokens, c.cols}, DType::kF64);
        embedding_forward({expected, table, index});
        Guarded weights(table, dtype, device, start);
        Guarded y(Shape{c.tokens, c.cols}, dtype, device, start);
        embedding_forward({y.tensor(), weights.tensor(), index.to(device)});
        EXPECT_EQ(y.tensor().to_vector<double>(), expected.to_vector<double>());
        EXPECT_TRUE(y.intact());
      }
}

TEST(CudaEmbedding, UnknownIdsGiveNanAndNoGradient) {
  COHORT_REQUIRE_GPU(device);
  const Tensor index = ids({2, -1, 3, 0, INT32_MAX, INT32_MIN, 2}).to(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t cols : {5, 16}) {
      const Tensor table = rounded_random({3, cols}, dtype, 1).to(dtype);
      Tensor y = Tensor::empty({7, cols}, dtype, device);
      embedding_forward({y, table.to(device), index});
      for (const int64_t t : {1, 2, 4, 5})
        for (const double v : y.select(0, t).to_vector<double>()) EXPECT_TRUE(std::isnan(v));
      EXPECT_TRUE(bit_equal(y.select(0, 3), table.select(0, 0)));
      EXPECT_TRUE(bit_equal(y.select(0, 6), table.select(0, 2)));

      const Tensor dy = rounded_random({7, cols}, dtype, 2);
      Tensor expected = Tensor::empty({3, cols}, DType::kF64);
      Tensor known = Tensor::empty({3, cols}, DType::kF64);
      for (const auto& [to, from] : {std::pair{0, 0}, {1, 3}, {2, 6}}) {
        Tensor row = known.select(0, to);
        row.copy_(dy.select(0, from));
      }
      embedding_backward({{expected}, known, ids({2, 0, 2})});
      Guarded dtable(Shape{3, cols}, DType::kF32, device);
      embedding_backward({{dtable.tensor()}, dy.to(dtype).to(device), index});
      expect_close(dtable.tensor(), expected, "dtable");
      EXPECT_TRUE(dtable.intact());
    }
}

TEST(CudaEmbedding, AnEmptyTableGivesNan) {
  COHORT_REQUIRE_GPU(device);
  Tensor y = Tensor::empty({2, 8}, DType::kF32, device);
  Tensor table = Tensor::empty({0, 8}, DType::kF32, device);
  const Tensor index = ids({0, 1}).to(device);
  embedding_forward({y, table, index});
  for (const double v : y.to_vector<double>()) EXPECT_TRUE(std::isnan(v));
  embedding_backward({{table}, y, index});
}

TEST(CudaEmbedding, ARejectedBackwardLeavesTheTableUnchanged) {
  COHORT_REQUIRE_GPU(device);
  Tensor dtable = Tensor::full({2, 8}, 7, DType::kF64, device);
  const Tensor dy = Tensor::zeros({1, 8}, DType::kF64, device);
  EXPECT_THROW_WITH(embedding_backward({{dtable}, dy, ids({1}).to(device)}), Error,
                    "expected f32 or bf16 on a CUDA device, got f64");
  EXPECT_EQ(dtable.to_vector<double>(), std::vector<double>(16, 7));
}

TEST(CudaEmbedding, BackwardAddsTokens) {
  COHORT_REQUIRE_GPU(device);
  for (const EmbeddingCase& c : kCases)
    for (const DType dtype : kCudaTypes)
      for (const Start start : kStarts) {
        SCOPED_TRACE(std::to_string(c.tokens) + " tokens");
        const Shape shape{c.vocab, c.cols};
        const Tensor index = random_ids_on_cuda(c.tokens, c.vocab, 3);
        const Tensor dy = rounded_random({c.tokens, c.cols}, dtype, 4);
        const Tensor old = rounded_random(shape, DType::kF32, 5);
        Tensor exact = Tensor::empty(shape, DType::kF64), exact_sum = old.clone();
        embedding_backward({{exact}, dy, index});
        embedding_backward({{exact_sum, Grad::kAccumulate}, dy, index});
        Guarded grad(dy, dtype, device, start), dtable(shape, DType::kF32, device, start);
        Guarded sum({old, DType::kF32, device});
        embedding_backward({{dtable.tensor()}, grad.tensor(), index.to(device)});
        embedding_backward({{sum.tensor(), Grad::kAccumulate}, grad.tensor(), index.to(device)});
        expect_close(dtable.tensor(), exact, "dtable");
        expect_close(sum.tensor(), exact_sum, "dtable, accumulated");
        EXPECT_TRUE(dtable.intact() && sum.intact());
      }
}

// Reference implementation of the order documented in embedding.h, bitwise equal.
TEST(CudaEmbedding, BackwardAddsInGroupsOf64) {
  COHORT_REQUIRE_GPU(device);
  const int64_t tokens = 1000, vocab = 5, cols = 12;
  std::vector<int32_t> values(tokens);
  Rng rng(1, rng_stream(kTestPurpose));
  for (int32_t& v : values) v = rng.below(4) == 0 ? static_cast<int32_t>(rng.below(vocab)) : 3;
  const Tensor dy = random_tensor({tokens, cols}, DType::kF32, 2);
  Tensor expected = Tensor::zeros({vocab, cols}, DType::kF32);
  for (int32_t id = 0; id < vocab; ++id)
    for (int64_t c = 0; c < cols; ++c) {
      std::vector<float> terms, groups;
      for (int64_t t = 0; t < tokens; ++t)
        if (values[static_cast<size_t>(t)] == id) terms.push_back(dy.data<float>()[t * cols + c]);
      for (size_t i = 0; i < terms.size(); ++i) {
        if (i % 64 == 0) groups.push_back(0);
        groups.back() += terms[i];
      }
      float total = 0;
      for (const float group : groups) total += group;
      expected.data<float>()[id * cols + c] = total;
    }
  Tensor dtable = Tensor::empty({vocab, cols}, DType::kF32, device);
  embedding_backward({{dtable}, dy.to(device), ids(values).to(device)});
  EXPECT_EQ(dtable.to_vector<double>(), expected.to_vector<double>());
}

TEST(CudaEmbedding, BackwardIsReproducible) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    const Tensor index = random_ids_on_cuda(3000, 30, 3).to(device);
    const Tensor dy = random_tensor({3000, 136}, dtype, 4).to(device);
    expect_reproducible([&] {
      Tensor dtable = Tensor::empty({30, 136}, DType::kF32, device);
      embedding_backward({{dtable}, dy, index});
      return std::vector{dtable};
    });
  }
}

}  // namespace
}  // namespace cohort::kernels
