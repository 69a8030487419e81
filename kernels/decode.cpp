#include "kernels/decode.h"

#include "core/with_cuda.h"
#include "kernels/arguments.h"

namespace cohort::kernels {

static_assert(kSlotColumns == 3);  // the specs below

void decode_inputs(const DecodeInputs& args) {
  ArgumentCheck check("decode_inputs");
  check("i32 [S, 3] slots; i32 [n] rows, tokens, positions, active; i64 [n] rng_index", args.slots,
        args.rows, args.tokens, args.positions, args.active, args.rng_index);
  on_device<cpu::decode_inputs, cuda::decode_inputs>(args.slots.device(), args);
}

void decode_advance(const DecodeAdvance& args) {
  ArgumentCheck check("decode_advance");
  check("i32 [S, 3] slots; i32 [n] active, tokens; i32 [S, K] stop_tokens", args.slots, args.active,
        args.tokens, args.stop_tokens);
  on_device<cpu::decode_advance, cuda::decode_advance>(args.slots.device(), args);
}

void set_elements(const SetElements& args) {
  ArgumentCheck("set_elements")("i32 [...] t; i32 [n] at, values", args.t, args.at, args.values);
  on_device<cpu::set_elements, cuda::set_elements>(args.t.device(), args);
}

void row_states(const RowStates& args) {
  ArgumentCheck("row_states")("i32 [n] states, rows; i32 [R] table", args.states, args.rows,
                              args.table);
  on_device<cpu::row_states, cuda::row_states>(args.states.device(), args);
}

void set_rows(const SetRows& args) {
  ArgumentCheck("set_rows")("[S, ...] t; i32 [n] at; [n, ...] rows", args.t, args.at, args.rows);
  on_device<cpu::set_rows, cuda::set_rows>(args.t.device(), args);
}

void copy_blocks(const CopyBlocks& args) {
  ArgumentCheck check("copy_blocks");
  check("[P, blocks, ...] pages; i32 [2 n] from_to", args.pages, args.from_to);
  on_device<cpu::copy_blocks, cuda::copy_blocks>(args.pages.device(), args);
}

}  // namespace cohort::kernels
