// Reverse-mode automatic differentiation on a tape of nodes.
//
//   Variable w = Variable::parameter(Tensor::zeros({3}, DType::kF64));
//   backward(sum(square(w)));         // accumulates into w.grad()
//
// A Variable is a Tensor and, if it takes part in differentiation, a node. A node keeps its inputs'
// nodes but not their values: the closure of its backward captures the values it needs, so the
// memory policy of an op is visible at the op (autograd/ops_*.cpp). A backward frees the tape as it
// proceeds; a second one over the same tape throws Error.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/non_copyable.h"
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
  // A constant with the same value.
  Variable detach() const { return Variable(value_); }

  // Leaves only. The gradient accumulates over backwards until zero_grad(); it is allocated (as
  // zeros) at the first access. That of a bf16 leaf is f32, so that sums over micro batches are not
  // rounded to bf16. zero_grad() only marks the gradient: the next backward overwrites it, and an
  // access before that zeros it.
  Tensor& grad() const;
  void zero_grad() const;
  // For a contribution outside of a backward: the gradient's tensor, and how to write it.
  GradSlot grad_slot() const;
  // `hook` is called in each backward that reaches this leaf, when its gradient is final.
  void on_gradient(std::function<void()> hook) const;
  // Sets the tensor that holds the leaf's gradient (the shape and dtype of grad()), whose contents
  // count as zeros, as after zero_grad(). Undefined: the gradient does not exist until it is used.
  void set_grad_storage(Tensor grad) const;
  // `supply` is called before a gradient that does not exist is allocated, and may set its storage.
  void on_missing_gradient(std::function<void()> supply) const;

 private:
  friend Variable make_node(const char*, Tensor, std::initializer_list<Variable>, BackwardFn);
  friend Variable make_node(const char*, Tensor, std::span<const Variable>, BackwardFn);
  friend void backward(Variable, Tensor, std::span<const Variable>);
  friend Variable checkpoint(const std::function<Variable(std::span<const Variable>)>&,
                             std::span<const Variable>, std::span<const Variable>);
  friend Variable recomputable(Variable, const std::function<Variable(std::span<const Variable>)>&,
                               std::span<const Variable>);
  friend class SavedTensor;
  Tensor value_;
  std::shared_ptr<const std::function<Tensor()>> recompute_;  // computes value_ again
  std::shared_ptr<TapeNode> node_;
};

// Output of a BackwardFn: the tensor of an input's gradient, and how to write it.
struct GradSlot {
  Tensor tensor;  // undefined: this gradient is not needed
  kernels::Grad mode = kernels::Grad::kOverwrite;
  operator kernels::GradOut() { return {tensor, mode}; }
};
class Gradients {
 public:
  explicit Gradients(std::span<const std::shared_ptr<TapeNode>> inputs) : inputs_(inputs) {}
  bool needed(int i) const;
  // The buffer to write, of the input's dtype, and how; call it at most once per input. Slots never
  // overlap, even if one variable is several inputs, so an op may write them in any order or at the
  // same time.
  GradSlot slot(int i);
  // A slot in accumulate_dtype(), for gradients of weights, which are sums over many rows.
  GradSlot weight_slot(int i);
  // Adds `gradient`, without a copy if it is the first contribution; the same tensor may be passed
  // to several inputs.
  void pass(int i, const Tensor& gradient);

 private:
  friend void backward(Variable, Tensor, std::span<const Variable>);
  bool repeated(int i) const;
  GradSlot slot(int i, DType dtype);
  void finish();

  std::span<const std::shared_ptr<TapeNode>> inputs_;
  std::vector<std::pair<int, Tensor>> separate_;  // slots that finish() adds to the gradients
};

// True if gradients are enabled and one of the inputs requires one.
bool needs_gradient(std::span<const Variable> inputs);

// The extension point: an op is a forward, and a call of make_node() with its backward. `y` becomes
// a constant unless needs_gradient(inputs).
Variable make_node(const char* name, Tensor y, std::initializer_list<Variable> inputs,
                   BackwardFn backward);
Variable make_node(const char* name, Tensor y, std::span<const Variable> inputs,
                   BackwardFn backward);

// Accumulates d(sum(y * seed)) into the leaves: `seed` is the gradient of y, by default 1, for
// which y must have one element. Iterative, in descending order of creation. Throws Error if
// nothing in `y` requires a gradient. Moved arguments are freed as soon as they are used. The
// `leaves` that are defined have got a contribution outside of this tape (grad_slot()): if the tape
// does not reach one, its gradient is final, and its hooks are called first.
void backward(Variable y, Tensor seed = {}, std::span<const Variable> leaves = {});

// Disables gradients in this thread while the guard lives.
class NoGradGuard : NonCopyable {
 public:
  NoGradGuard();
  ~NoGradGuard();

 private:
  bool previous_;
};
bool grad_enabled();

// Activation checkpointing (Chen et al. 2016): runs fn(inputs) without a tape, and again inside the
// backward. `parameters`: all leaves that fn uses besides its inputs, so that their hooks fire at
// the right time; any other differentiable value must be an input. fn must be deterministic.
Variable checkpoint(const std::function<Variable(std::span<const Variable>)>& fn,
                    std::span<const Variable> inputs, std::span<const Variable> parameters);

// Marks y = fn(inputs), already computed, as recomputable: an op that saves it for its backward
// (SavedTensor) keeps the inputs instead. For cheap ops whose inputs are kept anyway, such as
// norms. fn must give y's bits.
Variable recomputable(Variable y, const std::function<Variable(std::span<const Variable>)>& fn,
                      std::span<const Variable> inputs);

// An input that a backward closure saves: its value, or the function that recomputes it.
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
