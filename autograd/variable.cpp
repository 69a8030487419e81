// The tape and its backward. Node ids ascend in order of creation, so descending ids are a
// topological order: a heap of pending nodes replaces recursion.
#include "autograd/variable.h"

#include <algorithm>
#include <atomic>
#include <queue>
#include <unordered_map>

#include "kernels/elementwise.h"

namespace cohort {

using kernels::Grad;

struct TapeNode : NonCopyable {
  // The gradient of an op's result is passed to its inputs, that of a parameter is kept. A
  // checkpoint's input holds it until the checkpoint passes it on, in the grad_dtype of the
  // original node, so that recomputation has the roundings of the plain backward.
  enum class Kind { kResult, kParameter, kInput };

  std::string name;
  Shape shape, padded_shape;  // the latter with the value's padding of rows
  DType dtype = DType::kF32, grad_dtype = DType::kF32;
  Device device;
  uint64_t id = 0;  // in order of creation
  Kind kind = Kind::kResult;
  bool freed = false;  // a backward has consumed it
  bool dirty = false;  // after zero_grad(): the contents of a parameter's gradient count as zero
  Tensor grad;         // parameters: persistent; others: during a backward
  std::vector<std::shared_ptr<TapeNode>> inputs;
  BackwardFn backward;
  std::vector<std::function<void()>> hooks;
  std::function<void()> supply;  // see Variable::on_missing_gradient()

  // Releases a chain of nodes in a loop: the stack must not grow with the length of the tape.
  ~TapeNode() {
    std::vector<std::shared_ptr<TapeNode>> pending = std::move(inputs);
    while (!pending.empty()) {
      const std::shared_ptr<TapeNode> node = std::move(pending.back());
      pending.pop_back();
      if (node == nullptr || node.use_count() > 1) continue;
      std::move(node->inputs.begin(), node->inputs.end(), std::back_inserter(pending));
      node->inputs.clear();
    }
  }
};

namespace {

using Kind = TapeNode::Kind;

// The state of the tape in this thread.
struct TapeMode {
  bool grad_enabled = true, hooks_enabled = true;
};
thread_local TapeMode t_mode;

class ModeGuard : NonCopyable {
 public:
  explicit ModeGuard(const TapeMode& mode) : outer_(std::exchange(t_mode, mode)) {}
  ~ModeGuard() { t_mode = outer_; }

 private:
  const TapeMode outer_;
};

uint64_t next_id() {
  static std::atomic<uint64_t> counter{0};
  return ++counter;
}

std::shared_ptr<TapeNode> new_node(const char* name, const Tensor& value) {
  auto node = std::make_shared<TapeNode>();
  node->name = name;
  node->shape = value.shape();
  node->padded_shape = value.shape();
  if (value.rank() > 0) node->padded_shape[0] = value.with_padding().dim(0);
  node->dtype = node->grad_dtype = value.dtype();
  node->device = value.device();
  node->id = next_id();
  return node;
}

// Uninitialised memory for a gradient, with rows padded as the node's value; the padding is zero.
Tensor new_gradient(const TapeNode& node, DType dtype) {
  const Tensor all = Tensor::empty(node.padded_shape, dtype, node.device);
  if (node.padded_shape == node.shape) return all;
  const int64_t rows = node.shape[0];
  all.narrow(0, rows, all.dim(0) - rows).zero_();
  return all.hide_padding(0, rows);
}

// Number of times that each reachable node is an input: a leaf's gradient is final when its last
// consumer has run.
std::unordered_map<TapeNode*, int64_t> count_uses(TapeNode* root) {
  std::unordered_map<TapeNode*, int64_t> uses{{root, 0}};
  std::vector<TapeNode*> stack{root};
  while (!stack.empty()) {
    TapeNode* node = stack.back();
    stack.pop_back();
    for (const auto& input : node->inputs) {
      if (input == nullptr) continue;
      if (uses[input.get()]++ == 0) stack.push_back(input.get());
    }
  }
  return uses;
}

bool is_parameter(const std::shared_ptr<TapeNode>& node) {
  return node != nullptr && node->kind == Kind::kParameter;
}

// Zeros a parameter's gradient if zero_grad() has marked it.
void flush_zero(TapeNode* node) {
  if (std::exchange(node->dirty, false)) node->grad.with_padding().zero_();
}

void supply_gradient(const TapeNode& node) {
  if (!node.grad.defined() && node.supply != nullptr) node.supply();
}

// Slot of the next contribution to a node's gradient.
GradSlot grad_buffer(TapeNode* node) {
  supply_gradient(*node);
  if (std::exchange(node->dirty, false)) return {node->grad, Grad::kOverwrite};
  if (node->grad.defined()) {
    // A passed tensor may also be the gradient of another node, which has not read it yet.
    if (node->kind != Kind::kParameter && !node->grad.sole_owner()) node->grad = node->grad.clone();
    return {node->grad, Grad::kAccumulate};
  }
  if (node->kind == Kind::kParameter) {
    node->grad = new_gradient(*node, node->grad_dtype).zero_();
    return {node->grad, Grad::kAccumulate};
  }
  node->grad = new_gradient(*node, node->grad_dtype);
  return {node->grad, Grad::kOverwrite};
}

struct Older {
  bool operator()(const TapeNode* a, const TapeNode* b) const { return a->id < b->id; }
};

}  // namespace

Variable Variable::parameter(Tensor value, std::string name) {
  COHORT_CHECK(is_float(value.dtype()), "[parameter] no gradient of ", value.str(), " ", name);
  Variable v(std::move(value));
  v.node_ = new_node(name.c_str(), v.value_);
  v.node_->kind = Kind::kParameter;
  v.node_->grad_dtype = accumulate_dtype(v.node_->dtype);
  return v;
}

Tensor& Variable::grad() const {
  COHORT_CHECK(is_parameter(node_), "[grad] only a parameter has a gradient");
  supply_gradient(*node_);
  if (!node_->grad.defined()) node_->grad = new_gradient(*node_, node_->grad_dtype).zero_();
  flush_zero(node_.get());
  return node_->grad;
}

void Variable::zero_grad() const {
  COHORT_CHECK(is_parameter(node_), "[zero_grad] only a parameter has a gradient");
  node_->dirty = node_->grad.defined();
}

GradSlot Variable::grad_slot() const {
  COHORT_CHECK(is_parameter(node_), "[grad_slot] only a parameter has a gradient");
  return grad_buffer(node_.get());
}

void Variable::on_gradient(std::function<void()> hook) const {
  COHORT_CHECK(is_parameter(node_), "[on_gradient] only a parameter takes a hook");
  node_->hooks.push_back(std::move(hook));
}

void Variable::set_grad_storage(Tensor storage) const {
  COHORT_CHECK(is_parameter(node_), "[set_grad_storage] only a parameter has a gradient");
  if (storage.defined())
    kernels::check_tensor(storage, node_->shape, node_->grad_dtype, "set_grad_storage", "storage",
                          node_->device);
  node_->dirty = storage.defined();
  node_->grad = std::move(storage);
}

void Variable::on_missing_gradient(std::function<void()> supply) const {
  COHORT_CHECK(is_parameter(node_), "[on_missing_gradient] only a parameter has a gradient");
  node_->supply = std::move(supply);
}

bool Gradients::needed(int i) const {
  return inputs_[static_cast<size_t>(i)] != nullptr;
}

bool Gradients::repeated(int i) const {
  return std::count(inputs_.begin(), inputs_.end(), inputs_[static_cast<size_t>(i)]) > 1;
}

GradSlot Gradients::slot(int i) {
  const TapeNode* node = inputs_[static_cast<size_t>(i)].get();
  return node == nullptr ? GradSlot{} : slot(i, node->dtype);
}

GradSlot Gradients::weight_slot(int i) {
  const TapeNode* node = inputs_[static_cast<size_t>(i)].get();
  return node == nullptr ? GradSlot{} : slot(i, accumulate_dtype(node->dtype));
}

GradSlot Gradients::slot(int i, DType dtype) {
  TapeNode* node = inputs_[static_cast<size_t>(i)].get();
  if (!repeated(i) && dtype == node->grad_dtype) return grad_buffer(node);
  separate_.emplace_back(i, new_gradient(*node, dtype));
  return {separate_.back().second, Grad::kOverwrite};
}

// Adds the separate slots, which the op has written, to the gradients.
void Gradients::finish() {
  for (const auto& [i, gradient] : separate_) pass(i, gradient);
}

void Gradients::pass(int i, const Tensor& gradient) {
  TapeNode* node = inputs_[static_cast<size_t>(i)].get();
  if (node == nullptr) return;
  if (node->kind != Kind::kParameter && !node->grad.defined() && gradient.is_contiguous()) {
    kernels::check_tensor(gradient, node->shape, gradient.dtype(), "backward", node->name.c_str(),
                          node->device);
    node->grad = gradient.to(node->grad_dtype);
    return;
  }
  GradSlot target = grad_buffer(node);
  kernels::scale(
      {.y = target.tensor, .x = gradient.contiguous(), .factor = 1, .mode = target.mode});
}

bool needs_gradient(std::span<const Variable> inputs) {
  return t_mode.grad_enabled && std::ranges::any_of(inputs, &Variable::requires_grad);
}

Variable make_node(const char* name, Tensor y, std::span<const Variable> inputs, BackwardFn fn) {
  Variable out(std::move(y));
  if (!needs_gradient(inputs)) return out;
  out.node_ = new_node(name, out.value_);
  for (const Variable& input : inputs) out.node_->inputs.push_back(input.node_);
  out.node_->backward = std::move(fn);
  return out;
}

Variable make_node(const char* name, Tensor y, std::initializer_list<Variable> inputs,
                   BackwardFn fn) {
  return make_node(name, std::move(y), std::span<const Variable>(inputs.begin(), inputs.size()),
                   std::move(fn));
}

void backward(Variable y, Tensor seed, std::span<const Variable> leaves) {
  COHORT_CHECK(y.node_ != nullptr, "[backward] nothing in this loss requires a gradient");
  std::vector<std::shared_ptr<TapeNode>> alive{y.node_};  // nodes in the heap
  TapeNode* root = alive.front().get();
  y = Variable();
  COHORT_CHECK(root->kind == Kind::kResult, "[backward] the loss is a parameter itself");
  COHORT_CHECK(!root->freed, "[backward] this tape was freed by an earlier backward");
  if (seed.defined()) {
    kernels::check_tensor(seed, root->shape, root->dtype, "backward", "seed", root->device);
    root->grad = std::move(seed);
  } else {
    COHORT_CHECK(root->shape.numel() == 1, "[backward] a loss of shape ", root->shape.str(),
                 " needs a seed");
    root->grad = Tensor::full(root->shape, 1, root->dtype, root->device);
  }

  auto uses = count_uses(root);
  for (const Variable& leaf : leaves)
    if (is_parameter(leaf.node_) && !uses.contains(leaf.node_.get()))
      for (const auto& hook : leaf.node_->hooks) hook();
  std::priority_queue<TapeNode*, std::vector<TapeNode*>, Older> ready;
  ready.push(root);
  while (!ready.empty()) {
    TapeNode* node = ready.top();
    ready.pop();
    COHORT_CHECK(!node->freed, "[backward] the tape of '", node->name,
                 "' was freed by an earlier backward");
    const auto inputs = std::move(node->inputs);
    node->inputs.clear();
    const BackwardFn fn = std::move(node->backward);
    node->backward = nullptr;
    node->freed = true;
    // A node that no gradient reached (its consumers skipped it) passes nothing on, but it still
    // counts as a finished consumer of its inputs.
    if (node->grad.defined()) {
      Gradients gradients(inputs);
      fn(std::exchange(node->grad, {}), gradients);
      gradients.finish();
    }
    for (const auto& input : inputs) {
      if (input == nullptr || --uses.at(input.get()) > 0) continue;
      if (input->kind == Kind::kResult) {
        alive.push_back(input);
        ready.push(input.get());
        continue;
      }
      flush_zero(input.get());  // if no gradient has reached it
      if (!t_mode.hooks_enabled) continue;
      for (const auto& hook : input->hooks) hook();
    }
  }
}

NoGradGuard::NoGradGuard() : previous_(t_mode.grad_enabled) {
  t_mode.grad_enabled = false;
}
NoGradGuard::~NoGradGuard() {
  t_mode.grad_enabled = previous_;
}
bool grad_enabled() {
  return t_mode.grad_enabled;
}

Variable recomputable(Variable y, const std::function<Variable(std::span<const Variable>)>& fn,
                      std::span<const Variable> inputs) {
  if (!y.requires_grad()) return y;
  std::vector<Variable> values;
  for (const Variable& input : inputs) values.push_back(input.detach());
  y.recompute_ = std::make_shared<const std::function<Tensor()>>([fn, values] {
    NoGradGuard no_grad;
    return fn(values).value();
  });
  return y;
}

Variable checkpoint(const std::function<Variable(std::span<const Variable>)>& fn,
                    std::span<const Variable> inputs, std::span<const Variable> parameters) {
  if (!t_mode.grad_enabled) return fn(inputs);
  for (const Variable& p : parameters)
    COHORT_CHECK(p.node_ == nullptr || is_parameter(p.node_),
                 "[checkpoint] expected parameters, got an intermediate value of shape ",
                 p.shape().str(), "; hint: make it an input");
  Tensor y;
  {
    NoGradGuard guard;
    y = fn(inputs).value();
  }
  std::vector<Variable> all(inputs.begin(), inputs.end());
  all.insert(all.end(), parameters.begin(), parameters.end());
  std::vector<Variable> saved;
  for (const Variable& input : inputs) {
    Variable& copy = saved.emplace_back(input.detach());
    if (!input.requires_grad()) continue;
    copy.node_ = new_node("checkpoint's input", copy.value_);
    copy.node_->kind = Kind::kInput;
    copy.node_->grad_dtype = input.node_->grad_dtype;
  }
  return make_node("checkpoint", y, std::span<const Variable>(all),
                   [fn, saved](const Tensor& dy, Gradients& gradients) {
                     // Only the outer backward knows when a gradient is final and hooks are due.
                     // The inner one needs a tape for any setting of the caller.
                     const ModeGuard guard({.grad_enabled = true, .hooks_enabled = false});
                     backward(fn(saved), dy);
                     for (size_t i = 0; i < saved.size(); ++i)
                       if (saved[i].requires_grad() && saved[i].node_->grad.defined())
                         gradients.pass(static_cast<int>(i),
                                        std::exchange(saved[i].node_->grad, {}));
                   });
}

}  // namespace cohort
