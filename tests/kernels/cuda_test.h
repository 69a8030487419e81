// Shared by the tests of CUDA kernels: outputs between sentinels, and how far a result may be from
// the CPU's f64.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::test {

// Where a tensor starts: at a multiple of 16 bytes, or one element behind it.
enum class Start { kAligned, kOdd };

// A tensor on a device in the middle of a larger buffer, to find writes outside of it.
class Guarded {
 public:
  // Holds `values`, converted to `dtype`.
  Guarded(const Tensor& values, DType dtype, Device device, Start start = Start::kAligned)
      : before_(start == Start::kAligned ? 64 : 65), count_(values.numel()) {
    Tensor buffer = Tensor::full({before_ + count_ + kAfter}, kSentinel, DType::kF64);
    Tensor inside = buffer.narrow(0, before_, count_);
    inside.copy_(values.to(DType::kF64).contiguous().reshape({count_}));
    buffer_ = buffer.to(dtype).to(device);
    tensor_ = buffer_.narrow(0, before_, count_).reshape(values.shape());
  }
  // Holds NaN, which a kernel that forgets an element leaves behind.
  Guarded(const Shape& shape, DType dtype, Device device, Start start = Start::kAligned)
      : Guarded(Tensor::full(shape, NAN, DType::kF64), dtype, device, start) {}

  Tensor& tensor() { return tensor_; }
  // Every element around the tensor is as it was.
  bool intact() const {
    const auto values = buffer_.to_vector<double>();
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i)
      if ((i < before_ || i >= before_ + count_) && values[static_cast<size_t>(i)] != kSentinel)
        return false;
    return true;
  }

 private:
  static constexpr int64_t kAfter = 64;
  static constexpr double kSentinel = 42;
  int64_t before_, count_;
  Tensor buffer_, tensor_;
};

// Random values that `dtype` can hold, as f64 on the CPU.
inline Tensor rounded_random(const Shape& shape, DType dtype, uint64_t seed, double scale = 1) {
  return random_tensor(shape, DType::kF64, seed, scale).to(dtype).to(DType::kF64);
}

// Expects `got` to be `exact` (f64) to the precision of its dtype: for f32 kF32Tolerance, for bf16
// 1.5 times the error of rounding `exact` once besides. A kernel that rounds to nearest has 1.0
// times; the rest is for values that f32 arithmetic moved over a rounding boundary.
inline void expect_close(const Tensor& got, const Tensor& exact, const char* name) {
  const double error = relative_error(got, exact);
  const bool half = got.dtype() == DType::kBF16;
  const double rounding = half ? relative_error(exact.to(DType::kBF16), exact) : 0;
  EXPECT_LE(error, 1.5 * rounding + kF32Tolerance)
      << name << " " << got.str() << ", rounding alone: " << rounding;
}

// Runs fn 20 times and expects the same bits. fn returns its outputs.
inline void expect_reproducible(const std::function<std::vector<Tensor>()>& fn) {
  std::vector<Tensor> expected;
  for (const Tensor& t : fn()) expected.push_back(t.to(Device{}));
  for (int run = 1; run < 20; ++run) {
    const std::vector<Tensor> got = fn();
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_TRUE(bit_equal(got[i].to(Device{}), expected[i])) << "output " << i << ", run " << run;
  }
}

// Both element types of the device.
inline constexpr DType kCudaTypes[] = {DType::kF32, DType::kBF16};
inline constexpr Start kStarts[] = {Start::kAligned, Start::kOdd};

}  // namespace cohort::kernels::test
