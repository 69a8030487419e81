#include "kernels/quantize.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {
namespace {

Shape scales_shape(const char* op, const Shape& values, DType dtype, ScaleGroups groups) {
  const bool is_rows = groups == ScaleGroups::kRows;
  COHORT_CHECK(values.rank() == 2 && (dtype == DType::kE4M3 || (dtype == DType::kI8 && is_rows)),
               "[", op,
               "] expected values [T, K] in e4m3, or in i8 with a scale for each row, got ",
               dtype_name(dtype), values.str(), is_rows ? "" : " with blocks");
  const int64_t across = ceil_div(values[1], kScaleBlock);
  if (dtype == DType::kI8) return {values[0]};
  return is_rows ? Shape{across, round_up(values[0], 4)}
                 : Shape{ceil_div(values[0], kScaleBlock), across};
}

void check_scales(const char* op, const Quantized& q) {
  const Shape shape = scales_shape(op, q.values.shape(), q.values.dtype(), q.groups);
  check_tensor(q.scales, shape, DType::kF32, op, "scales", q.values.device());
}

}  // namespace

Quantized Quantized::empty(const Shape& shape, DType dtype, ScaleGroups groups, Device device) {
  const Shape scales = scales_shape("quantize", shape, dtype, groups);
  return {Tensor::empty(shape, dtype, device), Tensor::empty(scales, DType::kF32, device), groups};
}

ScaleIndex::ScaleIndex(const Quantized& q) {
  if (q.values.dtype() == DType::kI8) return;
  column_shift = kScaleShift;
  column_stride = q.scales.dim(1);
  if (q.groups == ScaleGroups::kRows) return;
  row_shift = kScaleShift;
  row_stride = std::exchange(column_stride, 1);
}

void quantize(const Quantize& args) {
  const bool is_transpose = args.out.groups == ScaleGroups::kBlocks && args.x.rank() == 2 &&
                            args.x.transpose(0, 1).is_contiguous();
  if (is_transpose)
    ArgumentCheck("quantize")("[K, T] x; any [T, K] values", args.x.transpose(0, 1),
                              args.out.values);
  else
    ArgumentCheck("quantize")("[T, K] x; any [T, K] values", args.x, args.out.values);
  check_scales("quantize", args.out);
  on_device<cpu::quantize, cuda::quantize>(args.x.device(), args);
}

void dequantize(const Dequantize& args) {
  ArgumentCheck("dequantize")("[T, K] y; any [T, K] values", args.y, args.x.values);
  check_scales("dequantize", args.x);
  on_device<cpu::dequantize, cuda::dequantize>(args.y.device(), args);
}

}  // namespace cohort::kernels
