// AdamW for one element, in the one order of operations that the CPU and CUDA share: both compile
// it without contraction, so that f32 gives the same bits on either.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/rng.h"
#include "kernels/optimizer.h"

namespace cohort::kernels {

// Scalars of one step, rounded once.
template <class T>
struct AdamWFactors {
  T beta2, new_m, new_v, root_correction, eps, step_size;
};

template <class T>
AdamWFactors<T> adamw_factors(const AdamWDesc& d) {
  const double correction1 = 1 - std::pow(d.beta1, static_cast<double>(d.step));
  const double correction2 = 1 - std::pow(d.beta2, static_cast<double>(d.step));
  return {.beta2 = static_cast<T>(d.beta2),
          .new_m = static_cast<T>(1 - d.beta1),
          .new_v = static_cast<T>(1 - d.beta2),
          .root_correction = static_cast<T>(std::sqrt(correction2)),
          .eps = static_cast<T>(d.eps),
          .step_size = static_cast<T>(d.learning_rate / correction1)};
}

// Factor of a parameter for decoupled decay.
template <class T>
T adamw_decay(const AdamWDesc& d, double weight_decay) {
  return static_cast<T>(1 - d.learning_rate * weight_decay);
}

// Factor of every gradient for clipping; the norm is finite.
COHORT_HD inline double clip_scale(double norm, double max_norm) {
  return max_norm > 0 && norm > max_norm ? max_norm / (norm + 1e-6) : 1;
}

// An f32 master as the bits of a bf16 weight and its 16 low bits. The weight is the master rounded
// to nearest, halves away from zero: with halves to even, two masters would have the same parts.
struct MasterParts {
  uint16_t weight, low;
};
COHORT_HD inline MasterParts master_parts(float master) {
  const auto bits = std::bit_cast<uint32_t>(master);
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<uint16_t>(bits)};
}
COHORT_HD inline float combined(MasterParts parts) {
  // Low bits of a half or more have rounded the magnitude up by one bf16 unit.
  const uint32_t bits = uint32_t{parts.weight} << 16 | parts.low;
  return std::bit_cast<float>(bits - ((parts.low & 0x8000u) << 1));
}

// Stochastic rounding of moments to bf16 (Gupta et al. 2015) adds 16 random bits below the 16 that
// are kept. The words of the Philox call at flat index / 4 serve four neighbouring elements; the
// halves of a word serve the two moments of one.
inline constexpr uint64_t kMomentsPurpose = 9;  // purpose of rng_stream(), with step and unit
inline uint64_t moments_stream(const AdamWDesc& d, uint64_t unit) {
  return rng_stream(kMomentsPurpose, static_cast<uint64_t>(d.step), unit);
}
COHORT_HD inline uint16_t stochastic_bf16(float x, uint32_t random16) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + random16) >> 16);
}
COHORT_HD inline float bf16_value(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}
COHORT_HD inline void store_moments(uint16_t& m_bits, uint16_t& v_bits, float m, float v,
                                    uint32_t random) {
  m_bits = stochastic_bf16(m, random & 0xffff);
  v_bits = stochastic_bf16(v, random >> 16);
}

// m is a lerp towards g, as in PyTorch, not a sum of two products.
template <class T>
COHORT_HD inline void adamw_element(T& p, T& m, T& v, T g, T decay, const AdamWFactors<T>& f) {
  const T decayed = p * decay;
  m = m + f.new_m * (g - m);
  v = v * f.beta2 + f.new_v * g * g;
  const T denominator = std::sqrt(v) / f.root_correction + f.eps;
  p = decayed - f.step_size * m / denominator;
}

}  // namespace cohort::kernels
