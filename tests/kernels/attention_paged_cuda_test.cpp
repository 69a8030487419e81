// Prefill and decode on a paged cache on CUDA: the bits of the training forward pass, however a
// sequence is split into steps, whatever shares the batch, and wherever its blocks are. Cache slots
// that were never written hold NaN in these tests.
#include <algorithm>

#include "core/allocator.h"
#include "core/cuda.h"
#include "kernels/rope.h"
#include "tests/kernels/attention_paged_cases.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

using kernels::PagedKV;
using kernels::test::expect_reproducible;
using kernels::test::Guarded;
using kernels::test::kCudaTypes;
using kernels::test::kStarts;
using kernels::test::rope_gain;
using kernels::test::Start;

Tensor forward_on(const AttentionCase& c, Device device) {
  return run_forward(on_device(c, device)).o.to(Device{});
}

TEST(CudaAttentionPaged, BitsAreThoseOfTheForwardPass) {
  COHORT_REQUIRE_GPU(device);
  struct Row {
    int64_t block_tokens, group, dim;
  };
  Rng rng(3, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kCudaTypes)
    for (const Row& row : {Row{1, 1, 64}, Row{3, 3, 132}, Row{16, 3, 20}, Row{16, 4, 128},
                           Row{32, 7, 64}, Row{16, 2, 256}, Row{5, 16, 16}}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", blocks of ", row.block_tokens, ", group ", row.group,
                       ", D ", row.dim));
      const AttentionCase c =
          make_case({.heads = 2 * row.group, .kv_heads = 2, .dim = row.dim, .dtype = dtype},
                    {{1, 1}, {2, 150}, {3, 30}, {4, 270}});
      EXPECT_TRUE(
          bit_equal(run_in_random_steps(c, row.block_tokens, rng, device), forward_on(c, device)));
    }
}

TEST(CudaAttentionPaged, BitsAreThoseOfTheForwardPassUnderAWindow) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(7, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 128, 256})
      for (const int64_t window : {1, 50, 128, 260}) {
        SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim, ", window ", window));
        const AttentionCase c =
            make_case({.heads = 8, .kv_heads = 2, .dim = dim, .dtype = dtype, .window = window},
                      {{1, 1}, {2, 450}, {3, 30}, {4, 270}});
        EXPECT_TRUE(bit_equal(run_in_random_steps(c, 16, rng, device), forward_on(c, device)));
      }
}

// A cache in e4m3, of heads whose scales differ, has the bits of rounded keys and values: in random
// steps, with a window, with modified scores, and across chunks. In f32 its numbers are rounded.
TEST(CudaAttentionPaged, RoundedKeysHaveTheBitsOfTheForwardPass) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(15, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 128, 256})
      for (const int64_t window : {0, 140})
        for (const int64_t block_tokens : {16, 64}) {
          SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim, ", window ", window, ", blocks of ",
                           block_tokens));
          AttentionCase c =
              make_case({.heads = 6, .kv_heads = 2, .dim = dim, .dtype = dtype, .window = window},
                        {{1, 1}, {2, 150}, {3, 30}, {4, 270}});
          if (block_tokens == 64) c.desc.soft_cap = 5;
          const Tensor scales = some_scales(2);
          EXPECT_TRUE(bit_equal(run_in_random_steps(c, block_tokens, rng, device, scales),
                                forward_on(rounded(c, scales), device)));
        }
  const int64_t chunk = kernels::kAttentionChunk;
  for (const int64_t dim : {64, 128, 256}) {
    const AttentionCase c =
        make_case({.heads = 4, .kv_heads = 1, .dim = dim, .dtype = DType::kBF16},
                  {{1, 2 * chunk + 70}, {2, chunk + 5}});
    const Tensor scales = some_scales(1), expected = forward_on(rounded(c, scales), device);
    PagedKV cache = make_cache(c, 16, rng, device, scales);
    Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
    run_step(cache, c, {{0, 0, 2 * chunk + 70}, {1, 0, chunk + 5}}, all);
    for (const int64_t end : {chunk, chunk + 1, chunk + 129, 2 * chunk + 1, 2 * chunk + 70})
      run_step(cache, c,
               {{0, end - 1, end}, {1, std::min(end, chunk + 5) - 1, std::min(end, chunk + 5)}},
               all);
    EXPECT_TRUE(bit_equal(all, expected)) << dim;
  }
}

TEST(CudaAttentionPaged, TokenByTokenIsTheSameAsAllAtOnce) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(4, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kCudaTypes) {
    const AttentionCase c =
        make_case({.heads = 7, .kv_heads = 1, .dim = 64, .dtype = dtype}, {{1, 140}});
    const Tensor expected = forward_on(c, device);
    PagedKV cache = make_cache(c, 16, rng, device);
    Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
    run_step(cache, c, {{0, 0, 140}}, all);
    EXPECT_TRUE(bit_equal(all, expected));
    cache = make_cache(c, 16, rng, device);
    all.fill_(NAN);
    for (int64_t t = 0; t < 140; ++t) run_step(cache, c, {{0, t, t + 1}}, all);
    EXPECT_TRUE(bit_equal(all, expected));
  }
}

// Tokens of several sequences in any order in one call, so that adjacent tokens are of other
// sequences, or of other positions of the same one.
TEST(CudaAttentionPaged, TokensMayBeInAnyOrder) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(5, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kCudaTypes)
    for (const int64_t group : {1, 4}) {
      const AttentionCase c =
          make_case({.heads = 2 * group, .kv_heads = 2, .dim = 64, .dtype = dtype},
                    {{1, 90}, {2, 140}, {3, 1}});
      std::vector<Step> steps;
      for (int64_t s = 0; s < 3; ++s)
        for (int64_t t = 0; t < c.sequences[static_cast<size_t>(s)].length; ++t)
          steps.push_back({s, t, t + 1});
      for (size_t i = steps.size(); i > 1; --i)
        std::swap(steps[i - 1], steps[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
      std::sort(steps.begin(), steps.begin() + 60,
                [](const Step& a, const Step& b) { return a.sequence < b.sequence; });
      PagedKV cache = make_cache(c, 16, rng, device);
      Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
      run_step(cache, c, steps, all);
      EXPECT_TRUE(bit_equal(all, forward_on(c, device)));
    }
}

// Two and three chunks of keys. Tokens around the ends of chunks come last, once with all others
// and once alone, where blocks share the chunks of a token.
TEST(CudaAttentionPaged, BitsAreThoseOfTheForwardPassAcrossChunks) {
  COHORT_REQUIRE_GPU(device);
  const int64_t chunk = kernels::kAttentionChunk;
  Rng rng(10, rng_stream(kTestPurpose, 9));
  struct Row {
    int64_t dim, group, window;
  };
  for (const DType dtype : kCudaTypes)
    for (const Row& row : {Row{64, 7, 0}, Row{128, 4, 0}, Row{256, 1, 0}, Row{20, 17, 0},
                           Row{64, 2, 300}, Row{128, 2, chunk}, Row{64, 2, chunk + 900}}) {
      SCOPED_TRACE(
          str(dtype_name(dtype), ", D ", row.dim, ", group ", row.group, ", window ", row.window));
      const AttentionCase c = make_case(
          {.heads = row.group, .kv_heads = 1, .dim = row.dim, .dtype = dtype, .window = row.window},
          {{1, 2 * chunk + 70}, {2, chunk + 5}});
      const Tensor expected = forward_on(c, device);
      PagedKV cache = make_cache(c, 16, rng, device);
      Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
      run_step(cache, c, {{0, 0, 4000}, {1, 0, chunk + 5}}, all);
      run_step(cache, c, {{0, 4000, 4130}}, all);
      run_step(cache, c, {{0, 4130, 2 * chunk + 70}}, all);
      EXPECT_TRUE(bit_equal(all, expected));
      for (const int64_t end :
           {chunk, chunk + 1, chunk + 2, chunk + 129, 2 * chunk, 2 * chunk + 1, 2 * chunk + 70})
        run_step(cache, c,
                 {{0, end - 1, end}, {1, std::min(end, chunk + 5) - 1, std::min(end, chunk + 5)}},
                 all);
      EXPECT_TRUE(bit_equal(all, expected));
    }
}

// More chunks than blocks that can share them.
TEST(CudaAttentionPaged, ManyChunksAreSharedInRounds) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(11, rng_stream(kTestPurpose, 9));
  const int64_t length = 9 * kernels::kAttentionChunk + 333;
  const AttentionCase c =
      make_case({.heads = 3, .kv_heads = 1, .dim = 16, .dtype = DType::kBF16}, {{1, length}});
  const Tensor expected = forward_on(c, device);
  PagedKV cache = make_cache(c, 16, rng, device);
  Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
  run_step(cache, c, {{0, 0, length}}, all);
  for (const int64_t end : {1, 129, 5000, 16384, 16385, 32768, 32769, 36864, 36865, 37000})
    run_step(cache, c, {{0, end - 1, end}}, all);
  run_step(cache, c, {{0, length - 1, length}}, all);
  EXPECT_TRUE(bit_equal(all, expected));
}

// More blocks than a device runs at a time, adjacent tokens of very different numbers of keys, and
// cache blocks that several sequences share, except their last one; repeatedly.
TEST(CudaAttentionPaged, ManyDecodeAtOnce) {
  COHORT_REQUIRE_GPU(device);
  constexpr int64_t kBlocks = 2000, kBlockTokens = 16, kMaxBlocks = 576;
  Rng rng(13, rng_stream(kTestPurpose, 9));
  for (const auto& [count, dim, is_rounded] : {std::tuple<int64_t, int64_t, bool>{70, 64, false},
                                               {70, 128, true},
                                               {300, 64, true},
                                               {300, 128, false},
                                               {300, 256, true}}) {
    std::vector<int32_t> table, numbers, positions;
    for (int64_t s = 0; s < count; ++s) {
      const int64_t max_position = s % 20 == 0 ? kMaxBlocks * kBlockTokens : 1500;
      numbers.push_back(static_cast<int32_t>(s));
      positions.push_back(static_cast<int32_t>(rng.below(max_position)));
      for (int64_t b = 0; b < kMaxBlocks; ++b)
        table.push_back(static_cast<int32_t>(
            b == positions.back() / kBlockTokens ? s : count + rng.below(kBlocks - count)));
    }
    const auto random = [&](const Shape& shape, uint64_t seed) {
      return random_tensor(shape, DType::kF32, seed).to(DType::kBF16).to(device);
    };
    const Shape pages{kBlocks, kBlockTokens, 2, dim};
    const DType dtype = is_rounded ? DType::kE4M3 : DType::kBF16;
    PagedKV cache{random(pages, 1).to(dtype), random(pages, 2).to(dtype),
                  Tensor::from(table, {count, kMaxBlocks}).to(device),
                  is_rounded ? some_scales(2).to(device) : Tensor()};
    const Tensor qkv = random({count, 14 + 2 * 2, dim}, 3);
    const Tensor sequences = Tensor::from(numbers).to(device),
                 at = Tensor::from(positions).to(device);
    const Tensor rotary = kernels::rope_table(kMaxBlocks * kBlockTokens,
                                              kernels::rope_frequencies(dim, 10000), 1, DType::kF32)
                              .to(device);
    Tensor all = qkv.clone(), expected = Tensor::empty({count, 14, dim}, DType::kBF16, device);
    kernels::rope_kv_write({cache, all, sequences, at, rotary});
    kernels::attention_paged({expected, all.narrow(1, 0, 14), cache, sequences, at, {}});
    for (int run = 0; run < 20; ++run) {
      // Blocks are persistent: with few of them, each takes many tokens.
      const cuda::GpuLimit limit(device, {.multiprocessors = run % 2 == 0 ? 0 : 2});
      Tensor o = Tensor::full(expected.shape(), NAN, DType::kBF16, device), own = qkv.clone();
      kernels::attention_decode({o, cache, own, sequences, at, rotary, {}});
      ASSERT_TRUE(bit_equal(o, expected)) << count << " tokens, D " << dim << ", run " << run;
    }
  }
}

// More query heads per key head than rows in a block.
TEST(CudaAttentionPaged, LargeGroups) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(6, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kCudaTypes)
    for (const int64_t heads : {33, 64, 150}) {
      const AttentionCase c =
          make_case({.heads = heads, .kv_heads = 1, .dim = 4, .dtype = dtype}, {{1, 9}, {2, 5}});
      EXPECT_TRUE(bit_equal(run_in_random_steps(c, 4, rng, device), forward_on(c, device)));
    }
}

TEST(CudaAttentionPaged, RunsGiveTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    const AttentionCase c = make_case({.heads = 8, .kv_heads = 2, .dim = 128, .dtype = dtype},
                                      {{1, 140}, {2, 20}, {3, 300}});
    Rng rng(7, rng_stream(kTestPurpose, 9));
    PagedKV cache = make_cache(c, 16, rng, device);
    Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
    expect_reproducible([&] {
      run_step(cache, c, {{0, 0, 140}, {1, 0, 20}, {2, 0, 300}}, all);
      run_step(cache, c, {{2, 299, 300}, {1, 19, 20}, {0, 139, 140}}, all);
      return std::vector<Tensor>{all.clone()};
    });
  }
}

TEST(CudaAttentionPaged, WritesItsRowsOnly) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {5, 64}) {
      const Tensor x = random_tensor({3, 6, dim}, DType::kF64, 1).to(dtype).to(device);
      const Tensor cached = random_tensor({2, 4, 2, dim}, DType::kF64, 2).to(dtype).to(device);
      const Tensor table = Tensor::from(std::vector<int32_t>{1, 0}, {1, 2}).to(device);
      const Tensor sequences = Tensor::zeros({3}, DType::kI32, device);
      const Tensor positions = Tensor::from(std::vector<int32_t>{5, 6, 7}).to(device);
      Guarded o({3, 6, dim}, dtype, device);
      kernels::attention_paged({o.tensor(), x, {cached, cached, table}, sequences, positions, {}});
      EXPECT_TRUE(o.intact());
      for (const double y : o.tensor().to_vector<double>()) EXPECT_TRUE(std::isfinite(y));
    }
}

TEST(CudaAttentionPaged, WriteTouchesOnlyItsSlots) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(8, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {3, 64}) {
      // Values that every type holds.
      const AttentionCase c =
          in_f32(make_case({.dim = dim, .dtype = DType::kBF16}, {{1, 20}, {2, 7}}));
      PagedKV cpu = make_cache(c, 4, rng);
      PagedKV cuda{cpu.k.to(dtype).to(device), cpu.v.to(dtype).to(device),
                   cpu.block_table.to(device)};
      const Tensor sequences = Tensor::from(std::vector<int32_t>{1, 0, 0, 1});
      const Tensor positions = Tensor::from(std::vector<int32_t>{6, 0, 17, 3});
      Tensor qkv = side_by_side(c.q, c.k, c.v).narrow(0, 0, 4);
      Guarded own(qkv, dtype, device);
      kernels::rope_kv_write({cpu, qkv, sequences, positions, {}});
      kernels::rope_kv_write({cuda, own.tensor(), sequences.to(device), positions.to(device), {}});
      EXPECT_TRUE(bit_equal(cuda.k.to(Device{}).to(DType::kF32), cpu.k));
      EXPECT_TRUE(bit_equal(cuda.v.to(Device{}).to(DType::kF32), cpu.v));
      EXPECT_TRUE(bit_equal(own.tensor().to(Device{}).to(DType::kF32), qkv));
      EXPECT_TRUE(own.intact());
    }
}

// The composed specification: rope() of queries and keys, then a write without angles.
TEST(CudaAttentionPaged, WriteRotatesAsRopeDoes) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(9, rng_stream(kTestPurpose, 9));
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {6, 64, 128})
      for (const auto& [start, width, gain] :
           {std::tuple<Start, int64_t, kernels::RopeGain>{Start::kAligned, dim, {}},
            {Start::kOdd, dim, {}},
            {Start::kAligned, dim / 4 * 2, {}},
            {Start::kOdd, dim / 4 * 2, {}},
            {Start::kAligned, dim, rope_gain},
            {Start::kOdd, dim, rope_gain}}) {
        const AttentionCase c =
            make_case({.heads = 6, .kv_heads = 2, .dim = dim, .dtype = dtype}, {{1, 20}, {2, 7}});
        const PagedKV cache = make_cache(c, 4, rng, device);
        PagedKV fused{cache.k.clone(), cache.v.clone(), cache.block_table}, composed = cache;
        const auto on_gpu = [&](const std::vector<int32_t>& v) {
          return Tensor::from(v).to(device);
        };
        const Tensor sequences = on_gpu({1, 0, 0, -1, 1}), positions = on_gpu({6, 0, 17, 3, -1});
        const Tensor table =
            kernels::rope_table(18, kernels::rope_frequencies(width, 100), 1, DType::kF32, gain)
                .to(device);
        const Tensor all = side_by_side(c.q, c.k, c.v).narrow(0, 0, 5);
        Guarded qkv(all, dtype, device, start);
        const Tensor before = qkv.tensor().clone();
        kernels::rope_kv_write({fused, qkv.tensor(), sequences, positions, table});
        Tensor rotated = Tensor::empty_like(before);
        kernels::rope({.y = rotated,
                       .x = before,
                       .positions = on_gpu({6, 0, 17, 3, 0}),
                       .table = table,
                       .plain_heads = 2});
        kernels::rope_kv_write({composed, rotated, sequences, positions, {}});
        EXPECT_TRUE(bit_equal(fused.k, composed.k) && bit_equal(fused.v, composed.v));
        const auto queries = [](const Tensor& t) {
          return t.narrow(0, 0, 3).narrow(1, 0, 6).clone();
        };
        EXPECT_TRUE(bit_equal(queries(qkv.tensor()), queries(rotated)));
        EXPECT_TRUE(bit_equal(qkv.tensor().narrow(0, 3, 2), before.narrow(0, 3, 2)));  // idle
        EXPECT_TRUE(qkv.intact());
      }
}

// Fused and composed decode steps: idle tokens, tokens whose block is missing, positions outside
// the rotary table and the block table, and shapes without a fused kernel.
TEST(CudaAttentionDecode, EqualsTheWriteAndTheAttention) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(12, rng_stream(kTestPurpose, 9));
  const auto on_gpu = [&](const std::vector<int32_t>& v) { return Tensor::from(v).to(device); };
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {16, 24, 64, 80, 96, 128, 256})
      for (const int64_t group : {1, 7, 20})
        for (const int64_t block : {4, 8, 16, 64, 256}) {
          SCOPED_TRACE(
              str(dtype_name(dtype), ", D ", dim, ", group ", group, ", blocks of ", block));
          const AttentionCase c =
              make_case({.heads = 2 * group, .kv_heads = 2, .dim = dim, .dtype = dtype},
                        {{1, 300}, {2, 7}, {3, 129}, {4, 128}, {5, 1}});
          PagedKV cache = make_cache(c, block, rng, device);
          // All but the last token of each sequence; it has a block, followed by -1.
          Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
          run_step(cache, c, {{0, 0, 299}, {1, 0, 6}, {2, 0, 128}, {3, 0, 127}}, all);
          const Tensor table =
              kernels::rope_table(290, kernels::rope_frequencies(dim, 100), 1, DType::kF32)
                  .to(device);
          const Tensor wide = kernels::rope_table(290, kernels::rope_frequencies(dim, 100), 1,
                                                  DType::kF32, rope_gain)
                                  .to(device);
          // Rotates a quarter of a head.
          const Tensor part =
              kernels::rope_table(290, kernels::rope_frequencies(dim / 8 * 2, 100), 1, DType::kF32)
                  .to(device);
          const Tensor qkv = side_by_side(c.q, c.k, c.v).narrow(0, 0, 7).clone().to(device);
          const Tensor sequences = on_gpu({2, 4, -1, 0, 1, 3, 9});
          const auto end = static_cast<int32_t>(cache.block_table.dim(1) * block);
          // Positions in sequences 0 and 3, which have 300 and 128 tokens.
          for (const auto& [first, third] :
               {std::pair{299, 127}, {10, 128}, {end, 63}, {end + 5, 0}})
            for (const auto& [padding, angles] :
                 {std::pair{64, table}, {64, wide}, {64, part}, {64, Tensor()}, {1, table}}) {
              const Tensor o = Tensor::full({7, 2 * group, dim}, NAN, dtype, device);
              expect_decode(o, cache, qkv, sequences, on_gpu({128, 0, 5, first, 6, third, 0}),
                            angles, {}, padding);
            }
        }
}

// Nothing is checked on the device, but nothing outside the cache is touched either. All keys have
// equal weight here, and values are 1, so that a token gets the fraction of its keys that the cache
// has: four of five for (0, 4), two of four for (1, 3); (0, -1) is idle and (0, 6) counts as (0,
// 5).
TEST(CudaAttentionPaged, TokensOutsideTheTable) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    Guarded k(Tensor::zeros({4, 2, 1, 8}, DType::kF64), dtype, device);
    Guarded v(Tensor::zeros({4, 2, 1, 8}, DType::kF64), dtype, device);
    const Tensor table = Tensor::from(std::vector<int32_t>{0, 1, -1, 2, 9, 3}, {2, 3}).to(device);
    PagedKV cache{k.tensor(), v.tensor(), table};
    const Tensor sequences = Tensor::from(std::vector<int32_t>{-1, 2, 0, 0, 0, 1}).to(device);
    const Tensor positions = Tensor::from(std::vector<int32_t>{0, 0, -1, 6, 4, 3}).to(device);
    const Tensor x = Tensor::full({6, 1, 8}, 1, dtype, device);
    Tensor qkv = Tensor::full({6, 3, 8}, 1, dtype, device);
    kernels::rope_kv_write({cache, qkv, sequences, positions, {}});
    EXPECT_TRUE(k.intact() && v.intact());
    for (const double y : k.tensor().to_vector<double>()) EXPECT_EQ(y, 0);
    for (const double y : v.tensor().to_vector<double>()) EXPECT_EQ(y, 0);
    v.tensor().fill_(1);
    WideRows o(Tensor::full({6, 1, 8}, NAN, dtype, device));
    kernels::attention_paged({o.view, x, cache, sequences, positions, {}});
    EXPECT_TRUE(o.intact());
    const auto got = o.view.to_vector<double>();
    const double expected[] = {0, 0, 0, 4.0 / 6, 0.8, 0.5};
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_NEAR(got[i], expected[i / 8], dtype == DType::kF32 ? 1e-6 : 0x1p-9) << i / 8;
  }
}

TEST(CudaAttentionPaged, NothingToDoForNoTokens) {
  COHORT_REQUIRE_GPU(device);
  const Tensor pages = Tensor::zeros({2, 4, 1, 8}, DType::kF32, device);
  const Tensor none = Tensor::zeros({0}, DType::kI32, device);
  const Tensor x = Tensor::zeros({0, 2, 8}, DType::kF32, device);
  Tensor qkv = Tensor::zeros({0, 4, 8}, DType::kF32, device);
  Tensor o = Tensor::zeros({0, 2, 8}, DType::kF32, device);
  PagedKV cache{pages, pages.clone(), Tensor::zeros({1, 2}, DType::kI32, device)};
  kernels::rope_kv_write({cache, qkv, none, none, {}});
  kernels::attention_paged({o, x, cache, none, none, {}});
  synchronize(device);
}

// The scratch memory of combined chunks is that of the blocks that run at a time, not of all
// tokens.
TEST(CudaAttentionPaged, LongPrefillsTakeLittleScratchMemory) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 128}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim));
      const int64_t length = 9000, heads = 16, blocks = length / 16 + 1;
      PagedKV cache{Tensor::zeros({blocks, 16, 2, dim}, dtype, device),
                    Tensor::zeros({blocks, 16, 2, dim}, dtype, device),
                    {}};
      std::vector<int32_t> table, positions;
      for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(b));
      for (int64_t t = 0; t < length; ++t) positions.push_back(static_cast<int32_t>(t));
      cache.block_table = Tensor::from(table, {1, blocks}).to(device);
      const Tensor sequences = Tensor::zeros({length}, DType::kI32, device),
                   at = Tensor::from(positions).to(device),
                   q = Tensor::zeros({length, heads, dim}, dtype, device);
      Tensor o = Tensor::empty_like(q);
      allocator(device).reset_peak();
      const int64_t before = allocator(device).stats().live_bytes;
      kernels::attention_paged({o, q, cache, sequences, at});
      // All tokens and heads would take 74 MB and more.
      EXPECT_LT(allocator(device).stats().peak_bytes - before, int64_t{32} << 20);
      EXPECT_EQ(allocator(device).stats().live_bytes, before);
    }
}

}  // namespace
}  // namespace cohort::test
