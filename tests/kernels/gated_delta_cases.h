// Shared by the tests of the gated delta rule on CPU and CUDA: inputs, random pieces of sequences,
// shared prefixes, gradients.
#pragma once

#include <array>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "core/rng.h"
#include "kernels/gated_delta/gated_delta.h"
#include "tests/kernels/kernel_test.h"

namespace cohort::kernels::gated_delta_cases {

using test::random_tensor;

struct Inputs : DeltaTensors {
  Tensor cu_seqlens;
  GatedDeltaDesc desc;

  int64_t tokens() const { return v.dim(0); }
  // With values that `type` can hold.
  Inputs to(DType type, Device device = {}) const {
    const auto rows = [&](const Tensor& t) { return t.to(type).to(device); };
    const auto gates = [&](const Tensor& t) { return t.to(accumulate_dtype(type)).to(device); };
    Inputs out{{rows(q), rows(k), rows(v), gates(g), gates(beta)}, cu_seqlens.to(device), desc};
    if (desc.prefixes.defined()) out.desc.prefixes = desc.prefixes.to(device);
    return out;
  }
  Tensor run(Tensor* kept = nullptr) const {
    Tensor o = Tensor::full(v.shape(), NAN, v.dtype(), v.device()), u = o.clone();
    gated_delta({o, u, *this, cu_seqlens, desc});
    if (kept != nullptr) *kept = u;
    return o;
  }
};

inline Tensor positive(Tensor x, const std::function<double(double)>& fn) {
  auto values = x.to_vector<double>();
  for (double& value : values) value = fn(value);
  return Tensor::from(values, x.shape()).to(x.dtype());
}

// Unit keys, decays from 0.5 to nearly 1, and beta in (0, 1).
inline Inputs make_inputs(const std::vector<int32_t>& lengths, int64_t key_heads, int64_t heads,
                          int64_t dim, DType dtype, uint64_t seed = 1) {
  std::vector<int32_t> ends(lengths.size() + 1);
  std::partial_sum(lengths.begin(), lengths.end(), ends.begin() + 1);
  const int64_t t = ends.back();
  const double unit = 1 / std::sqrt(static_cast<double>(dim));
  return {{.q = random_tensor({t, key_heads, dim}, dtype, seed, unit),
           .k = random_tensor({t, key_heads, dim}, dtype, seed + 1, unit),
           .v = random_tensor({t, heads, dim}, dtype, seed + 2),
           .g = positive(random_tensor({t, heads}, dtype, seed + 3),
                         [](double x) { return -std::exp(2 * x - 3); }),
           .beta = positive(random_tensor({t, heads}, dtype, seed + 4),
                            [](double x) { return 1 / (1 + std::exp(-x)); })},
          Tensor::from(ends, {static_cast<int64_t>(ends.size())}),
          {}};
}

// Three sequences whose first outputs are negative and underflow, beside rows u of other tokens.
inline Inputs underflowing_inputs(DType dtype) {
  Inputs in = make_inputs({16, 16, 16}, 1, 1, 64, DType::kF64);
  in.k.zero_();
  in.v.fill_(-1);
  in.g.zero_();
  in.beta.fill_(1);
  for (int64_t t = 0; t < 48; ++t) {
    const bool is_first = t % 16 == 0;
    in.k.narrow(0, t, 1).narrow(2, t % 16, 1).fill_(is_first ? 1e-15 : 1);
    if (is_first) in.v.narrow(0, t, 1).fill_(-1e-20);
  }
  in.q.copy_(in.k);
  return in.to(dtype);
}

inline DeltaState make_state(const Inputs& in, int64_t slots) {
  const int64_t heads = in.v.dim(1), key_heads = in.k.dim(1), d = in.v.dim(2);
  const auto unset = [&](const Shape& shape, DType dtype) {
    return Tensor::full(shape, NAN, dtype, in.v.device());
  };
  const DType rows = in.v.dtype(), sums = accumulate_dtype(rows);
  return {unset({slots, heads, d, d}, sums), unset({slots, kDeltaChunk, key_heads, d}, rows),
          unset({slots, kDeltaChunk, heads, d}, rows), unset({slots, kDeltaChunk, heads}, sums)};
}
inline void copy_slot(DeltaState& state, int64_t to, int64_t from) {
  for (Tensor* t : {&state.s, &state.k, &state.u, &state.decay})
    t->narrow(0, to, 1).copy_(t->narrow(0, from, 1));
}

inline std::vector<int32_t> piece_lengths(Rng& rng) {
  const auto length = [&] { return static_cast<int32_t>(rng.between(1, 200)); };
  const int32_t first = length();
  return {first, 64, length()};
}

// Computes the three sequences of `in`, a CPU tensor, in pieces of any lengths, beside each other
// and beside idle tokens, which move to other states and go back within a chunk, and expects the
// bits of the packed call. Counts the pieces.
inline void check_pieces(const Inputs& in, Device device, Rng& rng, int& pieces) {
  const DType dtype = in.v.dtype();
  const auto below = [&](int64_t n) { return rng.below(n); };
  const Tensor whole = in.to(dtype, device).run().to(Device{});
  const auto ends = in.cu_seqlens.to_vector<int64_t>();
  DeltaState state = make_state(in.to(dtype, device), 4);
  std::vector<int64_t> slot = {0, 1, 2}, done(3, 0);
  int64_t spare = 3;
  for (bool any = true; any;) {
    any = false;
    const int64_t most = below(3) == 0 ? 90 : below(2) == 0 ? 3 : 2;
    bool is_decode = below(2) == 0;
    std::vector<int64_t> tokens;
    std::vector<int32_t> states, positions;
    for (size_t s = 0; s < 3; ++s) {
      if (below(8) == 0) {  // to another state
        copy_slot(state, spare, slot[s]);
        std::swap(spare, slot[s]);
      }
      if (done[s] > 1 && below(8) == 0)  // back within the chunk of the last token
        done[s] -= below((done[s] - 1) % kDeltaChunk + 1);
      if (below(8) == 0) {  // an idle token of the same state in front
        tokens.push_back(0);
        states.push_back(static_cast<int32_t>(slot[s]));
        positions.push_back(-1);
      }
      const int64_t left = ends[s + 1] - ends[s] - done[s];
      const int64_t count = std::min(left, below(most));
      any = any || left > count;
      pieces += count > 0;
      is_decode = is_decode && count < 2;
      for (int64_t i = 0; i < count; ++i) {
        tokens.push_back(ends[s] + done[s] + i);
        states.push_back(static_cast<int32_t>(slot[s]));
        positions.push_back(static_cast<int32_t>(done[s] + i));
      }
      done[s] += count;
      if (below(3) == 0) {
        tokens.push_back(below(in.tokens()));
        states.push_back(below(2) == 0 ? -1 : static_cast<int32_t>(slot[s]));
        positions.push_back(states.back() < 0 ? 5 : -1);
      }
    }
    const auto rows_of = [&](const Tensor& t) { return test::gather_rows(t, tokens).to(device); };
    if (tokens.empty()) continue;
    const DeltaTensors rows{rows_of(in.q), rows_of(in.k), rows_of(in.v), rows_of(in.g),
                            rows_of(in.beta)};
    Tensor o = Tensor::full(rows.v.shape(), NAN, dtype, device),
           expected = test::gather_rows(whole, tokens);
    for (size_t i = 0; i < tokens.size(); ++i)
      if (states[i] < 0 || positions[i] < 0) expected.narrow(0, static_cast<int64_t>(i), 1).zero_();
    gated_delta_cached({o, state, rows, Tensor::from(states).to(device),
                        Tensor::from(positions).to(device), in.desc.scale, is_decode});
    ASSERT_TRUE(test::bit_equal(o.to(Device{}), expected)) << "after " << pieces << " pieces";
  }
}

// `in` with three completions of a prompt, and the same as whole sequences.
struct Forked {
  Inputs shared, repeated;
  std::vector<int64_t> shared_of;  // token of `shared` for each token of `repeated`
};
inline Forked make_forked(int32_t prompt, int64_t key_heads, int64_t heads, int64_t dim,
                          DType dtype) {
  const std::vector<int32_t> lengths = {5, prompt, 70, 1, 130, 9};
  Forked out{make_inputs(lengths, key_heads, heads, dim, dtype), {}, {}};
  out.shared.desc.prefixes =
      Tensor::from(std::vector<int32_t>{0, 0, 0, 0, 5, prompt, 5, prompt, 5, prompt, 0, 0}, {6, 2});
  std::vector<int32_t> whole;
  int64_t begin = 0;
  for (size_t s = 0; s < lengths.size(); ++s) {
    const bool continues = s >= 2 && s <= 4;
    whole.push_back(lengths[s] + (continues ? prompt : 0));
    for (int64_t i = 0; continues && i < prompt; ++i) out.shared_of.push_back(5 + i);
    for (int64_t i = 0; i < lengths[s]; ++i) out.shared_of.push_back(begin + i);
    begin += lengths[s];
  }
  out.repeated = make_inputs(whole, key_heads, heads, dim, dtype);
  for (const auto& [to, from] : {std::pair(&out.repeated.q, &out.shared.q),
                                 {&out.repeated.k, &out.shared.k},
                                 {&out.repeated.v, &out.shared.v},
                                 {&out.repeated.g, &out.shared.g},
                                 {&out.repeated.beta, &out.shared.beta}})
    *to = test::gather_rows(*from, out.shared_of);
  return out;
}

// Checks that outputs of forked.shared and forked.repeated have the same bits.
inline void expect_same_tokens(const Forked& forked, const Tensor& shared, const Tensor& repeated) {
  for (size_t t = 0; t < forked.shared_of.size(); ++t)
    ASSERT_TRUE(
        test::bit_equal(test::one_row(repeated, t), test::one_row(shared, forked.shared_of[t])))
        << "token " << t;
}

// Checks that what is not finite in a sequence reaches its next chunk and no other one. Returns
// the outputs.
inline Tensor expect_no_spread(int64_t dim, DType dtype, Device device = {}) {
  Inputs in = make_inputs({70, 70, 70}, 1, 1, dim, DType::kF64);
  const auto run = [&] { return in.to(dtype, device).run().to(Device{}); };
  const Tensor before = run();
  in.v.narrow(0, 75, 1).fill_(NAN);
  in.k.narrow(0, 80, 1).fill_(INFINITY);
  const Tensor after = run();
  for (const int64_t begin : {0, 140})
    EXPECT_TRUE(test::bit_equal(after.narrow(0, begin, 70).contiguous(),
                                before.narrow(0, begin, 70).contiguous()));
  for (const double x : after.narrow(0, 136, 4).to_vector<double>()) EXPECT_TRUE(std::isnan(x));
  return after;
}

struct Gradients : DeltaTensors {
  std::array<Tensor*, 5> all() { return {&q, &k, &v, &g, &beta}; }
};
inline Gradients backward(const Inputs& in, const Tensor& dout, Grad mode = Grad::kOverwrite) {
  Tensor u;
  in.run(&u);
  const auto start = [&](const Tensor& t) {
    return Tensor::full(t.shape(), mode == Grad::kOverwrite ? NAN : 1, t.dtype(), t.device());
  };
  Gradients out{{start(in.q), start(in.k), start(in.v), start(in.g), start(in.beta)}};
  gated_delta_backward({.dq = {out.q, mode},
                        .dk = {out.k, mode},
                        .dv = {out.v, mode},
                        .dg = {out.g, mode},
                        .dbeta = {out.beta, mode},
                        .dout = dout,
                        .in = in,
                        .u = u,
                        .cu_seqlens = in.cu_seqlens,
                        .desc = in.desc});
  return out;
}

}  // namespace cohort::kernels::gated_delta_cases
