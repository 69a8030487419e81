// Prefill and decode on a paged cache give the bits of the training forward pass, however a
// sequence is cut into steps, whoever shares the batch, and wherever its blocks lie.
#include <numeric>

#include "core/parallel.h"
#include "core/rng.h"
#include "tests/kernels/attention_cases.h"

namespace cohort::test {
namespace {

using kernels::PagedKV;

// A cache for all sequences of `c` with the blocks in random order and unused ones between them.
PagedKV make_cache(const AttentionCase& c, int64_t block_tokens, Rng& rng) {
  int64_t max_blocks = 1, used = 0;
  for (const SequenceSpec& s : c.sequences) {
    const int64_t blocks = (s.length + block_tokens - 1) / block_tokens;
    max_blocks = std::max(max_blocks, blocks + 1);
    used += blocks;
  }
  std::vector<int32_t> free(static_cast<size_t>(used + 5));
  std::iota(free.begin(), free.end(), 0);
  for (size_t i = free.size(); i > 1; --i)
    std::swap(free[i - 1], free[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
  std::vector<int32_t> table;
  for (const SequenceSpec& s : c.sequences)
    for (int64_t b = 0; b < max_blocks; ++b) {
      const bool needed = b * block_tokens < s.length;
      table.push_back(needed ? free.back() : -1);
      if (needed) free.pop_back();
    }
  const Shape shape = {used + 5, block_tokens, c.k.dim(1), c.k.dim(2)};
  return {Tensor::full(shape, NAN, c.k.dtype()), Tensor::full(shape, NAN, c.k.dtype()),
          Tensor::from(table, {static_cast<int64_t>(c.sequences.size()), max_blocks})};
}

struct Step {
  int64_t sequence, begin, end;  // positions of one sequence
};

// Gathers the steps' tokens into one batch, writes the cache, attends, and puts o back into `all`.
void run_step(PagedKV& cache, const AttentionCase& c, const std::vector<Step>& steps, Tensor& all) {
  std::vector<int32_t> sequences, positions;
  std::vector<int64_t> tokens;
  for (const Step& s : steps)
    for (int64_t p = s.begin; p < s.end; ++p) {
      sequences.push_back(static_cast<int32_t>(s.sequence));
      positions.push_back(static_cast<int32_t>(p));
      tokens.push_back(c.start(static_cast<size_t>(s.sequence)) + p);
    }
  const auto gather = [&](const Tensor& from) {
    Tensor rows = Tensor::empty({static_cast<int64_t>(tokens.size()), from.dim(1), from.dim(2)},
                                from.dtype());
    for (size_t i = 0; i < tokens.size(); ++i)
      rows.select(0, static_cast<int64_t>(i)).copy_(from.select(0, tokens[i]));
    return rows;
  };
  const Tensor seq = Tensor::from(sequences), pos = Tensor::from(positions);
  kernels::paged_kv_write(cache, gather(c.k), gather(c.v), seq, pos);
  const Tensor q = gather(c.q);
  Tensor o = Tensor::full(q.shape(), NAN, q.dtype());
  kernels::attention_paged(o, q, cache, seq, pos, c.desc);
  for (size_t i = 0; i < tokens.size(); ++i)
    all.select(0, tokens[i]).copy_(o.select(0, static_cast<int64_t>(i)));
}

// Every sequence in steps of random sizes; in each batch a random choice of sequences, in random
// order. Decode steps of one token are as likely as chunks of up to 80.
Tensor run_in_random_steps(const AttentionCase& c, int64_t block_tokens, Rng& rng) {
  PagedKV cache = make_cache(c, block_tokens, rng);
  Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
  std::vector<int64_t> done(c.sequences.size());
  while (true) {
    std::vector<Step> steps;
    bool left = false;
    const int64_t offset = rng.below(static_cast<int64_t>(done.size()));
    for (size_t i = 0; i < done.size(); ++i) {
      const size_t s = (i + static_cast<size_t>(offset)) % done.size();
      const int64_t rest = c.sequences[s].length - done[s];
      left = left || rest > 0;
      if (rest == 0 || rng.below(3) == 0) continue;
      const int64_t n = std::min(rest, rng.below(2) == 0 ? 1 : rng.between(1, 80));
      steps.push_back({static_cast<int64_t>(s), done[s], done[s] + n});
      done[s] += n;
    }
    if (!left) return all;
    if (!steps.empty()) run_step(cache, c, steps, all);
  }
}

TEST(AttentionPaged, BitsAreThoseOfTheForwardPass) {
  struct Row {
    int64_t block_tokens, group, dim;
    DType dtype;
  };
  Rng rng(3, rng_stream(RngPurpose::kTest, 9));
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

TEST(AttentionPaged, TokenByTokenIsTheSameAsAllAtOnce) {
  Rng rng(4, rng_stream(RngPurpose::kTest, 9));
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
  Rng rng(5, rng_stream(RngPurpose::kTest, 9));
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
  Tensor first = Tensor::zeros_like(c.q), second = Tensor::zeros_like(c.q);
  run_step(cache, c, {{0, 0, 6}}, first);
  const auto table = [](int32_t s, int64_t n) {
    return Tensor::from(std::vector<int32_t>(static_cast<size_t>(n), s));
  };
  const Tensor positions = Tensor::from(std::vector<int32_t>{4, 5});
  kernels::paged_kv_write(cache, c.k.narrow(0, 4, 2), c.v.narrow(0, 4, 2), table(1, 2), positions);
  Tensor o = Tensor::zeros({2, 2, 8}, DType::kF32);
  kernels::attention_paged(o, c.q.narrow(0, 4, 2), cache, table(1, 2), positions, c.desc);
  EXPECT_TRUE(bit_equal(o, first.narrow(0, 4, 2)));
}

TEST(AttentionPaged, BitsDoNotDependOnThreads) {
  const int before = num_threads();
  const AttentionCase c = make_case({.heads = 4, .kv_heads = 2, .dim = 64, .dtype = DType::kF32},
                                    {{1, 200}, {2, 150}, {3, 1}, {4, 30}});
  const auto run = [&](int threads) {
    set_num_threads(threads);
    Rng rng(6, rng_stream(RngPurpose::kTest, 9));
    return run_in_random_steps(c, 16, rng);
  };
  const Tensor one = run(1);
  for (const int threads : {2, 3}) EXPECT_TRUE(bit_equal(one, run(threads)));
  set_num_threads(before);
}

TEST(AttentionPaged, WriteTouchesOnlyItsSlots) {
  PagedKV cache{Tensor::zeros({3, 2, 1, 2}, DType::kF32), Tensor::zeros({3, 2, 1, 2}, DType::kF32),
                Tensor::from(std::vector<int32_t>{2, 0}, {1, 2})};
  const Tensor k = Tensor::from(std::vector<float>{1, 2, 3, 4}, {2, 1, 2});
  const Tensor v = Tensor::from(std::vector<float>{5, 6, 7, 8}, {2, 1, 2});
  kernels::paged_kv_write(cache, k, v, Tensor::from(std::vector<int32_t>{0, 0}),
                          Tensor::from(std::vector<int32_t>{1, 2}));
  // Position 1 is slot 1 of block 2, position 2 is slot 0 of block 0.
  EXPECT_EQ(cache.k.to_vector<float>(), (std::vector<float>{3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2}));
  EXPECT_EQ(cache.v.to_vector<float>(), (std::vector<float>{7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 5, 6}));
}

TEST(AttentionPaged, SaysWhatIsWrong) {
  PagedKV cache{Tensor::zeros({4, 2, 1, 3}, DType::kF32), Tensor::zeros({4, 2, 1, 3}, DType::kF32),
                Tensor::from(std::vector<int32_t>{0, 1, -1, 2, 9, 3}, {2, 3})};
  const Tensor x = Tensor::zeros({1, 1, 3}, DType::kF32);
  Tensor o = Tensor::zeros({1, 1, 3}, DType::kF32);
  const auto one = [](int32_t i) { return Tensor::from(std::vector<int32_t>{i}); };
  const auto attend = [&](int32_t s, int32_t p) {
    kernels::attention_paged(o, x, cache, one(s), one(p), {});
  };
  const auto write = [&](int32_t s, int32_t p) {
    kernels::paged_kv_write(cache, x, x, one(s), one(p));
  };
  attend(0, 3);
  EXPECT_THROW_WITH(attend(0, 4), Error,
                    "block_table[0, 2]: expected a block from 0 to 3 for position 4, got -1");
  EXPECT_THROW_WITH(attend(1, 5), Error, "block_table[1, 1]: expected a block from 0 to 3");
  EXPECT_THROW_WITH(attend(0, 6), Error,
                    "position 6 of sequence 0 is beyond its block table: 3 blocks of 2 tokens");
  EXPECT_THROW_WITH(attend(0, -1), Error, "position -1");
  EXPECT_THROW_WITH(attend(2, 0), Error, "expected a sequence from 0 to 1, got 2");
  // The second sequence of a batch is looked at afresh.
  const Tensor two = Tensor::zeros({2, 1, 3}, DType::kF32);
  Tensor o2 = Tensor::zeros({2, 1, 3}, DType::kF32);
  EXPECT_THROW_WITH(
      kernels::attention_paged(o2, two, cache, Tensor::from(std::vector<int32_t>{0, 1}),
                               Tensor::from(std::vector<int32_t>{3, 3}), {}),
      Error, "block_table[1, 1]");
  EXPECT_THROW_WITH(write(0, 4), Error, "[paged_kv_write] block_table[0, 2]");
  EXPECT_THROW_WITH(write(1, 2), Error, "[paged_kv_write] block_table[1, 1]");
  EXPECT_THROW_WITH(write(0, 7), Error, "[paged_kv_write] token 0: position 7");
  write(1, 4);  // needs that one block only
  EXPECT_THROW_WITH(
      kernels::attention_paged(o, x, cache, one(0), one(0), {.mask = kernels::Mask::kFull}), Error,
      "expected a causal mask and no dropout");
}

}  // namespace
}  // namespace cohort::test
