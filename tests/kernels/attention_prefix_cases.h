// Packed sequences that go on from the same beginning, and the same ones repeating it.
#pragma once

#include "kernels/attention/attention.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::test {

struct SharedBeginning {
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
inline Tensor rows(int64_t tokens, int64_t heads, int64_t dim, DType dtype, uint64_t seed) {
  return random_tensor({tokens, heads, dim}, DType::kF32, seed).to(dtype);
}

// On `device`; the results are brought back.
inline Results run(const Packed& from, Device device = {}) {
  Packed in = from;
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.dout, &in.cu_seqlens}) *t = t->to(device);
  if (in.desc.prefixes.defined()) in.desc.prefixes = in.desc.prefixes.to(device);
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

// The beginning once, and then what follows it.
inline Packed shared(const SharedBeginning& f, DType dtype) {
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
inline Packed alone(const Packed& all, const SharedBeginning& f, size_t i) {
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
             .cu_seqlens =
                 Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(f.beginning + length)}),
             .desc = {.window = f.window}};
  out.dout.narrow(0, 0, f.beginning).zero_();
  return out;
}

// The bits are those of repeating the beginning, but for its keys' and values' gradients, which are
// sums of those, and for bf16 gradients, whose tiles begin elsewhere.
inline void expect_as_repeated(const SharedBeginning& f, DType dtype, double tolerance,
                               Device device = {}) {
  const Packed all = shared(f, dtype);
  const Results got = run(all, device);
  // The beginning's own, to which those of all that follow it add up.
  Packed root = all;
  for (Tensor* t : {&root.q, &root.k, &root.v, &root.dout})
    *t = t->narrow(0, 0, f.beginning).clone();
  root.cu_seqlens = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(f.beginning)});
  root.desc.prefixes = {};
  const Results first = run(root, device);
  EXPECT_TRUE(bit_equal(got.o.narrow(0, 0, f.beginning).clone(), first.o));
  EXPECT_TRUE(bit_equal(got.dq.narrow(0, 0, f.beginning).clone(), first.dq));
  auto dk = first.dk.to_vector<double>(), dv = first.dv.to_vector<double>();
  for (size_t i = 0; i < f.lengths.size(); ++i) {
    const Results one = run(alone(all, f, i), device);
    const int64_t begin = all.cu_seqlens.data<int32_t>()[i + 1], length = f.lengths[i];
    for (const auto field : {&Results::o, &Results::dq, &Results::dk, &Results::dv}) {
      const Tensor own = (got.*field).narrow(0, begin, length).clone(),
                   repeated = (one.*field).narrow(0, f.beginning, length).clone();
      if (dtype == DType::kBF16 && field != &Results::o)
        EXPECT_LT(relative_error(own, repeated), 4e-3) << "sequence " << i;
      else
        EXPECT_TRUE(bit_equal(own, repeated)) << "sequence " << i;
    }
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

}  // namespace cohort::kernels::test
