// The rule of stick-breaking attention, and its elementary functions in base 2.
#pragma once

#include "kernels/attention/score_rule.h"
#include "kernels/attention/stick_breaking.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {

// Keys per tile in the canonical order.
inline constexpr int64_t kStickTile = 64;

// A row sees the keys before its own.
template <class T>
struct StickRule : ScoreRule<T> {
  StickRule(const StickBreakingDesc& desc, int64_t head_dim)
      : ScoreRule<T>({.scale = desc.scale}, head_dim) {}
  using Bound = const StickRule&;
  COHORT_HD Bound bind(int /*sequence*/, int /*head*/, int /*keys*/) const { return *this; }
  template <class Int>
  COHORT_HD Int end_key(Int position, Int) const {
    return position;
  }
  template <class Int>
  COHORT_HD IndexRange<Int> keys_of(const IndexRange<Int>& positions, Int) const {
    return {0, std::max<Int>(0, positions.end - 1)};
  }
  template <class Int>
  COHORT_HD IndexRange<Int> positions_of(const IndexRange<Int>& keys, Int count) const {
    return {keys.first + 1, count};
  }
};

// log2(1 + t) for t in [0, 1], in f32 within 2e-7 relative: a minimax polynomial.
COHORT_HD inline float log2_one_plus(float t) {
  float q = 7.54918205e-3f;
  q = std::fma(q, t, -4.25670631e-2f);
  q = std::fma(q, t, 1.12856194e-1f);
  q = std::fma(q, t, -1.97118968e-1f);
  q = std::fma(q, t, 2.75641412e-1f);
  q = std::fma(q, t, -3.58408481e-1f);
  q = std::fma(q, t, 4.80692953e-1f);
  q = std::fma(q, t, -7.21340179e-1f);
  q = std::fma(q, t, 1.44269502f);
#ifdef __CUDA_ARCH__
  return __fmul_rn(q,
                   t);  // never fused with what it is added to, so that all kernels have its bits
#else
  return q * t;
#endif
}
inline double log2_one_plus(double t) {
  return std::log1p(t) * kLog2e;
}

}  // namespace cohort::kernels
