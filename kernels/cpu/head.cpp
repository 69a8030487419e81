// The fused language model head on the CPU. A chunk's logits come from the row-independent matmul;
// only one chunk exists at a time.
#include "kernels/head.h"
#include "kernels/cpu/row_softmax.h"
#include "kernels/matmul.h"

namespace cohort::kernels::cpu {
namespace {

void check_targets(const Tensor& targets, int64_t vocab, const char* op) {
  const int32_t* target = targets.data<int32_t>();
  for (int64_t t = 0; t < targets.numel(); ++t)
    COHORT_CHECK(target[t] >= 0 && target[t] < vocab, "[", op, "] target ", target[t],
                 " at position ", t, " is outside the vocabulary of ", vocab);
}

// The scalars of one token's backward.
template <class T>
struct TokenGrad {
  T inverse_temperature, lse, entropy, dlogprob, dentropy;
};

// Replaces logits by their gradient.
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

// Replaces the logits of tokens from `first` on by their gradients, from which it writes dx and
// accumulates dw.
template <class T>
void chunk_backward(const HeadLogprobBackward& args, int64_t first, Tensor& logits) {
  const int64_t count = logits.dim(0), vocab = logits.dim(1);
  const int32_t* target = args.targets.data<int32_t>();
  const T *lse = args.lse.data<T>(), *entropy = args.entropy.data<T>(),
          *dlogprob = args.dlogprob.data<T>();
  const T* dentropy = args.dentropy.defined() ? args.dentropy.data<T>() : nullptr;
  for_rows(count, vocab, [&](int64_t i) {
    const int64_t t = first + i;
    logits_backward(logits.data<T>() + i * vocab, vocab, target[t],
                    {.inverse_temperature = static_cast<T>(1 / args.desc.temperature),
                     .lse = lse[t],
                     .entropy = entropy[t],
                     .dlogprob = dlogprob[t],
                     .dentropy = dentropy != nullptr ? dentropy[t] : T(0)});
  });
  if (args.dw.wanted())
    matmul({.c = args.dw.tensor,
            .a = logits,
            .b = args.x.narrow(0, first, count),
            .desc = {.a = Transpose::kYes, .out = Grad::kAccumulate}});
  if (args.dx.wanted()) {
    Tensor dx = args.dx.tensor.narrow(0, first, count);
    matmul({.c = dx, .a = logits, .b = args.w, .desc = {.out = args.dx.mode}});
  }
}

}  // namespace

void head_logprob_forward(const HeadLogprobForward& args) {
  const int64_t vocab = args.w.dim(0);
  check_targets(args.targets, vocab, "head");
  const HeadLossGradients* gradients = args.gradients;
  if (gradients != nullptr && gradients->dw.wanted() && gradients->dw.mode == Grad::kOverwrite)
    gradients->dw.tensor.zero_();
  dispatch_float(args.x.dtype(), "head", [&]<class T>() {
    T *plogprob = args.logprob.data<T>(), *pentropy = args.entropy.data<T>(),
      *plse = args.lse.data<T>();
    const int32_t* target = args.targets.data<int32_t>();
    const int64_t rows = head_chunk_tokens(vocab, args.desc.chunk_tokens, {});
    for_logit_chunks(args.x, args.w, rows, [&](int64_t first, Tensor& logits) {
      const int64_t count = logits.dim(0);
      for_rows(count, vocab, [&](int64_t i) {
        const int64_t t = first + i;
        const T* z = logits.data<T>() + i * vocab;
        const RowSoftmax row = row_softmax<T>(z, vocab, args.desc.temperature, nullptr);
        plogprob[t] = row_logprob(row, z[target[t]]);
        pentropy[t] = static_cast<T>(row.entropy());
        plse[t] = static_cast<T>(row.lse());
      });
      if (gradients == nullptr) return;
      if (gradients->set_dlogprob) gradients->set_dlogprob(first, count);
      chunk_backward<T>({.dx = gradients->dx,
                         .dw = gradients->dw,
                         .dlogprob = gradients->dlogprob,
                         .dentropy = {},
                         .x = args.x,
                         .w = args.w,
                         .targets = args.targets,
                         .lse = args.lse,
                         .entropy = args.entropy,
                         .desc = args.desc},
                        first, logits);
    });
  });
}

void head_logprob_backward(const HeadLogprobBackward& args) {
  const int64_t vocab = args.w.dim(0);
  check_targets(args.targets, vocab, "head_backward");
  if (args.dw.wanted() && args.dw.mode == Grad::kOverwrite) args.dw.tensor.zero_();
  dispatch_float(args.x.dtype(), "head_backward", [&]<class T>() {
    const int64_t rows = head_chunk_tokens(vocab, args.desc.chunk_tokens, {});
    for_logit_chunks(args.x, args.w, rows, [&](int64_t first, Tensor& logits) {
      chunk_backward<T>(args, first, logits);
    });
  });
}

}  // namespace cohort::kernels::cpu
