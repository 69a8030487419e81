// The gradients of LoRA's outputs on CUDA compared with the CPU's f64, with guarded outputs and
// non-finite inputs.
#include <limits>

#include "core/cuda.h"
#include "core/sizes.h"
#include "kernels/lora.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

// Inputs as f64 on the CPU: modules of these widths, behind `gap` columns of no module each.
struct LoraCase {
  int64_t tokens, rank;
  std::vector<int64_t> widths;
  int64_t gap = 0;

  std::string str() const {
    std::string text = cohort::str(tokens, " rows, rank ", rank, ", modules");
    for (const int64_t width : widths) text += cohort::str(" ", width);
    return text;
  }
};
struct Values {
  std::vector<AdapterSlice> modules;
  Tensor dy, h, weight, db;  // weight: [w | s B]
  int64_t columns;           // P

  Tensor sb(const Tensor& weight) const {
    return weight.narrow(1, weight.dim(1) - columns, columns);
  }
};

Values values_of(const LoraCase& c, DType dtype) {
  constexpr int64_t kInputs = 8;
  Values in;
  int64_t n = 0, rows = 0;
  for (const int64_t width : c.widths) {
    n += c.gap;
    in.modules.push_back({n, width});
    n += width;
    rows += width;
  }
  n = (n + 7) / 8 * 8;
  in.columns = (c.rank * static_cast<int64_t>(c.widths.size()) + 63) / 64 * 64;
  in.dy = rounded_random({c.tokens, n}, dtype, 1);
  in.h = rounded_random({c.tokens, in.columns}, dtype, 2);
  in.db = rounded_random({rows, c.rank}, DType::kF32, 3);
  in.weight = Tensor::zeros({n, kInputs + in.columns}, DType::kF64);
  int64_t column = kInputs;
  for (const AdapterSlice& module : in.modules) {
    in.weight.narrow(0, module.row, module.rows)
        .narrow(1, column, c.rank)
        .copy_(rounded_random({module.rows, c.rank}, dtype, static_cast<uint64_t>(column)));
    column += c.rank;
  }
  return in;
}

struct Gradients {
  Tensor dh, db;
};
// By the device of the inputs; db holds old values.
Gradients gradients(const Values& in, const Values& like, Grad mode) {
  Gradients out{Tensor::empty({in.dy.dim(0), in.columns}, in.dy.dtype(), in.dy.device()),
                like.db.clone().to(accumulate_dtype(in.dy.dtype())).to(in.dy.device())};
  lora_output_gradients({.dh = out.dh,
                         .db = {out.db, mode},
                         .dy = in.dy,
                         .h = in.h,
                         .sb = in.sb(in.weight),
                         .modules = in.modules,
                         .scale = 0.75});
  return out;
}
Values on(const Values& in, DType dtype, Device device) {
  const auto move = [&](const Tensor& t) { return t.to(dtype).to(device); };
  return {in.modules, move(in.dy), move(in.h), move(in.weight), in.db, in.columns};
}

const std::vector<LoraCase>& cases() {
  static const std::vector<LoraCase> all = {{1, 8, {8}},
                                            {15, 16, {24, 72}, 8},
                                            {64, 24, {896}},
                                            {129, 32, {200, 64, 72}, 16},
                                            {129, 16, {896, 128, 128}},
                                            {300, 64, {1000, 136}, 8},
                                            {1000, 16, {4096, 1024, 1024}},
                                            {1000, 32, {1536, 256}},
                                            {1000, 64, {1024, 512}},
                                            {3000, 8, {256, 24, 24, 8}, 8},
                                            {3000, 16, {1024}},
                                            {129, 16, {14336, 14336}},
                                            {3000, 64, {512}},
                                            {20000, 16, {128}},
                                            // Without a kernel.
                                            {65, 72, {128}},
                                            {65, 12, {128, 64}},
                                            {65, 16, {8, 8, 8, 8, 8}},
                                            {65, 16, {20, 20}}};
  return all;
}

TEST(CudaLoraBackward, FollowsTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const LoraCase& c : cases()) {
      if (dtype == DType::kF32 && c.tokens > 1000) continue;
      const Values exact_in = values_of(c, dtype), in = on(exact_in, dtype, device);
      for (const Grad mode : {Grad::kOverwrite, Grad::kAccumulate}) {
        SCOPED_TRACE(str(c.str(), " in ", dtype_name(dtype)));
        const Gradients exact = gradients(exact_in, exact_in, mode);
        Guarded dh(Shape{c.tokens, in.columns}, dtype, device);
        // Old values are not read if they are overwritten.
        const Tensor old =
            mode == Grad::kAccumulate ? in.db : Tensor::full(in.db.shape(), NAN, DType::kF64);
        Guarded db(old, DType::kF32, device);
        Guarded dy(exact_in.dy, dtype, device, Start::kAligned, NAN);
        Guarded h(exact_in.h, dtype, device, Start::kAligned, NAN);
        lora_output_gradients({.dh = dh.tensor(),
                               .db = {db.tensor(), mode},
                               .dy = dy.tensor(),
                               .h = h.tensor(),
                               .sb = in.sb(in.weight),
                               .modules = in.modules,
                               .scale = 0.75});
        expect_close(dh.tensor(), exact.dh, "dh");
        expect_close(db.tensor(), exact.db, "db");
        EXPECT_TRUE(dh.intact() && db.intact());
        const int64_t used = c.rank * static_cast<int64_t>(c.widths.size());
        if (used < in.columns) {
          const Tensor padding = dh.tensor().narrow(1, used, in.columns - used).clone();
          EXPECT_EQ(dot(padding, padding), 0);
        }
      }
    }
}

// Blocks that lora_output_gradients() does not choose for so few columns, in pipelines of several
// rounds.
TEST(CudaLoraBackward, BlocksOfAllSizesFollowTheCpu) {
  COHORT_REQUIRE_GPU(device);
  constexpr DType kType = DType::kBF16;
  for (const LoraCase& c :
       {LoraCase{3000, 16, {1024, 136}}, {3000, 24, {512}}, {3000, 64, {520, 64}, 8}}) {
    const Values exact_in = values_of(c, kType), in = on(exact_in, kType, device);
    const Gradients exact = gradients(exact_in, exact_in, Grad::kAccumulate);
    const Tensor sb = in.sb(in.weight);
    for (const int64_t boxes : {1, 3, 7, 8})
      for (const int64_t tiles : {1, 2, 3, 11, 24}) {
        SCOPED_TRACE(str(c.str(), ", ", boxes, " boxes, ", tiles, " tiles"));
        Gradients got{Tensor::full(exact.dh.shape(), NAN, kType, device),
                      in.db.to(DType::kF32).to(device)};
        const LoraOutputGradients args{.dh = got.dh,
                                       .db = {got.db, Grad::kAccumulate},
                                       .dy = in.dy,
                                       .h = in.h,
                                       .sb = sb,
                                       .modules = in.modules,
                                       .scale = 0.75};
        if (!cuda::has_lora_kernel(args)) GTEST_SKIP();
        cuda::LoraBlocks blocks{.boxes = boxes, .tiles = tiles};
        for (const int64_t width : c.widths) blocks.strips += ceil_div(ceil_div(width, 64), boxes);
        blocks.ranges = ceil_div(ceil_div(c.tokens, 128), tiles);
        blocks.dh = Tensor::full({blocks.strips, c.tokens, c.rank}, NAN, DType::kF32, device);
        blocks.db = Tensor::full({blocks.ranges, in.db.dim(0), c.rank}, NAN, DType::kF32, device);
        cuda::lora_output_gradients(args, blocks);
        expect_close(got.dh, exact.dh, "dh");
        expect_close(got.db, exact.db, "db");
      }
  }
}

TEST(CudaLoraBackward, HasTheSameBitsInEveryRun) {
  COHORT_REQUIRE_GPU(device);
  for (const LoraCase& c : cases()) {
    const Values in = on(values_of(c, DType::kBF16), DType::kBF16, device);
    expect_reproducible([&]() -> std::vector<Tensor> {
      const Gradients got = gradients(in, in, Grad::kAccumulate);
      return {got.dh, got.db};
    });
  }
}

// A non-finite element of dy reaches a row of dh, there the columns of its module, and a row of dB.
TEST(CudaLoraBackward, NonFiniteValuesStayInTheirRows) {
  COHORT_REQUIRE_GPU(device);
  for (const double value : {double{NAN}, std::numeric_limits<double>::infinity()}) {
    const LoraCase c{300, 16, {72, 200}};
    Values in = values_of(c, DType::kBF16);
    constexpr int64_t kToken = 200, kColumn = 75;  // in the second module
    in.dy.narrow(0, kToken, 1).narrow(1, kColumn, 1).fill_(value);
    const Values bf16 = on(in, DType::kBF16, device);
    const Gradients got = gradients(bf16, in, Grad::kOverwrite);
    const bool has_kernel = ::cohort::cuda::gpu_properties(device).compute_capability == 90;
    const auto dh = got.dh.to(DType::kF64).to(Device{}).to_vector<double>();
    for (int64_t i = 0; i < got.dh.numel(); ++i) {
      const int64_t module = i % in.columns / c.rank;
      const bool in_row = i / in.columns == kToken;
      if (in_row && module == 1) {
        EXPECT_FALSE(std::isfinite(dh[static_cast<size_t>(i)])) << i;
      }
      if (!in_row || (has_kernel && module != 1)) {
        EXPECT_TRUE(std::isfinite(dh[static_cast<size_t>(i)])) << i;
      }
    }
    const auto db = got.db.to(Device{}).to(DType::kF64).to_vector<double>();
    for (int64_t i = 0; i < got.db.numel(); ++i)
      EXPECT_EQ(std::isfinite(db[static_cast<size_t>(i)]), i / c.rank != kColumn) << i;
  }
}

TEST(CudaLoraBackward, HasAKernelForAlignedBf16OfModerateRank) {
  COHORT_REQUIRE_GPU(device);
  if (::cohort::cuda::gpu_properties(device).compute_capability != 90) GTEST_SKIP();
  for (const LoraCase& c : cases()) {
    const Values in = on(values_of(c, DType::kBF16), DType::kBF16, device);
    const Tensor sb = in.sb(in.weight);
    Tensor dh = Tensor::empty({c.tokens, in.columns}, DType::kBF16, device);
    Tensor db = in.db.to(DType::kF32).to(device);
    const bool expected = c.rank <= 64 && c.rank % 8 == 0 && c.widths.size() <= 4 &&
                          (c.widths.size() == 1 || c.widths[0] % 8 == 0);
    EXPECT_EQ(cuda::has_lora_kernel(
                  {.dh = dh, .db = {db}, .dy = in.dy, .h = in.h, .sb = sb, .modules = in.modules}),
              expected)
        << c.str();
  }
}

}  // namespace
}  // namespace cohort::kernels
