// The layouts of queries, keys and values that attention takes, for tests on all devices.
#pragma once

#include "tests/kernels/attention_cases.h"

namespace cohort::test {

struct QkvView {
  Tensor q, k, v;  // [T, H, D], [T, Hkv, D]
};
struct QkvLayout {
  const char* name;
  bool same_heads;  // only for as many key heads as query heads
  // Views of new memory, for q [T, H, D] and k [T, Hkv, D].
  QkvView (*make)(const Tensor& q, const Tensor& k);
};

inline Tensor nan_tensor(const Shape& shape, const Tensor& like) {
  return Tensor::full(shape, NAN, like.dtype(), like.device());
}

inline const QkvLayout kQkvLayouts[] = {
    {"separate q, k, v", false,
     [](const Tensor& q, const Tensor& k) {
       return QkvView{nan_tensor(q.shape(), q), nan_tensor(k.shape(), q), nan_tensor(k.shape(), q)};
     }},
    {"packed kv [T, 2, Hkv, D]", false,
     [](const Tensor& q, const Tensor& k) {
       const Tensor kv = nan_tensor({k.dim(0), 2, k.dim(1), k.dim(2)}, q);
       return QkvView{nan_tensor(q.shape(), q), kv.select(1, 0), kv.select(1, 1)};
     }},
    {"packed kv [T, Hkv, 2, D]", false,
     [](const Tensor& q, const Tensor& k) {
       const Tensor kv = nan_tensor({k.dim(0), k.dim(1), 2, k.dim(2)}, q);
       return QkvView{nan_tensor(q.shape(), q), kv.select(2, 0), kv.select(2, 1)};
     }},
    {"packed qkv [T, H + 2 Hkv, D]", false,
     [](const Tensor& q, const Tensor& k) {
       const Tensor qkv = nan_tensor({q.dim(0), q.dim(1) + 2 * k.dim(1), q.dim(2)}, q);
       return QkvView{qkv.narrow(1, 0, q.dim(1)), qkv.narrow(1, q.dim(1), k.dim(1)),
                      qkv.narrow(1, q.dim(1) + k.dim(1), k.dim(1))};
     }},
    {"packed qkv [T, 3, H, D]", true,
     [](const Tensor& q, const Tensor&) {
       const Tensor qkv = nan_tensor({q.dim(0), 3, q.dim(1), q.dim(2)}, q);
       return QkvView{qkv.select(1, 0), qkv.select(1, 1), qkv.select(1, 2)};
     }},
    {"packed qkv [T, H, 3, D]", true,
     [](const Tensor& q, const Tensor&) {
       const Tensor qkv = nan_tensor({q.dim(0), q.dim(1), 3, q.dim(2)}, q);
       return QkvView{qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2)};
     }},
    {"heads first, and strides of their own", false,
     [](const Tensor& q, const Tensor& k) {
       const Tensor all_q = nan_tensor({q.dim(1), q.dim(0), q.dim(2)}, q),
                    all_v = nan_tensor({k.dim(0), k.dim(1), k.dim(2) + 24}, q);
       return QkvView{all_q.transpose(0, 1), nan_tensor(k.shape(), q),
                      all_v.narrow(2, 8, k.dim(2))};
     }},
};

// Every layout gives the bits of separate tensors, forward and backward.
inline void expect_layouts_agree(const AttentionCase& c) {
  const AttentionOutput expected = run_forward(c);
  const AttentionGrads grads = run_backward(c, expected);
  for (const QkvLayout& layout : kQkvLayouts) {
    if (layout.same_heads && c.q.dim(1) != c.k.dim(1)) continue;
    SCOPED_TRACE(str(layout.name, ", D ", c.q.dim(2)));
    const QkvView in = layout.make(c.q, c.k), out = layout.make(c.q, c.k);
    AttentionCase f = c;
    for (const auto& [to, from] : {std::pair(in.q, c.q), {in.k, c.k}, {in.v, c.v}})
      Tensor(to).copy_(from);
    f.q = in.q;
    f.k = in.k;
    f.v = in.v;
    // The output and its gradient, too, have the strides of this layout's queries.
    AttentionOutput result{layout.make(c.q, c.k).q, nan_tensor(expected.lse.shape(), expected.lse)};
    f.dout = layout.make(c.q, c.k).q;
    f.dout.copy_(c.dout);
    kernels::attention_forward({result.o, result.lse, f.q, f.k, f.v, f.cu, f.desc});
    EXPECT_TRUE(bit_equal(result.o.contiguous(), expected.o) &&
                bit_equal(result.lse, expected.lse));
    AttentionGrads g{out.q, out.k, out.v};
    kernels::attention_backward(
        {{g.dq}, {g.dk}, {g.dv}, f.dout, f.q, f.k, f.v, result.o, result.lse, f.cu, f.desc});
    EXPECT_TRUE(bit_equal(g.dq.contiguous(), grads.dq) && bit_equal(g.dk.contiguous(), grads.dk) &&
                bit_equal(g.dv.contiguous(), grads.dv));
  }
}

}  // namespace cohort::test
