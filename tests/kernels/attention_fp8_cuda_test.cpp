// FP8 attention on sm_90: the bits of its contract, of the sums of wgmma, and of itself whatever a
// sequence is split into.
#include "core/cuda.h"
#include "tests/kernels/attention_fp8.h"
#include "tests/kernels/attention_paged_cases.h"
#include "tests/kernels/attention_prefix_cases.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/exp2.h"

namespace cohort::test {
namespace {

using kernels::PagedKV;

#define COHORT_REQUIRE_HOPPER(device)              \
  COHORT_REQUIRE_GPU(device);                      \
  if (!fits(kSm90a, cuda::gpu_properties(device))) \
  GTEST_SKIP() << "FP8 attention needs a GPU of compute capability 9.0"

AttentionCase fp8_case(AttentionShape shape, const std::vector<SequenceSpec>& sequences) {
  shape.dtype = DType::kBF16;
  return rounded(make_case(shape, sequences), some_scales(shape.kv_heads, shape.heads));
}
AttentionOutput fp8_forward_on(const AttentionCase& c, Device device) {
  AttentionOutput out = run_forward(on_device(c, device));
  return {out.o.to(Device{}), out.lse.to(Device{})};
}

TEST(CudaAttentionFp8, IsItsDefinition) {
  COHORT_REQUIRE_HOPPER(device);
  for (const int64_t dim : {64, 128, 256})
    for (const int64_t window : {0, 140}) {
      SCOPED_TRACE(str("D ", dim, ", window ", window));
      const AttentionCase c = fp8_case({.heads = 6, .kv_heads = 2, .dim = dim, .window = window},
                                       {{1, 1}, {2, 450}, {3, 30}, {4, 270}});
      const AttentionOutput got = fp8_forward_on(c, device), expected = fp8_attention(c);
      EXPECT_LT(relative_error(got.o, expected.o), 4e-3);
      EXPECT_LT(relative_error(got.lse, expected.lse), 1e-3);
      EXPECT_GT(relative_error(fp8_attention(c, false).o, expected.o), 8e-3);
    }
}

// One row of a sequence of up to a chunk of keys, as the contract says.
struct RowOracle {
  const AttentionCase& c;
  std::vector<float> scales;
  Device device;

  std::vector<e4m3> quantized(const Tensor& t, int64_t token, int64_t head, float scale) const {
    std::vector<e4m3> out;
    for (const float x : t.select(0, token).select(0, head).to(DType::kF32).to_vector<float>())
      out.push_back(kernels::E4m3Grid(scale).quantize(x));
    return out;
  }
  std::vector<float> o(int64_t position, int64_t head) const {
    const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1), dim = c.q.dim(2),
                  kv = head / (heads / kv_heads), tile = kernels::attention_tile(dim);
    const auto scale_of = [&](int64_t i) { return scales[static_cast<size_t>(i)]; };
    const float factor =
        static_cast<float>(kernels::softmax_scale(c.desc, dim) * std::numbers::log2e) *
        (scale_of(head) * scale_of(heads + kv));
    const std::vector<e4m3> q = quantized(c.q, position, head, scale_of(head));
    std::vector<std::vector<e4m3>> keys, values;
    for (int64_t j = 0; j < (position / tile + 1) * tile; ++j) {
      const bool sees = j <= position;
      keys.push_back(sees ? quantized(c.k, j, kv, scale_of(heads + kv)) : std::vector<e4m3>());
      values.push_back(sees ? quantized(c.v, j, kv, scale_of(heads + kv_heads + kv))
                            : std::vector<e4m3>(static_cast<size_t>(dim)));
    }
    std::vector<float> o(static_cast<size_t>(dim));
    float r = -INFINITY, l[4] = {};
    for (int64_t key0 = 0; key0 <= position; key0 += tile) {
      const int64_t count = std::min(tile, position + 1 - key0);
      std::vector<float> s, exponents;
      for (int64_t j = 0; j < count; ++j) {
        float sums[2] = {};
        for (int64_t d = 0; d < dim; d += 32)
          sums[d / 128] = wgmma_step(sums[d / 128], &q[static_cast<size_t>(d)],
                                     &keys[static_cast<size_t>(key0 + j)][static_cast<size_t>(d)]);
        s.push_back(dim > 128 ? sums[0] + sums[1] : sums[0]);
      }
      const float next =
          std::max(r, std::fma(*std::max_element(s.begin(), s.end()), factor, -8.0f));
      for (const float x : s) exponents.push_back(std::fma(x, factor, -next));
      exponents.push_back(r - next);
      const std::vector<float> p = exp2_on(exponents, device);
      const float alpha = p.back();
      for (float& x : l) x *= alpha;
      std::vector<e4m3> rounded_p(static_cast<size_t>(tile));
      for (int64_t j = 0; j < count; ++j) {
        l[j % 8 / 2] += p[static_cast<size_t>(j)];
        rounded_p[static_cast<size_t>(j)] = e4m3(p[static_cast<size_t>(j)]);
      }
      for (size_t d = 0; d < o.size(); ++d) {
        std::vector<e4m3> column;
        for (int64_t j = 0; j < tile; ++j)
          column.push_back(values[static_cast<size_t>(key0 + j)][d]);
        float part = 0;
        for (int64_t j = 0; j < tile; j += 32)
          part =
              wgmma_step(part, &rounded_p[static_cast<size_t>(j)], &column[static_cast<size_t>(j)]);
        o[d] = std::fma(o[d], alpha, part);
      }
      r = next;
    }
    const float inverse = 1 / ((l[0] + l[1]) + (l[2] + l[3]));
    for (float& x : o)
      x = static_cast<float>(bf16(x * scale_of(heads + kv_heads + kv) * inverse + 0.0f));
    return o;
  }
};

TEST(CudaAttentionFp8, HasTheBitsOfItsContract) {
  COHORT_REQUIRE_HOPPER(device);
  for (const int64_t dim : {64, 128, 256}) {
    const AttentionCase c = fp8_case({.heads = 4, .kv_heads = 2, .dim = dim}, {{1, 300}});
    const RowOracle oracle{c, c.desc.fp8_scales.to_vector<float>(), device};
    const Tensor got = fp8_forward_on(c, device).o.to(DType::kF32);
    for (const int64_t position : {0, 1, 15, 16, 63, 64, 100, 127, 128, 200, 299})
      for (int64_t head = 0; head < 4; ++head)
        EXPECT_EQ(got.select(0, position).select(0, head).to_vector<float>(),
                  oracle.o(position, head))
            << "D " << dim << ", position " << position << ", head " << head;
  }
}

// Modifications of scores and masks of a case, by name.
constexpr const char* kTerms[] = {"none", "soft cap and sinks", "slopes and bias", "tiles"};
void set_terms(AttentionCase& c, const std::string& name) {
  const int64_t heads = c.shape.heads;
  if (name == "soft cap and sinks") {
    c.desc.soft_cap = 5;
    c.desc.sinks = random_tensor({heads}, DType::kF32, 9);
  }
  if (name == "slopes and bias") {
    c.desc.slopes = random_tensor({heads}, DType::kF32, 10);
    c.desc.bias = random_tensor({heads, 41}, DType::kF32, 11);
  }
  // Some rows of tiles see the first tile, and some do not.
  if (name == "tiles")
    c.desc.tiles = kernels::make_tile_mask(
        std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {1, 1}, {2, 0}, {2, 2}}, 3);
}
AttentionCase terms_on(AttentionCase c, Device device) {
  for (Tensor* t : {&c.desc.fp8_scales, &c.desc.sinks, &c.desc.slopes, &c.desc.bias, &c.desc.tiles})
    if (t->defined()) *t = t->to(device);
  return c;
}

TEST(CudaAttentionFp8, PagedBitsAreThoseOfTheForwardPass) {
  COHORT_REQUIRE_HOPPER(device);
  Rng rng(15, rng_stream(kTestPurpose, 9));
  for (const int64_t dim : {64, 128, 256})
    for (const int64_t group : {1, 3, 8, 70})
      for (const int64_t window : {0, 140})
        for (const char* const terms : kTerms) {
          if (group == 70 && (dim > 64 || window > 0)) continue;
          SCOPED_TRACE(str("D ", dim, ", group ", group, ", window ", window, ", ", terms));
          AttentionCase c = make_case({.heads = 2 * group,
                                       .kv_heads = 2,
                                       .dim = dim,
                                       .dtype = DType::kBF16,
                                       .window = window},
                                      {{1, 1}, {2, 150}, {3, 30}, {4, 270}});
          set_terms(c, terms);
          const Tensor scales = some_scales(2, 2 * group);
          AttentionCase cached = c;
          cached.desc.fp8_scales = scales;
          EXPECT_TRUE(bit_equal(run_in_random_steps(terms_on(cached, device), group == 3 ? 64 : 16,
                                                    rng, device, scales),
                                fp8_forward_on(terms_on(rounded(c, scales), device), device).o));
        }
}

TEST(CudaAttentionFp8, ModifiesScores) {
  COHORT_REQUIRE_HOPPER(device);
  for (const int64_t dim : {64, 128, 256}) {
    AttentionCase c = fp8_case({.heads = 6, .kv_heads = 2, .dim = dim}, {{1, 300}, {2, 9}});
    c.desc.soft_cap = 0.3;
    c.desc.slopes = random_tensor({6}, DType::kF32, 5);
    const AttentionOutput got = fp8_forward_on(terms_on(c, device), device),
                          expected = fp8_attention(c);
    EXPECT_LT(relative_error(got.o, expected.o), 4e-3) << dim;
    EXPECT_LT(relative_error(got.lse, expected.lse), 1e-3) << dim;
  }
}

// Tokens of a sequence in any order, and idle ones between them, whose O is zero.
TEST(CudaAttentionFp8, TokensMayBeInAnyOrder) {
  COHORT_REQUIRE_HOPPER(device);
  Rng rng(18, rng_stream(kTestPurpose, 9));
  AttentionCase c =
      make_case({.heads = 6, .kv_heads = 2, .dim = 64, .dtype = DType::kBF16}, {{1, 200}});
  const Tensor scales = some_scales(2, 6), expected = fp8_forward_on(rounded(c, scales), device).o;
  c.desc.fp8_scales = scales.to(device);
  PagedKV cache = make_cache(c, 16, rng, device, scales);
  Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
  run_step(cache, c, {{0, 0, 200}}, all);
  std::vector<int32_t> sequences, positions;
  for (int i = 0; i < 160; ++i) {
    sequences.push_back(i % 7 == 3 ? -1 : 0);
    positions.push_back(i % 11 == 5 ? -1 : static_cast<int32_t>(rng.below(200)));
  }
  Tensor q = Tensor::empty({160, 6, 64}, DType::kBF16);
  const Tensor rounded_q = rounded(c, scales).q;
  for (int64_t i = 0; i < 160; ++i)
    q.select(0, i).copy_(rounded_q.select(0, std::max(positions[static_cast<size_t>(i)], 0)));
  Tensor o = Tensor::full(q.shape(), NAN, DType::kBF16, device);
  kernels::attention_paged({o, q.to(device), cache, Tensor::from(sequences).to(device),
                            Tensor::from(positions).to(device), c.desc});
  for (int64_t i = 0; i < 160; ++i) {
    const auto at = static_cast<size_t>(i);
    const Tensor row = o.select(0, i).to(Device{});
    EXPECT_TRUE(bit_equal(row, sequences[at] < 0 || positions[at] < 0
                                   ? Tensor::zeros(row.shape(), DType::kBF16)
                                   : expected.select(0, positions[at]).clone()))
        << i;
  }
}

TEST(CudaAttentionFp8, ChunksAreJoinedInPrefillAndDecode) {
  COHORT_REQUIRE_HOPPER(device);
  Rng rng(16, rng_stream(kTestPurpose, 9));
  const int64_t chunk = kernels::kAttentionChunk;
  for (const int64_t dim : {64, 128, 256}) {
    AttentionCase c = make_case({.heads = 4, .kv_heads = 1, .dim = dim, .dtype = DType::kBF16},
                                {{1, 2 * chunk + 70}, {2, chunk + 5}});
    const Tensor scales = some_scales(1, 4),
                 expected = fp8_forward_on(rounded(c, scales), device).o;
    c.desc.fp8_scales = scales.to(device);
    PagedKV cache = make_cache(c, 16, rng, device, scales);
    Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
    run_step(cache, c, {{0, 0, 2 * chunk + 70}, {1, 0, chunk + 5}}, all);
    EXPECT_TRUE(bit_equal(all, expected)) << dim;
    for (const int64_t end : {chunk, chunk + 1, chunk + 129, 2 * chunk + 1, 2 * chunk + 70})
      run_step(cache, c,
               {{0, end - 1, end}, {1, std::min(end, chunk + 5) - 1, std::min(end, chunk + 5)}},
               all);
    EXPECT_TRUE(bit_equal(all, expected)) << dim;
  }
}

TEST(CudaAttentionFp8, SharedPrefixesEqualRepeatingThem) {
  COHORT_REQUIRE_HOPPER(device);
  for (const int64_t dim : {64, 128, 256})
    for (const kernels::test::SharedPrefix& f :
         {kernels::test::SharedPrefix{4, 2, dim, 0, 5, {3, 1, 7}},
          {4, 2, dim, 0, 127, {2, 130, 300}},
          {4, 2, dim, 0, 160, {1, 65, 1, 40}},
          {4, 2, dim, 200, 129, {1, 2, 255}},
          {4, 2, dim, 0, 33, std::vector<int64_t>(70, 9)}})
      kernels::test::expect_as_repeated(f, DType::kBF16, 1e-2, device, some_scales(2, 4));
}

// Few blocks take many row tiles each.
TEST(CudaAttentionFp8, BitsDoNotDependOnTheNumberOfBlocks) {
  COHORT_REQUIRE_HOPPER(device);
  for (const int64_t dim : {64, 128, 256}) {
    const AttentionCase c =
        fp8_case({.heads = 6, .kv_heads = 2, .dim = dim}, {{1, 700}, {2, 1}, {3, 129}, {4, 400}});
    const AttentionOutput expected = fp8_forward_on(c, device);
    for (const int blocks : {1, 2, 4}) {
      const cuda::GpuLimit limit(device, {.multiprocessors = blocks});
      const AttentionOutput got = fp8_forward_on(c, device);
      EXPECT_TRUE(bit_equal(got.o, expected.o) && bit_equal(got.lse, expected.lse));
      Rng rng(17, rng_stream(kTestPurpose, 9));
      AttentionCase cached = c;
      cached.desc.fp8_scales = c.desc.fp8_scales.to(device);
      EXPECT_TRUE(
          bit_equal(run_in_random_steps(cached, 16, rng, device, c.desc.fp8_scales), expected.o));
    }
  }
}

// One sum over all keys would lose 18 % at 16,384 keys whose probabilities are equal.
TEST(CudaAttentionFp8, LongContextsKeepTheMeanOfTheirValues) {
  COHORT_REQUIRE_HOPPER(device);
  const int64_t keys = 16'384;
  AttentionCase c =
      make_case({.heads = 1, .kv_heads = 1, .dim = 128, .dtype = DType::kBF16}, {{1, keys}});
  c.q.zero_();
  std::vector<float> v = c.v.to(DType::kF32).to_vector<float>();
  for (float& x : v) x += 1;
  c.v = Tensor::from(v, c.v.shape()).to(DType::kBF16);
  c = rounded(c, Tensor::from(std::vector<float>{0x1p-6f, 0x1p-6f, 0x1p-6f}));
  const std::vector<double> got =
      fp8_forward_on(c, device).o.select(0, keys - 1).to_vector<double>();
  const std::vector<double> values = c.v.to_vector<double>();
  for (size_t d = 0; d < got.size(); ++d) {
    double mean = 0;
    for (size_t j = d; j < values.size(); j += got.size()) mean += values[j] / double(keys);
    EXPECT_NEAR(got[d] / mean, 1, 4e-3);  // bf16 alone takes 2e-3
  }
}

TEST(CudaAttentionFp8, WhatItDoesNotSupportIsAnError) {
  COHORT_REQUIRE_GPU(device);
  AttentionCase c =
      make_case({.heads = 2, .kv_heads = 1, .dim = 32, .dtype = DType::kBF16}, {{1, 20}});
  EXPECT_THROW(fp8_forward_on(rounded(c, some_scales(1, 2)), device), Error);
  c = make_case({.heads = 2, .kv_heads = 1, .dim = 64, .dtype = DType::kF32}, {{1, 20}});
  EXPECT_THROW(fp8_forward_on(rounded(c, some_scales(1, 2)), device), Error);
}

}  // namespace
}  // namespace cohort::test
