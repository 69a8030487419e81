// A model in training: gradients, their reduction over ranks, clipping and the optimiser.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/non_copyable.h"
#include "trainers/across_ranks.h"
#include "trainers/optimizer.h"
#include "trainers/sharded_weights.h"

namespace cohort {

class Learner : NonCopyable {  // the parameters' hooks hold its address
 public:
  // `seed`: see Optimizer.
  Learner(std::unique_ptr<Transformer> model, const OptimizerConfig& config, Communicator& comm,
          uint64_t seed = 0);

  struct Update {
    double loss = 0;  // over all micro batches and ranks
    double grad_norm = 0;
    bool clipped = false;            // the gradient exceeded max_grad_norm
    bool made = true;                // false: refused, or the gradient is exactly 0 on all ranks
    bool refused = false;            // `accept` returned false
    kernels::PolicyLossStats stats;  // this rank's, over its micro batches; of policy losses only
  };
  // Called when all losses are known, with Update::stats.
  using Accept = std::function<bool(const kernels::PolicyLossStats& stats)>;
  // One optimiser update: the backward of loss(0) ... loss(micro_batches - 1), whose sum over micro
  // batches and ranks is the step's loss, then reduction, clipping and AdamW. Every rank
  // calls it, even without a micro batch. Synchronizes with the device once, before the update.
  // Gradients exist only during the call.
  // Throws the same NonFiniteError on every rank, without any update, if a loss, a gradient or a
  // number checked by check_weights() is not finite, and OutOfMemoryError on every rank, likewise,
  // if one of them runs out of memory. If `accept` is given and returns
  // false on any rank, weights and optimiser state are unchanged. They are
  // also unchanged if every gradient is 0: AdamW's momentum and decay would move the weights.
  // `lanes`: with reduction_lanes, that of each micro batch, ascending.
  Update update(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                double learning_rate, const Accept& accept = nullptr,
                std::span<const int64_t> lanes = {});

  // With Sharding::kFull: moves the weights of blocks to where they stay between updates. To be
  // called by every rank before others request memory; else the first update does it.
  void place_weights();

  // Runs `work` on micro batches of at most `tokens` tokens, or of fewer if less has to do. pack(n)
  // makes those of at most n tokens and returns the size of the largest; it makes no collective
  // call. If pack(), or on all ranks work(), throws OutOfMemoryError, all ranks free their caches,
  // halve the size of their micro batches, for good, and start again, with pack(). Throws
  // OutOfMemoryError on every rank if memory runs out twice for micro batches that cannot be
  // divided. Every rank calls it.
  void within_memory(int64_t tokens, const std::function<int64_t(int64_t)>& pack,
                     const std::function<void()>& work);
  // The size of micro batches that within_memory() uses where it is asked for `tokens`.
  int64_t micro_batch_tokens(int64_t tokens) const { return std::min(tokens, max_tokens_); }
  struct MemoryCallbacks {
    // Frees what others hold on this rank and can make anew.
    std::function<void()> release = [] {};
    // Tells that micro batches have become smaller because of `error`.
    std::function<void(int64_t before, int64_t now, const std::string& error)> shrunk =
        [](int64_t, int64_t, const std::string&) {};
  };
  void set_memory_callbacks(MemoryCallbacks callbacks) { callbacks_ = std::move(callbacks); }

  // Throws NonFiniteError, on every rank, if an update has made weights or moments that are not
  // finite. Synchronizes with the device. Every rank calls it if the optimizer's state is sharded.
  void check_weights() const;

  Transformer& model() { return *model_; }
  const Transformer& model() const { return *model_; }
  Optimizer& optimizer() { return optimizer_; }
  int64_t reduction_lanes() const { return reduction_lanes_; }

 private:
  Update make_update(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                     double learning_rate, const Accept& accept, std::span<const int64_t> lanes);
  void step(double learning_rate, const Tensor& norm);
  void shard_weights();
  void free_update();
  void backward_all(int64_t micro_batches, const std::function<HeadLoss(int64_t)>& loss,
                    std::span<const int64_t> lanes, Tensor& losses, std::vector<Tensor>& stats);
  void set_own_norms(std::vector<double>& norms, Tensor& norm) const;
  void check_losses(double total, const std::vector<double>& losses) const;
  void check_gradients(double norm) const;

  std::unique_ptr<Transformer> model_;
  Communicator& comm_;
  const double max_grad_norm_;  // 0: unlimited
  const int64_t reduction_lanes_;
  // f64 [2] on the device: the gradient norm, and 1 once an update has made a non-finite number.
  Tensor health_;
  Optimizer optimizer_;
  const std::unique_ptr<SideStream> side_;  // where ranks exchange gradients and weights
  ShardedGradients gradients_;
  std::optional<ShardedWeights> weights_;  // with Sharding::kFull, over several ranks
  int64_t max_tokens_ = std::numeric_limits<int64_t>::max();  // limit for micro batches
  MemoryCallbacks callbacks_;
};

}  // namespace cohort
