// Packed sequences that go on from the same beginning, against the same sequences one by one.
#include "core/rng.h"
#include "kernels/attention/attention.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

struct Family {
  int64_t heads, kv_heads, dim, window;
  int64_t beginning;             // tokens of it
  std::vector<int64_t> lengths;  // of those that go on from it, without it
};

struct Packed {
  Tensor q, k, v, dout, cu_seqlens;
  AttentionDesc desc;
};
struct Results {
  Tensor o, lse, dq, dk, dv;
};

// What the tokens hold depends on `dtype` only, so that they may be packed in two ways.
Tensor rows(int64_t tokens, int64_t heads, int64_t dim, DType dtype, uint64_t seed) {
  return random_tensor({tokens, heads, dim}, dtype, seed);
}

Results run(const Packed& in) {
  const auto nan = [&](const Shape& shape) { return Tensor::full(shape, NAN, in.q.dtype()); };
  Results out{nan(in.q.shape()), nan({in.q.dim(1), in.q.dim(0)}), nan(in.q.shape()),
              nan(in.k.shape()), nan(in.k.shape())};
  attention_forward({.o = out.o,
                     .lse = out.lse,
                     .q = in.q,
                     .k = in.k,
                     .v = in.v,
                     .cu_seqlens = in.cu_seqlens,
                     .desc = in.desc});
  attention_backward({.dq = {out.dq},
                      .dk = {out.dk},
                      .dv = {out.dv},
                      .dout = in.dout,
                      .q = in.q,
                      .k = in.k,
                      .v = in.v,
                      .o = out.o,
                      .lse = out.lse,
                      .cu_seqlens = in.cu_seqlens,
                      .desc = in.desc});
  return out;
}

// The beginning once, and then what follows it.
Packed shared(const Family& f, DType dtype) {
  std::vector<int32_t> cu{0, static_cast<int32_t>(f.beginning)}, prefixes{0, 0};
  for (const int64_t length : f.lengths) {
    cu.push_back(cu.back() + static_cast<int32_t>(length));
    prefixes.insert(prefixes.end(), {0, static_cast<int32_t>(f.beginning)});
  }
  const int64_t tokens = cu.back();
  return {.q = rows(tokens, f.heads, f.dim, dtype, 1),
          .k = rows(tokens, f.kv_heads, f.dim, dtype, 2),
          .v = rows(tokens, f.kv_heads, f.dim, dtype, 3),
          .dout = rows(tokens, f.heads, f.dim, dtype, 4),
          .cu_seqlens = Tensor::from(cu),
          .desc = {
              .window = f.window,
              .prefixes = Tensor::from(prefixes, {static_cast<int64_t>(f.lengths.size()) + 1, 2})}};
}

// The beginning and, repeating it, one of those that follow. Its tokens' own outputs are of the
// beginning alone.
Packed alone(const Packed& all, const Family& f, size_t i) {
  const int64_t begin = all.cu_seqlens.data<int32_t>()[i + 1], length = f.lengths[i];
  const auto with_beginning = [&](const Tensor& t) {
    Tensor out = Tensor::empty({f.beginning + length, t.dim(1), t.dim(2)}, t.dtype());
    out.narrow(0, 0, f.beginning).copy_(t.narrow(0, 0, f.beginning));
    out.narrow(0, f.beginning, length).copy_(t.narrow(0, begin, length));
    return out;
  };
  Packed out{.q = with_beginning(all.q),
             .k = with_beginning(all.k),
             .v = with_beginning(all.v),
             .dout = with_beginning(all.dout),
             .cu_seqlens = ids({0, static_cast<int32_t>(f.beginning + length)}),
             .desc = {.window = f.window}};
  out.dout.narrow(0, 0, f.beginning).zero_();
  return out;
}

TEST(AttentionPrefix, IsTheSameAsRepeatingIt) {
  for (const Family& f : {Family{2, 1, 8, 0, 5, {3, 1, 7}}, Family{4, 2, 16, 0, 127, {2, 130}},
                          Family{1, 1, 4, 0, 128, {1, 1, 1, 40}}, Family{3, 3, 20, 30, 50, {9, 60}},
                          Family{2, 1, 132, 0, 70, {66, 1}}, Family{1, 1, 2, 0, 4095, {3, 70}},
                          Family{6, 2, 8, 3, 1, {1, 2, 9}}})
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      SCOPED_TRACE(str("beginning of ", f.beginning, ", ", dtype_name(dtype)));
      const double tolerance = dtype == DType::kF64 ? 1e-13 : 1e-5;
      const Packed all = shared(f, dtype);
      const Results got = run(all);
      // The beginning's own, to which those of all that follow it add up.
      Packed root = all;
      for (Tensor* t : {&root.q, &root.k, &root.v, &root.dout})
        *t = t->narrow(0, 0, f.beginning).clone();
      root.cu_seqlens = ids({0, static_cast<int32_t>(f.beginning)});
      root.desc.prefixes = {};
      const Results first = run(root);
      EXPECT_TRUE(bit_equal(got.o.narrow(0, 0, f.beginning).clone(), first.o));
      EXPECT_TRUE(bit_equal(got.dq.narrow(0, 0, f.beginning).clone(), first.dq));
      auto dk = first.dk.to_vector<double>(), dv = first.dv.to_vector<double>();
      for (size_t i = 0; i < f.lengths.size(); ++i) {
        const Results one = run(alone(all, f, i));
        const int64_t begin = all.cu_seqlens.data<int32_t>()[i + 1], length = f.lengths[i];
        for (const auto field : {&Results::o, &Results::dq, &Results::dk, &Results::dv})
          EXPECT_TRUE(bit_equal((got.*field).narrow(0, begin, length).clone(),
                                (one.*field).narrow(0, f.beginning, length).clone()))
              << "sequence " << i;
        for (int64_t h = 0; h < f.heads; ++h)
          EXPECT_TRUE(bit_equal(got.lse.select(0, h).narrow(0, begin, length).clone(),
                                one.lse.select(0, h).narrow(0, f.beginning, length).clone()));
        const auto add = [&](std::vector<double>& to, const Tensor& from) {
          const auto values = from.narrow(0, 0, f.beginning).clone().to_vector<double>();
          for (size_t j = 0; j < to.size(); ++j) to[j] += values[j];
        };
        add(dk, one.dk);
        add(dv, one.dv);
      }
      const Shape shape = first.dk.shape();
      EXPECT_LT(relative_error(got.dk.narrow(0, 0, f.beginning).clone(), Tensor::from(dk, shape)),
                tolerance);
      EXPECT_LT(relative_error(got.dv.narrow(0, 0, f.beginning).clone(), Tensor::from(dv, shape)),
                tolerance);
    }
}

TEST(AttentionPrefix, DoesNotDependOnTheNumberOfThreads) {
  const Packed all = shared({4, 2, 16, 0, 100, {3, 50, 1, 140}}, DType::kF32);
  expect_thread_invariant([&] {
    const Results r = run(all);
    return std::vector{r.o, r.lse, r.dq, r.dk, r.dv};
  });
}

TEST(AttentionPrefix, SaysWhatIsWrong) {
  const Family f{1, 1, 4, 0, 5, {3, 2}};
  const auto with = [&](std::vector<int32_t> prefixes) {
    Packed all = shared(f, DType::kF32);
    all.desc.prefixes = Tensor::from(prefixes, {3, 2});
    return all;
  };
  EXPECT_THROW_WITH(run(with({0, 0, 1, 4, 0, 5})), Error, "prefix of sequence 1");
  EXPECT_THROW_WITH(run(with({0, 0, 0, 6, 0, 5})), Error, "got 6 tokens from 0 on");
  EXPECT_THROW_WITH(run(with({0, 0, 5, 3, 0, 5})), Error, "got 3 tokens from 5 on");
  EXPECT_THROW_WITH(run(with({0, 0, 0, 5, 5, 3})), Error, "prefix of sequence 2");
  EXPECT_THROW_WITH(run(with({0, 0, 0, -1, 0, 5})), Error, "got -1 tokens from 0 on");
  Packed full = shared(f, DType::kF32);
  full.desc.mask = Mask::kFull;
  EXPECT_THROW_WITH(run(full), Error, "expected a causal mask");
}

}  // namespace
}  // namespace cohort::kernels
