// The fused language model head on the CPU. Active tokens are gathered into
// chunks, so that skipped ones cost nothing; a chunk's logits come from the row-independent product
// and live only inside the chunk.
#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/row_softmax.h"
#include "kernels/head.h"
#include "kernels/matmul.h"

namespace cohort::kernels::cpu {
namespace {

void check_targets(const Tensor& targets, int64_t vocab, const char* op) {
  const int32_t* target = targets.data<int32_t>();
  for (int64_t t = 0; t < targets.numel(); ++t)
    COHORT_CHECK(target[t] >= -1 && target[t] < vocab, "[", op, "] target ", target[t],
                 " at position ", t, " is outside the vocabulary of ", vocab,
                 " (-1 skips a token)");
}

std::vector<int64_t> active_tokens(const Tensor& targets) {
  std::vector<int64_t> active;
  const int32_t* target = targets.data<int32_t>();
  for (int64_t t = 0; t < targets.numel(); ++t)
    if (target[t] >= 0) active.push_back(t);
  return active;
}

// One chunk of active tokens: their hidden states, gathered, and their logits.
template <class T>
struct Chunk {
  Tensor x, logits;
  const int64_t* tokens;
  int64_t count;
};

// Calls fn for each chunk in ascending order, with the raw logits x w^T.
template <class T, class F>
void for_chunks(const Tensor& x, const Tensor& w, const std::vector<int64_t>& active,
                const HeadDesc& desc, F&& fn) {
  const auto total = static_cast<int64_t>(active.size());
  const int64_t channels = x.dim(1);
  const int64_t rows = std::min(head_chunk_tokens(w.dim(0), desc.chunk_tokens, {}), total);
  Tensor gathered = Tensor::empty({rows, channels}, x.dtype());
  Tensor logits = Tensor::empty({rows, w.dim(0)}, x.dtype());
  const T* source = x.data<T>();
  for (int64_t begin = 0; begin < total; begin += rows) {
    const int64_t count = std::min(rows, total - begin);
    Chunk<T> chunk{gathered.narrow(0, 0, count), logits.narrow(0, 0, count), active.data() + begin,
                   count};
    T* to = chunk.x.template data<T>();
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(source + chunk.tokens[i] * channels, channels, to + i * channels);
    matmul({.c = chunk.logits, .a = chunk.x, .b = w, .desc = {.b = Transpose::kYes}});
    fn(chunk);
  }
}

// The scalars of one token's backward.
template <class T>
struct TokenGrad {
  T inverse_temperature, lse, entropy, dlogprob, dentropy;
};

// Logits to their gradient, in place.
template <class T>
void logits_backward(T* z, int64_t vocab, int64_t target, const TokenGrad<T>& g) {
  const bool with_entropy = g.dentropy != T(0);
  COHORT_VECTORIZE
  for (int64_t v = 0; v < vocab; ++v) {
    const T log_p = z[v] * g.inverse_temperature - g.lse;
    const T p = vexp(log_p);
    const T curve = with_entropy && p > 0 ? g.dentropy * (log_p + g.entropy) : T(0);
    z[v] = -p * (g.dlogprob + curve) * g.inverse_temperature;
  }
  z[target] += g.dlogprob * g.inverse_temperature;
}

template <class T>
void scatter_rows(T* out, const T* rows, const int64_t* tokens, int64_t count, int64_t cols,
                  Grad mode) {
  parallel_for(count, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* to = out + tokens[i] * cols;
      const T* from = rows + i * cols;
      for (int64_t c = 0; c < cols; ++c)
        to[c] = mode == Grad::kOverwrite ? from[c] : to[c] + from[c];
    }
  });
}

}  // namespace

void head_logprob_forward(const HeadLogprobForward& args) {
  const int64_t vocab = args.w.dim(0);
  check_targets(args.targets, vocab, "head");
  dispatch_float(args.x.dtype(), "head", [&]<class T>() {
    args.logprob.zero_();
    args.entropy.zero_();
    args.lse.zero_();
    T *plogprob = args.logprob.data<T>(), *pentropy = args.entropy.data<T>(),
      *plse = args.lse.data<T>();
    const int32_t* target = args.targets.data<int32_t>();
    for_chunks<T>(args.x, args.w, active_tokens(args.targets), args.desc, [&](Chunk<T>& chunk) {
      const T* logits = chunk.logits.template data<T>();
      parallel_for(chunk.count, row_grain(vocab), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t t = chunk.tokens[i];
          const T* z = logits + i * vocab;
          const RowSoftmax row = row_softmax<T>(z, vocab, args.desc.temperature, nullptr);
          plogprob[t] = row_logprob(row, z[target[t]]);
          pentropy[t] = static_cast<T>(row.entropy());
          plse[t] = static_cast<T>(row.lse());
        }
      });
    });
  });
}

void head_logprob_backward(const HeadLogprobBackward& args) {
  const int64_t vocab = args.w.dim(0);
  check_targets(args.targets, vocab, "head_backward");
  dispatch_float(args.x.dtype(), "head_backward", [&]<class T>() {
    for (const GradOut& grad : {args.dx, args.dw})
      if (grad.wanted() && grad.mode == Grad::kOverwrite) grad.tensor.zero_();
    const int32_t* target = args.targets.data<int32_t>();
    const T *plse = args.lse.data<T>(), *pentropy = args.entropy.data<T>(),
            *dlp = args.dlogprob.data<T>();
    const T* dent = args.dentropy.defined() ? args.dentropy.data<T>() : nullptr;
    for_chunks<T>(args.x, args.w, active_tokens(args.targets), args.desc, [&](Chunk<T>& chunk) {
      T* logits = chunk.logits.template data<T>();
      parallel_for(chunk.count, row_grain(vocab), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t t = chunk.tokens[i];
          logits_backward(logits + i * vocab, vocab, target[t],
                          {.inverse_temperature = static_cast<T>(1 / args.desc.temperature),
                           .lse = plse[t],
                           .entropy = pentropy[t],
                           .dlogprob = dlp[t],
                           .dentropy = dent != nullptr ? dent[t] : T(0)});
        }
      });
      if (args.dw.wanted())
        matmul({.c = args.dw.tensor,
                .a = chunk.logits,
                .b = chunk.x,
                .desc = {.a = Transpose::kYes, .out = Grad::kAccumulate}});
      if (args.dx.wanted()) {  // the gathered rows are free now: they take the gradient
        matmul({.c = chunk.x, .a = chunk.logits, .b = args.w});
        scatter_rows(args.dx.tensor.data<T>(), chunk.x.template data<T>(), chunk.tokens,
                     chunk.count, args.x.dim(1), args.dx.mode);
      }
    });
  });
}

}  // namespace cohort::kernels::cpu
