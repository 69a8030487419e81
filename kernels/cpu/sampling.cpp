// Drawing tokens by inverting the CDF in ascending id order on the CPU. The
// probabilities are those of row_softmax.h, whose block sums lead to the block that holds the draw.
#include "kernels/sampling.h"

#include <algorithm>
#include <atomic>

#include "core/rng.h"
#include "kernels/cpu/row_softmax.h"
#include "kernels/head.h"

namespace cohort::kernels::cpu {
namespace {

// One row of logits with its distribution.
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
// one that first exceeds `target`. A token without weight is never returned; where rounding leaves
// the target unreached it is the last one with weight.
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
int64_t draw_from_all(const Row<T>& row, double u) {
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

// The least probable token of the smallest set of first tokens whose weight reaches `goal`. Halves
// the range that holds it, so only a few tokens are ever sorted.
template <class T>
Ranked<T> nucleus_end(const Row<T>& row, std::vector<Ranked<T>>& tokens, double goal) {
  constexpr int64_t kSorted = 32;
  auto begin = tokens.begin(), end = tokens.end();
  double weight = 0;  // of the tokens before `begin`
  while (end - begin > kSorted) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end);
    double upper = 0;
    for (auto t = begin; t != middle; ++t) upper += row.weight(t->id);
    if (weight + upper >= goal) {
      end = middle;
    } else {
      weight += upper;
      begin = middle;
    }
  }
  std::sort(begin, end);
  for (auto t = begin; t != end; ++t) {
    weight += row.weight(t->id);
    if (weight >= goal) return *t;
  }
  return *(end - 1);
}

// The least probable token that top-k and top-p leave: every token not behind it may be drawn.
template <class T>
Ranked<T> last_allowed(const Row<T>& row, const SamplingDesc& desc) {
  std::vector<Ranked<T>> tokens(static_cast<size_t>(row.vocab));
  for (int64_t v = 0; v < row.vocab; ++v)
    tokens[static_cast<size_t>(v)] = {row.logits[v], static_cast<int32_t>(v)};
  if (desc.top_k > 0 && desc.top_k < row.vocab) {
    std::nth_element(tokens.begin(), tokens.begin() + desc.top_k - 1, tokens.end());
    tokens.resize(static_cast<size_t>(desc.top_k));
    if (desc.top_p >= 1) return tokens.back();
  }
  double total = 0;
  for (const Ranked<T>& t : tokens) total += row.weight(t.id);
  return nucleus_end(row, tokens, desc.top_p * total);
}

struct Choice {
  int64_t token;
  double cut;  // the probability of the tokens that were left out
};

template <class T>
Choice draw_from_allowed(const Row<T>& row, const SamplingDesc& desc, double u) {
  const Ranked<T> last = last_allowed(row, desc);
  const auto keep = [&](int64_t v) {
    return !(last < Ranked<T>{row.logits[v], static_cast<int32_t>(v)});
  };
  double kept = 0, cut = 0;
  for (int64_t v = 0; v < row.vocab; ++v) (keep(v) ? kept : cut) += row.weight(v);
  return {invert(row, 0, row.vocab, 0, u * kept, keep), cut / (kept + cut)};
}

template <class T>
Choice choose(const Row<T>& row, const SamplingDesc& desc, double u) {
  if (desc.temperature == 0)
    return {std::find(row.logits, row.logits + row.vocab, static_cast<T>(row.softmax.largest)) -
                row.logits,
            0};
  if ((desc.top_k == 0 || desc.top_k >= row.vocab) && desc.top_p >= 1)
    return {draw_from_all(row, u), 0};
  return draw_from_allowed(row, desc, u);
}

// The tensors of a call beside the logits, as pointers.
template <class T>
struct Rows {
  int32_t* tokens;
  T *logprob, *entropy, *cut;
  const int64_t *stream, *index;

  Rows(Draws& out, const Tensor& rng_stream, const Tensor& rng_index)
      : tokens(out.tokens.data<int32_t>()),
        logprob(out.logprob.data<T>()),
        entropy(out.entropy.data<T>()),
        cut(out.cut.data<T>()),
        stream(rng_stream.data<int64_t>()),
        index(rng_index.data<int64_t>()) {}
};

// Draws for rows [first, first + count), whose logits are given. Throws after the loop, as the loop
// may run in threads, naming the first row that has no distribution.
template <class T>
void sample_rows(const Rows<T>& rows, const T* logits, int64_t first, int64_t count, int64_t vocab,
                 const SamplingDesc& desc, const char* op) {
  std::atomic<int64_t> bad = count;
  parallel_for(count, row_grain(vocab), [&](int64_t begin, int64_t end) {
    Row<T> row{.vocab = vocab, .softmax = {}, .kept = SoftmaxWeights<T>(vocab)};
    for (int64_t i = begin; i < end; ++i) {
      row.logits = logits + i * vocab;
      row.softmax =
          row_softmax(row.logits, vocab, desc.temperature == 0 ? 1 : desc.temperature, &row.kept);
      if (!row.softmax.valid()) {
        int64_t lowest = bad.load();
        while (i < lowest && !bad.compare_exchange_weak(lowest, i)) {
        }
        continue;
      }
      const int64_t at = first + i;
      const auto words = philox(desc.seed, static_cast<uint64_t>(rows.stream[at]),
                                static_cast<uint64_t>(rows.index[at]));
      const Choice choice = choose(row, desc, uniform_f64(words[0], words[1]));
      rows.tokens[at] = static_cast<int32_t>(choice.token);
      rows.logprob[at] = row_logprob(row.softmax, row.logits[choice.token]);
      rows.entropy[at] = static_cast<T>(row.softmax.entropy());
      rows.cut[at] = static_cast<T>(choice.cut);
    }
  });
  if (bad != count)
    throw NonFiniteError(str("[", op, "] row ", first + bad,
                             ": the logits hold NaN or infinity, or leave no token"));
}

}  // namespace

void head_sample(const HeadSample& args) {
  dispatch_float(args.x.dtype(), "head_sample", [&]<class T>() {
    const int64_t chunk = args.desc.chunk_tokens > 0
                              ? args.desc.chunk_tokens
                              : head_chunk_tokens(args.w.dim(0), 0, args.x.device());
    const Rows<T> rows(args.out, args.rng_stream, args.rng_index);
    for_logit_chunks(args.x, args.w, chunk, [&](int64_t begin, Tensor& logits) {
      sample_rows(rows, logits.data<T>(), begin, logits.dim(0), logits.dim(1), args.desc,
                  "head_sample");
    });
  });
}

void sample_logits(const SampleLogits& args) {
  dispatch_float(args.logits.dtype(), "sample_logits", [&]<class T>() {
    sample_rows(Rows<T>(args.out, args.rng_stream, args.rng_index), args.logits.data<T>(), 0,
                args.logits.dim(0), args.logits.dim(1), args.desc, "sample_logits");
  });
}

}  // namespace cohort::kernels::cpu
