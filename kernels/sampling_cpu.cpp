// Drawing tokens by inverting the CDF in ascending id order. The exponentials are those of
// row_softmax.h: computed once in blocks, and again only inside the block that holds the draw.
#include "kernels/sampling.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "core/rng.h"
#include "kernels/matmul.h"
#include "kernels/row_softmax.h"

namespace cohort::kernels {
namespace {

// One row of logits with its distribution. mass(v) is the unnormalised probability of token v, the
// same bits as in row_softmax.
template <class T>
struct Row {
  const T* logits;
  int64_t vocab;
  RowSoftmax softmax;
  std::vector<double> block_sums;

  double mass(int64_t v) const {
    return static_cast<double>(vexp(scaled_logit(logits[v], static_cast<T>(softmax.largest),
                                                 static_cast<T>(softmax.inverse_temperature))));
  }
};

// The token where the cumulative mass, which starts at `before`, first exceeds `target`. Tokens
// come from id(i), i in [0, n); one without mass is never returned. Where rounding leaves the
// target unreached it is the last one with mass.
template <class T, class F>
int64_t invert(const Row<T>& row, int64_t n, double before, double target, F&& id) {
  int64_t last = -1;
  for (int64_t i = 0; i < n; ++i) {
    const double mass = row.mass(id(i));
    if (mass <= 0) continue;
    last = id(i);
    before += mass;
    if (before > target) break;
  }
  return last;
}

template <class T>
int64_t draw_from_all(const Row<T>& row, double u) {
  const double target = u * row.softmax.sum;
  double before = 0, cumulative = 0;
  size_t chosen = 0;
  for (size_t b = 0; b < row.block_sums.size(); ++b) {
    if (row.block_sums[b] <= 0) continue;
    chosen = b;
    before = cumulative;
    cumulative += row.block_sums[b];
    if (cumulative > target) break;
  }
  const int64_t begin = static_cast<int64_t>(chosen) * kSoftmaxBlock;
  return invert(row, std::min(kSoftmaxBlock, row.vocab - begin), before, target,
                [&](int64_t i) { return begin + i; });
}

template <class T>
double total_mass(const Row<T>& row, const std::vector<int32_t>& ids) {
  double total = 0;
  for (const int32_t v : ids) total += row.mass(v);
  return total;
}

// Keeps the most probable tokens until their mass reaches `top_p` of `total`. Sorts only as far as
// it must: a first piece of 256, then four times as many each time.
template <class T, class Better>
void keep_nucleus(const Row<T>& row, std::vector<int32_t>& ids, double top_p, double total,
                  Better&& better) {
  double mass = 0;
  size_t done = 0;
  while (done < ids.size()) {
    const size_t next = std::min(ids.size(), std::max<size_t>(256, 4 * done));
    const auto first = ids.begin() + static_cast<int64_t>(done);
    const auto last = ids.begin() + static_cast<int64_t>(next);
    if (next < ids.size()) std::nth_element(first, last, ids.end(), better);
    std::sort(first, last, better);
    for (; done < next; ++done) {
      mass += row.mass(ids[done]);
      if (mass >= top_p * total) return ids.resize(done + 1);
    }
  }
}

// The ids that top-k and top-p leave, ascending.
template <class T>
std::vector<int32_t> candidates(const Row<T>& row, const SamplingDesc& desc) {
  const auto better = [&](int32_t a, int32_t b) {
    return row.logits[a] > row.logits[b] || (row.logits[a] == row.logits[b] && a < b);
  };
  std::vector<int32_t> ids(static_cast<size_t>(row.vocab));
  std::iota(ids.begin(), ids.end(), 0);
  double total = row.softmax.sum;
  if (desc.top_k > 0 && desc.top_k < row.vocab) {
    std::nth_element(ids.begin(), ids.begin() + desc.top_k, ids.end(), better);
    ids.resize(static_cast<size_t>(desc.top_k));
    std::sort(ids.begin(), ids.end());
    total = total_mass(row, ids);
  }
  if (desc.top_p < 1) {
    keep_nucleus(row, ids, desc.top_p, total, better);
    std::sort(ids.begin(), ids.end());
  }
  return ids;
}

template <class T>
int64_t choose(const Row<T>& row, const SamplingDesc& desc, double u) {
  if (desc.temperature == 0)
    return std::find(row.logits, row.logits + row.vocab, static_cast<T>(row.softmax.largest)) -
           row.logits;
  if ((desc.top_k == 0 || desc.top_k >= row.vocab) && desc.top_p >= 1) return draw_from_all(row, u);
  const std::vector<int32_t> ids = candidates(row, desc);
  return invert(row, static_cast<int64_t>(ids.size()), 0, u * total_mass(row, ids),
                [&](int64_t i) { return ids[static_cast<size_t>(i)]; });
}

void check_desc(const SamplingDesc& desc, const char* op) {
  COHORT_CHECK(desc.temperature >= 0 && std::isfinite(desc.temperature), "[", op,
               "] expected a temperature of 0 or more, got ", desc.temperature);
  COHORT_CHECK(desc.top_k >= 0, "[", op, "] expected top_k of 0 or more, got ", desc.top_k);
  COHORT_CHECK(desc.top_p > 0 && desc.top_p <= 1, "[", op, "] expected top_p in (0, 1], got ",
               desc.top_p);
  COHORT_CHECK(desc.chunk_tokens > 0, "[", op, "] expected chunk_tokens above 0, got ",
               desc.chunk_tokens);
}

template <class T>
struct Outputs {
  int32_t* tokens;
  T* logprob;
  const int64_t *stream, *index;
};

template <class T>
Outputs<T> check_outputs(Tensor& tokens, Tensor& logprob, const Tensor& stream, const Tensor& index,
                         int64_t n, DType dtype, const char* op) {
  check_tensor(tokens, {n}, DType::kI32, op, "tokens");
  check_tensor(logprob, {n}, dtype, op, "logprob");
  check_tensor(stream, {n}, DType::kI64, op, "rng_stream");
  check_tensor(index, {n}, DType::kI64, op, "rng_index");
  return {tokens.data<int32_t>(), logprob.data<T>(), stream.data<int64_t>(), index.data<int64_t>()};
}

// Draws for rows [first, first + count), whose logits are given. Throws after the loop, as the loop
// may run in threads, naming the first row that has no distribution.
template <class T>
void sample_rows(const Outputs<T>& out, const T* logits, int64_t first, int64_t count,
                 int64_t vocab, const SamplingDesc& desc, const char* op) {
  std::atomic<int64_t> bad = count;
  parallel_for(count, row_grain(vocab), [&](int64_t begin, int64_t end) {
    Row<T> row{.logits = nullptr, .vocab = vocab, .softmax = {}, .block_sums = {}};
    row.block_sums.resize(static_cast<size_t>((vocab + kSoftmaxBlock - 1) / kSoftmaxBlock));
    for (int64_t i = begin; i < end; ++i) {
      row.logits = logits + i * vocab;
      row.softmax = row_softmax(row.logits, vocab, desc.temperature == 0 ? 1 : desc.temperature,
                                row.block_sums.data());
      if (!row.softmax.valid()) {
        int64_t lowest = bad.load();
        while (i < lowest && !bad.compare_exchange_weak(lowest, i)) {
        }
        continue;
      }
      const int64_t at = first + i;
      const auto words = philox(desc.seed, static_cast<uint64_t>(out.stream[at]),
                                static_cast<uint64_t>(out.index[at]));
      const int64_t token = choose(row, desc, uniform_f64(words[0], words[1]));
      out.tokens[at] = static_cast<int32_t>(token);
      out.logprob[at] = row_logprob(row.softmax, row.logits[token]);
    }
  });
  COHORT_CHECK(bad == count, "[", op, "] row ", first + bad,
               ": the logits hold NaN or infinity, or leave no token");
}

}  // namespace

void head_sample(Tensor& tokens, Tensor& logprob, const Tensor& x, const Tensor& w,
                 const Tensor& rng_stream, const Tensor& rng_index, const SamplingDesc& desc) {
  constexpr const char* kOp = "head_sample";
  COHORT_CHECK(x.rank() == 2 && w.rank() == 2 && x.dim(1) == w.dim(1),
               "[head_sample] expected x [n, C] and w [V, C], got ", x.str(), " and ", w.str());
  check_desc(desc, kOp);
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    const int64_t n = x.dim(0), vocab = w.dim(0), rows = std::min(desc.chunk_tokens, n);
    check_tensor(x, x.shape(), x.dtype(), kOp, "x");
    check_tensor(w, w.shape(), x.dtype(), kOp, "w");
    const auto out = check_outputs<T>(tokens, logprob, rng_stream, rng_index, n, x.dtype(), kOp);
    Tensor logits = Tensor::empty({rows, vocab}, x.dtype());
    for (int64_t begin = 0; begin < n; begin += rows) {
      const int64_t count = std::min(rows, n - begin);
      Tensor chunk = logits.narrow(0, 0, count);
      matmul(chunk, x.narrow(0, begin, count), w, {.b = Transpose::kYes});
      sample_rows(out, chunk.data<T>(), begin, count, vocab, desc, kOp);
    }
  });
}

void sample_logits(Tensor& tokens, Tensor& logprob, const Tensor& logits, const Tensor& rng_stream,
                   const Tensor& rng_index, const SamplingDesc& desc) {
  constexpr const char* kOp = "sample_logits";
  COHORT_CHECK(logits.rank() == 2, "[sample_logits] expected logits [n, V], got ", logits.str());
  check_desc(desc, kOp);
  dispatch_float(logits.dtype(), kOp, [&]<class T>() {
    const int64_t n = logits.dim(0), vocab = logits.dim(1);
    check_tensor(logits, logits.shape(), logits.dtype(), kOp, "logits");
    const auto out =
        check_outputs<T>(tokens, logprob, rng_stream, rng_index, n, logits.dtype(), kOp);
    sample_rows(out, logits.data<T>(), 0, n, vocab, desc, kOp);
  });
}

}  // namespace cohort::kernels
