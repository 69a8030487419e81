// The gated delta rule on CUDA: f32 against the CPU's f64, bf16 within the errors of its roundings,
// and equal bits of packed sequences, pieces, single tokens and shared prefixes.
#include "core/cuda.h"
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/gated_delta_cases.h"

namespace cohort::kernels::gated_delta_cuda_test {
namespace {

using namespace gated_delta_cases;
using test::expect_reproducible;
using test::Guarded;

// The types that fit the device's shared memory.
std::vector<DType> types_on(Device device) {
  if (::cohort::cuda::gpu_properties(device).shared_memory < kDeltaF32SharedMemory)
    return {DType::kBF16};
  return {std::begin(test::kCudaTypes), std::end(test::kCudaTypes)};
}

// Largest relative error of o: in bf16 three times that of slow decays.
double tolerance(DType dtype) {
  return dtype == DType::kF32 ? 1e-5 : 3 * 3.2e-3;
}
double error_of(const Tensor& got, const Tensor& exact) {
  return test::relative_error(got.to(Device{}).to(DType::kF64), exact);
}

// Runs `in` on the device between sentinels, and compares o and u with the CPU's f64.
void expect_forward(const Inputs& in, DType dtype, Device device) {
  const Inputs rounded = in.to(dtype).to(DType::kF64), on_device = in.to(dtype, device);
  Tensor exact_u, exact = rounded.run(&exact_u);
  Guarded o(in.v.shape(), dtype, device), u(in.v.shape(), dtype, device);
  gated_delta({o.tensor(), u.tensor(), on_device, on_device.cu_seqlens, on_device.desc});
  EXPECT_TRUE(o.intact() && u.intact());
  EXPECT_LE(error_of(o.tensor(), exact), tolerance(dtype)) << "o";
  EXPECT_LE(error_of(u.tensor(), exact_u), tolerance(dtype)) << "u";
}

// Tokens (dim 0) or groups of heads (dim 1) [begin, begin + count) of `in`; the sequences are its.
Inputs part(const Inputs& in, int64_t dim, int64_t begin, int64_t count) {
  Inputs out = in;
  const int64_t group = dim == 0 ? 1 : in.v.dim(1) / in.k.dim(1);
  for (Tensor* t : {&out.q, &out.k}) *t = t->narrow(dim, begin, count).contiguous();
  for (Tensor* t : {&out.v, &out.g, &out.beta})
    *t = t->narrow(dim, begin * group, count * group).contiguous();
  return out;
}

// Two prefixes with sequences that continue them, of which the first one is empty, and `empty` more
// sequences without tokens.
Inputs two_prefixes(int64_t key_heads, int64_t heads, int64_t dim, size_t empty = 0) {
  std::vector<int32_t> lengths = {40, 0, 30, 70, 0, 64, 3},
                       prefixes = {0, 0, 0, 40, 0, 40, 0, 0, 70, 70, 70, 70, 70, 70};
  lengths.resize(lengths.size() + empty);
  prefixes.resize(2 * lengths.size());
  Inputs in = make_inputs(lengths, key_heads, heads, dim, DType::kF64);
  in.desc.prefixes = Tensor::from(prefixes, {std::ssize(lengths), 2});
  return in;
}

const std::array<std::array<int64_t, 3>, 4> kHeads = {
    {{1, 1, 64}, {2, 4, 64}, {2, 2, 128}, {1, 2, 128}}};

// fn(inputs, dtype, length of their first sequence) for all types, heads and some lengths.
void for_lengths(Device device, const std::function<void(const Inputs&, DType, int32_t)>& fn) {
  for (const DType dtype : types_on(device))
    for (const auto& [key_heads, heads, dim] : kHeads)
      for (const int32_t length : {1, 63, 64, 65, 130, 300}) {
        SCOPED_TRACE(str(dtype_name(dtype), ", ", length, " tokens, ", heads, " heads of ", dim));
        Inputs in = make_inputs({length, 3, 0, 70}, key_heads, heads, dim, DType::kF64);
        if (length == 65) in.desc.scale = 0.7;
        fn(in, dtype, length);
      }
}
// fn(forked, dtype) for all types and some lengths of the prefix.
void for_forks(Device device, const std::function<void(const Forked&, DType)>& fn) {
  for (const DType dtype : types_on(device))
    for (const int32_t prompt : {1, 40, 63, 64, 65, 128, 150}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", a prefix of ", prompt));
      fn(make_forked(prompt, 1, 2, prompt % 2 == 0 ? 64 : 128, DType::kF64), dtype);
    }
}

TEST(CudaGatedDelta, ForwardMatchesTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for_lengths(device,
              [&](const Inputs& in, DType dtype, int32_t) { expect_forward(in, dtype, device); });
}

// More heads and sequences than multiprocessors, for which blocks have more columns.
TEST(CudaGatedDelta, ManySequencesMatchTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : types_on(device))
    for (const auto& [heads, dim] : {std::pair<int64_t, int64_t>{16, 64}, {8, 128}}) {
      const Inputs many =
          make_inputs(std::vector<int32_t>(60, 66), heads / 2, heads, dim, DType::kF64);
      expect_forward(many, dtype, device);
      Inputs alone = part(many, 0, 66, 66);
      alone.cu_seqlens = test::ids({0, 66});
      EXPECT_TRUE(test::bit_equal(
          alone.to(dtype, device).run().to(Device{}),
          many.to(dtype, device).run().to(Device{}).narrow(0, 66, 66).contiguous()));
    }
}

TEST(CudaGatedDelta, SharedPrefixesMatchTheCpuAndRepeatedOnes) {
  COHORT_REQUIRE_GPU(device);
  for_forks(device, [&](const Forked& forked, DType dtype) {
    expect_forward(forked.shared, dtype, device);
    expect_same_tokens(forked, forked.shared.to(dtype, device).run().to(Device{}),
                       forked.repeated.to(dtype, device).run().to(Device{}));
  });
}

// Decays g and the distance of keys from each other, with the errors that bf16 operands give.
TEST(CudaGatedDelta, Bf16IsAsAccurateAsItsRoundings) {
  COHORT_REQUIRE_GPU(device);
  for (const auto& [g, alike, error] : {std::tuple(-0.5, 0.0, 2.3e-3),
                                        {-0.05, 0.0, 2.6e-3},
                                        {-1e-4, 0.0, 3.2e-3},
                                        {-0.01, 0.9, 8.7e-3}}) {
    constexpr int64_t kDim = 128;
    Inputs in = make_inputs({2048}, 1, 2, kDim, DType::kF64);
    in.g.fill_(g);
    double* k = in.k.data<double>();
    const std::vector<double> first(k, k + kDim);
    for (int64_t t = 0; t < 2048; ++t, k += kDim) {
      double squares = 0;
      for (size_t d = 0; d < kDim; ++d) {
        k[d] = (1 - alike) * k[d] + alike * first[d];
        squares += k[d] * k[d];
      }
      for (size_t d = 0; d < kDim; ++d) k[d] /= std::sqrt(squares);
    }
    const Inputs rounded = in.to(DType::kBF16).to(DType::kF64);
    EXPECT_LE(error_of(in.to(DType::kBF16, device).run(), rounded.run()), 3 * error) << g;
  }
}

TEST(CudaGatedDelta, PiecesHaveTheBitsOfTheWhole) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(5, rng_stream(kTestPurpose, 3));
  int pieces = 0;
  for (const DType dtype : types_on(device))
    for (int round = 0; round < 120; ++round) {
      SCOPED_TRACE(str(dtype_name(dtype), ", round ", round));
      const auto& [key_heads, heads, dim] = kHeads[static_cast<size_t>(round) % 4];
      Inputs in = make_inputs(piece_lengths(rng), key_heads, heads, dim, DType::kF64,
                              static_cast<uint64_t>(10 * round + 1));
      if (round % 2 == 1) in.desc.scale = 0.7;
      ASSERT_NO_FATAL_FAILURE(check_pieces(in.to(dtype), device, rng, pieces));
    }
  EXPECT_GT(pieces, 2000 * std::ssize(types_on(device)));
}

TEST(CudaGatedDelta, SignsOfZeroAreThoseOfTheWhole) {
  COHORT_REQUIRE_GPU(device);
  Rng rng(5, rng_stream(kTestPurpose, 5));
  int pieces = 0;
  for (const DType dtype : types_on(device))
    for (int round = 0; round < 20; ++round)
      ASSERT_NO_FATAL_FAILURE(check_pieces(underflowing_inputs(dtype), device, rng, pieces));
}

// dq, dk, dv, dg and dbeta against the CPU's f64.
void expect_gradients(const Inputs& in, DType dtype, Device device, Grad mode) {
  const Tensor dout = random_tensor(in.v.shape(), DType::kF64, 9).to(dtype);
  Gradients exact = backward(in.to(dtype).to(DType::kF64), dout.to(DType::kF64), mode),
            got = backward(in.to(dtype, device), dout.to(device), mode);
  for (size_t i = 0; i < 5; ++i)
    EXPECT_LE(error_of(*got.all()[i], *exact.all()[i]), tolerance(dtype)) << "gradient " << i;
}

TEST(CudaGatedDelta, GradientsMatchTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for_lengths(device, [&](const Inputs& in, DType dtype, int32_t length) {
    expect_gradients(in, dtype, device, length % 2 == 0 ? Grad::kOverwrite : Grad::kAccumulate);
  });
}

TEST(CudaGatedDelta, GradientsOfSharedPrefixesMatchTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for_forks(device, [&](const Forked& forked, DType dtype) {
    expect_gradients(forked.shared, dtype, device, Grad::kOverwrite);
  });
}

TEST(CudaGatedDelta, GradientsOfTwoPrefixesMatchTheCpu) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : types_on(device))
    for (const Grad mode : {Grad::kOverwrite, Grad::kAccumulate})
      expect_gradients(two_prefixes(1, 2, 64), dtype, device, mode);
}

// The matrices of so many sequences of a key head take more than half of 256 MiB.
TEST(CudaGatedDelta, KeyHeadsInTurnHaveTheGradientsOfEachAlone) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : types_on(device)) {
    const Inputs in = two_prefixes(2, 4, 128, 520).to(dtype);
    const Tensor dout = random_tensor(in.v.shape(), DType::kF64, 9).to(dtype);
    Gradients both = backward(in.to(dtype, device), dout.to(device));
    for (int64_t head = 0; head < 2; ++head) {
      Gradients one = backward(part(in, 1, head, 1).to(dtype, device),
                               dout.narrow(1, 2 * head, 2).contiguous().to(device));
      for (size_t i = 0; i < 5; ++i) {
        const int64_t count = one.all()[i]->dim(1);
        EXPECT_TRUE(test::bit_equal(
            one.all()[i]->to(Device{}),
            both.all()[i]->to(Device{}).narrow(1, head * count, count).contiguous()))
            << "gradient " << i << " of key head " << head;
      }
    }
  }
}

TEST(CudaGatedDelta, TokensOfMissingStatesAreIdle) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : types_on(device))
    for (const bool is_decode : {false, true}) {
      const Inputs in = make_inputs({1, 1}, 1, 2, 64, DType::kF64).to(dtype, device);
      DeltaState state = make_state(in, 1);
      Tensor o = Tensor::full(in.v.shape(), NAN, dtype, device), expected = in.run();
      expected.narrow(0, 0, 1).zero_();
      gated_delta_cached(
          {o, state, in, test::ids({1, 0}).to(device), test::ids({0, 0}).to(device), 0, is_decode});
      EXPECT_TRUE(test::bit_equal(o.to(Device{}), expected.to(Device{})));
    }
}

TEST(CudaGatedDelta, ASequenceReachesNoOther) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : types_on(device)) expect_no_spread(64, dtype, device);
}

TEST(CudaGatedDelta, GivesTheSameBitsEveryTime) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : types_on(device)) {
    const Inputs in = make_forked(70, 2, 4, 128, DType::kF64).shared.to(dtype, device);
    expect_reproducible([&] {
      Tensor u;
      const Tensor o = in.run(&u);
      Gradients d = backward(in, o);
      return std::vector<Tensor>{o, u, d.q, d.k, d.v, d.g, d.beta};
    });
  }
}

TEST(CudaGatedDelta, OtherHeadsAreRefused) {
  COHORT_REQUIRE_GPU(device);
  EXPECT_THROW_WITH(make_inputs({4}, 1, 1, 32, DType::kF32).to(DType::kBF16, device).run(), Error,
                    "expected heads of 64 or 128 on a GPU");
}

}  // namespace
}  // namespace cohort::kernels::gated_delta_cuda_test
