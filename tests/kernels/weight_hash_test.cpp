#include "kernels/weight_hash.h"

#include <cstring>

#include "core/parallel.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

uint64_t hash_of(std::span<const Tensor> tensors) {
  Tensor hash = Tensor::empty({1}, DType::kI64);
  weight_hash(hash, tensors);
  return static_cast<uint64_t>(hash.to_vector<int64_t>()[0]);
}

// The definition of the header, word by word.
uint64_t naive_hash(std::span<const Tensor> tensors) {
  uint64_t sum = 0, index = 0;
  for (const Tensor& t : tensors) {
    std::string bytes(static_cast<const char*>(t.raw()), static_cast<size_t>(t.nbytes()));
    bytes.resize((bytes.size() + 3) / 4 * 4);
    for (size_t i = 0; i < bytes.size(); i += 4) {
      uint32_t word;
      std::memcpy(&word, &bytes[i], 4);
      sum += hashed_word(word, index++);
    }
  }
  return sum;
}

std::vector<Tensor> some_tensors(DType dtype) {
  std::vector<Tensor> out;
  for (const int64_t n : {3, 1, 0, 64, 40001})
    out.push_back(random_tensor({n}, dtype, static_cast<uint64_t>(n)));
  return out;
}

TEST(WeightHash, IsTheSumOfItsHeader) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    const std::vector<Tensor> tensors = some_tensors(dtype);
    const uint64_t expected = naive_hash(tensors);
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      EXPECT_EQ(hash_of(tensors), expected);
    }
  }
}

TEST(WeightHash, ChangesWithEveryBitAndWithTheOrder) {
  std::vector<Tensor> tensors = some_tensors(DType::kBF16);
  const uint64_t before = hash_of(tensors);
  for (Tensor& t : tensors)
    for (int64_t i = 0; i < std::min<int64_t>(static_cast<int64_t>(t.nbytes()), 64); ++i)
      for (int bit = 0; bit < 8; ++bit) {
        auto& byte = static_cast<uint8_t*>(t.raw())[i];
        byte = static_cast<uint8_t>(byte ^ 1 << bit);
        EXPECT_NE(hash_of(tensors), before) << "byte " << i << ", bit " << bit;
        byte = static_cast<uint8_t>(byte ^ 1 << bit);
      }
  std::swap(tensors[0], tensors[4]);
  EXPECT_NE(hash_of(tensors), before);
}

TEST(WeightHash, RefusesTensorsWithGaps) {
  const std::vector<Tensor> columns{random_tensor({4, 6}, DType::kF32, 1).narrow(1, 0, 3)};
  EXPECT_ANY_THROW(hash_of(columns));
}

}  // namespace
}  // namespace cohort::kernels
