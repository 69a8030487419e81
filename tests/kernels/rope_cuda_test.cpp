// Rotary embedding on CUDA: bits of the CPU in f32; in bf16 the CPU's f64 result rounded once.
#include "kernels/rope.h"

#include "kernels/elementwise.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

constexpr double kCudaTheta = 10000;
constexpr RopeDirection kDirections[] = {RopeDirection::kForward, RopeDirection::kInverse};
// Heads with several blocks of threads, less than a warp, and halves that are not whole packs.
const Shape kRopeShapes[] = {{0, 2, 4},  {1, 1, 2},   {3, 2, 6},   {3, 5, 66},
                             {3, 1, 16}, {3, 40, 64}, {37, 3, 128}};

// Alignments of tensors, and widths of the table: of half a head, of a head, and with gains.
enum class Width { kPart, kHead, kWide };
struct Variant {
  Start start;
  Width width;
};
constexpr Variant kRopeVariants[] = {
    {Start::kAligned, Width::kPart}, {Start::kAligned, Width::kHead},
    {Start::kAligned, Width::kWide}, {Start::kOdd, Width::kPart},
    {Start::kOdd, Width::kHead},     {Start::kOdd, Width::kWide}};

Tensor table_for(int64_t dim, Width width) {
  const int64_t rotated = width == Width::kPart && dim > 2 ? dim / 4 * 2 : dim;
  return rope_table(100, rope_frequencies(rotated, kCudaTheta), 1, DType::kF32,
                    width == Width::kWide ? rope_gain : RopeGain());
}

Tensor positions_for(int64_t tokens) {
  std::vector<int32_t> values(static_cast<size_t>(tokens));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i * 41 % 100);
  return ids(values);
}

TEST(CudaRope, F32HasTheBitsOfTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const Shape& shape : kRopeShapes)
    for (const RopeDirection direction : kDirections)
      for (const auto& [start, width] : kRopeVariants) {
        const Tensor x = rounded_random(shape, DType::kF32, 1);
        const Tensor old = rounded_random(shape, DType::kF32, 2);
        const Tensor table = table_for(shape[2], width);
        const Tensor positions = positions_for(shape[0]);
        Tensor expected = Tensor::empty(shape, DType::kF32), sum = old.to(DType::kF32);
        rope({expected, x.to(DType::kF32), positions, table, direction});
        rope({sum, x.to(DType::kF32), positions, table, direction, Grad::kAccumulate});
        Guarded in(x, DType::kF32, device, start), y(shape, DType::kF32, device, start);
        Guarded added(old, DType::kF32, device), same(x, DType::kF32, device, start);
        const Tensor at = positions.to(device), angles = table.to(device);
        rope({y.tensor(), in.tensor(), at, angles, direction});
        rope({added.tensor(), in.tensor(), at, angles, direction, Grad::kAccumulate});
        rope({same.tensor(), same.tensor(), at, angles, direction});
        EXPECT_TRUE(bit_equal(y.tensor().to(Device{}), expected)) << shape.str();
        EXPECT_TRUE(bit_equal(added.tensor().to(Device{}), sum)) << shape.str();
        EXPECT_TRUE(bit_equal(same.tensor().to(Device{}), expected)) << shape.str();
        EXPECT_TRUE(y.intact() && added.intact() && same.intact());
      }
}

TEST(CudaRope, Bf16IsRoundedOnce) {
  COHORT_REQUIRE_GPU(device);
  for (const Shape& shape : kRopeShapes)
    for (const RopeDirection direction : kDirections)
      for (const auto& [start, width] : kRopeVariants) {
        const Tensor x = rounded_random(shape, DType::kBF16, 1);
        const Tensor old = rounded_random(shape, DType::kBF16, 2);
        const Tensor table = table_for(shape[2], width);
        const Tensor positions = positions_for(shape[0]);
        Tensor expected = Tensor::empty(shape, DType::kF64), sum = old.clone();
        rope({expected, x, positions, table.to(DType::kF64), direction});
        rope({sum, x, positions, table.to(DType::kF64), direction, Grad::kAccumulate});
        Guarded in(x, DType::kBF16, device, start), y(shape, DType::kBF16, device, start);
        Guarded added(old, DType::kBF16, device);
        rope({y.tensor(), in.tensor(), positions.to(device), table.to(device), direction});
        rope({added.tensor(), in.tensor(), positions.to(device), table.to(device), direction,
              Grad::kAccumulate});
        expect_close(y.tensor(), expected, "y");
        expect_close(added.tensor(), sum, "y, accumulated");
        EXPECT_TRUE(y.intact() && added.intact());
      }
}

TEST(CudaRope, PlainHeadsAreUnchanged) {
  COHORT_REQUIRE_GPU(device);
  for (const Shape& shape : kRopeShapes)
    for (const auto& [start, width] : kRopeVariants) {
      Shape all = shape;
      all[1] += 3;
      const Tensor x = rounded_random(all, DType::kF32, 1).to(DType::kF32);
      const Tensor table = table_for(shape[2], width);
      const Tensor positions = positions_for(shape[0]), at = positions.to(device),
                   angles = table.to(device);
      Tensor expected = Tensor::empty(all, DType::kF32), sum = Tensor::full(all, 1, DType::kF32);
      const auto run = [](Tensor& y, const Tensor& in, const Tensor& where, const Tensor& angles,
                          Grad mode) {
        rope(
            {.y = y, .x = in, .positions = where, .table = angles, .mode = mode, .plain_heads = 3});
      };
      run(expected, x, positions, table, Grad::kOverwrite);
      run(sum, x, positions, table, Grad::kAccumulate);
      Guarded in(x, DType::kF32, device, start), y(all, DType::kF32, device, start);
      Guarded added(Tensor::full(all, 1, DType::kF64), DType::kF32, device, start);
      run(y.tensor(), in.tensor(), at, angles, Grad::kOverwrite);
      run(added.tensor(), in.tensor(), at, angles, Grad::kAccumulate);
      run(in.tensor(), in.tensor(), at, angles, Grad::kOverwrite);
      EXPECT_TRUE(bit_equal(y.tensor().to(Device{}), expected)) << all.str();
      EXPECT_TRUE(bit_equal(added.tensor().to(Device{}), sum)) << all.str();
      EXPECT_TRUE(bit_equal(in.tensor().to(Device{}), expected)) << all.str();
      EXPECT_TRUE(y.intact() && added.intact() && in.intact());
    }
}

TEST(CudaRope, UnknownPositionsGiveNan) {
  COHORT_REQUIRE_GPU(device);
  const Tensor table = rope_table(8, rope_frequencies(16, kCudaTheta), 1, DType::kF32).to(device);
  const Tensor positions = ids({7, 8, -1, 0}).to(device);
  for (const DType dtype : kCudaTypes) {
    const Tensor x = random_tensor({4, 2, 16}, dtype, 1).to(device);
    Tensor y = Tensor::empty_like(x);
    rope({y, x, positions, table, RopeDirection::kForward});
    for (const int64_t t : {0, 1, 2, 3})
      for (const double v : y.select(0, t).to_vector<double>())
        EXPECT_EQ(std::isnan(v), t == 1 || t == 2);
  }
}

TEST(CudaRope, TokensDependOnThemselvesOnly) {
  COHORT_REQUIRE_GPU(device);
  const Tensor table = rope_table(100, rope_frequencies(64, kCudaTheta), 1, DType::kF32).to(device);
  for (const DType dtype : kCudaTypes) {
    const Tensor x = random_tensor({50, 4, 64}, dtype, 1).to(device);
    const Tensor positions = positions_for(50).to(device);
    Tensor all = Tensor::empty_like(x), one = Tensor::empty({1, 4, 64}, dtype, device);
    rope({all, x, positions, table, RopeDirection::kForward});
    rope({one, x.narrow(0, 37, 1), positions.narrow(0, 37, 1), table, RopeDirection::kForward});
    EXPECT_TRUE(bit_equal(one, all.narrow(0, 37, 1)));
  }
}

}  // namespace
}  // namespace cohort::kernels
