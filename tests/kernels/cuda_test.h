// Shared by the tests of CUDA kernels: outputs between sentinels, and tolerances relative to the
// CPU's f64 result.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::test {

// Start of a tensor: at a multiple of 16 bytes, or one element after it.
enum class Start { kAligned, kOdd };

// A device tensor inside a larger buffer, to detect writes out of bounds.
class Guarded {
 public:
  // Holds `values`, converted to `dtype`, surrounded by `around`. NaN there reveals reads out of
  // bounds.
  Guarded(const Tensor& values, DType dtype, Device device, Start start = Start::kAligned,
          double around = 42)
      : before_(kMargin + (start == Start::kOdd ? 1 : 0)), count_(values.numel()), around_(around) {
    Tensor buffer = Tensor::full({before_ + count_ + kMargin}, around, DType::kF64);
    Tensor inside = buffer.narrow(0, before_, count_);
    inside.copy_(values.to(DType::kF64).contiguous().reshape({count_}));
    buffer_ = buffer.to(dtype).to(device);
    tensor_ = buffer_.narrow(0, before_, count_).reshape(values.shape());
  }
  // Holds NaN, to detect elements that a kernel does not write.
  Guarded(const Shape& shape, DType dtype, Device device, Start start = Start::kAligned)
      : Guarded(Tensor::full(shape, NAN, DType::kF64), dtype, device, start) {}

  Tensor& tensor() { return tensor_; }
  // True if every element around the tensor is unchanged.
  bool intact() const {
    const auto untouched = [&](int64_t begin, int64_t count) {
      for (const double x : buffer_.narrow(0, begin, count).to_vector<double>())
        if (x != around_ && !(std::isnan(x) && std::isnan(around_))) return false;
      return true;
    };
    return untouched(0, before_) && untouched(before_ + count_, kMargin);
  }

 private:
  static constexpr int64_t kMargin = 1024;
  int64_t before_, count_;
  double around_;
  Tensor buffer_, tensor_;
};

// Random values that `dtype` can hold, as f64 on the CPU.
inline Tensor rounded_random(const Shape& shape, DType dtype, uint64_t seed, double scale = 1) {
  return random_tensor(shape, DType::kF64, seed, scale).to(dtype).to(DType::kF64);
}

// Maximum ratio of a bf16 kernel's error to the error of the contract's roundings alone. A correct
// kernel has 1.0: f32 arithmetic moves a few values over a rounding boundary, where both neighbours
// are equally far. An additional rounding gives 1.4, or 1.2 if it applies to one of two equal
// terms.
inline constexpr double kRoundingSlack = 1.1;

// Expects `got` to equal `exact` (f64) within kF32Tolerance, plus `slack` times the error of
// rounding `exact` once if it is bf16.
inline void expect_close(const Tensor& got, const Tensor& exact, const char* name,
                         double slack = kRoundingSlack) {
  const double error = relative_error(got, exact);
  const bool is_bf16 = got.dtype() == DType::kBF16;
  const double rounding = is_bf16 ? relative_error(exact.to(DType::kBF16), exact) : 0;
  EXPECT_LE(error, slack * rounding + kF32Tolerance)
      << name << " " << got.str() << ", " << error / rounding << " times the rounding alone, "
      << rounding;
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
