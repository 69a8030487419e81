// The row ops of the language model head on the CPU.
#include "kernels/head.h"
#include "kernels/cpu/row_softmax.h"

namespace cohort::kernels::cpu {
namespace {

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

}  // namespace

void head_statistics(const HeadStatistics& args) {
  const int64_t count = args.logits.dim(0), vocab = args.logits.dim(1), begin = args.begin,
                stride = args.logits.strides()[0];
  const int32_t* target = args.targets.data<int32_t>();
  for (int64_t t = begin; t < begin + count; ++t)
    COHORT_CHECK(target[t] >= 0 && target[t] < vocab, "[head] target ", target[t], " at position ",
                 t, " is outside the vocabulary of ", vocab);
  dispatch_float(args.logits.dtype(), "head", [&]<class T>() {
    T *logprob = args.logprob.data<T>(), *entropy = args.entropy.data<T>(),
      *lse = args.lse.data<T>();
    for_rows(count, vocab, [&](int64_t i) {
      const T* z = args.logits.data<T>() + i * stride;
      const RowSoftmax row = row_softmax<T>(z, vocab, args.temperature, nullptr);
      logprob[begin + i] = row_logprob(row, z[target[begin + i]]);
      entropy[begin + i] = static_cast<T>(row.entropy());
      lse[begin + i] = static_cast<T>(row.lse());
    });
  });
}

void head_logit_gradients(const HeadLogitGradients& args) {
  const int64_t count = args.logits.dim(0), vocab = args.logits.dim(1), begin = args.begin,
                stride = args.logits.strides()[0];
  COHORT_CHECK(args.dz.raw() == args.logits.raw() && args.dz.strides() == args.logits.strides(),
               "[head_backward] expected dz in place of logits");
  const int32_t* target = args.targets.data<int32_t>();
  dispatch_float(args.logits.dtype(), "head_backward", [&]<class T>() {
    const T *lse = args.lse.data<T>(), *entropy = args.entropy.data<T>(),
            *dlogprob = args.dlogprob.data<T>();
    const T* dentropy = args.dentropy.defined() ? args.dentropy.data<T>() : nullptr;
    for_rows(count, vocab, [&](int64_t i) {
      const int64_t t = begin + i;
      logits_backward(args.dz.data<T>() + i * stride, vocab, target[t],
                      {.inverse_temperature = static_cast<T>(1 / args.temperature),
                       .lse = lse[t],
                       .entropy = entropy[t],
                       .dlogprob = dlogprob[t],
                       .dentropy = dentropy != nullptr ? dentropy[t] : T(0)});
    });
  });
}

}  // namespace cohort::kernels::cpu
