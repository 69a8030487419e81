// e4m3 numbers on CUDA: rounding to them, and the bytes of the key/value cache (PagedKV).
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/raw.cuh"
#include "kernels/kv_scales.h"

namespace cohort::kernels::cuda {

// Position, among 16 adjacent bytes of the cache, of dim or key e of 16.
__device__ __forceinline__ constexpr int cell_position(int e) {
  return e % 8 / 2 * 4 + e % 2 * 2 + (e < 8 ? 1 : 0);
}

// Pages of 16 tokens of the cache in e4m3: offsets in bytes.
constexpr int kPageTokens = 16;
struct Pages {
  int kv_heads, dim;

  __device__ int64_t page(int64_t slot, int head) const {
    return (slot / kPageTokens * kv_heads + head) * (kPageTokens * dim);
  }
  // In a page, or in a tile of pages of one head: 16 dims of the key of token t, and dim d of its
  // value.
  static __device__ int key_cell(int t, int cell, int dim) {
    return t / 8 * (8 * dim) + cell * 128 + t % 8 * 16;
  }
  static __device__ int value(int t, int d, int dim) {
    return t / kPageTokens * (kPageTokens * dim) + d * 16 + cell_position(t % kPageTokens);
  }
};

// The word of four numbers that are at most 448, in the order of memory.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// Rounds to bf16 and to the E4m3Grid of a scale.
template <class T, int N>
__device__ __forceinline__ Raw<T, N> round_to_e4m3(const Raw<T, N>& raw, float scale) {
  const E4m3Grid grid(scale);
  float x[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x[n] = element(raw, n);
    if constexpr (sizeof(T) == 4) x[n] = __bfloat162float(__float2bfloat16_rn(x[n]));
    x[n] = grid(x[n]);
  }
  return to_raw<T>(x);
}

// Factor of dequantize() for a scale: 2^120 s in both halves of the word, which bf16 holds up to s
// = 2^7.
__device__ __forceinline__ uint32_t dequantize_factor(float scale) {
  return pack_bf16(scale * 0x1p120f, scale * 0x1p120f);
}
// The four numbers of a word of the cache as bf16 pairs: elements 2 q and 2 q + 1 of the 16, for
// word q, then 2 q + 8 and 2 q + 9. The bits of an e4m3 number, four exponent bits lower, are those
// of a bf16 number that is 2^120 times smaller, subnormal numbers included, so the product is
// exact. NaN becomes 480 s: only tokens after one with non-finite outputs can see that.
__device__ __forceinline__ uint2 dequantize(uint32_t word, uint32_t factor) {
  // The pair of bytes 1 and 3.
  const auto pair = [factor](uint32_t bits) {
    bits = (bits & 0x80008000u) | (bits >> 4 & 0x07f007f0u);
    __nv_bfloat162 x, y;
    std::memcpy(&x, &bits, sizeof(x));
    std::memcpy(&y, &factor, sizeof(y));
    x = __hmul2(x, y);
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
  };
  return {pair(word), pair(word << 8)};
}

}  // namespace cohort::kernels::cuda
