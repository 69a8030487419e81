// Packs of elements as 32-bit words in registers, so that bf16 values stay in pairs until they are
// used. (The compiler allocates a register for each 16-bit element of an array.)
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/cuda/device.cuh"

namespace cohort::kernels::cuda {

// N elements of T: N is a power of two, at most 16 bytes in all.
template <class T, int N>
struct Raw {
  using Word = std::conditional_t<(N * sizeof(T) >= 4), uint32_t, uint16_t>;
  static constexpr int kWords = N * sizeof(T) / sizeof(Word);
  Word word[kWords];
};

// Vectorized accesses; p is a multiple of N elements from an aligned address.
template <int N, class T>
__device__ __forceinline__ Raw<T, N> load_raw(const T* p) {
  using Word = typename Raw<T, N>::Word;
  const auto pack = load_pack<Raw<T, N>::kWords>(reinterpret_cast<const Word*>(p));
  Raw<T, N> raw;
#pragma unroll
  for (int k = 0; k < Raw<T, N>::kWords; ++k) raw.word[k] = pack.v[k];
  return raw;
}
template <int N, class T>
__device__ __forceinline__ void store_raw(T* p, const Raw<T, N>& raw) {
  using Word = typename Raw<T, N>::Word;
  Pack<Word, Raw<T, N>::kWords> pack;
#pragma unroll
  for (int k = 0; k < Raw<T, N>::kWords; ++k) pack.v[k] = raw.word[k];
  store_pack(reinterpret_cast<Word*>(p), pack);
}

// Element n; n is a constant after unrolling.
template <class T, int N>
__device__ __forceinline__ float element(const Raw<T, N>& raw, int n) {
  // bf16 is the upper half of an f32: the low element is shifted, the high one masked.
  if constexpr (sizeof(T) == 4)
    return __uint_as_float(raw.word[n]);
  else if constexpr (N == 1)
    return __uint_as_float(uint32_t{raw.word[0]} << 16);
  else
    return __uint_as_float(n % 2 == 0 ? raw.word[n / 2] << 16 : raw.word[n / 2] & 0xffff0000u);
}

// Rounds to nearest even.
template <class T, int N>
__device__ __forceinline__ Raw<T, N> to_raw(const float (&x)[N]) {
  Raw<T, N> raw;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int n = 0; n < N; ++n) raw.word[n] = __float_as_uint(x[n]);
  } else if constexpr (N == 1) {
    raw.word[0] = __bfloat16_as_ushort(__float2bfloat16_rn(x[0]));
  } else {
#pragma unroll
    // Pairs: one instruction rounds two values into one word.
    for (int n = 0; n < N; n += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[n], x[n + 1]);
      std::memcpy(&raw.word[n / 2], &pair, sizeof(pair));
    }
  }
  return raw;
}

// Loads the first `live` of N elements at p one by one; the others are 0.
template <int N, class T>
__device__ __forceinline__ Raw<T, N> load_some(const T* p, int live) {
  // Through f32, which is exact, so that both types share the code.
  float x[N];
#pragma unroll
  for (int n = 0; n < N; ++n) x[n] = n < live ? to_float(p[n]) : 0.0f;
  return to_raw<T>(x);
}
template <int N, class T>
__device__ __forceinline__ void store_some(T* p, const Raw<T, N>& raw, int live) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (n < live) p[n] = from_float<T>(element(raw, n));
}

// Loads N floats, four per access if N allows.
template <int N>
__device__ __forceinline__ void load_floats(const float* p, float (&x)[N]) {
  constexpr int kStep = N < 4 ? N : 4;
#pragma unroll
  for (int n = 0; n < N; n += kStep) {
    const auto pack = load_pack<kStep>(p + n);
#pragma unroll
    for (int k = 0; k < kStep; ++k) x[n + k] = pack.v[k];
  }
}
template <int N>
__device__ __forceinline__ void store_floats(float* p, const float (&x)[N]) {
  constexpr int kStep = N < 4 ? N : 4;
#pragma unroll
  for (int n = 0; n < N; n += kStep) {
    Pack<float, kStep> pack;
#pragma unroll
    for (int k = 0; k < kStep; ++k) pack.v[k] = x[n + k];
    store_pack(p + n, pack);
  }
}

}  // namespace cohort::kernels::cuda
