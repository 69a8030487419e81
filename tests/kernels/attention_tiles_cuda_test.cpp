// The generic attention kernels with the tiles for 99 KB of shared memory have the bits of those
// with the large tiles.
#include "core/cuda.h"
#include "tests/kernels/attention_paged_cases.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

using kernels::Mask;
using kernels::test::kCudaTypes;

constexpr int kLarge = 80, kSmall = 86;  // compute capabilities with 163 and 99 KB

struct Results {
  AttentionOutput out;
  AttentionGrads grads;
  Tensor paged;
};

Results run(const AttentionCase& c, Device device, int compute_capability) {
  const cuda::GpuLimit limit(device, {.compute_capability = compute_capability});
  const AttentionCase on = on_device(c, device);
  Results r{.out = run_forward(on)};
  r.grads = run_backward(on, r.out);
  Rng rng(3, rng_stream(kTestPurpose, 9));
  if (c.shape.p == 0 && c.shape.mask == Mask::kCausal)
    r.paged = run_in_random_steps(c, 16, rng, device);
  return r;
}

void expect_equal_bits(const AttentionCase& c, Device device) {
  const Results large = run(c, device, kLarge), small = run(c, device, kSmall);
  EXPECT_TRUE(bit_equal(large.out.o.to(Device{}), small.out.o.to(Device{})));
  EXPECT_TRUE(bit_equal(large.out.lse.to(Device{}), small.out.lse.to(Device{})));
  for (const auto field : {&AttentionGrads::dq, &AttentionGrads::dk, &AttentionGrads::dv})
    EXPECT_TRUE(bit_equal((large.grads.*field).to(Device{}), (small.grads.*field).to(Device{})));
  if (!large.paged.defined()) return;
  EXPECT_TRUE(bit_equal(large.paged, small.paged));
  EXPECT_TRUE(bit_equal(small.paged, small.out.o.to(Device{})));
}

TEST(CudaAttentionTiles, SmallTilesHaveTheBitsOfLargeOnes) {
  COHORT_REQUIRE_GPU(device);
  if (cuda::gpu_properties(device).shared_memory < 163 << 10)
    GTEST_SKIP() << "the large tiles need 163 KB of shared memory per block";
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 72, 128, 192, 256})
      for (const Mask mask : {Mask::kCausal, Mask::kFull})
        for (const int64_t window : {0, 90})
          for (const double p : {0.0, 0.2}) {
            if (mask == Mask::kFull && window > 0) continue;
            SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim, mask == Mask::kFull ? ", full" : "",
                             ", window ", window, ", dropout ", p));
            expect_equal_bits(make_case({.heads = 4,
                                         .kv_heads = 2,
                                         .dim = dim,
                                         .dtype = dtype,
                                         .mask = mask,
                                         .p = p,
                                         .window = window},
                                        {{1, 1}, {2, 450}, {3, 30}, {4, 257}}),
                              device);
          }
}

TEST(CudaAttentionTiles, SmallTilesHaveTheBitsOfLargeOnesAcrossChunks) {
  COHORT_REQUIRE_GPU(device);
  if (cuda::gpu_properties(device).shared_memory < 163 << 10)
    GTEST_SKIP() << "the large tiles need 163 KB of shared memory per block";
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 128, 256}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim));
      expect_equal_bits(make_case({.heads = 2, .kv_heads = 1, .dim = dim, .dtype = dtype},
                                  {{1, 2 * kernels::kAttentionChunk + 70}, {2, 300}}),
                        device);
    }
}

TEST(CudaAttentionTiles, ALimitLowersWhatTheDriverReports) {
  COHORT_REQUIRE_GPU(device);
  const int64_t before = cuda::gpu_properties(device).shared_memory;
  {
    const cuda::GpuLimit limit(device, {.compute_capability = 86});
    EXPECT_EQ(cuda::gpu_properties(device).shared_memory, 99 << 10);
    EXPECT_LE(cuda::gpu_properties(device).compute_capability, 86);
    const cuda::GpuLimit more(device, {.compute_capability = 100});
    EXPECT_EQ(cuda::gpu_properties(device).shared_memory, 99 << 10);
  }
  EXPECT_EQ(cuda::gpu_properties(device).shared_memory, before);
}

}  // namespace
}  // namespace cohort::test
