// The forward pass against a plain softmax, and the invariances of its bits.
#include "core/allocator.h"
#include "core/parallel.h"
#include "kernels/vector_math.h"
#include "tests/kernels/attention_cases.h"

namespace cohort::test {
namespace {

using kernels::Mask;

const std::vector<SequenceSpec> kShort = {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 17}, {7, 129}};
const std::vector<SequenceSpec> kLengths = {{0, 0},   {1, 1},   {2, 2},   {3, 3},  {4, 17},
                                            {5, 127}, {6, 128}, {7, 129}, {8, 300}};

std::vector<AttentionShape> all_shapes() {
  std::vector<AttentionShape> shapes;
  const int64_t dims[] = {1, 3, 8, 16, 64, 80, 128, 130, 256}, groups[] = {1, 2, 3, 7};
  for (size_t i = 0; i < std::size(dims); ++i)
    for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
      const int64_t group = dims[i] < 128 ? groups[i % 4] : 1, kv_heads = group < 3 ? 2 : 1;
      shapes.push_back(
          {.heads = kv_heads * group, .kv_heads = kv_heads, .dim = dims[i], .mask = mask});
    }
  return shapes;
}

std::string describe(const AttentionShape& s) {
  return str("D ", s.dim, ", heads ", s.heads, "/", s.kv_heads,
             s.mask == Mask::kCausal ? ", causal" : ", full", ", ", dtype_name(s.dtype));
}

// Sums of at most 300 terms of size one: a few hundred roundings in f64.
TEST(AttentionForward, EqualsAPlainSoftmax) {
  for (const AttentionShape& shape : all_shapes()) {
    SCOPED_TRACE(describe(shape));
    const bool all = shape.dim == 3 || shape.dim == 64 || shape.dim == 130;
    const AttentionCase c = make_case(shape, all ? kLengths : kShort);
    const AttentionOutput out = run_forward(c), oracle = naive_attention(c);
    EXPECT_LT(relative_error(out.o, oracle.o), 1e-13);
    EXPECT_LT(relative_error(out.lse, oracle.lse), 1e-13);
  }
}

// The inputs are f32 values, so only the arithmetic differs: 2^-24 times the square root of a few
// hundred roundings.
TEST(AttentionForward, F32IsCloseToF64) {
  for (const int64_t dim : {3, 64, 130})
    for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
      const AttentionCase single = in_f32(
          make_case({.heads = 2, .kv_heads = 1, .dim = dim, .mask = mask}, {{1, 17}, {2, 300}}));
      AttentionCase exact = single;
      for (Tensor* t : {&exact.q, &exact.k, &exact.v}) *t = t->to(DType::kF64);
      const AttentionOutput a = run_forward(single), b = run_forward(exact);
      EXPECT_LT(relative_error(a.o.to(DType::kF64), b.o), 1e-6);
      EXPECT_LT(relative_error(a.lse.to(DType::kF64), b.lse), 1e-6);
    }
}

TEST(AttentionForward, DropsProbabilitiesByTheirIndex) {
  for (const Mask mask : {Mask::kCausal, Mask::kFull}) {
    const AttentionCase c = make_case(
        {.heads = 4, .kv_heads = 2, .dim = 20, .mask = mask, .p = 0.3}, {{11, 140}, {12, 5}});
    const AttentionOutput out = run_forward(c), oracle = naive_attention(c);
    EXPECT_LT(relative_error(out.o, oracle.o), 1e-13);
    EXPECT_LT(relative_error(out.lse, oracle.lse), 1e-13);
  }
}

// Windows within a tile, across tiles, and of all keys.
constexpr int64_t kWindows[] = {1, 5, 64, 100, 128, 129, 200, 1000};

TEST(AttentionForward, AWindowHidesEarlierKeys) {
  for (const int64_t window : kWindows)
    for (const int64_t dim : {16, 130})
      for (const int64_t group : {1, 3}) {
        SCOPED_TRACE(str("window ", window, ", D ", dim, ", group ", group));
        const AttentionCase c = make_case(
            {.heads = group, .kv_heads = 1, .dim = dim, .p = dim == 16 ? 0.3 : 0, .window = window},
            kLengths);
        const AttentionOutput out = run_forward(c), oracle = naive_attention(c);
        EXPECT_LT(relative_error(out.o, oracle.o), 1e-13);
        EXPECT_LT(relative_error(out.lse, oracle.lse), 1e-13);
      }
}

// A window longer than every sequence changes nothing; and the bits of a row do not depend on keys
// before its window, not even through 0 x inf.
TEST(AttentionForward, AWindowKeepsTheBitsOfVisibleKeys) {
  for (const int64_t dim : {16, 144}) {
    AttentionCase c = make_case({.dim = dim, .dtype = DType::kF32}, {{1, 300}, {2, 40}});
    const AttentionOutput all = run_forward(c);
    c.desc.window = 300;
    EXPECT_TRUE(bit_equal(run_forward(c).o, all.o));
    c.desc.window = 90;
    const Tensor o = run_forward(c).o;
    EXPECT_FALSE(bit_equal(o, all.o));
    for (Tensor* t : {&c.k, &c.v})
      *t = t->clone(),
      t->narrow(0, 0, 150).copy_(Tensor::full({150, 2, dim}, INFINITY, DType::kF32));
    EXPECT_TRUE(bit_equal(run_forward(c).o.narrow(0, 239, 101), o.narrow(0, 239, 101)));
  }
}

// The canonical order of attention.h, one row and one head at a time, for rows from position `from`
// on.
template <class T>
AttentionOutput canonical_attention(const AttentionCase& c, int64_t from = 0) {
  AttentionOutput out{Tensor::empty_like(c.q),
                      Tensor::empty({c.q.dim(1), c.tokens()}, c.q.dtype())};
  const int64_t heads = c.q.dim(1), kv_heads = c.k.dim(1), dim = c.q.dim(2);
  const int64_t tile = kernels::attention_tile(dim);
  const T scale2 = static_cast<T>(kernels::softmax_scale(c.desc, dim) * 1.4426950408889634074);
  for (size_t s = 0; s < c.sequences.size(); ++s)
    for (int64_t i = from; i < c.sequences[s].length; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t t = c.start(s) + i;
        const T* q = c.q.data<T>() + (t * heads + h) * dim;
        const int64_t first = (c.start(s) * kv_heads + h / (heads / kv_heads)) * dim;
        std::vector<T> o(static_cast<size_t>(dim), T{0}), p(static_cast<size_t>(tile));
        std::vector<T> combined_o(static_cast<size_t>(dim), T{0});
        T m = -INFINITY, l[4] = {}, combined_m = -INFINITY, combined_l = 0;
        const int64_t end = c.shape.mask == Mask::kFull ? c.sequences[s].length : i + 1;
        const int64_t hidden = c.shape.window > 0 ? std::max<int64_t>(0, end - c.shape.window) : 0;
        const auto end_chunk = [&] {
          const T sum = (l[0] + l[1]) + (l[2] + l[3]);
          if (combined_l == 0) {
            combined_o = o, combined_m = m, combined_l = sum;
          } else {
            const T largest = std::max(combined_m, m);
            const T a = kernels::vexp2(combined_m - largest), b = kernels::vexp2(m - largest);
            combined_m = largest;
            combined_l = std::fma(sum, b, combined_l * a);
            for (size_t d = 0; d < o.size(); ++d)
              combined_o[d] = std::fma(o[d], b, combined_o[d] * a);
          }
          m = -INFINITY;
          std::fill_n(l, 4, T{0});
          std::fill(o.begin(), o.end(), T{0});
        };
        for (int64_t key0 = hidden / tile * tile; key0 < end; key0 += tile) {
          const int64_t n = std::min(tile, end - key0), begin = std::max<int64_t>(0, hidden - key0);
          T largest = -INFINITY;
          for (int64_t j = begin; j < n; ++j) {
            const T* k = c.k.data<T>() + first + (key0 + j) * kv_heads * dim;
            T score = 0;
            for (int64_t d = 0; d < dim; ++d) score = std::fma(q[d], k[d], score);
            p[static_cast<size_t>(j)] = score;
            largest = std::max(largest, score);
          }
          const T m_old = m;
          m = std::max(m, largest * scale2);
          const T alpha = kernels::vexp2(m_old - m);
          for (T& x : l) x *= alpha;
          for (T& x : o) x *= alpha;
          for (int64_t j = begin; j < n; ++j) {
            T& x = p[static_cast<size_t>(j)];
            x = kernels::vexp2(std::fma(x, scale2, -m));
            l[j % 8 / 2] += x;
            const T* v = c.v.data<T>() + first + (key0 + j) * kv_heads * dim;
            for (int64_t d = 0; d < dim; ++d) {
              T& acc = o[static_cast<size_t>(d)];
              acc = std::fma(x, v[d], acc);
            }
          }
          if ((key0 + tile) % kernels::kAttentionChunk == 0 || key0 + tile >= end) end_chunk();
        }
        for (int64_t d = 0; d < dim; ++d)
          out.o.data<T>()[(t * heads + h) * dim + d] =
              combined_o[static_cast<size_t>(d)] * (1 / combined_l);
        out.lse.data<T>()[h * c.tokens() + t] =
            std::fma(combined_m, static_cast<T>(0.69314718055994530942), std::log(combined_l));
      }
  return out;
}

TEST(AttentionForward, BitsFollowTheCanonicalOrder) {
  for (const int64_t dim : {20, 132}) {
    const AttentionCase c = make_case({.heads = 3, .kv_heads = 1, .dim = dim}, {{1, 150}, {2, 17}});
    const AttentionOutput a = run_forward(c), b = canonical_attention<double>(c);
    EXPECT_TRUE(bit_equal(a.o, b.o));
    EXPECT_TRUE(bit_equal(a.lse, b.lse));
    const AttentionOutput x = run_forward(in_f32(c)), y = canonical_attention<float>(in_f32(c));
    EXPECT_TRUE(bit_equal(x.o, y.o));
    EXPECT_TRUE(bit_equal(x.lse, y.lse));
  }
}

// Rows that see two or three chunks, and with a window some that see none of the first.
TEST(AttentionForward, ChunksAreCombinedInOrder) {
  const int64_t chunk = kernels::kAttentionChunk;
  struct Row {
    int64_t dim, length;
    Mask mask = Mask::kCausal;
    int64_t window = 0;
    double scale = 0;
  };
  for (const Row& row :
       {Row{3, chunk + 200}, Row{132, chunk + 3}, Row{2, 2 * chunk + 70},
        Row{4, chunk + 1, Mask::kFull}, Row{4, chunk + 300, Mask::kCausal, 150},
        Row{4, chunk + 130, Mask::kCausal, chunk}, Row{2, chunk + 130, {}, 0, 40}}) {
    SCOPED_TRACE(str("D ", row.dim, ", ", row.length, " tokens, window ", row.window));
    const AttentionCase c = in_f32(make_case({.heads = 1,
                                              .kv_heads = 1,
                                              .dim = row.dim,
                                              .mask = row.mask,
                                              .scale = row.scale,
                                              .window = row.window},
                                             {{1, row.length}}));
    const int64_t from = chunk - 3, count = row.length - from;
    const AttentionOutput a = run_forward(c), b = canonical_attention<float>(c, from);
    EXPECT_TRUE(bit_equal(a.o.narrow(0, from, count), b.o.narrow(0, from, count)));
    EXPECT_TRUE(
        bit_equal(a.lse.narrow(1, from, count).clone(), b.lse.narrow(1, from, count).clone()));
  }
}

TEST(AttentionForward, UsesTheGivenScale) {
  const AttentionCase c = make_case({.dim = 8, .scale = 0.7}, {{1, 20}});
  EXPECT_LT(relative_error(run_forward(c).o, naive_attention(c).o), 1e-13);
}

// Scores of several thousand: without the running maximum the exponentials overflow. The allowed
// error is the rounding of a score relative to 1: thousands times 2^-52.
TEST(AttentionForward, SurvivesLargeScores) {
  const AttentionCase c = make_case({.dim = 16, .scale = 500}, {{1, 260}});
  const AttentionOutput out = run_forward(c), oracle = naive_attention(c);
  EXPECT_LT(relative_error(out.o, oracle.o), 1e-10);
  const AttentionOutput single = run_forward(in_f32(c));
  for (const double x : single.o.to_vector<double>()) ASSERT_TRUE(std::isfinite(x));
}

// Sequences alone, and packed among others that shift them and change how rows are grouped into
// blocks.
TEST(AttentionForward, BitsDoNotDependOnOtherSequences) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const Mask mask : {Mask::kCausal, Mask::kFull})
      for (const double p : {0.0, 0.3}) {
        const AttentionShape shape{.heads = 3,
                                   .kv_heads = 1,
                                   .dim = 20,
                                   .dtype = dtype,
                                   .mask = mask,
                                   .p = p,
                                   .window = mask == Mask::kCausal && p > 0 ? 50 : 0};
        SCOPED_TRACE(describe(shape));
        const AttentionCase packed =
            make_case(shape, {{1, 3}, {2, 131}, {3, 0}, {4, 1}, {5, 70}, {6, 260}});
        const AttentionOutput all = run_forward(packed);
        for (size_t s = 0; s < packed.sequences.size(); ++s) {
          const int64_t start = packed.start(s), n = packed.sequences[s].length;
          const AttentionOutput alone = run_forward(make_case(shape, {packed.sequences[s]}));
          EXPECT_TRUE(bit_equal(alone.o, all.o.narrow(0, start, n)));
          EXPECT_TRUE(bit_equal(alone.lse, all.lse.narrow(1, start, n)));
        }
      }
}

// The bits of a causal row equal those of the sequence truncated after it.
TEST(AttentionForward, BitsDoNotDependOnLaterTokens) {
  for (const int64_t dim : {16, 144}) {
    AttentionCase c = make_case({.dim = dim, .dtype = DType::kF32}, {{1, 200}});
    const AttentionOutput whole = run_forward(c);
    for (const int64_t n : {1, 2, 7, 63, 64, 65, 127, 128, 129, 199}) {
      AttentionCase truncated = c;
      truncated.cu = Tensor::from(std::vector<int32_t>{0, static_cast<int32_t>(n)});
      for (Tensor* t : {&truncated.q, &truncated.k, &truncated.v})
        *t = t->narrow(0, 0, n).contiguous();
      EXPECT_TRUE(bit_equal(run_forward(truncated).o, whole.o.narrow(0, 0, n))) << n;
    }
    // Not even through 0 x inf.
    for (Tensor* t : {&c.k, &c.v})
      *t = t->clone(),
      t->narrow(0, 190, 10).copy_(Tensor::full({10, 2, dim}, INFINITY, c.q.dtype()));
    EXPECT_TRUE(bit_equal(run_forward(c).o.narrow(0, 0, 190), whole.o.narrow(0, 0, 190)));
  }
}

TEST(AttentionForward, TokensMayBeStrided) {
  for (const int64_t dim : {5, 64}) {
    const AttentionCase c = make_case({.heads = 6, .kv_heads = 2, .dim = dim, .dtype = DType::kF32},
                                      {{1, 40}, {2, 1}, {3, 130}});
    const AttentionOutput separate = run_forward(c), views = run_forward(merged(c));
    EXPECT_TRUE(bit_equal(separate.o, views.o) && bit_equal(separate.lse, views.lse)) << dim;
  }
}

TEST(AttentionForward, BitsDoNotDependOnThreads) {
  const int before = num_threads();
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const AttentionCase c =
        make_case({.heads = 6, .kv_heads = 2, .dim = 20, .dtype = dtype, .p = 0.1},
                  {{1, 3}, {2, 300}, {3, 0}, {4, 45}, {5, 128}});
    set_num_threads(1);
    const AttentionOutput one = run_forward(c);
    for (const int threads : {2, 3}) {
      set_num_threads(threads);
      const AttentionOutput more = run_forward(c);
      EXPECT_TRUE(bit_equal(one.o, more.o));
      EXPECT_TRUE(bit_equal(one.lse, more.lse));
    }
  }
  set_num_threads(before);
}

TEST(AttentionForward, NanInARowStaysInTheRowsThatSeeIt) {
  AttentionCase c =
      make_case({.heads = 1, .kv_heads = 1, .dim = 4, .dtype = DType::kF32}, {{1, 150}, {2, 10}});
  c.k.narrow(0, 140, 1).copy_(Tensor::full({1, 1, 4}, NAN, DType::kF32));
  const auto o = run_forward(c).o.to_vector<float>();
  for (size_t i = 0; i < o.size(); ++i)
    ASSERT_EQ(std::isnan(o[i]), i / 4 >= 140 && i / 4 < 150) << i / 4;
}

TEST(AttentionForward, NothingToDoForNoTokens) {
  const AttentionCase c = make_case({}, {{1, 0}, {2, 0}});
  EXPECT_EQ(run_forward(c).o.numel(), 0);
}

TEST(AttentionForward, ScratchScalesWithTheTileNotTheSequence) {
  const AttentionCase c =
      make_case({.heads = 1, .kv_heads = 1, .dim = 16, .dtype = DType::kF32}, {{1, 2048}});
  AttentionOutput out{Tensor::empty_like(c.q), Tensor::empty({1, 2048}, DType::kF32)};
  Allocator& memory = allocator(Device{});
  const int64_t live = memory.stats().live_bytes;
  memory.reset_peak();
  kernels::attention_forward({out.o, out.lse, c.q, c.k, c.v, c.cu, c.desc});
  // The scores would be 16 MiB.
  EXPECT_LT(memory.stats().peak_bytes - live, num_threads() * 64 * 1024);
  EXPECT_GT(memory.stats().peak_bytes - live, 0);
}

TEST(AttentionForward, SaysWhatIsWrong) {
  const AttentionCase good = make_case({.heads = 4, .kv_heads = 2, .dim = 8}, {{1, 4}, {2, 6}});
  const auto with_cu = [&](std::vector<int32_t> cu) {
    AttentionCase c = good;
    c.cu = Tensor::from(cu);
    return c;
  };
  EXPECT_THROW_WITH(run_forward(with_cu({0, 4, 9})), Error, "from 0 to 10, got 0 to 9");
  EXPECT_THROW_WITH(run_forward(with_cu({1, 4, 10})), Error, "from 0 to 10, got 1 to 10");
  EXPECT_THROW_WITH(run_forward(with_cu({0, 7, 5, 10})), Error, "got 7 before 5 at sequence 1");
  EXPECT_THROW_WITH(run_forward(with_cu({0, 14, 10})), Error, "got 14 before 10 at sequence 1");

  AttentionCase c = good;
  c.k = c.v = random_tensor({10, 3, 8}, DType::kF64, 1);
  EXPECT_THROW_WITH(run_forward(c), Error, "multiple of key heads, got 4 and 3");
  c = good;
  c.v = random_tensor({10, 2, 9}, DType::kF64, 1);
  EXPECT_THROW_WITH(run_forward(c), Error, "[attention_forward]");
  c = good;
  c.desc.window = -1;
  EXPECT_THROW_WITH(run_forward(c), Error, "window of at least 1, or 0, got -1");
  c = good;
  for (const double p : {1.0, 0.99999998}) {  // both are 1 in f32
    c.desc.dropout.p = p;
    EXPECT_THROW_WITH(run_forward(c), Error, "dropout p in [0, 1), got ");
  }
  c.desc.dropout.p = 0.5;
  EXPECT_THROW_WITH(run_forward(c), Error, "dropout.sequences");
  c = good;
  c.desc.scale = -1;
  EXPECT_THROW_WITH(run_forward(c), Error, "scale of at least 0, got -1");
}

}  // namespace
}  // namespace cohort::test
