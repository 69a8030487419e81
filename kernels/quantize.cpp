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

// `x`, which may be a transpose, has the shape of the values.
void check_all(const char* op, const Tensor& x, const Quantized& q, bool is_transpose) {
  ArgumentCheck check(op);
  check("[T, K] x", is_transpose ? x.transpose(0, 1) : x);
  check_tensor(q.values, x.shape(), q.values.dtype(), op, "values", x.device());
  check_tensor(q.scales, scales_shape(op, x.shape(), q.values.dtype(), q.groups), DType::kF32, op,
               "scales", x.device());
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
  const bool may_turn = args.out.groups == ScaleGroups::kBlocks && args.x.rank() == 2;
  check_all("quantize", args.x, args.out, may_turn && !args.x.is_contiguous());
  on_device<cpu::quantize, cuda::quantize>(args.x.device(), args);
}

void dequantize(const Dequantize& args) {
  check_all("dequantize", args.y, args.x, false);
  on_device<cpu::dequantize, cuda::dequantize>(args.y.device(), args);
}

}  // namespace cohort::kernels
