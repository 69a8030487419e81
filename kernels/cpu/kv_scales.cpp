#include "kernels/kv_scales.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/reduce.h"

namespace cohort::kernels::cpu {
namespace {

// The largest bound of the keys or values of a head, whose first row is `row0`; as its bits.
template <class T>
uint32_t largest_bound(const KvScales& args, int64_t row0, int64_t dim, bool is_key) {
  const int64_t columns = args.w.dim(1), stride = RowOffsets(args.w).outer;
  const T* const norm = args.norm.data<T>();
  const auto gain = [&](int64_t c) { return norm[c] + static_cast<T>(args.norm_offset); };
  T adapter = 0;
  if (args.a.defined())
    adapter = std::sqrt(lane_sum<T>(args.a.numel(), [&](int64_t i) {
      const int64_t c = i % columns;
      const T bias = args.norm_bias.defined() ? std::abs(args.norm_bias.data<T>()[c]) : 0;
      const T x = args.a.data<T>()[i] * (std::abs(gain(c)) + bias);
      return x * x;
    }));
  std::vector<KvRow> rows;
  for (int64_t d = 0; d < dim; ++d) {
    const int64_t row = row0 + d;
    const T* const w = args.w.data<T>() + row * stride;
    T weights = std::sqrt(lane_sum<T>(columns, [&](int64_t c) {
      const T x = w[c] * gain(c);
      return x * x;
    }));
    T constants = args.bias.defined() ? std::abs(args.bias.data<T>()[row]) : 0;
    if (args.norm_bias.defined())
      constants += std::abs(
          lane_sum<T>(columns, [&](int64_t c) { return w[c] * args.norm_bias.data<T>()[c]; }));
    if (args.sb.defined()) {
      const T* const sb = args.sb.data<T>() + row * RowOffsets(args.sb).outer;
      weights += adapter *
                 std::sqrt(lane_sum<T>(args.sb.dim(1), [&](int64_t p) { return sb[p] * sb[p]; }));
    }
    rows.push_back({static_cast<float>(weights), static_cast<float>(constants)});
  }
  uint32_t largest = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const size_t i = static_cast<size_t>(d), partner = static_cast<size_t>((d + dim / 2) % dim);
    const float bound = kv_bound(rows[i], is_key ? rows[partner] : KvRow{}, columns);
    largest = std::max(largest,
                       magnitude_bits(is_key ? bound * static_cast<float>(args.key_gain) : bound));
  }
  return largest;
}

}  // namespace

void kv_scales(const KvScales& args) {
  const int64_t heads = args.scales.numel(), dim = args.w.rows() / heads;
  dispatch_float(args.w.dtype(), "kv_scales", [&]<class T>() {
    parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) {
        const bool is_key = h < heads / 2;
        uint32_t bound = 0;
        if (!is_key || !args.k_norm.defined()) {
          bound = largest_bound<T>(args, h * dim, dim, is_key);
        } else {
          for (int64_t d = 0; d < dim; ++d)
            bound = std::max(
                bound, magnitude_bits(normed_key_bound(static_cast<float>(args.k_norm.data<T>()[d]),
                                                       dim, static_cast<float>(args.key_gain))));
        }
        args.scales.data<float>()[h] = kv_scale(bound);
      }
    });
  });
}

}  // namespace cohort::kernels::cpu
