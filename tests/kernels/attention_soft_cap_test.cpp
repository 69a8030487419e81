// The soft cap of scores: the definition, equal bits in prefill and decode, errors.
#include "tests/kernels/attention_eager.h"
#include "tests/kernels/attention_paged_cases.h"

namespace cohort::test {
namespace {

// Scores reach several times the cap.
const std::vector<AttentionShape> kShapes = {
    {.heads = 6, .kv_heads = 2, .dim = 24, .soft_cap = 0.4},
    {.heads = 2, .dim = 130, .scale = 0.7, .window = 70, .soft_cap = 2},
    {.heads = 2, .dim = 40, .mask = kernels::Mask::kFull, .soft_cap = 50}};

TEST(AttentionSoftCap, EqualsTheDefinitionAndItsGradients) {
  for (const AttentionShape& shape : kShapes) {
    const AttentionCase c = make_case(shape, {{1, 150}, {2, 1}, {3, 0}, {4, 70}});
    const AttentionOutput out = run_forward(c), plain = naive_attention(c);
    const AttentionGrads grads = run_backward(c, out);
    const EagerAttention eager = eager_attention(c, DType::kF64);
    EXPECT_LT(relative_error(out.o, plain.o), 1e-12);
    EXPECT_LT(relative_error(out.lse, plain.lse), 1e-12);
    EXPECT_LT(relative_error(grads.dq, eager.grads.dq), 1e-12);
    EXPECT_LT(relative_error(grads.dk, eager.grads.dk), 1e-12);
    EXPECT_LT(relative_error(grads.dv, eager.grads.dv), 1e-12);
  }
}

TEST(AttentionSoftCap, DropsProbabilities) {
  const AttentionCase c =
      make_case({.heads = 4, .kv_heads = 2, .dim = 20, .p = 0.3, .soft_cap = 0.4}, {{1, 140}});
  EXPECT_LT(relative_error(run_forward(c).o, naive_attention(c).o), 1e-12);
}

TEST(AttentionSoftCap, BitsOfPrefillAndDecodeAreThoseOfTheForwardPass) {
  Rng rng(7, rng_stream(kTestPurpose, 9));
  AttentionShape shape{.heads = 6, .kv_heads = 2, .dim = 20, .dtype = DType::kF32, .soft_cap = 0.4};
  for (const int64_t window : {0, 100}) {
    shape.window = window;
    const AttentionCase c = make_case(shape, {{1, 1}, {2, 290}, {3, 30}, {4, 129}});
    EXPECT_TRUE(bit_equal(run_in_random_steps(c, 16, rng), run_forward(c).o));
  }
}

TEST(AttentionSoftCap, ALargeCapChangesLittleAndASmallOneMuch) {
  AttentionCase c = make_case({.dim = 16, .scale = 1}, {{1, 80}});
  const Tensor without = run_forward(c).o;
  c.desc.soft_cap = 1e6;
  EXPECT_LT(relative_error(run_forward(c).o, without), 1e-9);
  c.desc.soft_cap = 1;
  EXPECT_GT(relative_error(run_forward(c).o, without), 1e-2);
}

TEST(AttentionSoftCap, SaysWhatIsWrong) {
  AttentionCase c = make_case({.dim = 4}, {{1, 3}});
  c.desc.soft_cap = -1;
  EXPECT_THROW_WITH(run_forward(c), Error, "expected a soft cap above 0, or 0, got -1");
}

}  // namespace
}  // namespace cohort::test
