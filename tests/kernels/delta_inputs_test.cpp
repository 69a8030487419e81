// Inputs of the gated delta rule: the convolution, the norms and the gates of packed sequences,
// over rings, and their gradients.
#include "kernels/delta_inputs.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "core/rng.h"
#include "kernels/elementwise.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::delta_inputs_test {
namespace {

using namespace test;

constexpr int64_t kHk = 2, kHv = 4, kDim = 5, kChannels = (2 * kHk + kHv) * kDim;

// Tensors of a call on packed sequences; x, b and a are columns of one matrix.
struct DeltaInputTensors : DeltaSources {
  Tensor cu_seqlens, prefixes;

  DeltaInputTensors(const std::vector<int32_t>& cu, DType dtype, uint64_t seed = 1)
      : cu_seqlens(ids(cu)) {
    // Values depend on the dtype only by rounding.
    const auto random = [&](const Shape& shape, uint64_t stream) {
      return random_tensor(shape, DType::kF32, 10 * seed + stream).to(dtype);
    };
    set_rows(random({cu.back(), kChannels + 2 * kHv + 3}, 1));
    w = random({kChannels, 4}, 2);
    a_log = random({kHv}, 3);
    dt_bias = random({kHv}, 4);
  }
  void set_rows(const Tensor& wide) {
    x = wide.narrow(1, 1, kChannels);
    b = wide.narrow(1, kChannels + 2, kHv);
    a = wide.narrow(1, kChannels + kHv + 2, kHv);
  }
  int64_t tokens() const { return x.dim(0); }
};

// Tensors of the shapes of q, k, v, g and beta.
struct DeltaOutputs : DeltaTensors {
  DeltaOutputs(int64_t tokens, DType dtype, double value = NAN)
      : DeltaTensors{.q = Tensor::full({tokens, kHk, kDim}, value, dtype),
                     .k = Tensor::full({tokens, kHk, kDim}, value, dtype),
                     .v = Tensor::full({tokens, kHv, kDim}, value, dtype),
                     .g = Tensor::full({tokens, kHv}, value, dtype),
                     .beta = Tensor::full({tokens, kHv}, value, dtype)} {}
  std::array<Tensor, 5> all() const { return {q, k, v, g, beta}; }
  DeltaOutputs rows(int64_t begin, int64_t count) const {
    DeltaOutputs out = *this;
    for (Tensor* t : {&out.q, &out.k, &out.v, &out.g, &out.beta}) *t = t->narrow(0, begin, count);
    return out;
  }
};

bool same_bits(const DeltaOutputs& a, const DeltaOutputs& b) {
  for (size_t i = 0; i < 5; ++i)
    if (!bit_equal(a.all()[i], b.all()[i])) return false;
  return true;
}
bool is_full_of(const Tensor& t, double value) {
  const auto elements = t.to_vector<double>();
  return std::ranges::all_of(
      elements, [&](double x) { return x == value || (std::isnan(x) && std::isnan(value)); });
}

DeltaInputs packed_call(const DeltaInputTensors& in, DeltaOutputs& out) {
  return {out, in, in.cu_seqlens, in.prefixes};
}
DeltaOutputs packed_outputs(const DeltaInputTensors& in) {
  DeltaOutputs out(in.tokens(), in.x.dtype());
  delta_inputs(packed_call(in, out));
  return out;
}

// The rows of sequences in a state of rings.
struct RingCall {
  Tensor slots, positions;
};
void cached_call(const DeltaInputTensors& in, const RingCall& at, Tensor& ring, DeltaOutputs& out) {
  // By token.
  std::vector<int32_t> states, positions;
  const int32_t* const cu = in.cu_seqlens.data<int32_t>();
  for (int64_t s = 0; s < at.slots.dim(0); ++s)
    for (int32_t t = cu[s]; t < cu[s + 1]; ++t) {
      states.push_back(at.slots.data<int32_t>()[s]);
      positions.push_back(at.positions.data<int32_t>()[s] + t - cu[s]);
    }
  delta_inputs_cached({ring, out, in, ids(states), ids(positions)});
}

// Gradients of all inputs, each with its mode.
struct DeltaGradients {
  Tensor dx, dw, db, da, da_log, ddt_bias;

  DeltaGradients(const DeltaInputTensors& in, double value)
      : dx(Tensor::full(in.x.shape(), value, in.x.dtype())),
        dw(Tensor::full(in.w.shape(), value, in.x.dtype())),
        db(Tensor::full(in.b.shape(), value, in.x.dtype())),
        da(Tensor::full(in.a.shape(), value, in.x.dtype())),
        da_log(Tensor::full(in.a_log.shape(), value, in.x.dtype())),
        ddt_bias(Tensor::full(in.dt_bias.shape(), value, in.x.dtype())) {}
  std::vector<Tensor*> all() { return {&dx, &dw, &db, &da, &da_log, &ddt_bias}; }
};
void backward_call(const DeltaInputTensors& in, const DeltaOutputs& d, DeltaGradients& to,
                   Grad mode = Grad::kOverwrite) {
  delta_inputs_backward({.dx = {to.dx, mode},
                         .dw = {to.dw, mode},
                         .db = {to.db, mode},
                         .da = {to.da, mode},
                         .da_log = {to.da_log, mode},
                         .ddt_bias = {to.ddt_bias, mode},
                         .dout = d,
                         .in = in,
                         .cu_seqlens = in.cu_seqlens,
                         .prefixes = in.prefixes});
}
DeltaOutputs random_gradients(int64_t tokens, DType dtype, uint64_t seed) {
  DeltaOutputs d(tokens, dtype);
  for (Tensor* t : {&d.q, &d.k, &d.v, &d.g, &d.beta})
    *t = random_tensor(t->shape(), DType::kF32, ++seed).to(dtype);
  return d;
}

// The definition, one sequence of tokens at a time, in f64. Without shared prefixes.
std::array<std::vector<double>, 5> expected_outputs(const DeltaInputTensors& in) {
  const auto x = in.x.to_vector<double>(), w = in.w.to_vector<double>(),
             b = in.b.to_vector<double>(), a = in.a.to_vector<double>(),
             a_log = in.a_log.to_vector<double>(), dt_bias = in.dt_bias.to_vector<double>();
  const auto cu = in.cu_seqlens.to_vector<int32_t>();
  std::array<std::vector<double>, 5> out;
  for (size_t s = 0; s + 1 < cu.size(); ++s)
    for (int64_t t = cu[s]; t < cu[s + 1]; ++t) {
      std::vector<double> c(kChannels);
      for (int64_t i = 0; i < kChannels; ++i) {
        double sum = 0;
        for (int64_t back = 0; back < 4 && t - back >= cu[s]; ++back)
          sum += w[static_cast<size_t>(i * 4 + 3 - back)] *
                 x[static_cast<size_t>((t - back) * kChannels + i)];
        c[static_cast<size_t>(i)] = sum / (1 + std::exp(-sum));
      }
      for (size_t h = 0; h < 2 * kHk; ++h) {
        double squares = 1e-6;
        for (size_t i = 0; i < kDim; ++i) squares += c[h * kDim + i] * c[h * kDim + i];
        for (size_t i = 0; i < kDim; ++i)
          out[h / kHk].push_back(c[h * kDim + i] / std::sqrt(squares));
      }
      out[2].insert(out[2].end(), c.begin() + 2 * kHk * kDim, c.end());
      for (size_t h = 0; h < kHv; ++h) {
        const double z = a[static_cast<size_t>(t) * kHv + h] + dt_bias[h];
        out[3].push_back(-std::exp(a_log[h]) * (z > 20 ? z : std::log1p(std::exp(z))));
        out[4].push_back(1 / (1 + std::exp(-b[static_cast<size_t>(t) * kHv + h])));
      }
    }
  return out;
}

TEST(DeltaInputs, AreThoseOfAPlainLoop) {
  for (const std::vector<int32_t>& cu : std::vector<std::vector<int32_t>>{
           {0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 65}, {0, 0, 3, 3, 5, 70, 71, 71}, {0}, {0, 0}})
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      const DeltaInputTensors in(cu, dtype);
      const auto expected = expected_outputs(in);
      const DeltaOutputs out = packed_outputs(in);
      for (size_t i = 0; i < 5; ++i) {
        const auto got = out.all()[i].to_vector<double>();
        ASSERT_EQ(got.size(), expected[i].size());
        for (size_t k = 0; k < got.size(); ++k)
          ASSERT_NEAR(got[k], expected[i][k], dtype == DType::kF64 ? 1e-14 : 3e-6)
              << "output " << i << "[" << k << "] of " << cu.back() << " tokens";
      }
    }
}

// The chain of the contract, in its dtype, to the bit.
TEST(DeltaInputs, TheConvolutionIsAnFmaChainFromTheOldestInput) {
  const DeltaInputTensors in({0, 6}, DType::kF32);
  const DeltaOutputs out = packed_outputs(in);
  const auto x = in.x.to_vector<float>(), w = in.w.to_vector<float>();
  for (size_t c = 2 * kHk * kDim; c < kChannels; ++c) {
    float sum = 0;
    for (size_t tap = 0; tap < 4; ++tap)
      sum = std::fma(w[c * 4 + tap], x[(2 + tap) * kChannels + c], sum);
    EXPECT_EQ(out.v.to_vector<float>()[5 * kHv * kDim + c - 2 * kHk * kDim], Silu::forward(sum));
  }
}

TEST(DeltaInputs, SoftplusAboveTwentyIsItsArgument) {
  DeltaInputTensors in({0, 5}, DType::kF64);
  in.a_log.zero_();
  in.dt_bias.fill_(1);
  const double at[] = {19, std::nextafter(19.0, 20.0), 24, 1000, -800};
  for (int64_t t = 0; t < 5; ++t) in.a.narrow(0, t, 1).fill_(at[t]);
  const DeltaOutputs out = packed_outputs(in);
  const auto g = out.g.to_vector<double>();
  EXPECT_EQ(g[0], -std::log1p(std::exp(20.0)));
  EXPECT_LT(g[0], -20 - 1e-9);
  EXPECT_EQ(g[kHv], -(at[1] + 1));
  EXPECT_EQ(g[2 * kHv], -25);
  EXPECT_EQ(g[3 * kHv], -1001);
  EXPECT_EQ(g[4 * kHv], 0);
  DeltaGradients d(in, NAN);
  backward_call(in, DeltaOutputs(5, DType::kF64, 1), d);
  const auto da = d.da.to_vector<double>();
  EXPECT_GT(da[0], -1);
  EXPECT_EQ(da[kHv], -1);
  EXPECT_EQ(da[3 * kHv], -1);
  EXPECT_EQ(da[4 * kHv], 0);
}

// Sequences of a packed call, computed in pieces over rings: in any order, with idle rows among
// them, and with up to five rows that turn out to be wrong after a piece.
class RandomPieces {
 public:
  RandomPieces(uint64_t seed, DType dtype)
      : rng_(seed, 1), dtype_(dtype), packed_(boundaries(), dtype, seed) {
    slots_.resize(sequences() + 2);
    std::iota(slots_.begin(), slots_.end(), 0);
    for (size_t i = slots_.size(); i > 1; --i) std::swap(slots_[i - 1], slots_[below(i)]);
    // The rings are one part of a wider state.
    const int64_t count = static_cast<int64_t>(slots_.size());
    ring_ = Tensor::full({count, 11, kChannels}, NAN, dtype).narrow(1, 2, 8);
  }

  void run() {
    const DeltaOutputs expected = packed_outputs(packed_);
    done_.assign(sequences(), 0);
    while (!finished()) {
      start_call();
      const DeltaOutputs got = call();
      for (const Piece& piece : pieces_) {
        const DeltaOutputs rows = got.rows(piece.row, piece.count);
        if (piece.sequence < 0)
          EXPECT_TRUE(same_bits(rows, DeltaOutputs(piece.count, dtype_, 0)));
        else
          ASSERT_TRUE(same_bits(rows, expected.rows(piece.token, piece.count)))
              << "sequence " << piece.sequence << " at token " << piece.token;
      }
    }
    for (size_t s = sequences(); s < slots_.size(); ++s)
      EXPECT_TRUE(is_full_of(ring_.select(0, slots_[s]), NAN)) << "an unused ring was written";
  }

 private:
  struct Piece {
    int64_t sequence, row, count, token;
  };

  size_t below(size_t n) { return static_cast<size_t>(rng_.below(static_cast<int64_t>(n))); }
  size_t sequences() const { return static_cast<size_t>(packed_.cu_seqlens.dim(0)) - 1; }
  int64_t begin(size_t s) const { return packed_.cu_seqlens.data<int32_t>()[s]; }
  int64_t length(size_t s) const { return begin(s + 1) - begin(s); }
  std::vector<int32_t> boundaries() {
    std::vector<int32_t> cu{0};
    for (int64_t s = rng_.between(1, 4); s > 0; --s)
      cu.push_back(cu.back() + static_cast<int32_t>(rng_.between(0, 25)));
    return cu;
  }
  bool finished() const {
    for (size_t s = 0; s < sequences(); ++s)
      if (done_[s] < length(s)) return false;
    return true;
  }

  void start_call() {
    pieces_.clear();
    rows_.clear();
    slots_of_call_.clear();
    positions_.clear();
    cu_ = {0};
    std::vector<size_t> order(sequences());
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[below(i)]);
    for (const size_t s : order) {
      if (rng_.below(4) == 0) add_idle();
      if (rng_.below(3) == 0) continue;
      const int64_t most = rng_.below(3) == 0 ? 20 : rng_.between(0, 3);
      const int64_t count = std::min(most, length(s) - done_[s]);
      slots_of_call_.push_back(slots_[s]);
      positions_.push_back(static_cast<int32_t>(done_[s]));
      add_piece(static_cast<int64_t>(s), count, begin(s) + done_[s]);
      done_[s] += count;
      const int64_t wrong = rng_.below(3) == 0 ? rng_.between(1, 5) : 0;
      for (int64_t i = 0; i < wrong; ++i) rows_.push_back(rng_.below(packed_.tokens()));
      cu_.push_back(static_cast<int32_t>(rows_.size()));
    }
  }
  void add_idle() {
    slots_of_call_.push_back(-1 - static_cast<int32_t>(rng_.below(2)));
    positions_.push_back(static_cast<int32_t>(rng_.between(-1, 9)));
    add_piece(-1, rng_.between(0, std::min<int64_t>(2, packed_.tokens())), 0);
    cu_.push_back(static_cast<int32_t>(rows_.size()));
  }
  void add_piece(int64_t sequence, int64_t count, int64_t token) {
    pieces_.push_back({sequence, static_cast<int64_t>(rows_.size()), count, token});
    for (int64_t i = 0; i < count; ++i) rows_.push_back(token + i);
  }
  DeltaOutputs call() {
    DeltaInputTensors in = packed_;
    const int64_t count = static_cast<int64_t>(rows_.size());
    in.set_rows(Tensor::full({count, kChannels + 2 * kHv + 3}, NAN, dtype_));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = rows_[static_cast<size_t>(i)];
      for (const auto& [to, from] :
           {std::pair(in.x, packed_.x), std::pair(in.b, packed_.b), std::pair(in.a, packed_.a)})
        to.narrow(0, i, 1).copy_(from.narrow(0, token, 1));
    }
    in.cu_seqlens = ids(cu_);
    DeltaOutputs out(count, dtype_);
    cached_call(in, {ids(slots_of_call_), ids(positions_)}, ring_, out);
    return out;
  }

  Rng rng_;
  DType dtype_;
  DeltaInputTensors packed_;
  std::vector<int32_t> slots_;
  Tensor ring_;
  std::vector<int64_t> done_;  // tokens of each sequence
  // The next call.
  std::vector<Piece> pieces_;
  std::vector<int64_t> rows_;  // their tokens
  std::vector<int32_t> slots_of_call_, positions_, cu_;
};

TEST(DeltaInputs, PiecesOverRingsHaveTheBitsOfThePackedCall) {
  for (const DType dtype : {DType::kF64, DType::kF32})
    for (uint64_t seed = 0; seed < 1000 && !HasFatalFailure(); ++seed) {
      SCOPED_TRACE(str("seed ", seed, ", ", dtype_name(dtype)));
      RandomPieces(seed, dtype).run();
    }
}

TEST(DeltaInputs, ARingHasTheInputsOfTheLastEightPositions) {
  const DeltaInputTensors in({0, 13}, DType::kF32);
  Tensor ring = Tensor::full({2, 8, kChannels}, 7, DType::kF32);
  DeltaOutputs out(13, DType::kF32);
  cached_call(in, {ids({1}), ids({0})}, ring, out);
  EXPECT_TRUE(is_full_of(ring.select(0, 0), 7));
  for (int64_t p = 5; p < 13; ++p)
    EXPECT_TRUE(
        bit_equal(ring.select(0, 1).select(0, p % 8).contiguous(), in.x.select(0, p).contiguous()))
        << p;
}

// Sequences that share a prefix, and the same ones repeating it: `from` has the packed token of
// each token of the repeated ones, and `repeats` is true for those in a copy of the prefix.
struct SharedInputs {
  DeltaInputTensors shared, repeated;
  std::vector<int64_t> from;
  std::vector<bool> repeats;

  SharedInputs(int32_t before, int32_t prefix, const std::vector<int32_t>& lengths, DType dtype)
      : shared(offsets({before, prefix}, lengths, 0), dtype, 3),
        repeated(offsets({before, prefix}, lengths, prefix), dtype, 3) {
    const auto add = [&](int64_t begin, int64_t count, bool is_copy) {
      for (int64_t t = begin; t < begin + count; ++t) {
        from.push_back(t);
        repeats.push_back(is_copy);
      }
    };
    add(0, before + prefix, false);
    std::vector<int32_t> prefixes{0, 0, 0, 0};
    int64_t next = before + prefix;
    for (const int32_t length : lengths) {
      add(before, prefix, true);
      add(next, length, false);
      next += length;
      prefixes.insert(prefixes.end(), {before, prefix});
    }
    shared.prefixes = Tensor::from(prefixes, {static_cast<int64_t>(lengths.size()) + 2, 2});
    for (size_t t = 0; t < from.size(); ++t)
      for (const auto& [to, source] :
           {std::pair(repeated.x, shared.x), std::pair(repeated.b, shared.b),
            std::pair(repeated.a, shared.a)})
        to.narrow(0, static_cast<int64_t>(t), 1).copy_(source.narrow(0, from[t], 1));
  }
  static std::vector<int32_t> offsets(std::vector<int32_t> first,
                                      const std::vector<int32_t>& lengths, int32_t extra) {
    for (const int32_t length : lengths) first.push_back(length + extra);
    std::vector<int32_t> cu{0};
    for (const int32_t length : first) cu.push_back(cu.back() + length);
    return cu;
  }
};

const std::vector<std::pair<int32_t, std::vector<int32_t>>> kSharedCases = {
    {1, {1, 2, 5}}, {2, {4, 0, 1}}, {3, {1, 1}}, {10, {2, 3, 1, 7}}};

TEST(DeltaInputs, SharedPrefixesHaveTheBitsOfRepeatedOnes) {
  for (const DType dtype : {DType::kF64, DType::kF32})
    for (const auto& [prefix, lengths] : kSharedCases)
      for (const int32_t before : {0, 3}) {
        SCOPED_TRACE(str("prefix of ", prefix, " tokens after ", before));
        const SharedInputs in(before, prefix, lengths, dtype);
        const DeltaOutputs shared = packed_outputs(in.shared),
                           repeated = packed_outputs(in.repeated);
        for (size_t t = 0; t < in.from.size(); ++t)
          ASSERT_TRUE(
              same_bits(repeated.rows(static_cast<int64_t>(t), 1), shared.rows(in.from[t], 1)))
              << "token " << t;
      }
}

TEST(DeltaInputs, GradientsOfSharedPrefixesAreThoseOfRepeatedOnes) {
  for (const auto& [prefix, lengths] : kSharedCases) {
    const SharedInputs in(2, prefix, lengths, DType::kF64);
    const DeltaOutputs d = random_gradients(in.shared.tokens(), DType::kF64, 70);
    DeltaOutputs d_repeated(in.repeated.tokens(), DType::kF64, 0);
    for (size_t t = 0; t < in.from.size(); ++t)
      for (size_t i = 0; i < 5; ++i)
        if (!in.repeats[t])
          d_repeated.all()[i]
              .narrow(0, static_cast<int64_t>(t), 1)
              .copy_(d.all()[i].narrow(0, in.from[t], 1));
    DeltaGradients shared(in.shared, NAN), repeated(in.repeated, NAN);
    backward_call(in.shared, d, shared);
    backward_call(in.repeated, d_repeated, repeated);
    DeltaGradients sums(in.shared, 0);
    for (const auto& [to, source] :
         {std::pair(sums.dx, repeated.dx), std::pair(sums.db, repeated.db),
          std::pair(sums.da, repeated.da)}) {
      double* const sum = Tensor(to).data<double>();
      const auto terms = source.to_vector<double>();
      const int64_t cols = to.cols();
      for (size_t i = 0; i < terms.size(); ++i)
        sum[in.from[i / static_cast<size_t>(cols)] * cols + static_cast<int64_t>(i) % cols] +=
            terms[i];
    }
    EXPECT_LE(relative_error(shared.dx, sums.dx), 1e-12);
    EXPECT_LE(relative_error(shared.db, sums.db), 1e-12);
    EXPECT_LE(relative_error(shared.da, sums.da), 1e-12);
    EXPECT_LE(relative_error(shared.dw, repeated.dw), 1e-12);
    EXPECT_LE(relative_error(shared.da_log, repeated.da_log), 1e-12);
    EXPECT_LE(relative_error(shared.ddt_bias, repeated.ddt_bias), 1e-12);
  }
}

// Sequences of several lengths, among them an empty one and ones with a prefix of two tokens.
DeltaInputTensors gradient_case() {
  DeltaInputTensors in({0, 1, 6, 6, 8, 9, 13}, DType::kF64, 5);
  in.prefixes = Tensor::from(std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0, 6, 2, 6, 2}, {6, 2});
  in.x = in.x.clone();
  in.b = in.b.clone();
  in.a = in.a.clone();
  in.a.data<double>()[9] = 25;
  return in;
}

TEST(DeltaInputs, GradientsEqualDifferences) {
  const DeltaInputTensors in = gradient_case();
  const DeltaOutputs d = random_gradients(in.tokens(), DType::kF64, 80);
  const auto loss = [&] {
    const DeltaOutputs out = packed_outputs(in);
    double sum = 0;
    for (size_t i = 0; i < 5; ++i) sum += dot(out.all()[i], d.all()[i]);
    return sum;
  };
  DeltaGradients got(in, NAN);
  backward_call(in, d, got);
  expect_gradient(in.x, got.dx, loss, "dx");
  expect_gradient(in.w, got.dw, loss, "dw");
  expect_gradient(in.b, got.db, loss, "db");
  expect_gradient(in.a, got.da, loss, "da");
  expect_gradient(in.a_log, got.da_log, loss, "da_log");
  expect_gradient(in.dt_bias, got.ddt_bias, loss, "ddt_bias");

  DeltaGradients accumulated(in, 3);
  backward_call(in, d, accumulated, Grad::kAccumulate);
  for (size_t i = 0; i < 6; ++i) {
    const auto sum = accumulated.all()[i]->to_vector<double>(),
               term = got.all()[i]->to_vector<double>();
    for (size_t k = 0; k < sum.size(); ++k)
      EXPECT_NEAR(sum[k], 3 + term[k], 1e-12) << "gradient " << i << "[" << k << "]";
  }
}

TEST(DeltaInputs, GradientsMayBeColumnsOrMissing) {
  const DeltaInputTensors in = gradient_case();
  const DeltaOutputs d = random_gradients(in.tokens(), DType::kF64, 90);
  DeltaGradients expected(in, NAN), columns(in, NAN);
  backward_call(in, d, expected);
  const Tensor wide = Tensor::full({in.tokens(), kChannels + 2 * kHv + 3}, 7, DType::kF64);
  columns.dx = wide.narrow(1, 1, kChannels);
  columns.db = wide.narrow(1, kChannels + 2, kHv);
  columns.da = wide.narrow(1, kChannels + kHv + 2, kHv);
  backward_call(in, d, columns);
  for (size_t i = 0; i < 6; ++i)
    EXPECT_TRUE(bit_equal(columns.all()[i]->contiguous(), *expected.all()[i])) << i;
  for (const int64_t column : {int64_t{0}, kChannels + 1, kChannels + 2 * kHv + 2})
    EXPECT_TRUE(is_full_of(wide.narrow(1, column, 1), 7));
  for (size_t wanted = 0; wanted < 6; ++wanted) {
    DeltaGradients one(in, NAN);
    for (size_t i = 0; i < 6; ++i)
      if (i != wanted) *one.all()[i] = Tensor();
    backward_call(in, d, one);
    EXPECT_TRUE(bit_equal(*one.all()[wanted], *expected.all()[wanted])) << wanted;
  }
}

TEST(DeltaInputs, GradientsInF32AreCloseToThoseInF64) {
  const std::vector<int32_t> cu{0, 40, 300};
  const DeltaInputTensors in(cu, DType::kF32), wide(cu, DType::kF64);
  DeltaGradients got(in, NAN), expected(wide, NAN);
  backward_call(in, random_gradients(300, DType::kF32, 91), got);
  backward_call(wide, random_gradients(300, DType::kF64, 91), expected);
  for (size_t i = 0; i < 6; ++i)
    EXPECT_LE(relative_error(got.all()[i]->to(DType::kF64), *expected.all()[i]), kF32Tolerance)
        << i;
}

TEST(DeltaInputs, DoNotDependOnTheNumberOfThreads) {
  const DeltaInputTensors in({0, 700, 1500}, DType::kF32);
  const DeltaOutputs d = random_gradients(1500, DType::kF32, 92);
  expect_thread_invariant([&] {
    const DeltaOutputs out = packed_outputs(in);
    DeltaGradients got(in, NAN);
    backward_call(in, d, got);
    return std::vector{out.q,  out.k,  out.v,  out.g,      out.beta,    got.dx,
                       got.dw, got.db, got.da, got.da_log, got.ddt_bias};
  });
}

TEST(DeltaInputs, ANaNReachesNoOtherSequence) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const DeltaInputTensors clean({0, 6, 9, 14}, dtype);
    DeltaInputTensors in = clean;
    in.set_rows(Tensor::full({14, kChannels + 2 * kHv + 3}, NAN, dtype));
    for (const auto& [begin, count] : {std::pair(0, 6), std::pair(9, 5)})
      for (const auto& [to, from] :
           {std::pair(in.x, clean.x), std::pair(in.b, clean.b), std::pair(in.a, clean.a)})
        to.narrow(0, begin, count).copy_(from.narrow(0, begin, count));
    const DeltaOutputs expected = packed_outputs(clean), got = packed_outputs(in);
    DeltaOutputs cached(14, dtype), d = random_gradients(14, dtype, 93);
    Tensor ring = Tensor::full({3, 8, kChannels}, NAN, dtype);
    cached_call(in, {ids({2, 0, 1}), ids({0, 0, 0})}, ring, cached);
    DeltaGradients expected_d(clean, NAN), got_d(in, NAN);
    backward_call(clean, d, expected_d);
    for (const Tensor& t : d.all()) t.narrow(0, 6, 3).fill_(NAN);
    backward_call(in, d, got_d);
    for (const auto& [begin, count] : {std::pair(0, 6), std::pair(9, 5)}) {
      EXPECT_TRUE(same_bits(got.rows(begin, count), expected.rows(begin, count)));
      EXPECT_TRUE(same_bits(cached.rows(begin, count), expected.rows(begin, count)));
      for (const size_t i : {0, 2, 3})
        EXPECT_TRUE(bit_equal(got_d.all()[i]->narrow(0, begin, count),
                              expected_d.all()[i]->narrow(0, begin, count)));
    }
    for (const Tensor& t : got.all()) EXPECT_TRUE(is_full_of(t.narrow(0, 6, 3), NAN));
  }
}

// Calls with one wrong argument each, which write nothing.
TEST(DeltaInputs, RefuseWhatTheyDoNotSupport) {
  const DeltaInputTensors good({0, 3, 5}, DType::kF32);
  const auto bad = [&](const std::function<void(DeltaInputTensors&)>& change) {
    DeltaInputTensors in = good;
    change(in);
    return in;
  };
  const auto expect_packed = [](const DeltaInputTensors& in, const char* message) {
    DeltaOutputs out(5, DType::kF32, 7), d(5, DType::kF32, 1);
    EXPECT_THROW_WITH(delta_inputs(packed_call(in, out)), Error, message);
    for (const Tensor& t : out.all()) EXPECT_TRUE(is_full_of(t, 7)) << message;
    DeltaGradients gradients(DeltaInputTensors({0, 5}, DType::kF32), 7);
    EXPECT_THROW_WITH(backward_call(in, d, gradients), Error, message);
    for (const Tensor* t : gradients.all()) EXPECT_TRUE(is_full_of(*t, 7)) << message;
  };
  const auto tensor = [](const Shape& shape, DType dtype = DType::kF32) {
    return Tensor::zeros(shape, dtype);
  };
  expect_packed(bad([&](auto& in) { in.x = tensor({5, kChannels + 1}); }), "expected w");
  expect_packed(bad([&](auto& in) {
                  in.x = tensor({5, kChannels + 1});
                  in.w = tensor({kChannels + 1, 4});
                }),
                "expected x [T, 2 Hk D + Hv D]");
  expect_packed(bad([&](auto& in) { in.x = tensor({4, kChannels}); }), "expected b");
  expect_packed(bad([&](auto& in) { in.x = tensor({5, kChannels}, DType::kF64); }), "expected w");
  expect_packed(bad([&](auto& in) { in.w = tensor({kChannels, 3}); }), "expected w");
  expect_packed(bad([&](auto& in) { in.a = tensor({5, kHv + 1}); }), "expected a");
  expect_packed(bad([&](auto& in) { in.b = tensor({5, kHv}, DType::kF64); }), "expected b");
  expect_packed(bad([&](auto& in) { in.a_log = tensor({kHv}, DType::kF64); }), "expected a_log");
  expect_packed(bad([&](auto& in) { in.dt_bias = tensor({1}); }), "expected dt_bias");
  expect_packed(bad([&](auto& in) { in.dt_bias = Tensor(); }), "expected dt_bias");
  expect_packed(bad([&](auto& in) { in.cu_seqlens = tensor({3}); }), "expected cu_seqlens");
  expect_packed(bad([&](auto& in) {
                  in.prefixes = tensor({3, 2}, DType::kI32);
                }),
                "expected prefixes");
  for (const std::vector<int32_t>& cu :
       std::vector<std::vector<int32_t>>{{0, 3, 4}, {1, 3, 5}, {0, 6, 5}, {0, 3, 6}})
    expect_packed(bad([&](auto& in) { in.cu_seqlens = ids(cu); }), "cu_seqlens");
  for (const std::vector<int32_t>& prefixes :
       std::vector<std::vector<int32_t>>{{0, 1, 0, 0}, {0, 0, 0, 2}, {0, 0, 1, 2}, {0, 0, 0, -1}})
    expect_packed(bad([&](auto& in) {
                    in.prefixes = Tensor::from(prefixes, {2, 2});
                  }),
                  "expected the prefix of sequence");

  const auto expect_cached = [&](const DeltaInputTensors& in, const RingCall& at, Tensor ring,
                                 const char* message) {
    DeltaOutputs out(5, DType::kF32, 7);
    EXPECT_THROW_WITH(cached_call(in, at, ring, out), Error, message);
    for (const Tensor& t : out.all()) EXPECT_TRUE(is_full_of(t, 7)) << message;
    EXPECT_TRUE(is_full_of(ring, 0)) << message;
  };
  const RingCall at{ids({1, 0}), ids({0, 4})};
  const Tensor ring = tensor({2, 8, kChannels});
  expect_cached(good, at, tensor({2, 7, kChannels}), "expected ring");
  expect_cached(good, at, tensor({2, 8, kChannels}, DType::kF64), "expected ring");
  expect_cached(good, {ids({1, 2}), ids({0, 4})}, ring, "has state 2 of 2");
  expect_cached(good, {ids({1, 1}), ids({0, 4})}, ring, "expected adjacent tokens of state 1");
  expect_cached(bad([&](auto& in) { in.w = tensor({kChannels, 3}); }), at, ring, "expected w");

  DeltaOutputs out(5, DType::kF32, 7);
  out.beta = tensor({5, kHv}, DType::kF64);
  EXPECT_THROW_WITH(delta_inputs(packed_call(good, out)), Error, "expected beta");
  EXPECT_TRUE(is_full_of(out.q, 7));
  DeltaGradients gradients(good, 7);
  gradients.ddt_bias = tensor({1});
  EXPECT_THROW_WITH(backward_call(good, DeltaOutputs(5, DType::kF32, 1), gradients), Error,
                    "expected ddt_bias");
  EXPECT_TRUE(is_full_of(gradients.dx, 7));
}

TEST(DeltaInputs, OtherHeadsAreRefusedOnGpus) {
  DeltaInputTensors in({0, 2}, DType::kBF16);
  DeltaOutputs out(2, DType::kBF16);
  const auto on_gpu = [](Tensor& t, DType dtype) {
    t = Tensor::without_elements(t.shape(), dtype, Device::cuda(0));
  };
  for (Tensor* t : {&in.x, &in.w, &in.b, &in.a, &out.q, &out.k, &out.v}) on_gpu(*t, DType::kBF16);
  for (Tensor* t : {&in.a_log, &in.dt_bias, &out.g, &out.beta}) on_gpu(*t, DType::kF32);
  on_gpu(in.cu_seqlens, DType::kI32);
  EXPECT_THROW_WITH(delta_inputs(packed_call(in, out)), Error,
                    "expected heads of 64 or 128 on a GPU");
}

}  // namespace
}  // namespace cohort::kernels::delta_inputs_test
