// The CUDA backward against a plain f64 one that materializes all scores. Inputs, o and lse come
// from the CPU, rounded to the dtype under test, so that only the arithmetic of the backward
// differs.
#include "tests/kernels/attention_cases.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

using kernels::Grad;
using kernels::Mask;
using kernels::test::Guarded;
using kernels::test::kCudaTypes;
using kernels::test::kRoundingSlack;
using kernels::test::Start;

// A case on the CPU in f64 with values representable in `dtype`, with o and lse, and the previous
// contents of the gradients.
struct BackwardCase {
  AttentionCase c;
  AttentionOutput out;
  DType dtype;
  Tensor old_q, old_k, old_v;  // undefined: overwrite
};

Tensor rounded(const Tensor& t, DType dtype) {
  return t.to(dtype).to(DType::kF64);
}

BackwardCase make_backward_case(AttentionShape shape, DType dtype,
                                const std::vector<SequenceSpec>& sequences) {
  shape.dtype = DType::kF64;
  BackwardCase b{.c = make_case(shape, sequences),
                 .out = {},
                 .dtype = dtype,
                 .old_q = {},
                 .old_k = {},
                 .old_v = {}};
  for (Tensor* t : {&b.c.q, &b.c.k, &b.c.v, &b.c.dout}) *t = rounded(*t, dtype);
  b.out = run_forward(b.c);
  b.out.o = rounded(b.out.o, dtype);
  b.out.lse = rounded(b.out.lse, DType::kF32);
  return b;
}

// Rounding of intermediate values: none, or as in the contract of the kernel.
enum class Rounding { kNone, kContract };

// A gradient in f64, and the same sum over the magnitudes of its terms.
struct Sum {
  std::vector<double> value, size;
  explicit Sum(const Tensor& like)
      : value(static_cast<size_t>(like.numel())), size(static_cast<size_t>(like.numel())) {}
  void add(int64_t at, double weight, double weight_size, const double* row, int64_t dim) {
    double *const v = &value[static_cast<size_t>(at)], *const s = &size[static_cast<size_t>(at)];
    for (int64_t d = 0; d < dim; ++d) {
      v[d] += weight * row[d];
      s[d] += weight_size * std::fabs(row[d]);
    }
  }
};
struct Sums {
  Sum dq, dk, dv;
};

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

Sums naive_backward(const BackwardCase& b, Rounding rounding) {
  const AttentionCase& c = b.c;
  const bool rounds = rounding == Rounding::kContract && b.dtype == DType::kBF16;
  const auto round = [&](double x) {
    return rounds ? static_cast<double>(bf16(static_cast<float>(x))) : x;
  };
  const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1), dim = c.q.dim(2), tokens = c.tokens();
  const double scale = c.desc.scale > 0 ? c.desc.scale : 1 / std::sqrt(static_cast<double>(dim));
  const kernels::DropoutSpec& drop = c.desc.dropout;
  const auto factor = [&](int64_t id, int64_t i, int64_t h, int64_t j) {
    if (drop.p == 0) return 1.0;
    const uint64_t element = static_cast<uint64_t>(h) << 32 | static_cast<uint64_t>(j);
    const auto p = static_cast<float>(drop.p);
    return kernels::dropout_keep(drop.seed, drop.stream, id, i, element, p) ? 1 / (1 - drop.p)
                                                                            : 0.0;
  };
  const double *const q = c.q.data<double>(), *const k = c.k.data<double>(),
                      *const v = c.v.data<double>(), *const dout = c.dout.data<double>(),
                      *const o = b.out.o.data<double>(), *const lse = b.out.lse.data<double>();
  Sums sums{Sum(c.q), Sum(c.k), Sum(c.k)};
  for (size_t s = 0; s < c.sequences.size(); ++s)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < c.sequences[s].length; ++i) {
        const int64_t t = c.start(s) + i, row = (t * heads + h) * dim;
        const int64_t n = c.shape.mask == Mask::kCausal ? i + 1 : c.sequences[s].length;
        const double delta = dot(dout + row, o + row, dim);
        const int64_t first = c.shape.window > 0 ? std::max<int64_t>(0, n - c.shape.window) : 0;
        for (int64_t j = first; j < n; ++j) {
          const int64_t key = ((c.start(s) + j) * kv_heads + h / (heads / kv_heads)) * dim;
          const double p = std::exp(dot(q + row, k + key, dim) * scale - lse[h * tokens + t]);
          const double f = factor(c.sequences[s].id, i, h, j);
          const double dp = f * dot(dout + row, v + key, dim);
          const double dropped = round(p * f), ds = round(p * (dp - delta)) * scale;
          const double ds_size = p * (std::fabs(dp) + std::fabs(delta)) * scale;
          sums.dv.add(key, dropped, dropped, dout + row, dim);
          sums.dk.add(key, ds, ds_size, q + row, dim);
          sums.dq.add(row, ds, ds_size, k + key, dim);
        }
      }
  const auto finish = [&](Sum& sum, const Tensor& old) {
    for (size_t i = 0; i < sum.value.size(); ++i) {
      if (old.defined()) sum.value[i] += old.data<double>()[i];
      sum.value[i] = round(sum.value[i]);
    }
  };
  finish(sums.dq, b.old_q);
  finish(sums.dk, b.old_k);
  finish(sums.dv, b.old_v);
  return sums;
}

// Runs on the device. NaN surrounds the inputs and fills gradients to overwrite, so that stray
// reads show.
AttentionGrads run_on(Device device, const BackwardCase& b, Start start = Start::kAligned) {
  const AttentionCase& c = b.c;
  const auto input = [&](const Tensor& t, DType dtype) {
    return Tensor(Guarded(t, dtype, device, start, NAN).tensor());
  };
  const auto gradient = [&](const Tensor& like, const Tensor& old) {
    return old.defined() ? Guarded(old, b.dtype, device, start)
                         : Guarded(like.shape(), b.dtype, device, start);
  };
  const auto mode = [](const Tensor& old) {
    return old.defined() ? Grad::kAccumulate : Grad::kOverwrite;
  };
  kernels::AttentionDesc desc = c.desc;
  if (desc.dropout.p > 0) {
    desc.dropout.sequences = desc.dropout.sequences.to(device);
    desc.dropout.positions = desc.dropout.positions.to(device);
  }
  Guarded dq = gradient(c.q, b.old_q), dk = gradient(c.k, b.old_k), dv = gradient(c.v, b.old_v);
  kernels::attention_backward({{dq.tensor(), mode(b.old_q)},
                               {dk.tensor(), mode(b.old_k)},
                               {dv.tensor(), mode(b.old_v)},
                               input(c.dout, b.dtype),
                               input(c.q, b.dtype),
                               input(c.k, b.dtype),
                               input(c.v, b.dtype),
                               input(b.out.o, b.dtype),
                               input(b.out.lse, DType::kF32),
                               c.cu.to(device),
                               desc});
  EXPECT_TRUE(dq.intact() && dk.intact() && dv.intact());
  return {dq.tensor(), dk.tensor(), dv.tensor()};
}

double norm(const std::vector<double>& x) {
  return std::sqrt(dot(x.data(), x.data(), static_cast<int64_t>(x.size())));
}
double distance(std::vector<double> a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return norm(a);
}

// bf16: the error is about that of the roundings of the contract. Both dtypes: f32 accumulation
// adds 1e-5 of the gradient, and, as dP - delta may cancel completely (with a single key it does),
// 1e-6 of the sum of the magnitudes of its terms.
void expect_close(const AttentionGrads& grads, const BackwardCase& b) {
  const Sums exact = naive_backward(b, Rounding::kNone),
             contract = naive_backward(b, Rounding::kContract);
  const auto check = [&](const char* name, const Tensor& got, const Sum& e, const Sum& r) {
    const double rounding = distance(r.value, e.value);
    const double error = distance(got.to_vector<double>(), e.value);
    EXPECT_LE(error,  // false for NaN
              kRoundingSlack * rounding + 1e-5 * norm(e.value) + 1e-6 * norm(e.size))
        << name << ", " << error / rounding << " times the rounding alone, " << rounding;
  };
  check("dq", grads.dq, exact.dq, contract.dq);
  check("dk", grads.dk, exact.dk, contract.dk);
  check("dv", grads.dv, exact.dv, contract.dv);
}

void expect_same(const AttentionGrads& a, const AttentionGrads& b) {
  EXPECT_TRUE(bit_equal(a.dq, b.dq));
  EXPECT_TRUE(bit_equal(a.dk, b.dk));
  EXPECT_TRUE(bit_equal(a.dv, b.dv));
}

// The oracle itself, against the CPU kernel in f64. Needs no GPU.
TEST(AttentionBackwardOracle, EqualsTheCpuKernel) {
  for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
    const BackwardCase b = make_backward_case({.heads = 4,
                                               .kv_heads = 2,
                                               .dim = 24,
                                               .mask = mask,
                                               .p = 0.3,
                                               .scale = 0.2,
                                               .window = mask == Mask::kCausal ? 40 : 0},
                                              DType::kBF16, {{9, 5}, {2, 140}, {3, 0}});
    const AttentionGrads kernel = run_backward(b.c, b.out);
    const Sums oracle = naive_backward(b, Rounding::kNone);
    const auto check = [](const Tensor& a, const Sum& sum) {
      EXPECT_LT(distance(a.to_vector<double>(), sum.value), 1e-13 * norm(sum.size));
    };
    check(kernel.dq, oracle.dq);
    check(kernel.dk, oracle.dk);
    check(kernel.dv, oracle.dv);
  }
}

class CudaAttentionBackwardDims : public testing::TestWithParam<int64_t> {};

void check_shapes(Device device, int64_t dim, int64_t heads, int64_t kv_heads,
                  const std::vector<SequenceSpec>& sequences) {
  for (const DType dtype : kCudaTypes)
    for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim, ", mask ", static_cast<int>(mask)));
      const BackwardCase b = make_backward_case(
          {.heads = heads, .kv_heads = kv_heads, .dim = dim, .mask = mask}, dtype, sequences);
      expect_close(run_on(device, b), b);
    }
}

TEST_P(CudaAttentionBackwardDims, EqualsTheDefinitionWithinATile) {
  COHORT_REQUIRE_GPU(device);
  check_shapes(device, GetParam(), 4, 2, {{0, 0}, {1, 1}, {2, 7}, {3, 33}, {4, 63}, {5, 0}});
}

TEST_P(CudaAttentionBackwardDims, EqualsTheDefinitionAtTheEdgesOfTiles) {
  COHORT_REQUIRE_GPU(device);
  check_shapes(device, GetParam(), 2, 2, {{1, 64}, {2, 65}, {3, 127}, {4, 128}, {5, 129}});
}

TEST_P(CudaAttentionBackwardDims, EqualsTheDefinitionAcrossTiles) {
  COHORT_REQUIRE_GPU(device);
  check_shapes(device, GetParam(), 3, 1, {{1, 3}, {2, 300}});
}

TEST_P(CudaAttentionBackwardDims, EqualsTheDefinitionUnderDropout) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
      const BackwardCase b = make_backward_case(
          {.heads = 4, .kv_heads = 2, .dim = GetParam(), .mask = mask, .p = 0.3, .scale = 0.2},
          dtype, {{9, 5}, {2, 140}, {3, 0}});
      expect_close(run_on(device, b), b);
    }
}

TEST_P(CudaAttentionBackwardDims, EqualsTheDefinitionUnderAWindow) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t window : {1, 33, 64, 129, 250}) {
      SCOPED_TRACE(str(dtype_name(dtype), ", window ", window));
      const BackwardCase b = make_backward_case({.heads = 2,
                                                 .kv_heads = 1,
                                                 .dim = GetParam(),
                                                 .p = window == 33 ? 0.3 : 0,
                                                 .window = window},
                                                dtype, {{9, 5}, {2, 290}, {3, 0}, {4, 65}});
      expect_close(run_on(device, b), b);
    }
}

// Unaligned rows may run on other kernels; where they do, results are only close.
TEST_P(CudaAttentionBackwardDims, AlignmentDoesNotChangeBits) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    const BackwardCase b = make_backward_case({.heads = 2, .kv_heads = 1, .dim = GetParam()}, dtype,
                                              {{1, 70}, {2, 10}});
    const AttentionGrads odd = run_on(device, b, Start::kOdd);
    if (dtype == DType::kBF16 && GetParam() % 8 == 0 && GetParam() <= 128)
      expect_close(odd, b);
    else
      expect_same(run_on(device, b), odd);
  }
}

// The forward runs on the device, too.
TEST_P(CudaAttentionBackwardDims, DifferentiatesTheDeviceForward) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    BackwardCase b = make_backward_case({.heads = 2, .kv_heads = 1, .dim = GetParam(), .p = 0.2},
                                        dtype, {{1, 150}, {2, 20}});
    kernels::AttentionDesc desc = b.c.desc;
    desc.dropout.sequences = desc.dropout.sequences.to(device);
    desc.dropout.positions = desc.dropout.positions.to(device);
    const auto input = [&](const Tensor& t) { return t.to(dtype).to(device); };
    Tensor o = Tensor::empty(b.c.q.shape(), dtype, device);
    Tensor lse = Tensor::empty({2, b.c.tokens()}, DType::kF32, device);
    kernels::attention_forward(
        {o, lse, input(b.c.q), input(b.c.k), input(b.c.v), b.c.cu.to(device), desc});
    EXPECT_LT(relative_error(lse.to(Device{}).to(DType::kF64), b.out.lse), 1e-5);
    b.out = {o.to(Device{}).to(DType::kF64), lse.to(Device{}).to(DType::kF64)};
    expect_close(run_on(device, b), b);
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, CudaAttentionBackwardDims,
                         testing::Values(1, 16, 21, 24, 64, 80, 128, 130, 256));

TEST(CudaAttentionBackward, EachGradientFollowsItsMode) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {20, 64, 128, 256})
      for (const auto old : {&BackwardCase::old_q, &BackwardCase::old_k, &BackwardCase::old_v}) {
        BackwardCase b = make_backward_case({.heads = 4, .kv_heads = 2, .dim = dim}, dtype,
                                            {{1, 140}, {2, 0}, {3, 9}});
        const Tensor& like = old == &BackwardCase::old_q ? b.c.q : b.c.k;
        SCOPED_TRACE(str(dtype_name(dtype), ", D ", dim, ", gradient of ", like.str()));
        b.*old = rounded(random_tensor(like.shape(), DType::kF64, 31), dtype);
        expect_close(run_on(device, b), b);
      }
}

// All scores are far below zero: exp(0 - lse) of the zeros that pad a tile overflows.
TEST(CudaAttentionBackward, PaddingOfATileDoesNotCount) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {16, 128, 256})
      for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
        const AttentionShape shape{.heads = 1, .kv_heads = 1, .dim = dim, .mask = mask, .scale = 1};
        BackwardCase b = make_backward_case(shape, dtype, {{1, 5}, {2, 70}});
        b.c.q.fill_(8);
        b.c.k.fill_(-4);  // scores of -512 and below
        b.out = run_forward(b.c);
        b.out.o = rounded(b.out.o, dtype);
        b.out.lse = rounded(b.out.lse, DType::kF32);
        const AttentionGrads grads = run_on(device, b);
        for (const Tensor* g : {&grads.dq, &grads.dk, &grads.dv})
          for (const double x : g->to_vector<double>()) ASSERT_TRUE(std::isfinite(x));
      }
}

TEST(CudaAttentionBackward, TokensMayBeStrided) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {5, 64, 128, 256}) {
      const AttentionCase c =
          on_device(make_case({.heads = 6, .kv_heads = 2, .dim = dim, .dtype = dtype},
                              {{1, 40}, {2, 1}, {3, 300}}),
                    device);
      const AttentionOutput out = run_forward(c);
      const AttentionGrads separate = run_backward(c, out), views = run_merged_backward(c, out);
      EXPECT_TRUE(bit_equal(separate.dq, views.dq) && bit_equal(separate.dk, views.dk) &&
                  bit_equal(separate.dv, views.dv))
          << dim;
    }
}

TEST(CudaAttentionBackward, OutputMayBeStrided) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {5, 64, 96, 128, 192, 256})
      expect_output_may_be_strided(
          on_device(make_case({.heads = 6, .kv_heads = 2, .dim = dim, .dtype = dtype},
                              {{1, 40}, {2, 1}, {3, 300}}),
                    device));
}

TEST(CudaAttentionBackward, RunsGiveTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 128, 256})
      for (const double p : {0.0, 0.1}) {
        const BackwardCase b = make_backward_case({.heads = 6, .kv_heads = 2, .dim = dim, .p = p},
                                                  dtype, {{1, 700}, {2, 31}, {3, 130}});
        const AttentionGrads first = run_on(device, b);
        for (int run = 1; run < 20; ++run) expect_same(run_on(device, b), first);
      }
}

// Sequences alone, and packed among others that shift them. NaN in the others must not leak.
TEST(CudaAttentionBackward, BitsDoNotDependOnOtherSequences) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Mask mask : {Mask::kCausal, Mask::kFull})
      for (const auto& [dim, p] :
           {std::pair<int64_t, double>{64, 0.3}, {64, 0}, {128, 0.3}, {128, 0}, {256, 0.3}}) {
        const AttentionShape shape{.heads = 4, .kv_heads = 2, .dim = dim, .mask = mask, .p = p};
        const BackwardCase packed =
            make_backward_case(shape, dtype, {{1, 3}, {2, 200}, {3, 0}, {4, 1}, {5, 70}});
        const AttentionGrads all = run_on(device, packed);
        for (size_t s = 0; s < packed.c.sequences.size(); ++s) {
          const int64_t start = packed.c.start(s), n = packed.c.sequences[s].length;
          const BackwardCase single = make_backward_case(shape, dtype, {packed.c.sequences[s]});
          const AttentionGrads alone = run_on(device, single);
          EXPECT_TRUE(bit_equal(alone.dq, all.dq.narrow(0, start, n)));
          EXPECT_TRUE(bit_equal(alone.dk, all.dk.narrow(0, start, n)));
          EXPECT_TRUE(bit_equal(alone.dv, all.dv.narrow(0, start, n)));
        }
        BackwardCase dirty = packed;
        for (Tensor* t :
             {&dirty.c.q, &dirty.c.k, &dirty.c.v, &dirty.c.dout, &dirty.out.o, &dirty.out.lse}) {
          *t = t->clone();
          for (const size_t s : {size_t{0}, size_t{3}, size_t{4}})
            t->narrow(t == &dirty.out.lse ? 1 : 0, packed.c.start(s), packed.c.sequences[s].length)
                .fill_(NAN);
        }
        const AttentionGrads got = run_on(device, dirty);
        const int64_t start = packed.c.start(1), n = packed.c.sequences[1].length;
        EXPECT_TRUE(bit_equal(got.dq.narrow(0, start, n), all.dq.narrow(0, start, n)));
        EXPECT_TRUE(bit_equal(got.dk.narrow(0, start, n), all.dk.narrow(0, start, n)));
        EXPECT_TRUE(bit_equal(got.dv.narrow(0, start, n), all.dv.narrow(0, start, n)));
      }
}

// The search for a block's sequence takes two rounds of a warp.
TEST(CudaAttentionBackward, ManySequences) {
  COHORT_REQUIRE_GPU(device);
  std::vector<SequenceSpec> sequences;
  for (int64_t s = 0; s < 1100; ++s) sequences.push_back({s, s % 5 == 0 ? 0 : s % 3});
  sequences.push_back({1100, 150});
  for (const DType dtype : kCudaTypes) {
    const BackwardCase b =
        make_backward_case({.heads = 2, .kv_heads = 1, .dim = 8}, dtype, sequences);
    expect_close(run_on(device, b), b);
  }
}

TEST(CudaAttentionBackward, NothingToDo) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const std::vector<SequenceSpec>& sequences :
         {std::vector<SequenceSpec>{}, std::vector<SequenceSpec>{{1, 0}, {2, 0}}}) {
      const BackwardCase b =
          make_backward_case({.heads = 2, .kv_heads = 1, .dim = 64}, dtype, sequences);
      EXPECT_EQ(run_on(device, b).dq.numel(), 0);
    }
}

TEST(CudaAttentionBackward, SaysWhatIsWrong) {
  COHORT_REQUIRE_GPU(device);
  const auto run = [&](int64_t dim, DType dtype, DType lse_dtype, Device lse_device) {
    const auto make = [&] { return Tensor::zeros({4, 1, dim}, dtype, device); };
    Tensor dq = make(), dk = make(), dv = make();
    kernels::attention_backward({{dq},
                                 {dk},
                                 {dv},
                                 make(),
                                 make(),
                                 make(),
                                 make(),
                                 make(),
                                 Tensor::zeros({1, 4}, lse_dtype, lse_device),
                                 Tensor::from(std::vector<int32_t>{0, 4}).to(device),
                                 {}});
  };
  EXPECT_THROW_WITH(run(257, DType::kBF16, DType::kF32, device), Error, "at most 256");
  EXPECT_THROW_WITH(run(64, DType::kBF16, DType::kBF16, device), Error, "expected lse f32");
  EXPECT_THROW_WITH(run(64, DType::kBF16, DType::kF32, Device{}), Error, "expected lse on cuda:0");
  EXPECT_THROW_WITH(run(64, DType::kF64, DType::kF64, device), Error, "expected f32 or bf16");
}

}  // namespace
}  // namespace cohort::test
