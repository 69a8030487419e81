// Attention on views of packed tensors.
#include "tests/kernels/attention_layouts.h"

#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

// Heads of 16 to 256 columns.
std::vector<AttentionCase> layout_cases(DType dtype) {
  std::vector<AttentionCase> cases;
  for (const int64_t dim : {16, 40, 64, 96, 128, 192, 256})
    for (const int64_t kv_heads : {2, 4})
      cases.push_back(in_dtype(
          make_case({.heads = 4, .kv_heads = kv_heads, .dim = dim}, {{1, 70}, {2, 1}, {3, 150}}),
          dtype));
  return cases;
}

TEST(AttentionLayouts, GiveTheBitsOfSeparateTensors) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const AttentionCase& c : layout_cases(dtype)) expect_layouts_agree(c);
}

TEST(CudaAttentionLayouts, GiveTheBitsOfSeparateTensors) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kernels::test::kCudaTypes)
    for (const AttentionCase& c : layout_cases(dtype)) expect_layouts_agree(on_device(c, device));
}

}  // namespace
}  // namespace cohort::test
