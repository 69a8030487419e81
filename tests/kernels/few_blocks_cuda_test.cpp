// Persistent kernels with so few blocks that each processes several tiles: no block waits forever,
// and no bit depends on the number of blocks.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/cuda.h"
#include "kernels/activation.h"
#include "kernels/cuda/accumulation_order.h"
#include "kernels/head.h"
#include "kernels/matmul.h"
#include "tests/kernels/attention_rules.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/spin_limit.h"

namespace cohort::test {
namespace {

using kernels::Mask;

constexpr int64_t kTile = kernels::kMaskTile;
constexpr int kBlockLimits[] = {2, 4, 0};

struct MaskedCase {
  AttentionCase attention;
  std::vector<int64_t> starts;  // first tokens of the sequences
  std::vector<std::pair<int64_t, int64_t>> visible;

  bool sees(int64_t query_tile, int64_t key_tile) const {
    return std::find(visible.begin(), visible.end(), std::pair(query_tile, key_tile)) !=
           visible.end();
  }
};

// Lengths, heads and visible tiles at random; some rows of tiles see nothing, some see all. Full
// masks have a key head for each head, so that the gradients of keys are sums in one order.
MaskedCase random_masked_case(Rng& rng, Device device) {
  const int64_t dims[] = {40, 64, 96, 128, 192, 256};
  const bool causal = rng.below(3) == 0;
  AttentionShape shape{.heads = 1 + rng.below(12),
                       .dim = dims[rng.below(6)],
                       .mask = causal ? Mask::kCausal : Mask::kFull};
  shape.kv_heads = causal && shape.heads % 2 == 0 ? shape.heads / 2 : shape.heads;
  std::vector<SequenceSpec> sequences;
  int64_t longest = 0;
  for (int64_t s = 0, count = 1 + rng.below(3); s < count; ++s) {
    sequences.push_back({s, rng.below(4) == 0 ? kTile * (1 + rng.below(8)) : 1 + rng.below(1300)});
    longest = std::max(longest, sequences.back().length);
  }
  MaskedCase c{.attention = make_case(shape, sequences)};
  const int64_t tiles = std::max<int64_t>(1, (longest + kTile - 1) / kTile - rng.below(2));
  const double share = 0.1 + 0.8 * rng.uniform();
  for (int64_t query = 0; query < tiles; ++query) {
    const int64_t kind = rng.below(5);
    for (int64_t key = 0; key < tiles; ++key)
      if (kind == 1 || (kind > 1 && rng.uniform() < share)) c.visible.emplace_back(query, key);
  }
  for (size_t s = 0; s < sequences.size(); ++s) c.starts.push_back(c.attention.start(s));
  c.attention = rule_case_in(c.attention, DType::kBF16, device);
  c.attention.desc.tiles = kernels::make_tile_mask(c.visible, tiles, device);
  return c;
}

struct MaskedResult {
  AttentionOutput out;
  AttentionGrads grads;
};
MaskedResult run_masked(const AttentionCase& c) {
  MaskedResult r{.out = run_forward(c)};
  r.grads = run_backward(c, r.out);
  return r;
}
void expect_equal(const MaskedResult& a, const MaskedResult& b) {
  const auto equal = [](const Tensor& x, const Tensor& y) {
    return bit_equal(x.to(Device{}), y.to(Device{}));
  };
  EXPECT_TRUE(equal(a.out.o, b.out.o)) << "O";
  EXPECT_TRUE(equal(a.out.lse, b.out.lse)) << "log-sum-exp";
  EXPECT_TRUE(equal(a.grads.dq, b.grads.dq)) << "dQ";
  EXPECT_TRUE(equal(a.grads.dk, b.grads.dk)) << "dK";
  EXPECT_TRUE(equal(a.grads.dv, b.grads.dv)) << "dV";
}

// A tile of a sequence: tokens [begin, begin + count).
struct TileTokens {
  int64_t begin, count;
};

// The dense calls behind a block-sparse one under a full mask. For each tile of queries: a sequence
// whose keys are those of the visible tiles, and whose first queries are the tile's. For each tile
// of keys: one whose first keys are the tile's, and whose queries are those that see it. A row's
// state is untouched by a tile that it does not see, so the bits are equal.
void expect_bits_of_dense_calls(const MaskedCase& c, const MaskedResult& got) {
  const AttentionCase& a = c.attention;
  const int64_t tiles = a.desc.tiles.dim(0);
  for (size_t s = 0; s < a.sequences.size(); ++s)
    for (int64_t tile = 0; tile * kTile < a.sequences[s].length; ++tile) {
      const auto tokens_of = [&](int64_t t) {
        return TileTokens{c.starts[s] + t * kTile,
                          std::min(kTile, a.sequences[s].length - t * kTile)};
      };
      const TileTokens own = tokens_of(tile);
      for (const bool of_queries : {true, false}) {
        std::vector<TileTokens> others;
        int64_t count = 0;
        for (int64_t t = 0; tile < tiles && t < tiles && t * kTile < a.sequences[s].length; ++t)
          if (of_queries ? c.sees(tile, t) : c.sees(t, tile)) {
            others.push_back(tokens_of(t));
            count += others.back().count;
          }
        const auto rows = [&](const Tensor& t) {
          return t.narrow(0, own.begin, own.count).to(Device{});
        };
        const std::vector<const Tensor*> results =
            of_queries ? std::vector<const Tensor*>{&got.out.o, &got.grads.dq}
                       : std::vector<const Tensor*>{&got.grads.dk, &got.grads.dv};
        if (others.empty()) {
          for (const Tensor* t : results)
            EXPECT_TRUE(bit_equal(rows(*t), Tensor::zeros(rows(*t).shape(), DType::kBF16)));
          continue;
        }
        // There are as many queries as keys; those that are not in the block-sparse call are zeros.
        const int64_t length = std::max(count, own.count);
        if (of_queries && count < length) continue;  // the rows would see the additional keys
        const auto zeros = [&](const Shape& shape, DType dtype) {
          return Tensor::zeros(shape, dtype, a.q.device());
        };
        const Shape shape{length, a.shape.heads, a.shape.dim};
        AttentionCase dense{.shape = a.shape, .desc = {.mask = Mask::kFull}};
        for (Tensor* t : {&dense.q, &dense.k, &dense.v, &dense.dout})
          *t = zeros(shape, DType::kBF16);
        dense.cu =
            Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(length)}).to(a.q.device());
        AttentionOutput out{zeros(shape, DType::kBF16),
                            zeros({a.shape.heads, length}, DType::kF32)};
        using Pairs = std::vector<std::pair<Tensor*, const Tensor*>>;
        const Pairs queries = {{&dense.q, &a.q}, {&dense.dout, &a.dout}, {&out.o, &got.out.o}};
        const Pairs keys = {{&dense.k, &a.k}, {&dense.v, &a.v}};
        const auto place = [&](const std::vector<TileTokens>& parts, const Pairs& pairs) {
          int64_t at = 0;
          for (const TileTokens& part : parts) {
            for (const auto& [to, from] : pairs)
              to->narrow(0, at, part.count).copy_(from->narrow(0, part.begin, part.count));
            if (&pairs == &queries)
              out.lse.narrow(1, at, part.count)
                  .copy_(got.out.lse.narrow(1, part.begin, part.count));
            at += part.count;
          }
        };
        if (!of_queries) {
          place(std::vector{own}, keys);
          place(others, queries);
          const AttentionGrads g = run_backward(dense, out);
          EXPECT_TRUE(bit_equal(rows(got.grads.dk), g.dk.narrow(0, 0, own.count).to(Device{})))
              << "dK";
          EXPECT_TRUE(bit_equal(rows(got.grads.dv), g.dv.narrow(0, 0, own.count).to(Device{})))
              << "dV";
          continue;
        }
        place(others, keys);
        place(std::vector{own}, queries);
        const AttentionOutput forward = run_forward(dense);
        EXPECT_TRUE(bit_equal(rows(got.out.o), forward.o.narrow(0, 0, own.count).to(Device{})))
            << "O";
        const AttentionGrads g = run_backward(dense, forward);
        EXPECT_TRUE(bit_equal(rows(got.grads.dq), g.dq.narrow(0, 0, own.count).to(Device{})))
            << "dQ";
      }
    }
}

TEST(CudaFewBlocks, RandomTileMasksHaveTheBitsOfDenseCalls) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(11, rng_stream(kTestPurpose, 31));
  for (int n = 0; n < 200; ++n) {
    const MaskedCase c = random_masked_case(rng, device);
    SCOPED_TRACE(
        str("case ", n, ", D ", c.attention.shape.dim, ", heads ", c.attention.shape.heads));
    std::vector<MaskedResult> results;
    for (const int blocks : kBlockLimits) {
      const cuda::GpuLimit limit(device, {.multiprocessors = blocks});
      results.push_back(run_masked(c.attention));
    }
    expect_equal(results[0], results[2]);
    expect_equal(results[1], results[2]);
    if (c.attention.desc.mask == Mask::kFull) expect_bits_of_dense_calls(c, results[2]);
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
}

// A row tile without visible keys follows, in the same block, one whose last tile of keys is
// ragged: its values must be committed although no load follows.
TEST(CudaFewBlocks, ARowTileWithoutKeysMayFollowARaggedOne) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 96, 128, 256})
    for (const int64_t heads : {2, 32})
      for (const bool causal : {false, true}) {
        SCOPED_TRACE(str("D ", dim, ", heads ", heads, causal ? ", causal" : ", full"));
        const std::vector<int32_t> offsets =
            causal ? std::vector<int32_t>{0, 9000, 9100} : std::vector<int32_t>{0, 0, 2000};
        AttentionCase c{.cu = Tensor::from(offsets).to(device),
                        .desc = {.mask = causal ? Mask::kCausal : Mask::kFull}};
        uint64_t seed = 0;
        for (Tensor* t : {&c.q, &c.k, &c.v}) {
          *t = Tensor::empty({offsets.back(), heads, dim}, DType::kBF16, device);
          kernels::cuda::fill_for_comparison(*t, seed++);
        }
        std::vector<std::pair<int64_t, int64_t>> visible;
        for (int64_t i = 0; i < 16 * 16; ++i)
          if (i / 16 != 3) visible.emplace_back(i / 16, i % 16);
        c.desc.tiles = kernels::make_tile_mask(visible, 16, device);
        AttentionOutput expected;
        for (const int blocks : {0, 2, 4}) {
          const cuda::GpuLimit limit(device, {.multiprocessors = blocks});
          const AttentionOutput out = run_forward(c);
          if (blocks == 0) expected = out;
          EXPECT_TRUE(bit_equal(out.o.to(Device{}), expected.o.to(Device{})));
        }
      }
}

Tensor random_on(Device device, const Shape& shape, uint64_t seed) {
  return random_tensor(shape, DType::kF32, seed).to(DType::kBF16).to(device);
}

TEST(CudaFewBlocks, GemmsAndTheHeadHaveTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t rows : {3, 40, 300}) {
    const Tensor x = random_on(device, {rows, 512}, 1), w = random_on(device, {6144, 512}, 2);
    std::vector<Tensor> results[3];
    for (int i = 0; i < 3; ++i) {
      const cuda::GpuLimit limit(device, {.multiprocessors = kBlockLimits[i]});
      Tensor y = Tensor::empty({rows, 6144}, DType::kBF16, device),
             gated = Tensor::empty({rows, 3072}, DType::kBF16, device);
      kernels::linear_forward({.y = y, .x = x, .w = w, .bias = {}});
      kernels::linear_activation(
          {.y = gated, .x = x, .w = w, .bias = {}, .op = kernels::Activation::kSwiGlu});
      const Tensor logits = y.to(DType::kF32);
      std::vector<int32_t> wanted;
      for (int64_t r = 0; r < rows; ++r) wanted.push_back(static_cast<int32_t>(17 * r % 6144));
      const Tensor targets = Tensor::from(wanted).to(device);
      Tensor logprob = Tensor::empty({rows}, DType::kF32, device),
             entropy = Tensor::empty_like(logprob), lse = Tensor::empty_like(logprob),
             unit = Tensor::zeros(y.shape(), DType::kBF16, device);
      kernels::head_statistics(
          {.logprob = logprob,
           .entropy = entropy,
           .lse = lse,
           .logits = logits,
           .targets = targets,
           .unit_gradients = kernels::has_unit_gradients(w) ? unit : Tensor()});
      for (const Tensor& t : {y, gated, logprob, entropy, lse, unit})
        results[i].push_back(t.to(Device{}));
    }
    for (size_t t = 0; t < results[0].size(); ++t)
      for (int i = 0; i < 2; ++i)
        EXPECT_TRUE(bit_equal(results[i][t], results[2][t])) << rows << " rows, result " << t;
  }
}

TEST(CudaFewBlocks, TheNumberOfMultiprocessorsIsLimitedWhileALimitLives) {
  COHORT_REQUIRE_GPU(device);
  const int before = cuda::gpu_properties(device).multiprocessors;
  {
    const cuda::GpuLimit limit(device, {.multiprocessors = 2}),
        more(device, {.multiprocessors = 5});
    EXPECT_EQ(cuda::gpu_properties(device).multiprocessors, 2);
  }
  EXPECT_EQ(cuda::gpu_properties(device).multiprocessors, before);
}

// A build with COHORT_SPIN_LIMIT ends a kernel that waits forever. The error destroys the context
// of the process, so that it is raised in another one.
TEST(CudaSpinLimit, AKernelThatWaitsForeverFailsByName) {
  COHORT_REQUIRE_GPU(device);
  if (!fits({.compute_capability = 90}, cuda::gpu_properties(device)))
    GTEST_SKIP() << "needs an sm_90 GPU";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        try {
          wait_at_a_barrier_forever(device);
        } catch (const Error& e) {
          std::fprintf(stderr, "%s\n", e.what());
          std::_Exit(3);
        }
      },
      ::testing::ExitedWithCode(3), "waiting_kernel");
}

}  // namespace
}  // namespace cohort::test
