// Tiles of the generic CUDA attention kernels, and the shared memory of a block with them. Where a
// kernel's large tiles take more than the 99 KB of compute capability 8.6, 8.9 and 12.0, it also
// has small ones that fit there. Both give the same bits: the softmax step, kTileKeys keys, and the
// order of every sum are the same, only fewer rows are held in shared memory at a time.
#pragma once

#include <cstddef>

#include "kernels/attention/attention.h"

namespace cohort::kernels {

enum class Tiles { kLarge, kSmall };

// Keys per tile in the canonical order, for a padded head dim (64, 128 or 256).
template <int kDim>
inline constexpr int kTileKeys = static_cast<int>(attention_tile(kDim));

// bf16 forward and paged attention: a warp has 16 query rows; tiles of kTileKeys keys and values
// are loaded into stages.
struct RowTiles {
  int warps, key_stages, value_stages;

  constexpr size_t shared_bytes(int dim) const {
    const int64_t keys = (key_stages + value_stages) * attention_tile(dim), queries = 16 * warps;
    return static_cast<size_t>(2 * dim * (keys + queries));
  }
};
constexpr RowTiles forward_tiles(int dim, Tiles tiles) {
  const int stages = tiles == Tiles::kSmall && dim > 64 ? 1 : 2;
  return {.warps = dim > 128 ? 4 : 8, .key_stages = stages, .value_stages = stages};
}
// A single stage of keys leaves shared memory for other blocks on the multiprocessor.
constexpr RowTiles paged_tiles(int dim, Tiles tiles) {
  return {.warps = 4, .key_stages = 1, .value_stages = tiles == Tiles::kSmall && dim > 64 ? 1 : 2};
}

// f32 forward and paged attention: 64 query rows, the scores of a tile, and as many of its keys or
// values as are loaded at a time. Rows are padded by 16 bytes, so that adjacent ones start in
// different banks.
inline constexpr int kFloatRows = 64;
constexpr int float_loaded_keys(int dim) {
  return dim <= 64 ? 128 : dim <= 128 ? 32 : 16;
}
constexpr size_t float_shared_bytes(int dim) {
  const int64_t row = dim + 4, score_row = attention_tile(dim) + 4;
  return sizeof(float) * static_cast<size_t>((float_loaded_keys(dim) + kFloatRows) * row +
                                             kFloatRows * score_row + kFloatRows);
}

// Passes of the backward: one owns keys and computes dK and dV, the other queries and dQ.
enum class Pass { kKeys, kQueries };

// bf16 backward. A warp has 16 `rows` own rows; `split` warps share own rows, each with its part of
// the gradient columns (each recomputes S and dP, which costs less than the register spills it
// avoids). step: streamed rows per stage, of which there are two; columns: streamed rows processed
// at a time. blocks: minimum per multiprocessor.
struct BackwardTiles {
  int rows, warps, split, step, columns, blocks;

  constexpr int own() const { return 16 * rows * warps / split; }
  // Own tiles, stages of streamed tiles, and for kKeys the per-query data of the stages: lse_log2,
  // delta, Philox stream.
  constexpr size_t shared_bytes(int dim, Pass pass) const {
    const int row_bytes = 2 * dim, query_bytes = pass == Pass::kKeys ? 16 : 0;
    return static_cast<size_t>(2 * own() * row_bytes + 2 * step * (2 * row_bytes + query_bytes));
  }
};
constexpr BackwardTiles backward_tiles(int dim, Pass pass, Tiles tiles) {
  const bool keys = pass == Pass::kKeys, small = tiles == Tiles::kSmall;
  if (dim == 64) return {2, 4, 1, 64, 32, 2};
  if (dim == 128 && !keys) return {2, 4, 1, 32, 32, 2};
  if (dim == 128)
    return small ? BackwardTiles{1, 8, 1, 32, 32, 1} : BackwardTiles{1, 8, 1, 64, 64, 1};
  const int step = small ? 16 : 32;
  return keys ? BackwardTiles{1, 8, 2, step, step, 1} : BackwardTiles{1, 4, 1, step, step, 1};
}

// f32 backward: own and streamed tiles of as many rows, of two tensors each, and P and dS.
constexpr int float_backward_rows(int dim) {
  return dim > 128 ? 16 : 32;
}
constexpr size_t float_backward_shared_bytes(int dim) {
  const int rows = float_backward_rows(dim);
  return sizeof(float) * static_cast<size_t>(rows * (4 * (dim + 4) + 2 * (rows + 4)));
}

}  // namespace cohort::kernels
