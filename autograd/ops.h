// Differentiable ops. Each is a kernel (kernels/, which has the formulas) plus a backward closure.
#pragma once

#include <array>
#include <functional>
#include <utility>

#include "autograd/variable.h"
#include "kernels/attention/attention.h"
#include "kernels/delta_inputs.h"
#include "kernels/elementwise.h"
#include "kernels/head.h"
#include "kernels/policy_loss.h"

namespace cohort {

// The elementwise families of kernels/elementwise.h: exp(x), silu(x), add(a, b), swiglu(gate | up)
// of [..., 2 F], ...
#define COHORT_DECLARE_UNARY(Op, name) Variable name(const Variable& x);
#define COHORT_DECLARE_BINARY(Op, name) Variable name(const Variable& a, const Variable& b);
COHORT_UNARY_OPS(COHORT_DECLARE_UNARY)
COHORT_BINARY_OPS(COHORT_DECLARE_BINARY)
COHORT_GATED_OPS(COHORT_DECLARE_UNARY)
#undef COHORT_DECLARE_UNARY
#undef COHORT_DECLARE_BINARY

// add(a, b), whose value has been computed.
Variable add_node(const Tensor& sum, const Variable& a, const Variable& b);
Variable scale(const Variable& x, double factor);
// [1]: sum of all elements, in accumulate_dtype().
Variable sum(const Variable& x);
// [1]: sum of x * weights over all elements; weights are constants of x's shape.
Variable weighted_sum(const Variable& x, const Tensor& weights);

// A view in another shape; no copy.
Variable reshape(const Variable& x, const Shape& shape);
// x[i] of the first dimension.
Variable select(const Variable& x, int64_t i);
// [T, count]: columns [first, first + count) of x [T, C].
Variable columns(const Variable& x, int64_t first, int64_t count);
// [L, C]: rows `rows` [L] i32 of x [T, C], each at most once. If L is T, `rows` must be ascending
// and the result is x.
Variable select_rows(const Variable& x, const Tensor& rows);

// x[..., K] w[N, K]^T + bias[N]; `bias` may be undefined.
Variable linear(const Variable& x, const Variable& w, const Variable& bias = {});
// For ops that fuse linear layers: an uninitialised tensor with the shape of x, but `columns`
// columns, and `padding` more as its padding; and the parts of linear()'s backward, where an
// undefined slot is not written.
Tensor empty_rows(const Tensor& x, int64_t columns, int64_t padding = 0);
void linear_input_gradient(const Tensor& dy, const Tensor& w, GradSlot dx);
void linear_weight_gradient(const Tensor& dy, const SavedTensor& x, GradSlot dw);
void linear_bias_gradient(const Tensor& dy, GradSlot dbias);
// table[first_row + ids[t], :].
Variable embedding(const Variable& table, const Tensor& ids, int64_t first_row = 0);
// [N (n + 1), C]: the rows of x [N n, C] in groups of n, each behind `row` [1, C].
Variable prepend_row(const Variable& row, const Variable& x, int64_t n);

// Norms: the output's rows have `padding` columns behind them (Tensor::hide_padding()), for the
// adapter of the layer that reads them (autograd/lora.h).
struct RmsNormDesc {
  double eps = 0, weight_offset = 0;
  int64_t padding = 0;
};
struct LayerNormDesc {
  double eps = 0;
  int64_t padding = 0;
};
// `w` may be in accumulate_dtype(x); it is rounded to x's dtype then.
Variable rms_norm(const Variable& x, const Variable& w, const RmsNormDesc& desc);
// `b` may be undefined.
Variable layer_norm(const Variable& x, const Variable& w, const Variable& b,
                    const LayerNormDesc& desc);
// sum = a + b and normed = the norm of the sum, in one pass over memory if the device supports it;
// the bits are those of the two ops. `bias` may be undefined.
struct AddNorm {
  Variable sum, normed;
};
AddNorm add_rms_norm(const Variable& a, const Variable& b, const Variable& w,
                     const RmsNormDesc& desc);
AddNorm add_layer_norm(const Variable& a, const Variable& b, const Variable& w,
                       const Variable& bias, const LayerNormDesc& desc);

// qkv has each token's queries, keys and values side by side: [T, H + 2 Hkv, D].

// qkv with its queries and keys normalised by RMS norms: over each head, with weights [D], or over
// all heads of a token together, with weights [H D] and [Hkv D]. With gradients disabled it is in
// place if the argument is the only owner of its memory.
struct QkNormWeights {
  Variable q, k;
};
Variable qk_norm(Variable qkv, const QkNormWeights& w, int64_t kv_heads, double eps,
                 double weight_offset = 0);
// qkv, and gates [T, H D] of the attention's output, from rows x in which each query is followed by
// its gate, and all of them by keys and values: [T, 2 H D + 2 Hkv D].
struct GatedQkv {
  Variable qkv, gates;
};
GatedQkv split_gates(const Variable& x, int64_t heads, int64_t dim);
// qkv with its queries and keys rotated to `positions` by a table of kernels::rope_table(). It is
// in place if the argument is the only owner of its memory.
// Keys and values are then rounded to the grids of `scales` (kernels::kv_scales()), which may be
// undefined, as may the table; gradients pass the rounding unchanged.
Variable rope(Variable qkv, const Tensor& positions, const Tensor& table, int64_t kv_heads,
              const Tensor& scales = {});
// [H, N] in accumulate_dtype(): out[h, n] = table[rows[n], h], of a table [R, H]; the gradient of a
// row is summed in a fixed order. For AttentionTerms::bias.
Variable relative_bias(const Variable& table, const Tensor& rows);
// Differentiable terms of scores, in any dtype, each of which may be undefined:
// AttentionDesc::bias and sinks.
struct AttentionTerms {
  Variable bias, sinks;
  // The call with the values of the terms, as statistics.
  kernels::AttentionDesc added_to(kernels::AttentionDesc desc) const;
};
// Attention, with the terms added to `desc` (kernels/attention/attention.h). views(tensors) has the
// queries, keys and values as views of the inputs, of which there are one or three; from gradients
// of the inputs it makes theirs. The result is y, as large as the queries, in any shape.
using QkvViews = std::function<std::array<Tensor, 3>(std::span<const Tensor> tensors)>;
Variable attention(std::span<const Variable> inputs, const QkvViews& views, Tensor y,
                   const Tensor& cu_seqlens, const kernels::AttentionDesc& desc,
                   const AttentionTerms& terms = {});
// For qkv side by side -> [T, H D] with `padding` columns after each row.
Variable attention(const Variable& qkv, int64_t kv_heads, const Tensor& cu_seqlens,
                   const kernels::AttentionDesc& desc, int64_t padding = 0,
                   const AttentionTerms& terms = {});
// The gated delta rule (kernels/gated_delta/gated_delta.h) on the inputs of kernels/delta_inputs.h,
// which the backward makes again -> [T, Hv, D]. On the CPU alone.
struct DeltaDims {
  int64_t key_heads = 0, heads = 0, dim = 0;  // Hk, Hv, D
};
struct DeltaVariables {
  Variable x;               // [T, 2 Hk D + Hv D]
  Variable b, a;            // [T, Hv]
  Variable w;               // [2 Hk D + Hv D, 4]
  Variable a_log, dt_bias;  // [Hv] in accumulate_dtype()

  kernels::DeltaSources values() const {
    return {x.value(), w.value(), b.value(), a.value(), a_log.value(), dt_bias.value()};
  }
};
// Uninitialised outputs of kernels::DeltaInputs for the rows of x.
kernels::DeltaTensors empty_delta_tensors(const Tensor& x, const DeltaDims& dims);
Variable gated_delta(const DeltaVariables& in, const DeltaDims& dims, const Tensor& cu_seqlens,
                     const kernels::GatedDeltaDesc& desc = {});
Variable dropout(const Variable& x, const kernels::DropoutSpec& spec);

// Tokens and a head; both passes compute the logits.
struct HeadInputs {
  Tensor x;        // [T, C]
  Tensor w;        // [V, C]
  Tensor targets;  // [T] i32
  kernels::HeadDesc desc = {};
  Tensor bias = {};  // [V]; undefined: none
};
// The head over chunks of tokens, on values: log-probs of `targets` and entropies under
// softmax((x w^T + bias) / temperature), as kernels/head.h defines them. With `gradients` also
// those of x, w and the bias for a loss that is a sum over tokens, from the same logits.
struct HeadLossGradients {
  kernels::GradOut dx;     // [T, C]
  kernels::GradOut dw;     // [V, C], a weight gradient
  const Tensor& dlogprob;  // [T], the loss's gradient
  // Sets dlogprob of tokens [begin, begin + count); called in ascending order, when their log-probs
  // are known. May be empty if dlogprob is set already.
  std::function<void(int64_t begin, int64_t count)> set_dlogprob;
  // [T], the loss's gradient with respect to the entropies, set with dlogprob; undefined: zero.
  Tensor dentropy = {};
  GradSlot dbias = {};  // [V], a weight gradient
};
// A teacher whose distribution of each token the loss refers to: the softmax of the first V columns
// of x w^T + bias at the temperature of the call.
struct HeadTeacher {
  Tensor x, w, bias;  // [T, C'], [V' >= V, C'], [V'] or undefined
  kernels::DivergenceDesc desc = {};
};
// Its divergence from the student, and the loss's gradient with respect to it, [T] each.
struct TeacherTerm {
  const HeadTeacher& teacher;
  Tensor &divergence, &ddivergence;
};
struct HeadLogprobForward {
  Tensor &logprob, &entropy, &lse;  // [T], in accumulate_dtype(x)
  HeadInputs in;
  const HeadLossGradients* gradients = nullptr;
  const TeacherTerm* teacher = nullptr;  // its divergence is known when set_dlogprob() is called
};
void head_logprob_forward(const HeadLogprobForward& args);
// Recomputes the logits. On CUDA dx may use split-K over V, so its bits depend on the chunk; dw is
// summed over chunks in ascending order.
struct HeadLogprobBackward {
  kernels::GradOut dx;  // [T, C]
  kernels::GradOut dw;  // [V, C], a weight gradient
  const Tensor& dlogprob;
  const Tensor& dentropy;  // may be undefined: zero
  HeadInputs in;
  const Tensor &lse, &entropy;
  GradSlot dbias = {};  // [V], a weight gradient
};
void head_logprob_backward(const HeadLogprobBackward& args);

// The weights of logits x w^T + bias: [V, C], and [V] or undefined.
struct HeadWeights {
  Variable weight, bias;
  HeadWeights() = default;
  HeadWeights(Variable w, Variable b = {}) : weight(std::move(w)), bias(std::move(b)) {}
};
// Per-token log-prob of `targets` and entropy under softmax((x w^T + bias) / temperature), both [T]
// and differentiable.
struct TokenLogProbs {
  Variable logprob, entropy;
};
TokenLogProbs token_log_probs(const Variable& x, const HeadWeights& head, const Tensor& targets,
                              const kernels::HeadDesc& desc = {});

// A loss over the log-probs of tokens, computed with its gradients in one loop over the logits:
// backward() completes the gradients of the leaves. Those of the head's weights, which must be
// leaves, have been accumulated there already.
struct HeadLoss {
  Tensor loss;       // [1]
  Variable hidden;   // [L, C]
  Tensor dhidden{};  // [L, C]; undefined if gradients are disabled
  HeadWeights head{};
  Tensor stats{};  // kernels::PolicyLossStats on the device; undefined for other losses
};
void backward(HeadLoss loss);
// - sum_t weights[t] log p(targets[t]); weights: [L].
HeadLoss cross_entropy(const Variable& hidden, const HeadWeights& head, const Tensor& targets,
                       const Tensor& weights, const kernels::HeadDesc& desc = {});
struct HostLossArgs;
// A loss of the calling program in place of the policy loss. Sets the gradients and returns the
// loss, which is a sum over sequences.
using HostLoss = std::function<double(const HostLossArgs& args)>;
// Constants of the policy loss, all [L]; see kernels/policy_loss.h.
struct PolicyLossInputs : kernels::PolicyLossConstants {
  Tensor segments = {};  // i32, ascending; needed if loss_desc.needs_sequences()
  // The log-probs are old_logprob, which the caller verifies: no pass over the logits is needed
  // before that of the loss.
  bool on_policy = false;
  // Needed if is_divergence(loss_desc.kl) and beta > 0.
  std::optional<HeadTeacher> teacher = {};
  const HostLoss* host_loss = nullptr;  // nullptr: the policy loss
};
struct HostLossArgs {
  const Tensor &logprob, &entropy;  // [L], of the present policy
  const PolicyLossInputs& inputs;
  double beta;                  // loss_desc.beta
  Tensor &dlogprob, &dentropy;  // [L]; dentropy is undefined, and may stay so: zero
};
// The surrogate, the KL penalty and the entropy bonus of kernels/policy_loss.h, and the sums for
// metrics. With ratios of sequences and with a host_loss, of which loss_desc has the statistics
// alone, the log-probs of all tokens are computed first.
HeadLoss policy_loss(const Variable& hidden, const HeadWeights& head, const Tensor& targets,
                     const PolicyLossInputs& inputs, const kernels::PolicyLossDesc& loss_desc,
                     const kernels::HeadDesc& desc = {});

}  // namespace cohort
