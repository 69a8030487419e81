// Stick-breaking attention on CUDA, against the CPU in f64 and, in bf16, against the errors of a
// computation that rounds after each operation.
#include "tests/kernels/cuda_test.h"
#include "tests/kernels/stick_breaking_prefix_cases.h"

namespace cohort::test {
namespace {

using kernels::Grad;
using kernels::test::expect_reproducible;
using kernels::test::Guarded;
using kernels::test::kCudaTypes;
using kernels::test::kF32Tolerance;
using kernels::test::kStarts;

constexpr int64_t kDims[] = {5, 16, 40, 64, 128, 200, 256};

AttentionCase make_stick_case(int64_t heads, int64_t kv_heads, int64_t dim, DType dtype,
                              const std::vector<SequenceSpec>& sequences) {
  return in_dtype(make_case({.heads = heads, .kv_heads = kv_heads, .dim = dim}, sequences), dtype);
}

StickResults run_on(const AttentionCase& c, Device device) {
  const AttentionCase on = on_device(c, device);
  StickResults out{stick_forward(on), stick_backward(on)};
  for (Tensor* t : {&out.o, &out.grads.dq, &out.grads.dk, &out.grads.dv}) *t = t->to(Device{});
  return out;
}

std::vector<Tensor> all_of(const StickResults& r) {
  return {r.o, r.grads.dq, r.grads.dk, r.grads.dv};
}

double largest_error(const Tensor& got, const Tensor& exact) {
  const auto a = got.to_vector<double>(), b = exact.to_vector<double>();
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i)
    largest = std::isfinite(a[i]) ? std::fmax(largest, std::fabs(a[i] - b[i])) : INFINITY;
  return largest;
}

// Exact results in f64 from the values of `c`.
StickResults exact_results(const AttentionCase& c) {
  const AttentionCase in = in_dtype(c, DType::kF64);
  return {stick_forward(in), stick_backward(in)};
}

TEST(CudaStickBreaking, FollowsTheCpuInF32) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : kDims)
    for (const int64_t group : {1, 3}) {
      SCOPED_TRACE(str("D ", dim, ", group ", group));
      const AttentionCase c = make_stick_case(
          2 * group, 2, dim, DType::kF32, {{0, 0}, {1, 1}, {2, 63}, {3, 64}, {4, 65}, {5, 300}});
      const auto got = all_of(run_on(c, device)), exact = all_of(exact_results(c));
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_LT(relative_error(got[i], exact[i]), kF32Tolerance) << "output " << i;
    }
}

TEST(CudaStickBreaking, ErrorsInBf16AreThoseOfEagerComputationOrSmaller) {
  COHORT_REQUIRE_GPU(device);
  for (const int64_t dim : kDims)
    for (const int64_t group : {1, 4}) {
      SCOPED_TRACE(str("D ", dim, ", group ", group));
      const AttentionCase c = make_stick_case(
          2 * group, 2, dim, DType::kBF16, {{0, 0}, {1, 1}, {2, 63}, {3, 64}, {4, 65}, {5, 300}});
      const auto got = all_of(run_on(c, device)), exact = all_of(exact_results(c)),
                 eager = all_of(naive_stick(in_dtype(c, DType::kF64), DType::kBF16));
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_LE(largest_error(got[i], exact[i]), 2 * largest_error(eager[i], exact[i]) + 1e-5)
            << "output " << i;
        EXPECT_LE(relative_error(got[i], exact[i]), relative_error(eager[i], exact[i]) + 1e-5)
            << "output " << i;
      }
    }
}

TEST(CudaStickBreaking, RunsGiveTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 128, 256}) {
      const AttentionCase c = make_stick_case(6, 2, dim, dtype, {{1, 140}, {2, 20}, {3, 300}});
      expect_reproducible([&] { return all_of(run_on(c, device)); });
    }
}

TEST(CudaStickBreaking, RowsDoNotDependOnTheirCompanions) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {40, 64, 128, 256}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim));
      const AttentionCase all =
          make_stick_case(6, 2, dim, dtype, {{1, 70}, {2, 1}, {3, 200}, {4, 64}, {5, 129}});
      const auto together = all_of(run_on(all, device));
      for (size_t s = 0; s < all.sequences.size(); ++s) {
        const AttentionCase one = make_stick_case(6, 2, dim, dtype, {all.sequences[s]});
        const auto alone = all_of(run_on(one, device));
        for (size_t i = 0; i < alone.size(); ++i)
          EXPECT_TRUE(
              bit_equal(together[i].narrow(0, all.start(s), one.tokens()).clone(), alone[i]))
              << "sequence " << s << ", output " << i;
      }
    }
}

TEST(CudaStickBreaking, CacheGivesTheForwardsBits) {
  COHORT_REQUIRE_GPU(device);
  struct Row {
    int64_t block_tokens, group, dim;
  };
  for (const DType dtype : kCudaTypes)
    for (const Row& row : {Row{1, 1, 64}, Row{3, 3, 132}, Row{16, 3, 20}, Row{16, 4, 128},
                           Row{32, 7, 64}, Row{16, 2, 256}, Row{5, 16, 16}, Row{16, 70, 8}}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", blocks of ", row.block_tokens, ", group ", row.group,
                       ", D ", row.dim));
      const AttentionCase c = make_stick_case(2 * row.group, 2, row.dim, dtype,
                                              {{1, 1}, {2, 150}, {3, 30}, {4, 270}, {5, 64}});
      EXPECT_TRUE(bit_equal(stick_in_steps(c, row.block_tokens, device),
                            stick_forward(on_device(c, device)).to(Device{})));
    }
}

TEST(CudaStickBreaking, SharedPrefixesEqualRepeatingThem) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {20, 64, 128, 256})
      for (const SharedStick& f :
           {SharedStick{2, 1, dim, 5, {3, 1, 7}}, SharedStick{4, 2, dim, 127, {2, 130, 300}},
            SharedStick{6, 2, dim, 128, {1, 65, 0, 40}}, SharedStick{3, 3, dim, 100, {9, 28, 160}},
            SharedStick{2, 1, dim, 1000, {66, 129}}}) {
        SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim, ", prefix of ", f.prefix));
        expect_stick_as_repeated(f, dtype, dtype == DType::kF32 ? 1e-5 : 1e-2,
                                 dtype == DType::kF32 ? 1e-6 : 4e-3, device);
      }
}

TEST(CudaStickBreaking, WritesItsRowsOnlyAndAddsIfAsked) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {5, 64, 72, 200})
      for (const auto start : kStarts) {
        SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim));
        const AttentionCase c = make_stick_case(4, 2, dim, dtype, {{1, 70}, {2, 1}, {3, 30}});
        const Tensor cu = c.cu.to(device);
        Guarded q(c.q, dtype, device, start, NAN), k(c.k, dtype, device, start, NAN),
            v(c.v, dtype, device, start, NAN), dout(c.dout, dtype, device, start, NAN),
            o(c.q.shape(), dtype, device, start);
        kernels::stick_breaking_forward({o.tensor(), q.tensor(), k.tensor(), v.tensor(), cu});
        const auto expected = all_of(run_on(c, device));
        EXPECT_TRUE(o.intact() && bit_equal(o.tensor().to(Device{}), expected[0]));
        for (const Grad mode : {Grad::kOverwrite, Grad::kAccumulate}) {
          Guarded dq(c.dout, dtype, device, start), dk(c.v, dtype, device, start),
              dv(c.k, dtype, device, start);
          kernels::stick_breaking_backward({{dq.tensor(), mode},
                                            {dk.tensor(), mode},
                                            {dv.tensor(), mode},
                                            dout.tensor(),
                                            q.tensor(),
                                            k.tensor(),
                                            v.tensor(),
                                            cu});
          EXPECT_TRUE(dq.intact() && dk.intact() && dv.intact());
          const Tensor got[] = {dq.tensor(), dk.tensor(), dv.tensor()}, old[] = {c.dout, c.v, c.k};
          for (size_t i = 0; i < 3; ++i) {
            const Tensor& fresh = expected[i + 1];
            if (mode == Grad::kOverwrite) {
              EXPECT_TRUE(bit_equal(got[i].to(Device{}), fresh)) << "gradient " << i;
              continue;
            }
            auto sum = fresh.to_vector<double>();
            const auto before = old[i].to_vector<double>();
            for (size_t j = 0; j < sum.size(); ++j) sum[j] += before[j];
            EXPECT_LE(relative_error(got[i].to(Device{}), Tensor::from(sum, fresh.shape())),
                      dtype == DType::kF32 ? 1e-6 : 4e-3)
                << "gradient " << i;
          }
        }
      }
}

TEST(CudaStickBreaking, TensorsMayBeColumnsOfWiderOnes) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    const AttentionCase c = make_stick_case(4, 2, 64, dtype, {{1, 70}, {2, 9}});
    const AttentionCase in = merged(on_device(c, device)), grads = merged(on_device(c, device));
    Tensor dq = grads.q, dk = grads.k, dv = grads.v;
    WideRows o(Tensor::full(c.q.shape(), NAN, dtype, device));
    kernels::stick_breaking_forward({o.view, in.q, in.k, in.v, in.cu});
    kernels::stick_breaking_backward({{dq}, {dk}, {dv}, in.dout, in.q, in.k, in.v, in.cu});
    const auto expected = all_of(run_on(c, device));
    const Tensor got[] = {o.view, dq, dk, dv};
    for (size_t i = 0; i < 4; ++i)
      EXPECT_TRUE(bit_equal(got[i].clone().to(Device{}), expected[i])) << "output " << i;
    EXPECT_TRUE(o.intact());
  }
}

// More heads than the scratch memory of a launch holds.
TEST(CudaStickBreaking, HeadsMayTakeSeveralLaunches) {
  COHORT_REQUIRE_GPU(device);
  const AttentionCase all = make_stick_case(6, 3, 16, DType::kBF16, {{1, 15000}, {2, 3}});
  const auto together = all_of(run_on(all, device));
  for (int64_t head = 0; head < 3; ++head) {
    AttentionCase one = all;
    for (Tensor* t : {&one.k, &one.v}) *t = t->narrow(1, head, 1).clone();
    for (Tensor* t : {&one.q, &one.dout}) *t = t->narrow(1, 2 * head, 2).clone();
    const auto alone = all_of(run_on(one, device));
    for (size_t i = 0; i < alone.size(); ++i) {
      const int64_t heads = i < 2 ? 2 : 1;
      EXPECT_TRUE(bit_equal(together[i].narrow(1, heads * head, heads).clone(), alone[i]))
          << "head " << head << ", output " << i;
    }
  }
}

TEST(CudaStickBreaking, ExtremeScoresGiveNoNan) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    const AttentionCase c = extreme_case(dtype);
    const StickResults r = run_on(c, device);
    expect_finite_sticks(r.o, r.grads, c);
  }
}

TEST(CudaStickBreaking, NothingToDoForNoTokens) {
  COHORT_REQUIRE_GPU(device);
  const AttentionCase c = make_stick_case(2, 1, 8, DType::kF32, {{1, 0}});
  for (const Tensor& t : all_of(run_on(c, device))) EXPECT_EQ(t.numel(), 0);
}

}  // namespace
}  // namespace cohort::test
