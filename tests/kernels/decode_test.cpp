// The decoding state on the CPU.
#include "tests/kernels/decode_cases.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(Decode, InputsComeFromSlots) {
  expect_inputs_come_from_slots({});
}

TEST(Decode, SlotsAdvance) {
  expect_slots_advance({});
}

TEST(Decode, ElementsAndRowsAreSet) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kI32})
    expect_elements_and_rows_are_set(dtype, {});
}

TEST(Decode, RowsHaveStates) {
  expect_rows_have_states({});
  Tensor states = Tensor::empty({1}, DType::kI32);
  const Tensor table = ids({7, -1}, Device{});
  for (const int32_t row : {1, 2})
    EXPECT_THROW_WITH(row_states({.states = states, .rows = ids({row}, Device{}), .table = table}),
                      Error, "token 0: row ");
}

TEST(Decode, BlocksAreCopied) {
  for (const DType dtype : {DType::kF64, DType::kF32}) expect_blocks_are_copied(dtype, {});
}

TEST(Decode, ArgumentsAreChecked) {
  Tensor slots = some_slots({}), t = Tensor::zeros({2, 2}, DType::kF32);
  const Tensor one = ids({0}, Device{}), two = ids({0, 1}, Device{});
  EXPECT_THROW_WITH(decode_advance({.slots = t, .active = one, .tokens = one, .stop_tokens = two}),
                    Error, "[decode_advance] expected slots i32[2, 3] = [S, 3]");
  EXPECT_THROW_WITH(
      decode_advance({.slots = slots, .active = one, .tokens = one, .stop_tokens = two}), Error,
      "[decode_advance] expected stop_tokens i32[S, K]");
  EXPECT_THROW_WITH(set_elements({.t = slots, .at = one, .values = two}), Error, "[set_elements]");
  EXPECT_THROW_WITH(set_rows({.t = slots, .at = one, .rows = two}), Error, "[set_rows]");
}

}  // namespace
}  // namespace cohort::kernels
