// Training does not depend on how the work is split: any ranks, threads and micro batches give the
// training of one rank, one thread and one batch.
//
// Tolerances. Another split adds the same f32 numbers in another order, so gradients differ by a
// few units of 2^-24 = 6e-8, relative to their largest summands. AdamW divides by the root of the
// second moment, so an element whose summands cancel can amplify that difference; adam_eps is
// raised to 1e-3, well below the gradients' size (about 0.1), so that such elements stay small. In
// f64 the same runs must agree nine digits better, which no tolerance for f32 could show.
#include <regex>

#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

constexpr double kTolerance = 1e-6, kTolerance64 = 1e-12;

struct Trained {
  Tensor weights;
  std::vector<Json> metrics;  // one per step
  std::string model_bytes, completions;
};

class Splits : public testing::Test {
 protected:
  Trained train(const std::string& yaml, const std::vector<std::string>& overrides) {
    const std::string dir = train_new(small_plan(
        dir_, "run",
        kSmallModel + std::string(yaml.find("data:") == yaml.npos ? kSmallData : "") + yaml,
        overrides));
    Trained out{.weights = final_weights(dir),
                .model_bytes = checkpoint_bytes(dir),
                .completions = read_file(dir + "/completions.jsonl")};
    for (Json& line : json_lines(dir + "/metrics.jsonl"))
      if (line.find("eval") == nullptr) out.metrics.push_back(std::move(line));
    return out;
  }

  // Trains with `common` and each of `variants` (key=value), and compares with the first.
  void expect_same_training(const std::string& yaml, std::vector<std::string> common,
                            const std::vector<std::string>& variants) {
    common.push_back("adam_eps=1e-3");
    for (const auto& [dtype, tolerance] :
         {std::pair{"dtype=f32", kTolerance}, std::pair{"dtype=f64", kTolerance64}}) {
      const auto train_variant = [&, dtype = dtype](const std::string& variant) {
        std::vector<std::string> overrides = common;
        overrides.insert(overrides.end(), {dtype, variant});
        return train(yaml, overrides);
      };
      const Trained reference = train_variant(variants[0]);
      for (size_t i = 1; i < variants.size(); ++i) {
        SCOPED_TRACE(variants[i] + " " + dtype);
        const Trained other = train_variant(variants[i]);
        EXPECT_LT(relative_error(other.weights, reference.weights), tolerance);
        ASSERT_EQ(other.metrics.size(), reference.metrics.size());
        for (size_t s = 0; s < other.metrics.size(); ++s) {
          const Json &actual = other.metrics[s], &expected = reference.metrics[s];
          ASSERT_EQ(actual.at("loss").is_null(), expected.at("loss").is_null()) << "step " << s + 1;
          if (actual.at("loss").is_null()) continue;
          EXPECT_NEAR(metric(actual, "loss"), metric(expected, "loss"), 100 * tolerance);
        }
      }
    }
  }

  TempDir dir_;
};

TEST_F(Splits, SftOnAnyNumberOfRanksIsThatOfOne) {
  // 7 sequences over 2 and 3 ranks.
  expect_same_training(kSmallSft, {"batch_size=7"}, {"ranks=1", "ranks=2", "ranks=3"});
}

TEST_F(Splits, SftWithARankWithoutWorkIsThatOfOne) {
  const ExpectLog warning("batch_size: 2 sequences leave 1 of 3 ranks without work");
  expect_same_training(kSmallSft, {"batch_size=2"}, {"ranks=1", "ranks=3"});
}

// Pairs that share prompts, over ranks, micro batches of single pairs, and threads.
TEST_F(Splits, DpoOnAnyRanksMicroBatchesAndThreadsIsThatOfOne) {
  for (const char* loss : {"sigmoid", "ipo"})
    expect_same_training(
        std::string("trainer: dpo\nsteps: 4\nbatch_size: 7\n") + kSmallPairs,
        {str("preference.loss=", loss), "preference.sft_weight=0.2"},
        {"ranks=1", "ranks=2", "ranks=3", "micro_batch_tokens=8", "num_threads=2"});
}

TEST_F(Splits, DpoWithARankWithoutWorkIsThatOfOne) {
  const ExpectLog warning("batch_size: 2 pairs leave 1 of 3 ranks without work");
  expect_same_training(std::string("trainer: dpo\nsteps: 4\nbatch_size: 2\n") + kSmallPairs, {},
                       {"ranks=1", "ranks=3"});
}

TEST_F(Splits, TiedEmbeddingsOnTwoRanksAreThoseOfOne) {
  expect_same_training(kSmallSft, {"model.tie_embeddings=true"}, {"ranks=1", "ranks=2"});
}

TEST_F(Splits, GrpoOnAnyNumberOfRanksIsThatOfOne) {
  expect_same_training(kSmallGrpo, {}, {"ranks=1", "ranks=2", "ranks=3"});
}

TEST_F(Splits, GrpoWithMinibatchesOnAnyNumberOfRanksIsThatOfOne) {
  // Minibatches of 2 and 3 prompts: with 3 ranks one has no prompt of the first.
  const ExpectLog warning(
      "a minibatch of 2 prompts leaves 1 of 3 ranks without work; hint: more prompts_per_step or "
      "fewer num_minibatches");
  expect_same_training(kSmallGrpo, {"prompts_per_step=5", "num_minibatches=2", "num_iterations=2"},
                       {"ranks=1", "ranks=2", "ranks=3"});
}

// Half of the problems have no number as their answer, so that a rank may get no reward at all.
TEST_F(Splits, GrpoWithARankWithoutRewardsIsThatOfOne) {
  std::string lines;
  for (int i = 0; i < 60; ++i)
    lines += str("{\"prompt\": \"", i, "=\", \"answer\": \"", i % 2 == 0 ? "1" : "+", "\"}\n");
  write_file(dir_.path("half.jsonl"), lines);
  const ExpectLog warning("; the step is skipped"), truncated("end at the length limit"),
      random("starts from random weights");
  expect_same_training(
      kSmallGrpo,
      {"prompts_per_step=2", "steps=8", "data={jsonl: {path: " + dir_.path("half.jsonl") + "}}",
       "rewards=[{name: numeric}]", "stop_tokens=[0]", "seed=3"},
      {"ranks=1", "ranks=2"});
}

TEST_F(Splits, GrpoWithShuffledAdvantagesIsThatOfOne) {
  expect_same_training(kSmallGrpo, {"shuffle_advantages=true"}, {"ranks=1", "ranks=2", "ranks=3"});
}

TEST_F(Splits, GrpoWithReferenceOnTwoRanksIsThatOfOne) {
  expect_same_training(kSmallGrpo, {"beta=0.1", "loss_type=grpo"}, {"ranks=1", "ranks=2"});
}

TEST_F(Splits, GrpoWithTheDeviationOfTheBatchIsThatOfOne) {
  expect_same_training(kSmallGrpo, {"scale_rewards=batch"}, {"ranks=1", "ranks=2", "ranks=3"});
}

TEST_F(Splits, TheBalanceOfRanksIsAMetric) {
  for (const char* yaml : {kSmallSft, kSmallGrpo}) {
    for (const Json& line : train(yaml, {"ranks=1"}).metrics)
      EXPECT_EQ(line.find("update/balance"), nullptr);
    for (const Json& line : train(yaml, {"ranks=3"}).metrics)
      if (!line.at("loss").is_null()) {
        EXPECT_GT(metric(line, "update/balance"), 1. / 3);
        EXPECT_LE(metric(line, "update/balance"), 1);
      }
  }
}

// The groups that are replaced, and by which prompts, do not depend on the ranks.
TEST_F(Splits, GrpoWithRefilledGroupsIsThatOfOne) {
  expect_same_training(kSmallGrpo, {"dynamic_sampling_rounds=3"},
                       {"ranks=1", "ranks=2", "ranks=3"});
  expect_same_training(kSmallGrpo, {"dynamic_sampling_rounds=3", "num_minibatches=2"},
                       {"ranks=1", "ranks=2"});
  std::vector<Trained> trained;
  for (const char* ranks : {"ranks=1", "ranks=3"})
    trained.push_back(train(kSmallGrpo, {"dynamic_sampling_rounds=3", ranks}));
  // Later steps sample from weights that differ by rounding.
  const std::regex logprob("\"mean_logprob\":[^,]*,");
  EXPECT_EQ(std::regex_replace(trained[0].completions, logprob, ""),
            std::regex_replace(trained[1].completions, logprob, ""));
  double rounds = 0;
  for (const Json& line : trained[0].metrics) {
    rounds = std::max(rounds, metric(line, "rollout/rounds"));
    EXPECT_EQ(metric(line, "ratio_deviation"), 0);
    EXPECT_GE(metric(line, "rollout/prompts"), metric(line, "rollout/rounds"));
  }
  EXPECT_GT(rounds, 1);
}

TEST_F(Splits, GrpoWithWhitenedAdvantagesIsThatOfOne) {
  expect_same_training(kSmallGrpo,
                       {"scale_rewards=maxrl", "whiten_advantages=true", "advantage_clip=1"},
                       {"ranks=1", "ranks=2", "ranks=3"});
}

// Losses that depend on sequences, on the whole step or on the reference.
TEST_F(Splits, EveryChoiceOfTheLossIsThatOfOneRankAndOneMicroBatch) {
  for (const std::vector<std::string>& choice : std::vector<std::vector<std::string>>{
           {"importance_sampling_level=sequence", "loss_type=grpo", "epsilon=0.01"},
           {"importance_sampling_level=sequence", "entropy_coef=0.05", "top_k=4",
            "importance_weights=reject", "importance_min=0.6"},
           {"surrogate=vespo", "old_kl_coef=0.1", "importance_weights=mask",
            "importance_level=sequence", "top_k=4"},
           {"off_policy_mask=0.01", "trust_region=tv", "trust_low=0.02", "trust_high=0.02"},
           {"beta=0.1", "kl_in=reward", "kl_estimator=k1", "scale_rewards=none",
            "top_entropy_quantile=0.3"},
           {"surrogate=reinforce", "top_p=0.8", "importance_weights=truncate",
            "multi_objective_aggregation=normalize_then_sum"}}) {
    SCOPED_TRACE(choice[0]);
    std::vector<std::string> overrides = choice;
    overrides.insert(overrides.end(), {"num_minibatches=2", "num_iterations=2"});
    expect_same_training(kSmallGrpo, overrides,
                         {"micro_batch_tokens=100000", "micro_batch_tokens=23", "ranks=2"});
  }
}

TEST_F(Splits, MicroBatchesDoNotMatter) {
  // All together, one sequence in each, some in each.
  const std::vector<std::string> sizes{"micro_batch_tokens=100000", "micro_batch_tokens=1",
                                       "micro_batch_tokens=23"};
  expect_same_training(kSmallSft, {}, sizes);
  expect_same_training(kSmallGrpo, {"num_minibatches=2", "beta=0.1"}, sizes);
}

TEST_F(Splits, MicroBatchesAndRanksDoNotMatterWithDropout) {
  expect_same_training(kSmallSft, {"model.dropout=0.2"},
                       {"micro_batch_tokens=100000", "micro_batch_tokens=1", "ranks=2"});
}

TEST_F(Splits, ThreadsDoNotMatterToTheBit) {
  // Large enough for several blocks of work in every kernel.
  const std::vector<std::string> wide{"model.num_layers=2", "model.d_model=48",
                                      "model.num_heads=3"};
  for (const std::string yaml : {kSmallSft, kSmallGrpo}) {
    const auto train_with = [&](const std::string& threads) {
      std::vector<std::string> overrides = wide;
      overrides.push_back(threads);
      return train(yaml, overrides);
    };
    const Trained one = train_with("num_threads=1");
    for (const char* threads : {"num_threads=2", "num_threads=3"}) {
      SCOPED_TRACE(threads);
      const Trained other = train_with(threads);
      EXPECT_TRUE(other.model_bytes == one.model_bytes);
      EXPECT_EQ(other.completions, one.completions);
    }
  }
}

// The samples of all ranks of a GRPO step are those of a single rank.
TEST(Ranks, SampleLikeOneRankToTheBit) {
  const TempDir dir;
  const RunPlan plan = small_plan(dir, "run", std::string(kSmallModel) + kSmallData + kSmallGrpo);
  const TrainConfig& config = plan.stages[0];
  const Dataset data = load_dataset(config, nullptr);
  ModelConfig model_config = config.model;
  model_config.vocab_size = data.tokenizer->vocab_size();
  model_config.resolve();
  const Transformer model(model_config, DType::kF32, 1);
  constexpr int64_t kPrompts = 5, kGenerations = 3;
  std::vector<std::vector<Trajectory>> by_ranks;
  for (const int ranks : {1, 2, 3}) {
    std::vector<Trajectory> merged(kPrompts * kGenerations);
    run_local_ranks(ranks, [&](Communicator& comm) {
      Engine engine(model, {});
      const Sampler sampler(engine, *data.tokenizer, config.sampling);
      std::vector<Example> prompts;
      std::vector<int64_t> indices;
      for (int64_t i = comm.rank(); i < kPrompts; i += comm.size()) {
        prompts.push_back(data.train->get(i));
        indices.push_back(i);
      }
      for (const Trajectory& t :
           sampler.sample(prompts, kGenerations, {.seed = 1, .step = 0, .prompt_indices = indices}))
        merged[static_cast<size_t>(t.index)] = t;
    });
    by_ranks.push_back(std::move(merged));
  }
  for (size_t r = 1; r < by_ranks.size(); ++r)
    for (size_t i = 0; i < by_ranks[0].size(); ++i) {
      EXPECT_EQ(by_ranks[r][i].tokens, by_ranks[0][i].tokens);
      EXPECT_EQ(by_ranks[r][i].logprobs, by_ranks[0][i].logprobs);
    }
}

// The lines of completions.jsonl of the evaluation before the run and of step one.
std::string first_step_of(const std::string& completions) {
  return completions.substr(0, completions.find("{\"step\":2,"));
}

// Step one of a run samples before any update, so the metrics of its samples are exact, too.
TEST_F(Splits, FirstGrpoStepMeasuresTheSameOnAnyNumberOfRanks) {
  const Trained one = train(kSmallGrpo, {"ranks=1"});
  for (const char* ranks : {"ranks=2", "ranks=3"}) {
    const Trained other = train(kSmallGrpo, {ranks});
    for (const char* name : {"reward", "rewards/format/std", "completions/mean_length",
                             "num_tokens", "frac_reward_zero_std", "ratio_deviation"})
      EXPECT_EQ(metric(other.metrics[0], name), metric(one.metrics[0], name))
          << ranks << " " << name;
    EXPECT_EQ(first_step_of(other.completions), first_step_of(one.completions)) << ranks;
  }
}

// init_from, on hosts with different directories.
TEST(Ranks, StartFromTheCheckpointThatRankZeroNames) {
  const TempDir dir;
  const RunPlan plan = small_plan(dir, "run", kSmallCommon + kSmallSft);
  const std::string one = train_interrupted(plan, 1), three = train_interrupted(plan, 3);
  std::filesystem::create_directory(dir.path("new"));
  const std::atomic<bool> stop{false};
  Reporter reporter;
  const auto start = [&](const std::string& of_rank_0, const std::string& of_rank_1) {
    run_local_ranks(2, [&](Communicator& comm) {
      TrainConfig config = plan.stages[0];
      config.init_from = comm.rank() == 0 ? of_rank_0 : of_rank_1;
      const Stage stage({config, dir.path("new"), comm, reporter, stop});
    });
  };
  EXPECT_THROW_WITH(start(one, three), InputError,
                    "checkpoints/step-00000001, which rank 0 reads, is not visible to every rank");
  std::filesystem::copy(one + "/checkpoints/step-00000001", three + "/checkpoints/step-00000001",
                        std::filesystem::copy_options::recursive);
  EXPECT_NO_THROW(start(one, three));  // a newer one of rank 1 does not count
}

}  // namespace
}  // namespace cohort::test
