// Tests of the device's decoding state, for both devices.
#pragma once

#include "kernels/decode.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::test {

inline Tensor ids(const std::vector<int32_t>& values, const Shape& shape, Device device) {
  return Tensor::from(values, shape).to(device);
}
inline Tensor ids(const std::vector<int32_t>& values, Device device) {
  return ids(values, {static_cast<int64_t>(values.size())}, device);
}

// Slots: last token, its position, maximum length.
inline Tensor some_slots(Device device) {
  return ids({7, 4, 10, 0, -1, 0, 9, 0, 2, 5, 8, 10}, {4, kSlotColumns}, device);
}

inline void expect_inputs_come_from_slots(Device device) {
  const Tensor slots = some_slots(device), rows = ids({2, -1, 1, 0, 3}, device);
  Tensor tokens = Tensor::empty_like(rows), positions = Tensor::empty_like(rows),
         active = Tensor::empty_like(rows), index = Tensor::empty({5}, DType::kI64, device);
  decode_inputs({.tokens = tokens,
                 .positions = positions,
                 .active = active,
                 .rng_index = index,
                 .slots = slots,
                 .rows = rows});
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(tokens.to_vector<int32_t>(), (Ids{9, 0, 0, 7, 5}));
  EXPECT_EQ(positions.to_vector<int32_t>(), (Ids{0, 0, 0, 4, 8}));
  EXPECT_EQ(active.to_vector<int32_t>(), (Ids{2, -1, -1, 0, 3}));
  EXPECT_EQ(index.to_vector<int32_t>(), (Ids{1, 0, 0, 5, 9}));
}

// Slot 0 continues, 2 is full with its second token, 3 gets its stop token.
inline void expect_slots_advance(Device device) {
  Tensor slots = some_slots(device);
  const Tensor stops = ids({3, -1, -1, -1, 8, 8, 1, 6}, {4, 2}, device);
  const auto advance = [&](const std::vector<int32_t>& active, const std::vector<int32_t>& tokens) {
    decode_advance({.slots = slots,
                    .active = ids(active, device),
                    .tokens = ids(tokens, device),
                    .stop_tokens = stops});
    return slots.to_vector<int32_t>();
  };
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(advance({2, -1, 0, 3}, {5, 99, 6, 6}), (Ids{6, 5, 10, 0, -1, 0, 5, -1, 2, 6, -1, 10}));
  // A missing distribution ends a sequence too; a stop token of another sequence does not.
  EXPECT_EQ(advance({0}, {6}), (Ids{6, 6, 10, 0, -1, 0, 5, -1, 2, 6, -1, 10}));
  EXPECT_EQ(advance({0}, {-1}), (Ids{-1, -1, 10, 0, -1, 0, 5, -1, 2, 6, -1, 10}));
}

inline void expect_elements_and_rows_are_set(DType dtype, Device device) {
  Tensor t = ids({0, 1, 2, 3, 4, 5}, {3, 2}, device);
  set_elements({.t = t, .at = ids({5, 0, 5}, device), .values = ids({-5, 9, -5}, device)});
  EXPECT_EQ(t.to_vector<int32_t>(), (std::vector<int32_t>{9, 1, 2, 3, 4, -5}));
  set_elements({.t = t, .at = ids({}, device), .values = ids({}, device)});
  for (const int64_t cols : {1, 2, 8, 40}) {
    Tensor all = Tensor::full({5, cols}, 1, dtype, device);
    Tensor wide = Tensor::empty({2, cols}, dtype, device);
    wide.select(0, 0).fill_(7);
    wide.select(0, 1).fill_(8);
    set_rows({.t = all, .at = ids({4, 1}, device), .rows = wide});
    const auto values = all.to_vector<double>();
    for (int64_t i = 0; i < all.numel(); ++i)
      EXPECT_EQ(values[static_cast<size_t>(i)], i / cols == 4 ? 7 : i / cols == 1 ? 8 : 1);
  }
}

inline void expect_rows_have_states(Device device) {
  Tensor states = Tensor::empty({4}, DType::kI32, device);
  row_states(
      {.states = states, .rows = ids({2, -1, 0, 2}, device), .table = ids({7, -1, 5}, device)});
  EXPECT_EQ(states.to_vector<int32_t>(), (std::vector<int32_t>{5, -1, 7, 5}));
}

inline void expect_blocks_are_copied(DType dtype, Device device) {
  for (const int64_t cols : {1, 3, 16}) {
    Tensor pages = Tensor::empty({3, 6, 2, cols}, dtype, device);
    for (int64_t plane = 0; plane < 3; ++plane)
      for (int64_t block = 0; block < 6; ++block)
        pages.select(0, plane).select(0, block).fill_(static_cast<double>(10 * plane + block));
    copy_blocks({.pages = pages, .from_to = ids({0, 5, 0, 3, 4, 1}, device)});
    const auto values = pages.to_vector<double>();
    const int64_t source[] = {0, 4, 2, 0, 4, 0};
    for (int64_t i = 0; i < pages.numel(); ++i) {
      const int64_t plane = i / (6 * 2 * cols), block = i / (2 * cols) % 6;
      EXPECT_EQ(values[static_cast<size_t>(i)], static_cast<double>(10 * plane + source[block]));
    }
  }
}

}  // namespace cohort::kernels::test
