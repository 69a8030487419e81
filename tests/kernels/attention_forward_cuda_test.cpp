// The forward pass on CUDA against a plain softmax in f64, and the invariances of its bits.
#include <array>

#include "tests/kernels/attention_cases.h"
#include "tests/kernels/cuda_test.h"

namespace cohort::test {
namespace {

using kernels::Mask;
using kernels::test::expect_reproducible;
using kernels::test::Guarded;
using kernels::test::kCudaTypes;
using kernels::test::kRoundingSlack;
using kernels::test::Start;

constexpr Mask kMasks[] = {Mask::kCausal, Mask::kFull};
const std::vector<SequenceSpec> kCudaLengths = {{1, 0},   {2, 1},    {3, 7},    {4, 63},
                                                {5, 64},  {6, 65},   {7, 0},    {8, 127},
                                                {9, 128}, {10, 129}, {11, 300}, {12, 0}};

std::string describe_on_cuda(const AttentionShape& s) {
  return str("D ", s.dim, ", heads ", s.heads, "/", s.kv_heads,
             s.mask == Mask::kCausal ? ", causal" : ", full", ", ", dtype_name(s.dtype), ", p ",
             s.p);
}

// The case with inputs representable in `dtype`, in f64.
AttentionCase rounded(const AttentionCase& c, DType dtype) {
  return in_dtype(in_dtype(c, dtype), DType::kF64);
}

// f32: a few hundred roundings of 2^-24. bf16: additionally the error of rounding P and O alone.
// That P is rounded relative to the running instead of the final maximum changes its bits but not
// the size of the error.
void expect_exact(const AttentionOutput& out, const AttentionCase& exact) {
  const AttentionOutput oracle = naive_attention(exact);
  double tolerance = 1e-5;
  if (out.o.dtype() == DType::kBF16)
    tolerance += kRoundingSlack * relative_error(naive_attention(exact, DType::kBF16).o, oracle.o);
  EXPECT_LE(relative_error(out.o, oracle.o), tolerance);
  EXPECT_LE(relative_error(out.lse, oracle.lse), 1e-5);
}

// Runs `c` (f64) on the device in `dtype` between sentinels.
AttentionOutput run_guarded(const AttentionCase& c, DType dtype, Device device,
                            Start start = Start::kAligned) {
  AttentionCase on = on_device(c, device);
  Guarded q(c.q, dtype, device, start), k(c.k, dtype, device, start), v(c.v, dtype, device, start);
  Guarded o(c.q.shape(), dtype, device, start);
  Guarded lse({c.q.dim(1), c.tokens()}, DType::kF32, device, start);
  kernels::attention_forward(
      {o.tensor(), lse.tensor(), q.tensor(), k.tensor(), v.tensor(), on.cu, on.desc});
  EXPECT_TRUE(o.intact() && lse.intact());
  return {o.tensor().to(Device{}), lse.tensor().to(Device{})};
}

void expect_softmax(DType dtype, int64_t dim, int64_t group, Device device) {
  for (const Mask mask : kMasks) {
    const int64_t kv_heads = group < 3 ? 2 : 1;
    const AttentionShape shape{
        .heads = kv_heads * group, .kv_heads = kv_heads, .dim = dim, .mask = mask};
    SCOPED_TRACE(str(dtype_name(dtype), ", ", describe_on_cuda(shape)));
    const AttentionCase c = rounded(make_case(shape, kCudaLengths), dtype);
    expect_exact(run_guarded(c, dtype, device), c);
  }
}

TEST(CudaAttentionForward, EqualsAPlainSoftmax) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    expect_softmax(dtype, 1, 1, device);
    expect_softmax(dtype, 5, 2, device);
    expect_softmax(dtype, 16, 3, device);
    expect_softmax(dtype, 24, 7, device);
    expect_softmax(dtype, 64, 1, device);
  }
}

TEST(CudaAttentionForward, EqualsAPlainSoftmaxForWideHeads) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    expect_softmax(dtype, 80, 3, device);
    expect_softmax(dtype, 128, 1, device);
  }
}

TEST(CudaAttentionForward, EqualsAPlainSoftmaxForTheWidestHeads) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    expect_softmax(dtype, 136, 1, device);
    expect_softmax(dtype, 256, 1, device);
  }
}

// Windows within a tile, across tiles and of all keys, for each instantiation.
TEST(CudaAttentionForward, AWindowHidesEarlierKeys) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {24, 64, 128, 200})
      for (const int64_t window : {1, 40, 64, 129, 200, 1000}) {
        const int64_t group = dim == 24 ? 3 : 1;
        const AttentionCase c = rounded(make_case({.heads = 2 * group,
                                                   .kv_heads = 2,
                                                   .dim = dim,
                                                   .p = dim == 24 ? 0.3 : 0,
                                                   .window = window},
                                                  {{1, 1}, {2, 65}, {3, 0}, {4, 700}, {5, 129}}),
                                        dtype);
        SCOPED_TRACE(str(dtype_name(dtype), ", ", describe_on_cuda(c.shape), ", window ", window));
        expect_exact(run_guarded(c, dtype, device), c);
      }
}

// Over several chunks of keys, against f64 on the CPU. bf16 rounds P and O to 2^-9 each.
TEST(CudaAttentionForward, ChunksAreCombined) {
  COHORT_REQUIRE_GPU(device);
  const int64_t chunk = kernels::kAttentionChunk;
  struct Row {
    int64_t dim, length;
    Mask mask = Mask::kCausal;
    int64_t window = 0;
  };
  for (const DType dtype : kCudaTypes)
    for (const Row& row :
         {Row{16, 2 * chunk + 100}, Row{64, chunk + 200}, Row{64, chunk + 1, Mask::kFull},
          Row{64, chunk + 500, {}, 700}, Row{128, chunk + 130}, Row{256, chunk + 70}}) {
      const AttentionCase c = rounded(
          make_case(
              {.heads = 1, .kv_heads = 1, .dim = row.dim, .mask = row.mask, .window = row.window},
              {{1, row.length}, {2, 50}}),
          dtype);
      SCOPED_TRACE(
          str(dtype_name(dtype), ", ", describe_on_cuda(c.shape), ", ", row.length, " tokens"));
      const AttentionOutput out = run_guarded(c, dtype, device), exact = run_forward(c);
      EXPECT_LE(relative_error(out.o, exact.o), dtype == DType::kBF16 ? 0x1p-8 : 1e-5);
      EXPECT_LE(relative_error(out.lse, exact.lse), 1e-5);
    }
}

// Later chunks change no bit of a row in the first.
TEST(CudaAttentionForward, TheFirstChunkDoesNotDependOnLaterChunks) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    AttentionCase c = make_case({.heads = 2, .kv_heads = 1, .dim = 64, .dtype = dtype},
                                {{1, kernels::kAttentionChunk + 300}});
    const Tensor o = run_forward(on_device(c, device)).o.to(Device{});
    const auto first = [](const Tensor& t) {
      return t.narrow(0, 0, kernels::kAttentionChunk).clone();
    };
    for (Tensor* t : {&c.q, &c.k, &c.v, &c.dout}) *t = first(*t);
    c.cu = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(kernels::kAttentionChunk)});
    EXPECT_TRUE(bit_equal(run_forward(on_device(c, device)).o.to(Device{}), first(o)));
  }
}

// A window longer than every sequence changes no bit, and neither do finite values before the
// window.
TEST(CudaAttentionForward, AWindowKeepsTheBitsOfVisibleKeys) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 128, 256}) {
      AttentionCase c = on_device(make_case({.dim = dim, .dtype = dtype}, {{1, 600}}), device);
      const Tensor all = run_forward(c).o;
      c.desc.window = 600;
      EXPECT_TRUE(bit_equal(run_forward(c).o, all));
      c.desc.window = 90;
      const Tensor o = run_forward(c).o;
      EXPECT_FALSE(bit_equal(o, all));
      for (Tensor* t : {&c.k, &c.v})
        *t = t->clone(), t->narrow(0, 0, 311).copy_(Tensor::full({311, 2, dim}, 3, dtype, device));
      EXPECT_TRUE(bit_equal(run_forward(c).o.narrow(0, 400, 200), o.narrow(0, 400, 200)));
    }
}

// Rows that do not start at multiples of 16 bytes, with the bits of those that do.
TEST(CudaAttentionForward, TensorsMayStartAnywhere) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {24, 128}) {
      const AttentionCase c =
          make_case({.heads = 2, .kv_heads = 1, .dim = dim}, {{1, 30}, {2, 150}});
      const AttentionOutput odd = run_guarded(c, dtype, device, Start::kOdd);
      const AttentionOutput aligned = run_guarded(c, dtype, device);
      EXPECT_TRUE(bit_equal(odd.o, aligned.o));
      EXPECT_TRUE(bit_equal(odd.lse, aligned.lse));
    }
}

TEST(CudaAttentionForward, DropsProbabilitiesByTheirIndex) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {20, 128, 192})
      for (const Mask mask : kMasks) {
        const AttentionCase c =
            rounded(make_case({.heads = 4, .kv_heads = 2, .dim = dim, .mask = mask, .p = 0.3},
                              {{11, 140}, {12, 5}}),
                    dtype);
        SCOPED_TRACE(str(dtype_name(dtype), ", ", describe_on_cuda(c.shape)));
        expect_exact(run_guarded(c, dtype, device), c);
      }
}

TEST(CudaAttentionForward, UsesTheGivenScale) {
  COHORT_REQUIRE_GPU(device);
  const AttentionCase c = make_case({.dim = 8, .scale = 0.7}, {{1, 20}});
  expect_exact(run_guarded(c, DType::kF32, device), rounded(c, DType::kF32));
}

// Keys that grow along the sequence, so that the maximum rises in every tile, and scores of several
// hundred, for which exponentials without the maximum would overflow. The allowed error is the
// rounding of a score relative to 1: hundreds times a few 2^-24.
TEST(CudaAttentionForward, FollowsARisingMaximum) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 144}) {
      AttentionCase c = make_case({.heads = 1, .kv_heads = 1, .dim = dim}, {{1, 600}});
      c.q = Tensor::full(c.q.shape(), 1, DType::kF64);
      double* k = c.k.data<double>();
      for (int64_t t = 0; t < 600; ++t)
        for (int64_t d = 0; d < dim; ++d)
          k[t * dim + d] = 0.02 * k[t * dim + d] + 0.1 * static_cast<double>(t);
      c = rounded(c, dtype);
      const AttentionOutput out = run_guarded(c, dtype, device), oracle = naive_attention(c);
      const bool half = dtype == DType::kBF16;
      const double rounding =
          half ? relative_error(naive_attention(c, DType::kBF16).o, oracle.o) : 0;
      EXPECT_LE(relative_error(out.o, oracle.o), kRoundingSlack * rounding + 1e-3);
      EXPECT_LE(relative_error(out.lse, oracle.lse), 1e-5);
    }
}

TEST(CudaAttentionForward, TokensMayBeStrided) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {5, 64, 128, 256}) {
      const AttentionCase c =
          on_device(make_case({.heads = 6, .kv_heads = 2, .dim = dim, .dtype = dtype},
                              {{1, 40}, {2, 1}, {3, 300}}),
                    device);
      const AttentionOutput separate = run_forward(c), views = run_forward(merged(c));
      EXPECT_TRUE(bit_equal(separate.o, views.o) && bit_equal(separate.lse, views.lse)) << dim;
      WideRows unaligned(Tensor::full(c.q.shape(), NAN, dtype, device), 1);
      Tensor lse = Tensor::empty_like(separate.lse);
      kernels::attention_forward({unaligned.view, lse, c.q, c.k, c.v, c.cu, c.desc});
      EXPECT_TRUE(bit_equal(unaligned.view, separate.o) && unaligned.intact()) << dim;
    }
}

TEST(CudaAttentionForward, RunsGiveTheSameBits) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {64, 128, 256}) {
      const AttentionCase c =
          on_device(make_case({.heads = 4, .kv_heads = 2, .dim = dim, .dtype = dtype, .p = 0.1},
                              {{1, 3}, {2, 300}, {3, 0}, {4, 200}}),
                    device);
      expect_reproducible([&] {
        const AttentionOutput out = run_forward(c);
        return std::vector<Tensor>{out.o, out.lse};
      });
    }
}

// Sequences alone, and packed among others that shift them. NaN in the others must not leak.
TEST(CudaAttentionForward, BitsDoNotDependOnOtherSequences) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const Mask mask : kMasks)
      for (const double p : {0.0, 0.3}) {
        const AttentionShape shape{
            .heads = 3, .kv_heads = 1, .dim = 40, .dtype = dtype, .mask = mask, .p = p};
        SCOPED_TRACE(describe_on_cuda(shape));
        const AttentionCase packed =
            make_case(shape, {{1, 3}, {2, 131}, {3, 0}, {4, 1}, {5, 70}, {6, 260}});
        const AttentionOutput all = run_forward(on_device(packed, device));
        for (size_t s = 0; s < packed.sequences.size(); ++s) {
          const int64_t start = packed.start(s), n = packed.sequences[s].length;
          const AttentionOutput alone =
              run_forward(on_device(make_case(shape, {packed.sequences[s]}), device));
          EXPECT_TRUE(bit_equal(alone.o.to(Device{}), all.o.narrow(0, start, n).to(Device{})));
          EXPECT_TRUE(bit_equal(alone.lse.to(Device{}),
                                all.lse.narrow(1, start, n).contiguous().to(Device{})));
        }
        AttentionCase dirty = packed;
        for (Tensor* t : {&dirty.q, &dirty.k, &dirty.v}) {
          *t = t->clone();
          for (const size_t s : {size_t{0}, size_t{3}, size_t{5}})
            t->narrow(0, packed.start(s), packed.sequences[s].length).fill_(NAN);
        }
        const AttentionOutput out = run_forward(on_device(dirty, device));
        for (const size_t s : {size_t{1}, size_t{4}}) {
          const int64_t start = packed.start(s), n = packed.sequences[s].length;
          EXPECT_TRUE(bit_equal(out.o.narrow(0, start, n).to(Device{}),
                                all.o.narrow(0, start, n).to(Device{})));
        }
      }
}

// A pack so long that not all heads fit in one batch; each head equals a run of that head alone.
TEST(CudaAttentionForward, HeadsRunInBatchesOnALongPack) {
  COHORT_REQUIRE_GPU(device);
  std::vector<SequenceSpec> sequences;
  for (int64_t s = 0; s < 256; ++s)
    sequences.push_back({s, std::array<int64_t, 4>{1, 40, 7, 80}[static_cast<size_t>(s % 4)]});
  for (const DType dtype : kCudaTypes) {
    const AttentionCase c = on_device(
        make_case({.heads = 5, .kv_heads = 5, .dim = 256, .dtype = dtype}, sequences), device);
    ASSERT_EQ(c.tokens(), 8192);
    const AttentionOutput all = run_forward(c);
    for (int64_t head = 0; head < 5; ++head) {
      AttentionCase one = c;
      for (Tensor* t : {&one.q, &one.k, &one.v}) *t = t->narrow(1, head, 1).contiguous();
      const AttentionOutput alone = run_forward(one);
      EXPECT_TRUE(bit_equal(alone.o, all.o.narrow(1, head, 1).contiguous())) << head;
      EXPECT_TRUE(bit_equal(alone.lse, all.lse.narrow(0, head, 1))) << head;
    }
  }
}

// The bits of a causal row equal those of the sequence truncated after it.
TEST(CudaAttentionForward, BitsDoNotDependOnLaterTokens) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes)
    for (const int64_t dim : {16, 144}) {
      const AttentionCase c = make_case({.dim = dim, .dtype = dtype}, {{1, 200}});
      const AttentionOutput whole = run_forward(on_device(c, device));
      for (const int64_t n : {1, 2, 7, 63, 64, 65, 127, 128, 129, 199}) {
        AttentionCase truncated = c;
        truncated.cu = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(n)});
        for (Tensor* t : {&truncated.q, &truncated.k, &truncated.v})
          *t = t->narrow(0, 0, n).contiguous();
        EXPECT_TRUE(bit_equal(run_forward(on_device(truncated, device)).o.to(Device{}),
                              whole.o.narrow(0, 0, n).to(Device{})))
            << n;
      }
    }
}

// More sequences than a warp has lanes, so that finding a block's sequence takes several steps.
TEST(CudaAttentionForward, ManySequences) {
  COHORT_REQUIRE_GPU(device);
  std::vector<SequenceSpec> sequences;
  for (int64_t s = 0; s < 1100; ++s) sequences.push_back({s, s * 7 % 5});
  sequences[500].length = 290;
  const AttentionCase c =
      rounded(make_case({.heads = 1, .kv_heads = 1, .dim = 8}, sequences), DType::kBF16);
  expect_exact(run_guarded(c, DType::kBF16, device), c);
}

TEST(CudaAttentionForward, NothingToDoForNoTokens) {
  COHORT_REQUIRE_GPU(device);
  for (const DType dtype : kCudaTypes) {
    EXPECT_EQ(
        run_forward(on_device(make_case({.dtype = dtype}, {{1, 0}, {2, 0}}), device)).o.numel(), 0);
    EXPECT_EQ(run_forward(on_device(make_case({.dtype = dtype}, {}), device)).o.numel(), 0);
  }
  synchronize(device);
}

TEST(CudaAttentionForward, SaysWhatIsWrong) {
  COHORT_REQUIRE_GPU(device);
  const auto run = [&](const AttentionCase& c) { run_forward(c); };
  EXPECT_THROW_WITH(run(on_device(make_case({.dim = 8}, {{1, 4}}), device)), Error,
                    "[attention_forward] expected f32 or bf16");
  EXPECT_THROW_WITH(run(on_device(make_case({.dim = 257, .dtype = DType::kF32}, {{1, 4}}), device)),
                    Error, "head dim of at most 256");
  const AttentionCase host = make_case({.dim = 8, .dtype = DType::kF32}, {{1, 4}});
  AttentionCase mixed = on_device(host, device);
  mixed.cu = host.cu;
  EXPECT_THROW_WITH(run(mixed), Error, "cu_seqlens on cuda:0");
  const AttentionCase half = on_device(in_dtype(host, DType::kBF16), device);
  Tensor o = Tensor::empty_like(half.q), lse = Tensor::empty({2, 4}, DType::kBF16, device);
  EXPECT_THROW_WITH(
      kernels::attention_forward({o, lse, half.q, half.k, half.v, half.cu, half.desc}), Error,
      "lse f32");
}

}  // namespace
}  // namespace cohort::test
