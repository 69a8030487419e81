// The schemes of positions (ModelConfig::position), and their constants, which are on the CPU.
#pragma once

#include "nn/modules.h"

namespace cohort {

// The table of rope and exposb for the positions of the context: see kernels::rope_table().
Tensor rotary_table(const ModelConfig& config, DType dtype);
// [positions, channels] f64 (Vaswani et al. 2017): the sine of position 10,000^(-2i / channels) in
// channel 2i, and its cosine in channel 2i + 1.
Tensor sinusoidal_table(int64_t positions, int64_t channels);
// Slopes of ALiBi (Press et al. 2022), [heads] f64: 2^(-8 i / heads), i from 1, for a power of two.
// Beyond the next lower power of two, the heads of other numbers get every other slope of twice as
// many, from the first on.
Tensor alibi_slopes(int64_t heads);
// [2 max_distance + 1] i32: T5's bucket (Raffel et al. 2020) of a key j for the query i, at index
// j - i + max_distance. Half of the buckets are of one distance each, the others of logarithmic
// ranges up to max_distance. Later keys have bucket 0 under a causal mask; under a full mask the
// second half of the buckets is theirs.
Tensor t5_buckets(int64_t buckets, int64_t max_distance, MaskType mask);

// The scheme of a model's attention: its constants, on the model's device, and T5's table.
class PositionScheme {
 public:
  PositionScheme(ParameterSet& set, const ModelConfig& config);
  PositionTerms terms() const;

 private:
  Tensor rope_table_, slopes_, buckets_;
  Variable bias_table_;  // [position_buckets, H], a parameter; undefined: none
};

}  // namespace cohort
