#include "kernels/head.h"

#include "core/dry_run.h"
#include "core/rng.h"
#include "tests/kernels/head_gradients.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

struct HeadCase {
  Tensor x, w, targets, dlogprob, dentropy;
  HeadDesc desc;
  HeadCase(int64_t tokens, int64_t channels, int64_t vocab, DType dtype, double temperature = 1)
      : x(random_tensor({tokens, channels}, dtype, 1)),
        w(random_tensor({vocab, channels}, dtype, 2, 0.5)),
        targets(Tensor::empty({tokens}, DType::kI32)),
        dlogprob(random_tensor({tokens}, dtype, 3)),
        dentropy(random_tensor({tokens}, dtype, 4)),
        desc{.temperature = temperature} {
    Rng rng(5, rng_stream(kTestPurpose));
    for (int64_t t = 0; t < tokens; ++t)
      targets.data<int32_t>()[t] = static_cast<int32_t>(rng.below(vocab));
  }
  HeadCase to(DType dtype) const {
    HeadCase copy = *this;
    for (Tensor* t : {&copy.x, &copy.w, &copy.dlogprob, &copy.dentropy}) *t = t->to(dtype);
    return copy;
  }
};

struct Forward {
  Tensor logprob, entropy, lse;
};
Forward forward(const HeadCase& c) {
  const Tensor one = Tensor::full({c.x.dim(0)}, NAN, c.x.dtype());
  Forward out{one.clone(), one.clone(), one.clone()};
  head_logprob_forward({out.logprob, out.entropy, out.lse, {c.x, c.w, c.targets, c.desc}});
  return out;
}

struct Backward {
  Tensor dx, dw;
};
Backward backward(const HeadCase& c, const Tensor& dentropy) {
  const Forward f = forward(c);
  Backward out{Tensor::full(c.x.shape(), NAN, c.x.dtype()),
               Tensor::full(c.w.shape(), NAN, c.x.dtype())};
  head_logprob_backward(
      {{out.dx}, {out.dw}, c.dlogprob, dentropy, {c.x, c.w, c.targets, c.desc}, f.lse, f.entropy});
  return out;
}

// The definition in f64: {logprob, entropy, lse}.
Forward naive_head(const HeadCase& c) {
  const auto x = c.x.to_vector<double>(), w = c.w.to_vector<double>();
  const int64_t tokens = c.x.dim(0), channels = c.x.dim(1), vocab = c.w.dim(0);
  const Tensor zero = Tensor::zeros({tokens}, DType::kF64);
  Forward out{zero.clone(), zero.clone(), zero.clone()};
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t target = c.targets.data<int32_t>()[t];
    std::vector<double> z(static_cast<size_t>(vocab));
    double sum = 0, entropy = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      double dot = 0;
      for (int64_t i = 0; i < channels; ++i)
        dot += x[static_cast<size_t>(t * channels + i)] * w[static_cast<size_t>(v * channels + i)];
      z[static_cast<size_t>(v)] = dot / c.desc.temperature;
      sum += std::exp(dot / c.desc.temperature);
    }
    const double lse = std::log(sum);
    for (const double value : z) entropy -= std::exp(value - lse) * (value - lse);
    out.logprob.data<double>()[t] = z[static_cast<size_t>(target)] - lse;
    out.entropy.data<double>()[t] = entropy;
    out.lse.data<double>()[t] = lse;
  }
  return out;
}

TEST(Head, ForwardIsTheDefinition) {
  for (const auto& [tokens, channels, vocab] :
       {std::tuple{0, 3, 5}, {1, 1, 1}, {3, 2, 17}, {300, 7, 65}, {5, 33, 1030}})
    for (const double temperature : {1.0, 0.7, 2.0}) {
      const HeadCase c(tokens, channels, vocab, DType::kF32, temperature);
      const Forward expected = naive_head(c), f32 = forward(c), f64 = forward(c.to(DType::kF64));
      // A logprob is a difference of two numbers of the size of lse, hence the absolute terms.
      for (const auto& [got, tolerance] : {std::pair{&f32, kF32Tolerance}, {&f64, 1e-13}})
        for (const auto& [a, b] : {std::pair{&got->logprob, &expected.logprob},
                                   {&got->entropy, &expected.entropy},
                                   {&got->lse, &expected.lse}}) {
          const auto x = a->to_vector<double>(), y = b->to_vector<double>();
          for (size_t i = 0; i < x.size(); ++i)
            EXPECT_NEAR(x[i], y[i], tolerance * (1 + std::fabs(y[i])));
        }
    }
}

TEST(Head, BackwardIsTheDerivative) {
  for (const double temperature : {1.0, 0.6}) {
    HeadCase c(5, 3, 7, DType::kF64, temperature);
    const Backward grad = backward(c, c.dentropy);
    const auto loss = [&] {
      const Forward f = forward(c);
      return dot(f.logprob, c.dlogprob) + dot(f.entropy, c.dentropy);
    };
    expect_gradient(c.x, grad.dx, loss, "dx");
    expect_gradient(c.w, grad.dw, loss, "dw");

    const Backward plain = backward(c, Tensor());
    const auto logprob_loss = [&] { return dot(forward(c).logprob, c.dlogprob); };
    expect_gradient(c.x, plain.dx, logprob_loss, "dx without entropy");
    expect_gradient(c.w, plain.dw, logprob_loss, "dw without entropy");
  }
}

TEST(Head, FusedLossGradientsEqualTheBackwards) {
  for (const int64_t tokens : {0, 1, 128, 300}) {
    const HeadCase c(tokens, 7, 65, DType::kF32, 0.7);
    const Backward a = backward(c, {});
    const HeadLossOutputs b = run_fused_head_loss(c.x, c.w, c.targets, c.dlogprob, c.desc);
    const Forward f = forward(c);
    EXPECT_TRUE(bit_equal(b.logprob.to(Device{}), f.logprob.to(Device{}))) << tokens;
    EXPECT_TRUE(bit_equal(b.lse.to(Device{}), f.lse.to(Device{}))) << tokens;
    EXPECT_TRUE(bit_equal(a.dx, b.dx)) << tokens;
    EXPECT_TRUE(bit_equal(a.dw, b.dw)) << tokens;
  }
}

TEST(Head, F32GradientsFollowF64) {
  const HeadCase c(200, 33, 130, DType::kF32);
  const Backward a = backward(c, c.dentropy),
                 b = backward(c.to(DType::kF64), c.dentropy.to(DType::kF64));
  EXPECT_LE(relative_error(a.dx, b.dx), kF32Tolerance);
  EXPECT_LE(relative_error(a.dw, b.dw), kF32Tolerance);
}

TEST(Head, BackwardAccumulatesAndSkips) {
  const HeadCase c(9, 4, 11, DType::kF64);
  const Backward grad = backward(c, c.dentropy);
  const Forward f = forward(c);
  Tensor dx = Tensor::full({9, 4}, 2, DType::kF64), dw = Tensor::full({11, 4}, 3, DType::kF64);
  const auto run = [&](Tensor& a, Tensor& b) {
    head_logprob_backward({{a, Grad::kAccumulate},
                           {b, Grad::kAccumulate},
                           c.dlogprob,
                           c.dentropy,
                           {c.x, c.w, c.targets, c.desc},
                           f.lse,
                           f.entropy});
  };
  Tensor skip;
  run(dx, skip);
  run(skip, dw);
  for (int64_t i = 0; i < dx.numel(); ++i)
    EXPECT_EQ(dx.data<double>()[i], 2 + grad.dx.data<double>()[i]);
  for (int64_t i = 0; i < dw.numel(); ++i)
    EXPECT_NEAR(dw.data<double>()[i], 3 + grad.dw.data<double>()[i], 1e-14);
}

// A logit of -inf is an excluded token: probability 0, and no NaN in the entropy.
TEST(Head, ExcludedTokensAddNothingToTheEntropy) {
  HeadCase c(1, 1, 3, DType::kF32);
  c.x = Tensor::full({1, 1}, 1, DType::kF32);
  c.w = Tensor::from<float>({2, -INFINITY, 2}, {3, 1});
  c.targets = ids({2});
  const Forward f = forward(c);
  EXPECT_NEAR(f.logprob.item(), -std::log(2.0), 1e-7);
  EXPECT_NEAR(f.entropy.item(), std::log(2.0), 1e-7);
}

TEST(Head, ChunksAndThreadsDoNotChangeBits) {
  HeadCase c(700, 33, 130, DType::kF32, 0.8);
  const auto run = [&] {
    const Forward f = forward(c);
    const Backward b = backward(c, c.dentropy);
    return std::vector{f.logprob, f.entropy, f.lse, b.dx, b.dw};
  };
  const auto expected = run();
  for (const int64_t chunk : {1, 100, 256, 1000}) {
    c.desc.chunk_tokens = chunk;
    const auto got = run();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(bit_equal(got[i], expected[i])) << chunk;
  }
  expect_thread_invariant(run);
}

TEST(Head, TokensDoNotDependOnTheBatch) {
  const HeadCase all(300, 33, 130, DType::kF32);
  const Forward f = forward(all);
  const Backward b = backward(all, all.dentropy);
  for (const auto& [first, count] : {std::pair{0, 1}, {17, 40}, {250, 50}}) {
    HeadCase part = all;
    for (Tensor* t : {&part.x, &part.targets, &part.dlogprob, &part.dentropy})
      *t = t->narrow(0, first, count);
    const Forward g = forward(part);
    EXPECT_TRUE(bit_equal(g.logprob, f.logprob.narrow(0, first, count)));
    EXPECT_TRUE(bit_equal(g.entropy, f.entropy.narrow(0, first, count)));
    EXPECT_TRUE(bit_equal(backward(part, part.dentropy).dx, b.dx.narrow(0, first, count)));
  }
}

TEST(Head, SaysWhatIsWrong) {
  HeadCase c(3, 4, 9, DType::kF32);
  c.targets = ids({0, -1, 3});
  EXPECT_THROW_WITH(forward(c), Error, "target -1 at position 1");
  c.targets = ids({0, 2, 9});
  EXPECT_THROW_WITH(backward(c, c.dentropy), Error,
                    "target 9 at position 2 is outside the vocabulary of 9");
  c.targets = ids({0, 2, 8});
  c.desc.temperature = 0;
  EXPECT_THROW_WITH(forward(c), Error, "temperature above 0");
  c.desc = {.chunk_tokens = -1};
  EXPECT_THROW_WITH(forward(c), Error, "chunk_tokens of 0 or more");
  c.desc = {};
  c.w = Tensor::zeros({9, 5}, DType::kF32);
  EXPECT_THROW_WITH(forward(c), Error, "expected w f32[9, 4] = [V, C], where C = 4 as in x");
}

// Zero rows after a head's matrix change no result beyond the rounding of matmuls over other sizes,
// and get gradients of exactly zero.
TEST(Head, PaddingOfTheMatrixTakesNoPart) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const int64_t vocab : {1, 7, 61, 64, 65}) {
      HeadCase c(300, 24, vocab, dtype, 0.7), wide = c;
      c.desc.chunk_tokens = wide.desc.chunk_tokens = 128;
      wide.w = padded(c.w, 0, 128, 0);
      const HeadLossOutputs a = run_fused_head_loss(c.x, c.w, c.targets, c.dlogprob, c.desc),
                            b = run_fused_head_loss(wide.x, wide.w, c.targets, c.dlogprob, c.desc);
      const double tolerance = dtype == DType::kF32 ? kF32Tolerance : 1e-13;
      for (const auto field : {&HeadLossOutputs::logprob, &HeadLossOutputs::entropy,
                               &HeadLossOutputs::lse, &HeadLossOutputs::dx, &HeadLossOutputs::dw})
        // With one token log-probs, entropies and gradients are zero.
        EXPECT_TRUE(vocab == 1 || relative_error(b.*field, a.*field) < tolerance) << vocab;
      EXPECT_EQ(b.dw.shape(), c.w.shape());
      EXPECT_TRUE(padding_is(b.dw, 0, 0)) << vocab;
    }
}

// The row ops read and write nothing after the vocabulary, whatever is there.
TEST(Head, RowOpsDoNotTouchThePaddingOfLogits) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const int64_t vocab : {1, 7, 61, 64, 65, 1000})
      for (const double poison : {double{NAN}, double{INFINITY}}) {
        const HeadCase c(5, 3, vocab, dtype, 0.7);
        const auto run = [&](Tensor logits) {
          Forward f{Tensor::empty({5}, dtype), Tensor::empty({5}, dtype),
                    Tensor::empty({5}, dtype)};
          head_statistics({f.logprob, f.entropy, f.lse, logits, c.targets, 0, 0.7});
          head_logit_gradients(
              {logits, logits, c.dlogprob, c.dentropy, f.lse, f.entropy, c.targets, 0, 0.7});
          return std::vector{f.logprob, f.entropy, f.lse, logits};
        };
        const Tensor logits = random_tensor({5, vocab}, dtype, 7, 3),
                     wide = padded(logits, 1, 1088, poison);
        const auto expected = run(logits.clone()), got = run(wide);
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(bit_equal(got[i].contiguous(), expected[i])) << vocab << " output " << i;
        EXPECT_TRUE(padding_is(wide, 1, poison)) << vocab;
      }
}

// head_logprob_forward() allocates one chunk of logits.
TEST(Head, HoldsOneChunkOfLogits) {
  const auto peak = [](int64_t tokens, DType dtype, int64_t chunk) {
    const DryRun run(Device{});
    const Tensor x = Tensor::empty({tokens, 8}, dtype), w = Tensor::empty({1000, 8}, dtype),
                 targets = Tensor::empty({tokens}, DType::kI32);
    Tensor logprob = Tensor::empty({tokens}, dtype), entropy = logprob, lse = logprob;
    const int64_t before = run.stats().live_bytes;
    head_logprob_forward({logprob, entropy, lse, {x, w, targets, {.chunk_tokens = chunk}}});
    return run.stats().peak_bytes - before;
  };
  const auto bytes = [](int64_t rows, int64_t size) {
    return allocation_size(static_cast<size_t>(rows * 1000 * size), Device{});
  };
  EXPECT_EQ(peak(999, DType::kF32, 128), bytes(128, 4));
  EXPECT_EQ(peak(999, DType::kF64, 129), bytes(256, 8));
  EXPECT_EQ(peak(999, DType::kF32, 0), bytes(128, 4));
  EXPECT_EQ(peak(7, DType::kF32, 0), bytes(7, 4));
}

// By default a GPU holds up to 512 MiB of f32 logits, of 4096 rows or a smaller power of two.
TEST(Head, ChunksOnAGpuFollowTheVocabulary) {
  const Device gpu = Device::cuda();
  EXPECT_EQ(head_chunk_tokens(100, 0, gpu), 4096);
  EXPECT_EQ(head_chunk_tokens(32768, 0, gpu), 4096);
  EXPECT_EQ(head_chunk_tokens(50257, 0, gpu), 2048);
  EXPECT_EQ(head_chunk_tokens(151936, 0, gpu), 512);
  EXPECT_EQ(head_chunk_tokens(int64_t{1} << 24, 0, gpu), 128);
  EXPECT_EQ(head_chunk_tokens(100, 129, gpu), 256);
  constexpr int64_t kTokens = 16384;
  EXPECT_EQ(head_gradient_tokens(kTokens, 32768, 768), 5 * 768);
  EXPECT_EQ(head_gradient_tokens(kTokens, 32768, 8192), 8192);
  EXPECT_EQ(head_gradient_tokens(100, 32768, 128), 100);
}

// Gradients of logits are collected up to 1 GiB, so that of 4096 rows up to 131,072 columns.
TEST(Head, CollectedGradientsOfLogitsAreBoundedByBytes) {
  constexpr int64_t kTokens = 16384;
  const auto tokens = [](int64_t vocab) {
    const int64_t columns = head_rows(vocab, Device::cuda());
    return head_gradient_tokens(kTokens, columns, head_chunk_tokens(vocab, 0, Device::cuda()));
  };
  for (const int64_t vocab : {1, 32'000, 50'257, 128'256, 131'072}) EXPECT_EQ(tokens(vocab), 4096);
  EXPECT_EQ(tokens(131'073), 7 * 512);  // in chunks of 512
  EXPECT_EQ(tokens(151'936), 3072);
  EXPECT_EQ(tokens(248'320), 2048);
  EXPECT_EQ(tokens(262'144), 2048);
  EXPECT_EQ(tokens(int64_t{1} << 24), 128);  // a chunk at least
  // The peak above inputs and outputs is a chunk of logits and the collected gradients.
  const Device gpu = Device::cuda();
  const DryRun run(gpu);
  const Tensor x = Tensor::empty({kTokens, 8}, DType::kBF16, gpu),
               w = Tensor::empty({248'320, 8}, DType::kBF16, gpu),
               targets = Tensor::empty({kTokens}, DType::kI32, gpu);
  Tensor logprob = Tensor::empty({kTokens}, DType::kF32, gpu), entropy = logprob, lse = logprob,
         dx = Tensor::empty_like(x), dw = Tensor::empty(w.shape(), DType::kF32, gpu);
  const HeadLossGradients gradients{
      .dx = {dx}, .dw = {dw}, .dlogprob = logprob, .set_dlogprob = {}};
  const int64_t before = run.stats().live_bytes;
  head_logprob_forward({logprob, entropy, lse, {x, w, targets}, &gradients});
  EXPECT_EQ(run.stats().peak_bytes - before, allocation_size(size_t{512} * 248'320 * 4, gpu) +
                                                 allocation_size(size_t{2048} * 248'320 * 2, gpu));
}

}  // namespace
}  // namespace cohort::kernels
