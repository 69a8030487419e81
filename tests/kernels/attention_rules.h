// Calls of attention with each mask and modification of scores, for tests on all devices.
#pragma once

#include "tests/kernels/attention_eager.h"

namespace cohort::test {

// A call of attention whose desc has been set for its sequences.
struct RuleCase {
  std::string name;
  AttentionCase attention;
};

// Gradients of a call, including those of the terms that it has.
struct RuleGrads {
  AttentionGrads grads;
  Tensor dbias, dsinks;
};
inline RuleGrads run_rule_backward(const AttentionCase& c, const AttentionOutput& out) {
  const Device device = c.q.device();
  const auto like = [&](const Tensor& t) {
    return t.defined() ? Tensor::full(t.shape(), NAN, t.dtype(), device) : Tensor();
  };
  RuleGrads g{{like(c.q), like(c.k), like(c.k)}, like(c.desc.bias), like(c.desc.sinks)};
  const auto wanted = [](Tensor& t) {
    return t.defined() ? std::optional(kernels::GradOut{t}) : std::nullopt;
  };
  kernels::attention_backward({{g.grads.dq},
                               {g.grads.dk},
                               {g.grads.dv},
                               c.dout,
                               c.q,
                               c.k,
                               c.v,
                               out.o,
                               out.lse,
                               c.cu,
                               c.desc,
                               wanted(g.dbias),
                               wanted(g.dsinks)});
  return g;
}

// The case with its values in `dtype`, and the terms in the dtype of its statistics.
inline AttentionCase rule_case_in(const AttentionCase& c, DType dtype, Device device = {}) {
  AttentionCase f = on_device(in_dtype(c, dtype), device);
  for (Tensor* t : {&f.desc.slopes, &f.desc.bias, &f.desc.sinks})
    if (t->defined()) *t = t->to(accumulate_dtype(dtype)).to(device);
  for (Tensor* t : {&f.desc.prefix_lm, &f.desc.tiles})
    if (t->defined()) *t = t->to(device);
  return f;
}

// About a quarter of the tiles and the diagonal; the last tile of keys is seen by nothing, and the
// second tile of queries sees nothing.
inline Tensor sparse_tiles(int64_t tiles, bool with_diagonal = false) {
  std::vector<std::pair<int64_t, int64_t>> visible;
  for (int64_t q = 0; q < tiles; ++q)
    for (int64_t k = 0; k < tiles; ++k)
      if (with_diagonal ? q == k || (5 * q + 3 * k) % 4 == 0
                        : q != 1 && k != tiles - 1 && (q == k || (5 * q + 3 * k) % 4 == 0))
        visible.emplace_back(q, k);
  return kernels::make_tile_mask(visible, tiles);
}

// In f64. Shapes without heads and head dims of their own get those of `shape`.
inline std::vector<RuleCase> rule_cases(AttentionShape shape,
                                        const std::vector<SequenceSpec>& sequences) {
  using kernels::AttentionDesc;
  using kernels::Mask;
  int64_t longest = 0;
  for (const SequenceSpec& s : sequences) longest = std::max(longest, s.length);
  const Tensor slopes = random_tensor({shape.heads}, DType::kF64, 91),
               sinks = random_tensor({shape.heads}, DType::kF64, 92),
               bias = random_tensor({shape.heads, 2 * 9 + 1}, DType::kF64, 93),
               wide_bias = random_tensor({shape.heads, 2 * 150 + 1}, DType::kF64, 94);
  std::vector<int32_t> prefix;
  for (const SequenceSpec& s : sequences)
    prefix.push_back(static_cast<int32_t>(s.length == 0   ? 3
                                          : s.id % 3 == 0 ? 0
                                                          : 2 * s.length / 3));
  const Tensor prefix_lm = Tensor::from(prefix);
  const Tensor tiles = sparse_tiles((longest + 127) / 128);
  const std::vector<std::pair<std::string, AttentionDesc>> descs = {
      {"soft cap", {.soft_cap = 1.5}},
      {"distance factor", {.distance = {0.7, 0.005}}},
      {"distance factor from zero, full", {.mask = Mask::kFull, .distance = {0, 0.1}}},
      {"slopes", {.slopes = slopes}},
      {"slopes, full", {.mask = Mask::kFull, .slopes = slopes}},
      {"bias", {.bias = bias}},
      {"wide bias, full", {.mask = Mask::kFull, .bias = wide_bias}},
      {"sinks", {.sinks = sinks}},
      {"sinks under a window", {.window = 20, .sinks = sinks}},
      {"full, both windows", {.mask = Mask::kFull, .window = 33, .window_right = 70}},
      {"full, left window", {.mask = Mask::kFull, .window = 140}},
      {"full, right window", {.mask = Mask::kFull, .window_right = 0}},
      {"prefix-LM", {.prefix_lm = prefix_lm}},
      {"tiles", {.tiles = tiles}},
      {"tiles, full", {.mask = Mask::kFull, .tiles = tiles}},
      {"tiles with sinks", {.mask = Mask::kFull, .tiles = tiles, .sinks = sinks}},
      {"everything, causal",
       {.window = 130,
        .tiles = tiles,
        .soft_cap = 2,
        .distance = {0.5, 0.02},
        .slopes = slopes,
        .bias = wide_bias,
        .sinks = sinks}},
      {"everything, prefix-LM",
       {.prefix_lm = prefix_lm,
        .soft_cap = 2,
        .distance = {0.5, 0.02},
        .slopes = slopes,
        .bias = bias,
        .sinks = sinks}},
  };
  std::vector<RuleCase> cases;
  for (const auto& [name, desc] : descs) {
    shape.mask = desc.mask;
    shape.window = desc.window;
    RuleCase c{name, make_case(shape, sequences)};
    c.attention.desc = desc;
    cases.push_back(c);
  }
  return cases;
}

}  // namespace cohort::test
