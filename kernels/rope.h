// Rotary position embedding (Su et al. 2021), rotate-half layout of Hugging Face's Llama:
//   y[i]         = x[i] cos - x[i + D/2] sin
//   y[i + D/2]   = x[i + D/2] cos + x[i] sin,        angle = position theta^(-2i / D), i < D/2
//
// A table of R < D columns rotates the first R elements of a head like a head of that size, and the
// others are copied.
//
// A wide table has cosines and sines of their own for y[i] and for y[i + D/2], for rotations whose
// result is scaled by channel.
#pragma once

#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "kernels/common.h"

namespace cohort::kernels {

// theta^(-2i / head_dim) for i < head_dim / 2; head_dim is even.
inline std::vector<double> rope_frequencies(int64_t head_dim, double theta) {
  COHORT_CHECK(head_dim > 0 && head_dim % 2 == 0 && theta > 0,
               "[rope_frequencies] expected an even head_dim and theta > 0, got ", head_dim,
               " and ", theta);
  std::vector<double> frequencies;
  for (int64_t i = 0; i < head_dim; i += 2)
    frequencies.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(head_dim)));
  return frequencies;
}
// The table that training, prefill and decode share: [positions, 2 x frequencies], the cosines of
// position x frequency in the first half of the columns and the sines in the second, all times
// `scale`, computed in f64 and rounded once. With a gain(position, channel) of rotated channels
// the table is wide: [positions, 4 x frequencies], cosines and sines times the gains of the first
// half of the channels, then those of the second half. The result is on the CPU.
using RopeGain = std::function<double(int64_t position, int64_t channel)>;
Tensor rope_table(int64_t positions, std::span<const double> frequencies, double scale, DType dtype,
                  const RopeGain& gain = {});
// Throws Error unless `table` is such a table for heads of size D of the check, which is even, or a
// narrow one for their first R elements.
void check_rope_table(ArgumentCheck& check, const Tensor& table);

// kInverse applies the transpose of the rotation: the backward of kForward.
enum class RopeDirection { kForward, kInverse };
// y (+)= rotated x, except for the last heads of each token, which are copied; without a table, all
// are. With scales, the last N heads, such as keys and values, are rounded to multiples of e4m3
// numbers (kernels/kv_scales.h). A position outside [0, rows) is an Error on the CPU; on CUDA the
// rotated heads become NaN. Products and sums are rounded one by one (no fma), so that f32 results
// have the same bits on every device.
struct Rope {
  Tensor& y;                // [T, H, D]; may be x when overwriting
  const Tensor& x;          // [T, H, D]
  const Tensor& positions;  // [T] i32
  // rope_table() [rows, R <= D] or [rows, 2 D], accumulate_dtype(x), or undefined
  const Tensor& table;
  RopeDirection direction = RopeDirection::kForward;
  Grad mode = Grad::kOverwrite;
  int64_t plain_heads = 0;  // last heads of H that are not rotated, such as the values of qkv
  Tensor scales = {};       // [N] f32, of kForward that overwrites; may be undefined
};
COHORT_KERNEL(void rope(const Rope& args));

}  // namespace cohort::kernels
