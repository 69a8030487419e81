// The kernels for sm_90 against the generic ones, which run the same calls if rows start at odd
// addresses: the forward is bit-identical.
#include "kernels/cuda/accumulation_order.h"
#include "tests/kernels/attention_cases.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

using kernels::Mask;

// bf16 on the device, from [-1, 1) times a factor; `uneven`: each multiplied by the cube of another
// such number, so that sums cancel and magnitudes differ by orders.
Tensor values(const Shape& shape, uint64_t seed, double factor, bool uneven, Device device) {
  Tensor t = Tensor::empty(shape, DType::kBF16, device), out = Tensor::empty_like(t);
  kernels::cuda::fill_for_comparison(t, seed);
  if (uneven) {
    Tensor other = Tensor::empty_like(t);
    kernels::cuda::fill_for_comparison(other, seed + 1000);
    for (int i = 0; i < 3; ++i) {
      Tensor scaled = Tensor::empty_like(t);
      kernels::mul_forward({.y = scaled, .a = t, .b = other});
      t = scaled;
    }
  }
  kernels::scale({.y = out, .x = t, .factor = factor});
  return out;
}

struct Call {
  Tensor q, k, v, cu;
  kernels::AttentionDesc desc;

  AttentionOutput operator()(bool odd) const {
    const auto aligned_or_odd = [&](const Tensor& t) { return odd ? at_odd_address(t) : t; };
    Tensor o = aligned_or_odd(Tensor::full(q.shape(), NAN, DType::kBF16, q.device()));
    Tensor lse = Tensor::full({q.dim(1), q.dim(0)}, NAN, DType::kF32, q.device());
    kernels::attention_forward(
        {o, lse, aligned_or_odd(q), aligned_or_odd(k), aligned_or_odd(v), cu, desc});
    return {o.to(Device{}), lse.to(Device{})};
  }
};

AttentionGrads gradients(const Call& call, const AttentionOutput& out) {
  const Device device = call.q.device();
  const Tensor dout = values(call.q.shape(), 9, 1, false, device);
  AttentionGrads g{Tensor::empty_like(call.q), Tensor::empty_like(call.k),
                   Tensor::empty_like(call.v)};
  kernels::attention_backward({.dq = {g.dq},
                               .dk = {g.dk},
                               .dv = {g.dv},
                               .dout = dout,
                               .q = call.q,
                               .k = call.k,
                               .v = call.v,
                               .o = out.o.to(device),
                               .lse = out.lse.to(device),
                               .cu_seqlens = call.cu,
                               .desc = call.desc});
  return {g.dq.to(Device{}), g.dk.to(Device{}), g.dv.to(Device{})};
}

Call make_call(Device device, int64_t dim, int64_t heads, int64_t kv_heads,
               const std::vector<int64_t>& lengths, double factor, bool uneven) {
  std::vector<int32_t> starts = {0};
  for (const int64_t length : lengths)
    starts.push_back(starts.back() + static_cast<int32_t>(length));
  const int64_t tokens = starts.back();
  return {.q = values({tokens, heads, dim}, 1, factor, uneven, device),
          .k = values({tokens, kv_heads, dim}, 2, factor, uneven, device),
          .v = values({tokens, kv_heads, dim}, 3, 1, uneven, device),
          .cu = Tensor::from(starts).to(device),
          .desc = {}};
}

void expect_generic_bits(const Call& call, const std::string& name) {
  const AttentionOutput got = call(false), generic = call(true);
  EXPECT_TRUE(bit_equal(got.o, generic.o)) << name;
  EXPECT_TRUE(bit_equal(got.lse, generic.lse)) << name;
}

// More than 10^8 outputs in all. The factors cover sums of all sizes, a few dominant keys, denormal
// scores, and zeros of both signs.
TEST(CudaAttentionHopper, TheForwardHasTheBitsOfTheGenericKernel) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 96, 128, 192, 256})
    for (const double factor : {1.0, 30.0, 1e-19, 0.0})
      for (const bool uneven : {false, true})
        for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
          Call call = make_call(device, dim, 256 / dim * 2, 256 / dim,
                                {4200, 1, 127, 128, 129, 700, 3000}, factor, uneven);
          call.desc.mask = mask;
          expect_generic_bits(call, str("D ", dim, ", factor ", factor, uneven ? ", uneven" : "",
                                        mask == Mask::kCausal ? "" : ", full"));
        }
}

TEST(CudaAttentionHopper, WindowsAndGroupedHeadsHaveTheBitsOfTheGenericKernel) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {8, 40, 64, 72, 96, 104, 128, 136, 192, 200, 256})
    for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{14, 2}, {8, 8}, {32, 1}})
      for (const int64_t window : {1, 2, 63, 64, 65, 128, 500, 4096, 5000}) {
        Call call = make_call(device, dim, heads, kv_heads, {9000, 3, 200, 64, 192, 193}, 1, false);
        call.desc.window = window;
        expect_generic_bits(call, str("D ", dim, ", heads ", heads, ", window ", window));
      }
}

// Sequences of every length up to two tiles, with NaN on both sides.
TEST(CudaAttentionHopper, NeighboursDoNotLeakAtAnyLength) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 96, 128, 192, 256})
    for (int64_t length = 1; length <= 260; length += length < 130 ? 1 : 13) {
      Call clean = make_call(device, dim, 4, 2, {70, length, 60}, 1, false);
      Call dirty = clean;
      for (Tensor* t : {&dirty.q, &dirty.k, &dirty.v}) {
        *t = t->clone();
        t->narrow(0, 0, 70).fill_(NAN);
        t->narrow(0, 70 + length, 60).fill_(NAN);
      }
      const AttentionOutput a = clean(false), b = dirty(false);
      EXPECT_TRUE(bit_equal(a.o.narrow(0, 70, length), b.o.narrow(0, 70, length))) << length;
      const AttentionGrads c = gradients(clean, a), d = gradients(dirty, b);
      for (const auto field : {&AttentionGrads::dq, &AttentionGrads::dk, &AttentionGrads::dv})
        EXPECT_TRUE(bit_equal((c.*field).narrow(0, 70, length), (d.*field).narrow(0, 70, length)))
            << "D " << dim << ", length " << length;
    }
}

// Small enough for compute-sanitizer.
TEST(CudaAttentionHopper, SmallCallsHaveTheSameBitsEachTime) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 96, 128, 192, 256})
    for (const int64_t window : {0, 90}) {
      Call call = make_call(device, dim, 2, 1, {200, 1, 70}, 1, false);
      call.desc.window = window;
      const AttentionOutput out = call(false), again = call(false);
      EXPECT_TRUE(bit_equal(out.o, again.o) && bit_equal(out.lse, again.lse)) << dim;
      const AttentionGrads a = gradients(call, out), b = gradients(call, out);
      for (const auto field : {&AttentionGrads::dq, &AttentionGrads::dk, &AttentionGrads::dv})
        EXPECT_TRUE(bit_equal(a.*field, b.*field)) << dim;
    }
}

// Many blocks add to each tile of dQ: the order does not depend on which of them arrives first.
TEST(CudaAttentionHopper, LongBackwardsHaveTheSameBitsEachTime) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : {64, 96, 128, 192, 256})
    for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
      Call call = make_call(device, dim, 8, 2, {4500, 300, 2000, 5, 1100}, 1, false);
      call.desc.mask = mask;
      const AttentionOutput out = call(false);
      kernels::test::expect_reproducible([&] {
        const AttentionGrads g = gradients(call, out);
        return std::vector{g.dq, g.dk, g.dv};
      });
    }
}

}  // namespace
}  // namespace cohort::test
