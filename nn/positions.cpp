#include "nn/positions.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>

#include "core/dry_run.h"
#include "kernels/rope.h"

namespace cohort {

Tensor rotary_table(const ModelConfig& c, DType dtype) {
  const std::vector<double> frequencies =
      c.family.rope_frequencies.empty() ? kernels::rope_frequencies(c.rotary_dim(), c.rope_theta)
                                        : c.family.rope_frequencies;
  kernels::RopeGain gain;
  // ExpoSB is defined with interleaved pairs (2i, 2i + 1); ours are (i, i + D/2). They differ by
  // the order in which the weights' rows are stored: channel i here has the gain of channel 2i, and
  // channel i + D/2 that of 2i + 1.
  if (c.position == PositionType::kExposb)
    gain = [&c, half = c.head_dim / 2](int64_t position, int64_t channel) {
      const int64_t interleaved = channel < half ? 2 * channel : 2 * (channel - half) + 1;
      return c.exposb.gain(position, interleaved, c.head_dim);
    };
  return kernels::rope_table(c.context, frequencies, c.family.rope_scale, dtype, gain);
}

// A tensor of values(i) of each index; without elements in a dry run.
template <class T, class F>
static Tensor tensor_of(const Shape& shape, DType dtype, const F& value) {
  Tensor t = Tensor::empty(shape, dtype);
  for (int64_t i = 0; !is_dry_run() && i < t.numel(); ++i) t.data<T>()[i] = value(i);
  return t;
}

Tensor sinusoidal_table(int64_t positions, int64_t channels) {
  return tensor_of<double>({positions, channels}, DType::kF64, [=](int64_t i) {
    const int64_t channel = i % channels, pair = channel / 2;
    const double angle =
        static_cast<double>(i / channels) *
        std::pow(10000.0, -2.0 * static_cast<double>(pair) / static_cast<double>(channels));
    return channel % 2 == 0 ? std::sin(angle) : std::cos(angle);
  });
}

Tensor alibi_slopes(int64_t heads) {
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(heads)));
  return tensor_of<double>({heads}, DType::kF64, [=](int64_t i) {
    const double index =
        i < power ? static_cast<double>(i + 1) : static_cast<double>(i - power) + 0.5;
    return std::exp2(-8 * index / static_cast<double>(power));
  });
}

Tensor t5_buckets(int64_t buckets, int64_t max_distance, MaskType mask) {
  const bool full = mask == MaskType::kFull;
  if (full) buckets /= 2;
  return tensor_of<int32_t>({2 * max_distance + 1}, DType::kI32, [=](int64_t i) {
    const int64_t before = max_distance - i, exact = buckets / 2,
                  distance = full ? std::abs(before) : std::max<int64_t>(before, 0),
                  start = full && before < 0 ? buckets : 0;
    if (distance < exact) return static_cast<int32_t>(start + distance);
    const auto first = static_cast<double>(exact);
    const double log = std::log(static_cast<double>(distance) / first) /
                       std::log(static_cast<double>(max_distance) / first);
    // A logarithm that is a whole number must not be rounded below it.
    const auto range = static_cast<int64_t>(log * static_cast<double>(buckets - exact) + 1e-9);
    return static_cast<int32_t>(start + std::min(exact + range, buckets - 1));
  });
}

PositionScheme::PositionScheme(ParameterSet& set, const ModelConfig& c) {
  const DType statistics = accumulate_dtype(set.dtype());
  if (c.is_rotated()) rope_table_ = rotary_table(c, statistics).to(set.device());
  if (c.position == PositionType::kAlibi)
    slopes_ = alibi_slopes(c.num_heads).to(statistics).to(set.device());
  if (c.position != PositionType::kT5) return;
  buckets_ = t5_buckets(c.position_buckets, c.position_max_distance, c.mask).to(set.device());
  bias_table_ = set.add({.name = "model.relative_attention_bias.weight",
                         .shape = {c.position_buckets, c.num_heads},
                         .use = ParameterUse::kLookup,
                         .init = c.init_std});
}

PositionTerms PositionScheme::terms() const {
  PositionTerms terms{.rope_table = rope_table_, .slopes = slopes_};
  if (bias_table_.defined()) terms.bias = relative_bias(bias_table_, buckets_);
  return terms;
}

}  // namespace cohort
