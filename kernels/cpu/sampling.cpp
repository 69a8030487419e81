// Token sampling by inverting the CDF in ascending id order on the CPU. The probabilities are those
// of row_softmax.h, whose block sums select the block of the sampled token.
#include "kernels/sampling.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "core/rng.h"
#include "kernels/cpu/row_softmax.h"
#include "kernels/head.h"

namespace cohort::kernels::cpu {
namespace {

// One row of logits, the model's or modified, with its distribution.
template <class T>
struct Row {
  const T* logits = nullptr;
  int64_t vocab = 0;
  RowSoftmax softmax;
  SoftmaxWeights<T> kept;

  // The unnormalised probability of token v.
  double weight(int64_t v) const {
    return static_cast<double>(kept.weights[static_cast<size_t>(v)]);
  }
};

// Walks ids [begin, end) that keep(id) admits, adding their weights to `before`, and returns the
// one at which the sum first exceeds `target`. A token without weight is never returned; if
// rounding keeps the sum below the target, it is the last one with weight.
template <class T, class Keep>
int64_t invert(const Row<T>& row, int64_t begin, int64_t end, double before, double target,
               Keep&& keep) {
  int64_t last = -1;
  for (int64_t v = begin; v < end; ++v) {
    if (!keep(v)) continue;
    const double weight = row.weight(v);
    if (weight <= 0) continue;
    last = v;
    before += weight;
    if (before > target) break;
  }
  return last;
}

template <class T>
int64_t sample_from_all(const Row<T>& row, double u) {
  const double target = u * row.softmax.sum;
  double before = 0, cumulative = 0;
  size_t chosen = 0;
  for (size_t b = 0; b < row.kept.block_sums.size(); ++b) {
    if (row.kept.block_sums[b] <= 0) continue;
    chosen = b;
    before = cumulative;
    cumulative += row.kept.block_sums[b];
    if (cumulative > target) break;
  }
  const int64_t begin = static_cast<int64_t>(chosen) * kSoftmaxBlock;
  return invert(row, begin, std::min(row.vocab, begin + kSoftmaxBlock), before, target,
                [](int64_t) { return true; });
}

// A token in the order of probability; equal logits by ascending id.
template <class T>
struct Ranked {
  T logit;
  int32_t id;
  bool operator<(const Ranked& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// The last token of the nucleus: the shortest prefix of the tokens by rank whose weight reaches
// `goal`. Halves the range that contains it, so that only a few tokens are sorted.
template <class T>
Ranked<T> nucleus_end(const Row<T>& row, std::vector<Ranked<T>>& tokens, double goal) {
  constexpr int64_t kSorted = 32;
  auto begin = tokens.begin(), end = tokens.end();
  double weight_before = 0;
  while (end - begin > kSorted) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end);
    double upper = 0;
    for (auto t = begin; t != middle; ++t) upper += row.weight(t->id);
    if (weight_before + upper >= goal) {
      end = middle;
    } else {
      weight_before += upper;
      begin = middle;
    }
  }
  std::sort(begin, end);
  for (auto t = begin; t != end; ++t) {
    weight_before += row.weight(t->id);
    if (weight_before >= goal) return *t;
  }
  return *(end - 1);
}

// The last token by rank that top-k and top-p keep.
template <class T>
Ranked<T> last_allowed(const Row<T>& row, const SamplingParams& params) {
  const bool top_k = params.top_k > 0 && params.top_k < row.vocab;
  if (!top_k && params.top_p >= 1)
    return {-std::numeric_limits<T>::infinity(), std::numeric_limits<int32_t>::max()};
  std::vector<Ranked<T>> tokens(static_cast<size_t>(row.vocab));
  for (int64_t v = 0; v < row.vocab; ++v)
    tokens[static_cast<size_t>(v)] = {row.logits[v], static_cast<int32_t>(v)};
  if (top_k) {
    std::nth_element(tokens.begin(), tokens.begin() + params.top_k - 1, tokens.end());
    tokens.resize(static_cast<size_t>(params.top_k));
    if (params.top_p >= 1) return tokens.back();
  }
  double total = 0;
  for (const Ranked<T>& t : tokens) total += row.weight(t.id);
  return nucleus_end(row, tokens, params.top_p * total);
}

struct Choice {
  int64_t token;
  double truncated_mass;  // probability of the tokens that were removed
};

template <class T>
Choice sample_from_allowed(const Row<T>& row, const SamplingParams& params, double u) {
  const Ranked<T> last = last_allowed(row, params);
  // Min-p compares logits, whose order is that of the exact probabilities.
  const T largest = static_cast<T>(row.softmax.largest),
          inverse = static_cast<T>(row.softmax.inverse_temperature),
          least = static_cast<T>(std::log(params.min_p));
  const auto keep = [&](int64_t v) {
    const T logit = row.logits[v];
    return !(last < Ranked<T>{logit, static_cast<int32_t>(v)}) &&
           scaled_logit(logit, largest, inverse) >= least;
  };
  double kept = 0, truncated = 0;
  for (int64_t v = 0; v < row.vocab; ++v) (keep(v) ? kept : truncated) += row.weight(v);
  return {invert(row, 0, row.vocab, 0, u * kept, keep), truncated / (kept + truncated)};
}

template <class T>
Choice choose(const Row<T>& row, const SamplingParams& params, double u) {
  if (params.temperature == 0)
    return {std::find(row.logits, row.logits + row.vocab, static_cast<T>(row.softmax.largest)) -
                row.logits,
            0};
  if ((params.top_k == 0 || params.top_k >= row.vocab) && params.top_p >= 1 && params.min_p <= 0)
    return {sample_from_all(row, u), 0};
  return sample_from_allowed(row, params, u);
}

// The elements of a SamplingState.
template <class T>
struct State {
  const uint8_t* params;
  int32_t* counts;
  const int32_t* bias_ids;
  const T* bias_values;
  int64_t slots, vocab, max_bias;

  State(SamplingState& state, int64_t vocab)
      : params(state.params.data<uint8_t>()),
        counts(state.counts.defined() ? state.counts.data<int32_t>() : nullptr),
        bias_ids(state.bias_ids.defined() ? state.bias_ids.data<int32_t>() : nullptr),
        bias_values(state.bias_ids.defined() ? state.bias_values.data<T>() : nullptr),
        slots(state.params.dim(0)),
        vocab(vocab),
        max_bias(state.bias_ids.defined() ? state.bias_ids.dim(1) : 0) {}

  SamplingParams of(int32_t slot) const {
    SamplingParams p;
    std::memcpy(&p, params + slot * static_cast<int64_t>(sizeof p), sizeof p);
    return p;
  }

  // Steps 1 to 3 of the contract.
  void modify(T* out, const T* logits, int32_t slot, const SamplingParams& p) const {
    std::copy_n(logits, vocab, out);
    for (int64_t b = slot * max_bias; b < slot * max_bias + p.num_bias; ++b)
      out[bias_ids[b]] += bias_values[b];
    if (!has_penalty(p)) return;
    for (int64_t v = 0; v < vocab; ++v) out[v] = penalised(out[v], counts[slot * vocab + v], p);
  }

  void check(int32_t slot, const char* op) const {
    COHORT_CHECK(slot >= 0 && slot < slots, "[", op, "] expected slots below ", slots, ", got ",
                 slot);
    const SamplingParams p = of(slot);
    if (const char* expected = invalid_reason(p))
      throw Error(str("[", op, "] slot ", slot, ": expected ", expected));
    COHORT_CHECK(counts != nullptr || !has_penalty(p), "[", op, "] slot ", slot,
                 ": expected counts for its penalties");
    COHORT_CHECK(p.num_bias <= max_bias, "[", op, "] slot ", slot, ": expected at most ", max_bias,
                 " biases, got ", p.num_bias);
    for (int64_t b = slot * max_bias; b < slot * max_bias + p.num_bias; ++b)
      COHORT_CHECK(bias_ids[b] >= 0 && bias_ids[b] < vocab, "[", op, "] slot ", slot, ": bias of ",
                   bias_ids[b], ", which is outside the vocabulary of ", vocab);
  }
};

// Pointers to the tensors of a call, except for the logits.
template <class T>
struct Rows {
  int32_t* tokens;
  T *logprob, *entropy, *truncated_mass, *sampling_logprob;
  const int32_t* slots;
  const int64_t* index;
  const State<T> state;
  const char* op;

  // Checks all rows before any is sampled.
  template <class Args>
  Rows(const Args& args, int64_t vocab, const char* op)
      : tokens(args.out.tokens.template data<int32_t>()),
        logprob(args.out.logprob.template data<T>()),
        entropy(args.out.entropy.template data<T>()),
        truncated_mass(args.out.truncated_mass.template data<T>()),
        sampling_logprob(args.out.sampling_logprob.template data<T>()),
        slots(args.slots.template data<int32_t>()),
        index(args.rng_index.template data<int64_t>()),
        state(args.state, vocab),
        op(op) {
    std::vector<uint8_t> taken(static_cast<size_t>(state.slots));
    for (int64_t i = 0; i < args.slots.numel(); ++i) {
      if (slots[i] == -1) continue;
      state.check(slots[i], op);
      COHORT_CHECK(taken[static_cast<size_t>(slots[i])]++ == 0 || state.counts == nullptr, "[", op,
                   "] slot ", slots[i], " has counts and two rows");
    }
  }
};

// Samples row `at` of a call. `row` is scratch memory, `modified` too, [vocab] or empty. Returns
// false if the row has no distribution.
template <class T>
bool sample_row(const Rows<T>& rows, int64_t at, const T* logits, Row<T>& row,
                std::vector<T>& modified) {
  const int32_t slot = rows.slots[at];
  if (slot == -1) return true;
  const SamplingParams p = rows.state.of(slot);
  const double temperature = p.temperature == 0 ? 1 : p.temperature;
  row.logits = logits;
  row.softmax = row_softmax(logits, row.vocab, temperature, &row.kept);
  const RowSoftmax policy = row.softmax;
  if (policy.valid() && changes_logits(p)) {
    modified.resize(static_cast<size_t>(row.vocab));
    rows.state.modify(modified.data(), logits, slot, p);
    row.logits = modified.data();
    row.softmax = row_softmax(row.logits, row.vocab, temperature, &row.kept);
  }
  if (!policy.valid() || !row.softmax.valid()) return false;
  const auto words = philox(p.seed, p.stream, static_cast<uint64_t>(rows.index[at]));
  const Choice choice = choose(row, p, uniform_f64(words[0], words[1]));
  rows.tokens[at] = static_cast<int32_t>(choice.token);
  rows.logprob[at] = row_logprob(policy, logits[choice.token]);
  rows.entropy[at] = static_cast<T>(policy.entropy());
  rows.truncated_mass[at] = static_cast<T>(choice.truncated_mass);
  rows.sampling_logprob[at] =
      p.temperature == 0 ? 0
                         : static_cast<T>(row_logprob(row.softmax, row.logits[choice.token]) -
                                          std::log1p(-choice.truncated_mass));
  if (rows.state.counts != nullptr) ++rows.state.counts[slot * row.vocab + choice.token];
  return true;
}

// Samples rows from `first` on from their logits [count, V]. Throws after the parallel loop, naming
// the first row without a distribution.
template <class T>
void sample_rows(const Rows<T>& rows, const Tensor& logits, int64_t first) {
  const int64_t vocab = rows.state.vocab, count = logits.dim(0), stride = logits.strides()[0];
  const T* const z = logits.data<T>();
  std::atomic<int64_t> bad = count;
  parallel_for(count, row_grain(vocab), [&](int64_t begin, int64_t end) {
    Row<T> row{.vocab = vocab, .softmax = {}, .kept = SoftmaxWeights<T>(vocab)};
    std::vector<T> modified;
    for (int64_t i = begin; i < end; ++i) {
      if (sample_row(rows, first + i, z + i * stride, row, modified)) continue;
      int64_t lowest = bad.load();
      while (i < lowest && !bad.compare_exchange_weak(lowest, i)) {
      }
    }
  });
  if (bad != count)
    throw NonFiniteError(str("[", rows.op, "] row ", first + bad,
                             ": the logits hold NaN or infinity, or leave no token"));
}

}  // namespace

void head_sample(const HeadSample& args) {
  dispatch_float(args.x.dtype(), "head_sample", [&]<class T>() {
    const int64_t chunk = args.chunk_tokens > 0
                              ? args.chunk_tokens
                              : head_chunk_tokens(args.w.dim(0), 0, args.x.device());
    const Rows<T> rows(args, args.w.dim(0), "head_sample");
    for_logit_chunks({args.x, args.w, args.bias}, chunk,
                     [&](int64_t begin, Tensor& logits) { sample_rows(rows, logits, begin); });
  });
}

void sample_logits(const SampleLogits& args) {
  dispatch_float(args.logits.dtype(), "sample_logits", [&]<class T>() {
    const Rows<T> rows(args, args.logits.dim(1), "sample_logits");
    sample_rows(rows, args.logits, 0);
  });
}

void count_prompt(const CountPrompt& args) {
  const int64_t vocab = args.counts.dim(1);
  const int32_t* token = args.tokens.data<int32_t>();
  for (int64_t t = 0; t < args.tokens.numel(); ++t)
    COHORT_CHECK(token[t] >= 0 && token[t] < vocab, "[count_prompt] token ", token[t],
                 " at position ", t, " is outside the vocabulary of ", vocab);
  int32_t* counts = args.counts.data<int32_t>() + args.slot * vocab;
  std::fill_n(counts, vocab, 0);
  for (int64_t t = 0; t < args.tokens.numel(); ++t) counts[token[t]] = kInPrompt;
}

}  // namespace cohort::kernels::cpu
