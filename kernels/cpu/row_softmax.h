// The row function of every log-prob: training's fused head and the sampler call it on the same
// logits and get the same bits. Order: the largest logit; exponentials summed in lanes over blocks
// of kSoftmaxBlock entries; block sums added in ascending order in f64.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/cpu/reduce.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {

inline constexpr int64_t kSoftmaxBlock = 512;

// With d[v] = (logits[v] - largest) / temperature:
struct RowSoftmax {
  double largest = 0;   // the largest logit, not divided by the temperature
  double sum = 0;       // sum of e^d
  double weighted = 0;  // sum of e^d d
  double inverse_temperature = 1;

  double log_sum() const { return std::log(sum); }
  // Log-sum-exp of the logits at the temperature.
  double lse() const { return largest * inverse_temperature + log_sum(); }
  double entropy() const { return log_sum() - weighted / sum; }
  // False if NaN or an infinite largest logit leave no distribution.
  bool valid() const { return std::isfinite(largest) && std::isfinite(sum); }
};

template <class T>
inline T scaled_logit(T logit, T largest, T inverse_temperature) {
  return (logit - largest) * inverse_temperature;
}

// Further results for a sampler: e^d of every entry, and its sum over every block.
template <class T>
struct SoftmaxWeights {
  std::vector<T> weights;
  std::vector<double> block_sums;
  explicit SoftmaxWeights(int64_t vocab)
      : weights(static_cast<size_t>(vocab)),
        block_sums(static_cast<size_t>(ceil_div(vocab, kSoftmaxBlock))) {}
};

// `keep` may be null.
template <class T>
RowSoftmax row_softmax(const T* logits, int64_t vocab, double temperature,
                       SoftmaxWeights<T>* keep) {
  const T largest = lane_max(logits, vocab), inverse = static_cast<T>(1 / temperature);
  RowSoftmax row{.largest = static_cast<double>(largest),
                 .inverse_temperature = static_cast<double>(inverse)};
  T e[kSoftmaxBlock], e_times_d[kSoftmaxBlock];
  for (int64_t begin = 0; begin < vocab; begin += kSoftmaxBlock) {
    const int64_t n = std::min(kSoftmaxBlock, vocab - begin);
    COHORT_VECTORIZE
    for (int64_t i = 0; i < n; ++i) {
      const T d = scaled_logit(logits[begin + i], largest, inverse);
      e[i] = vexp(d);
      // An excluded entry (logit -inf) has e = 0, and adds 0 instead of 0 times -inf = NaN.
      e_times_d[i] = e[i] > 0 ? e[i] * d : T(0);
    }
    const double sum = static_cast<double>(lane_sum<T>(n, [&](int64_t i) { return e[i]; }));
    row.sum += sum;
    row.weighted += static_cast<double>(lane_sum<T>(n, [&](int64_t i) { return e_times_d[i]; }));
    if (keep != nullptr) {
      std::copy_n(e, n, keep->weights.data() + begin);
      keep->block_sums[static_cast<size_t>(begin / kSoftmaxBlock)] = sum;
    }
  }
  return row;
}

template <class T>
T row_logprob(const RowSoftmax& row, T logit) {
  const T d =
      scaled_logit(logit, static_cast<T>(row.largest), static_cast<T>(row.inverse_temperature));
  return static_cast<T>(static_cast<double>(d) - row.log_sum());
}

}  // namespace cohort::kernels
