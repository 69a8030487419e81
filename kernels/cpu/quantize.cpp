// Quantisation on the CPU: a group of elements at a time.
#include "kernels/quantize.h"

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {

void quantize(const Quantize& args) {
  Quantized& out = args.out;
  const Shape &shape = args.x.shape(), &strides = args.x.strides();
  const bool is_i8 = out.values.dtype() == DType::kI8;
  const int64_t height = out.groups == ScaleGroups::kBlocks ? kScaleBlock : 1,
                width = is_i8 ? std::max<int64_t>(shape[1], 1) : kScaleBlock,
                across = is_i8 ? 1 : ceil_div(shape[1], width);
  const ScaleIndex scale_at(out);
  const auto run = [&]<class Q, class T>(Q* values, const T* x, float* scales) {
    out.scales.fill_(1);
    for_rows(ceil_div(shape[0], height) * across, height * width, [&](int64_t i) {
      const int64_t first_row = i / across * height, first_column = i % across * width;
      const auto for_each = [&](auto&& fn) {
        for (int64_t r = first_row; r < std::min(shape[0], first_row + height); ++r)
          for (int64_t c = first_column; c < std::min(shape[1], first_column + width); ++c) {
            const auto value = static_cast<float>(x[r * strides[0] + c * strides[1]]);
            fn(r * shape[1] + c, is_i8 ? value : static_cast<float>(bf16(value)));
          }
      };
      uint32_t amax = 0;
      for_each([&](int64_t, float value) { amax = std::max(amax, magnitude_bits(value)); });
      const GroupScale<Q> scale(amax);
      scales[scale_at(first_row, first_column)] = scale.scale;
      for_each([&](int64_t at, float value) { values[at] = scale(value); });
    });
  };
  dispatch_float(args.x.dtype(), "quantize", [&]<class T>() {
    dispatch_values(out, [&]<class Q>() {
      run(out.values.data<Q>(), args.x.data<T>(), out.scales.data<float>());
    });
  });
}

void dequantize(const Dequantize& args) {
  const int64_t rows = args.y.dim(0), cols = args.y.dim(1);
  const ScaleIndex scale_at(args.x);
  const float* const scales = args.x.scales.data<float>();
  const auto run = [&]<class Q, class T>(T* y, const Q* values) {
    for_rows(rows, cols, [&](int64_t r) {
      for (int64_t c = 0; c < cols; ++c)
        y[r * cols + c] = static_cast<T>(dequantized(values[r * cols + c], scales[scale_at(r, c)]));
    });
  };
  dispatch_values(args.x, [&]<class Q>() {
    const Q* const values = args.x.values.data<Q>();
    if (args.y.dtype() == DType::kBF16) return run(args.y.data<bf16>(), values);
    dispatch_float(args.y.dtype(), "dequantize", [&]<class T>() { run(args.y.data<T>(), values); });
  });
}

}  // namespace cohort::kernels::cpu
