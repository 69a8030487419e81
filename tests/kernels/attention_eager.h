// Attention and its gradients as a framework without a fused kernel computes them: scores and
// probabilities are materialized, and each operation rounds its result. The usual reference for
// errors of flash attention (Dao et al. 2022 and later).
#pragma once

#include "tests/kernels/attention_cases.h"

namespace cohort::test {

struct EagerAttention {
  AttentionOutput out;  // O, and the log-sum-exp of the rounded scores, not rounded itself
  AttentionGrads grads;
  Tensor dbias, dsinks;  // undefined without the terms
};

// The definition of the masks of AttentionDesc: whether query i of sequence s, of n tokens, sees
// key j.
inline bool sees(const kernels::AttentionDesc& desc, int64_t s, int64_t i, int64_t j, int64_t n) {
  if (desc.tiles.defined()) {
    const int64_t row = i / kernels::kMaskTile, column = j / kernels::kMaskTile;
    const Tensor words = desc.tiles.to(Device{});
    if (row >= words.dim(0) || column >= words.dim(0)) return false;
    const auto word =
        static_cast<uint32_t>(words.data<int32_t>()[row * words.dim(1) + column / 32]);
    if ((word >> column % 32 & 1) == 0) return false;
  }
  if (desc.prefix_lm.defined() && j < desc.prefix_lm.to(Device{}).data<int32_t>()[s]) return j < n;
  if (desc.window > 0 && j <= i - desc.window) return false;
  if (desc.mask == kernels::Mask::kCausal) return j <= i;
  return j < n && (desc.window_right < 0 || j <= i + desc.window_right);
}
// The value of an entry of a small tensor.
inline double entry(const Tensor& t, int64_t i) {
  return t.to(Device{}).to(DType::kF64).data<double>()[i];
}
// The modified score of a scaled score z, and its derivative.
struct ModifiedScore {
  double value, derivative;
};
inline int64_t bias_column(const kernels::AttentionDesc& desc, int64_t i, int64_t j) {
  const int64_t radius = desc.bias.dim(1) / 2;
  return std::clamp(j - i, -radius, radius) + radius;
}
inline ModifiedScore modified(const kernels::AttentionDesc& desc, const std::vector<double>& bias,
                              double slope, int64_t i, int64_t j, double z) {
  double derivative = 1;
  if (desc.soft_cap > 0) {
    const double t = std::tanh(z / desc.soft_cap);
    z = desc.soft_cap * t;
    derivative = 1 - t * t;
  }
  const double distance = std::fabs(static_cast<double>(i - j));
  const double factor =
      desc.distance.floor + (1 - desc.distance.floor) * std::exp(-desc.distance.rate * distance);
  z = z * factor - slope * distance;
  if (!bias.empty()) z += bias[static_cast<size_t>(bias_column(desc, i, j))];
  return {z, derivative * factor};
}

// Row-major matrix; matmuls accumulate in f64.
struct EagerMatrix {
  int64_t rows, columns;
  std::vector<double> values;

  EagerMatrix(int64_t rows_, int64_t columns_)
      : rows(rows_), columns(columns_), values(static_cast<size_t>(rows_ * columns_)) {}
  double* row(int64_t i) { return values.data() + i * columns; }
  const double* row(int64_t i) const { return values.data() + i * columns; }
  void round_to(DType storage) {
    if (storage != DType::kBF16) return;
    for (double& x : values) x = static_cast<double>(bf16(static_cast<float>(x)));
  }
  EagerMatrix transposed() const {
    EagerMatrix t(columns, rows);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) t.row(j)[i] = row(i)[j];
    return t;
  }
};

inline EagerMatrix eager_matmul(const EagerMatrix& a, const EagerMatrix& b, DType storage) {
  EagerMatrix c(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t k = 0; k < a.columns; ++k)
      for (int64_t j = 0; j < b.columns; ++j) c.row(i)[j] += a.row(i)[k] * b.row(k)[j];
  c.round_to(storage);
  return c;
}

// Computes a case on the CPU in f64, without dropout and prefixes. With f64 as `storage` nothing is
// rounded.
inline EagerAttention eager_attention(const AttentionCase& c, DType storage) {
  const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1), dim = c.q.dim(2);
  const int64_t group = heads / kv_heads;
  const double scale = kernels::softmax_scale(c.desc, dim);
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::kF64); };
  EagerAttention e{
      .out = {zeros(c.q.shape()), zeros({heads, c.tokens()})},
      .grads = {.dq = zeros(c.q.shape()), .dk = zeros(c.k.shape()), .dv = zeros(c.k.shape())}};
  const kernels::AttentionDesc& desc = c.desc;
  if (desc.bias.defined()) e.dbias = zeros(desc.bias.shape());
  if (desc.sinks.defined()) e.dsinks = zeros(desc.sinks.shape());
  for (size_t s = 0; s < c.sequences.size(); ++s) {
    const int64_t start = c.start(s), n = c.sequences[s].length;
    const auto head = [&](const Tensor& t, int64_t h) {
      EagerMatrix m(n, dim);
      for (int64_t i = 0; i < n; ++i)
        std::copy_n(t.data<double>() + ((start + i) * t.dim(1) + h) * dim, dim, m.row(i));
      return m;
    };
    const auto add = [&](Tensor& t, int64_t h, const EagerMatrix& m) {
      for (int64_t i = 0; i < n; ++i)
        for (int64_t d = 0; d < dim; ++d)
          t.data<double>()[((start + i) * t.dim(1) + h) * dim + d] += m.row(i)[d];
    };
    for (int64_t h = 0; h < heads; ++h) {
      const EagerMatrix q = head(c.q, h), k = head(c.k, h / group), v = head(c.v, h / group),
                        dout = head(c.dout, h);
      EagerMatrix p = eager_matmul(q, k.transposed(), storage);
      for (double& x : p.values) x *= scale;
      p.round_to(storage);
      std::vector<double> bias;
      if (desc.bias.defined())
        bias = desc.bias.narrow(0, h, 1).to(Device{}).to(DType::kF64).to_vector<double>();
      const double slope = desc.slopes.defined() ? entry(desc.slopes, h) : 0;
      const double sink = desc.sinks.defined() ? entry(desc.sinks, h) : -INFINITY;
      EagerMatrix derivatives(n, n);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j) {
          const ModifiedScore z = modified(desc, bias, slope, i, j, p.row(i)[j]);
          p.row(i)[j] = sees(desc, static_cast<int64_t>(s), i, j, n) ? z.value : -INFINITY;
          derivatives.row(i)[j] = z.derivative;
        }
      p.round_to(storage);
      std::vector<double> sink_p(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) {  // softmax of each row over its visible keys
        double* const row = p.row(i);
        const double largest = std::max(sink, *std::max_element(row, row + n));
        const bool none = largest == -INFINITY;
        double sum = none ? 0 : std::exp(sink - largest);
        sink_p[static_cast<size_t>(i)] = sum;
        for (int64_t j = 0; j < n; ++j) sum += row[j] = none ? 0 : std::exp(row[j] - largest);
        for (int64_t j = 0; j < n; ++j) row[j] = none ? 0 : row[j] / sum;
        if (!none) sink_p[static_cast<size_t>(i)] /= sum;
        e.out.lse.data<double>()[h * c.tokens() + start + i] = largest + std::log(sum);
      }
      p.round_to(storage);
      add(e.out.o, h, eager_matmul(p, v, storage));
      add(e.grads.dv, h / group, eager_matmul(p.transposed(), dout, storage));
      EagerMatrix ds = eager_matmul(dout, v.transposed(), storage);
      for (int64_t i = 0; i < n; ++i) {
        double delta = 0;
        for (int64_t j = 0; j < n; ++j) delta += p.row(i)[j] * ds.row(i)[j];
        for (int64_t j = 0; j < n; ++j) ds.row(i)[j] = p.row(i)[j] * (ds.row(i)[j] - delta);
        if (desc.sinks.defined())
          e.dsinks.data<double>()[h] -= sink_p[static_cast<size_t>(i)] * delta;
      }
      ds.round_to(storage);
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j) {
          if (desc.bias.defined())
            e.dbias.data<double>()[h * desc.bias.dim(1) + bias_column(desc, i, j)] += ds.row(i)[j];
          ds.row(i)[j] *= derivatives.row(i)[j];
        }
      ds.round_to(storage);
      for (double& x : ds.values) x *= scale;
      ds.round_to(storage);
      add(e.grads.dq, h, eager_matmul(ds, k, storage));
      add(e.grads.dk, h / group, eager_matmul(ds.transposed(), q, storage));
    }
  }
  // The sum over the heads of a group is an operation, too, and rounds.
  for (Tensor* t : {&e.grads.dk, &e.grads.dv}) *t = t->to(storage).to(DType::kF64);
  return e;
}

}  // namespace cohort::test
