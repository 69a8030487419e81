// Inputs of the gated delta rule on CUDA: against the CPU's f64, equal bits in any pieces, and
// gradients.
#include <numeric>

#include "core/rng.h"
#include "kernels/delta_inputs.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::kernels::delta_inputs_cuda_test {
namespace {

using namespace test;

// Tensors of a call; x, b and a are columns of one matrix.
struct Call {
  int64_t key_heads = 2, heads = 4, dim = 64;
  Tensor wide, w, a_log, dt_bias, cu_seqlens, prefixes;
  Start start = Start::kAligned;

  int64_t channels() const { return (2 * key_heads + heads) * dim; }
  int64_t tokens() const { return wide.dim(0); }
  int64_t first() const { return start == Start::kOdd ? 1 : 0; }
  Tensor x() const { return wide.narrow(1, first(), channels()); }
  Tensor b() const { return wide.narrow(1, first() + channels(), heads); }
  Tensor a() const { return wide.narrow(1, first() + channels() + heads, heads); }
  DeltaSources sources() const { return {x(), w, b(), a(), a_log, dt_bias}; }
  Call to(DType dtype, Device device = {}) const {
    Call out = *this;
    for (Tensor* t : {&out.wide, &out.w}) *t = t->to(dtype).to(device);
    for (Tensor* t : {&out.a_log, &out.dt_bias}) *t = t->to(accumulate_dtype(dtype)).to(device);
    out.cu_seqlens = cu_seqlens.to(device);
    if (prefixes.defined()) out.prefixes = prefixes.to(device);
    return out;
  }
};
Call make_call(const std::vector<int32_t>& cu, int64_t heads, int64_t dim, Start start,
               uint64_t seed = 1) {
  Call c{.heads = heads,
         .dim = dim,
         .wide = {},
         .w = {},
         .a_log = {},
         .dt_bias = {},
         .cu_seqlens = ids(cu),
         .prefixes = {},
         .start = start};
  const auto random = [&](const Shape& shape, uint64_t stream) {
    return random_tensor(shape, DType::kF64, 10 * seed + stream);
  };
  const int64_t odd = start == Start::kOdd ? 3 : 8 - 2 * heads % 8;
  c.wide = random({cu.back(), c.channels() + 2 * heads + odd}, 1);
  c.w = random({c.channels(), 4}, 2);
  c.a_log = random({heads}, 3);
  c.dt_bias = random({heads}, 4);
  return c;
}

// q, k, v, g and beta, or their gradients.
using Outputs = std::array<Tensor, 5>;
DeltaTensors named(const Outputs& o) {
  return {o[0], o[1], o[2], o[3], o[4]};
}
Outputs outputs(const Call& c, double value = NAN) {
  const DType dtype = c.wide.dtype(), gates = accumulate_dtype(dtype);
  const Device device = c.wide.device();
  const auto full = [&](const Shape& shape, DType type) {
    return Tensor::full(shape, value, type, device);
  };
  const Shape keys{c.tokens(), c.key_heads, c.dim}, values{c.tokens(), c.heads, c.dim},
      heads{c.tokens(), c.heads};
  return {full(keys, dtype), full(keys, dtype), full(values, dtype), full(heads, gates),
          full(heads, gates)};
}
Outputs packed(const Call& c) {
  const Outputs o = outputs(c);
  DeltaTensors out = named(o);
  delta_inputs({out, c.sources(), c.cu_seqlens, c.prefixes});
  return o;
}
// Errors of so many roundings of one result, to bf16.
void expect_near(const Tensor& got, const Tensor& exact, double roundings,
                 const std::string& what) {
  const double error = relative_error(got.to(Device{}).to(DType::kF64), exact);
  EXPECT_LE(error, got.dtype() == DType::kBF16 ? roundings * 0.0019 : kF32Tolerance) << what;
}

const std::vector<std::vector<int32_t>> kSequences = {
    {0, 1}, {0, 65}, {0, 0, 3, 3, 5, 70, 71, 71}, {0, 130, 300}};

TEST(CudaDeltaInputs, MatchTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Start start : kStarts)
      for (const auto& [heads, dim] : {std::pair<int64_t, int64_t>{2, 64}, {4, 128}, {34, 64}})
        for (const auto& cu : kSequences) {
          SCOPED_TRACE(str(dtype_name(dtype), ", ", cu.back(), " tokens, ", heads, " of ", dim));
          const Call call = make_call(cu, heads, dim, start).to(dtype);
          const Outputs exact = packed(call.to(DType::kF64)), got = packed(call.to(dtype, device));
          for (size_t i = 0; i < 5; ++i) expect_near(got[i], exact[i], i < 2 ? 1.7 : 1.1, str(i));
        }
}

// Sequences of a packed call in pieces over rings, with idle tokens and up to five wrong ones
// after a piece.
TEST(CudaDeltaInputs, PiecesOverRingsHaveTheBitsOfThePackedCall) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(7, rng_stream(kTestPurpose, 4));
  for (const DType dtype : kCudaTypes)
    for (int round = 0; round < 60; ++round) {
      std::vector<int32_t> cu{0};
      for (int s = 0; s < 3; ++s)
        cu.push_back(cu.back() + static_cast<int32_t>(rng.between(1, 25)));
      const Start start = round % 3 == 0 ? Start::kOdd : Start::kAligned;
      const Call call = make_call(cu, 4, round % 2 == 0 ? 64 : 128, start, 2).to(dtype);
      Outputs whole = packed(call.to(dtype, device));
      for (Tensor& t : whole) t = t.to(Device{});
      Tensor ring = Tensor::full({5, 8, call.channels()}, NAN, dtype, device);
      std::vector<int32_t> done(3, 0);
      for (bool any = true; any;) {
        std::vector<int64_t> rows;  // those in the packed call; -1: none
        std::vector<int32_t> states, positions;
        const auto add = [&](int64_t row, int32_t state, int32_t position) {
          rows.push_back(row);
          states.push_back(state);
          positions.push_back(position);
        };
        any = false;
        const int64_t most = rng.below(3) == 0 ? 20 : rng.below(2);
        bool is_decode = rng.below(2) == 0;
        for (size_t s = 0; s < 3; ++s) {
          const auto slot = static_cast<int32_t>(4 - s);
          if (rng.below(3) == 0) add(-1, rng.below(2) == 0 ? -1 : slot, -1);
          const auto count = static_cast<int32_t>(
              std::min<int64_t>(rng.between(0, most), cu[s + 1] - cu[s] - done[s]));
          for (int32_t i = 0; i < count; ++i) add(cu[s] + done[s] + i, slot, done[s] + i);
          done[s] += count;
          const auto wrong = static_cast<int32_t>(rng.below(3) == 0 && most > 1 ? rng.below(6) : 0);
          for (int32_t i = 0; i < wrong; ++i) add(-1, slot, done[s] + i);
          is_decode = is_decode && count + wrong < 2;
          any = any || done[s] < cu[s + 1] - cu[s];
        }
        if (rows.empty()) continue;
        Call piece = call;
        piece.wide = gather_rows(call.wide, rows, 3);
        const Call c = piece.to(dtype, device);
        const Outputs o = outputs(c);
        DeltaTensors out = named(o);
        const Tensor state_ids = ids(states).to(device), position_ids = ids(positions).to(device);
        delta_inputs_cached({ring, out, c.sources(), state_ids, position_ids, is_decode});
        for (size_t n = 0; n < 5; ++n) {
          const Tensor got = o[n].to(Device{});
          for (size_t i = 0; i < rows.size(); ++i) {
            if (rows[i] >= 0) {
              ASSERT_TRUE(bit_equal(one_row(got, i), one_row(whole[n], rows[i])))
                  << "round " << round << ", output " << n << " of token " << rows[i];
            } else if (states[i] < 0 || positions[i] < 0) {
              ASSERT_EQ(cohort::test::norm(one_row(got, i)), 0);
            }
          }
        }
      }
    }
}

// Two sequences that continue a prefix of three tokens, and the same repeating it.
Call shared_call(int64_t dim) {
  Call shared = make_call({0, 2, 5, 6, 10, 70}, 4, dim, Start::kAligned);
  shared.prefixes = Tensor::from(std::vector<int32_t>{0, 0, 0, 0, 2, 3, 2, 3, 0, 0}, {5, 2});
  return shared;
}

TEST(CudaDeltaInputs, SharedPrefixesHaveTheBitsOfRepeatedOnes) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    const Call shared = shared_call(64).to(dtype);
    Call repeated = shared;
    const std::vector<int64_t> from = {2, 3, 4, 5, 2, 3, 4, 6, 7, 8, 9};
    repeated.wide = gather_rows(shared.wide, from);
    repeated.cu_seqlens = ids({0, 4, 11});
    repeated.prefixes = {};
    const Outputs a = packed(shared.to(dtype, device)), b = packed(repeated.to(dtype, device));
    for (size_t n = 0; n < 5; ++n)
      for (size_t i = 0; i < from.size(); ++i)
        ASSERT_TRUE(bit_equal(one_row(b[n].to(Device{}), i), one_row(a[n].to(Device{}), from[i])))
            << n << ", token " << i;
  }
}

// dx, dw, db, da, da_log and ddt_bias, which begin with `value`.
using InputGradients = std::array<Tensor, 6>;
InputGradients gradients(const Call& c, const Outputs& d, Grad mode, double value) {
  const DType dtype = c.wide.dtype(), sums = accumulate_dtype(dtype);
  const auto full = [&](const Shape& shape, DType type) {
    return Tensor::full(shape, value, type, c.wide.device());
  };
  InputGradients to = {full(c.x().shape(), dtype), full(c.w.shape(), sums),
                       full(c.b().shape(), dtype), full(c.a().shape(), dtype),
                       full({c.heads}, sums),      full({c.heads}, sums)};
  delta_inputs_backward({.dx = {to[0], mode},
                         .dw = {to[1], mode},
                         .db = {to[2], mode},
                         .da = {to[3], mode},
                         .da_log = {to[4], mode},
                         .ddt_bias = {to[5], mode},
                         .dout = named(d),
                         .in = c.sources(),
                         .cu_seqlens = c.cu_seqlens,
                         .prefixes = c.prefixes});
  return to;
}

TEST(CudaDeltaInputs, GradientsMatchTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Grad mode : {Grad::kOverwrite, Grad::kAccumulate})
      for (const Start start : kStarts)
        for (const int64_t dim : {64, 128})
          for (int which = 0; which < 3; ++which) {
            SCOPED_TRACE(str(dtype_name(dtype), ", heads of ", dim, ", case ", which));
            Call call = which == 0   ? shared_call(dim)
                        : which == 1 ? make_call({0, 0, 1, 62, 67, 130}, 2, dim, start)
                                     : make_call({0, 300}, 4, dim, start);
            call = call.to(dtype);
            const Call exact_call = call.to(DType::kF64), on_device = call.to(dtype, device);
            Outputs d = outputs(call), exact_d = d, device_d = d;
            for (size_t i = 0; i < 5; ++i) {
              d[i] = random_tensor(d[i].shape(), DType::kF64, 20 + i).to(d[i].dtype());
              exact_d[i] = d[i].to(DType::kF64);
              device_d[i] = d[i].to(device);
            }
            const double before = mode == Grad::kOverwrite ? NAN : 0.5;
            const InputGradients exact = gradients(exact_call, exact_d, mode, before),
                                 got = gradients(on_device, device_d, mode, before);
            // y is rounded once in the backward, and weight gradients are f32.
            for (size_t i = 0; i < 6; ++i)
              if (dtype == DType::kF32 || i == 0 || i == 2 || i == 3)
                expect_near(got[i], exact[i], 2, str("gradient ", i));
              else
                EXPECT_LE(relative_error(got[i].to(Device{}).to(DType::kF64), exact[i]), 2e-3) << i;
          }
}

TEST(CudaDeltaInputs, GiveTheSameBitsEveryTime) {
  COHORT_REQUIRE_GPU(device);
  const Call call = make_call({0, 100, 300}, 4, 128, Start::kAligned).to(DType::kBF16, device);
  const Outputs d = outputs(call, 0.5);
  expect_reproducible([&] {
    const Outputs o = packed(call);
    const InputGradients g = gradients(call, d, Grad::kOverwrite, NAN);
    std::vector<Tensor> all(o.begin(), o.end());
    all.insert(all.end(), g.begin(), g.end());
    return all;
  });
}

}  // namespace
}  // namespace cohort::kernels::delta_inputs_cuda_test
