#include "trainers/learner.h"

#include <algorithm>
#include <cmath>

#include "trainers/metrics.h"

namespace cohort {
namespace {

[[noreturn]] void throw_bad_weights() {
  throw NonFiniteError(
      "the last update made weights or moments that are not finite; hint: a lower learning_rate, a "
      "larger adam_eps or a lower max_grad_norm");
}

}  // namespace

Learner::Learner(std::unique_ptr<Transformer> model, const OptimizerConfig& config,
                 Communicator& comm, uint64_t seed)
    : model_(std::move(model)),
      comm_(comm),
      gradients_(model_->parameters().allocate_gradients()),
      health_(Tensor::zeros({2}, DType::kF64, model_->device())),
      optimizer_(make_optimizer(model_->parameters(), config, seed)),
      reducer_(comm, gradients_.all, gradients_.ends) {
  const std::vector<Variable>& leaves = model_->parameters().trained();
  for (size_t i = 0; i < leaves.size(); ++i)
    leaves[i].on_gradient([this, i] {
      if (last_micro_batch_) reducer_.mark_ready(static_cast<int64_t>(i));
    });
}

Learner::Update Learner::update(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                                double learning_rate, const std::function<bool()>& accept) {
  const std::vector<Variable>& leaves = model_->parameters().trained();
  for (const Variable& leaf : leaves) leaf.zero_grad();
  Tensor losses = Tensor::empty({micro_batches}, gradients_.all.dtype(), model_->device());
  Stopwatch clock;
  for (int64_t i = 0; i < micro_batches; ++i) {
    last_micro_batch_ = i + 1 == micro_batches;
    HeadLoss made = loss(i);
    losses.narrow(0, i, 1).copy_(made.loss);
    clock.lap("forward");
    backward(std::move(made.hidden), std::move(made.dhidden), made.head);
    clock.lap("backward");
  }
  last_micro_batch_ = false;
  for (const Variable& leaf : leaves) leaf.grad();  // zeros if no loss depends on it
  reducer_.finish();
  Tensor norm = health_.narrow(0, 0, 1);
  kernels::grad_norm(norm, model_->parameters().gradients());

  const std::vector<double> numbers = losses.to_vector<double>();
  Update out;
  for (const double number : numbers) out.loss += number;
  double refusals = accept && !accept() ? 1 : 0;
  reduce_in_place(comm_, {&out.loss, &refusals});
  out.refused = refusals != 0;
  const std::vector<double> health = health_.to_vector<double>();
  if (health[1] != 0) throw_bad_weights();  // first: bad losses may follow from it
  check_losses(out.loss, numbers);
  out.grad_norm = health[0];
  check_gradients(out.grad_norm);
  out.made = !out.refused && out.grad_norm != 0;
  if (out.made) optimizer_->step(learning_rate, norm, health_.narrow(0, 1, 1));
  clock.lap("optimizer");
  return out;
}

void Learner::check_weights() const {
  if (health_.narrow(0, 1, 1).item() != 0) throw_bad_weights();
}

// If one loss of one rank is not finite, the total is not finite on any rank: all ranks throw the
// same error.
void Learner::check_losses(double total, const std::vector<double>& losses) const {
  if (std::isfinite(total)) return;
  std::string error;
  const auto bad = std::find_if_not(losses.begin(), losses.end(),
                                    [](double loss) { return std::isfinite(loss); });
  if (bad != losses.end())
    error =
        str(comm_.size() > 1 ? str("rank ", comm_.rank(), ": ") : "", "the loss of micro batch ",
            bad - losses.begin() + 1, " of ", losses.size(), " is ", *bad);
  error = first_text(comm_, error);
  throw NonFiniteError(str(error.empty() ? str("the sum of the losses is ", total) : error,
                           "; nothing was updated; hint: a lower learning_rate or max_grad_norm"));
}

void Learner::check_gradients(double norm) const {
  if (std::isfinite(norm)) return;
  for (const NamedParameter& p : model_->parameters()) {
    if (!p.trained()) continue;
    for (const double g : p.grad().to_vector<double>())
      if (!std::isfinite(g))
        throw NonFiniteError(
            str("the gradient of ", p.name, " has a value of ", g,
                "; nothing was updated; hint: a lower learning_rate or max_grad_norm"));
  }
  throw NonFiniteError(
      str("the gradient norm is ", norm, "; nothing was updated; hint: a lower learning_rate"));
}

}  // namespace cohort
