// A policy, its sampled completions of the addition task, and steps on them.
#pragma once

#include <functional>
#include <memory>

#include "tests/job/small_runs.h"
#include "trainers/grpo_step.h"

namespace cohort::test {

// Sampled completions of the addition task with advantages, and the policy that has sampled them.
class GrpoStepTest : public testing::Test {
 protected:
  GrpoStepTest() {
    const RunPlan plan =
        small_plan(dir_, "run", std::string(kSmallModel) + kSmallData + kSmallGrpo,
                   {"num_minibatches=2", "dtype=f64", "prompts_per_step=4", "num_generations=3"});
    config_ = plan.stages[0];
    data_ = load_dataset(config_, nullptr);
    config_.model.vocab_size = data_.tokenizer->vocab_size();
    config_.model.resolve();
  }

  std::unique_ptr<Learner> make_learner(Communicator& comm) const {
    return std::make_unique<Learner>(std::make_unique<Transformer>(config_.model, config_.dtype, 1),
                                     config_.optimizer, comm);
  }

  ScoredRollouts sampled(const Transformer& model, const std::vector<int64_t>& shard) const {
    ScoredRollouts out;
    Engine engine(model, {});
    out.trajectories = Sampler(engine, *data_.tokenizer, config_.sampling)
                           .sample(prompts(shard), config_.batch.num_generations,
                                   {.seed = 1, .step = 0, .prompt_indices = shard});
    for (const Trajectory& t : out.trajectories) {
      const auto index = static_cast<double>(t.index);
      out.scores.total.push_back(index);
      out.advantages.push_back(std::sin(index + 1));
    }
    return out;
  }
  std::vector<Example> prompts(const std::vector<int64_t>& shard) const {
    std::vector<Example> out;
    for (const int64_t i : shard) out.push_back(data_.train->get(i));
    return out;
  }

  struct Trained {
    std::vector<Tensor> weights;
    Metrics metrics;
  };
  // One step on `ranks` ranks. `change` may edit the rollouts of rank 0.
  Trained train(int ranks, const std::function<void(ScoredRollouts&)>& change) const {
    Trained out;
    run_local_ranks(ranks, [&](Communicator& comm) {
      const auto learner = make_learner(comm);
      const std::vector<int64_t> shard = shard_prompts(comm, config_, 0);
      ScoredRollouts scored = sampled(learner->model(), shard);
      if (comm.rank() == 0) change(scored);
      auto minibatches = pack_minibatches(comm, *learner, scored, scored.advantages, config_);
      const UpdateSums updates = update_policy(comm, *learner, minibatches, config_, 1e-2);
      const Metrics summary = grpo_metrics(scored, {}, updates, config_, 1e-2).reduce(comm);
      if (comm.rank() != 0) return;
      out.metrics = summary;
      for (const NamedParameter& p : learner->model().parameters())
        out.weights.push_back(p.value.clone());
    });
    return out;
  }

  TempDir dir_;
  TrainConfig config_;
  Dataset data_;
};

}  // namespace cohort::test
