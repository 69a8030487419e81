// Small steps between decode kernels that keep the sampler's state on the device, so that decode
// steps follow one another without the host.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// What the device knows of a sequence that is decoded ("slot"): the columns of a row of
// DecodeState::slots.
enum SlotColumn : uint8_t {
  kSlotToken,     // the last token, which the cache does not hold yet
  kSlotPosition,  // its position; -1: the slot is idle
  kSlotLength,    // tokens at which the sequence is full, its prompt included
  kSlotColumns,
};

// The inputs of a decode step of n rows. Row i is slot rows[i], idle where that is -1 or the slot
// is. An idle row gets token and position 0, slot -1 and rng_index 0.
struct DecodeInputs {
  Tensor &tokens, &positions;  // [n] i32
  Tensor& active;              // [n] i32: the row's slot
  Tensor& rng_index;           // [n] i64: tokens before the one to be drawn
  const Tensor& slots;         // [S, kSlotColumns] i32
  const Tensor& rows;          // [n] i32
};
void decode_inputs(const DecodeInputs& args);

// Hands row i's slot its token: it goes on after it, or becomes idle where the token is one of the
// slot's stop_tokens or negative (no distribution), or fills the sequence. Rows with active[i] < 0
// are passed over.
struct DecodeAdvance {
  Tensor& slots;
  const Tensor& active;       // [n] i32
  const Tensor& tokens;       // [n] i32
  const Tensor& stop_tokens;  // [S, K] i32, of each slot; -1 where there are fewer
};
void decode_advance(const DecodeAdvance& args);

// t[at[i]] = values[i], t seen as flat. The same place may occur several times with one value.
struct SetElements {
  Tensor& t;                  // i32
  const Tensor &at, &values;  // [n] i32
};
void set_elements(const SetElements& args);

// t[at[i], :] = rows[i, :].
struct SetRows {
  Tensor& t;           // [S, ...] of any dtype
  const Tensor& at;    // [n] i32
  const Tensor& rows;  // [n, ...]
};
void set_rows(const SetRows& args);

// pages[:, to] = pages[:, from] for each pair (from, to); no `to` is a `from`.
struct CopyBlocks {
  Tensor& pages;          // [P, blocks, ...]
  const Tensor& from_to;  // [2 n] i32
};
void copy_blocks(const CopyBlocks& args);

namespace cpu {
void decode_inputs(const DecodeInputs& args);
void decode_advance(const DecodeAdvance& args);
void set_elements(const SetElements& args);
void set_rows(const SetRows& args);
void copy_blocks(const CopyBlocks& args);
}  // namespace cpu
namespace cuda {
void decode_inputs(const DecodeInputs& args);
void decode_advance(const DecodeAdvance& args);
void set_elements(const SetElements& args);
void set_rows(const SetRows& args);
void copy_blocks(const CopyBlocks& args);
}  // namespace cuda

}  // namespace cohort::kernels
