// Prefill and decode steps on a paged cache for the attention tests. Cases and results are on the
// CPU, the cache and the kernels on any device.
#pragma once

#include <algorithm>
#include <numeric>

#include "core/rng.h"
#include "tests/kernels/attention_cases.h"

namespace cohort::test {

// A cache for all sequences of `c` with the blocks in random order and unused ones between them;
// with scales, in e4m3 where `c` is in bf16.
inline kernels::PagedKV make_cache(const AttentionCase& c, int64_t block_tokens, Rng& rng,
                                   Device device = {}, const Tensor& scales = {}) {
  int64_t max_blocks = 1, used = 0;
  for (const SequenceSpec& s : c.sequences) {
    const int64_t blocks = (s.length + block_tokens - 1) / block_tokens;
    max_blocks = std::max(max_blocks, blocks + 1);
    used += blocks;
  }
  std::vector<int32_t> free(static_cast<size_t>(used + 5));
  std::iota(free.begin(), free.end(), 0);
  for (size_t i = free.size(); i > 1; --i)
    std::swap(free[i - 1], free[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
  std::vector<int32_t> table;
  for (const SequenceSpec& s : c.sequences)
    for (int64_t b = 0; b < max_blocks; ++b) {
      const bool needed = b * block_tokens < s.length;
      table.push_back(needed ? free.back() : -1);
      if (needed) free.pop_back();
    }
  const Shape shape = {used + 5, block_tokens, c.k.dim(1), c.k.dim(2)};
  const DType dtype = scales.defined() && c.k.dtype() == DType::kBF16 ? DType::kE4M3 : c.k.dtype();
  const Tensor unused = Tensor::full(shape, NAN, DType::kF32).to(dtype);
  return {unused.to(device).clone(), unused.to(device).clone(),
          Tensor::from(table, {static_cast<int64_t>(c.sequences.size()), max_blocks}).to(device),
          scales.defined() ? scales.to(device) : scales};
}

struct Step {
  int64_t sequence, begin, end;  // positions of one sequence
};

// Checks that a decode step, rotated by `table` if it is defined, changes o and the cache as a
// write and an attention call do; `o` and `cache` hold the state before. The decode step has o in
// rows with `padding` more columns.
inline void expect_decode(const Tensor& o, const kernels::PagedKV& cache, const Tensor& qkv,
                          const Tensor& sequences, const Tensor& positions, const Tensor& table,
                          const kernels::AttentionDesc& desc, int64_t padding = 64) {
  kernels::PagedKV fused{cache.k.clone(), cache.v.clone(), cache.block_table, cache.scales},
      composed{cache.k.clone(), cache.v.clone(), cache.block_table, cache.scales};
  Tensor once = qkv.clone(), rotated = qkv.clone(), expected = o.clone();
  WideRows wide(o, padding);
  kernels::rope_kv_write({composed, rotated, sequences, positions, table});
  const Tensor q = rotated.narrow(1, 0, o.dim(1));
  kernels::attention_paged({expected, q, composed, sequences, positions, desc});
  kernels::attention_decode({wide.view, fused, once, sequences, positions, table, desc});
  EXPECT_TRUE(bit_equal(wide.view, expected) && wide.intact());
  EXPECT_TRUE(bit_equal(fused.k, composed.k) && bit_equal(fused.v, composed.v));
}

// Gathers the tokens of the steps into one batch, writes the cache, runs attention on its device
// with o in wider rows, and copies o to `all`. Also checks a decode step if all tokens are of
// different sequences.
inline void run_step(kernels::PagedKV& cache, const AttentionCase& c,
                     const std::vector<Step>& steps, Tensor& all) {
  std::vector<int32_t> sequences, positions;
  std::vector<int64_t> tokens;
  const Device device = cache.k.device();
  for (const Step& s : steps)
    for (int64_t p = s.begin; p < s.end; ++p) {
      sequences.push_back(static_cast<int32_t>(s.sequence));
      positions.push_back(static_cast<int32_t>(p));
      tokens.push_back(c.start(static_cast<size_t>(s.sequence)) + p);
    }
  const auto gather = [&](const Tensor& from) {
    Tensor rows = Tensor::empty({static_cast<int64_t>(tokens.size()), from.dim(1), from.dim(2)},
                                from.dtype());
    for (size_t i = 0; i < tokens.size(); ++i)
      rows.select(0, static_cast<int64_t>(i)).copy_(from.select(0, tokens[i]));
    return rows.to(device);
  };
  const Tensor seq = Tensor::from(sequences).to(device), pos = Tensor::from(positions).to(device);
  Tensor qkv = side_by_side(gather(c.q), gather(c.k), gather(c.v));
  const bool different = std::all_of(steps.begin(), steps.end(), [&](const Step& s) {
    return s.end == s.begin + 1 && std::count_if(steps.begin(), steps.end(), [&](const Step& t) {
                                     return t.sequence == s.sequence;
                                   }) == 1;
  });
  if (different)
    expect_decode(Tensor::full({seq.numel(), c.q.dim(1), c.q.dim(2)}, NAN, c.q.dtype(), device),
                  cache, qkv, seq, pos, {}, c.desc);
  kernels::rope_kv_write({cache, qkv, seq, pos, {}});
  const Tensor q = qkv.narrow(1, 0, c.q.dim(1));
  WideRows wide(Tensor::full(q.shape(), NAN, q.dtype(), device));
  kernels::attention_paged({wide.view, q, cache, seq, pos, c.desc});
  EXPECT_TRUE(wide.intact());
  const Tensor o = wide.view.to(Device{});
  for (size_t i = 0; i < tokens.size(); ++i)
    all.select(0, tokens[i]).copy_(o.select(0, static_cast<int64_t>(i)));
}

// Runs every sequence in steps of random sizes; each batch has a random choice of sequences, in
// random order. Decode steps of one token are as likely as chunks of up to 80.
inline Tensor run_in_random_steps(const AttentionCase& c, int64_t block_tokens, Rng& rng,
                                  Device device = {}, const Tensor& scales = {}) {
  kernels::PagedKV cache = make_cache(c, block_tokens, rng, device, scales);
  Tensor all = Tensor::full(c.q.shape(), NAN, c.q.dtype());
  std::vector<int64_t> done(c.sequences.size());
  while (true) {
    std::vector<Step> steps;
    bool left = false;
    const int64_t offset = rng.below(static_cast<int64_t>(done.size()));
    for (size_t i = 0; i < done.size(); ++i) {
      const size_t s = (i + static_cast<size_t>(offset)) % done.size();
      const int64_t rest = c.sequences[s].length - done[s];
      left = left || rest > 0;
      if (rest == 0 || rng.below(3) == 0) continue;
      const int64_t n = std::min(rest, rng.below(2) == 0 ? 1 : rng.between(1, 80));
      steps.push_back({static_cast<int64_t>(s), done[s], done[s] + n});
      done[s] += n;
    }
    if (!left) return all;
    if (!steps.empty()) run_step(cache, c, steps, all);
  }
}

}  // namespace cohort::test
