// Cases of int8 attention, and their operands without scales.
#pragma once

#include "kernels/quantize.h"
#include "tests/kernels/attention_cases.h"

namespace cohort::test {

// The case, on the CPU, with queries and keys rounded to i8.
inline AttentionCase in_int8(AttentionCase c) {
  const auto round = [](Tensor& t, Tensor& scales) {
    const int64_t rows = t.dim(0) * t.dim(1);
    auto out = kernels::Quantized::empty({rows, t.dim(2)}, DType::kI8, kernels::ScaleGroups::kRows);
    kernels::quantize({out, t.to(DType::kF64).reshape({rows, t.dim(2)})});
    scales = out.scales.reshape({t.dim(0), t.dim(1)});
    t = out.values.reshape(t.shape());
  };
  round(c.q, c.desc.q_scales);
  round(c.k, c.desc.k_scales);
  return c;
}

// The values that the i8 stand for, in f64, and the values in f64 too: exact products.
inline AttentionCase int8_operands(const AttentionCase& c) {
  AttentionCase f = c;
  const auto scaled = [](const Tensor& t, const Tensor& scales) {
    std::vector<double> x = t.to_vector<double>(), s = scales.to_vector<double>();
    for (size_t i = 0; i < x.size(); ++i) x[i] *= s[i / static_cast<size_t>(t.dim(2))];
    return Tensor::from(x, t.shape());
  };
  f.q = scaled(c.q, c.desc.q_scales);
  f.k = scaled(c.k, c.desc.k_scales);
  f.v = c.v.to(DType::kF64);
  f.desc.q_scales = f.desc.k_scales = {};
  return f;
}

// The case with a scale of NaN for this token and head.
inline AttentionCase with_nan_scale(const AttentionCase& c, Tensor kernels::AttentionDesc::*scales,
                                    int64_t token, int64_t head) {
  AttentionCase f = c;
  Tensor copy = (c.desc.*scales).clone();
  copy.select(0, token).select(0, head).fill_(NAN);
  f.desc.*scales = copy;
  return f;
}

// Expects rows that see a token with a scale of NaN to be NaN, and all others to equal `expected`.
struct NanToken {
  int64_t token, end;  // the rows [token, end) of the first of these heads see it
  int64_t head, heads;
};
inline void expect_nan_rows(const AttentionOutput& got, const AttentionOutput& expected,
                            const NanToken& at) {
  const int64_t dim = got.o.dim(2);
  const std::vector<float> o = got.o.to_vector<float>(), lse = got.lse.to_vector<float>(),
                           all_o = expected.o.to_vector<float>(),
                           all_lse = expected.lse.to_vector<float>();
  for (int64_t t = 0; t < got.o.dim(0); ++t)
    for (int64_t h = 0; h < got.o.dim(1); ++h) {
      const bool is_nan = t >= at.token && t < at.end && h >= at.head && h < at.head + at.heads;
      const auto l = static_cast<size_t>(h * got.o.dim(0) + t);
      EXPECT_TRUE(is_nan ? std::isnan(lse[l]) : lse[l] == all_lse[l]) << "token " << t;
      for (int64_t d = 0; d < dim; ++d) {
        const auto i = static_cast<size_t>((t * got.o.dim(1) + h) * dim + d);
        EXPECT_TRUE(is_nan ? std::isnan(o[i]) : o[i] == all_o[i]) << "token " << t;
      }
    }
}

}  // namespace cohort::test
