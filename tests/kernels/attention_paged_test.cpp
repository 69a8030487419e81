// Prefill and decode on a paged cache give the bits of the training forward pass, however a
// sequence is split into steps, whatever shares the batch, and wherever its blocks are.
#include "core/parallel.h"
#include "kernels/rope.h"
#include "tests/kernels/attention_paged_cases.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::test {
namespace {

using kernels::PagedKV;

TEST(AttentionPaged, BitsAreThoseOfTheForwardPass) {
  struct Row {
    int64_t block_tokens, group, dim;
    DType dtype;
  };
  Rng rng(3, rng_stream(kTestPurpose, 9));
  for (const Row& row :
       {Row{1, 1, 20, DType::kF32}, Row{3, 3, 132, DType::kF32}, Row{3, 1, 5, DType::kF64},
        Row{16, 3, 20, DType::kF32}, Row{16, 1, 64, DType::kF64}, Row{32, 2, 8, DType::kF32}}) {
    SCOPED_TRACE(str(dtype_name(row.dtype), ", blocks of ", row.block_tokens, ", D ", row.dim));
    const AttentionCase c =
        make_case({.heads = 2 * row.group, .kv_heads = 2, .dim = row.dim, .dtype = row.dtype},
                  {{1, 1}, {2, 150}, {3, 30}, {4, 129}});
    EXPECT_TRUE(bit_equal(run_in_random_steps(c, row.block_tokens, rng), run_forward(c).o));
  }
}

TEST(AttentionPaged, BitsAreThoseOfTheForwardPassUnderAWindow) {
  Rng rng(7, rng_stream(kTestPurpose, 9));
  for (const int64_t window : {1, 20, 100, 128, 140}) {
    SCOPED_TRACE(window);
    const AttentionCase c =
        make_case({.heads = 6, .kv_heads = 2, .dim = 20, .dtype = DType::kF32, .window = window},
                  {{1, 1}, {2, 290}, {3, 30}, {4, 129}});
    EXPECT_TRUE(bit_equal(run_in_random_steps(c, 16, rng), run_forward(c).o));
  }
}

TEST(AttentionPaged, TokenByTokenIsTheSameAsAllAtOnce) {
  Rng rng(4, rng_stream(kTestPurpose, 9));
  const AttentionCase c =
      make_case({.heads = 7, .kv_heads = 1, .dim = 64, .dtype = DType::kF32}, {{1, 140}});
  const Tensor expected = run_forward(c).o;
  PagedKV cache = make_cache(c, 16, rng);
  Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
  run_step(cache, c, {{0, 0, 140}}, all);
  EXPECT_TRUE(bit_equal(all, expected));
  cache = make_cache(c, 16, rng);
  for (int64_t t = 0; t < 140; ++t) run_step(cache, c, {{0, t, t + 1}}, all);
  EXPECT_TRUE(bit_equal(all, expected));
}

// More query heads per key head than rows in a work item.
TEST(AttentionPaged, LargeGroups) {
  Rng rng(5, rng_stream(kTestPurpose, 9));
  const AttentionCase c =
      make_case({.heads = 150, .kv_heads = 1, .dim = 4, .dtype = DType::kF32}, {{1, 9}});
  EXPECT_TRUE(bit_equal(run_in_random_steps(c, 4, rng), run_forward(c).o));
}

// Two sequences may share the blocks of a common prefix.
TEST(AttentionPaged, SequencesMayShareBlocks) {
  const AttentionCase c = make_case({.dim = 8, .dtype = DType::kF32}, {{1, 6}});
  const Shape shape = {3, 4, 2, 8};
  PagedKV cache{Tensor::zeros(shape, DType::kF32), Tensor::zeros(shape, DType::kF32),
                Tensor::from(std::vector<int32_t>{2, 0, 2, 1}, {2, 2})};
  Tensor first = Tensor::zeros(c.q.shape(), c.q.dtype()),
         second = Tensor::zeros(c.q.shape(), c.q.dtype());
  run_step(cache, c, {{0, 0, 6}}, first);
  const auto table = [](int32_t s, int64_t n) {
    return Tensor::from(std::vector<int32_t>(static_cast<size_t>(n), s));
  };
  const Tensor positions = Tensor::from(std::vector<int32_t>{4, 5});
  Tensor qkv = side_by_side(c.q, c.k, c.v).narrow(0, 4, 2);
  kernels::rope_kv_write({cache, qkv, table(1, 2), positions, {}});
  Tensor o = Tensor::zeros({2, 2, 8}, DType::kF32);
  kernels::attention_paged({o, c.q.narrow(0, 4, 2), cache, table(1, 2), positions, c.desc});
  EXPECT_TRUE(bit_equal(o, first.narrow(0, 4, 2)));
}

TEST(AttentionPaged, BitsDoNotDependOnThreads) {
  const int before = num_threads();
  const AttentionCase c = make_case({.heads = 4, .kv_heads = 2, .dim = 64, .dtype = DType::kF32},
                                    {{1, 200}, {2, 150}, {3, 1}, {4, 30}});
  const auto run = [&](int threads) {
    set_num_threads(threads);
    Rng rng(6, rng_stream(kTestPurpose, 9));
    return run_in_random_steps(c, 16, rng);
  };
  const Tensor one = run(1);
  for (const int threads : {2, 3}) EXPECT_TRUE(bit_equal(one, run(threads)));
  set_num_threads(before);
}

TEST(AttentionPaged, WriteTouchesOnlyItsSlots) {
  PagedKV cache{Tensor::zeros({3, 2, 1, 2}, DType::kF32), Tensor::zeros({3, 2, 1, 2}, DType::kF32),
                Tensor::from(std::vector<int32_t>{2, 0}, {1, 2})};
  const std::vector<float> values = {-1, -2, 1, 2, 5, 6, -3, -4, 3, 4, 7, 8};
  Tensor qkv = Tensor::from(values, {2, 3, 2});
  kernels::rope_kv_write({cache,
                          qkv,
                          Tensor::from(std::vector<int32_t>{0, 0}),
                          Tensor::from(std::vector<int32_t>{1, 2}),
                          {}});
  EXPECT_EQ(qkv.to_vector<float>(), values);
  // Position 1 is slot 1 of block 2, position 2 is slot 0 of block 0.
  EXPECT_EQ(cache.k.to_vector<float>(), (std::vector<float>{3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2}));
  EXPECT_EQ(cache.v.to_vector<float>(), (std::vector<float>{7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 5, 6}));
}

// The composed specification: rope() of queries and keys, then a write without angles.
TEST(AttentionPaged, WriteRotatesAsRopeDoes) {
  Rng rng(9, rng_stream(kTestPurpose, 9));
  using Row = std::tuple<DType, int64_t, kernels::RopeGain>;
  for (const auto& [dtype, width, gain] : {Row{DType::kF32, 10, {}},
                                           {DType::kF64, 10, {}},
                                           {DType::kF32, 4, {}},
                                           {DType::kF32, 10, kernels::test::rope_gain},
                                           {DType::kF64, 10, kernels::test::rope_gain}}) {
    const AttentionCase c =
        make_case({.heads = 6, .kv_heads = 2, .dim = 10, .dtype = dtype}, {{1, 20}, {2, 7}});
    const PagedKV start = make_cache(c, 4, rng);
    PagedKV fused{start.k.clone(), start.v.clone(), start.block_table}, composed = start;
    const Tensor sequences = Tensor::from(std::vector<int32_t>{1, 0, 0, -1, 1});
    const Tensor positions = Tensor::from(std::vector<int32_t>{6, 0, 17, 3, -1});
    const Tensor table =
        kernels::rope_table(18, kernels::rope_frequencies(width, 100), 1, dtype, gain);
    const Tensor qkv = side_by_side(c.q, c.k, c.v).narrow(0, 0, 5);
    Tensor in_place = qkv.clone();
    kernels::rope_kv_write({fused, in_place, sequences, positions, table});

    Tensor rotated = Tensor::empty_like(qkv);
    // rope() has no idle tokens.
    const Tensor valid = Tensor::from(std::vector<int32_t>{6, 0, 17, 3, 0});
    kernels::rope({.y = rotated, .x = qkv, .positions = valid, .table = table, .plain_heads = 2});
    kernels::rope_kv_write({composed, rotated, sequences, positions, {}});
    EXPECT_TRUE(bit_equal(fused.k, composed.k));
    EXPECT_TRUE(bit_equal(fused.v, composed.v));
    EXPECT_TRUE(bit_equal(in_place.narrow(0, 0, 3).narrow(1, 0, 6).contiguous(),
                          rotated.narrow(0, 0, 3).narrow(1, 0, 6).contiguous()));
    EXPECT_TRUE(bit_equal(in_place.narrow(0, 3, 2), qkv.narrow(0, 3, 2)));  // idle

    EXPECT_THROW_WITH(
        kernels::rope_kv_write({fused, in_place, sequences, positions, table.narrow(0, 0, 17)}),
        Error, "position 17 of token 2 is outside the table of 17");
  }
}

TEST(AttentionPaged, IdleTokensGetZerosAndChangeNoOtherToken) {
  Rng rng(10, rng_stream(kTestPurpose, 9));
  const AttentionCase c =
      make_case({.heads = 4, .kv_heads = 2, .dim = 8, .dtype = DType::kF32}, {{1, 9}, {2, 5}});
  PagedKV cache = make_cache(c, 4, rng);
  Tensor all = Tensor::full(c.q.shape(), NAN, DType::kF32);
  run_step(cache, c, {{0, 0, 9}, {1, 0, 5}}, all);
  // Tokens 7 and 8 of the first sequence, 4 of the second, and idle ones among them.
  const auto at = [&](int64_t token) { return c.q.narrow(0, token, 1); };
  Tensor q = Tensor::full({6, 4, 8}, 1, DType::kF32);
  WideRows wide(Tensor::full({6, 4, 8}, NAN, DType::kF32));
  const Tensor& o = wide.view;
  q.narrow(0, 1, 1).copy_(at(7));
  q.narrow(0, 3, 1).copy_(at(8));
  q.narrow(0, 5, 1).copy_(at(13));
  kernels::attention_paged({wide.view,
                            q,
                            cache,
                            Tensor::from(std::vector<int32_t>{-1, 0, 0, 0, -5, 1}),
                            Tensor::from(std::vector<int32_t>{3, 7, -1, 8, -2, 4}),
                            {}});
  EXPECT_TRUE(wide.intact());
  for (const int64_t idle : {0, 2, 4})
    for (const float x : o.select(0, idle).to_vector<float>()) EXPECT_EQ(x, 0);
  EXPECT_TRUE(bit_equal(o.narrow(0, 1, 1), all.narrow(0, 7, 1)));
  EXPECT_TRUE(bit_equal(o.narrow(0, 3, 1), all.narrow(0, 8, 1)));
  EXPECT_TRUE(bit_equal(o.narrow(0, 5, 1), all.narrow(0, 13, 1)));
}

TEST(AttentionPaged, SaysWhatIsWrong) {
  PagedKV cache{Tensor::zeros({4, 2, 1, 3}, DType::kF32), Tensor::zeros({4, 2, 1, 3}, DType::kF32),
                Tensor::from(std::vector<int32_t>{0, 1, -1, 2, 9, 3}, {2, 3})};
  const Tensor x = Tensor::zeros({1, 1, 3}, DType::kF32);
  Tensor o = Tensor::zeros({1, 1, 3}, DType::kF32);
  const auto one = [](int32_t i) { return Tensor::from(std::vector<int32_t>{i}); };
  const auto attention = [&](int32_t s, int32_t p) {
    kernels::attention_paged({o, x, cache, one(s), one(p), {}});
  };
  const auto write = [&](int32_t s, int32_t p) {
    Tensor qkv = Tensor::zeros({1, 3, 3}, DType::kF32);
    kernels::rope_kv_write({cache, qkv, one(s), one(p), {}});
  };
  attention(0, 3);
  EXPECT_THROW_WITH(attention(0, 4), Error,
                    "block_table[0, 2]: expected a block from 0 to 3 for position 4, got -1");
  EXPECT_THROW_WITH(attention(1, 5), Error, "block_table[1, 1]: expected a block from 0 to 3");
  EXPECT_THROW_WITH(attention(0, 6), Error,
                    "position 6 of sequence 0 is beyond its block table: 3 blocks of 2 tokens");
  EXPECT_THROW_WITH(attention(2, 0), Error, "expected a sequence from 0 to 1, got 2");
  // The blocks of the second sequence of a batch are checked, too.
  const Tensor two = Tensor::zeros({2, 1, 3}, DType::kF32);
  Tensor o2 = Tensor::zeros({2, 1, 3}, DType::kF32);
  EXPECT_THROW_WITH(kernels::attention_paged({o2,
                                              two,
                                              cache,
                                              Tensor::from(std::vector<int32_t>{0, 1}),
                                              Tensor::from(std::vector<int32_t>{3, 3}),
                                              {}}),
                    Error, "block_table[1, 1]");
  EXPECT_THROW_WITH(write(0, 4), Error, "[rope_kv_write] block_table[0, 2]");
  EXPECT_THROW_WITH(write(1, 2), Error, "[rope_kv_write] block_table[1, 1]");
  EXPECT_THROW_WITH(write(0, 7), Error, "[rope_kv_write] token 0: position 7");
  write(1, 4);  // needs that one block only
  EXPECT_THROW_WITH(
      kernels::attention_paged({o, x, cache, one(0), one(0), {.mask = kernels::Mask::kFull}}),
      Error, "expected a causal mask, no prefix_lm and no dropout");
}

}  // namespace
}  // namespace cohort::test
