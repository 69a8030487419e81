#include "kernels/quantized_weight.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "core/dry_run.h"
#include "core/with_cuda.h"
#include "kernels/arguments.h"
#include "kernels/cpu/reduce.h"

namespace cohort::kernels {
namespace {

// The upper bounds of the values of nf4 but the last: the midpoints of neighbours.
std::array<float, 15> midpoints() {
  std::array<float, 15> out;
  for (int i = 0; i < 15; ++i) out[static_cast<size_t>(i)] = (nf4_value(i) + nf4_value(i + 1)) / 2;
  return out;
}

// The largest magnitude of `x`, and how it is divided by that.
struct Unit {
  float largest = 0, inverse;
  explicit Unit(std::span<const float> x) {
    for (const float v : x) largest = std::max(largest, std::abs(v));
    inverse = 1 / std::max(largest, 1e-38f);
  }
  float operator()(float x) const { return std::clamp(x * inverse, -1.0f, 1.0f); }
};

// bitsandbytes' create_dynamic_map(): with the exponent i the means of neighbours among 2^i + 1
// numbers from 0.1 to 1, times 10^(i - 6), of both signs; and 0 and 1.
std::array<float, 256> dynamic_map() {
  std::vector<float> values{0, 1};
  for (int i = 0; i < 7; ++i) {
    const int steps = 1 << i;
    const auto power = static_cast<float>(std::pow(10.0, i - 6));
    const double step = (1.0f - 0.1f) / static_cast<float>(steps);
    const auto boundary = [&](int j) {  // torch.linspace, whose sums of products are rounded once
      return static_cast<float>(j < (steps + 1) / 2 ? 0.1f + step * j : 1 - step * (steps - j));
    };
    for (int j = 0; j < steps; ++j) {
      const float mean = (boundary(j) + boundary(j + 1)) / 2;
      values.insert(values.end(), {power * mean, -power * mean});
    }
  }
  std::ranges::sort(values);
  std::array<float, 256> out;
  std::ranges::copy(values, out.begin());
  return out;
}

void quantize_nf4(std::span<const float> x, uint8_t* values, float* scales) {
  static const std::array<float, 15> kBounds = midpoints();
  const size_t group = 64;
  std::fill(values, values + (x.size() + 1) / 2, 0);
  for (size_t begin = 0; begin < x.size(); begin += group) {
    const auto part = x.subspan(begin, std::min(group, x.size() - begin));
    const Unit unit(part);
    scales[begin / group] = unit.largest;
    for (size_t i = 0; i < part.size(); ++i) {
      const float scaled = unit(part[i]);
      int index = 0;
      for (const float bound : kBounds) index += bound < scaled;
      values[(begin + i) / 2] |= static_cast<uint8_t>(i % 2 == 0 ? index << 4 : index);
    }
  }
}

void quantize_int8(std::span<const float> x, int8_t* values, float* scales) {
  const auto group = static_cast<size_t>(kScaleBlock);
  for (size_t begin = 0; begin < x.size(); begin += group) {
    const auto part = x.subspan(begin, std::min(group, x.size() - begin));
    uint32_t amax = 0;
    for (const float v : part) amax = std::max(amax, magnitude_bits(v));
    const GroupScale<int8_t> scale(amax);
    scales[begin / group] = scale.scale;
    for (size_t i = 0; i < part.size(); ++i) values[begin + i] = scale(part[i]);
  }
}

}  // namespace

QuantizedWeight QuantizedWeight::empty(WeightFormat format, const Shape& shape, Device device) {
  COHORT_CHECK(format != WeightFormat::kModel && shape.rank() == 2,
               "[quantize_weight] expected a matrix and a format of 8 or 4 bits, got ",
               shape.str());
  const bool is_int8 = format == WeightFormat::kInt8;
  QuantizedWeight out{.columns = shape[1]};
  out.values = Tensor::empty({shape[0], is_int8 ? shape[1] : ceil_div(shape[1], 2)},
                             is_int8 ? DType::kI8 : DType::kU8, device);
  out.scales = Tensor::empty({shape[0], ceil_div(shape[1], out.group())}, DType::kF32, device);
  return out;
}

QuantizedWeight QuantizedWeight::rows(int64_t first, int64_t count) const {
  return {values.narrow(0, first, count), scales.narrow(0, first, count), columns};
}

void QuantizedWeight::copy_(const QuantizedWeight& source) {
  values.copy_(source.values);
  scales.copy_(source.scales);
}

QuantizedWeight quantize_weight(const Tensor& x, WeightFormat format) {
  ArgumentCheck("quantize_weight")("f32 [N, K] x", x);
  QuantizedWeight out = QuantizedWeight::empty(format, x.shape());
  const int64_t columns = x.dim(1), bytes = out.values.dim(1), groups = out.scales.dim(1);
  for_rows(x.dim(0), columns, [&](int64_t r) {
    const std::span row(x.data<float>() + r * columns, static_cast<size_t>(columns));
    COHORT_CHECK(std::ranges::all_of(row, [](float v) { return std::isfinite(v); }),
                 "[quantize_weight] row ", r, " has a number that is not finite");
    float* const scales = out.scales.data<float>() + r * groups;
    if (out.is_nf4())
      quantize_nf4(row, out.values.data<uint8_t>() + r * bytes, scales);
    else
      quantize_int8(row, out.values.data<int8_t>() + r * bytes, scales);
  });
  if (format == WeightFormat::kNf4)
    double_quantize({out.scales.data<float>(), static_cast<size_t>(out.scales.numel())});
  return out;
}

void double_quantize(std::span<float> scales) {
  static const std::array<float, 256> kMap = dynamic_map();
  constexpr size_t kBlock = 256;
  if (scales.empty()) return;
  const double sum = std::accumulate(scales.begin(), scales.end(), 0.0);
  const auto offset = static_cast<float>(sum / static_cast<double>(scales.size()));
  for (size_t begin = 0; begin < scales.size(); begin += kBlock) {
    const auto part = scales.subspan(begin, std::min(kBlock, scales.size() - begin));
    for (float& s : part) s -= offset;
    const Unit unit(part);
    for (float& s : part) {
      // A shorter block, the last one, is divided, and not multiplied by the inverse.
      const float scaled = part.size() == kBlock ? unit(s) : s / std::max(unit.largest, 1e-38f);
      const auto* const nearest = std::partition_point(
          kMap.begin(), kMap.end() - 1, [&](const float& v) { return (v + (&v)[1]) / 2 < scaled; });
      s = *nearest * unit.largest + offset;
    }
  }
}

void expand_scales(std::span<float> out, std::span<const uint8_t> bytes,
                   std::span<const float> table, std::span<const float> blocks, int64_t block,
                   float offset) {
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = table[bytes[i]] * blocks[i / static_cast<size_t>(block)] + offset;
}

// Checks the tensors of a weight [n, k].
static void check_weight(const char* op, const QuantizedWeight& w, int64_t n, int64_t k,
                         Device device) {
  COHORT_CHECK(w.columns == k, "[", op, "] expected ", k, " columns, got ", w.columns);
  check_tensor(w.values, {n, w.is_nf4() ? ceil_div(k, 2) : k}, w.is_nf4() ? DType::kU8 : DType::kI8,
               op, "values", device);
  check_tensor(w.scales, {n, ceil_div(k, w.group())}, DType::kF32, op, "scales", device);
}

void dequantize_weight(const DequantizeWeight& args) {
  const QuantizedWeight& w = args.w;
  ArgumentCheck check("dequantize_weight");
  check("strided [N, K] y", args.y);
  check_weight("dequantize_weight", w, check["N"], check["K"], args.y.device());
  on_device<cpu::dequantize_weight, cuda::dequantize_weight>(args.y.device(), args);
}

void quantized_linear(const QuantizedLinear& args) {
  const auto& [y, x, w, adapter, bias] = args;
  const int64_t tail = adapter.defined() ? adapter.dim(1) : 0;
  ArgumentCheck check("quantized_linear");
  check.bind("K", w.columns + tail);
  check.bind("N", w.values.dim(0));
  check("strided (M, K) x; strided (M, N) y; [N, P] adapter?; [N] bias?", x, y, adapter, bias);
  check_weight("quantized_linear", w, check["N"], w.columns, x.device());
  const OpSpan span("quantized_linear");
  COHORT_CHECK(reads_quantized(x.rows(), w, x.dtype(), tail, bias.defined()),
               "[quantized_linear] unsupported sizes: ", x.str(), " times ", w.values.str());
  if constexpr (kWithCuda) cuda::quantized_linear(args);
}

bool reads_quantized(int64_t rows, const QuantizedWeight& w, DType dtype, int64_t tail,
                     bool with_bias) {
  if constexpr (kWithCuda)
    return w.values.device().is_cuda() && dtype == DType::kBF16 && !is_dry_run() &&
           cuda::reads_quantized(rows, w, tail, with_bias);
  return false;
}

}  // namespace cohort::kernels
