// Weights [N, K] in 8 or 4 bits: integers or indices of a table with a scale for each group of a
// row's columns. They are frozen, and a weight is, in every dtype of a model,
//
//   w[n][k] = bf16(value * scale of its group), a product in f32
//
// int8: groups of 128 columns. scale and value are those of i8 in kernels/quantize.h, of the group
//   in place of the row.
// nf4 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314; with the arithmetic of bitsandbytes, whose
//   blocks of 64 elements are these groups where K is a multiple of 64): groups of 64 columns. The
//   scale is the group's largest magnitude; the index of x is the number of midpoints of neighbours
//   in nf4_value() that are less than x * (1 / max(scale, 1e-38)), clamped to +-1. With double
//   quantisation the scales of a matrix, less their mean, have 8 bits: double_quantize().
//
// The last group of a row may be shorter.
#pragma once

#include <span>

#include "kernels/quantize.h"

namespace cohort::kernels {

// The format of a model's frozen base. kModel: its dtype. kNf4 has double quantisation, kNf4Single
// has not.
enum class WeightFormat : uint8_t { kModel, kInt8, kNf4, kNf4Single };

// The table of nf4: quantiles of the normal distribution.
COHORT_HD constexpr float nf4_value(int index) {
  constexpr float kValues[16] = {-1.0f,
                                 -0.6961928009986877f,
                                 -0.5250730514526367f,
                                 -0.39491748809814453f,
                                 -0.28444138169288635f,
                                 -0.18477343022823334f,
                                 -0.09105003625154495f,
                                 0.0f,
                                 0.07958029955625534f,
                                 0.16093020141124725f,
                                 0.24611230194568634f,
                                 0.33791524171829224f,
                                 0.44070982933044434f,
                                 0.5626170039176941f,
                                 0.7229568362236023f,
                                 1.0f};
  return kValues[index];
}

struct QuantizedWeight {
  // int8: i8 [N, K]; nf4: u8 [N, ceil(K / 2)], whose upper halves are the even columns.
  Tensor values;
  Tensor scales;        // f32 [N, ceil(K / group)]
  int64_t columns = 0;  // K

  // Uninitialised. The format is not kModel.
  static QuantizedWeight empty(WeightFormat format, const Shape& shape, Device device = {});
  bool defined() const { return values.defined(); }
  bool is_nf4() const { return values.dtype() == DType::kU8; }
  int64_t group() const { return is_nf4() ? 64 : kScaleBlock; }
  int64_t nbytes() const { return values.nbytes() + scales.nbytes(); }
  // A view of rows [first, first + count).
  QuantizedWeight rows(int64_t first, int64_t count) const;
  void copy_(const QuantizedWeight& source);
};

// Quantises x f32 [N, K] on the host. Throws Error unless all numbers are finite.
QuantizedWeight quantize_weight(const Tensor& x, WeightFormat format);

// Rounds f32 scales to bytes and back, as bitsandbytes does: in blocks of 256, and with its 8-bit
// "dynamic map" (Dettmers 2016, arXiv 1511.04561). The mean is summed in f64; bitsandbytes' is a
// sum in f32, after which a scale between two bytes may get the other one.
void double_quantize(std::span<float> scales);
// Writes the scales that are stored as bytes in blocks: table[byte] * the block's number + offset.
void expand_scales(std::span<float> out, std::span<const uint8_t> bytes,
                   std::span<const float> table, std::span<const float> blocks, int64_t block,
                   float offset);

struct DequantizeWeight {
  Tensor& y;  // [N, K], which may be columns of a wider matrix
  const QuantizedWeight& w;
};
COHORT_KERNEL(void dequantize_weight(const DequantizeWeight& args));

// y = [x | h] [w | s B]^T + bias of few rows, in bf16 on a GPU, with the bits of linear_forward()
// on the dequantised weight, which is not written. Only if reads_quantized(). h is a tail as in
// LinearForward.
struct QuantizedLinear {
  Tensor& y;        // [T, N]
  const Tensor& x;  // [T, K + P]; both may be columns of a wider matrix
  const QuantizedWeight& w;
  const Tensor& adapter;  // s B [N, P]; undefined: P is 0
  const Tensor& bias;     // [N]; may be undefined
};
void quantized_linear(const QuantizedLinear& args);
// True if quantized_linear() supports so many rows of a model in `dtype`: on a GPU that accumulates
// in order, up to 64, with K a multiple of 64 and N of 8.
bool reads_quantized(int64_t rows, const QuantizedWeight& w, DType dtype, int64_t tail,
                     bool with_bias);
namespace cuda {
void quantized_linear(const QuantizedLinear& args);
bool reads_quantized(int64_t rows, const QuantizedWeight& w, int64_t tail, bool with_bias);
}  // namespace cuda

// The weight of an index or integer.
COHORT_HD inline float weight_value(float value, float scale) {
  const auto rounded = [](float x) {
    const auto u = __builtin_bit_cast(uint32_t, x);
    if (x != x) return x;
    return __builtin_bit_cast(float, (u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u);
  };
  return rounded(value * scale);
}

}  // namespace cohort::kernels
