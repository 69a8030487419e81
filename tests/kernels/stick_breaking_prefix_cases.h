// Stick-breaking attention over a shared prefix against repeating it, and with extreme scores.
#pragma once

#include "tests/kernels/attention_prefix_cases.h"
#include "tests/kernels/stick_breaking_cases.h"

namespace cohort::test {

struct SharedStick {
  int64_t heads, kv_heads, dim;
  int64_t prefix;                // tokens
  std::vector<int64_t> lengths;  // per sharing sequence, without the prefix
};

// Runs on `device` and returns the results on the CPU.
inline StickResults run_stick(const kernels::test::Packed& in, Device device) {
  AttentionCase c{.q = in.q, .k = in.k, .v = in.v, .dout = in.dout, .cu = in.cu_seqlens};
  c.desc.prefixes = in.desc.prefixes;
  c = on_device(c, device);
  if (c.desc.prefixes.defined()) c.desc.prefixes = c.desc.prefixes.to(device);
  StickResults out{stick_forward(c), stick_backward(c)};
  for (Tensor* t : {&out.o, &out.grads.dq, &out.grads.dk, &out.grads.dv}) *t = t->to(Device{});
  return out;
}

// Expects the bits of repeating the prefix in o and dq, and in dk and dv of the tokens behind it,
// of which `own_tolerance` above 0 asks for this relative error instead. dk and dv of the prefix
// are sums.
inline void expect_stick_as_repeated(const SharedStick& f, DType dtype, double tolerance,
                                     double own_tolerance, Device device = {}) {
  using kernels::test::Packed;
  const kernels::test::SharedPrefix shape{f.heads, f.kv_heads, f.dim, 0, f.prefix, f.lengths};
  const Packed all = kernels::test::shared(shape, dtype);
  const StickResults got = run_stick(all, device);
  Packed root = all;
  for (Tensor* t : {&root.q, &root.k, &root.v, &root.dout}) *t = t->narrow(0, 0, f.prefix).clone();
  root.cu_seqlens = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(f.prefix)});
  root.desc.prefixes = {};
  const auto prefix_of = [&](const Tensor& t) { return t.narrow(0, 0, f.prefix).clone(); };
  const StickResults first = run_stick(root, device);
  EXPECT_TRUE(bit_equal(prefix_of(got.o), first.o));
  EXPECT_TRUE(bit_equal(prefix_of(got.grads.dq), first.grads.dq));
  auto dk = first.grads.dk.to_vector<double>(), dv = first.grads.dv.to_vector<double>();
  for (size_t i = 0; i < f.lengths.size(); ++i) {
    const StickResults one = run_stick(kernels::test::alone(all, shape, i), device);
    const int64_t begin = all.cu_seqlens.data<int32_t>()[i + 1], length = f.lengths[i];
    const auto own = [&](const Tensor& t) { return t.narrow(0, begin, length).clone(); };
    const auto repeated = [&](const Tensor& t) { return t.narrow(0, f.prefix, length).clone(); };
    EXPECT_TRUE(bit_equal(own(got.o), repeated(one.o))) << "sequence " << i;
    EXPECT_TRUE(bit_equal(own(got.grads.dq), repeated(one.grads.dq))) << "sequence " << i;
    for (const auto field : {&AttentionGrads::dk, &AttentionGrads::dv}) {
      const Tensor a = own(got.grads.*field), b = repeated(one.grads.*field);
      if (length == 0) continue;
      EXPECT_TRUE(own_tolerance > 0 ? relative_error(a, b) <= own_tolerance : bit_equal(a, b))
          << "sequence " << i;
    }
    const auto add = [&](std::vector<double>& to, const Tensor& from) {
      const auto values = prefix_of(from).to_vector<double>();
      for (size_t j = 0; j < to.size(); ++j) to[j] += values[j];
    };
    add(dk, one.grads.dk);
    add(dv, one.grads.dv);
  }
  const Shape keys = first.grads.dk.shape();
  EXPECT_LT(relative_error(prefix_of(got.grads.dk), Tensor::from(dk, keys)), tolerance);
  EXPECT_LT(relative_error(prefix_of(got.grads.dv), Tensor::from(dv, keys)), tolerance);
}

// Scores are -10^4, 0 or 10^4, exactly in every type.
inline AttentionCase extreme_case(DType dtype) {
  AttentionCase c = make_case(
      {.heads = 2, .kv_heads = 1, .dim = 4, .dtype = DType::kF64, .scale = 100}, {{1, 150}});
  Rng rng(5, rng_stream(kTestPurpose, 9));
  c.q.zero_();
  c.k.zero_();
  for (int64_t t = 0; t < c.tokens(); ++t) {
    for (int64_t h = 0; h < 2; ++h) c.q.data<double>()[(t * 2 + h) * 4] = 10;
    c.k.data<double>()[t * 4] = 10 * static_cast<double>(rng.below(3) - 1);
  }
  return in_dtype(c, dtype);
}

// The rest of the stick halves at each score of 0, and ends at one of 10^4.
inline void expect_finite_sticks(const Tensor& o, const AttentionGrads& grads,
                                 const AttentionCase& c) {
  for (const Tensor* t : {&o, &grads.dq, &grads.dk, &grads.dv})
    for (const double x : t->to_vector<double>()) EXPECT_TRUE(std::isfinite(x));
  const StickResults expected = naive_stick(in_dtype(c, DType::kF64));
  const double tolerance = c.q.dtype() == DType::kBF16 ? 2e-2 : 1e-5;
  EXPECT_LT(relative_error(o, expected.o), tolerance);
  EXPECT_LT(relative_error(grads.dv, expected.grads.dv), tolerance);
  EXPECT_LT(relative_error(grads.dq, expected.grads.dq), tolerance);
}

}  // namespace cohort::test
