// Scales of keys and values on the CPU.
#include "kernels/kv_scales.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {
namespace {

// The largest bound of a head, whose first row is `row0`; as its bits. rotated: queries and keys.
template <class T>
uint32_t largest_bound(const KvScales& args, int64_t row0, int64_t dim, bool rotated) {
  const int64_t columns = args.w.dim(1), stride = RowOffsets(args.w).outer;
  // |x g|_2 and |x b|_1 of a row of weights.
  const auto norms = [&](const T* x) {
    const T *const g = args.norm.data<T>(), *const b = args.norm_bias.defined()
                                                           ? args.norm_bias.data<T>()
                                                           : nullptr;
    const T squares = lane_sum<T>(columns, [&](int64_t c) {
      const T y = x[c] * (g[c] + static_cast<T>(args.norm_offset));
      return y * y;
    });
    return std::pair(std::sqrt(squares), b == nullptr ? T{0} : lane_sum<T>(columns, [&](int64_t c) {
                       return std::abs(x[c] * b[c]);
                     }));
  };
  T a_weights = 0, a_shifts = 0;
  for (int64_t r = 0; args.a.defined() && r < args.a.dim(0); ++r) {
    const auto [weights, shifts] = norms(args.a.data<T>() + r * columns);
    a_weights = std::hypot(a_weights, weights);
    a_shifts = std::hypot(a_shifts, shifts);
  }
  std::vector<KvRow> rows;
  for (int64_t row = row0; row < row0 + dim; ++row) {
    auto [weights, shifts] = norms(args.w.data<T>() + row * stride);
    if (args.sb.defined()) {
      const T* const sb = args.sb.data<T>() + row * RowOffsets(args.sb).outer;
      const T length =
          std::sqrt(lane_sum<T>(args.sb.dim(1), [&](int64_t p) { return sb[p] * sb[p]; }));
      weights += length * a_weights;
      shifts += length * a_shifts;
    }
    const T bias = args.bias.defined() ? std::abs(args.bias.data<T>()[row]) : T{0};
    rows.push_back(
        {static_cast<float>(weights), static_cast<float>(shifts), static_cast<float>(bias)});
  }
  uint32_t largest = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const size_t i = static_cast<size_t>(d), partner = static_cast<size_t>((d + dim / 2) % dim);
    const float bound = kv_bound(rows[i], rotated ? rows[partner] : KvRow{}, columns);
    largest = std::max(
        largest, magnitude_bits(rotated ? bound * static_cast<float>(args.rotary_gain) : bound));
  }
  return largest;
}

}  // namespace

void kv_scales(const KvScales& args) {
  const int64_t heads = args.scales.numel(), dim = args.w.rows() / heads;
  dispatch_float(args.w.dtype(), "kv_scales", [&]<class T>() {
    parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) {
        const bool rotated = h < heads - args.kv_heads;
        const Tensor& norm = h < heads - 2 * args.kv_heads ? args.q_norm : args.k_norm;
        uint32_t bound = 0;
        if (!rotated || !norm.defined()) {
          bound = largest_bound<T>(args, h * dim, dim, rotated);
        } else {
          for (int64_t d = 0; d < dim; ++d)
            bound = std::max(bound,
                             magnitude_bits(normed_bound(static_cast<float>(norm.data<T>()[d]), dim,
                                                         static_cast<float>(args.rotary_gain))));
        }
        args.scales.data<float>()[h] = kv_scale(bound);
      }
    });
  });
}

}  // namespace cohort::kernels::cpu
