// A model in training: gradients, their reduction over ranks, clipping and the optimiser.
#pragma once

#include <functional>
#include <memory>

#include "core/non_copyable.h"
#include "distributed/grad_reducer.h"
#include "trainers/across_ranks.h"
#include "trainers/optimizer.h"

namespace cohort {

class Learner : NonCopyable {  // the parameters' hooks hold its address
 public:
  // `seed`: see make_optimizer().
  Learner(std::unique_ptr<Transformer> model, const OptimizerConfig& config, Communicator& comm,
          uint64_t seed = 0);

  struct Update {
    double loss = 0;  // over all micro batches and ranks
    double grad_norm = 0;
    bool made = true;      // false: refused, or the gradient is exactly 0 on all ranks
    bool refused = false;  // `accept` returned false
  };
  // One optimiser update: the backward of loss(0) ... loss(micro_batches - 1), whose sum over micro
  // batches and ranks is the step's loss, then reduction, clipping and AdamW. Every rank
  // calls it, even without a micro batch. Synchronizes with the device once, before the update.
  // Throws the same NonFiniteError on every rank, without any update, if a loss, a gradient or a
  // number checked by check_weights() is not finite. `accept`, if given, is called when all losses
  // are known; if it returns false on any rank, weights and optimiser state are unchanged. They are
  // also unchanged if every gradient is 0: AdamW's momentum and decay would move the weights.
  Update update(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                double learning_rate, const std::function<bool()>& accept = nullptr);
  // Throws NonFiniteError if an update has made weights or moments that are not finite.
  // Synchronizes with the device.
  void check_weights() const;

  Transformer& model() { return *model_; }
  const Transformer& model() const { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }

 private:
  void check_losses(double total, const std::vector<double>& losses) const;
  void check_gradients(double norm) const;

  std::unique_ptr<Transformer> model_;
  Communicator& comm_;
  FlatGradients gradients_;
  // f64 [2] on the device: the gradient norm, and 1 once an update has made a non-finite number.
  Tensor health_;
  std::unique_ptr<Optimizer> optimizer_;
  GradReducer reducer_;
  bool last_micro_batch_ = false;
};

}  // namespace cohort
