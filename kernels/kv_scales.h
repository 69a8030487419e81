// Queries, keys and values in eight bits: their scales, and the grid of numbers to which they are
// rounded.
#pragma once

#include <cmath>

#include "kernels/quantize.h"

namespace cohort::kernels {

// Rounds to the nearest multiple s q of an e4m3 number q, ties to even. s is a power of two, so
// that s q is exact in bf16. If s or x is not finite, the result is NaN.
struct E4m3Grid {
  float scale, inverse;

  COHORT_HD explicit E4m3Grid(float s) : scale(s), inverse(1 / s) {}
  // x is a bf16 value.
  COHORT_HD e4m3 quantize(float x) const { return e4m3(x * inverse); }
  COHORT_HD float operator()(float x) const { return static_cast<float>(quantize(x)) * scale; }
};

// Scales of keys and values, and of queries for FP8 attention, that follow from the weights, so
// that nothing is calibrated and no value is clipped: for every key head the least power of two s
// with |k| <= 448 s for all rotated keys k, and likewise for values and for rotated queries. The
// input of the layer is x g + b, g and b those of the norm before it, with |x|_2 <= sqrt(C). So
// |k_i| <= 1.07 (sqrt(C (|w_i g|_2^2 + |w_j g|_2^2)) + |w_i b|_1 + |w_j b|_1) + |bias_i| +
// |bias_j|, where j is the channel that is rotated with i, and 1.07 covers the rounding of
// products. An adapter adds |s B_i|_2 |A g|_F to |w_i g|_2, and |s B_i|_2 times the norm of
// |A_r b|_1 over its rows r to |w_i b|_1. After RMSNorm of each head's keys,
// |k_i| <= 1.07 sqrt(D) max |g_k|, and so for queries. Typical keys are 1 / sqrt(2 C) of the bound,
// which costs no precision: e4m3 has four bits in each of 15 binades. A bound above 448 times 2^7,
// or one that is not finite, gives NaN. A scale depends on the device, by the rounding of its sums.
struct KvScales {
  Tensor& scales;           // [N] f32 of the heads of w: Hkv of keys and Hkv of values, behind
                            // those of queries, if N is larger
  const Tensor& w;          // [N D, C]: the rows of these heads; columns of a wider matrix
  const Tensor& bias;       // [N D]; may be undefined
  const Tensor& norm;       // [C]: weights of the norm, to which norm_offset is added
  const Tensor& norm_bias;  // [C], of LayerNorm; may be undefined
  int64_t kv_heads;         // Hkv
  double norm_offset = 0;
  Tensor q_norm = {}, k_norm = {};  // [D], of RMSNorm of each head's queries and keys; or undefined
  double rotary_gain = 1;           // largest factor by which the rotation scales a query or key
  Tensor sb = {}, a = {};           // [N D, P], columns of a wider matrix, and [P, C]; or undefined
};
COHORT_KERNEL(void kv_scales(const KvScales& args));

// The arithmetic of the bound, the same on host and device: the terms of a row, |w g|_2 and |w b|_1
// with those of an adapter, and |bias|. A value, which is not rotated, has no partner.
struct KvRow {
  float weights = 0, shifts = 0, bias = 0;
};
inline constexpr float kRoundingMargin = 1.07f;
COHORT_HD inline float kv_bound(const KvRow& row, const KvRow& partner, int64_t columns) {
  const float weights = std::sqrt(row.weights * row.weights + partner.weights * partner.weights);
  return kRoundingMargin *
             (std::sqrt(static_cast<float>(columns)) * weights + row.shifts + partner.shifts) +
         row.bias + partner.bias;
}
// Bound of a normed head by a weight of that norm: each element of a head is at most sqrt(D).
COHORT_HD inline float normed_bound(float weight, int64_t dim, float rotary_gain) {
  return kRoundingMargin * std::sqrt(static_cast<float>(dim)) * std::fabs(weight) * rotary_gain;
}
// The scale for a bound by its bits (magnitude_bits(), whose largest is that of the largest bound).
COHORT_HD inline float kv_scale(uint32_t bound) {
  const float scale = GroupScale<e4m3>(bound).scale;
  return scale <= 0x1p7f ? scale : std::bit_cast<float>(kNanBits);
}

}  // namespace cohort::kernels
