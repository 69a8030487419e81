// The language model head and the losses on top of it. One loop over chunks of tokens says how
// logits, row statistics, log-probs, a loss's gradient and the gradients of x and w follow each
// other, for training, evaluation and the reference alike.
#include <cmath>
#include <optional>
#include <utility>

#include "autograd/ops.h"
#include "core/trace.h"
#include "kernels/arguments.h"
#include "kernels/divergence.h"
#include "kernels/matmul.h"

namespace cohort {
namespace {

using kernels::Grad;
using kernels::GradOut;

// Checks the arguments that both passes share; returns the rows of logits that are held at a time.
int64_t check_head(const HeadInputs& in, const char* op) {
  const auto& [x, w, targets, desc, bias] = in;
  kernels::ArgumentCheck check(op);
  check("[T, C] x; [V, C] w; i32 [T] targets", x, w, targets);
  COHORT_CHECK(desc.temperature > 0 && std::isfinite(desc.temperature), "[", op,
               "] expected a temperature above 0, got ", desc.temperature);
  COHORT_CHECK(desc.chunk_tokens >= 0, "[", op, "] expected chunk_tokens of 0 or more, got ",
               desc.chunk_tokens);
  return kernels::head_chunk_tokens(w.dim(0), desc.chunk_tokens, x.device());
}

// Computes the gradients of x and w from those of the logits, which come chunk by chunk in
// ascending order. bf16 gradients of logits are collected for GEMMs over more tokens, because a
// GEMM over few tokens would read and write all of dw for little work; others replace the logits.
class LogitGradients {
 public:
  LogitGradients(const Tensor& x, const Tensor& w, GradOut dx, GradOut dw, GradSlot dbias,
                 int64_t rows)
      : x_(x), w_(w), dx_(dx), dw_(dw), dbias_(dbias) {
    kernels::ArgumentCheck check("head");
    check("[T, C] x, dx?; [V, C] w; accumulate [V, C] dw?; accumulate [V] dbias?", x, dx, w, dw,
          GradOut(dbias_));
    for (const GradOut& out : {dw, GradOut(dbias_)})
      if (x.dim(0) == 0 && out.wanted() && out.mode == Grad::kOverwrite)
        out.tensor.with_padding().zero_();
    if (x.dtype() != DType::kBF16) return;
    const int64_t vocab = w.dim(0), padded = w.with_padding().dim(0),
                  tokens = kernels::head_gradient_tokens(x.dim(0), padded, rows);
    collected_ = Tensor::empty({tokens, padded}, x.dtype(), x.device());
    collected_.narrow(1, vocab, padded - vocab).zero_();
  }

  // The memory for the gradients of the logits of tokens from `begin` on.
  Tensor chunk(int64_t begin, const Tensor& logits) const {
    if (!collected_.defined()) return logits;
    return collected_.narrow(0, begin % collected_.dim(0), logits.dim(0))
        .hide_padding(1, logits.dim(1));
  }
  // Adds a chunk. With `factor` [T], row t of dz is still to be multiplied by factor[t]; it is
  // applied to the rows of x and dx instead.
  void add(int64_t begin, const Tensor& dz, const Tensor& factor) {
    if (!collected_.defined()) return add_gemms(begin, dz.with_padding(), factor);
    const int64_t end = begin + dz.dim(0), capacity = collected_.dim(0);
    if (end % capacity != 0 && end != x_.dim(0)) return;
    const int64_t first = (end - 1) / capacity * capacity;
    add_gemms(first, collected_.narrow(0, 0, end - first), factor);
  }

 private:
  // The columns of dz include the padding, whose gradients are zero.
  void add_gemms(int64_t begin, const Tensor& dz, const Tensor& factor) {
    const auto part = [&](const Tensor& t) { return t.narrow(0, begin, dz.dim(0)); };
    const Tensor w = w_.with_padding();
    // dw and dbias accumulate over the chunks; the first has the requested mode.
    const auto mode = [&](const auto& out) { return begin == 0 ? out.mode : Grad::kAccumulate; };
    if (dbias_.tensor.defined()) {
      Tensor dbias = dbias_.tensor.with_padding();
      kernels::bias_backward({.dbias = {dbias, mode(dbias_)}, .dy = dz});
    }
    if (dw_.wanted()) {
      Tensor x = part(x_);
      if (factor.defined()) {
        Tensor scaled = Tensor::empty_like(x);
        kernels::scale_rows({.y = scaled, .x = x, .factor = part(factor)});
        x = scaled;
      }
      Tensor dw = dw_.tensor.with_padding();
      kernels::matmul(
          {.c = dw, .a = dz, .b = x, .desc = {.a = kernels::Transpose::kYes, .out = mode(dw_)}});
    }
    if (!dx_.wanted()) return;
    Tensor dx = part(dx_.tensor);
    // This GEMM has few rows and K = vocab, so split-K is allowed to occupy the device. No log-prob
    // depends on it.
    kernels::MatmulDesc desc{.out = dx_.mode, .split_k = kernels::SplitK::kAllowed};
    if (!factor.defined()) return kernels::matmul({.c = dx, .a = dz, .b = w, .desc = desc});
    desc.out = Grad::kOverwrite;
    Tensor unscaled = Tensor::empty(dx.shape(), DType::kF32, dx.device());
    kernels::matmul({.c = unscaled, .a = dz, .b = w, .desc = desc});
    kernels::scale_rows({.y = dx, .x = unscaled, .factor = part(factor), .mode = dx_.mode});
  }

  const Tensor &x_, &w_;
  GradOut dx_, dw_;
  GradSlot dbias_;
  Tensor collected_;  // undefined: gradients replace the logits
};

// Computes the divergence of the tokens of `logits`, from `begin` on, and calls fn() while the
// teacher's logits are there. `rows`, [T, 5], and `lse`, [T], are for its values of rows.
void with_divergence(const HeadLogprobForward& args, int64_t begin, const Tensor& logits,
                     Tensor& rows, Tensor& lse,
                     const std::function<void(const kernels::HeadDivergence*)>& fn) {
  if (args.teacher == nullptr) return fn(nullptr);
  const auto& [teacher, divergence, ddivergence] = *args.teacher;
  const int64_t count = logits.dim(0), vocab = logits.dim(1);
  COHORT_CHECK(teacher.w.dim(0) >= vocab && teacher.x.dim(0) == args.in.x.dim(0),
               "[head] expected a teacher of at least ", vocab, " tokens at ", args.in.x.dim(0),
               " positions, got ", teacher.w.dim(0), " and ", teacher.x.dim(0));
  const auto compute = [&](int64_t, Tensor& all) {
    const Tensor part = all.narrow(1, 0, vocab);
    Tensor logprob = Tensor::empty_like(lse), entropy = Tensor::empty_like(lse);
    kernels::head_statistics({.logprob = logprob,
                              .entropy = entropy,
                              .lse = lse,
                              .logits = part,
                              .targets = args.in.targets,
                              .begin = begin,
                              .temperature = args.in.desc.temperature});
    const kernels::HeadDivergence call{.divergence = divergence,
                                       .rows = rows,
                                       .logits = logits,
                                       .teacher_logits = part,
                                       .lse = args.lse,
                                       .teacher_lse = lse,
                                       .begin = begin,
                                       .temperature = args.in.desc.temperature,
                                       .desc = teacher.desc};
    kernels::head_divergence(call);
    fn(&call);
  };
  kernels::for_logit_chunks({teacher.x.narrow(0, begin, count), teacher.w, teacher.bias}, count,
                            compute);
}

}  // namespace

void head_logprob_forward(const HeadLogprobForward& args) {
  const HeadInputs& in = args.in;
  const int64_t rows = check_head(in, "head");
  const OpSpan span("head_logprob_forward");
  const HeadLossGradients* const loss = args.gradients;
  std::optional<LogitGradients> gradients;
  if (loss != nullptr) gradients.emplace(in.x, in.w, loss->dx, loss->dw, loss->dbias, rows);
  // The factors of unit gradients are applied to rows of x, which a bias does not have.
  const bool unit = loss != nullptr && !loss->dentropy.defined() && !in.bias.defined() &&
                    args.teacher == nullptr && kernels::has_unit_gradients(in.w);
  Tensor values, teacher_lse;
  if (args.teacher != nullptr) {
    teacher_lse = Tensor::empty_like(args.lse);
    values = Tensor::empty({in.x.dim(0), kernels::kDivergenceRowSize}, args.lse.dtype(),
                           args.lse.device());
  }
  kernels::for_logit_chunks({in.x, in.w, in.bias}, rows, [&](int64_t begin, Tensor& logits) {
    Tensor dz = gradients ? gradients->chunk(begin, logits) : Tensor();
    kernels::head_statistics({.logprob = args.logprob,
                              .entropy = args.entropy,
                              .lse = args.lse,
                              .logits = logits,
                              .targets = in.targets,
                              .begin = begin,
                              .temperature = in.desc.temperature,
                              .unit_gradients = unit ? dz : Tensor()});
    const auto add_gradients = [&](const kernels::HeadDivergence* divergence) {
      if (loss == nullptr) return;
      if (loss->set_dlogprob) loss->set_dlogprob(begin, logits.dim(0));
      if (!unit)
        kernels::head_logit_gradients(
            {.dz = dz,
             .logits = logits,
             .dlogprob = loss->dlogprob,
             .dentropy = loss->dentropy,
             .lse = args.lse,
             .entropy = args.entropy,
             .targets = in.targets,
             .begin = begin,
             .temperature = in.desc.temperature,
             .divergence = divergence,
             .ddivergence = divergence != nullptr ? args.teacher->ddivergence : Tensor()});
      gradients->add(begin, dz, unit ? loss->dlogprob : Tensor());
    };
    with_divergence(args, begin, logits, values, teacher_lse, add_gradients);
  });
}

void head_logprob_backward(const HeadLogprobBackward& args) {
  const HeadInputs& in = args.in;
  const int64_t rows = check_head(in, "head_backward");
  const OpSpan span("head_logprob_backward");
  LogitGradients gradients(in.x, in.w, args.dx, args.dw, args.dbias, rows);
  kernels::for_logit_chunks({in.x, in.w, in.bias}, rows, [&](int64_t begin, Tensor& logits) {
    Tensor dz = gradients.chunk(begin, logits);
    kernels::head_logit_gradients({.dz = dz,
                                   .logits = logits,
                                   .dlogprob = args.dlogprob,
                                   .dentropy = args.dentropy,
                                   .lse = args.lse,
                                   .entropy = args.entropy,
                                   .targets = in.targets,
                                   .begin = begin,
                                   .temperature = in.desc.temperature});
    gradients.add(begin, dz, {});
  });
}

TokenLogProbs token_log_probs(const Variable& x, const HeadWeights& head, const Tensor& targets,
                              const kernels::HeadDesc& desc) {
  const auto& [w, b] = head;
  const Tensor& xv = x.value();
  const int64_t tokens = xv.rows();
  // One node with two rows, so that one recomputation of the logits serves both gradients.
  const DType dtype = accumulate_dtype(xv.dtype());
  Tensor both = Tensor::empty({2, tokens}, dtype, xv.device());
  Tensor logprob = both.select(0, 0), entropy = both.select(0, 1);
  Tensor lse = Tensor::empty({tokens}, dtype, xv.device());
  const HeadInputs in{xv, w.value(), targets, desc, b.value()};
  head_logprob_forward({logprob, entropy, lse, in});
  const Variable node =
      make_node("token_log_probs", both, {x, w, b}, [=](const Tensor& dy, Gradients& g) {
        head_logprob_backward({.dx = g.slot(0),
                               .dw = g.weight_slot(1),
                               .dlogprob = dy.select(0, 0),
                               .dentropy = dy.select(0, 1),
                               .in = in,
                               .lse = lse,
                               .entropy = entropy,
                               .dbias = g.weight_slot(2)});
      });
  return {select(node, 0), select(node, 1)};
}

namespace {

// The outputs of the head for a loss and the loss's gradients with respect to them, [T] each.
struct HeadRows {
  Tensor logprob, entropy, lse, dlogprob;
  Tensor dentropy = {};  // undefined: the loss does not depend on the entropies
  explicit HeadRows(const Tensor& x)
      : logprob(Tensor::empty({x.rows()}, accumulate_dtype(x.dtype()), x.device())),
        entropy(Tensor::empty_like(logprob)),
        lse(Tensor::empty_like(logprob)),
        dlogprob(Tensor::empty_like(logprob)) {}
};
// Sets the loss's gradients for tokens [begin, begin + count), whose log-probs are known.
using SetDlogprob = std::function<void(HeadRows& rows, int64_t begin, int64_t count)>;
// Runs the head with the gradients that are wanted. Calls set_dlogprob once for every token, and
// returns all log-probs.
Tensor run_head(HeadLoss& out, const Tensor& targets, const kernels::HeadDesc& desc,
                const SetDlogprob& set_dlogprob, bool with_entropy = false,
                const TeacherTerm* teacher = nullptr) {
  const Tensor& x = out.hidden.value();
  const auto& [w, bias] = out.head;
  HeadRows rows(x);
  if (with_entropy) rows.dentropy = Tensor::empty_like(rows.entropy);
  const bool with_gradients = needs_gradient(std::vector{out.hidden, w, bias});
  if (with_gradients && out.hidden.requires_grad()) out.dhidden = Tensor::empty_like(x);
  GradSlot dw, dbias;
  if (with_gradients && w.requires_grad()) dw = w.grad_slot();
  if (with_gradients && bias.requires_grad()) dbias = bias.grad_slot();
  const HeadLossGradients gradients{
      .dx = {out.dhidden},
      .dw = dw,
      .dlogprob = rows.dlogprob,
      .set_dlogprob = [&](int64_t begin, int64_t count) { set_dlogprob(rows, begin, count); },
      .dentropy = rows.dentropy,
      .dbias = dbias};
  head_logprob_forward({.logprob = rows.logprob,
                        .entropy = rows.entropy,
                        .lse = rows.lse,
                        .in = {x, w.value(), targets, desc, bias.value()},
                        .gradients = with_gradients ? &gradients : nullptr,
                        .teacher = teacher});
  if (!with_gradients) set_dlogprob(rows, 0, x.rows());
  return rows.logprob;
}

// Log-probs and entropies without a gradient.
TokenLogProbs log_probs_of(const Variable& hidden, const HeadWeights& head, const Tensor& targets,
                           const kernels::HeadDesc& desc) {
  NoGradGuard no_grad;
  return token_log_probs(hidden, head, targets, desc);
}

// The loss of the calling program and its gradients, [T] each; undefined without one.
struct HostGradients {
  double loss = 0;
  Tensor dlogprob = {}, dentropy = {};
  // Sets those of tokens [begin, begin + count).
  void copy_to(HeadRows& rows, int64_t begin, int64_t count) const {
    for (const auto& [to, from] :
         {std::pair{&rows.dlogprob, &dlogprob}, {&rows.dentropy, &dentropy}})
      if (from->defined()) to->narrow(0, begin, count).copy_(from->narrow(0, begin, count));
  }
};
HostGradients host_gradients(const TokenLogProbs& now, const PolicyLossInputs& inputs,
                             double beta) {
  HostGradients out{.dlogprob = Tensor::empty_like(now.logprob.value())};
  out.loss = (*inputs.host_loss)(
      {now.logprob.value(), now.entropy.value(), inputs, beta, out.dlogprob, out.dentropy});
  return out;
}

// The means of ratios and masks of sequences; undefined if the loss has neither.
Tensor sequence_means(const Variable& hidden, const HeadWeights& head, const Tensor& targets,
                      const PolicyLossInputs& inputs, const kernels::PolicyLossDesc& loss_desc,
                      const kernels::HeadDesc& desc) {
  if (!loss_desc.needs_sequences()) return {};
  const bool needs_logprobs = loss_desc.needs_sequence_ratios() && !inputs.on_policy;
  Tensor means = Tensor::empty({hidden.value().rows(), kernels::PolicySequenceMeans::kSize},
                               DType::kF64, hidden.value().device());
  kernels::policy_sequence_means(
      {.means = means,
       .logprob = needs_logprobs ? log_probs_of(hidden, head, targets, desc).logprob.value()
                                 : inputs.old_logprob,
       .constants = inputs,
       .segments = inputs.segments,
       .desc = loss_desc});
  return means;
}

}  // namespace

void backward(HeadLoss loss) {
  const Variable leaves[] = {loss.head.weight, loss.head.bias};
  backward(std::move(loss.hidden), std::move(loss.dhidden), leaves);
}

HeadLoss cross_entropy(const Variable& hidden, const HeadWeights& head, const Tensor& targets,
                       const Tensor& weights, const kernels::HeadDesc& desc) {
  HeadLoss out{.loss = {}, .hidden = hidden, .head = head};
  const Tensor logprob =
      run_head(out, targets, desc, [&](HeadRows& rows, int64_t begin, int64_t count) {
        Tensor part = rows.dlogprob.narrow(0, begin, count);
        kernels::scale({.y = part, .x = weights.narrow(0, begin, count), .factor = -1});
      });
  NoGradGuard no_grad;
  out.loss = scale(weighted_sum(Variable(logprob), weights), -1).value();
  return out;
}

HeadLoss policy_loss(const Variable& hidden, const HeadWeights& head, const Tensor& targets,
                     const PolicyLossInputs& inputs, const kernels::PolicyLossDesc& loss_desc,
                     const kernels::HeadDesc& desc) {
  const Device device = hidden.value().device();
  const int64_t tokens = hidden.value().rows();
  Tensor terms = Tensor::empty({tokens, 1 + kernels::PolicyLossStats::kSize}, DType::kF64, device);
  const Tensor means = sequence_means(hidden, head, targets, inputs, loss_desc, desc);
  HostGradients host;
  if (inputs.host_loss != nullptr)
    host = host_gradients(log_probs_of(hidden, head, targets, desc), inputs, loss_desc.beta);
  const bool has_bonus = loss_desc.entropy_coef != 0,
             with_entropy = has_bonus || host.dentropy.defined();
  std::optional<TeacherTerm> teacher;
  Tensor value, gradient;
  if (inputs.teacher) {
    value = Tensor::empty_like(inputs.weight);
    gradient = Tensor::empty_like(inputs.weight);
    kernels::scale({gradient, inputs.weight, loss_desc.beta});
    teacher.emplace(*inputs.teacher, value, gradient);
  }
  const auto compute_terms = [&](HeadRows& rows, int64_t begin, int64_t count) {
    kernels::policy_loss_terms({.dlogprob = rows.dlogprob,
                                .terms = terms,
                                .logprob = rows.logprob,
                                .constants = inputs,
                                .desc = loss_desc,
                                .begin = begin,
                                .count = count,
                                .sequence_means = means,
                                .entropy = has_bonus ? rows.entropy : Tensor(),
                                .dentropy = has_bonus ? rows.dentropy : Tensor(),
                                .divergence = value});
    host.copy_to(rows, begin, count);
  };
  HeadLoss out{.loss = {}, .hidden = hidden, .head = head};
  const Tensor logprob =
      run_head(out, targets, desc, compute_terms, with_entropy, teacher ? &*teacher : nullptr);
  out.loss = Tensor::empty({1}, logprob.dtype(), device);
  out.stats = kernels::PolicyLossStats::zeros(device);
  kernels::policy_loss_sums({.loss = out.loss, .stats = out.stats, .terms = terms});
  if (inputs.host_loss != nullptr) out.loss.fill_(host.loss);
  return out;
}

}  // namespace cohort
