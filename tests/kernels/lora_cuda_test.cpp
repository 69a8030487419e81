// The input of LoRA's adapters on CUDA compared with the CPU's f64, the independence of its rows
// from their number, and its place between the kernels around it.
#include "kernels/lora.h"

#include "core/cuda.h"
#include "core/graph.h"
#include "kernels/cuda/accumulation_order.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

// [x | h], where h is to be written, among NaN.
class CudaRows {
 public:
  CudaRows(const Tensor& x, int64_t p)
      : all_(Shape{x.dim(0), x.dim(1) + p}, x.dtype(), x.device()), p_(p) {
    this->x().copy_(x);
  }
  Tensor x() { return all_.tensor().narrow(1, 0, all_.tensor().dim(1) - p_); }
  Tensor h() { return all_.tensor().narrow(1, all_.tensor().dim(1) - p_, p_); }
  bool intact() const { return all_.intact(); }

 private:
  Guarded all_;
  int64_t p_;
};

Tensor random_on(Device device, const Shape& shape, DType dtype, uint64_t seed) {
  Tensor t = Tensor::empty(shape, DType::kBF16, device);
  cuda::fill_for_comparison(t, seed);
  return t.to(dtype);
}

struct LoraSize {
  int64_t k, p;
};

TEST(CudaLoraInput, FollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const auto& [k, p] : {LoraSize{8, 64},
                               {64, 64},
                               {72, 128},
                               {100, 64},
                               {33, 64},
                               {576, 64},
                               {896, 192},
                               {1536, 64},
                               {4096, 128},
                               {4864, 64},
                               {14336, 64}})
      for (const int64_t rows : {1, 2, 15, 16, 17, 64, 65, 129, 512, 2100, 3000, 4100}) {
        if (rows * k > (int64_t{1} << 23)) continue;  // the CPU's f64 takes too long
        SCOPED_TRACE(str(rows, " x ", k, " to ", p, " in ", dtype_name(dtype)));
        const Tensor values = rounded_random({rows, k}, dtype, 1);
        const Tensor a = rounded_random({p, k}, dtype, 2);
        Tensor exact = Tensor::empty({rows, p}, DType::kF64);
        lora_input({.h = exact, .x = values, .a = a});
        const Tensor x = values.to(dtype).to(device);
        CudaRows in(x, p);
        Guarded copy(Shape{rows, p}, dtype, device),
            rows_of_a(a, dtype, device, Start::kAligned, NAN);
        Tensor h = in.h();
        lora_input({.h = h, .x = in.x(), .a = rows_of_a.tensor(), .copy = copy.tensor()});
        expect_close(h.clone(), exact, "h");
        EXPECT_TRUE(bit_equal(copy.tensor(), h.clone()));
        EXPECT_TRUE(bit_equal(in.x().clone(), x) && in.intact() && copy.intact());
        Tensor alone = Tensor::empty({rows, p}, dtype, device);
        lora_input({.h = alone, .x = x, .a = rows_of_a.tensor()});
        EXPECT_TRUE(bit_equal(alone, copy.tensor()));
      }
}

// All kernels of lora_input(): from a row to more than fill the device with the largest tiles, and
// those of GPUs without clusters.
TEST(CudaLoraInput, ARowHasTheSameBitsAmongAnyNumberOfRows) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const auto& [k, p] : {LoraSize{8, 64},
                               {64, 64},
                               {72, 128},
                               {100, 64},
                               {576, 64},
                               {896, 192},
                               {1536, 64},
                               {4096, 64},
                               {4096, 192},
                               {4864, 128},
                               {14336, 64}}) {
      const int64_t max_rows = k > 5000 || dtype == DType::kF32 ? 5000 : 20000;
      const Tensor x = random_on(device, {max_rows, k}, dtype, 1);
      const Tensor a = random_on(device, {p, k}, dtype, 2);
      Tensor all = Tensor::empty({max_rows, p}, dtype, device);
      lora_input({.h = all, .x = x, .a = a});
      for (const int64_t rows :
           {1,   2,   3,   8,    15,   16,   17,   31,   33,   64,   65,   100,  127,  128,
            129, 300, 512, 1000, 1024, 1025, 2048, 2100, 3072, 3073, 4096, 4097, 5000, 17000}) {
        if (rows > max_rows) continue;
        const int64_t begin = (max_rows - rows) / 2;
        CudaRows in(x.narrow(0, begin, rows), p);
        Tensor h = in.h();
        lora_input({.h = h, .x = in.x(), .a = a});
        ASSERT_TRUE(bit_equal(h.clone(), all.narrow(0, begin, rows)))
            << rows << " x " << k << " to " << p << " in " << dtype_name(dtype);
        ASSERT_TRUE(in.intact());
      }
      if (!cuda::has_lora_kernel({.h = all, .x = x, .a = a})) continue;
      // Older GPUs have no clusters; on a single multiprocessor none fits.
      using Limits = ::cohort::cuda::GpuLimit::Limits;
      for (const Limits& limits : {Limits{.compute_capability = 80}, {.multiprocessors = 1}}) {
        const ::cohort::cuda::GpuLimit limit(device, limits);
        for (const int64_t rows : {int64_t{300}, int64_t{5000}, max_rows}) {
          Tensor h = Tensor::empty({rows, p}, dtype, device);
          lora_input({.h = h, .x = x.narrow(0, 0, rows), .a = a});
          ASSERT_TRUE(bit_equal(h, all.narrow(0, 0, rows)))
              << rows << " x " << k << " to " << p << " in " << dtype_name(dtype) << ", limited";
        }
      }
    }
}

TEST(CudaLoraInput, HasAKernelForAlignedBf16Only) {
  COHORT_REQUIRE_GPU(device);
  const auto has = [&, device = device](DType dtype, int64_t k, int64_t p, int64_t stride) {
    const Tensor all = Tensor::zeros({3, stride}, dtype, device);
    const Tensor a = Tensor::zeros({p, k}, dtype, device), x = all.narrow(1, 0, k);
    Tensor h = all.narrow(1, k, p);
    return cuda::has_lora_kernel({.h = h, .x = x, .a = a});
  };
  EXPECT_TRUE(has(DType::kBF16, 896, 64, 960));
  EXPECT_TRUE(has(DType::kBF16, 72, 192, 264));
  EXPECT_FALSE(has(DType::kF32, 896, 64, 960));
  EXPECT_FALSE(has(DType::kBF16, 100, 64, 164));
  EXPECT_FALSE(has(DType::kBF16, 896, 64, 961));
  EXPECT_FALSE(has(DType::kBF16, 896, 32, 928));
}

TEST(CudaLoraInput, NoRowsMeanNoWork) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    Tensor h = Tensor::empty({0, 64}, dtype, device);
    lora_input({.h = h,
                .x = Tensor::empty({0, 64}, dtype, device),
                .a = Tensor::zeros({64, 64}, dtype, device)});
  }
}

// A norm writes x, lora_input() h, and the linear layer, which starts while lora_input() runs,
// reads both. Also inside a captured graph, and with the buffers overwritten in between.
TEST(CudaLoraInput, TheLayerBehindItSeesAllColumns) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t rows : {1, 16, 64, 300, 3000}) {
    const int64_t k = 896, p = 64, n = 1152;
    const Tensor from = random_on(device, {rows, k}, DType::kBF16, 1);
    const Tensor scale = random_on(device, {k}, DType::kBF16, 2);
    const Tensor a = random_on(device, {p, k}, DType::kBF16, 3);
    const Tensor w = random_on(device, {n, k + p}, DType::kBF16, 4);
    Tensor x = Tensor::empty({rows, k + p}, DType::kBF16, device), body = x.narrow(1, 0, k),
           h = x.narrow(1, k, p), rstd = Tensor::empty({rows}, DType::kF32, device);
    Tensor y = Tensor::empty({rows, n}, DType::kBF16, device), expected = y.clone(),
           got = y.clone();
    rms_norm_forward({body, rstd, from, scale, 1e-5});
    const Tensor reference_x = x.clone();
    Tensor reference_h = reference_x.narrow(1, k, p);
    lora_input({.h = reference_h, .x = reference_x.narrow(1, 0, k), .a = a});
    matmul({expected, reference_x, w, {.b = Transpose::kYes}});
    GraphRunner work(device, [&] {
      rms_norm_forward({body, rstd, from, scale, 1e-5});
      lora_input({.h = h, .x = body, .a = a});
      linear_forward({y, x, w, {}, p});
      got.copy_(y);
      x.fill_(NAN);
      y.fill_(NAN);
    });
    for (int i = 0; i < 50; ++i) {
      got.zero_();
      work.run();
      ASSERT_TRUE(bit_equal(got, expected)) << rows << " rows, run " << i;
    }
  }
}

TEST(CudaSelectAdapters, FollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t count : {1, 33, 700}) {
      std::vector<int32_t> rows;
      for (int64_t t = 0; t < count; ++t) rows.push_back(static_cast<int32_t>(t * 7 % 5) - 1);
      const Tensor at = Tensor::from(rows), table = Tensor::from(std::vector<int32_t>{2, 0, 1, 1});
      const Tensor values =
          random_tensor({count, 200}, DType::kF32, 3).to(DType::kBF16).to(DType::kF32);
      const Tensor wide = values.to(dtype).to(device).clone();
      Tensor h = wide.narrow(1, 8, 192), expected = values.narrow(1, 8, 192);
      select_adapters({h, 64, at.to(device), table.to(device)});
      select_adapters({expected, 64, at, table});
      EXPECT_EQ(wide.to_vector<float>(), values.to_vector<float>());
    }
}

// The layer begins to read x while the kernel that writes the tail runs, so the other columns must
// be complete by then. rms_norm_forward() lets the next kernel start before it has begun to write.
TEST(CudaLoraInput, ATailWrittenTooEarlyIsRefused) {
  COHORT_REQUIRE_GPU(device);
  const auto random = [&, device = device](const Shape& shape, uint64_t seed) {
    return random_tensor(shape, DType::kF32, seed).to(DType::kBF16).to(device);
  };
  for (const int64_t rows : {1, 40, 300}) {
    SCOPED_TRACE(rows);
    const Tensor xh = random({rows, 512 + 64}, 1), w = random({128, 512 + 64}, 2),
                 a = random({64, 512}, 3), gain = random({512}, 4), in = random({rows, 512}, 5);
    Tensor x = xh.narrow(1, 0, 512), h = xh.narrow(1, 512, 64), y = random({rows, 128}, 6),
           normed = Tensor::empty_like(in), rstd = Tensor::empty({rows}, DType::kF32, device);
    rms_norm_forward({.y = normed, .rstd = rstd, .x = in, .w = gain, .eps = 1e-6});
    EXPECT_THROW_WITH(linear_forward({y, xh, w, {}, 64}), Error, "the tail of x");
    Tensor none = y.narrow(0, 0, 0);  // without rows nothing has been written
    linear_forward({none, xh.narrow(0, 0, 0), w, {}, 64});
    lora_input({.h = h, .x = x, .a = a});
    linear_forward({y, xh, w, {}, 64});
    rms_norm_forward({.y = normed, .rstd = rstd, .x = in, .w = gain, .eps = 1e-6});
    h.zero_();
    linear_forward({y, xh, w, {}, 64});
    synchronize(device);
  }
}

}  // namespace
}  // namespace cohort::kernels
