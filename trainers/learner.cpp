#include "trainers/learner.h"

#include <cmath>

#include "core/on_exit.h"
#include "core/with_cuda.h"
#include "kernels/policy_token.h"
#include "trainers/metrics.h"

namespace cohort {
namespace {

[[noreturn]] void throw_bad_weights() {
  throw NonFiniteError(
      "the last update made weights or moments that are not finite; hint: a lower learning_rate, a "
      "larger adam_eps or a lower max_grad_norm above 0");
}

}  // namespace

Learner::Learner(std::unique_ptr<Transformer> model, const OptimizerConfig& config,
                 Communicator& comm, uint64_t seed)
    : model_(std::move(model)),
      comm_(comm),
      max_grad_norm_(config.max_grad_norm),
      health_(Tensor::zeros({2}, DType::kF64, model_->device())),
      optimizer_(model_->parameters(), config, seed),
      side_(comm.size() == 1
                ? nullptr
                : on_device<[](Device) { return std::unique_ptr<SideStream>(); },
                            cuda::make_side_stream>(model_->device(), model_->device())) {
  const std::vector<Variable>& leaves = model_->parameters().trained();
  for (size_t i = 0; i < leaves.size(); ++i)
    leaves[i].on_gradient([this, i] {
      if (reducer_ && last_micro_batch_) reducer_->mark_ready(static_cast<int64_t>(i));
    });
}

void Learner::backward_all(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                           Tensor& losses, std::vector<Tensor>& stats) {
  losses = Tensor::empty({micro_batches}, accumulate_dtype(model_->dtype()), model_->device());
  Stopwatch clock;
  for (int64_t i = 0; i < micro_batches; ++i) {
    last_micro_batch_ = i + 1 == micro_batches;
    HeadLoss made = loss(i);
    losses.narrow(0, i, 1).copy_(made.loss);
    if (made.stats.defined()) stats.push_back(made.stats);
    clock.lap("forward");
    backward(std::move(made));
    clock.lap("backward");
  }
  for (const Variable& leaf : model_->parameters().trained())
    leaf.grad();  // zeros if no loss depends on it
}

Learner::Update Learner::update(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                                double learning_rate, const Accept& accept) {
  allocator(model_->device()).join_segments();
  const OnExit free_memory([this] {
    reducer_.reset();
    model_->parameters().free_gradients();
    optimizer_.free_workspace();
  });
  std::vector<GradientBuffer> buffers;
  on_all_ranks(comm_, [&] {
    for (UnitGradients& unit : model_->parameters().allocate_gradients())
      buffers.push_back({std::move(unit.all), std::move(unit.ends)});
  });
  reducer_.emplace(comm_, side_.get(), std::move(buffers));
  // A rank that runs out of memory makes the collective calls of the others, and tells them then.
  std::optional<OutOfMemoryError> full;
  const auto if_memory_lasts = [&](const std::function<void()>& work) {
    if (full) return;
    try {
      work();
    } catch (const OutOfMemoryError& e) {
      full = e;
    }
  };
  Tensor losses, norm = health_.narrow(0, 0, 1);
  std::vector<Tensor> stats;  // per micro batch
  if_memory_lasts([&] { backward_all(micro_batches, loss, losses, stats); });
  last_micro_batch_ = false;
  reducer_->finish();
  Update out;
  std::vector<double> numbers, health;
  double refusals = 0;
  Stopwatch clock;
  if_memory_lasts([&] {
    kernels::grad_norm(norm, model_->parameters().gradients());
    numbers = losses.to_vector<double>();
    for (const double number : numbers) out.loss += number;
    for (const Tensor& s : stats) add(out.stats, kernels::PolicyLossStats::from(s));
    refusals = accept && !accept(out.stats) ? 1 : 0;
    health = health_.to_vector<double>();
    optimizer_.allocate_workspace();
  });
  double out_of_memory = full ? 1 : 0;
  reduce_in_place(comm_, {&out.loss, &refusals, &out_of_memory});
  if (out_of_memory > 0) throw full ? *full : OutOfMemoryError("another rank is out of memory");
  out.refused = refusals != 0;
  if (health[1] != 0) throw_bad_weights();  // first: bad losses may follow from it
  check_losses(out.loss, numbers);
  out.grad_norm = health[0];
  check_gradients(out.grad_norm);
  out.made = !out.refused && out.grad_norm != 0;
  out.clipped = out.made && max_grad_norm_ > 0 && out.grad_norm > max_grad_norm_;
  if (out.made) {
    optimizer_.step(learning_rate, norm, health_.narrow(0, 1, 1));
    model_->update_derived();
  }
  clock.lap("optimizer");
  return out;
}

void Learner::within_memory(int64_t tokens, const std::function<int64_t(int64_t)>& pack,
                            const std::function<void()>& work) {
  for (double largest_before = -1;;) {
    const int64_t size = micro_batch_tokens(tokens);
    double largest = 0;
    std::optional<OutOfMemoryError> full;
    try {
      on_all_ranks(comm_, [&] { largest = static_cast<double>(pack(size)); });
      return work();
    } catch (const OutOfMemoryError& e) {
      full = e;
    }
    reduce_in_place(comm_, {&largest}, Reduce::kMax);
    callbacks_.release();
    allocator(model_->device()).release_cached();
    if (largest == largest_before)
      throw OutOfMemoryError(str(full->what(), "; this was with micro batches of at most ",
                                 static_cast<int64_t>(largest),
                                 " tokens, which cannot be divided"));
    largest_before = largest;
    const int64_t held = largest > 0 ? std::min(size, static_cast<int64_t>(largest)) : size;
    max_tokens_ = std::max<int64_t>(1, held / 2);
    callbacks_.shrunk(size, max_tokens_, full->what());
  }
}

void Learner::check_weights() const {
  if (health_.narrow(0, 1, 1).item() != 0) throw_bad_weights();
}

// If one loss of one rank is not finite, the total is not finite on any rank: all ranks throw the
// same error.
void Learner::check_losses(double total, const std::vector<double>& losses) const {
  if (std::isfinite(total)) return;
  std::string error;
  const auto bad =
      std::ranges::find_if_not(losses, [](double loss) { return std::isfinite(loss); });
  if (bad != losses.end())
    error =
        str(comm_.size() > 1 ? str("rank ", comm_.rank(), ": ") : "", "the loss of micro batch ",
            bad - losses.begin() + 1, " of ", losses.size(), " is ", *bad);
  error = first_text(comm_, error);
  throw NonFiniteError(
      str(error.empty() ? str("the sum of the losses is ", total) : error,
          "; nothing was updated; hint: a lower learning_rate, or a lower max_grad_norm above 0"));
}

void Learner::check_gradients(double norm) const {
  if (std::isfinite(norm)) return;
  for (const NamedParameter& p : model_->parameters()) {
    if (!p.trained()) continue;
    for (const double g : p.grad().to_vector<double>())
      if (!std::isfinite(g))
        throw NonFiniteError(str("the gradient of ", p.name, " has a value of ", g,
                                 "; nothing was updated; hint: a lower learning_rate, or a lower "
                                 "max_grad_norm above 0"));
  }
  throw NonFiniteError(
      str("the gradient norm is ", norm, "; nothing was updated; hint: a lower learning_rate"));
}

}  // namespace cohort
