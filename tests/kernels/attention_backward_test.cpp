// The backward pass against central differences in f64, and the invariances of its bits.
#include "core/allocator.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "tests/kernels/attention_cases.h"

namespace cohort::test {
namespace {

using kernels::Grad;
using kernels::Mask;

// Compares up to `samples` random elements of each gradient.
void check_gradients(AttentionCase c, int64_t samples) {
  const AttentionGrads grads = run_backward(c, run_forward(c));
  Rng rng(1, rng_stream(kTestPurpose, 5));
  const auto check = [&](const char* name, Tensor& x, const Tensor& grad) {
    const auto g = grad.to_vector<double>();
    double largest = 0;
    for (const double e : g) largest = std::max(largest, std::fabs(e));
    for (int64_t s = 0; s < std::min(samples, x.numel()); ++s) {
      const int64_t i = samples < x.numel() ? rng.below(x.numel()) : s;
      const double a = g[static_cast<size_t>(i)], n = numeric_gradient(c, x.data<double>() + i);
      EXPECT_LE(std::fabs(a - n), 1e-6 * std::max(std::fabs(a), std::fabs(n)) + 1e-9 * largest)
          << name << "[" << i << "]: " << a << " against " << n;
    }
  };
  check("dq", c.q, grads.dq);
  check("dk", c.k, grads.dk);
  check("dv", c.v, grads.dv);
}

const std::vector<SequenceSpec> kShortBackward = {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 17}};

TEST(AttentionBackward, EqualsCentralDifferences) {
  const int64_t dims[] = {1, 3, 8, 16, 64, 80, 128, 130, 256}, groups[] = {1, 2, 3, 7};
  for (size_t i = 0; i < std::size(dims); ++i)
    for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
      const int64_t group = groups[(i + 1) % 4], kv_heads = group < 3 ? 2 : 1;
      SCOPED_TRACE(str("D ", dims[i], ", group ", group, ", mask ", static_cast<int>(mask)));
      check_gradients(
          make_case({.heads = kv_heads * group, .kv_heads = kv_heads, .dim = dims[i], .mask = mask},
                    kShortBackward),
          24);
    }
}

TEST(AttentionBackward, EqualsCentralDifferencesAcrossTiles) {
  for (const int64_t length : {127, 128, 129})
    check_gradients(make_case({.heads = 1, .kv_heads = 1, .dim = 8}, {{1, length}}), 5);
  for (const Mask mask : {Mask::kCausal, Mask::kFull})
    for (const int64_t group : {1, 3}) {
      SCOPED_TRACE(str("group ", group, ", mask ", static_cast<int>(mask)));
      check_gradients(
          make_case({.heads = group, .kv_heads = 1, .dim = 8, .mask = mask}, {{1, 300}}), 4);
    }
  check_gradients(make_case({.heads = 2, .kv_heads = 1, .dim = 130}, {{1, 150}}), 4);
}

TEST(AttentionBackward, EqualsCentralDifferencesForEveryElement) {
  check_gradients(make_case({.heads = 3, .kv_heads = 1, .dim = 5, .scale = 0.9}, {{1, 6}, {2, 3}}),
                  1000);
}

TEST(AttentionBackward, EqualsCentralDifferencesUnderDropout) {
  for (const Mask mask : {Mask::kCausal, Mask::kFull})
    check_gradients(make_case({.heads = 4, .kv_heads = 2, .dim = 8, .mask = mask, .p = 0.3},
                              {{1, 3}, {2, 140}, {3, 20}}),
                    10);
}

TEST(AttentionBackward, EqualsCentralDifferencesUnderAWindow) {
  for (const int64_t window : {2, 7, 90, 128, 129, 200})
    for (const int64_t group : {1, 3}) {
      SCOPED_TRACE(str("window ", window, ", group ", group));
      check_gradients(make_case({.heads = group,
                                 .kv_heads = 1,
                                 .dim = 8,
                                 .p = window == 90 ? 0.3 : 0,
                                 .window = window},
                                {{1, 3}, {2, 290}, {3, 20}}),
                      6);
    }
  check_gradients(make_case({.heads = 2, .kv_heads = 1, .dim = 130, .window = 70}, {{1, 200}}), 4);
}

// Same inputs, so only the arithmetic differs.
TEST(AttentionBackward, F32IsCloseToF64) {
  for (const int64_t dim : {3, 64, 130})
    for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
      const AttentionCase single = in_f32(make_case(
          {.heads = 2, .kv_heads = 1, .dim = dim, .mask = mask, .p = 0.1}, {{1, 17}, {2, 260}}));
      AttentionCase exact = single;
      for (Tensor* t : {&exact.q, &exact.k, &exact.v, &exact.dout}) *t = t->to(DType::kF64);
      const AttentionGrads a = run_backward(single, run_forward(single));
      const AttentionGrads b = run_backward(exact, run_forward(exact));
      EXPECT_LT(relative_error(a.dq.to(DType::kF64), b.dq), 1e-5);
      EXPECT_LT(relative_error(a.dk.to(DType::kF64), b.dk), 1e-5);
      EXPECT_LT(relative_error(a.dv.to(DType::kF64), b.dv), 1e-5);
    }
}

TEST(AttentionBackward, BitsDoNotDependOnOtherSequences) {
  for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
    const AttentionShape shape{
        .heads = 6, .kv_heads = 2, .dim = 24, .dtype = DType::kF32, .mask = mask, .p = 0.3};
    const AttentionCase packed = make_case(shape, {{1, 3}, {2, 300}, {3, 0}, {4, 1}, {5, 70}});
    const AttentionGrads all = run_backward(packed, run_forward(packed));
    for (size_t s = 0; s < packed.sequences.size(); ++s) {
      const int64_t start = packed.start(s), n = packed.sequences[s].length;
      const AttentionCase single = make_case(shape, {packed.sequences[s]});
      const AttentionGrads alone = run_backward(single, run_forward(single));
      EXPECT_TRUE(bit_equal(alone.dq, all.dq.narrow(0, start, n)));
      EXPECT_TRUE(bit_equal(alone.dk, all.dk.narrow(0, start, n)));
      EXPECT_TRUE(bit_equal(alone.dv, all.dv.narrow(0, start, n)));
    }
  }
}

// The long sequence is one work item with one thread, and several with more.
TEST(AttentionBackward, BitsDoNotDependOnThreads) {
  const int before = num_threads();
  for (const Grad mode : {Grad::kOverwrite, Grad::kAccumulate})
    for (const Mask mask : {Mask::kCausal, Mask::kFull})
      for (const int64_t group : {1, 3}) {
        const AttentionCase c = make_case({.heads = 2 * group,
                                           .kv_heads = 2,
                                           .dim = 20,
                                           .dtype = DType::kF32,
                                           .mask = mask,
                                           .p = 0.1},
                                          {{1, 3}, {2, 400}, {3, 0}, {4, 45}, {5, 128}});
        const AttentionOutput out = run_forward(c);
        const auto run = [&](int threads) {
          set_num_threads(threads);
          AttentionGrads g{random_tensor(c.q.shape(), DType::kF32, 21),
                           random_tensor(c.k.shape(), DType::kF32, 22),
                           random_tensor(c.k.shape(), DType::kF32, 23)};
          kernels::attention_backward({{g.dq, mode},
                                       {g.dk, mode},
                                       {g.dv, mode},
                                       c.dout,
                                       c.q,
                                       c.k,
                                       c.v,
                                       out.o,
                                       out.lse,
                                       c.cu,
                                       c.desc});
          return g;
        };
        const AttentionGrads one = run(1);
        for (const int threads : {2, 3}) {
          const AttentionGrads more = run(threads);
          EXPECT_TRUE(bit_equal(one.dq, more.dq));
          EXPECT_TRUE(bit_equal(one.dk, more.dk));
          EXPECT_TRUE(bit_equal(one.dv, more.dv));
        }
      }
  set_num_threads(before);
}

TEST(AttentionBackward, TokensMayBeStrided) {
  for (const int64_t dim : {5, 64}) {
    const AttentionCase c = make_case({.heads = 6, .kv_heads = 2, .dim = dim, .dtype = DType::kF32},
                                      {{1, 40}, {2, 1}, {3, 130}});
    const AttentionOutput out = run_forward(c);
    const AttentionGrads separate = run_backward(c, out), views = run_merged_backward(c, out);
    EXPECT_TRUE(bit_equal(separate.dq, views.dq) && bit_equal(separate.dk, views.dk) &&
                bit_equal(separate.dv, views.dv))
        << dim;
  }
}

TEST(AttentionBackward, OutputMayBeStrided) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    expect_output_may_be_strided(
        make_case({.heads = 6, .kv_heads = 2, .dim = 20, .dtype = dtype}, {{1, 40}, {2, 130}}));
}

// Each gradient has its own mode.
TEST(AttentionBackward, AccumulatesIntoExistingGradients) {
  const AttentionCase c =
      make_case({.heads = 4, .kv_heads = 2, .dim = 10}, {{1, 140}, {2, 0}, {3, 9}});
  const AttentionOutput out = run_forward(c);
  const AttentionGrads fresh = run_backward(c, out);
  const Tensor old_q = random_tensor(c.q.shape(), DType::kF64, 31);
  const Tensor old_v = random_tensor(c.k.shape(), DType::kF64, 32);
  AttentionGrads g{old_q.clone(), Tensor::full(c.k.shape(), NAN, DType::kF64), old_v.clone()};
  kernels::attention_backward({{g.dq, Grad::kAccumulate},
                               {g.dk},
                               {g.dv, Grad::kAccumulate},
                               c.dout,
                               c.q,
                               c.k,
                               c.v,
                               out.o,
                               out.lse,
                               c.cu,
                               c.desc});
  EXPECT_TRUE(bit_equal(g.dk, fresh.dk));
  const auto expect_sum = [](const Tensor& sum, const Tensor& old, const Tensor& grad) {
    const auto s = sum.to_vector<double>(), a = old.to_vector<double>(),
               b = grad.to_vector<double>();
    for (size_t i = 0; i < s.size(); ++i) ASSERT_NEAR(s[i], a[i] + b[i], 1e-13);
  };
  expect_sum(g.dq, old_q, fresh.dq);
  expect_sum(g.dv, old_v, fresh.dv);
}

TEST(AttentionBackward, ScratchScalesWithTheTileNotTheSequence) {
  const AttentionCase c =
      make_case({.heads = 1, .kv_heads = 1, .dim = 16, .dtype = DType::kF32}, {{1, 2048}});
  const AttentionOutput out = run_forward(c);
  AttentionGrads g{Tensor::empty_like(c.q), Tensor::empty_like(c.k), Tensor::empty_like(c.v)};
  Allocator& memory = allocator(Device{});
  const int64_t live = memory.stats().live_bytes;
  memory.reset_peak();
  kernels::attention_backward(
      {{g.dq}, {g.dk}, {g.dv}, c.dout, c.q, c.k, c.v, out.o, out.lse, c.cu, c.desc});
  // The scores would be 16 MiB.
  EXPECT_LT(memory.stats().peak_bytes - live, num_threads() * 160 * 1024);
  EXPECT_GT(memory.stats().peak_bytes - live, 0);
}

TEST(AttentionBackward, SaysWhatIsWrong) {
  const AttentionCase good = make_case({.heads = 4, .kv_heads = 2, .dim = 8}, {{1, 4}, {2, 6}});
  const AttentionOutput out = run_forward(good);
  AttentionCase c = good;
  c.cu = Tensor::from(std::vector<int32_t>{0, 4, 9});
  EXPECT_THROW_WITH(run_backward(c, out), Error, "[attention_backward] expected cu_seqlens");
  c = good;
  c.dout = random_tensor({10, 2, 8}, DType::kF64, 1);
  EXPECT_THROW_WITH(run_backward(c, out), Error, "dout");
  EXPECT_THROW_WITH(run_backward(good, {out.o, Tensor::zeros({10, 4}, DType::kF64)}), Error, "lse");
}

}  // namespace
}  // namespace cohort::test
