// Small kernels between decode steps that keep the sampler's state on the device, so that decode
// steps need no host synchronisation.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// Columns of the device's table of sequences in decoding ("slots"), one row per slot.
enum SlotColumn : uint8_t {
  kSlotToken,     // the last token, which the cache does not hold yet
  kSlotPosition,  // its position; -1: the slot is idle
  kSlotLength,    // maximum number of tokens, including the prompt
  kSlotColumns,
};

// The inputs of a decode step of n rows. Row i is slot rows[i]; it is idle if that is -1 or an idle
// slot. An idle row gets token and position 0, slot -1 and rng_index 0.
struct DecodeInputs {
  Tensor &tokens, &positions;  // [n] i32
  Tensor& active;              // [n] i32: the row's slot
  Tensor& rng_index;           // [n] i64: number of tokens before the one to sample
  const Tensor& slots;         // [S, kSlotColumns] i32
  const Tensor& rows;          // [n] i32
};
COHORT_KERNEL(void decode_inputs(const DecodeInputs& args));

// Appends row i's token to its slot, which becomes idle if the token is one of its stop_tokens,
// negative (no distribution), or the last that fits. Rows with active[i] < 0 are ignored.
struct DecodeAdvance {
  Tensor& slots;
  const Tensor& active;       // [n] i32
  const Tensor& tokens;       // [n] i32
  const Tensor& stop_tokens;  // [S, K] i32 per slot, padded with -1
};
COHORT_KERNEL(void decode_advance(const DecodeAdvance& args));

// t[at[i]] = values[i] with t flattened. Equal indices must have equal values.
struct SetElements {
  Tensor& t;                  // i32
  const Tensor &at, &values;  // [n] i32
};
COHORT_KERNEL(void set_elements(const SetElements& args));

// states[i] = table[rows[i]]; -1 where rows[i] is negative. On the CPU throws Error for another row
// than those of the table, and for one whose element is negative.
struct RowStates {
  Tensor& states;       // [n] i32
  const Tensor& rows;   // [n] i32
  const Tensor& table;  // [R] i32
};
COHORT_KERNEL(void row_states(const RowStates& args));

// t[at[i], :] = rows[i, :].
struct SetRows {
  Tensor& t;           // [S, ...] of any dtype
  const Tensor& at;    // [n] i32
  const Tensor& rows;  // [n, ...]
};
COHORT_KERNEL(void set_rows(const SetRows& args));

// pages[:, to] = pages[:, from] for each pair (from, to); no `to` is a `from`.
struct CopyBlocks {
  Tensor& pages;          // [P, blocks, ...]
  const Tensor& from_to;  // [2 n] i32
};
COHORT_KERNEL(void copy_blocks(const CopyBlocks& args));

}  // namespace cohort::kernels
