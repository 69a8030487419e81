// Packed inputs for the attention tests, and a plain f64 softmax as the oracle. The values of a
// sequence depend on its id and length only, so that the same sequence can be packed with others.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/kv_scales.h"
#include "tests/support/test_util.h"

namespace cohort::test {

struct SequenceSpec {
  int64_t id, length;
};

struct AttentionShape {
  int64_t heads = 2, kv_heads = 2, dim = 16;
  DType dtype = DType::kF64;
  kernels::Mask mask = kernels::Mask::kCausal;
  double p = 0, scale = 0;
  int64_t window = 0;
};

struct AttentionCase {
  AttentionShape shape;
  std::vector<SequenceSpec> sequences;
  Tensor q, k, v, dout, cu;
  kernels::AttentionDesc desc;

  int64_t tokens() const { return q.dim(0); }
  int64_t start(size_t s) const { return cu.data<int32_t>()[s]; }
};

struct AttentionOutput {
  Tensor o, lse;
};

struct AttentionGrads {
  Tensor dq, dk, dv;
};

inline AttentionCase make_case(const AttentionShape& shape,
                               const std::vector<SequenceSpec>& sequences) {
  AttentionCase c{.shape = shape, .sequences = sequences};
  std::vector<int32_t> cu = {0}, positions;
  std::vector<int64_t> ids;
  for (const SequenceSpec& s : sequences) {
    cu.push_back(cu.back() + static_cast<int32_t>(s.length));
    for (int64_t i = 0; i < s.length; ++i) {
      ids.push_back(s.id);
      positions.push_back(static_cast<int32_t>(i));
    }
  }
  c.cu = Tensor::from(cu);
  const auto pack = [&](int64_t heads, uint64_t seed) {
    Tensor all = Tensor::empty({cu.back(), heads, shape.dim}, shape.dtype);
    for (size_t s = 0; s < sequences.size(); ++s)
      all.narrow(0, cu[s], sequences[s].length)
          .copy_(random_tensor({sequences[s].length, heads, shape.dim}, shape.dtype,
                               seed * 1000 + static_cast<uint64_t>(sequences[s].id)));
    return all;
  };
  c.q = pack(shape.heads, 1);
  c.k = pack(shape.kv_heads, 2);
  c.v = pack(shape.kv_heads, 3);
  c.dout = pack(shape.heads, 4);
  c.desc = {.scale = shape.scale, .mask = shape.mask, .window = shape.window, .dropout = {}};
  if (shape.p > 0)
    c.desc.dropout = {.p = shape.p,
                      .seed = 7,
                      .stream = rng_stream(kernels::kDropoutPurpose, 3, 2 << 8 | 1),
                      .sequences = Tensor::from(ids),
                      .positions = Tensor::from(positions)};
  return c;
}

inline AttentionOutput run_forward(const AttentionCase& c) {
  const Device device = c.q.device();
  AttentionOutput out{
      Tensor::full(c.q.shape(), NAN, c.v.dtype(), device),
      Tensor::full({c.q.dim(1), c.tokens()}, NAN, accumulate_dtype(c.v.dtype()), device)};
  kernels::attention_forward({out.o, out.lse, c.q, c.k, c.v, c.cu, c.desc});
  return out;
}

inline AttentionGrads run_backward(const AttentionCase& c, const AttentionOutput& out) {
  const Device device = c.q.device();
  AttentionGrads g{Tensor::full(c.q.shape(), NAN, c.q.dtype(), device),
                   Tensor::full(c.k.shape(), NAN, c.q.dtype(), device),
                   Tensor::full(c.k.shape(), NAN, c.q.dtype(), device)};
  kernels::attention_backward(
      {{g.dq}, {g.dk}, {g.dv}, c.dout, c.q, c.k, c.v, out.o, out.lse, c.cu, c.desc});
  return g;
}

// Materializes the scores, uses the exponentials of the standard library, and draws dropout bit by
// bit. With bf16 as `storage`, P and O are rounded as in the contract.
inline AttentionOutput naive_attention(const AttentionCase& c, DType storage = DType::kF64) {
  const auto q = c.q.to_vector<double>(), k = c.k.to_vector<double>(), v = c.v.to_vector<double>();
  const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1), dim = c.q.dim(2), tokens = c.tokens();
  std::vector<double> o(q.size()), lse(static_cast<size_t>(heads * tokens));
  const double scale = c.desc.scale > 0 ? c.desc.scale : 1 / std::sqrt(static_cast<double>(dim));
  const kernels::DropoutSpec& drop = c.desc.dropout;
  for (size_t s = 0; s < c.sequences.size(); ++s)
    for (int64_t i = 0; i < c.sequences[s].length; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t t = c.start(s) + i, kv = h / (heads / kv_heads);
        const int64_t n = c.shape.mask == kernels::Mask::kCausal ? i + 1 : c.sequences[s].length;
        const int64_t first = c.shape.window > 0 ? std::max<int64_t>(0, n - c.shape.window) : 0;
        std::vector<double> p(static_cast<size_t>(n));
        double m = -INFINITY, l = 0;
        const double* qi = &q[static_cast<size_t>((t * heads + h) * dim)];
        for (int64_t j = first; j < n; ++j) {
          const double* kj = &k[static_cast<size_t>(((c.start(s) + j) * kv_heads + kv) * dim)];
          double score = 0;
          for (int64_t d = 0; d < dim; ++d) score += qi[d] * kj[d];
          p[static_cast<size_t>(j)] = score * scale;
          m = std::max(m, score * scale);
        }
        for (int64_t j = first; j < n; ++j) {
          double& x = p[static_cast<size_t>(j)];
          l += x = std::exp(x - m);
        }
        for (int64_t j = first; j < n; ++j) {
          const bool keep =
              drop.p == 0 ||
              kernels::dropout_keep(drop.seed, drop.stream, c.sequences[s].id, i,
                                    static_cast<uint64_t>(h) << 32 | static_cast<uint64_t>(j),
                                    static_cast<float>(drop.p));
          if (!keep) continue;
          const double* vj = &v[static_cast<size_t>(((c.start(s) + j) * kv_heads + kv) * dim)];
          double weight = p[static_cast<size_t>(j)] / (1 - drop.p);
          if (storage == DType::kBF16)
            weight = static_cast<double>(bf16(static_cast<float>(weight)));
          for (int64_t d = 0; d < dim; ++d)
            o[static_cast<size_t>((t * heads + h) * dim + d)] += weight / l * vj[d];
        }
        lse[static_cast<size_t>(h * tokens + t)] = m + std::log(l);
      }
  return {Tensor::from(o, c.q.shape()).to(storage).to(DType::kF64),
          Tensor::from(lse, {heads, tokens})};
}

inline AttentionCase in_dtype(const AttentionCase& c, DType dtype) {
  AttentionCase f = c;
  f.shape.dtype = dtype;
  for (Tensor* t : {&f.q, &f.k, &f.v, &f.dout}) *t = t->to(dtype);
  return f;
}
inline AttentionCase in_f32(const AttentionCase& c) {
  return in_dtype(c, DType::kF32);
}

// [T, heads, D] with each head rounded to the grid of its scale, [heads] f32; on the CPU.
inline Tensor round_heads(const Tensor& t, const Tensor& scales) {
  std::vector<float> x = t.to(DType::kF32).to_vector<float>();
  for (size_t i = 0; i < x.size(); ++i) {
    const int64_t head = static_cast<int64_t>(i) / t.dim(2) % t.dim(1);
    x[i] = kernels::E4m3Grid(scales.data<float>()[head])(static_cast<float>(bf16(x[i])));
  }
  return Tensor::from(x, t.shape()).to(t.dtype());
}
// Some scales of the heads of queries, if there are any, keys and values: some that let most
// numbers be subnormal or round to zero.
inline Tensor some_scales(int64_t kv_heads, int64_t query_heads = 0) {
  std::vector<float> out;
  for (int64_t i = 0; i < query_heads; ++i) out.push_back(std::ldexp(1.0f, int(i % 5) - 8));
  for (int64_t i = 0; i < 2 * kv_heads; ++i) out.push_back(std::ldexp(1.0f, int(3 * i % 9) - 4));
  return Tensor::from(out);
}
// Rounds the heads of keys and values, or of queries too, for FP8 attention, which `desc` then has.
inline void round_qkv(Tensor& q, Tensor& k, Tensor& v, kernels::AttentionDesc& desc,
                      const Tensor& scales) {
  const int64_t kv_heads = k.dim(1), queries = scales.numel() - 2 * kv_heads;
  if (queries > 0) {
    q = round_heads(q, scales.narrow(0, 0, queries));
    desc.fp8_scales = scales;
  }
  k = round_heads(k, scales.narrow(0, queries, kv_heads));
  v = round_heads(v, scales.narrow(0, queries + kv_heads, kv_heads));
}
inline AttentionCase rounded(AttentionCase c, const Tensor& scales) {
  round_qkv(c.q, c.k, c.v, c.desc, scales);
  return c;
}

// [T, H + 2 Hkv, D]: concatenated heads.
inline Tensor side_by_side(const Tensor& q, const Tensor& k, const Tensor& v) {
  const int64_t heads = q.dim(1), kv_heads = k.dim(1);
  Tensor all = Tensor::empty({q.dim(0), heads + 2 * kv_heads, q.dim(2)}, q.dtype(), q.device());
  all.narrow(1, 0, heads).copy_(q);
  all.narrow(1, heads, kv_heads).copy_(k);
  all.narrow(1, heads + kv_heads, kv_heads).copy_(v);
  return all;
}
// The case with queries, keys and values as views of one tensor.
inline AttentionCase merged(const AttentionCase& c) {
  AttentionCase f = c;
  const Tensor all = side_by_side(c.q, c.k, c.v);
  const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1);
  f.q = all.narrow(1, 0, heads);
  f.k = all.narrow(1, heads, kv_heads);
  f.v = all.narrow(1, heads + kv_heads, kv_heads);
  return f;
}
// run_backward() with merged inputs and gradients as views of one tensor.
inline AttentionGrads run_merged_backward(const AttentionCase& c, const AttentionOutput& out) {
  const AttentionGrads own{Tensor::full(c.q.shape(), NAN, c.q.dtype(), c.q.device()),
                           Tensor::full(c.k.shape(), NAN, c.q.dtype(), c.q.device()),
                           Tensor::full(c.k.shape(), NAN, c.q.dtype(), c.q.device())};
  AttentionCase grads = c;
  grads.q = own.dq;
  grads.k = own.dk;
  grads.v = own.dv;
  grads = merged(grads);
  const AttentionCase m = merged(c);
  kernels::attention_backward(
      {{grads.q}, {grads.k}, {grads.v}, m.dout, m.q, m.k, m.v, out.o, out.lse, m.cu, m.desc});
  return {grads.q.clone(), grads.k.clone(), grads.v.clone()};
}

// A copy of `values` [T, H, D] as the first columns of rows with `padding` more.
struct WideRows {
  explicit WideRows(const Tensor& values, int64_t padding = 64)
      : all(Tensor::full({values.dim(0), values.dim(1) * values.dim(2) + padding}, 42,
                         values.dtype(), values.device())),
        padding_columns(all.narrow(1, all.dim(1) - padding, padding)),
        view(all.narrow(1, 0, all.dim(1) - padding).reshape(values.shape())) {
    view.copy_(values);
  }
  // True if the padding is unchanged.
  bool intact() const {
    return bit_equal(padding_columns, Tensor::full(padding_columns.shape(), 42, all.dtype()));
  }
  Tensor all, padding_columns, view;
};
// Expects run_forward() and run_backward() to have the same bits with o in wider rows.
inline void expect_output_may_be_strided(const AttentionCase& c) {
  const AttentionOutput out = run_forward(c);
  WideRows o(Tensor::full(out.o.shape(), NAN, out.o.dtype(), out.o.device()));
  Tensor lse = Tensor::full(out.lse.shape(), NAN, out.lse.dtype(), out.lse.device());
  kernels::attention_forward({o.view, lse, c.q, c.k, c.v, c.cu, c.desc});
  EXPECT_TRUE(bit_equal(o.view, out.o) && bit_equal(lse, out.lse) && o.intact());
  const AttentionGrads expected = run_backward(c, out), grads = run_backward(c, {o.view, lse});
  EXPECT_TRUE(bit_equal(grads.dq, expected.dq) && bit_equal(grads.dk, expected.dk) &&
              bit_equal(grads.dv, expected.dv));
}

// Result is for the kernels: start() works for cases on the CPU only.
inline AttentionCase on_device(const AttentionCase& c, Device device) {
  AttentionCase f = c;
  for (Tensor* t : {&f.q, &f.k, &f.v, &f.dout, &f.cu}) *t = t->to(device);
  for (Tensor* t : {&f.desc.fp8_scales, &f.desc.q_scales, &f.desc.k_scales}) *t = t->to(device);
  if (f.shape.p > 0)
    for (Tensor* t : {&f.desc.dropout.sequences, &f.desc.dropout.positions}) *t = t->to(device);
  return f;
}

// d/dx of sum(dout * o) by central differences. The difference is taken per element of o, so that
// outputs independent of x contribute exactly zero.
inline double numeric_gradient(const AttentionCase& c, double* x) {
  const double at = *x, h = 1e-4;
  *x = at + h;
  const Tensor up = run_forward(c).o;
  *x = at - h;
  const Tensor down = run_forward(c).o;
  *x = at;
  double sum = 0;
  const double *a = up.data<double>(), *b = down.data<double>(), *w = c.dout.data<double>();
  for (int64_t i = 0; i < up.numel(); ++i) sum += w[i] * (a[i] - b[i]);
  return sum / (2 * h);
}

// A copy that starts one element after a multiple of 16 bytes, which only the generic kernels take.
inline Tensor at_odd_address(const Tensor& t) {
  Tensor buffer = Tensor::empty({t.numel() + 8}, t.dtype(), t.device());
  Tensor out = buffer.narrow(0, 1, t.numel()).reshape(t.shape());
  out.copy_(t);
  return out;
}

}  // namespace cohort::test
