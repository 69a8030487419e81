// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", 2011). Every draw is addressed by (seed, stream, index) and depends on nothing else:
// not on batch composition, thread count, rank count or earlier draws.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace cohort {

// 64-bit product a b as two words. (Inline PTX because nvcc would emit a full 64-bit
// multiplication.)
COHORT_HD inline void multiply_wide(uint32_t a, uint32_t b, uint32_t& low, uint32_t& high) {
#ifdef __CUDA_ARCH__
  asm("{.reg .b64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p;}"
      : "=r"(low), "=r"(high)
      : "r"(a), "r"(b));
#else
  const uint64_t product = uint64_t{a} * b;
  low = static_cast<uint32_t>(product);
  high = static_cast<uint32_t>(product >> 32);
#endif
}

// Four independent 32-bit words per address: the key is the seed, the counter is (index, stream),
// low words first.
COHORT_HD inline std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t index) {
  uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint32_t low0, high0, low1, high1;
    multiply_wide(0xD2511F53u, c0, low0, high0);
    multiply_wide(0xCD9E8D57u, c2, low1, high1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// Uniform in [0, 1) with 24 bits, exact in f32.
COHORT_HD inline float uniform_f32(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

// Uniform in (0, 1) with 52 bits from two words; never 0 or 1 (a 53rd bit would round up to 1).
COHORT_HD inline double uniform_f64(uint32_t hi, uint32_t lo) {
  const uint64_t bits = (static_cast<uint64_t>(hi) << 32 | lo) >> 12;
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// Two independent standard normals from one address (Box-Muller).
inline std::array<double, 2> normal_pair(uint64_t seed, uint64_t stream, uint64_t index) {
  const auto w = philox(seed, stream, index);
  const double radius = std::sqrt(-2.0 * std::log(uniform_f64(w[0], w[1])));
  const double angle = 6.283185307179586476925 * uniform_f64(w[2], w[3]);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// Stream id of (purpose, a, b): one splitmix64 step per argument, so that neighbouring arguments
// give unrelated streams and swapped ones differ. Streams of different purposes never share draws;
// each layer defines its own purposes, and docs/exactness.md lists the numbers.
COHORT_HD inline uint64_t rng_stream(uint64_t purpose, uint64_t a = 0, uint64_t b = 0) {
  uint64_t x = 0;
  for (const uint64_t v : {purpose, a, b}) {
    x = (x ^ v) + 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
  }
  return x;
}

// A sequence over one (seed, stream): draw i has address i.
class Rng {
 public:
  Rng(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
  uint64_t bits() {
    const auto w = philox(seed_, stream_, index_++);
    return static_cast<uint64_t>(w[0]) << 32 | w[1];
  }
  // Uniform in {0, ..., n - 1}; n > 0. The bias of 2^-64 n is accepted.
  int64_t below(int64_t n) {
    const auto product = static_cast<unsigned __int128>(bits()) * static_cast<uint64_t>(n);
    return static_cast<int64_t>(product >> 64);
  }
  // Uniform in {lo, ..., hi}.
  int64_t between(int64_t lo, int64_t hi) { return lo + below(hi - lo + 1); }
  double uniform() {
    const uint64_t b = bits();
    return uniform_f64(static_cast<uint32_t>(b >> 32), static_cast<uint32_t>(b));
  }
  double normal() { return normal_pair(seed_, stream_, index_++)[0]; }

 private:
  uint64_t seed_, stream_, index_ = 0;
};

}  // namespace cohort
