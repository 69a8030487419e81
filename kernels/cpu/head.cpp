// The row ops of the language model head on the CPU.
#include "kernels/head.h"
#include <algorithm>
#include <numeric>

#include "kernels/cpu/row_softmax.h"
#include "kernels/divergence.h"

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

// Sets the teacher's top_k likeliest tokens.
template <class T>
void find_likely(const T* teacher, int64_t vocab, int64_t top_k, DivergenceRow<T>& row) {
  if (top_k >= vocab) return;
  std::vector<int64_t> ids(static_cast<size_t>(vocab));
  std::iota(ids.begin(), ids.end(), 0);
  const auto last = ids.begin() + top_k - 1;
  std::ranges::nth_element(ids, last, [&](int64_t a, int64_t b) {
    return teacher[a] > teacher[b] || (teacher[a] == teacher[b] && a < b);
  });
  row.least = teacher[*last];
  row.last_id = static_cast<T>(*last);
}

// The rows of a call's logits as entries.
template <class T>
struct DivergenceRows {
  const HeadDivergence& args;
  const T inverse_temperature = static_cast<T>(1 / args.temperature);
  const T *lse = args.lse.data<T>(), *teacher_lse = args.teacher_lse.data<T>();
  auto* row(int64_t i) const {
    return static_cast<DivergenceRow<T>*>(args.rows.raw()) + args.begin + i;
  }
  const T* teacher(int64_t i) const {
    return args.teacher_logits.data<T>() + i * args.teacher_logits.strides()[0];
  }
  DivergenceEntry<T> entry(int64_t i, T logit, T teacher_logit) const {
    return {logit * inverse_temperature - lse[args.begin + i],
            teacher_logit * inverse_temperature - teacher_lse[args.begin + i]};
  }
};

// Adds a divergence's gradients to dz, which has taken the place of the logits.
template <class T>
void add_divergence_gradients(T* dz, const T* logits, int64_t i, T scale,
                              const DivergenceRows<T>& rows) {
  const T* teacher = rows.teacher(i);
  for (int64_t v = 0; v < rows.args.logits.dim(1); ++v)
    dz[v] += scale * divergence_gradient(*rows.row(i), rows.entry(i, logits[v], teacher[v]),
                                         is_likely(*rows.row(i), teacher[v], v), rows.args.desc);
}

}  // namespace

void head_divergence(const HeadDivergence& args) {
  const int64_t count = args.logits.dim(0), vocab = args.logits.dim(1);
  dispatch_float(args.logits.dtype(), "head_divergence", [&]<class T>() {
    const DivergenceRows<T> rows{args};
    T* divergence = args.divergence.data<T>() + args.begin;
    for_rows(count, vocab, [&](int64_t i) {
      const T *z = args.logits.data<T>() + i * args.logits.strides()[0], *teacher = rows.teacher(i);
      DivergenceRow<T> row;
      if (args.desc.top_k > 0) find_likely(teacher, vocab, args.desc.top_k, row);
      DivergenceTerms sum;
      double others_p = 0, others_q = 0;
      for (int64_t v = 0; v < vocab; ++v) {
        const DivergenceEntry<T> entry = rows.entry(i, z[v], teacher[v]);
        if (is_likely(row, teacher[v], v)) {
          const DivergenceTerms more = entry.terms(args.desc);
          sum.divergence += more.divergence;
          sum.to_mixture += more.to_mixture;
        } else {
          others_p += static_cast<double>(entry.p);
          others_q += static_cast<double>(entry.q);
        }
      }
      divergence[i] = finish_divergence(row, sum, others_p, others_q, args.desc);
      *rows.row(i) = row;
    });
  });
}

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
      T* dz = args.dz.data<T>() + i * stride;
      std::vector<T> logits;
      if (args.divergence != nullptr) logits.assign(dz, dz + vocab);
      logits_backward(dz, vocab, target[t],
                      {.inverse_temperature = static_cast<T>(1 / args.temperature),
                       .lse = lse[t],
                       .entropy = entropy[t],
                       .dlogprob = dlogprob[t],
                       .dentropy = dentropy != nullptr ? dentropy[t] : T(0)});
      if (args.divergence == nullptr) return;
      const DivergenceRows<T> rows{*args.divergence};
      add_divergence_gradients(dz, logits.data(), i,
                               args.ddivergence.data<T>()[t] * rows.inverse_temperature, rows);
    });
  });
}

}  // namespace cohort::kernels::cpu
