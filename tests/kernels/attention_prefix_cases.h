// Packed sequences with a shared prefix, and the same ones repeating it.
#pragma once

#include "tests/kernels/attention_cases.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::test {

struct SharedPrefix {
  int64_t heads, kv_heads, dim, window;
  int64_t prefix;                // tokens
  std::vector<int64_t> lengths;  // per sharing sequence, without the prefix
};

struct Packed {
  Tensor q, k, v, dout, cu_seqlens;
  AttentionDesc desc;
};
struct Results {
  Tensor o, lse, dq, dk, dv;
};

// Values depend on `dtype` only, so that the tokens can be packed in two ways.
inline Tensor rows(int64_t tokens, int64_t heads, int64_t dim, DType dtype, uint64_t seed) {
  return random_tensor({tokens, heads, dim}, DType::kF32, seed).to(dtype);
}

// Runs on `device` and returns the results on the CPU.
inline Results run(const Packed& from, Device device = {}) {
  Packed in = from;
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.dout, &in.cu_seqlens}) *t = t->to(device);
  for (Tensor* t : {&in.desc.prefixes, &in.desc.fp8_scales})
    if (t->defined()) *t = t->to(device);
  const auto nan = [&](const Shape& shape, DType dtype) {
    return Tensor::full(shape, NAN, dtype, device);
  };
  const DType dtype = in.q.dtype();
  Results out{nan(in.q.shape(), dtype), nan({in.q.dim(1), in.q.dim(0)}, accumulate_dtype(dtype)),
              nan(in.q.shape(), dtype), nan(in.k.shape(), dtype), nan(in.k.shape(), dtype)};
  kernels::attention_forward({.o = out.o,
                              .lse = out.lse,
                              .q = in.q,
                              .k = in.k,
                              .v = in.v,
                              .cu_seqlens = in.cu_seqlens,
                              .desc = in.desc});
  kernels::attention_backward({.dq = {out.dq},
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
  for (Tensor* t : {&out.o, &out.lse, &out.dq, &out.dk, &out.dv}) *t = t->to(Device{});
  return out;
}

// The prefix once, then the sequences that share it.
inline Packed shared(const SharedPrefix& f, DType dtype) {
  std::vector<int32_t> cu{0, static_cast<int32_t>(f.prefix)}, prefixes{0, 0};
  for (const int64_t length : f.lengths) {
    cu.push_back(cu.back() + static_cast<int32_t>(length));
    prefixes.insert(prefixes.end(), {0, static_cast<int32_t>(f.prefix)});
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

// Sequence i repeating the prefix. The gradients of the prefix tokens are zero.
inline Packed alone(const Packed& all, const SharedPrefix& f, size_t i) {
  const int64_t begin = all.cu_seqlens.data<int32_t>()[i + 1], length = f.lengths[i];
  const auto with_prefix = [&](const Tensor& t) {
    Tensor out = Tensor::empty({f.prefix + length, t.dim(1), t.dim(2)}, t.dtype());
    out.narrow(0, 0, f.prefix).copy_(t.narrow(0, 0, f.prefix));
    out.narrow(0, f.prefix, length).copy_(t.narrow(0, begin, length));
    return out;
  };
  Packed out{
      .q = with_prefix(all.q),
      .k = with_prefix(all.k),
      .v = with_prefix(all.v),
      .dout = with_prefix(all.dout),
      .cu_seqlens = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(f.prefix + length)}),
      .desc = {.window = f.window, .fp8_scales = all.desc.fp8_scales}};
  out.dout.narrow(0, 0, f.prefix).zero_();
  return out;
}

// Expects the bits of repeating the prefix, except for the gradients of its keys and values, which
// are sums over the sequences, and for bf16 gradients, whose tiles start elsewhere. With scales, of
// FP8 attention.
inline void expect_as_repeated(const SharedPrefix& f, DType dtype, double tolerance,
                               Device device = {}, const Tensor& scales = {}) {
  Packed all = shared(f, dtype);
  if (scales.defined()) ::cohort::test::round_qkv(all.q, all.k, all.v, all.desc, scales);
  const Results got = run(all, device);
  // Gradients of the prefix alone, to which those of all sequences are added.
  Packed root = all;
  for (Tensor* t : {&root.q, &root.k, &root.v, &root.dout}) *t = t->narrow(0, 0, f.prefix).clone();
  root.cu_seqlens = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(f.prefix)});
  root.desc.prefixes = {};
  const Results first = run(root, device);
  EXPECT_TRUE(bit_equal(got.o.narrow(0, 0, f.prefix).clone(), first.o));
  EXPECT_TRUE(bit_equal(got.dq.narrow(0, 0, f.prefix).clone(), first.dq));
  auto dk = first.dk.to_vector<double>(), dv = first.dv.to_vector<double>();
  for (size_t i = 0; i < f.lengths.size(); ++i) {
    const Results one = run(alone(all, f, i), device);
    const int64_t begin = all.cu_seqlens.data<int32_t>()[i + 1], length = f.lengths[i];
    for (const auto field : {&Results::o, &Results::dq, &Results::dk, &Results::dv}) {
      const Tensor own = (got.*field).narrow(0, begin, length).clone(),
                   repeated = (one.*field).narrow(0, f.prefix, length).clone();
      if (dtype == DType::kBF16 && field != &Results::o)
        EXPECT_LT(relative_error(own, repeated), 4e-3) << "sequence " << i;
      else
        EXPECT_TRUE(bit_equal(own, repeated)) << "sequence " << i;
    }
    for (int64_t h = 0; h < f.heads; ++h)
      EXPECT_TRUE(bit_equal(got.lse.select(0, h).narrow(0, begin, length).clone(),
                            one.lse.select(0, h).narrow(0, f.prefix, length).clone()));
    const auto add = [&](std::vector<double>& to, const Tensor& from) {
      const auto values = from.narrow(0, 0, f.prefix).clone().to_vector<double>();
      for (size_t j = 0; j < to.size(); ++j) to[j] += values[j];
    };
    add(dk, one.dk);
    add(dv, one.dv);
  }
  const Shape shape = first.dk.shape();
  EXPECT_LT(relative_error(got.dk.narrow(0, 0, f.prefix).clone(), Tensor::from(dk, shape)),
            tolerance);
  EXPECT_LT(relative_error(got.dv.narrow(0, 0, f.prefix).clone(), Tensor::from(dv, shape)),
            tolerance);
}

}  // namespace cohort::kernels::test
