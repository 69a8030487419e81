// Fused head on CUDA compared with the CPU's f64 on the same rounded inputs.
#include "kernels/head.h"

#include "core/rng.h"
#include "kernels/matmul.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/head_gradients.h"

namespace cohort::kernels {
namespace {

using namespace test;

// Inputs representable in `dtype` (gradients of statistics: in f32), as f64 on the CPU.
struct CudaHeadCase {
  Tensor x, w, targets, dlogprob, dentropy;
  HeadDesc desc;
  CudaHeadCase(int64_t tokens, int64_t channels, int64_t vocab, DType dtype, double temperature = 1)
      : x(rounded_random({tokens, channels}, dtype, 1)),
        w(rounded_random({vocab, channels}, dtype, 2, 0.5)),
        targets(Tensor::empty({tokens}, DType::kI32)),
        dlogprob(rounded_random({tokens}, DType::kF32, 3)),
        dentropy(rounded_random({tokens}, DType::kF32, 4)),
        desc{.temperature = temperature} {
    Rng rng(5, rng_stream(kTestPurpose));
    for (int64_t t = 0; t < tokens; ++t)
      targets.data<int32_t>()[t] = static_cast<int32_t>(rng.below(vocab));
  }
  int64_t tokens() const { return x.dim(0); }
  int64_t vocab() const { return w.dim(0); }

  CudaHeadCase to(DType dtype, Device device) const {
    CudaHeadCase c = *this;
    for (Tensor* t : {&c.x, &c.w}) *t = t->to(dtype).to(device);
    for (Tensor* t : {&c.dlogprob, &c.dentropy}) *t = t->to(accumulate_dtype(dtype)).to(device);
    c.targets = targets.to(device);
    return c;
  }
  CudaHeadCase narrow(int64_t first, int64_t count) const {
    CudaHeadCase c = *this;
    for (Tensor* t : {&c.x, &c.targets, &c.dlogprob, &c.dentropy}) *t = t->narrow(0, first, count);
    return c;
  }
};

struct CudaHeadForward {
  Tensor logprob, entropy, lse;
};
CudaHeadForward forward(const CudaHeadCase& c, Start start = Start::kAligned) {
  const DType dtype = accumulate_dtype(c.x.dtype());
  const Shape shape{c.tokens()};
  Guarded logprob(shape, dtype, c.x.device(), start), entropy(shape, dtype, c.x.device(), start);
  Guarded lse(shape, dtype, c.x.device(), start);
  head_logprob_forward(
      {logprob.tensor(), entropy.tensor(), lse.tensor(), {c.x, c.w, c.targets, c.desc}});
  EXPECT_TRUE(logprob.intact() && entropy.intact() && lse.intact());
  return {logprob.tensor(), entropy.tensor(), lse.tensor()};
}

struct CudaHeadBackward {
  Tensor dx, dw;
};
CudaHeadBackward backward(const CudaHeadCase& c, const Tensor& dentropy) {
  const CudaHeadForward f = forward(c);
  Guarded dx(c.x.shape(), c.x.dtype(), c.x.device());
  Guarded dw(c.w.shape(), accumulate_dtype(c.x.dtype()), c.x.device());
  head_logprob_backward({{dx.tensor()},
                         {dw.tensor()},
                         c.dlogprob,
                         dentropy,
                         {c.x, c.w, c.targets, c.desc},
                         f.lse,
                         f.entropy});
  EXPECT_TRUE(dx.intact() && dw.intact());
  return {dx.tensor(), dw.tensor()};
}

// Gradients of an f64 case with dz rounded to bf16, as in the contract.
CudaHeadBackward rounded_backward(const CudaHeadCase& c) {
  const CudaHeadForward f = forward(c);
  Tensor dz = Tensor::empty({c.tokens(), c.vocab()}, DType::kF64);
  matmul({dz, c.x, c.w, {.b = Transpose::kYes}});
  for (int64_t t = 0; t < c.tokens(); ++t) {
    const int32_t target = c.targets.data<int32_t>()[t];
    double* z = dz.data<double>() + t * c.vocab();
    for (int64_t v = 0; v < c.vocab(); ++v) {
      const double log_p = z[v] / c.desc.temperature - f.lse.data<double>()[t];
      const double curve = c.dentropy.data<double>()[t] * (log_p + f.entropy.data<double>()[t]);
      const double one = v == target ? c.dlogprob.data<double>()[t] : 0;
      z[v] = (one - std::exp(log_p) * (c.dlogprob.data<double>()[t] + curve)) / c.desc.temperature;
    }
  }
  dz = dz.to(DType::kBF16).to(DType::kF64);
  CudaHeadBackward out{Tensor::empty_like(c.x), Tensor::empty_like(c.w)};
  matmul({out.dx, dz, c.w});
  matmul({out.dw, dz, c.x, {.a = Transpose::kYes}});
  return out;
}

struct CudaHeadSize {
  int64_t tokens, channels, vocab;
};
// Vocabularies of one token, less than a pack, odd, one tile of a block, and several tiles.
const CudaHeadSize kCudaHeadSizes[] = {{0, 8, 5},    {1, 8, 1},     {3, 16, 2},    {300, 8, 65},
                                       {5, 40, 520}, {5, 40, 1031}, {9, 16, 4104}, {3, 16, 20001}};

TEST(CudaHead, ForwardMatchesTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const CudaHeadSize& s : kCudaHeadSizes)
      for (const double temperature : {1.0, 0.7})
        for (const Start start : kStarts) {
          const CudaHeadCase c(s.tokens, s.channels, s.vocab, dtype, temperature);
          const CudaHeadForward expected = forward(c), got = forward(c.to(dtype, device), start);
          // A logprob is a difference of two values of the size of lse, hence the absolute
          // tolerance.
          for (const auto field :
               {&CudaHeadForward::logprob, &CudaHeadForward::entropy, &CudaHeadForward::lse}) {
            const auto a = (got.*field).to_vector<double>();
            const auto b = (expected.*field).to_vector<double>();
            for (size_t t = 0; t < a.size(); ++t)
              EXPECT_NEAR(a[t], b[t], kF32Tolerance * (1 + std::fabs(b[t]))) << s.vocab;
          }
        }
}

TEST(CudaHead, BackwardMatchesTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const CudaHeadSize& s : kCudaHeadSizes) {
      if (s.tokens == 0) continue;
      const CudaHeadCase c(s.tokens, s.channels, s.vocab, dtype, 0.8);
      const CudaHeadBackward exact = backward(c, c.dentropy);
      const CudaHeadCase there = c.to(dtype, device);
      const CudaHeadBackward got = backward(there, there.dentropy);
      double allowed_x = kF32Tolerance, allowed_w = kF32Tolerance;
      if (dtype == DType::kBF16) {
        const CudaHeadBackward rounded = rounded_backward(c);
        allowed_x += kRoundingSlack * relative_error(rounded.dx.to(DType::kBF16), exact.dx);
        allowed_w += kRoundingSlack * relative_error(rounded.dw, exact.dw);
      }
      EXPECT_LE(relative_error(got.dx, exact.dx), allowed_x) << s.vocab;
      EXPECT_LE(relative_error(got.dw, exact.dw), allowed_w) << s.vocab;
    }
}

// Also with buffered bf16 gradients of logits, and with few of them at the end.
TEST(CudaHead, FusedGradientsMatchTheBackward) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t tokens : {0, 1, 300, 4096, 9000}) {
      CudaHeadCase c = CudaHeadCase(tokens, 24, 130, dtype, 0.7).to(dtype, device);
      c.desc.chunk_tokens = 1024;
      const CudaHeadBackward a = backward(c, {});
      const HeadLossOutputs b = run_fused_head_loss(c.x, c.w, c.targets, c.dlogprob, c.desc);
      const CudaHeadForward f = forward(c);
      EXPECT_TRUE(bit_equal(b.logprob.to(Device{}), f.logprob.to(Device{}))) << tokens;
      EXPECT_TRUE(bit_equal(b.lse.to(Device{}), f.lse.to(Device{}))) << tokens;
      EXPECT_TRUE(bit_equal(a.dx.to(Device{}), b.dx.to(Device{}))) << tokens;
      EXPECT_TRUE(bit_equal(a.dw.to(Device{}), b.dw.to(Device{}))) << tokens;
      if (tokens == 0) continue;
      const CudaHeadBackward exact = backward(c.to(DType::kF32, Device{}), {});
      EXPECT_LE(relative_error(b.dw, exact.dw), dtype == DType::kF32 ? 1e-5 : 5e-3) << tokens;
      EXPECT_LE(relative_error(b.dx, exact.dx), dtype == DType::kF32 ? 1e-5 : 1e-2) << tokens;
    }
}

// Rows distributed over a cluster of blocks, with packs per thread by vocabulary: bitwise equal
// log-probs, gradients within their rounding.
TEST(CudaHead, ClusterRowsGiveTheSameLogProbs) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t vocab :
       {4, 132, 2052, 50304, 65536, 65540, 151936, 163844, 248320, 262144, 262148})
    for (const double temperature : {1.0, 0.7}) {
      // Includes more tokens than concurrent clusters.
      const int64_t tokens = vocab < 100'000 ? 150 : 37;
      const CudaHeadCase c =
          CudaHeadCase(tokens, 16, vocab, DType::kBF16, temperature).to(DType::kBF16, device);
      const CudaHeadForward f = forward(c);
      const HeadLossOutputs got = run_fused_head_loss(c.x, c.w, c.targets, c.dlogprob, c.desc);
      EXPECT_TRUE(bit_equal(got.logprob.to(Device{}), f.logprob.to(Device{}))) << vocab;
      EXPECT_TRUE(bit_equal(got.entropy.to(Device{}), f.entropy.to(Device{}))) << vocab;
      EXPECT_TRUE(bit_equal(got.lse.to(Device{}), f.lse.to(Device{}))) << vocab;
      const CudaHeadBackward exact = backward(c.to(DType::kF32, Device{}), {});
      EXPECT_LE(relative_error(got.dw, exact.dw), 5e-3) << vocab;
      EXPECT_LE(relative_error(got.dx, exact.dx), 1e-2) << vocab;
      // Accumulated.
      Tensor dx = Tensor::full(c.x.shape(), 2, DType::kBF16, device);
      Tensor dw = Tensor::full(c.w.shape(), 3, DType::kF32, device);
      Tensor logprob = Tensor::empty({tokens}, DType::kF32, device),
             entropy = Tensor::empty_like(logprob), lse = Tensor::empty_like(logprob);
      const HeadLossGradients gradients{.dx = {dx, Grad::kAccumulate},
                                        .dw = {dw, Grad::kAccumulate},
                                        .dlogprob = c.dlogprob,
                                        .set_dlogprob = {}};
      head_logprob_forward({logprob, entropy, lse, {c.x, c.w, c.targets, c.desc}, &gradients});
      const auto plus = [](const Tensor& t, double by) {
        std::vector<double> values = t.to_vector<double>();
        for (double& v : values) v += by;
        return Tensor::from(values, t.shape());
      };
      EXPECT_LE(relative_error(dw, plus(exact.dw, 3)), 5e-3) << vocab;
      EXPECT_LE(relative_error(dx, plus(exact.dx, 2)), 1e-2) << vocab;
    }
}

// A matrix with zero rows up to a multiple of 64, as a model's head has: the CPU's results without
// padding, and gradients of exactly zero for it. In bf16 a cluster processes rows of any length.
TEST(CudaHead, PaddingOfTheMatrixTakesNoPart) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t vocab : {1, 7, 61, 64, 65, 1000, 50257}) {
      const int64_t tokens = vocab < 50000 ? 300 : 37;
      const CudaHeadCase c(tokens, 16, vocab, dtype, 0.7);
      CudaHeadCase there = c.to(dtype, device);
      there.w = padded(there.w, 0, head_rows(vocab, device), 0);
      EXPECT_EQ(has_unit_gradients(there.w),
                dtype == DType::kBF16 && has_unit_gradients(Tensor::empty({64, 8}, dtype, device)));
      const CudaHeadForward expected = forward(c), plain = forward(there);
      const CudaHeadBackward exact = backward(c, {});
      const HeadLossOutputs got =
          run_fused_head_loss(there.x, there.w, there.targets, there.dlogprob, there.desc);
      EXPECT_TRUE(bit_equal(got.logprob.to(Device{}), plain.logprob.to(Device{}))) << vocab;
      EXPECT_TRUE(bit_equal(got.entropy.to(Device{}), plain.entropy.to(Device{}))) << vocab;
      EXPECT_TRUE(bit_equal(got.lse.to(Device{}), plain.lse.to(Device{}))) << vocab;
      for (const auto& [a, b] : {std::pair{&got.logprob, &expected.logprob},
                                 {&got.entropy, &expected.entropy},
                                 {&got.lse, &expected.lse}}) {
        const auto x = a->to_vector<double>(), y = b->to_vector<double>();
        for (size_t t = 0; t < x.size(); ++t)
          EXPECT_NEAR(x[t], y[t], kF32Tolerance * (1 + std::fabs(y[t]))) << vocab;
      }
      EXPECT_TRUE(padding_is(got.dw, 0, 0)) << vocab;
      if (vocab == 1) continue;  // the gradients are rounding alone
      EXPECT_LE(relative_error(got.dw, exact.dw), dtype == DType::kF32 ? 1e-5 : 5e-3) << vocab;
      EXPECT_LE(relative_error(got.dx, exact.dx), dtype == DType::kF32 ? 1e-5 : 1e-2) << vocab;
    }
}

// The row kernels use nothing after the vocabulary, whatever is there, and write at most zeros.
TEST(CudaHead, RowOpsDoNotUseThePaddingOfLogits) {
  COHORT_REQUIRE_GPU(device);
  const bool cluster = has_unit_gradients(Tensor::empty({64, 8}, DType::kBF16, device));
  constexpr int64_t kTokens = 150;
  for (const int64_t vocab : {1, 7, 61, 64, 65, 1000, 50257})
    for (const double poison : {double{NAN}, double{INFINITY}}) {
      const CudaHeadCase c =
          CudaHeadCase(kTokens, 8, vocab, DType::kF32, 0.7).to(DType::kF32, device);
      const Tensor logits = random_tensor({kTokens, vocab}, DType::kF32, 7, 3).to(device);
      const int64_t size = head_rows(vocab, device) + 64;
      const auto run = [&](Tensor z, Tensor dz, Tensor unit) {
        Tensor logprob = Tensor::empty({kTokens}, DType::kF32, device),
               entropy = Tensor::empty_like(logprob), lse = Tensor::empty_like(logprob);
        const HeadStatistics statistics{logprob, entropy, lse, z, c.targets, 0, 0.7};
        head_statistics(statistics);
        std::vector<Tensor> out{logprob.clone(), entropy.clone(), lse.clone()};
        if (unit.defined()) {
          for (Tensor* t : {&logprob, &entropy, &lse}) t->fill_(NAN);
          head_statistics({logprob, entropy, lse, z, c.targets, 0, 0.7, unit});
          for (size_t i = 0; i < 3; ++i)
            EXPECT_TRUE(
                bit_equal(std::array{logprob, entropy, lse}[i].to(Device{}), out[i].to(Device{})))
                << vocab;
        }
        head_logit_gradients({dz, z, c.dlogprob, c.dentropy, lse, entropy, c.targets, 0, 0.7});
        head_logit_gradients({z, z, c.dlogprob, c.dentropy, lse, entropy, c.targets, 0, 0.7});
        out.insert(out.end(), {z, dz});
        for (Tensor& t : out) t = t.contiguous().to(Device{});
        return out;
      };
      const auto bf16 = [&](double padding) {
        return padded(Tensor::full({kTokens, vocab}, 5, DType::kBF16, device), 1, size, padding);
      };
      const Tensor wide = padded(logits, 1, size, poison), dz = bf16(poison);
      const auto expected = run(logits.clone(), bf16(0).contiguous(), {}),
                 got = run(wide, dz, cluster ? bf16(0) : Tensor());
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(bit_equal(got[i], expected[i])) << vocab << " output " << i;
      EXPECT_TRUE(padding_is(wide, 1, poison) && padding_is(dz, 1, poison)) << vocab;
      if (!cluster) continue;
      // Unit gradients are those of a log-prob's gradient of 1, up to the rounding of each.
      const Tensor z = padded(logits, 1, size, poison), unit = bf16(0);
      Tensor ones = Tensor::full({kTokens}, 1, DType::kF32, device), d = bf16(0);
      Tensor logprob = Tensor::empty_like(ones), entropy = Tensor::empty_like(ones),
             lse = Tensor::empty_like(ones);
      head_statistics({logprob, entropy, lse, z, c.targets, 0, 0.7, unit});
      head_logit_gradients({d, z, ones, {}, lse, entropy, c.targets, 0, 0.7});
      EXPECT_TRUE(padding_is(unit, 1, 0)) << vocab;
      if (vocab > 1) {
        EXPECT_LE(relative_error(unit, d), 1e-3) << vocab;
      }
    }
}

// Excluded, infinite and NaN logits, in rows processed by a cluster and in other rows.
TEST(CudaHead, NonFiniteLogitsGiveTheSameFusedStatistics) {
  COHORT_REQUIRE_GPU(device);
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const double odd : {-kInf, kInf, std::numeric_limits<double>::quiet_NaN()}) {
    CudaHeadCase c(5, 8, 4104, DType::kBF16);
    for (const int64_t v : {0, 7, 1000, 4103}) c.w.data<double>()[v * 8 + 3] = odd;
    c.targets = ids({3, 7, -1, 4104, 4103});
    c = c.to(DType::kBF16, device);
    const CudaHeadForward f = forward(c);
    const HeadLossOutputs got = run_fused_head_loss(c.x, c.w, c.targets, c.dlogprob, c.desc);
    EXPECT_TRUE(bit_equal(got.logprob.to(Device{}), f.logprob.to(Device{}))) << odd;
    EXPECT_TRUE(bit_equal(got.entropy.to(Device{}), f.entropy.to(Device{}))) << odd;
    EXPECT_TRUE(bit_equal(got.lse.to(Device{}), f.lse.to(Device{}))) << odd;
  }
}

TEST(CudaHead, BackwardAccumulatesAndSkips) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    CudaHeadCase c = CudaHeadCase(300, 16, 130, dtype).to(dtype, device);
    c.desc.chunk_tokens = 128;
    const CudaHeadBackward plain = backward(c, Tensor());
    const CudaHeadForward f = forward(c);
    Tensor dx = Tensor::full(c.x.shape(), 2, dtype).to(device);
    Tensor dw = Tensor::full(c.w.shape(), 3, DType::kF32).to(device);
    head_logprob_backward({{dx, Grad::kAccumulate},
                           {dw, Grad::kAccumulate},
                           c.dlogprob,
                           {},
                           {c.x, c.w, c.targets, c.desc},
                           f.lse,
                           f.entropy});
    const auto plus = [](const Tensor& t, double by) {
      std::vector<double> values = t.to_vector<double>();
      for (double& v : values) v += by;
      return Tensor::from(values, t.shape());
    };
    // `plain` is itself rounded, so bf16 differs by two roundings to 8 bits.
    EXPECT_LE(relative_error(dx, plus(plain.dx, 2)), dtype == DType::kF32 ? 1e-6 : 8e-3);
    EXPECT_LE(relative_error(dw, plus(plain.dw, 3)), 1e-6);
    // A gradient computed alone has the same bits.
    Tensor alone = Tensor::empty_like(c.x), alone_w = Tensor::empty_like(dw);
    head_logprob_backward(
        {{alone}, {none()}, c.dlogprob, {}, {c.x, c.w, c.targets, c.desc}, f.lse, f.entropy});
    head_logprob_backward(
        {{none()}, {alone_w}, c.dlogprob, {}, {c.x, c.w, c.targets, c.desc}, f.lse, f.entropy});
    EXPECT_TRUE(bit_equal(alone.to(Device{}), plain.dx.to(Device{})));
    EXPECT_TRUE(bit_equal(alone_w.to(Device{}), plain.dw.to(Device{})));
  }
}

TEST(CudaHead, NoTokensGiveNoGradient) {
  COHORT_REQUIRE_GPU(device);
  const CudaHeadCase c = CudaHeadCase(0, 8, 5, DType::kBF16).to(DType::kBF16, device);
  const CudaHeadBackward b = backward(c, c.dentropy);
  for (const double g : b.dw.to_vector<double>()) EXPECT_EQ(g, 0);
}

// dx may use split-K over the vocabulary, so its bits may depend on the batch.
TEST(CudaHead, LogProbsDependNeitherOnTheBatchNorOnTheChunks) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t vocab : {136, 1031}) {  // rows aligned to 16 bytes, and not
      const CudaHeadCase all = CudaHeadCase(300, 40, vocab, dtype).to(dtype, device);
      const CudaHeadForward f = forward(all);
      const CudaHeadBackward b = backward(all, all.dentropy);
      for (const int64_t chunk : {0, 128, 256})
        for (const auto& [first, count] : {std::pair{0, 300}, {0, 1}, {17, 40}, {250, 50}}) {
          CudaHeadCase part = all.narrow(first, count);
          part.desc.chunk_tokens = chunk;
          const CudaHeadForward g = forward(part);
          for (const auto field :
               {&CudaHeadForward::logprob, &CudaHeadForward::entropy, &CudaHeadForward::lse})
            EXPECT_TRUE(
                bit_equal((g.*field).to(Device{}), (f.*field).narrow(0, first, count).to(Device{})))
                << vocab << " " << chunk << " " << first;
          EXPECT_LE(relative_error(backward(part, part.dentropy).dx, b.dx.narrow(0, first, count)),
                    dtype == DType::kF32 ? 1e-6 : 1e-3)
              << vocab << " " << chunk << " " << first;
        }
    }
}

TEST(CudaHead, IsReproducible) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    const CudaHeadCase c = CudaHeadCase(300, 40, 1031, dtype).to(dtype, device);
    expect_reproducible([&] {
      const CudaHeadForward f = forward(c);
      const CudaHeadBackward b = backward(c, c.dentropy);
      return std::vector{f.logprob, f.entropy, f.lse, b.dx, b.dw};
    });
    const CudaHeadCase aligned = CudaHeadCase(300, 40, 50304, dtype).to(dtype, device);
    expect_reproducible([&] {
      const HeadLossOutputs b = run_fused_head_loss(aligned.x, aligned.w, aligned.targets,
                                                    aligned.dlogprob, aligned.desc);
      return std::vector{b.logprob, b.entropy, b.lse, b.dx, b.dw};
    });
  }
}

TEST(CudaHead, AnInvalidTargetGivesNaNAndKeepsTheOthers) {
  COHORT_REQUIRE_GPU(device);
  CudaHeadCase c(6, 8, 33, DType::kBF16);
  c.targets = ids({3, 33, -1, 7, 32, 0});
  const CudaHeadForward f = forward(c.to(DType::kBF16, device));
  for (const auto field :
       {&CudaHeadForward::logprob, &CudaHeadForward::entropy, &CudaHeadForward::lse}) {
    const auto values = (f.*field).to_vector<double>();
    for (const size_t t : {1, 2}) EXPECT_TRUE(std::isnan(values[t]));
    for (const size_t t : {0, 3, 4, 5}) EXPECT_TRUE(std::isfinite(values[t]));
  }
}

TEST(CudaHead, RejectsInvalidArguments) {
  COHORT_REQUIRE_GPU(device);
  CudaHeadCase c = CudaHeadCase(3, 8, 9, DType::kBF16).to(DType::kBF16, device);
  Tensor f32 = Tensor::empty({3}, DType::kF32, device), bf16 = f32.to(DType::kBF16);
  EXPECT_THROW_WITH(head_logprob_forward({f32, bf16, f32, {c.x, c.w, c.targets}}), Error,
                    "expected entropy f32[3]");
  c.targets = c.targets.to(Device{});
  EXPECT_THROW_WITH(head_logprob_forward({f32, f32, f32, {c.x, c.w, c.targets}}), Error,
                    "expected targets on cuda:0");
}

}  // namespace
}  // namespace cohort::kernels
