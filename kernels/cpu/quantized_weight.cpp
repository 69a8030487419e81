// Dequantisation of weights on the CPU.
#include "kernels/quantized_weight.h"

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {

void dequantize_weight(const DequantizeWeight& args) {
  const QuantizedWeight& w = args.w;
  const int64_t columns = w.columns, bytes = w.values.dim(1), groups = w.scales.dim(1),
                group = w.group(), stride = args.y.strides()[0];
  const bool is_nf4 = w.is_nf4();
  const uint8_t* const values = static_cast<const uint8_t*>(w.values.raw());
  const float* const scales = w.scales.data<float>();
  dispatch_float(args.y.dtype(), "dequantize_weight", [&]<class T>() {
    T* const y = args.y.data<T>();
    for_rows(args.y.dim(0), columns, [&](int64_t r) {
      for (int64_t c = 0; c < columns; ++c) {
        const uint8_t* const row = values + r * bytes;
        const float value = is_nf4 ? nf4_value(row[c / 2] >> (c % 2 == 0 ? 4 : 0) & 15)
                                   : static_cast<float>(static_cast<int8_t>(row[c]));
        y[r * stride + c] = static_cast<T>(weight_value(value, scales[r * groups + c / group]));
      }
    });
  });
}

}  // namespace cohort::kernels::cpu
