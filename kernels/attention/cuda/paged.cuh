// The paged key/value cache as kernels see it.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/cuda/device.cuh"

namespace cohort::kernels::cuda {

// Where a token's keys and values lie.
struct PageTable {
  const int32_t* table;
  int sequences, max_blocks, block_tokens, blocks;

  // The slot of token `position` of the sequence whose row of the table starts at `row`; negative
  // if the table has no block for it.
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
  // Tokens that a row of the table has room for.
  __host__ __device__ int64_t capacity() const {
    return static_cast<int64_t>(max_blocks) * block_tokens;
  }
  // How many keys a token at `position` sees; positions beyond the table count as its end.
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
