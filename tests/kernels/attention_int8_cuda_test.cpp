// Int8 attention on CUDA: the arithmetic of its contract, and the invariances of its bits.
#include <numbers>

#include "core/cuda.h"
#include "tests/kernels/attention_int8.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/exp2.h"

namespace cohort::test {
namespace {

using kernels::AttentionDesc;
using kernels::Mask;

AttentionCase cuda_int8_case(AttentionShape shape, const std::vector<SequenceSpec>& sequences) {
  shape.dtype = DType::kBF16;
  return in_int8(make_case(shape, sequences));
}
AttentionOutput int8_forward_on(const AttentionCase& c, Device device) {
  const AttentionOutput out = run_forward(on_device(c, device));
  return {out.o.to(Device{}), out.lse.to(Device{})};
}
bool same_bits(const AttentionOutput& a, const AttentionOutput& b) {
  return bit_equal(a.o, b.o) && bit_equal(a.lse, b.lse);
}

TEST(CudaAttentionInt8, IsAttentionOfWhatItsOperandsStandFor) {
  COHORT_REQUIRE_GPU(device);
  const int64_t chunk = kernels::kAttentionChunk;
  for (const int64_t dim : {64, 128})
    for (const Mask mask : {Mask::kCausal, Mask::kFull})
      for (const int64_t kv_heads : {1, 2, 6})
        for (const auto& sequences :
             {std::vector<SequenceSpec>{{1, 1}, {2, 127}, {3, 0}, {4, 128}, {5, 129}, {6, 450}},
              std::vector<SequenceSpec>{{7, chunk + 70}, {8, 3}}}) {
          if (kv_heads > 1 && sequences.size() == 2) continue;  // takes the reference long
          SCOPED_TRACE(str("D ", dim, mask == Mask::kFull ? ", full" : "", ", key heads ", kv_heads,
                           ", sequences ", sequences.size()));
          const int64_t heads = sequences.size() == 2 ? 1 : 6;
          const AttentionCase c = cuda_int8_case(
              {.heads = heads, .kv_heads = kv_heads, .dim = dim, .mask = mask}, sequences);
          const AttentionOutput got = int8_forward_on(c, device),
                                expected = naive_attention(int8_operands(c));
          EXPECT_LT(relative_error(got.o, expected.o), 4e-3);
          EXPECT_LT(relative_error(got.lse, expected.lse), 1e-6);
        }
}

// A row of a sequence, of up to a chunk of keys: m c, the partial sums of l and O. Of O, the sums
// over keys are rounded in another order than that of mma.
struct Int8RowOracle {
  const AttentionCase& c;
  Device device;

  struct Row {
    std::vector<float> o;
    float lse;
  };
  Row operator()(int64_t position, int64_t head) const {
    const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1), dim = c.q.dim(2), tile = 128,
                  kv = head / (heads / kv_heads);
    const auto row = [](const Tensor& t, int64_t token, int64_t of) {
      return t.select(0, token).select(0, of).to(DType::kF32).to_vector<float>();
    };
    const auto scale = [](const Tensor& t, int64_t token, int64_t of) {
      return t.data<float>()[token * t.dim(1) + of];
    };
    const float factor =
        static_cast<float>(kernels::softmax_scale(c.desc, dim) * std::numbers::log2e) *
        scale(c.desc.q_scales, position, head);
    const std::vector<float> q = row(c.q, position, head);
    const int64_t keys = c.shape.mask == Mask::kCausal ? position + 1 : c.tokens();
    std::vector<float> o(static_cast<size_t>(dim));
    float r = -INFINITY, l[4] = {};
    for (int64_t key0 = 0; key0 < keys; key0 += tile) {
      const int64_t count = std::min(tile, keys - key0);
      std::vector<float> z, exponents;
      for (int64_t j = key0; j < key0 + count; ++j) {
        const std::vector<float> k = row(c.k, j, kv);
        float sum = 0;  // exact
        for (size_t d = 0; d < k.size(); ++d) sum += q[d] * k[d];
        z.push_back(sum * scale(c.desc.k_scales, j, kv));
      }
      const float next = std::max(r, *std::max_element(z.begin(), z.end()) * factor);
      for (const float x : z) exponents.push_back(std::fma(x, factor, -next));
      exponents.push_back(r - next);
      const std::vector<float> p = exp2_on(exponents, device);
      for (float& x : l) x *= p.back();
      for (float& x : o) x *= p.back();
      for (int64_t j = 0; j < count; ++j) {
        const float weight = p[static_cast<size_t>(j)];
        l[j % 8 / 2] += weight;
        const std::vector<float> v = row(c.v, key0 + j, kv);
        for (size_t d = 0; d < o.size(); ++d) o[d] += static_cast<float>(bf16(weight)) * v[d];
      }
      r = next;
    }
    const float sum = (l[0] + l[1]) + (l[2] + l[3]), inverse = 1 / sum;
    for (float& x : o) x = static_cast<float>(bf16(x * inverse + 0.0f));
    return {o, std::fma(r, static_cast<float>(std::numbers::ln2), std::log(sum))};
  }
};

// Value j is one in dim j: within a tile, O is P, to the bit.
TEST(CudaAttentionInt8, HasTheBitsOfItsContract) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 128})
    for (const bool one_hot : {true, false})
      for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
        const int64_t tokens = one_hot ? dim : 450;
        AttentionCase c =
            cuda_int8_case({.heads = 4, .kv_heads = 2, .dim = dim, .mask = mask}, {{1, tokens}});
        std::vector<float> v(static_cast<size_t>(c.v.numel()));
        for (int64_t j = 0; one_hot && j < tokens * 2; ++j)
          v[static_cast<size_t>(j * dim + j / 2)] = 1;
        if (one_hot) c.v = Tensor::from(v, c.v.shape()).to(DType::kBF16);
        const Int8RowOracle oracle{c, device};
        const AttentionOutput got = int8_forward_on(c, device);
        for (const int64_t position : {0, 1, 7, 8, 15, 16, 63, 64, 100, 127, 128, 255, 256, 449})
          for (int64_t head = 0; head < 4 && position < tokens; ++head) {
            SCOPED_TRACE(str("D ", dim, mask == Mask::kFull ? ", full" : "", ", position ",
                             position, ", head ", head));
            const Int8RowOracle::Row expected = oracle(position, head);
            const Tensor o = got.o.select(0, position).select(0, head).clone();
            EXPECT_NEAR(got.lse.data<float>()[head * tokens + position], expected.lse,
                        4e-7f * std::max(1.0f, std::abs(expected.lse)));
            if (one_hot)
              EXPECT_EQ(o.to_vector<float>(), expected.o);
            else
              EXPECT_LT(relative_error(o, Tensor::from(expected.o)), 4e-3);
          }
      }
}

// Extreme integers, with scales that let no sum be rounded away.
TEST(CudaAttentionInt8, SumsOfTheLargestIntegersAreExact) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 128}) {
    AttentionCase c = cuda_int8_case({.heads = 1, .kv_heads = 1, .dim = dim},
                                     std::vector<SequenceSpec>(130, {1, 1}));
    Rng rng(5, rng_stream(kTestPurpose, 9));
    for (Tensor* t : {&c.q, &c.k})
      for (int64_t i = 0; i < t->numel(); ++i)
        t->data<int8_t>()[i] = static_cast<int8_t>(i < dim ? -128 : 127 - rng.below(3));
    c.desc.scale = 1 / std::numbers::log2e;
    c.desc.q_scales.fill_(1);
    c.desc.k_scales.fill_(1);
    const std::vector<float> lse = int8_forward_on(c, device).lse.to_vector<float>();
    for (int64_t t = 0; t < 130; ++t) {
      int64_t sum = 0;
      for (int64_t d = 0; d < dim; ++d)
        sum += int64_t{c.q.data<int8_t>()[t * dim + d]} * c.k.data<int8_t>()[t * dim + d];
      EXPECT_EQ(lse[static_cast<size_t>(t)],
                static_cast<float>(sum) * static_cast<float>(std::numbers::ln2))
          << t;
    }
  }
}

TEST(CudaAttentionInt8, BitsDependOnTheSequenceAlone) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 128})
    for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
      const AttentionShape shape{.heads = 6, .kv_heads = 2, .dim = dim, .mask = mask};
      const std::vector<SequenceSpec> sequences = {
          {1, 129}, {2, 1}, {3, kernels::kAttentionChunk + 130}, {4, 450}};
      const AttentionCase c = cuda_int8_case(shape, sequences);
      const AttentionOutput all = int8_forward_on(c, device);
      for (const int capability : {80, 86})
        for (const int multiprocessors : {1, 3}) {
          const cuda::GpuLimit limit(
              device, {.compute_capability = capability, .multiprocessors = multiprocessors});
          EXPECT_TRUE(same_bits(int8_forward_on(c, device), all)) << dim << ", " << capability;
        }
      for (size_t s = 0; s < sequences.size(); ++s) {
        const AttentionOutput alone =
            int8_forward_on(cuda_int8_case(shape, {sequences[s]}), device);
        EXPECT_TRUE(bit_equal(all.o.narrow(0, c.start(s), sequences[s].length), alone.o)) << s;
        EXPECT_TRUE(
            bit_equal(all.lse.narrow(1, c.start(s), sequences[s].length).contiguous(), alone.lse))
            << s;
      }
      const AttentionCase on = on_device(c, device);
      kernels::test::expect_reproducible([&] {
        const AttentionOutput out = run_forward(on);
        return std::vector{out.o, out.lse};
      });
    }
}

// Queries, keys, values and outputs as parts of wider rows.
TEST(CudaAttentionInt8, RowsMayBeStrided) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 128}) {
    const AttentionCase c = on_device(
        cuda_int8_case({.heads = 4, .kv_heads = 2, .dim = dim}, {{1, 200}, {2, 33}}), device);
    const AttentionOutput expected = run_forward(c);
    const WideRows q(c.q), k(c.k), v(c.v), narrow_v(c.v, 8);
    for (const Tensor& values : {v.view, c.v, narrow_v.view}) {
      WideRows o(Tensor::full(expected.o.shape(), NAN, DType::kBF16, device));
      Tensor lse = Tensor::full(expected.lse.shape(), NAN, DType::kF32, device);
      kernels::attention_forward({o.view, lse, q.view, k.view, values, c.cu, c.desc});
      EXPECT_TRUE(bit_equal(o.view, expected.o) && bit_equal(lse, expected.lse) && o.intact());
    }
  }
}

TEST(CudaAttentionInt8, RowsThatSeeAScaleOfNaNAreNaN) {
  COHORT_REQUIRE_GPU(device);
  const int64_t chunk = kernels::kAttentionChunk, length = 2 * chunk + 3;
  for (const int64_t dim : {64, 128}) {
    const AttentionCase c =
        cuda_int8_case({.heads = 4, .kv_heads = 2, .dim = dim}, {{1, 9}, {2, length}, {3, 20}});
    const AttentionOutput expected = int8_forward_on(c, device);
    for (const int64_t at : {int64_t{0}, int64_t{5}, int64_t{200}, chunk, length - 1}) {
      SCOPED_TRACE(str("D ", dim, ", position ", at));
      const int64_t token = 9 + at;
      expect_nan_rows(
          int8_forward_on(with_nan_scale(c, &AttentionDesc::k_scales, token, 1), device), expected,
          {.token = token, .end = 9 + length, .head = 2, .heads = 2});
      expect_nan_rows(
          int8_forward_on(with_nan_scale(c, &AttentionDesc::q_scales, token, 3), device), expected,
          {.token = token, .end = token + 1, .head = 3, .heads = 1});
    }
    AttentionCase nan_chunk = c;
    nan_chunk.desc.k_scales = c.desc.k_scales.clone();
    nan_chunk.desc.k_scales.narrow(0, 9, chunk).fill_(NAN);
    for (const double x :
         int8_forward_on(nan_chunk, device).o.narrow(0, 9, length).to_vector<double>())
      ASSERT_TRUE(std::isnan(x));
  }
}

TEST(CudaAttentionInt8, WhatItDoesNotSupportIsAnError) {
  COHORT_REQUIRE_GPU(device);
  const auto plain_case = [](int64_t dim, DType dtype) {
    return in_int8(make_case({.heads = 2, .kv_heads = 1, .dim = dim, .dtype = dtype}, {{1, 20}}));
  };
  for (const int64_t dim : {32, 80, 96, 256})
    EXPECT_THROW_WITH(int8_forward_on(plain_case(dim, DType::kBF16), device), Error,
                      "heads of 64 or 128");
  EXPECT_THROW_WITH(int8_forward_on(plain_case(64, DType::kF32), device), Error, "v in bf16");
  AttentionCase odd = on_device(plain_case(64, DType::kBF16), device);
  odd.q = at_odd_address(odd.q);
  EXPECT_THROW_WITH(run_forward(odd), Error, "aligned to 16 bytes");
}

}  // namespace
}  // namespace cohort::test
