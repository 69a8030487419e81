// Elementary functions for hot loops. The f32 versions are branch-free and use only operations that
// a compiler turns into vector instructions one to one (fma, compare and select, integer add and
// shift), so a scalar call and a vectorised loop give the same bits. f64, which is for checks,
// calls the standard library. The polynomials are our own minimax fits.
//
// On the device most of the work is on the special function unit, in a third of the instructions,
// so that elementwise kernels stay memory-bound. Each function states its accuracy there.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

// Marks a loop whose iterations are independent, even if output and input are one array. The length
// asks for 512-bit vectors on processors that have them; others ignore it.
#define COHORT_VECTORIZE _Pragma("omp simd simdlen(16)")

namespace cohort::kernels {
namespace detail {

// p 2^n for n in [-252, 254], rounded once: two factors keep each power of two a normal number.
COHORT_HD inline float scale_by_power(float p, int32_t n) {
  const int32_t half = n >> 1;
  const float a = std::bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  const float b = std::bit_cast<float>(static_cast<uint32_t>(n - half + 127) << 23);
  return p * a * b;
}

// Adding 1.5 2^23 leaves the nearest integer in the low bits of the sum.
inline constexpr float kRound = 12582912.0f;
COHORT_HD inline int32_t rounded_bits(float shifted) {
  return static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
}

}  // namespace detail

// e^x within 1 ulp (device: 2): +inf above the range, denormals and 0 below it, NaN for NaN.
COHORT_HD inline float vexp(float x) {
#ifdef __CUDA_ARCH__
  return ::expf(x);
#else
  // Written so that a NaN fails both comparisons and passes through.
  float y = x > 89.0f ? 89.0f : x;
  y = y < -104.0f ? -104.0f : y;
  const float shifted = std::fma(y, 1.44269504f, detail::kRound);
  const float n = shifted - detail::kRound;
  // ln 2 in two parts, the first short enough that n times it is exact.
  float r = std::fma(n, -0.693145752f, y);
  r = std::fma(n, -1.42860677e-6f, r);
  float q = 1.38145985e-3f;
  q = std::fma(q, r, 8.36871688e-3f);
  q = std::fma(q, r, 4.16683880e-2f);
  q = std::fma(q, r, 1.66665206e-1f);
  q = std::fma(q, r, 4.99999934e-1f);
  const float p = std::fma(r * r, q, r) + 1.0f;
  return detail::scale_by_power(p, detail::rounded_bits(shifted));
#endif
}
COHORT_HD inline double vexp(double x) {
  return std::exp(x);
}

// 1 / (1 + e^-x) within 2^-22 relative, NaN for NaN. On the device within 2^-21, and 0 below
// 2^-126: the reciprocal is within 1 ulp there, since a division that rounds correctly is long and
// branches.
COHORT_HD inline float vsigmoid(float x) {
  const float s = 1.0f + vexp(-x);
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(s));
  return y;
#else
  return 1.0f / s;
#endif
}
COHORT_HD inline double vsigmoid(double x) {
  return 1 / (1 + vexp(-x));
}

// 2^x within 1 ulp, exact for integers; the same limits as vexp. Not for the device.
inline float vexp2(float x) {
  float y = x > 129.0f ? 129.0f : x;
  y = y < -151.0f ? -151.0f : y;
  const float shifted = y + detail::kRound;
  const float r = y - (shifted - detail::kRound);
  float q = 1.53533595e-4f;
  q = std::fma(q, r, 1.33988770e-3f);
  q = std::fma(q, r, 9.61843738e-3f);
  q = std::fma(q, r, 5.55033247e-2f);
  q = std::fma(q, r, 2.40226479e-1f);
  q = std::fma(q, r, 6.93147203e-1f);
  return detail::scale_by_power(std::fma(q, r, 1.0f), detail::rounded_bits(shifted));
}
inline double vexp2(double x) {
  return std::exp2(x);
}

// e^(-x^2 / 2), but for one rounding of the exponent (device: two and a half).
COHORT_HD inline float vgauss(float x) {
#ifdef __CUDA_ARCH__
  return ::exp2f(-0.721347520f * x * x);
#else
  return vexp(-0.5f * x * x);
#endif
}
COHORT_HD inline double vgauss(double x) {
  return std::exp(-0.5 * x * x);
}

// ln x: -inf for 0, NaN below it. On the device within 1e-6 relative: the special function unit's
// log2 is within 2^-22, which is too much for small results only; a polynomial has those.
COHORT_HD inline float vlog(float x) {
#ifdef __CUDA_ARCH__
  const float f = x - 1.0f;
  float q = -1.52666688e-1f;
  q = ::fmaf(q, f, 1.69905588e-1f);
  q = ::fmaf(q, f, -1.64408371e-1f);
  q = ::fmaf(q, f, 1.98181689e-1f);
  q = ::fmaf(q, f, -2.50063211e-1f);
  q = ::fmaf(q, f, 3.33367348e-1f);
  q = ::fmaf(q, f, -4.99999613e-1f);
  q = ::fmaf(q, f, 1.0f);
  return ::fabsf(f) < 0.333333333f ? f * q : 0.693147181f * ::__log2f(x);
#else
  return std::log(x);
#endif
}
COHORT_HD inline double vlog(double x) {
  return std::log(x);
}

// The standard normal distribution function Phi(x) with e = exp(-x^2 / 2) given, as callers need it
// for the density too: Phi(-a) = e Q(a), where Q is smooth and falls like 0.4 / a, so a polynomial
// in t = 1 / (1 + 0.35 a). Within 1e-6 relative for x > -5; below, the rounding of x^2 / 2
// dominates. On the device t is within 1 ulp.
COHORT_HD inline float normal_cdf(float x, float e) {
  const float s = std::fma(0.35f, std::fabs(x), 1.0f);
#ifdef __CUDA_ARCH__
  float t;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(s));
#else
  const float t = 1.0f / s;
#endif
  float q = -2.91579204e-2f;
  q = std::fma(q, t, 1.44031091e-1f);
  q = std::fma(q, t, -2.55839362e-1f);
  q = std::fma(q, t, 1.59320103e-1f);
  q = std::fma(q, t, -2.32126294e-2f);
  q = std::fma(q, t, 1.05552615e-1f);
  q = std::fma(q, t, 1.19821261e-1f);
  q = std::fma(q, t, 1.39863519e-1f);
  q = std::fma(q, t, 1.39621307e-1f);
  const float tail = e * (t * q);
#ifdef __CUDA_ARCH__
  return x > 0.0f ? 1.0f - tail : tail;
#else
  // A select between constants: compilers do not evaluate both sides of a select between
  // expressions, and would not vectorise the loop.
  const float sign = x > 0.0f ? -1.0f : 1.0f, one = x > 0.0f ? 1.0f : 0.0f;
  return std::fma(sign, tail, one);
#endif
}
COHORT_HD inline double normal_cdf(double x, double) {
  return 0.5 * std::erfc(-x * 0.70710678118654752440);
}

}  // namespace cohort::kernels
