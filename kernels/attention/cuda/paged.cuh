// Device view of the paged key/value cache.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/cuda/device.cuh"

namespace cohort::kernels::cuda {

// Maps tokens to cache slots.
struct PageTable {
  const int32_t* table;
  int sequences, max_blocks, block_tokens, blocks;

  // Slot of token `position` of the sequence whose block table row is `row`; negative if the table
  // has no block for it.
  __device__ __forceinline__ int64_t slot(const int32_t* row, int position) const {
    if (position < 0) return -1;
    const int index = position / block_tokens;
    if (index >= max_blocks) return -1;
    const int block = row[index];
    if (block < 0 || block >= blocks) return -1;
    return static_cast<int64_t>(block) * block_tokens + (position - index * block_tokens);
  }
  __device__ bool has(int sequence) const { return sequence >= 0 && sequence < sequences; }
  __device__ const int32_t* row(int sequence) const {
    return table + static_cast<int64_t>(sequence) * max_blocks;
  }
  // Maximum number of tokens of a sequence.
  __host__ __device__ int64_t capacity() const {
    return static_cast<int64_t>(max_blocks) * block_tokens;
  }
  // Number of keys visible to a token at `position`; positions beyond the table count as its last
  // one.
  __device__ int keys_of(int position) const {
    return static_cast<int>(max(int64_t{1}, min(static_cast<int64_t>(position) + 1, capacity())));
  }
};

inline PageTable page_table(const PagedKV& cache) {
  return {.table = pointer<int32_t>(cache.block_table),
          .sequences = static_cast<int>(cache.block_table.dim(0)),
          .max_blocks = static_cast<int>(cache.block_table.dim(1)),
          .block_tokens = static_cast<int>(cache.k.dim(1)),
          .blocks = static_cast<int>(cache.k.dim(0))};
}

}  // namespace cohort::kernels::cuda
