// Tensors in 8 bits with scales: value[i] = values[i] * scale of i's group. The dtype of the values
// is the format.
//
// e4m3: for GEMMs and caches. With amax the largest magnitude of a group after rounding to bf16,
//   scale = the least 2^e with amax / 2^e <= 448, e >= -100,   values = e4m3(bf16(x) / scale)
// A power of two makes the division and values[i] * scale exact, and the latter a bf16 value: bf16
// ops on dequantised tensors specify what kernels on the bytes compute. The rounding is to nearest
// even and nothing saturates. Relative to a scale of amax / 448 the error grows by a few percent,
// since e4m3 is a floating-point type itself.
//
// i8: for dot products whose integers are exact. With amax the largest magnitude of a row as f32,
//   scale = max(amax / 127, 2^-126),   values = rint(x / scale)
// where both divisions are those of f32, correctly rounded, and rint rounds to nearest even.
//
// A group of zeros has scale 1. A group with an infinity or NaN (of e4m3 also one with amax above
// 448 * 2^100) has scale NaN and values 0x7f (NaN) in e4m3 and 0 in i8: a conversion that saturates
// would hide it.
#pragma once

#include <bit>
#include <cmath>

#include "core/sizes.h"
#include "kernels/common.h"

namespace cohort::kernels {

// kRows: a scale for each row and, in e4m3, each 128 columns, for activations: a group depends on
// its row only. Scales are f32
//   e4m3: [ceil(K / 128), T rounded up to a multiple of 4], so that those of consecutive rows at a
//         block of columns are one aligned copy (a TMA box); the columns from T on are 1
//   i8:   [T]
// kBlocks: a scale for each block of 128 x 128, for weights, in e4m3 only: [ceil(T / 128),
// ceil(K / 128)].
enum class ScaleGroups { kRows, kBlocks };

inline constexpr int kScaleShift = 7;
inline constexpr int64_t kScaleBlock = int64_t{1} << kScaleShift;

struct Quantized {
  Tensor values;  // [T, K] e4m3 or i8
  Tensor scales;  // f32, as `groups` says
  ScaleGroups groups = ScaleGroups::kRows;

  // Uninitialised tensors for values of this shape. Throws Error for a rank other than 2, another
  // dtype, and i8 with kBlocks.
  static Quantized empty(const Shape& shape, DType dtype, ScaleGroups groups, Device device = {});
};

// Calls fn.operator()<Q>() with the type of the values.
template <class F>
void dispatch_values(const Quantized& q, F&& fn) {
  if (q.values.dtype() == DType::kE4M3) return fn.template operator()<e4m3>();
  fn.template operator()<int8_t>();
}

// The index in `scales` of the scale of an element of the values.
struct ScaleIndex {
  int row_shift = 0, column_shift = 0;  // log2 of the sizes of a group
  int64_t row_stride = 1, column_stride = 0;

  explicit ScaleIndex(const Quantized& q);
  COHORT_HD int64_t operator()(int64_t row, int64_t column) const {
    return (row >> row_shift) * row_stride + (column >> column_shift) * column_stride;
  }
};

// The bytes are the same on every device.
struct Quantize {
  Quantized& out;
  const Tensor& x;  // [T, K]; with kBlocks also the transpose of a contiguous tensor
};
COHORT_KERNEL(void quantize(const Quantize& args));

// y = values * scales, computed in f32 and rounded to y's dtype, which may be bf16 on the CPU too;
// NaN has all bits set but the sign. The bytes are the same on every device.
struct Dequantize {
  Tensor& y;  // [T, K]
  const Quantized& x;
};
COHORT_KERNEL(void dequantize(const Dequantize& args));

// The arithmetic of one group, the same on host and device. Magnitudes are compared as the bits of
// f32 numbers without their sign, whose order as integers is that of the numbers, NaN last.
inline constexpr uint32_t kNanBits = 0x7fffffffu;  // the NaN that GPUs compute

COHORT_HD inline uint32_t magnitude_bits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7fffffffu;
}

// The scale of a group by the bits of its amax; its call rounds an element.
template <class Q>
struct GroupScale {
  float scale = 1, inverse = 1;  // the inverse of e4m3 only

  COHORT_HD explicit GroupScale(uint32_t amax) {
    constexpr float kNan = std::bit_cast<float>(kNanBits);
    if (amax == 0) return;
    if constexpr (std::is_same_v<Q, e4m3>) {
      int e = static_cast<int>(amax >> 23) - 127 - 8 + ((amax & 0x7fffffu) > 0x600000u ? 1 : 0);
      e = e < -100 ? -100 : e;
      scale = e > 100 ? kNan : std::bit_cast<float>(static_cast<uint32_t>(127 + e) << 23);
      inverse = e > 100 ? kNan : std::bit_cast<float>(static_cast<uint32_t>(127 - e) << 23);
    } else {
      const float largest = std::fmax(std::bit_cast<float>(amax) / 127.0f, 0x1p-126f);
      scale = amax >= 0x7f800000u ? kNan : largest;
    }
  }
  COHORT_HD Q operator()(float x) const {
    if constexpr (std::is_same_v<Q, e4m3>)
      return e4m3(scale == scale ? x * inverse : scale);
    else
      return static_cast<Q>(scale == scale ? std::rint(x / scale) : 0.0f);
  }
};

template <class Q>
COHORT_HD inline float dequantized(Q value, float scale) {
  const float y = static_cast<float>(value) * scale;
  return y == y ? y : std::bit_cast<float>(kNanBits);
}

}  // namespace cohort::kernels
