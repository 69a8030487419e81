// Packed sequences with a shared prefix, against the same sequences one by one.
#include "tests/kernels/attention_prefix_cases.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

TEST(AttentionPrefix, EqualsRepeatingThePrefix) {
  for (const SharedPrefix& f :
       {SharedPrefix{2, 1, 8, 0, 5, {3, 1, 7}}, SharedPrefix{4, 2, 16, 0, 127, {2, 130}},
        SharedPrefix{1, 1, 4, 0, 128, {1, 1, 1, 40}}, SharedPrefix{3, 3, 20, 30, 50, {9, 60}},
        SharedPrefix{2, 1, 132, 0, 70, {66, 1}}, SharedPrefix{1, 1, 2, 0, 4095, {3, 70}},
        SharedPrefix{6, 2, 8, 3, 1, {1, 2, 9}}})
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      SCOPED_TRACE(str("prefix of ", f.prefix, ", ", dtype_name(dtype)));
      expect_as_repeated(f, dtype, dtype == DType::kF64 ? 1e-13 : 1e-5);
    }
}

TEST(AttentionPrefix, DoesNotDependOnTheNumberOfThreads) {
  const Packed all = shared({4, 2, 16, 0, 100, {3, 50, 1, 140}}, DType::kF32);
  expect_thread_invariant([&] {
    const Results r = run(all);
    return std::vector{r.o, r.lse, r.dq, r.dk, r.dv};
  });
}

TEST(AttentionPrefix, SaysWhatIsWrong) {
  const SharedPrefix f{1, 1, 4, 0, 5, {3, 2}};
  const auto with = [&](std::vector<int32_t> prefixes) {
    Packed all = shared(f, DType::kF32);
    all.desc.prefixes = Tensor::from(prefixes, {3, 2});
    return all;
  };
  EXPECT_THROW_WITH(run(with({0, 0, 1, 4, 0, 5})), Error, "prefix of sequence 1");
  EXPECT_THROW_WITH(run(with({0, 0, 0, 6, 0, 5})), Error, "got 6 tokens from 0 on");
  EXPECT_THROW_WITH(run(with({0, 0, 5, 3, 0, 5})), Error, "got 3 tokens from 5 on");
  EXPECT_THROW_WITH(run(with({0, 0, 0, 5, 5, 3})), Error, "prefix of sequence 2");
  EXPECT_THROW_WITH(run(with({0, 0, 0, -1, 0, 5})), Error, "got -1 tokens from 0 on");
  Packed full = shared(f, DType::kF32);
  full.desc.mask = Mask::kFull;
  EXPECT_THROW_WITH(run(full), Error, "expected a causal mask");
}

}  // namespace
}  // namespace cohort::kernels
