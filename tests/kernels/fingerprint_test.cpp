#include "kernels/fingerprint.h"

#include <cstring>

#include "core/parallel.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

constexpr DType kAllTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kI32, DType::kI64,
                               DType::kU8,  DType::kF16, DType::kE4M3, DType::kI8};

uint64_t fingerprint_of(const Tensor& t, int64_t address = 0) {
  Tensor sum = Tensor::zeros({1}, DType::kI64);
  fingerprint(sum, t, address);
  return static_cast<uint64_t>(sum.data<int64_t>()[0]);
}

// Random bits: NaN and zeros of both signs are compared as any others.
Tensor random_bits(int64_t n, DType dtype) {
  Tensor out = Tensor::empty({n}, dtype);
  Rng rng(static_cast<uint64_t>(n), rng_stream(kTestPurpose));
  for (int64_t i = 0; i < out.nbytes(); ++i)
    static_cast<uint8_t*>(out.raw())[i] = static_cast<uint8_t>(rng.below(256));
  return out;
}

// The definition of the header, word by word.
uint64_t naive_fingerprint(const Tensor& t, uint64_t address) {
  std::string bytes(static_cast<const char*>(t.raw()), static_cast<size_t>(t.nbytes()));
  if (bytes.size() % 2 != 0) bytes += '\0';
  uint64_t sum = 0;
  for (size_t i = 0; i < bytes.size(); i += 2) {
    uint16_t word;
    std::memcpy(&word, &bytes[i], 2);
    sum += mix_word(address++, word);
  }
  return sum;
}

TEST(Fingerprint, IsTheSumOfItsHeader) {
  for (const DType dtype : kAllTypes)
    for (const int64_t n : {1, 3, 64, 40001}) {
      const Tensor t = random_bits(n, dtype);
      for (const int threads : {1, 3}) {
        set_num_threads(threads);
        EXPECT_EQ(fingerprint_of(t, 5), naive_fingerprint(t, 5)) << dtype_name(dtype) << n;
      }
    }
  EXPECT_EQ(fingerprint_of(Tensor::empty({0}, DType::kF32)), 0u);
}

TEST(Fingerprint, DoesNotDependOnCuts) {
  for (const DType dtype : kAllTypes) {
    constexpr int64_t kElements = 30002;
    const Tensor t = random_bits(kElements, dtype);
    const uint64_t whole = fingerprint_of(t, 7);
    const int64_t step = dtype_size(dtype) == 1 ? 2 : 1;  // elements of a word
    for (const int64_t pieces : {2, 3, 5, 8, 100}) {
      Tensor sum = Tensor::zeros({1}, DType::kI64);
      for (int64_t i = pieces; i-- > 0;) {  // from the last one
        const int64_t begin = kElements / step * i / pieces * step,
                      end = kElements / step * (i + 1) / pieces * step;
        fingerprint(sum, t.narrow(0, begin, end - begin),
                    7 + begin * static_cast<int64_t>(dtype_size(dtype)) / 2);
      }
      EXPECT_EQ(static_cast<uint64_t>(sum.data<int64_t>()[0]), whole) << dtype_name(dtype);
    }
  }
}

TEST(Fingerprint, ChangesWithEveryBitAndEveryPlace) {
  for (const DType dtype : kAllTypes) {
    Tensor t = random_bits(21, dtype);
    const uint64_t before = fingerprint_of(t);
    auto* const bytes = static_cast<uint8_t*>(t.raw());
    const auto size = static_cast<size_t>(t.nbytes()), element = dtype_size(dtype);
    for (size_t i = 0; i < size; ++i)
      for (int bit = 0; bit < 8; ++bit) {
        bytes[i] = static_cast<uint8_t>(bytes[i] ^ 1 << bit);
        EXPECT_NE(fingerprint_of(t), before) << "byte " << i << ", bit " << bit;
        bytes[i] = static_cast<uint8_t>(bytes[i] ^ 1 << bit);
      }
    const std::string kept(reinterpret_cast<const char*>(bytes), size);
    for (size_t i = 0; i + element < size; i += element) {  // two elements are swapped
      std::swap_ranges(bytes + i, bytes + i + element, bytes + i + element);
      const bool same = std::memcmp(bytes, kept.data(), size) == 0;
      EXPECT_EQ(fingerprint_of(t) == before, same) << dtype_name(dtype) << i;
      std::memcpy(bytes, kept.data(), size);
    }
    std::rotate(bytes, bytes + element, bytes + size);  // every element moves
    EXPECT_NE(fingerprint_of(t), before);
    EXPECT_NE(fingerprint_of(t, 1), fingerprint_of(t));
  }
}

TEST(Fingerprint, RefusesTensorsWithGaps) {
  EXPECT_ANY_THROW(fingerprint_of(random_tensor({4, 6}, DType::kF32, 1).narrow(1, 0, 3)));
}

}  // namespace
}  // namespace cohort::kernels
