// Dropout as a kernel parameter, shared by dropout() and attention.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/dropout.h"

namespace cohort::kernels::cuda {

// Dropout of one call; disabled if `first_kept` is 0.
struct DropoutMask {
  const int64_t* sequences = nullptr;
  const int32_t* positions = nullptr;
  uint64_t seed = 0, stream = 0;
  uint32_t first_kept = 0;  // smallest random word that keeps its element
  float factor = 1;         // scale of kept elements

  DropoutMask() = default;
  explicit DropoutMask(const DropoutSpec& spec) {
    if (spec.p == 0) return;
    sequences = pointer<int64_t>(spec.sequences);
    positions = pointer<int32_t>(spec.positions);
    seed = spec.seed;
    stream = spec.stream;
    first_kept = dropout_first_kept(static_cast<float>(spec.p));
    factor = static_cast<float>(1 / (1 - spec.p));
  }

  // Philox stream of a token.
  __device__ uint64_t row(int64_t token) const {
    return dropout_row(stream, sequences[token], positions[token]);
  }
  // For attention: bit i is set if key `first` + i is kept, for i < 4; `first` is a multiple of 4.
  // Same bits as dropout_keep() with element = head * 2^32 + key.
  __device__ uint32_t keep_four(uint64_t row_stream, int head, int first) const {
    const uint64_t element = static_cast<uint64_t>(head) << 32 | static_cast<uint64_t>(first);
    const auto words = philox(seed, row_stream, element >> 2);
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) bits |= words[i] >= first_kept ? 1u << i : 0u;
    return bits;
  }
};

}  // namespace cohort::kernels::cuda
