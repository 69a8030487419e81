// Dropout on CUDA: the random draws of the CPU, and its bits in f32.
#include "kernels/dropout.h"

#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

DropoutSpec spec(double p, int64_t tokens) {
  std::vector<int64_t> sequences(static_cast<size_t>(tokens));
  std::vector<int32_t> positions(static_cast<size_t>(tokens));
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequences[i] = static_cast<int64_t>(i / 3) + (int64_t{1} << 40);
    positions[i] = static_cast<int32_t>(i % 3 * 7);
  }
  return {.p = p,
          .seed = 0x123456789abcdefu,
          .stream = rng_stream(kDropoutPurpose, 3, 2 << 8 | 3),
          .sequences = Tensor::from(sequences),
          .positions = Tensor::from(positions)};
}

DropoutSpec on(DropoutSpec s, Device device) {
  s.sequences = s.sequences.to(device);
  s.positions = s.positions.to(device);
  return s;
}

const Shape kDropoutShapes[] = {{0, 4}, {1, 1}, {3, 3}, {7, 65}, {5, 128}, {3, 4104}, {2, 20000}};

TEST(CudaDropout, F32HasTheBitsOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const double p : {0.0, 0.1, 0.75})
    for (const Shape& shape : kDropoutShapes)
      for (const Start start : kStarts) {
        const DropoutSpec s = spec(p, shape[0]);
        const Tensor x = rounded_random(shape, DType::kF32, 1);
        const Tensor old = rounded_random(shape, DType::kF32, 2);
        Tensor expected = Tensor::empty(shape, DType::kF32), sum = old.to(DType::kF32);
        dropout({expected, x.to(DType::kF32), s});
        dropout({sum, x.to(DType::kF32), s, Grad::kAccumulate});
        Guarded in(x, DType::kF32, device, start), y(shape, DType::kF32, device, start);
        Guarded added(old, DType::kF32, device, start);
        dropout({y.tensor(), in.tensor(), on(s, device)});
        dropout({added.tensor(), in.tensor(), on(s, device), Grad::kAccumulate});
        EXPECT_TRUE(bit_equal(y.tensor().to(Device{}), expected)) << shape.str();
        EXPECT_TRUE(bit_equal(added.tensor().to(Device{}), sum)) << shape.str();
        EXPECT_TRUE(y.intact() && added.intact());
      }
}

TEST(CudaDropout, Bf16DropsTheSameElements) {
  COHORT_REQUIRE_GPU(device);
  for (const Shape& shape : kDropoutShapes)
    for (const Start start : kStarts) {
      const DropoutSpec s = spec(0.3, shape[0]);
      const Tensor x = rounded_random(shape, DType::kBF16, 1);
      const Tensor old = rounded_random(shape, DType::kBF16, 2);
      Tensor expected = Tensor::empty_like(x), sum = old.clone();
      dropout({expected, x, s});
      dropout({sum, x, s, Grad::kAccumulate});
      Guarded in(x, DType::kBF16, device, start), y(shape, DType::kBF16, device, start);
      Guarded added(old, DType::kBF16, device);
      dropout({y.tensor(), in.tensor(), on(s, device)});
      dropout({added.tensor(), in.tensor(), on(s, device), Grad::kAccumulate});
      expect_close(y.tensor(), expected, "y");
      expect_close(added.tensor(), sum, "y, accumulated");
      const auto got = y.tensor().to_vector<double>(), want = expected.to_vector<double>();
      for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i] == 0, want[i] == 0);
      EXPECT_TRUE(y.intact() && added.intact());
    }
}

TEST(CudaDropout, BitsDoNotDependOnTheBatch) {
  COHORT_REQUIRE_GPU(device);
  const DropoutSpec s = on(spec(0.5, 9), device);
  const Tensor x = random_tensor({9, 40}, DType::kF32, 1).to(device);
  Tensor all = Tensor::empty_like(x), one = Tensor::empty({1, 40}, DType::kF32, device);
  dropout({all, x, s});
  for (const int64_t t : {0, 4, 8}) {
    DropoutSpec alone = s;
    alone.sequences = s.sequences.narrow(0, t, 1);
    alone.positions = s.positions.narrow(0, t, 1);
    dropout({one, x.narrow(0, t, 1), alone});
    EXPECT_TRUE(bit_equal(one, all.narrow(0, t, 1)));
  }
}

}  // namespace
}  // namespace cohort::kernels
