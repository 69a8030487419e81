#include "trainers/learner.h"

#include <cmath>
#include <exception>
#include <numeric>

#include "core/dry_run.h"
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

// In a dry run, whose tensors have no elements, `dry`.
std::vector<double> elements_of(const Tensor& t, std::vector<double> dry) {
  return is_dry_run() ? std::move(dry) : t.to_vector<double>();
}

}  // namespace

Learner::Learner(std::unique_ptr<Transformer> model, const OptimizerConfig& config,
                 Communicator& comm, uint64_t seed)
    : model_(std::move(model)),
      comm_(comm),
      max_grad_norm_(config.max_grad_norm),
      reduction_lanes_(config.reduction_lanes),
      health_(Tensor::zeros({2}, DType::kF64, model_->device())),
      optimizer_(model_->parameters(), config, seed,
                 is_sharded(config.sharding)
                     ? Slices::of_rank(comm.rank(), comm.size(), config.reduction_lanes)
                     : Slices()),
      side_(comm.size() == 1 || is_dry_run()
                ? std::make_unique<SideStream>()
                : on_device<[](Device) { return std::make_unique<SideStream>(); },
                            cuda::make_side_stream>(model_->device(), model_->device())),
      gradients_(model_->parameters(), comm, *side_, config.sharding, config.reduction_lanes) {
  if (config.sharding != Sharding::kFull || comm.size() == 1) return;
  COHORT_CHECK(reduction_lanes_ == 0, "[learner] lanes of whole weights only");
  weights_.emplace(model_->parameters(), comm, *side_, gradients_);
  model_->before_block([this](size_t unit) { weights_->use(unit); });
}

void Learner::free_update() {
  if (weights_) weights_->free_gathered();
  gradients_.free();
  optimizer_.free_workspace();
}

// If memory ends in one micro batch, the collective calls of the others are still made.
void Learner::backward_all(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                           std::span<const int64_t> lanes, Tensor& losses,
                           std::vector<Tensor>& stats) {
  const int64_t first_lane = gradients_.slices().first;
  auto rounds = static_cast<double>(micro_batches);
  if (gradients_.sums_each_micro_batch()) reduce_in_place(comm_, {&rounds}, Reduce::kMax);
  std::optional<OutOfMemoryError> full;
  const auto run = [&](int64_t i) {
    Stopwatch clock;
    if (!losses.defined())
      losses = Tensor::empty({micro_batches}, accumulate_dtype(model_->dtype()), model_->device());
    if (i == micro_batches) return;
    HeadLoss made = loss(i);
    losses.narrow(0, i, 1).copy_(made.loss);
    if (made.stats.defined()) stats.push_back(made.stats);
    clock.lap("forward");
    backward(std::move(made));
    clock.lap("backward");
  };
  for (int64_t i = 0; i < std::max<int64_t>(1, static_cast<int64_t>(rounds)); ++i) {
    const auto k = static_cast<size_t>(i);
    gradients_.begin_micro_batch(i + 1 >= micro_batches,
                                 k < lanes.size() ? lanes[k] - first_lane : 0);
    if (weights_) weights_->begin_micro_batch();
    try {
      if (!full) run(std::min(i, micro_batches));
    } catch (const OutOfMemoryError& e) {
      full = e;
    }
    if (weights_) weights_->end_micro_batch();
    gradients_.end_micro_batch();
  }
  if (full) throw *full;
}

// The norms of the gradient over this rank's slices; `norm`: where the device computes them.
void Learner::set_own_norms(std::vector<double>& norms, Tensor& norm) const {
  const Slices& slices = gradients_.slices();
  for (int64_t i = 0; i < slices.count; ++i) {
    kernels::grad_norm(norm, gradients_.slice_gradients(i));
    norms[static_cast<size_t>(slices.first + i)] = elements_of(norm, {1})[0];
  }
}

Learner::Update Learner::update(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                                double learning_rate, const Accept& accept,
                                std::span<const int64_t> lanes) {
  allocator(model_->device()).join_segments();
  const OnExit free_memory([this] { free_update(); });
  if (!weights_) return make_update(micro_batches, loss, learning_rate, accept, lanes);
  shard_weights();
  std::exception_ptr error;  // the same on every rank
  Update out{.made = false};
  try {
    out = make_update(micro_batches, loss, learning_rate, accept, lanes);
  } catch (const OutOfMemoryError&) {
    error = std::current_exception();
  } catch (const NonFiniteError&) {
    error = std::current_exception();
  }
  free_update();
  try {
    weights_->gather_all();
  } catch (const OutOfMemoryError& e) {
    if (error) std::rethrow_exception(error);
    if (!out.made) throw;
    throw Error(str(e.what(), "; the update is made, but there is no memory for all weights"));
  }
  if (error) std::rethrow_exception(error);
  if (out.made) model_->update_derived();
  return out;
}

// The weights of a unit are gathered beside the update of the next one.
void Learner::step(double learning_rate, const Tensor& norm) {
  const PartGather parts(model_->parameters(), comm_, reduction_lanes_);
  const auto gather = [&](size_t unit) {
    side_->run([&] { optimizer_.gather_weights(parts, unit, weights_.has_value()); });
  };
  optimizer_.step(learning_rate, norm, health_.narrow(0, 1, 1), gradients_.gradients(),
                  weights_ ? weights_->weights(gradients_.parts()) : std::vector<Tensor>(),
                  optimizer_.is_sharded() ? gather : std::function<void(size_t unit)>());
  side_->wait();
}

void Learner::shard_weights() {
  on_all_ranks(comm_, [&] { weights_->allocate(); });
  weights_->shard();
}

void Learner::place_weights() {
  if (!weights_) return;
  const OnExit free_memory([this] { weights_->free_gathered(); });
  shard_weights();
  weights_->gather_all();
}

Learner::Update Learner::make_update(int64_t micro_batches,
                                     const std::function<HeadLoss(int64_t)>& loss,
                                     double learning_rate, const Accept& accept,
                                     std::span<const int64_t> lanes) {
  on_all_ranks(comm_, [&] { gradients_.allocate(); });
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
  if_memory_lasts([&] { backward_all(micro_batches, loss, lanes, losses, stats); });
  gradients_.finish();
  Update out;
  std::vector<double> numbers;
  std::vector<double> norms(static_cast<size_t>(gradients_.slices().all));  // by slice
  double refusals = 0, bad_weights = 0;
  Stopwatch clock;
  if_memory_lasts([&] {
    set_own_norms(norms, norm);
    numbers = elements_of(losses, {});
    for (const double number : numbers) out.loss += number;
    for (const Tensor& s : stats) add(out.stats, kernels::PolicyLossStats::from(s));
    refusals = accept && !accept(out.stats) ? 1 : 0;
    bad_weights = elements_of(health_, {1, 0})[1];
    optimizer_.allocate_workspace();
  });
  double out_of_memory = full ? 1 : 0;
  std::vector<double*> sums{&out.loss, &refusals, &out_of_memory, &bad_weights};
  for (double& one : norms) sums.push_back(&one);
  reduce_in_place(comm_, sums);
  if (out_of_memory > 0) throw full ? *full : OutOfMemoryError("another rank is out of memory");
  out.refused = refusals != 0;
  if (bad_weights != 0) throw_bad_weights();  // first: bad losses may follow from it
  check_losses(out.loss, numbers);
  out.grad_norm = norms[0];
  if (norms.size() > 1) {
    out.grad_norm = std::sqrt(std::inner_product(norms.begin(), norms.end(), norms.begin(), 0.0));
    norm.fill_(out.grad_norm);
  }
  check_gradients(out.grad_norm);
  out.made = !out.refused && out.grad_norm != 0;
  out.clipped = out.made && max_grad_norm_ > 0 && out.grad_norm > max_grad_norm_;
  if (out.made) {
    step(learning_rate, norm);
    if (!weights_) model_->update_derived();
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
  double bad = health_.narrow(0, 1, 1).item();
  if (optimizer_.is_sharded()) reduce_in_place(comm_, {&bad}, Reduce::kMax);
  if (bad != 0) throw_bad_weights();
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
  constexpr const char* kHint = "; nothing was updated; hint: a lower learning_rate";
  std::string error;
  const std::vector<Tensor> gradients = gradients_.gradients();
  for (size_t i = 0; i < gradients.size() && error.empty(); ++i)
    for (const double g : gradients[i].to_vector<double>())
      if (error.empty() && !std::isfinite(g))
        error = str("the gradient of ", model_->parameters()[gradients_.parts()[i].parameter].name,
                    " has a value of ", g, kHint, ", or a lower max_grad_norm above 0");
  error = first_text(comm_, error);
  throw NonFiniteError(error.empty() ? str("the gradient norm is ", norm, kHint) : error);
}

}  // namespace cohort
