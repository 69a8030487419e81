#include <numeric>

#include "kernels/vector_math.h"
#include "tests/kernels/gated_delta_cases.h"

namespace cohort::kernels {
namespace {

using namespace gated_delta_cases;
using test::random_tensor;

// The recurrence of the definition, in f64.
std::vector<double> recurrence(const Inputs& in, int64_t begin, int64_t end, int64_t head) {
  const int64_t heads = in.v.dim(1), key_heads = in.k.dim(1), d = in.v.dim(2),
                key_head = head / (heads / key_heads);
  const auto q = in.q.to_vector<double>(), k = in.k.to_vector<double>(),
             v = in.v.to_vector<double>(), g = in.g.to_vector<double>(),
             beta = in.beta.to_vector<double>();
  std::vector<double> s(static_cast<size_t>(d * d)), out;
  for (int64_t t = begin; t < end; ++t) {
    const auto at = [&](const std::vector<double>& x, int64_t of, int64_t h, int64_t j) {
      return x[static_cast<size_t>((t * of + h) * d + j)];
    };
    const double decay = std::exp(g[static_cast<size_t>(t * heads + head)]);
    for (double& x : s) x *= decay;
    std::vector<double> u(static_cast<size_t>(d));
    for (int64_t j = 0; j < d; ++j) {
      double read = 0;
      for (int64_t a = 0; a < d; ++a)
        read += at(k, key_heads, key_head, a) * s[static_cast<size_t>(a * d + j)];
      u[static_cast<size_t>(j)] =
          beta[static_cast<size_t>(t * heads + head)] * (at(v, heads, head, j) - read);
    }
    for (int64_t a = 0; a < d; ++a)
      for (int64_t j = 0; j < d; ++j)
        s[static_cast<size_t>(a * d + j)] +=
            at(k, key_heads, key_head, a) * u[static_cast<size_t>(j)];
    for (int64_t j = 0; j < d; ++j) {
      double o = 0;
      for (int64_t a = 0; a < d; ++a)
        o += at(q, key_heads, key_head, a) * s[static_cast<size_t>(a * d + j)];
      out.push_back(delta_scale(in.desc, d) * o);
    }
  }
  return out;
}

TEST(GatedDelta, IsTheRecurrence) {
  for (const auto& [dtype, tolerance] : {std::pair(DType::kF64, 1e-13), {DType::kF32, 2e-5}})
    for (const int32_t length : {1, 63, 64, 65, 130, 200})
      for (const auto& [key_heads, heads, dim] :
           {std::array<int64_t, 3>{1, 1, 5}, {2, 4, 16}, {1, 3, 7}}) {
        Inputs in = make_inputs({length, 3, 0, 70}, key_heads, heads, dim, dtype);
        if (length == 65) in.desc.scale = 0.7;
        const auto o = in.run().to_vector<double>();
        const auto ends = in.cu_seqlens.to_vector<int64_t>();
        for (size_t s = 0; s + 1 < ends.size(); ++s)
          for (int64_t head = 0; head < heads; ++head) {
            const auto expected = recurrence(in, ends[s], ends[s + 1], head);
            for (size_t i = 0; i < expected.size(); ++i) {
              const int64_t t = ends[s] + static_cast<int64_t>(i) / dim;
              ASSERT_NEAR(
                  o[static_cast<size_t>((t * heads + head) * dim) + i % static_cast<size_t>(dim)],
                  expected[i], tolerance)
                  << dtype_name(dtype) << ", sequence " << s << ", token " << t - ends[s];
            }
          }
      }
}

TEST(GatedDelta, PiecesHaveTheBitsOfTheWhole) {
  Rng rng(5, rng_stream(kTestPurpose, 1));
  int pieces = 0;
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (int round = 0; round < 250; ++round) {
      Inputs in =
          make_inputs(piece_lengths(rng), 1, 2, 4, dtype, static_cast<uint64_t>(10 * round + 1));
      if (round % 2 == 1) in.desc.scale = 0.7;
      ASSERT_NO_FATAL_FAILURE(check_pieces(in, {}, rng, pieces)) << "round " << round;
    }
  EXPECT_GT(pieces, 10000);
}

TEST(GatedDelta, SignsOfZeroAreThoseOfTheWhole) {
  Rng rng(5, rng_stream(kTestPurpose, 5));
  int pieces = 0;
  for (int round = 0; round < 20; ++round)
    ASSERT_NO_FATAL_FAILURE(check_pieces(underflowing_inputs(DType::kF32), {}, rng, pieces));
}

TEST(GatedDelta, SharedPrefixesHaveTheBitsOfRepeatedOnes) {
  for (const DType dtype : {DType::kF32, DType::kF64})
    for (const int32_t prompt : {1, 40, 63, 64, 65, 128, 150}) {
      const Forked forked = make_forked(prompt, 1, 2, 6, dtype);
      SCOPED_TRACE(str("a prefix of ", prompt));
      ASSERT_NO_FATAL_FAILURE(
          expect_same_tokens(forked, forked.shared.run(), forked.repeated.run()));
    }
}

TEST(GatedDelta, GradientsOfSharedPrefixesAreSumsOfRepeatedOnes) {
  for (const int32_t prompt : {1, 40, 63, 64, 65, 128, 150}) {
    const Forked forked = make_forked(prompt, 2, 4, 6, DType::kF64);
    const Tensor dout = random_tensor(forked.shared.v.shape(), DType::kF64, 9);
    Tensor repeated_dout = Tensor::zeros(forked.repeated.v.shape(), DType::kF64);
    std::vector<bool> seen(static_cast<size_t>(forked.shared.tokens()));
    for (size_t t = 0; t < forked.shared_of.size(); ++t) {
      const auto from = static_cast<size_t>(forked.shared_of[t]);
      if (!seen[from])  // the loss has a prompt's own tokens once
        repeated_dout.narrow(0, static_cast<int64_t>(t), 1)
            .copy_(dout.narrow(0, forked.shared_of[t], 1));
      seen[from] = true;
    }
    Gradients shared = backward(forked.shared, dout),
              repeated = backward(forked.repeated, repeated_dout);
    for (size_t i = 0; i < 5; ++i) {
      const auto parts = repeated.all()[i]->to_vector<double>(),
                 whole = shared.all()[i]->to_vector<double>();
      const size_t row = whole.size() / seen.size();
      std::vector<double> sums(whole.size());
      for (size_t t = 0; t < forked.shared_of.size(); ++t)
        for (size_t j = 0; j < row; ++j)
          sums[static_cast<size_t>(forked.shared_of[t]) * row + j] += parts[t * row + j];
      for (size_t j = 0; j < sums.size(); ++j)
        ASSERT_NEAR(whole[j], sums[j], 1e-12) << prompt << ", gradient " << i << ", element " << j;
    }
  }
}

void check_gradients(Inputs in, const std::string& what) {
  if (in.tokens() % 2 == 1) in.desc.scale = 0.7;
  for (int64_t t = 0; t < in.tokens(); t += 5) in.beta.narrow(0, t, 1).zero_();
  const Tensor dout = random_tensor(in.v.shape(), DType::kF64, 9);
  const auto weights = dout.to_vector<double>();
  const auto loss = [&] {
    const auto o = in.run().to_vector<double>();
    return std::inner_product(o.begin(), o.end(), weights.begin(), 0.0);
  };
  Gradients gradients = backward(in, dout), added = backward(in, dout, Grad::kAccumulate);
  Rng rng(3, rng_stream(kTestPurpose, 2));
  const std::array<Tensor*, 5> inputs = {&in.q, &in.k, &in.v, &in.g, &in.beta};
  for (size_t i = 0; i < 5; ++i) {
    const auto values = gradients.all()[i]->to_vector<double>(),
               sums = added.all()[i]->to_vector<double>();
    for (size_t j = 0; j < values.size(); ++j) ASSERT_NEAR(sums[j], values[j] + 1, 1e-12);
    double* const x = inputs[i]->data<double>();
    for (int sample = 0; sample < 40; ++sample) {
      const auto j = static_cast<size_t>(rng.uniform() * static_cast<double>(values.size()));
      const double before = x[j], step = 1e-5;
      x[j] = before + step;
      const double above = loss();
      x[j] = before - step;
      const double below = loss();
      x[j] = before;
      ASSERT_NEAR(values[j], (above - below) / (2 * step), 1e-7 * (1 + std::abs(values[j])))
          << what << ", gradient " << i << ", element " << j;
    }
  }
}

TEST(GatedDelta, GradientsAreThoseOfDifferences) {
  for (const int32_t length : {1, 63, 64, 65, 130})
    for (const int64_t heads : {2, 4})
      check_gradients(make_inputs({length, 2, 0, 70}, 2, heads, 6, DType::kF64),
                      str(length, " tokens, ", heads, " heads"));
  for (const int32_t prompt : {1, 63, 64, 65, 128})
    check_gradients(make_forked(prompt, 1, 2, 5, DType::kF64).shared, str("a prefix of ", prompt));
}

// The canonical order of kernels/gated_delta/gated_delta.h, one number at a time.
template <class T>
std::vector<T> in_canonical_order(const Inputs& in, int64_t d) {
  const T *q = in.q.data<T>(), *k = in.k.data<T>(), *v = in.v.data<T>(), *g = in.g.data<T>(),
          *beta = in.beta.data<T>();
  const auto product = [&](const T* a, const T* b, int64_t stride) {
    T sum = 0;
    for (int64_t i = 0; i < d; ++i) sum = std::fma(a[i], b[i * stride], sum);
    return sum;
  };
  std::vector<T> s(static_cast<size_t>(d * d)), u(static_cast<size_t>(in.tokens() * d)), o(u), sums;
  std::vector<T> decay(static_cast<size_t>(in.tokens()));
  for (int64_t t = 0; t < in.tokens(); ++t) {
    const int64_t begin = t / kDeltaChunk * kDeltaChunk;
    const auto decay_of = [&](int64_t i) -> T& { return decay[static_cast<size_t>(i)]; };
    const auto u_of = [&](int64_t i) { return u.data() + i * d; };
    if (t == begin && t > 0)
      for (int64_t a = 0; a < d; ++a)
        for (int64_t j = 0; j < d; ++j) {
          T sum = 0;
          for (int64_t i = begin - kDeltaChunk; i < begin; ++i)
            sum =
                std::fma(k[i * d + a], u_of(i)[j] * vexp2(decay_of(begin - 1) - decay_of(i)), sum);
          T& x = s[static_cast<size_t>(a * d + j)];
          x = std::fma(vexp2(decay_of(begin - 1)), x, sum);
        }
    const T base2 = g[t] * static_cast<T>(1.4426950408889634074);
    decay_of(t) = (t == begin ? T{0} : decay_of(t - 1)) + base2;
    const T gamma = vexp2(decay_of(t));
    for (int64_t j = 0; j < d; ++j) {
      T r = std::fma(-gamma, product(k + t * d, s.data() + j, d), v[t * d + j]);
      for (int64_t i = begin; i < t; ++i) {
        const T w = vexp2(decay_of(t) - decay_of(i)) * product(k + t * d, k + i * d, 1);
        r = std::fma(-w, u_of(i)[j], r);
      }
      u_of(t)[j] = r * beta[t];
    }
    for (int64_t j = 0; j < d; ++j) {
      T sum = gamma * product(q + t * d, s.data() + j, d);
      for (int64_t i = begin; i <= t; ++i) {
        const T w = vexp2(decay_of(t) - decay_of(i)) * product(q + t * d, k + i * d, 1);
        sum = std::fma(w, u_of(i)[j], sum);
      }
      o[static_cast<size_t>(t * d + j)] = sum * static_cast<T>(delta_scale(in.desc, d));
    }
  }
  return o;
}

TEST(GatedDelta, HasTheBitsOfItsDefinition) {
  const Inputs f32 = make_inputs({150}, 1, 1, 5, DType::kF32),
               f64 = make_inputs({150}, 1, 1, 5, DType::kF64);
  EXPECT_EQ(f32.run().to_vector<float>(), in_canonical_order<float>(f32, 5));
  EXPECT_EQ(f64.run().to_vector<double>(), in_canonical_order<double>(f64, 5));
}

TEST(GatedDelta, ASequenceReachesNoOther) {
  const Tensor o = expect_no_spread(4, DType::kF64);
  EXPECT_TRUE(std::isnan(o.narrow(0, 76, 1).to_vector<double>()[0]));
}

TEST(GatedDelta, WrongArgumentsAreRefused) {
  const auto refused = [](Inputs in, const std::string& message) {
    try {
      in.run();
      ADD_FAILURE() << "expected: " << message;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(message), std::string::npos) << e.what();
    }
  };
  const Inputs in = make_inputs({5, 4}, 2, 4, 6, DType::kF64);
  Inputs wrong = in;
  wrong.v = random_tensor({9, 3, 6}, DType::kF64, 1);
  wrong.g = wrong.beta = random_tensor({9, 3}, DType::kF64, 1);
  refused(wrong, "a multiple of the 2 heads of k for v, got 3");
  wrong = in;
  wrong.g = in.g.to(DType::kF32);
  refused(wrong, "expected g f64");
  wrong = in;
  wrong.cu_seqlens = Tensor::from(std::vector<int32_t>{0, 6, 4, 9}, {4});
  refused(wrong, "expected ascending cu_seqlens");
  wrong = in;
  wrong.desc.prefixes = Tensor::from(std::vector<int32_t>{0, 0, 0, 4}, {2, 2});
  refused(wrong, "expected the prefix of sequence 1");
  DeltaState state = make_state(in, 2);
  Tensor o = Tensor::empty_like(in.v);
  for (const auto& [states, message] : {std::pair<std::vector<int32_t>, std::string>{
                                            {0, 0, 0, 1, 1, 1, 0, 0, 0}, "adjacent tokens"},
                                        {{0, 0, 0, 0, 0, 0, 2, 2, 2}, "has state 2 of 2"},
                                        {{0, 0, 0, 0, -1, 0, 1, 1, 1}, "adjacent tokens"}})
    try {
      gated_delta_cached({o, state, in, Tensor::from(states, {9}),
                          Tensor::from(std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}, {9})});
      ADD_FAILURE() << "expected: " << message;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(message), std::string::npos) << e.what();
    }
}

// A gap, and a position twice.
TEST(GatedDelta, PositionsOfAStateAscendByOne) {
  const Inputs in = make_inputs({2}, 1, 1, 4, DType::kF64);
  DeltaState state = make_state(in, 1);
  Tensor o = Tensor::full(in.v.shape(), 7, DType::kF64, {});
  const Tensor states = Tensor::from(std::vector<int32_t>{0, 0});
  for (const std::vector<int32_t>& positions : {std::vector<int32_t>{0, 2}, {0, 0}})
    EXPECT_THROW(gated_delta_cached({o, state, in, states, Tensor::from(positions)}), Error);
  EXPECT_EQ(o.to_vector<double>(), std::vector<double>(8, 7));
}

}  // namespace
}  // namespace cohort::kernels
