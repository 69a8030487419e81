// Errors of plans: where they are, and what an unknown key may mean.
#include <algorithm>

#include "job/foreign_keys.h"
#include "tests/job/plans_fixture.h"

namespace cohort::test {
namespace {

TEST_F(Plans, AllUnknownKeysAreNamedWithTheirNamesHere) {
  const std::string file = dir_.path("plan.yaml");
  expect_refused(
      "data: {temprature: 1, text: a.txt}\nlr: 1\nmax_steps: 3\nuse_peft: true\nstages:\n"
      "  - actor_rollout_ref: {actor: {optim: {lr: 1e-6}}, rollout: {n: 8}}\n"
      "  - trainer: {total_epochs: 3}\n  - qqqqqqq: 1\n",
      str("8 unknown keys:\n  ", file,
          ":1: 'data.temprature'; did you mean 'temperature' at top level?\n  ", file,
          ":2: 'lr'; it is 'learning_rate' here\n  ", file,
          ":3: 'max_steps'; it is 'steps' here\n  ", file,
          ":4: 'use_peft'; the section lora: lora.rank=16 trains adapters\n  ", file,
          ":6: 'stages.0.actor_rollout_ref.actor.optim.lr'; it is 'learning_rate' here\n  ", file,
          ":6: 'stages.0.actor_rollout_ref.rollout.n'; it is 'num_generations' here\n  ", file,
          ":7: 'stages.1.trainer.total_epochs'; it is 'steps' here: epochs x problems / "
          "prompts_per_step\n  ",
          file, ":8: 'stages.2.qqqqqqq'\nhint: `cohort train --help` lists all keys"));
}

TEST_F(Plans, KeysOfOtherTrainersAreExplainedInTheirOwnFiles) {
  const auto expect = [&](const char* yaml, const char* reason) {
    expect_refused(str("data: {text: a.txt}\n", yaml, "\n"), reason);
  };
  expect("peft_config: {r: 16}", "'peft_config.r'; it is 'lora.rank' here");
  expect("lora: {r: 16}", "'lora.r'; it is 'lora.rank' here");
  expect("lora_alpha: 16", "'lora_alpha'; it is 'lora.alpha' here");
  expect("lora: {dropout: 0.1}", "'lora.dropout'; adapters have no dropout");
  expect("peft_config: {init_lora_weights: yes}", "the section lora: lora.rank=16 trains adapters");
  expect("vllm_mode: colocate", "'vllm_mode'; leave it out: the sampler is built in");
  expect("rollout: {n: 8}", "'rollout.n'; it is 'num_generations' here");
  expect("trainer: {nnodes: 1}", "'trainer.nnodes'; cohort train --gpus N");
  expect("algorithm: {kl_ctrl: {kl_coef: 0}}", "it is 'beta' here");
  expect("algorithm: {kl_ctrl: {type: fixed}}", "it is 'kl_target' here: adaptive: the KL");
  expect("algorithm: {kl_ctrl: {horizon: 9}}", "it is 'kl_horizon' here");
  expect("sync_ref_model: yes", "it is 'ref_sync_every' here: 0 is off");
  expect("optimizer: {learning_rate: 1}", "did you mean 'learning_rate' at top level?");
  expect("kk: 1", "unknown key 'kk'; hint: `cohort train --help` lists all keys");
  expect("optimizer: {master: f32}", "unknown key 'optimizer.master'; hint: `cohort train --help`");
  expect("optimizer.moments: bf16", "in a file it is optimizer: {moments: ...}");
  expect_refused("data: {path: a.jsonl, train_batch_size: 8}\n",
                 "'data.path'; did you mean 'data.jsonl.path'?");
  expect_refused("data: {train_batch_size: 8}\n", "it is 'prompts_per_step' here");
  expect_refused("eval: {correct: {rewad: math}}\n", "did you mean 'reward'?");
}

TEST_F(Plans, UnknownOverridesAreNamedOnce) {
  write_file(dir_.path("plan.yaml"), "data: {text: a.txt}\nstages:\n  - {}\n  - {}\n");
  const std::vector<std::string> overrides{"stepz=3", "stages.1.lr=2"};
  EXPECT_THROW_WITH(load_plan(dir_.path("plan.yaml"), overrides), InputError,
                    "2 unknown keys:\n  command line: 'stepz'; did you mean 'steps'?\n"
                    "  command line: 'stages.1.lr'; it is 'learning_rate' here");
}

TEST(ForeignKeys, NameKeysThatExist) {
  const std::vector<std::string> keys = config_keys<TrainConfig>();
  for (const ForeignKey& key : foreign_keys()) {
    const std::string ours = key.ours.substr(0, key.ours.find(": "));
    EXPECT_TRUE(ours.empty() || std::count(keys.begin(), keys.end(), ours) == 1)
        << key.theirs << " -> " << key.ours;
    EXPECT_FALSE(key.ours.empty() && key.remark.empty()) << key.theirs;
  }
  EXPECT_GT(foreign_keys().size(), 100u);
}

TEST_F(Plans, ErrorsNameFileLineAndNearestKey) {
  const std::string file = dir_.path("plan.yaml");
  expect_refused("data: {text: a.txt}\nlerning_rate: 1\n",
                 file + ":2: unknown key 'lerning_rate'; did you mean 'learning_rate'?");
  expect_refused("stages:\n  - trainer: sft\n    stepz: 1\n",
                 file + ":3: unknown key 'stages.0.stepz'; did you mean 'steps'?");
  expect_refused("data: {text: a.txt}\nstages:\n  - {}\n  - model:\n      d_modl: 1\n",
                 file + ":5: unknown key 'stages.1.model.d_modl'; did you mean 'd_model'?");
  expect_refused("data: {text: a.txt}\nstages:\n  - {}\n  - rewards: [{nam: task}]\n",
                 file + ":4: unknown key 'stages.1.rewards[0].nam'; did you mean 'name'?");
  expect_refused("model: {dropout: x}\n", file + ":1: model.dropout: expected a number");
  expect_refused("data:\n  text: a.txt\n  tekst: b\n", file + ":3: unknown key 'data.tekst'");
  expect_refused("steps: many\n", file + ":1: steps: expected a whole number");
  expect_refused("steps: 0\n", file + ":1: steps: expected a number from 1 to 1000000000, got '0'");
  expect_refused("steps: 1\nsteps: 2\n", file + ":2: duplicate key 'steps', first given at line 1");
  expect_refused("trainer: sfd\n", "did you mean 'sft'?");
  expect_refused("stages: 3\n", "expected a list with at least one stage");
  expect_refused("stages: []\n", "expected a list with at least one stage");
  expect_refused("stages: [1]\n", "expected a map of keys for each stage");
  expect_refused("a: [\n", "not valid YAML");
  EXPECT_THROW_WITH(load_plan(dir_.path("none.yaml"), {}), InputError, "hint: check the path");
}

}  // namespace
}  // namespace cohort::test
