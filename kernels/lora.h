// Low-rank adapters of linear layers (LoRA, Hu et al. 2021): y = x w^T + s (x A^T) B^T + bias, with
// a frozen w. Both products are one sum: y = round([x | h] [w | s B]^T + bias), h = round(x A^T),
// by linear_forward() with the columns of h as its tail. See docs/lora.md.
#pragma once

#include <span>

#include "kernels/common.h"

namespace cohort::kernels {

// h = x A^T, the tail of x. A row of h has the same bits among any number of rows.
struct LoraInput {
  Tensor& h;         // [T, P]; may be columns of a wider matrix, such as those after x
  const Tensor& x;   // [T, K]; may be columns of a wider matrix
  const Tensor& a;   // [P, K]
  Tensor copy = {};  // output, may be undefined: h again, contiguous [T, P]
};
COHORT_KERNEL(void lora_input(const LoraInput& args));

// Row t keeps the columns of one of several adapters side by side: `columns` of them, from
// adapters[rows[t]] times `columns` on. Its other columns, and all of a row below 0, become zeros.
struct SelectAdapters {
  Tensor& h;  // [T, S columns]; may be columns of a wider matrix
  int64_t columns = 0;
  const Tensor& rows;      // [T] i32; undefined: every row has adapter 0
  const Tensor& adapters;  // [R] i32; undefined with `rows`
};
COHORT_KERNEL(void select_adapters(const SelectAdapters& args));

// A module of the layer, such as its queries: rows of w. Module m has columns m r to (m + 1) r - 1
// of h and of s B, which is 0 outside of the modules' blocks.
struct AdapterSlice {
  int64_t row = 0, rows = 0;
};

// From the gradient of y: dh = dy (s B), and dB (+)= s dy_m^T h_m for every module m. A
// non-finite dy may also make columns of dh NaN that belong to other modules.
struct LoraOutputGradients {
  Tensor& dh;        // [T, P]
  GradOut db;        // [rows of all modules, r], a weight gradient
  const Tensor& dy;  // [T, N]
  const Tensor& h;   // [T, P]; not read if dB is not wanted
  const Tensor& sb;  // [N, P]; may be columns of a wider matrix
  std::span<const AdapterSlice> modules;
  double scale = 1;  // s
};
void lora_output_gradients(const LoraOutputGradients& args);

namespace cuda {
// True if lora_input() supports the arguments: bf16 with rows aligned to 16 bytes, P a multiple of
// 64. kernels::lora_input() composes others of a GEMM and copies.
bool has_lora_kernel(const LoraInput& args);

// The blocks of lora_output_gradients(), each of 64 `boxes` columns of a module at most, a strip,
// and 128 `tiles` rows, a range; and the partial sums that they write.
struct LoraBlocks {
  static constexpr int64_t kBoxColumns = 64, kTileRows = 128, kMaxBoxes = 8;
  int64_t boxes = 0, tiles = 0, strips = 0, ranges = 0;
  Tensor dh = {}, db = {};  // [strips, T, r], [ranges, rows of all modules, r]
};
// True if it supports the arguments: bf16 with rows aligned to 16 bytes, at most four modules, r a
// multiple of 8 up to 64, and a GPU of sm_90 or newer.
bool has_lora_kernel(const LoraOutputGradients& args);
void lora_output_gradients(const LoraOutputGradients& args, const LoraBlocks& blocks);
}  // namespace cuda

}  // namespace cohort::kernels
