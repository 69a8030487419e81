// The cache of keys and values: rows, blocks, and states of delta layers.
#include "nn/kv_cache.h"

#include <algorithm>
#include <tuple>

#include "tests/nn/models.h"

namespace cohort {

TEST(KVCache, RowsAndBlocksAreReused) {
  KVCache cache({.num_layers = 1,
                 .num_kv_heads = 1,
                 .head_dim = 2,
                 .num_sequences = 3,
                 .max_length = 10,
                 .block_tokens = 4},
                DType::kF32);
  const auto blocks_of = [&](int32_t row) {
    cache.upload();
    return cache.layer(0).block_table.select(0, row).to_vector<int32_t>();
  };
  EXPECT_EQ(cache.free_rows(), 3);
  const int32_t a = cache.acquire(), b = cache.acquire(), c = cache.acquire();
  EXPECT_EQ((std::vector<int32_t>{a, b, c}), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_THROW_WITH(cache.acquire(), Error, "all 3 sequences are in use");
  ASSERT_TRUE(cache.reserve(a, 1));
  ASSERT_TRUE(cache.reserve(b, 5));
  ASSERT_TRUE(cache.reserve(a, 4));  // fits the block it has
  ASSERT_TRUE(cache.reserve(a, 10));
  EXPECT_EQ(blocks_of(a), (std::vector<int32_t>{0, 3, 4}));
  EXPECT_EQ(blocks_of(b), (std::vector<int32_t>{1, 2, -1}));
  ASSERT_TRUE(cache.reserve(a, 2));  // never shrinks
  EXPECT_EQ(blocks_of(a), (std::vector<int32_t>{0, 3, 4}));
  EXPECT_THROW_WITH((void)cache.reserve(c, 11), Error,
                    "11 tokens exceeds the maximum length of 10");
  cache.release(a);
  EXPECT_EQ(blocks_of(a), (std::vector<int32_t>{-1, -1, -1}));
  EXPECT_EQ(cache.free_rows(), 1);
  // Every row can still be filled to the end.
  EXPECT_EQ(cache.acquire(), a);
  for (const int32_t row : {a, b, c}) EXPECT_TRUE(cache.reserve(row, 10));
  std::vector<int32_t> all;
  for (const int32_t row : {a, b, c})
    for (const int32_t block : blocks_of(row)) all.push_back(block);
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(KVCache, RowsShareHeldBlocksAndCopyThePartialOne) {
  KVCache cache({.num_layers = 2,
                 .num_kv_heads = 1,
                 .head_dim = 1,
                 .num_sequences = 3,
                 .max_length = 12,
                 .num_blocks = 6,
                 .block_tokens = 4},
                DType::kF32);
  const auto blocks_of = [&](int32_t row) {
    cache.upload();
    return cache.layer(0).block_table.select(0, row).to_vector<int32_t>();
  };
  const auto fill = [&](int32_t block, double value) {
    for (int layer = 0; layer < 2; ++layer)
      for (Tensor* pages : {&cache.layer(layer).k, &cache.layer(layer).v})
        pages->select(0, block).fill_(value);
  };
  const auto sum_of = [&](int32_t block) {
    double sum = 0;
    for (int layer = 0; layer < 2; ++layer)
      for (const Tensor* pages : {&cache.layer(layer).k, &cache.layer(layer).v})
        for (const double x : pages->select(0, block).to_vector<double>()) sum += x;
    return sum;
  };
  const int32_t a = cache.acquire(), b = cache.acquire(), c = cache.acquire();
  EXPECT_TRUE(cache.reserve(a, 6));
  for (const int32_t block : {0, 1}) fill(block, block + 1);
  for (const int32_t block : {2, 3, 4, 5}) fill(block, 0);
  KVCache::Held prompt = cache.hold(a, 6);
  EXPECT_EQ(prompt.blocks, (KVCache::Blocks{0, 1}));
  EXPECT_TRUE(cache.start_with(b, prompt, 6));
  EXPECT_EQ(blocks_of(b), (std::vector<int32_t>{0, 2, -1}));
  EXPECT_EQ(sum_of(2), sum_of(1));
  EXPECT_EQ(sum_of(2), 4 * 4 * 2);
  EXPECT_EQ(cache.free_blocks(), 3);
  // A block is freed by its last holder.
  cache.release(a);
  EXPECT_EQ(cache.free_blocks(), 3);
  cache.release(b);
  EXPECT_EQ(cache.free_blocks(), 4);
  // Whole blocks need no copy.
  const KVCache::Held whole{{prompt.blocks[0]}};
  EXPECT_TRUE(cache.start_with(c, whole, 4));
  EXPECT_EQ(cache.free_blocks(), 4);
  cache.shorten(prompt, 0);
  EXPECT_EQ(cache.free_blocks(), 5);
  EXPECT_EQ(blocks_of(c), (std::vector<int32_t>{0, -1, -1}));
  // Without a free block nothing changes; the copy of a released row is cancelled.
  const KVCache::Held held = cache.hold(c, 3);
  const int32_t d = cache.acquire(), e = cache.acquire();
  EXPECT_TRUE(cache.start_with(d, held, 3));
  cache.release(d);
  EXPECT_TRUE(cache.reserve(e, 12));
  const int32_t f = cache.acquire();
  EXPECT_TRUE(cache.reserve(f, 8));
  EXPECT_FALSE(cache.reserve(f, 9));
  EXPECT_EQ(cache.free_blocks(), 0);
  for (const int32_t block : blocks_of(e)) EXPECT_EQ(sum_of(block) == sum_of(0), false);
}

// A pool of 9 states for 8 rows.
TEST(KVCache, StatesAreCopiedMovedAndNeverShared) {
  ModelConfig model = test::delta_cases()[0].config;
  KVCache cache(test::test_cache(model, 8, 16), DType::kF32);
  const auto states = [&] {
    cache.upload();
    return cache.row_states().to_vector<int32_t>();
  };
  // A mark in each tensor of a state, or their sum.
  const auto tensors = [&](int32_t state) {
    std::vector<Tensor> out;
    for (int layer = 0; layer < 3; ++layer) {
      auto& [s, ring] = cache.delta_layer(layer);
      for (const Tensor& t : {s.s, s.k, s.u, s.decay, ring}) out.push_back(t.select(0, state));
    }
    return out;
  };
  const auto sum = [&](int32_t state) {
    double total = 0;
    for (const Tensor& t : tensors(state))
      for (const double x : t.to_vector<double>()) total += x;
    return total;
  };
  const auto fill = [&](int32_t state, double value) {
    for (Tensor& t : tensors(state)) t.fill_(value);
    return sum(state);
  };
  const int32_t a = cache.acquire();
  EXPECT_EQ(cache.free_states(), 9);  // a row without tokens has none
  ASSERT_TRUE(cache.reserve(a, 70));
  const int32_t state = states()[static_cast<size_t>(a)];
  EXPECT_EQ(cache.free_states(), 8);
  const double marked = fill(state, 1);
  for (int32_t other = 0; other < 9; ++other)
    if (other != state) fill(other, 0);
  KVCache::Held prompt = cache.hold(a, 70);
  EXPECT_EQ(prompt.state, state);
  std::vector<int32_t> rows{a};
  for (int i = 0; i < 7; ++i) {
    rows.push_back(cache.acquire());
    ASSERT_TRUE(cache.start_with(rows.back(), prompt, 70));
  }
  ASSERT_TRUE(cache.own_state(prompt));
  EXPECT_EQ(cache.free_states(), 0);
  std::vector<int32_t> all = states();
  all.push_back(prompt.state);
  for (const int32_t s : all) EXPECT_EQ(sum(s), marked);
  std::ranges::sort(all);
  EXPECT_EQ(all, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
  // The spare one is given back, then there is none for a second prompt, as a row may need it.
  KVCache::Held second = cache.hold(a, 70);
  EXPECT_FALSE(cache.own_state(second));
  cache.shorten(second, 0);
  cache.release(rows[7]);
  second = cache.hold(a, 70);
  EXPECT_FALSE(cache.own_state(second));
  cache.shorten(second, 0);
  EXPECT_EQ(cache.free_states(), 1);
  // A turn's end moves the state; the next one has it in another row. A fork then finds none.
  const int32_t kept_state = states()[static_cast<size_t>(rows[3])];
  KVCache::Held kept = cache.hold(rows[3], 70);
  cache.release(rows[3]);
  const int32_t b = cache.acquire(), c = cache.acquire();
  ASSERT_TRUE(cache.reserve(b, 1));
  EXPECT_FALSE(cache.reserve(c, 1));
  EXPECT_FALSE(cache.start_with(c, prompt, 70));
  cache.resume(c, std::move(kept));
  EXPECT_EQ(states()[static_cast<size_t>(c)], kept_state);
  // A state that is given back before it is copied, and then becomes a copy itself.
  fill(prompt.state, 5);
  cache.release(b);
  cache.release(rows[4]);
  const int32_t d = cache.acquire(), reused = prompt.state;
  ASSERT_TRUE(cache.start_with(d, prompt, 70));
  cache.shorten(prompt, 0);
  const KVCache::Held other = cache.hold(a, 70);
  const int32_t e = cache.acquire();
  ASSERT_TRUE(cache.start_with(e, other, 70));
  const std::vector<int32_t> now = states();
  EXPECT_EQ(now[static_cast<size_t>(e)], reused);
  EXPECT_EQ(sum(now[static_cast<size_t>(d)]), 5 * marked);
  EXPECT_EQ(sum(now[static_cast<size_t>(e)]), marked);
}

// The chunk of the last token, and five inputs.
TEST(KVCache, AStateServesForTheFewTokensBefore) {
  const KVCache cache(test::test_cache(test::delta_cases()[0].config, 1, 16), DType::kF32);
  for (const auto& [tokens, length, serves] :
       std::vector<std::tuple<int64_t, int64_t, bool>>{{70, 70, true},
                                                       {70, 65, true},
                                                       {70, 64, false},
                                                       {69, 65, true},
                                                       {80, 75, true},
                                                       {80, 74, false},
                                                       {65, 64, false},
                                                       {64, 63, true},
                                                       {3, 1, true},
                                                       {3, 0, false}})
    EXPECT_EQ(cache.state_serves(tokens, length), serves) << tokens << " " << length;
  const KVCache plain(test::test_cache(test::model_config("llama"), 1, 16), DType::kF32);
  EXPECT_TRUE(plain.state_serves(100, 3));
}

TEST(KVCache, BytesCountKeysAndValuesOfAllLayers) {
  const KVCacheConfig config{.num_layers = 2,
                             .num_kv_heads = 3,
                             .head_dim = 5,
                             .num_sequences = 4,
                             .max_length = 10,
                             .block_tokens = 4};
  const int64_t expected = 2 * 2 * (4 * 3 * 4) * 3 * 5 * 8;
  EXPECT_EQ(KVCache::bytes(config, DType::kF64), expected);
  KVCache cache(config, DType::kF64);
  EXPECT_EQ(2 * (cache.layer(0).k.nbytes() + cache.layer(1).v.nbytes()), expected);
}

// Qwen3.5 4B and 9B, by hand: 24 delta layers with 32 value and 16 key heads of 128.
TEST(KVCache, BytesCountStates) {
  ModelConfig c;
  c.num_layers = 32;
  c.num_kv_heads = 4;
  c.head_dim = 256;
  c.delta = {.full_every = 4};
  EXPECT_EQ(block_bytes(c, DType::kBF16), 16 * (32 << 10));
  const int64_t matrices = 32 * 128 * 128 * 4, rows = 64 * (16 + 32) * 128 * 2,
                decays = 64 * 32 * 4, ring = 8 * (2 * 16 + 32) * 128 * 2;
  EXPECT_EQ(state_bytes(c, DType::kBF16), 24 * (matrices + rows + decays + ring));
  EXPECT_NEAR(static_cast<double>(state_bytes(c, DType::kBF16)) / (1 << 20), 70, 1);
  EXPECT_EQ(cache_config(c, 16, 5).count_states(), 18);
}

// For that model, by hand: in bf16, decoding reads the high plane of matrices, and both of those
// that it folds.
TEST(KVCache, DecodingReadsHighPlanesAndOpenRows) {
  ModelConfig c;
  c.num_layers = 32;
  c.delta = {.full_every = 4};
  const int64_t input = (2 * 16 + 32) * 128 * 2, row = (16 + 32) * 128 * 2 + 32 * 4,
                plane = 32 * 128 * 128 * 2;
  const auto bytes_at = [&](int64_t position) {
    return state_bytes_read(c, DType::kBF16, position);
  };
  EXPECT_EQ(bytes_at(1), 24 * (input + row));
  EXPECT_EQ(bytes_at(63), 24 * (3 * input + 63 * row));
  EXPECT_EQ(bytes_at(64), 24 * (3 * input + 64 * row));
  EXPECT_EQ(bytes_at(65), 24 * (3 * input + row + plane));
  EXPECT_EQ(bytes_at(128), 24 * (3 * input + 64 * row + 2 * plane));
  EXPECT_EQ(bytes_at(130), 24 * (3 * input + 2 * row + plane));
  EXPECT_EQ(state_bytes_read(c, DType::kF32, 128) - state_bytes_read(c, DType::kF32, 127),
            24 * ((16 + 32) * 128 + 32) * 4);
}

}  // namespace cohort
