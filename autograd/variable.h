// Reverse-mode automatic differentiation on a tape of nodes.
//
//   Variable w = Variable::parameter(Tensor::zeros({3}, DType::kF64));
//   backward(sum(square(w)));         // accumulates into w.grad()
//
// A Variable is a Tensor and, if it takes part in differentiation, a node. A node keeps its inputs'
// nodes but not their values: what a backward needs, its closure captures, so the memory policy of
// an op is visible at the op (autograd/ops_*.cpp). A backward frees the tape as it goes; running it
// twice over the same tape throws Error.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "kernels/common.h"

namespace cohort {

class Gradients;
struct GradSlot;
struct TapeNode;

// Writes the gradients of a node's inputs, given that of its output.
using BackwardFn = std::function<void(const Tensor& dy, Gradients& gradients)>;

class Variable {
 public:
  Variable() = default;
  // A constant.
  explicit Variable(Tensor value) : value_(std::move(value)) {}
  // A leaf whose gradient is wanted. `name` appears in messages.
  static Variable parameter(Tensor value, std::string name = "");

  bool defined() const { return value_.defined(); }
  const Tensor& value() const { return value_; }
  Tensor& value() { return value_; }
  const Shape& shape() const { return value_.shape(); }
  bool requires_grad() const { return node_ != nullptr; }
  // The same value, outside the tape.
  Variable detach() const { return Variable(value_); }

  // Leaves only. The gradient accumulates over backwards until zero_grad(); it is allocated (as
  // zeros) when first asked for. That of a bf16 leaf is f32: sums over micro batches must not
  // round. zero_grad() writes no zeros unless the gradient is asked for before a backward has
  // overwritten it.
  Tensor& grad() const;
  void zero_grad() const;
  // Called in each backward at the moment this leaf's gradient is final for it.
  void on_gradient(std::function<void()> hook) const;
  // Gives the leaf's gradient a place chosen by the caller (the shape and dtype of grad()).
  void set_grad_storage(Tensor grad) const;

 private:
  friend Variable make_node(const char*, Tensor, std::initializer_list<Variable>, BackwardFn);
  friend Variable make_node(const char*, Tensor, std::span<const Variable>, BackwardFn);
  friend void backward(const Variable&, const Tensor&);
  friend Variable backward(const std::function<Variable()>&);
  friend GradSlot early_slot(const Variable&);
  friend Variable checkpoint(const std::function<Variable(std::span<const Variable>)>&,
                             std::span<const Variable>, std::span<const Variable>);
  friend Variable recomputable(Variable, const std::function<Variable(std::span<const Variable>)>&,
                               std::span<const Variable>);
  friend class SavedTensor;
  Tensor value_;
  std::shared_ptr<const std::function<Tensor()>> recompute_;  // computes value_ again
  std::shared_ptr<TapeNode> node_;
};

// Handed to a BackwardFn: where the gradient of input i goes.
struct GradSlot {
  Tensor tensor;  // undefined: nobody needs this gradient, skip it
  kernels::Grad mode = kernels::Grad::kOverwrite;
  operator kernels::GradOut() { return {tensor, mode}; }
};
class Gradients {
 public:
  explicit Gradients(std::span<const std::shared_ptr<TapeNode>> inputs) : inputs_(inputs) {}
  bool needed(int i) const;
  // The buffer to write, of the input's dtype, and how; ask once for each input. Slots never
  // overlap, also where one variable is several inputs, so an op may write them in any order or at
  // the same time.
  GradSlot slot(int i);
  // The same in accumulate_dtype(), for gradients that are sums over many rows: those of weights.
  GradSlot weight_slot(int i);
  // Contributes `gradient` as it is, without a copy where it is the first contribution; the same
  // tensor may be passed to several inputs.
  void pass(int i, const Tensor& gradient);

 private:
  friend void backward(const Variable&, const Tensor&);
  bool repeated(int i) const;
  GradSlot slot(int i, DType dtype);
  void finish();

  std::span<const std::shared_ptr<TapeNode>> inputs_;
  std::vector<std::pair<int, Tensor>> separate_;  // slots that are added to the gradient afterwards
};

// Whether gradients are on and one of the inputs requires one.
bool needs_gradient(std::span<const Variable> inputs);

// The extension point: an op is a forward, and a call of make_node() with its backward. `y` becomes
// a constant unless needs_gradient(inputs).
Variable make_node(const char* name, Tensor y, std::initializer_list<Variable> inputs,
                   BackwardFn backward);
Variable make_node(const char* name, Tensor y, std::span<const Variable> inputs,
                   BackwardFn backward);

// Accumulates d(sum(loss * seed)) into the leaves. `seed` defaults to 1 and then `loss` must have
// one element. Iterative, in descending order of creation. Throws Error if nothing in `loss`
// requires a gradient.
void backward(const Variable& loss, const Tensor& seed = {});

// loss = make(), then backward(loss); returns the loss. For one that nothing else is made of: an op
// that computes gradients beside the loss need not hold them until the backward (early_slot()).
// Throws Error if such an op's result is not the loss itself. If make() throws, gradients of leaves
// may hold a part of theirs.
Variable backward(const std::function<Variable()>& make);

// For an op that computes the gradients of its inputs beside a loss, its result: where that of
// `leaf` goes at once, inside backward(make). The result's node must be the next that is made; its
// own gradient will be 1. An undefined tensor elsewhere, and where `leaf` is none.
GradSlot early_slot(const Variable& leaf);

// Gradients off in this thread while the guard lives.
class NoGradGuard {
 public:
  NoGradGuard();
  ~NoGradGuard();
  NoGradGuard(const NoGradGuard&) = delete;
  NoGradGuard& operator=(const NoGradGuard&) = delete;

 private:
  bool previous_;
};
bool grad_enabled();

// Recompute checkpoint (Chen et al. 2016): runs fn(inputs) without a tape and runs it again inside
// the backward. `parameters`: all leaves that fn uses besides its inputs, so that their hooks fire
// at the right time; any other differentiable value must be an input. fn must be deterministic.
Variable checkpoint(const std::function<Variable(std::span<const Variable>)>& fn,
                    std::span<const Variable> inputs, std::span<const Variable> parameters);

// y = fn(inputs), already computed, marked as recomputable: an op that saves it for its
// backward (SavedTensor) keeps the inputs instead. The lightest recompute: for norms, whose inputs
// are kept anyway. fn must give y's bits.
Variable recomputable(Variable y, const std::function<Variable(std::span<const Variable>)>& fn,
                      std::span<const Variable> inputs);

// What a backward closure keeps of an input: its value, or how to compute it.
class SavedTensor {
 public:
  explicit SavedTensor(const Variable& v)
      : value_(v.recompute_ == nullptr ? v.value_ : Tensor()), recompute_(v.recompute_) {}
  Tensor get() const { return recompute_ == nullptr ? value_ : (*recompute_)(); }

 private:
  Tensor value_;
  std::shared_ptr<const std::function<Tensor()>> recompute_;
};

}  // namespace cohort
