#include "trainers/learner.h"

#include <cmath>

namespace cohort {
namespace {

std::vector<Tensor> gradients_of(const Transformer& model) {
  std::vector<Tensor> out;
  for (const NamedParameter& p : model.parameters()) out.push_back(p.variable.grad());
  return out;
}

}  // namespace

Learner::Learner(std::unique_ptr<Transformer> model, const OptimizerConfig& config,
                 Communicator& comm)
    : model_(std::move(model)),
      config_(config),
      comm_(comm),
      optimizer_(model_->parameters(), config),
      reducer_(comm, gradients_of(*model_)) {
  const auto& parameters = model_->parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    parameters[i].variable.on_gradient([this, i] {
      if (last_micro_batch_) reducer_.mark_ready(static_cast<int64_t>(i));
    });
}

Learner::Update Learner::update(int64_t micro_batches, const std::function<Variable(int64_t)>& loss,
                                double learning_rate) {
  for (const NamedParameter& p : model_->parameters()) p.variable.zero_grad();
  Update out;
  for (int64_t i = 0; i < micro_batches; ++i) {
    last_micro_batch_ = i + 1 == micro_batches;
    const Variable value = loss(i);
    const double number = value.value().item();
    if (!std::isfinite(number))
      throw NonFiniteError(
          str("the loss of micro batch ", i + 1, " of ", micro_batches, " is ", number,
              "; nothing was updated; hint: a lower learning_rate or max_grad_norm"));
    out.loss += number;
    backward(value);
  }
  last_micro_batch_ = false;
  reducer_.finish();
  out.loss = reduce_over_ranks(comm_, {out.loss})[0];
  const ClippedNorm clipped = clip_grad_norm(model_->parameters(), config_.max_grad_norm);
  check_gradients(clipped.norm);
  out.grad_norm = clipped.norm;
  optimizer_.step(learning_rate, clipped.scale);
  return out;
}

void Learner::check_gradients(double norm) const {
  if (std::isfinite(norm)) return;
  for (const NamedParameter& p : model_->parameters())
    for (const double g : p.variable.grad().to_vector<double>())
      if (!std::isfinite(g))
        throw NonFiniteError(
            str("the gradient of ", p.name, " has a value of ", g,
                "; nothing was updated; hint: a lower learning_rate or max_grad_norm"));
  throw NonFiniteError(
      str("the gradient norm is ", norm, "; nothing was updated; hint: a lower learning_rate"));
}

std::vector<double> reduce_over_ranks(Communicator& comm, const std::vector<double>& values,
                                      Reduce op) {
  Tensor t = Tensor::from(values);
  comm.all_reduce(t, op);
  return t.to_vector<double>();
}

}  // namespace cohort
