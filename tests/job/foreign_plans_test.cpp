// Configurations of those who come from other trainers or earlier versions: values that they spell
// otherwise or that were removed, presets, and keys that do not go together.
#include <string>

#include "job/config.h"
#include "job/foreign_keys.h"
#include "job/preview.h"
#include "rl/reward.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

using Warnings = std::vector<std::string>;

class ForeignPlans : public testing::Test {
 protected:
  RunPlan load(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
    write_file(dir_.path("plan.yaml"), yaml);
    return load_plan(dir_.path("plan.yaml"), overrides);
  }
  void expect_refused(const std::string& yaml, const std::string& text) {
    SCOPED_TRACE(yaml);
    EXPECT_THROW_WITH(load(yaml), InputError, text);
  }
  TempDir dir_;
};

// The keys that a preset sets are not the user's mistake; a key that is given beside it may be one.
TEST_F(ForeignPlans, PresetsDoNotWarnOfTheirOwnKeys) {
  const std::string grpo = "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n";
  for (const PresetEntry& preset : kPresets)
    for (const char* keys : {"", "num_minibatches: 1\n", "beta: 0\n"}) {
      SCOPED_TRACE(str(preset.name, " ", keys));
      if (preset.name == "opd") continue;  // needs a teacher, see Teacher.*
      const RunPlan plan = load(str(grpo, "preset: ", preset.name, "\n", keys));
      EXPECT_EQ(plan.stages[0].warnings(), Warnings());
      // A resolved configuration has none either.
      EXPECT_EQ(load(dump_plan(plan)).stages[0].warnings(), Warnings());
    }
  const auto warnings = [&](const std::string& keys) {
    return load(grpo + keys).stages[0].warnings();
  };
  const Warnings other = warnings("preset: dapo\nepsilon_high: 0.3\n");
  ASSERT_EQ(other.size(), 1u);
  EXPECT_EQ(other[0].find("epsilon_high: does nothing with one update a step"), 0u);
  EXPECT_EQ(warnings("preset: dapo\nsurrogate: cispo\n").size(), 1u);
  EXPECT_EQ(warnings("preset: dapo\nkl_unbiased: yes\n").size(), 1u);
  EXPECT_EQ(warnings("preset: reinforce_pp\nkl_estimator: k1\nbeta: 0\n").size(), 1u);
}

// Combinations that docs/grpo.md advises against.
TEST_F(ForeignPlans, KeysThatDoNotGoTogetherGiveWarnings) {
  const auto warnings = [&](const std::string& keys) {
    return load("trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n" + keys)
        .stages[0]
        .warnings();
  };
  const auto expect = [&](const std::string& keys, const std::string& begin) {
    SCOPED_TRACE(keys);
    const Warnings found = warnings(keys);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(found[0].find(begin), 0u) << found[0];
    EXPECT_NE(found[0].find("hint: "), std::string::npos);
  };
  const std::string biased = "surrogate: reinforce ignores the ratio";
  expect("preset: rloo\nnum_minibatches: 2\n", biased);
  expect("preset: rloo\nnum_iterations: 2\n", biased);
  expect("surrogate: reinforce\nnum_iterations: 2\n", biased);
  EXPECT_EQ(warnings("preset: rloo\nnum_minibatches: 2\nimportance_weights: truncate\n"),
            Warnings());
  const std::string twice = "whiten_advantages: scales advantages that are scaled";
  expect("whiten_advantages: yes\n", twice);
  expect("whiten_advantages: yes\nscale_rewards: batch\n", twice);
  expect("preset: gdpo\nwhiten_advantages: yes\nscale_rewards: none\n", twice);
  expect("preset: reinforce_pp\nscale_rewards: group\n", twice);
  EXPECT_EQ(warnings("whiten_advantages: yes\nscale_rewards: none\n"), Warnings());
  EXPECT_EQ(warnings("whiten_advantages: yes\nscale_rewards: leave_one_out\n"), Warnings());
  const std::string full_scale = "kl_in: reward: groups with equal rewards differ";
  const std::string in_reward = "beta: 0.1\nkl_in: reward\nkl_estimator: k1\n";
  expect(in_reward, full_scale);
  expect(in_reward + "scale_rewards: maxrl\n", full_scale);
  expect("preset: rloo\nscale_rewards: group\n", full_scale);
  EXPECT_EQ(warnings(in_reward + "scale_rewards: none\n"), Warnings());
  EXPECT_EQ(warnings(in_reward + "scale_rewards: batch\n"), Warnings());
}

// A value that another trainer has under the same name is no typing error of one of ours.
TEST_F(ForeignPlans, ValuesOfOtherTrainersNameOurKey) {
  const std::string grpo = "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n";
  const std::string file = dir_.path("plan.yaml");
  expect_refused(grpo + "loss_type: cispo\n",
                 file +
                     ":4: loss_type: expected one of grpo, dapo, dr_grpo, bnpo, sequence_sum, got "
                     "'cispo'; it is 'surrogate: cispo' here: with any loss_type");
  for (const auto& [keys, text] :
       {std::pair{"loss_type: sapo", "; it is 'surrogate: sapo' here: with any loss_type"},
        {"loss_type: SAPO", "; it is 'surrogate: sapo' here"},
        {"loss_type: luspo", "; it is 'preset: luspo' here"},
        {"loss_type: gspo", "; it is 'preset: gspo' here"},
        {"loss_type: ppo", "; it is 'surrogate: clip' here"},
        {"loss_type: seq-mean-token-mean", "; it is 'loss_type: grpo' here"},
        {"loss_type: dpo", "; it is 'trainer: dpo' here"},
        {"loss_type: sigmoid_norm", "; it is 'preference.length_normalized' here"},
        {"loss_type: vespo", "; it is 'preset: vespo' here"},
        {"loss_type: gmpo", "it is 'preset: gmpo' here"},
        {"surrogate: dapo", "; it is 'preset: dapo' here"},
        {"surrogate: gspo", "; it is 'preset: gspo' here"},
        {"surrogate: ppo", "; it is 'surrogate: clip' here"},
        {"preset: vapo", "; that algorithm is not offered"},
        {"preset: reinforce++", "; it is 'preset: reinforce_pp' here"},
        {"scale_rewards: true", "; it is 'scale_rewards: group' here"},
        {"scale_rewards: False", "; it is 'scale_rewards: none' here"},
        {"kl_estimator: kl", "; it is 'kl_estimator: k1' here"},
        {"kl_estimator: low_var_kl", "; it is 'kl_estimator: k3' here"},
        {"importance_weights: icepop", "; it is 'importance_weights: mask' here"},
        {"importance_weights: token_truncate", "; it is 'importance_weights: truncate' here"},
        {"lr_schedule: constant_with_warmup", "; it is 'lr_schedule: constant' here: with warmup"},
        {"dtype: bfloat16", "; it is 'dtype: bf16' here: with device: cuda"},
        {"model: {recompute: true}", "; it is 'model.recompute: block' here"},
        {"model: {position: nope}", "; it is 'model.position: none' here"},
        // Values of keys that are unknown here.
        {"loss_mode: gspo", "'loss_mode'; it is 'preset: gspo' here"},
        {"loss_mode: vanilla", "'loss_mode'; it is 'surrogate: clip' here: the default"},
        {"loss_mode: other", "'loss_mode'; it is 'surrogate' here: vanilla: clip"},
        {"algorithm: {adv_estimator: rloo}", "; it is 'scale_rewards: leave_one_out' here"},
        {"adv_estimator: gae", "'adv_estimator'; not offered: 'scale_rewards' is group"},
        {"loss_agg_mode: seq-mean-token-sum-norm", "; it is 'loss_type: dr_grpo' here"},
        {"loss_fn: {truncated_importance_sampling_type: icepop}",
         "; it is 'importance_weights: mask' here"},
        {"vllm_importance_sampling_mode: sequence_mask",
         "; it is 'importance_weights: mask' here: with importance_level: sequence"},
        {"vllm_importance_sampling_clip_max: 3.0", "; it is 'importance_max' here"},
        // A name of a run is no value of a key.
        {"run_name: grpo", "'run_name'; it is 'name' here"}})
    expect_refused(str(grpo, keys, "\n"), text);
  expect_refused("trainer: rloo\n", "; it is 'preset: rloo' here: with trainer: grpo");
  expect_refused("trainer: ppo\n", "; that algorithm is not offered");
  for (const char* trainer : {"KTO", "orpo", "reward"})
    expect_refused(str("trainer: ", trainer, "\n"),
                   "; not offered; hint: trainer: dpo learns from pairs of answers");
  expect_refused("data: {task: addition}\nstages:\n  - {trainer: sft}\n  - {loss_type: cispo}\n",
                 "stages.1.loss_type: expected one of");
  EXPECT_THROW_WITH(load(grpo, {"loss_type=cispo"}), InputError,
                    "command line: loss_type: expected one of");
}

// A section whose value is given in place of its keys.
TEST_F(ForeignPlans, ASectionThatIsATextNamesTheKey) {
  const std::string file = dir_.path("plan.yaml");
  const std::string grpo = "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n";
  expect_refused(grpo + "model: SmolLM2\n",
                 file +
                     ":4: model: expected a map of keys, got 'SmolLM2'; hint: the key is "
                     "model.path");
  expect_refused("trainer: sft\ndata: a.jsonl\n", "; hint: the key is data.jsonl.path");
  expect_refused("trainer: sft\ndata: [a.jsonl]\n", "; hint: the key is data.jsonl.path");
  expect_refused("trainer: sft\ndata: {jsonl: a.jsonl}\n", "; hint: the key is data.jsonl.path");
  expect_refused(grpo + "environment: tools\n", "; hint: the key is environment.name");
  expect_refused(grpo + "lora: 16\n", "; hint: the key is lora.rank");
  EXPECT_THROW_WITH(load(grpo, {"model=SmolLM2"}), InputError,
                    "command line: model: expected a map of keys, got 'SmolLM2'; hint: the key is "
                    "model.path");
}

TEST_F(ForeignPlans, TheTrainerThatFitsTheDataIsNamed) {
  for (const char* data : {"{task: addition}", "{jsonl: {path: a.jsonl}}"})
    expect_refused(str("data: ", data, "\n"),
                   "and pretrain is the default; hint: trainer: sft or trainer: grpo");
  expect_refused("trainer: sft\ndata: {text: a.txt}\n", "hint: trainer: pretrain for plain text");
}

TEST_F(ForeignPlans, AGroupOfOneIsRefusedWithTheReason) {
  const std::string data = "data: {task: addition}\nrewards: [{name: task}]\nnum_generations: 1\n";
  expect_refused("trainer: grpo\n" + data,
                 "num_generations: 1 leaves nothing to compare: the advantage of a completion is "
                 "its reward relative to the others of its prompt; hint: num_generations=8, "
                 "baseline=batch, or advantage=NAME");
  EXPECT_NO_THROW(load("trainer: grpo\nbaseline: batch\n" + data));
  expect_refused("trainer: grpo\nbaseline: batch\nprompts_per_step: 1\n" + data,
                 "prompts_per_step: 1 with num_generations: 1 leaves nothing to compare");
  expect_refused(
      "trainer: grpo\nbaseline: batch\nrewards: [{name: exact_match}]\n"
      "data: {jsonl: {path: a.jsonl}, curriculum: online}\n",
      "data.curriculum: online leaves out problems whose completions all get the same reward");
  expect_refused("trainer: grpo\ncredit: turn\ndata: {task: addition}\nrewards: [{name: task}]\n",
                 "credit: turn needs the rewards that an environment gives to turns; hint: ");
  EXPECT_NO_THROW(load("trainer: sft\n" + data));
  expect_refused("trainer: sft\ndata: {task: addition}\nnum_generations: 0\n",
                 "num_generations: expected a number from 1 to");
}

TEST_F(ForeignPlans, AFunctionAsARewardIsACommand) {
  const std::string grpo = "trainer: grpo\ndata: {task: addition}\n";
  const std::string function =
      "{name: command, run: python3 PATH/TO/cohort/scripts/cohort_reward.py my/reward.py}";
  const std::string file = dir_.path("plan.yaml");
  for (const char* rewards : {"my/reward.py", "[my/reward.py]", "[{name: task}, my/reward.py]"})
    expect_refused(str(grpo, "rewards: ", rewards, "\n"),
                   str(file,
                       ":3: rewards: expected a list of maps, got 'my/reward.py'; hint: "
                       "rewards: [",
                       function, "]"));
  expect_refused(grpo + "rewards: exact_match\n", "hint: rewards: [{name: exact_match}]");
  expect_refused("data: {task: addition}\nstages: [{trainer: grpo, rewards: [task]}]\n",
                 file + ":2: rewards: expected a list of maps, got 'task'");
  EXPECT_THROW_WITH(load(grpo, {"rewards=my/reward.py"}), InputError,
                    "command line: rewards: expected a list of maps");
  EXPECT_THROW_WITH(RewardSet({{.name = "my/reward.py"}}, nullptr), InputError,
                    "; hint: " + function);
}

TEST_F(ForeignPlans, ALearningRateThatRuinsATrainedModelGivesAWarning) {
  ModelConfig large{.num_layers = 12, .d_model = 768}, small{.num_layers = 2, .d_model = 64};
  for (ModelConfig* model : {&large, &small}) {
    model->vocab_size = 50'000;
    model->num_heads = 4;
    model->resolve();
  }
  const auto warning = [&](const std::string& keys, const ModelConfig& model) {
    return rate_warning(load("data: {task: addition}\nrewards: [{name: task}]\n" + keys).stages[0],
                        model);
  };
  const std::string path = "model: {path: m}\n", sft = "trainer: sft\n", grpo = "trainer: grpo\n";
  EXPECT_EQ(warning(path + grpo + "learning_rate: 2e-4\n", large),
            "learning_rate: 0.0002 is 200 times the default, which may ruin a trained model; hint: "
            "learning_rate=1e-06");
  EXPECT_NE(warning(path + sft + "learning_rate: 1e-3\n", large), "");
  EXPECT_EQ(warning(path + sft + "learning_rate: 2e-4\n", large), "");
  EXPECT_EQ(warning(path + grpo + "learning_rate: 1e-5\n", large), "");
  EXPECT_EQ(warning(path + grpo + "lora: {rank: 4}\nlearning_rate: 1e-4\n", large), "");
  EXPECT_EQ(warning(path + grpo + "learning_rate: 2e-4\n", small), "");
  EXPECT_EQ(warning(grpo + "learning_rate: 2e-4\n", large), "");  // a new model
}

TEST_F(ForeignPlans, KeysOfUnslothNameOurs) {
  for (const auto& [keys, text] :
       {std::pair{"fast_inference: true", "leave it out: the sampler is built in"},
        {"max_lora_rank: 32", "it is 'lora.rank' here"},
        {"use_gradient_checkpointing: unsloth", "it is 'model.recompute' here: cheap or block"},
        {"random_state: 3407", "it is 'seed' here"},
        {"loftq_config: {}", "leave it out: adapters start from zero"},
        {"full_finetuning: true", "it is 'lora.rank' here: without the section lora all"},
        {"bias: none", "leave it out: only adapters are trained"},
        {"load_in_4bit: true", "it is 'precision.base' here: nf4 with"},
        {"max_seq_length: 2048", "it is 'model.context' here"},
        {"finetune_mlp_modules: true", "it is 'lora.targets' here"},
        {"embedding_learning_rate: 1e-5", "it is 'learning_rate' here"},
        {"response_part: x", "leave it out: of conversations only the assistant's turns"},
        {"chat_template: chatml", "leave it out: it is chat_template.jinja in the model's folder"},
        {"dataset_num_proc: 2", "leave it out: all threads read the data"},
        {"unsloth_num_chunks: 4", "leave it out: logits and activations are computed in parts"}})
    expect_refused(
        str("trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n", keys, "\n"), text);
}

TEST_F(ForeignPlans, ARemovedSchemeOfPositionsIsRefusedWithThoseThatThereAre) {
  const std::string file = dir_.path("plan.yaml");
  const std::string text =
      "model.position: expected one of rope, learned, sinusoidal, alibi, t5, exposb, none, got "
      "'stick_breaking', which was removed";
  expect_refused("data: {text: a.txt}\nmodel: {position: stick_breaking}\n", file + ":2: " + text);
  expect_refused("data: {text: a.txt}\nstages:\n  - {}\n  - model: {position: 'stick_breaking'}\n",
                 file + ":4: stages.1." + text);
  EXPECT_THROW_WITH(load("data: {text: a.txt}\n", {"model.position=stick_breaking"}), InputError,
                    "command line: " + text);
}

// No value that is a name elsewhere is taken for a typing error, and what a hint says is accepted.
TEST_F(ForeignPlans, NoHintLeadsToAnotherAlgorithm) {
  const std::string grpo = "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n";
  std::vector<std::string> names;
  for (const PresetEntry& preset : kPresets) names.emplace_back(preset.name);
  for (const auto& [value, name, denominator] : kLossTypes) names.emplace_back(name);
  for (const auto& [value, name, clips] : kSurrogates) names.emplace_back(name);
  for (const ForeignKey& key : foreign_keys())
    if (key.theirs.starts_with('=') || key.theirs.starts_with("loss_type="))
      names.push_back(key.theirs.substr(key.theirs.find('=') + 1));
  for (const char* key : {"trainer", "preset", "loss_type", "surrogate", "scale_rewards",
                          "kl_estimator", "importance_weights"})
    for (const std::string& name : names) try {
        load(str("data: {task: addition}\nrewards: [{name: task}]\n", key, ": '", name, "'\n"));
      } catch (const InputError& e) {
        EXPECT_EQ(std::string(e.what()).find("did you mean"), std::string::npos)
            << key << ": " << name << ": " << e.what();
      }
  for (const ForeignKey& key : foreign_keys()) {
    const size_t colon = key.ours.find(": ");
    if (colon == key.ours.npos || key.ours.starts_with("trainer: ")) continue;
    std::vector<std::string> overrides{
        str(key.ours.substr(0, colon), "=", key.ours.substr(colon + 2))};
    if (key.ours == "dtype: bf16") overrides.emplace_back("device=cuda");
    EXPECT_NO_THROW(load(grpo, overrides)) << key.theirs << " -> " << overrides[0];
  }
}

}  // namespace
}  // namespace cohort::test
