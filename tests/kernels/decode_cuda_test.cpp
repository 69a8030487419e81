// State of decoded sequences on CUDA.
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/decode_cases.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(CudaDecode, InputsComeFromSlotsAndSlotsAdvance) {
  COHORT_REQUIRE_GPU(device);
  expect_inputs_come_from_slots(device);
  expect_slots_advance(device);
}

TEST(CudaDecode, ElementsRowsAndBlocksAreSet) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : {DType::kF32, DType::kI32})
    expect_elements_and_rows_are_set(dtype, device);
  for (const DType dtype : {DType::kF32, DType::kBF16}) expect_blocks_are_copied(dtype, device);
  expect_rows_have_states(device);
}

}  // namespace
}  // namespace cohort::kernels
