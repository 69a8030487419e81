// Data for the tests of quantisation, and its definition element by element in f64.
#pragma once

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/quantize.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::test {

inline Quantized quantized(const Tensor& x, DType dtype, ScaleGroups groups = ScaleGroups::kRows) {
  Quantized out = Quantized::empty(x.shape(), dtype, groups, x.device());
  out.values.copy_(Tensor::full(x.shape(), 3, DType::kF32).to(dtype).to(x.device()));
  out.scales.fill_(-1);
  quantize({out, x});
  return out;
}

inline Tensor dequantized_as(const Quantized& q, DType dtype) {
  Tensor y = Tensor::full(q.values.shape(), NAN, dtype, q.values.device());
  dequantize({y, q});
  return y;
}

// All bf16 values, as f32: [rows, 65536 / rows]. Rows hold values of one sign and nearly one
// exponent if there are 512 or more; the row of the largest exponent has infinity and NaN.
inline Tensor all_bf16_values(int64_t rows) {
  std::vector<bf16> values(1 << 16);
  for (size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<uint16_t>(i);
  return Tensor::from(values, {rows, (1 << 16) / rows}).to(DType::kF32);
}

// Normal values with rows and columns of other magnitudes, zeros, -0, infinity and NaN.
inline Tensor mixed_values(const Shape& shape, DType dtype, uint64_t seed) {
  Tensor x = random_tensor(shape, DType::kF64, seed);
  double* p = x.data<double>();
  constexpr double kSpecial[] = {0, -0.0, INFINITY, -INFINITY, NAN, 0x1p-133, 448, 3e38, -0x1p-149};
  for (int64_t i = 0; i < x.numel(); ++i) {
    const int64_t row = i / x.dim(1), column = i % x.dim(1);
    p[i] = row % 7 == 3 ? 0 : std::ldexp(p[i], static_cast<int>(row * 5 % 61 - 30 - column / 64));
    if (i % 4099 == 17) p[i] = kSpecial[i / 4099 % 9];
  }
  return x.to(dtype);
}

inline const std::vector<std::pair<DType, ScaleGroups>>& formats() {
  static const std::vector<std::pair<DType, ScaleGroups>> all = {
      {DType::kE4M3, ScaleGroups::kRows},
      {DType::kE4M3, ScaleGroups::kBlocks},
      {DType::kI8, ScaleGroups::kRows}};
  return all;
}

inline const std::vector<Shape>& quantize_shapes() {
  static const std::vector<Shape> all = {{0, 256}, {3, 0},     {1, 1},     {5, 128},  {7, 129},
                                         {128, 8}, {130, 264}, {257, 136}, {64, 1000}};
  return all;
}

}  // namespace cohort::kernels::test
