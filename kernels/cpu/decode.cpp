// State of decoded sequences on the CPU, and its step to the next token.
#include "kernels/decode.h"

#include <algorithm>
#include <cstring>

namespace cohort::kernels::cpu {

void decode_inputs(const DecodeInputs& args) {
  for (int64_t i = 0; i < args.rows.numel(); ++i) {
    const int32_t slot = args.rows.data<int32_t>()[i];
    const int32_t* const state =
        slot < 0 ? nullptr : args.slots.data<int32_t>() + slot * kSlotColumns;
    const bool idle = state == nullptr || state[kSlotPosition] < 0;
    args.tokens.data<int32_t>()[i] = idle ? 0 : state[kSlotToken];
    args.positions.data<int32_t>()[i] = idle ? 0 : state[kSlotPosition];
    args.active.data<int32_t>()[i] = idle ? -1 : slot;
    args.rng_index.data<int64_t>()[i] = idle ? 0 : state[kSlotPosition] + 1;
  }
}

void decode_advance(const DecodeAdvance& args) {
  const int64_t count = args.stop_tokens.dim(1);
  for (int64_t i = 0; i < args.active.numel(); ++i) {
    const int32_t slot = args.active.data<int32_t>()[i], token = args.tokens.data<int32_t>()[i];
    if (slot < 0) continue;
    int32_t* const state = args.slots.data<int32_t>() + slot * kSlotColumns;
    const int32_t position = state[kSlotPosition] + 1;
    const int32_t* const stops = args.stop_tokens.data<int32_t>() + slot * count;
    const bool ends = token < 0 || position + 1 >= state[kSlotLength] ||
                      std::find(stops, stops + count, token) != stops + count;
    state[kSlotToken] = token;
    state[kSlotPosition] = ends ? -1 : position;
  }
}

void set_elements(const SetElements& args) {
  for (int64_t i = 0; i < args.at.numel(); ++i)
    args.t.data<int32_t>()[args.at.data<int32_t>()[i]] = args.values.data<int32_t>()[i];
}

void row_states(const RowStates& args) {
  const int32_t* const table = args.table.data<int32_t>();
  for (int64_t i = 0; i < args.rows.numel(); ++i) {
    const int32_t row = args.rows.data<int32_t>()[i];
    COHORT_CHECK(row < args.table.numel() && (row < 0 || table[row] >= 0), "[row_states] token ", i,
                 ": row ", row, " of ", args.table.numel(), " has no state");
    args.states.data<int32_t>()[i] = row < 0 ? -1 : table[row];
  }
}

void set_rows(const SetRows& args) {
  if (args.at.numel() == 0) return;
  const size_t bytes = static_cast<size_t>(args.rows.nbytes() / args.at.numel());
  for (int64_t i = 0; i < args.at.numel(); ++i)
    std::memcpy(
        static_cast<char*>(args.t.raw()) + static_cast<size_t>(args.at.data<int32_t>()[i]) * bytes,
        static_cast<const char*>(args.rows.raw()) + static_cast<size_t>(i) * bytes, bytes);
}

void copy_blocks(const CopyBlocks& args) {
  const int64_t planes = args.pages.dim(0), blocks = args.pages.dim(1);
  const size_t bytes = static_cast<size_t>(args.pages.nbytes() / (planes * blocks));
  char* const pages = static_cast<char*>(args.pages.raw());
  const int32_t* const pair = args.from_to.data<int32_t>();
  for (int64_t plane = 0; plane < planes; ++plane)
    for (int64_t i = 0; i + 1 < args.from_to.numel(); i += 2)
      std::memcpy(pages + static_cast<size_t>(plane * blocks + pair[i + 1]) * bytes,
                  pages + static_cast<size_t>(plane * blocks + pair[i]) * bytes, bytes);
}

}  // namespace cohort::kernels::cpu
