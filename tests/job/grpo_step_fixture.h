// A policy, its sampled completions of the addition task, and steps on them.
#pragma once

#include <functional>
#include <memory>

#include "tests/job/small_runs.h"
#include "trainers/grpo_step.h"

namespace cohort::test {

// The completions of all groups, in order.
template <class Groups>
auto completions_of(Groups& groups) {
  std::vector<decltype(groups[0].completions.data())> out;
  for (auto& group : groups)
    for (auto& c : group.completions) out.push_back(&c);
  return out;
}
// A number of each of them.
inline std::vector<double> numbers_of(const std::vector<Group>& groups,
                                      double ScoredCompletion::*number) {
  std::vector<double> out;
  for (const ScoredCompletion* c : completions_of(groups)) out.push_back(c->*number);
  return out;
}
inline void set_rewards(std::vector<Group>& groups, const std::vector<double>& rewards) {
  for (size_t i = 0; i < rewards.size(); ++i) completions_of(groups)[i]->reward = rewards[i];
}
inline void set_advantage(ScoredCompletion& c, double advantage) {
  c.advantage = c.reward_advantage = advantage;
}
inline void set_advantages(std::vector<Group>& groups, double advantage) {
  for (ScoredCompletion* c : completions_of(groups)) set_advantage(*c, advantage);
}

inline void expect_same_weights(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(bit_equal(a[i], b[i])) << i;
}

// A step's options.
struct StepOptions {
  const Transformer* reference = nullptr;
  int64_t step = 0;
  double learning_rate = 0;
  StepJournal* journal = nullptr;
  // The prompts of refills; empty: the data's first, as for the step.
  decltype(cohort::GrpoStep::next_prompts) refill = {};
};

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

  // The learner's completions of this rank's prompts; the reward of each is its index.
  ScoredRollouts sampled(Communicator& comm, const Learner& learner) const {
    const std::vector<int64_t> shard = shard_prompts(comm, config_, 0);
    const std::vector<Example> problems = prompts(shard);
    Engine engine(learner.model(), {});
    ScoredRollouts out{.groups = group_completions(
                           problems, Sampler(engine, *data_.tokenizer, config_.sampling)
                                         .sample(problems, config_.batch.num_generations,
                                                 {.seed = 1, .step = 0, .prompt_indices = shard}))};
    for (ScoredCompletion* c : completions_of(out.groups)) {
      c->reward = static_cast<double>(c->index);
      set_advantage(*c, std::sin(c->reward + 1));
    }
    return out;
  }
  std::vector<Example> prompts(std::span<const int64_t> indices) const {
    std::vector<Example> out;
    for (const int64_t i : indices) out.push_back(data_.train->get(i));
    return out;
  }
  std::vector<PolicyUpdate> packed(Communicator& comm, Learner& learner,
                                   const ScoredRollouts& scored) const {
    std::vector<double> advantages(static_cast<size_t>(config_.batch.completions_per_step()));
    for (const ScoredCompletion* c : completions_of(scored.groups))
      advantages[static_cast<size_t>(c->index)] = c->advantage;
    return pack_minibatches(comm, learner, scored.groups, advantages, config_);
  }

  // A whole step of a learner.
  GrpoStepResult make_step(Communicator& comm, Learner& learner, const RewardSet& rewards,
                           const StepOptions& options) const {
    Engine engine(learner.model(), {});
    const Sampler sampler(engine, *data_.tokenizer, config_.sampling);
    bool refills = false;
    return grpo_step({.comm = comm,
                      .config = config_,
                      .sampler = sampler,
                      .rewards = rewards,
                      .learner = learner,
                      .reference = {options.reference},
                      .next_prompts =
                          [&](int64_t count, std::span<const int64_t> positions) {
                            return std::exchange(refills, true) && options.refill
                                       ? options.refill(count, positions)
                                       : prompts(positions);
                          },
                      .step = options.step,
                      .learning_rate = options.learning_rate,
                      .journal = options.journal});
  }
  // That of a new learner, without other ranks.
  GrpoStepResult make_step(const RewardSet& rewards, const StepOptions& options = {}) const {
    const auto comm = make_single_communicator();
    return make_step(*comm, *make_learner(*comm), rewards, options);
  }

  struct Trained {
    std::vector<Tensor> weights;
    Metrics metrics;
  };
  // The updates of one step on `ranks` ranks. `change` may edit the groups of rank 0.
  Trained train(int ranks, const std::function<void(std::vector<Group>&)>& change) const {
    Trained out;
    run_local_ranks(ranks, [&](Communicator& comm) {
      const auto learner = make_learner(comm);
      ScoredRollouts scored = sampled(comm, *learner);
      if (comm.rank() == 0) change(scored.groups);
      auto minibatches = packed(comm, *learner, scored);
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
