// Plans: stages, overrides, the round trip through the run directory's config.yaml, and keys that
// contradict each other.
#include "job/config.h"
#include "job/preview.h"
#include "rl/reward.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "tests/job/plans_fixture.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;
using Texts = std::vector<std::string>;

const std::string kTwoStages =
    "data: {task: addition}\n"
    "seed: 7\n"
    "model: {d_model: 32}\n"
    "stages:\n"
    "  - {trainer: sft, steps: 5, batch_size: 3}\n"
    "  - trainer: grpo\n"
    "    steps: 9\n"
    "    model: {dropout: 0.5}\n"
    "    rewards: [{name: task}]\n";

TEST_F(Plans, StagesTakeTheTopLevelKeysAsDefaults) {
  const RunPlan plan = load(kTwoStages);
  ASSERT_EQ(plan.stages.size(), 2u);
  EXPECT_EQ(plan.name, "plan");  // the file's
  EXPECT_EQ(plan.stages[0].batch.trainer, TrainerType::kSft);
  EXPECT_EQ(plan.stages[0].batch.steps, 5);
  EXPECT_EQ(plan.stages[0].model.dropout, 0);
  EXPECT_EQ(plan.stages[1].batch.trainer, TrainerType::kGrpo);
  EXPECT_EQ(plan.stages[1].batch.steps, 9);
  EXPECT_EQ(plan.stages[1].batch.batch_size, TrainConfig{}.batch.batch_size);
  EXPECT_EQ(plan.stages[1].model.dropout, 0.5);
  for (const TrainConfig& stage : plan.stages) {
    EXPECT_EQ(stage.seed, 7);
    EXPECT_EQ(stage.model.d_model, 32);
    EXPECT_EQ(stage.data.task, "addition");
  }
}

TEST_F(Plans, OverrideReachesEveryStageAndTakesPrecedence) {
  const RunPlan plan = load(kTwoStages, {"steps=2", "seed=8", "model.d_model=64"});
  for (const TrainConfig& stage : plan.stages) {
    EXPECT_EQ(stage.batch.steps, 2);
    EXPECT_EQ(stage.seed, 8);
    EXPECT_EQ(stage.model.d_model, 64);
  }
  EXPECT_EQ(plan.stages[1].model.dropout, 0.5);
}

TEST_F(Plans, OverrideOfOneStageReachesThatOneOnly) {
  const RunPlan plan = load(kTwoStages, {"stages.1.steps=3", "stages.0.model.num_layers=2"});
  EXPECT_EQ(plan.stages[0].batch.steps, 5);
  EXPECT_EQ(plan.stages[1].batch.steps, 3);
  EXPECT_EQ(plan.stages[0].model.num_layers, 2);
  EXPECT_EQ(plan.stages[1].model.num_layers, ModelConfig{}.num_layers);
  expect_refused(kTwoStages, "stages", {"stages.2.steps=3"});
  expect_refused(kTwoStages, "'stages.1.stepz'; did you mean 'steps'?", {"stages.1.stepz=3"});
}

TEST_F(Plans, ProgramsOfRewardsRunInTheFoldersOfTheirFiles) {
  const RunPlan plan = load(
      "trainer: grpo\ndata: {task: parity}\nrewards:\n  - {name: task}\n"
      "  - {name: command, run: a b}\n  - {name: command, run: a, directory: sub/folder}\n"
      "  - {name: command, run: a, directory: /}\n");
  const std::vector<RewardConfig>& rewards = plan.stages[0].rewards;
  const std::string& own = rewards[1].program.directory;
  EXPECT_TRUE(rewards[0].program.directory.empty() && rewards[3].program.directory == "/");
  EXPECT_EQ(own + "/sub/folder", rewards[2].program.directory);
  EXPECT_TRUE(own.starts_with("/") && !own.ends_with("/"));
}

TEST_F(Plans, BuffersOfRewardsFitTheLengthOfCompletions) {
  const std::string plan =
      "trainer: grpo\ndata: {task: parity}\nmax_completion_length: 8\nrewards: [{name: overlong, "
      "buffer: ";
  EXPECT_EQ(load(plan + "8}]\n").stages[0].rewards[0].buffer, 8);
  EXPECT_EQ(load(plan + "9, max_length: 9}]\n").stages[0].rewards[0].buffer, 9);
  expect_refused(plan + "9}]\n",
                 "rewards.buffer: 9 of 'overlong' is more than max_completion_length, 8");
}

// Every key differs from its default, so that a key missing from the dump is detected.
TEST_F(Plans, DumpedPlanLoadsAsTheSamePlan) {
  const RunPlan plan = load(
      "name: all keys\n"
      "output_dir: out\n"
      "init_from: start\n"
      "seed: 3\nsteps: 4\nbatch_size: 5\nnum_threads: 2\nranks: 2\nmicro_batch_tokens: "
      "77\nlog_every: 3\nlog_completions: 5\njournal_mb: 7\nwatchdog_minutes: 2.5\ndtype: f64\n"
      "learning_rate: 1e-7\nmin_learning_rate: 1e-9\nlr_schedule: linear\nwarmup_steps: 4\n"
      "weight_decay: 0.3\nadam_beta1: 0.8\nadam_beta2: 0.123456789012345678\nadam_eps: 1e-30\n"
      "max_grad_norm: 0\n"
      "model: {path: start, num_layers: 2, d_model: 24, num_heads: 6, num_kv_heads: 2, head_dim: "
      "10, d_ff: 5,\n"
      "  context: 33, norm: layer_norm, position: learned, mlp: gelu_tanh, bias: true,\n"
      "  tie_embeddings: true, qk_norm: true, dropout: 0.1, norm_eps: 1e-6, rope_theta: 5e5,\n"
      "  window: 7, soft_cap: 30, attention_sinks: true, attention_gate: true, rotary_fraction: "
      "0.5,\n"
      "  position_buckets: 16, position_max_distance: 64, exposb: {position_gain: 0.5,\n"
      "  position_decay: 50, channel_base: 1, channel_gain: 0.125, channel_center: 0.5,\n"
      "  channel_width: 0.25, distance_floor: 0.5, distance_rate: 0.25},\n"
      "  delta: {full_every: 2, key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 8},\n"
      "  init_std: 0.3, recompute: block}\n"
      "eval: {every: 3, at_start: false, size: 5, tokens: 7, num_samples: 8, k: [1, 8], stop_at: "
      "0.5,\n"
      "  temperature: 0.75, top_p: 0.5, max_completion_length: 70, best: two,\n"
      "  sets: [{name: one, path: one.jsonl},\n"
      "    {name: two, path: two.jsonl, prompt: '{q}', answer: '{a}', fingerprint: ab, "
      "temperature: 0.25, top_p: "
      "0.95,\n"
      "    num_samples: 2, k: [2], max_completion_length: 80,\n"
      "    correct: {reward: task, threshold: 0.5}}],\n"
      "  correct: {reward: format, threshold: 0.25}}\n"
      "checkpoint: {every: 2, every_minutes: 2.5, keep_last: 9}\n"
      "precision: {cache: fp8, attention: fp8}\n"
      "stages:\n"
      "  - trainer: pretrain\n"
      "    data: {text: some/text.txt, held_out_fraction: 0.25, tokenizer: byte,\n"
      "      eval_text: [more.txt, x/*.txt], tokenizer_path: tokens, weights: [0.5], cache_dir: "
      "kept,\n"
      "      fingerprint: 0123456789012345}\n"
      "  - trainer: sft\n"
      "    data:\n"
      "      jsonl: {path: 'my: file.jsonl', prompt: '{a} # \"q\"\\n', answer: \"{b}\\n\",\n"
      "        solution: '- {c}', pair: '{p}', held_out_fraction: 0, limit: 12, eval_path: "
      "e.jsonl,\n"
      "        messages: turns, completion: reply}\n"
      "      split_by: [question|problem, x]\n"
      "      too_long: skip\n"
      "      curriculum: length\n"
      "      chat: yes\n"
      "      system: 'Be: brief.'\n"
      "      chat_template_kwargs: '{\"a\": true}'\n"
      "  - trainer: grpo\n"
      "    data: {task: parity, curriculum_patience: 3, task_sizes: {min_size: 3, max_size: 5, "
      "worked_share: 0.5}}\n"
      "    prompts_per_step: 3\n"
      "    num_generations: 5\n"
      "    temperature: 0.6\n    top_k: 4\n    top_p: 0.9\n    min_p: 0.05\n"
      "    repetition_penalty: 1.25\n"
      "    presence_penalty: 0.5\n"
      "    frequency_penalty: -0.25\n"
      "    logit_bias: ['3:-1.5', '4:2']\n"
      "    stop_strings: [END, '\"']\n"
      "    rollout: {memory_fraction: 0.25, max_cache_tokens: 4096}\n"
      "    max_completion_length: 6\n"
      "    max_concurrent: 2\n    reduction_lanes: 4\n"
      "    stop_tokens: [1, 2]\n    dtype: f32\n    sharding: optimizer\n"
      "    optimizer: {moments: bf16, place: host, host_units: 3}\n"
      "    epsilon: 0.1\n"
      "    epsilon_high: 0.28\n"
      "    dual_clip: 3.5\n"
      "    beta: 0.04\n"
      "    kl_estimator: k2\n"
      "    reference: start\n"
      "    kl_target: 0.125\n"
      "    kl_horizon: 300\n"
      "    ref_sync_every: 3\n"
      "    ref_sync_alpha: 0.25\n"
      "    lora: {rank: 8, alpha: 12.5, targets: [q_proj, mlp.down_proj], rslora: yes}\n"
      "    precision: {base: nf4}\n"
      "    loss_type: dr_grpo\n"
      "    scale_rewards: leave_one_out\n"
      "    dynamic_sampling_rounds: 2\n"
      "    whiten_advantages: true\n"
      "    advantage_clip: 2\n"
      "    num_iterations: 2\n"
      "    num_minibatches: 3\n"
      "    ratio_check_every: 7\n    kl_check_every: 9\n"
      "    mask_truncated_completions: yes\n"
      "    shuffle_advantages: true\n"
      "    importance_sampling_level: sequence\n"
      "    kl_in: reward\n"
      "    entropy_coef: 0.125\n"
      "    top_entropy_quantile: 0.2\n"
      "    importance_weights: mask\n"
      "    importance_min: 0.25\n"
      "    importance_max: 8\n"
      "    rewards:\n"
      "      - {name: format, weight: -0.5, pattern: '(?s)\\d+: \"x\" # y'}\n"
      "      - {name: task, weight: 2}\n"
      "      - {name: overlong, buffer: 2, penalty: 0.25, max_length: 5}\n"
      "      - {name: repetition, n: 4}\n"
      "      - {name: cosine, correct: task, threshold: 0.75, right: [2, 1], wrong: [-2, -1]}\n"
      "  - {trainer: grpo, data: {task: parity}, rewards: [{name: task}], delta: 2.5,\n"
      "     preset: gdpo, beta: 0.1, kl_unbiased: yes,\n"
      "     environment: {name: tools, tools: [search, python], corpus: c.jsonl,\n"
      "       sandbox: landlock, workers: 1, timeout: 10,\n"
      "       corpus_field: body, search_results: 5, max_turns: 3, max_sequence_length: 77,\n"
      "       discount: 0.5, turns: strict, tool_format: hermes}}\n"
      "  - {trainer: grpo, data: {task: parity}, rewards: [{name: task}], surrogate: sapo,\n"
      "     baseline: batch, sapo_tau_pos: 1.5, sapo_tau_neg: 2.5, importance_level: sequence,\n"
      "     trust_region: kl, trust_low: 0.3, trust_high: 0.4, off_policy_mask: 2,\n"
      "     old_kl_coef: 0.1, loss: f, advantage: g, rejection: [token_k3 > 1, seq_sum_k1 < -2],\n"
      "     covariance: kl, covariance_fraction: 0.1, covariance_kl_coef: 2, environment: {name: "
      "command,\n"
      "       run: python3 e.py, directory: sub, tool_schemas: t.json, workers: 2,\n"
      "       concurrent: 3, memory: 100, timeout: 4, start_timeout: 50}}\n"
      "  - {trainer: grpo, data: {task: parity}, rewards: [{name: environment}], credit: turn,\n"
      "     environment: {name: http, url: 'https://a.org/b', headers_env: {Key: 'a ${B} \"c\"', "
      "X-Y: "
      "'${Z}'},\n"
      "       ca_file: ca.pem, starts: yes, proxy: 'http://c.org', retries: 3, outage_minutes: "
      "7}}\n"
      "  - {trainer: grpo, data: {task: parity}, rewards: [], preset: opd, kl_estimator: jsd,\n"
      "     jsd_weight: 0.3, kl_top_k: 5, reference: teacher, reference_prompt: 'x{prompt}',\n"
      "     entropy_target: 0.3}\n"
      "  - {trainer: dpo, data: {jsonl: {path: pairs.jsonl, rejected: '{bad}'}, split_by:\n"
      "       [question|problem, x]},\n"
      "     preference: {loss: robust, beta: 0.2, label_smoothing: 0.1, length_normalized: yes,\n"
      "       margin: 0.3, sft_weight: 0.4, reference: none},\n"
      "     eval: {sets: [], best: '', num_samples: 0, k: [], correct: {reward: ''}}}\n"
      "  - {trainer: classify, model: {mask: full, norm_place: after, embedding_norm: yes,\n"
      "       image_size: 8, patch_size: 4, channels: 1},\n"
      "     data: {images: {path: train, eval_path: test, field: file, label: class,\n"
      "       augment: crop_flip}},\n"
      "     eval: {sets: [], best: '', num_samples: 0, k: [], correct: {reward: ''}}}\n"
      "  - {trainer: mlm, data: {text: some/text.txt}, model: {mask: full, token_types: 2},\n"
      "     mlm: {probability: 0.2, mask: 0.7, random: 0.2, whole_words: no},\n"
      "     eval: {sets: [], best: '', num_samples: 0, k: [], correct: {reward: ''}}}\n");
  const std::string dumped = dump_plan(plan);
  // From another directory: every path in it must be absolute by now.
  const TempDir elsewhere;
  write_file(elsewhere.path("config.yaml"), dumped);
  const RunPlan again = load_plan(elsewhere.path("config.yaml"), {});
  EXPECT_EQ(dump_plan(again), dumped);
  EXPECT_EQ(again.name, plan.name);
  EXPECT_EQ(again.output_dir, plan.output_dir);
  ASSERT_EQ(again.stages.size(), 10u);
  EXPECT_TRUE(again.stages[6].grpo.reference.starts_with("/"));
  EXPECT_EQ(again.stages[6].batch.num_generations, 1);
  EXPECT_EQ(again.stages[0].optimizer.adam_beta2, 0.123456789012345678);
  ASSERT_EQ(again.stages[0].eval.sets.size(), 2u);
  EXPECT_EQ(again.stages[0].eval.sets[1].path, plan.stages[0].eval.sets[1].path);
  EXPECT_TRUE(plan.stages[0].eval.sets[1].path.starts_with("/"));
  EXPECT_EQ(again.stages[0].eval.sets[0].num_samples, std::nullopt);
  EXPECT_EQ(again.stages[0].eval.sets[1].temperature, 0.25);
  EXPECT_EQ(again.stages[1].data.jsonl.prompt, "{a} # \"q\"\\n");
  EXPECT_EQ(again.stages[1].data.jsonl.answer, "{b}\n");
  EXPECT_EQ(again.stages[2].rewards[0].pattern, "(?s)\\d+: \"x\" # y");
  EXPECT_EQ(again.stages[2].grpo.epsilon_high, 0.28);
  EXPECT_EQ(again.stages[4].environment.program, plan.stages[4].environment.program);
  EXPECT_TRUE(plan.stages[4].environment.program.directory.starts_with("/"));
  EXPECT_TRUE(plan.stages[3].environment.corpus.starts_with("/"));
  EXPECT_EQ(again.stages[3].environment.program.workers, 1);
  EXPECT_EQ(again.stages[3].environment.program.timeout, 10);
  EXPECT_EQ(again.stages[5].environment.server, plan.stages[5].environment.server);
  EXPECT_TRUE(plan.stages[5].environment.server.ca_file.starts_with("/"));
  EXPECT_EQ(again.stages[2].sampling.stop_tokens, (std::vector<int64_t>{1, 2}));
  // No key has its default value in every stage, or the test would not see it.
  std::istringstream defaults(dump_config(TrainConfig{}));
  for (std::string line; std::getline(defaults, line);) {
    if (line.back() == ':' || line == "device: cpu") continue;
    const bool differs =
        std::any_of(plan.stages.begin(), plan.stages.end(), [&](const TrainConfig& stage) {
          std::istringstream lines(dump_config(stage));
          for (std::string other; std::getline(lines, other);)
            if (other == line) return false;
          return true;
        });
    EXPECT_TRUE(differs) << line;
  }
}

// Earlier versions wrote the values of programs into every section.
TEST_F(Plans, FilesOfEarlierVersionsLoad) {
  const std::string earlier = "run: \"\", workers: 1, timeout: 10, start_timeout: 60, memory: 0";
  const RunPlan plan = load(str("trainer: grpo\ndata: {task: addition}\nrewards: [{name: task, ",
                                earlier, "}, {name: command, run: ./a, workers: 1, timeout: 10}]\n",
                                "environment: {name: \"\", ", earlier, "}\n"));
  EXPECT_FALSE(plan.stages[0].environment.is_set());
  EXPECT_EQ(plan.stages[0].rewards[0].program, ProgramConfig{});
  plan.stages[0].environment.validate();
  EXPECT_NE(make_reward(plan.stages[0].rewards[0], &find_task("addition")), nullptr);
}

TEST_F(Plans, StagesMayChangeTheProgramsOfAnEnvironment) {
  const RunPlan plan = load(
      "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n"
      "environment: {name: tools, tools: [python], tool_format: hermes}\n"
      "stages: [{environment: {workers: 1}}, {environment: {workers: 2, timeout: 10}}]\n");
  EXPECT_EQ(plan.stages[0].environment.program.workers, 1);
  EXPECT_EQ(plan.stages[1].environment.program.workers, 2);
  EXPECT_EQ(plan.stages[1].environment.program.timeout, 10);
}

// Keys without effect give warnings; others do not.
TEST_F(Plans, KeysWithoutEffectGiveWarnings) {
  const std::string grpo = "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n";
  const auto warnings = [&](const std::string& keys) {
    return load(grpo + keys).stages[0].warnings();
  };
  EXPECT_TRUE(warnings("steps: 10\nwarmup_steps: 10\n").empty());
  const auto warmup = warnings("steps: 10\nwarmup_steps: 11\n");
  ASSERT_EQ(warmup.size(), 1u);
  EXPECT_EQ(warmup[0].find("warmup_steps: 11 of 10 steps: the learning rate never reaches its"),
            0u);
  const auto clip = warnings("epsilon_high: 0.28\n");
  ASSERT_EQ(clip.size(), 1u);
  EXPECT_EQ(clip[0].find("epsilon_high: does nothing with one update a step"), 0u);
  EXPECT_TRUE(warnings("epsilon_high: 0.28\nnum_minibatches: 2\n").empty());
  EXPECT_TRUE(warnings("epsilon_high: 0.28\nnum_iterations: 2\n").empty());
  for (const char* key : {"dual_clip: 3", "delta: 3", "surrogate: cispo"}) {
    const auto once = warnings(str(key, "\n"));
    ASSERT_EQ(once.size(), 1u) << key;
    EXPECT_NE(once[0].find(": does nothing with one update a step"), std::string::npos);
    EXPECT_TRUE(warnings(str(key, "\nnum_minibatches: 2\n")).empty()) << key;
  }
  const auto restricted = warnings("top_p: 0.9\n");
  ASSERT_EQ(restricted.size(), 1u);
  EXPECT_NE(restricted[0].find("hint: importance_weights=truncate"), std::string::npos);
  EXPECT_TRUE(warnings("top_p: 0.9\nimportance_weights: truncate\n").empty());
  const auto unclipped = warnings("surrogate: sapo\nepsilon_high: 0.3\nnum_minibatches: 2\n");
  ASSERT_EQ(unclipped.size(), 1u);
  EXPECT_EQ(unclipped[0].find("epsilon_high: does nothing with surrogate: sapo"), 0u);
  EXPECT_EQ(warnings("kl_estimator: k2\nkl_unbiased: yes\n").size(), 2u);
  EXPECT_TRUE(warnings("kl_estimator: k2\nkl_unbiased: yes\nbeta: 0.1\n").empty());
  const auto noise = warnings("kl_estimator: k1\nbeta: 0.1\n");
  ASSERT_EQ(noise.size(), 1u);
  EXPECT_EQ(noise[0].find("kl_estimator: the gradient of k1 in the loss has mean 0"), 0u);
  EXPECT_TRUE(warnings("kl_estimator: k1\nkl_unbiased: yes\nbeta: 0.1\n").empty());
  const auto reference = warnings("reference: start\nlora: {rank: 4}\n");
  ASSERT_EQ(reference.size(), 1u);
  EXPECT_EQ(reference[0], "reference: does nothing with beta: 0; hint: beta=0.01, or leave it out");
  EXPECT_TRUE(warnings("reference: start\nbeta: 0.01\nlora: {rank: 4}\n").empty());
  EXPECT_TRUE(warnings("steps: 9\nref_sync_every: 9\nref_sync_alpha: 1\nbeta: 0.01\n").empty());
  for (const auto& [keys, start] :
       {std::pair{"steps: 9\nref_sync_every: 9\n", "ref_sync_every: does nothing with beta: 0"},
        {"steps: 9\nref_sync_every: 10\nbeta: 0.01\n", "ref_sync_every: 10 of 9 steps: the "},
        {"kl_horizon: 500\nbeta: 0.01\n", "kl_horizon: does nothing without kl_target"},
        {"ref_sync_alpha: 0.5\nbeta: 0.01\n", "ref_sync_alpha: does nothing with ref_sync_"}}) {
    const auto moves = warnings(keys);
    ASSERT_EQ(moves.size(), 1u) << keys;
    EXPECT_EQ(moves[0].find(start), 0u) << moves[0];
  }
}

TEST_F(Plans, TheModelWithoutAdaptersIsNoReferenceThatMoves) {
  const std::string grpo =
      "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\nbeta: 0.1\n"
      "ref_sync_every: 9\n";
  expect_refused(grpo + "lora: {rank: 4}\n",
                 "ref_sync_every: with lora the reference is the model without adapters");
  EXPECT_EQ(load(grpo + "lora: {rank: 4}\nreference: start\n").stages[0].grpo.ref_sync_every, 9);
  EXPECT_EQ(load(grpo).stages[0].grpo.ref_sync_alpha, 0.6);
}

TEST_F(Plans, AKlTargetNeedsABetaToStartFromAndAHorizonOfAStep) {
  const std::string grpo =
      "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\nkl_target: 0.1\n"
      "prompts_per_step: 4\nnum_generations: 6\n";
  expect_refused(grpo, "kl_target: adapts beta, which is 0; hint: beta=0.05");
  expect_refused(grpo + "beta: 0.1\nkl_horizon: 23\n",
                 "kl_horizon: expected at least the 24 completions of a step, got 23");
  expect_refused("trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\nkl_target: 0\n",
                 "kl_target: expected a number");
  EXPECT_EQ(load(grpo + "beta: 0.1\nkl_horizon: 24\n").stages[0].grpo.kl_target, 0.1);
}

TEST_F(Plans, ARewardSlowerThanTheWatchdogGivesAWarning) {
  const auto warnings = [&](const std::string& minutes) {
    return load("trainer: grpo\ndata: {task: addition}\nwatchdog_minutes: " + minutes +
                "\nrewards: [{name: command, run: judge, timeout: 900}]\n")
        .stages[0]
        .warnings();
  };
  EXPECT_TRUE(warnings("16").empty());
  EXPECT_TRUE(warnings("0").empty());
  ASSERT_EQ(warnings("15").size(), 1u);
  EXPECT_EQ(warnings("15")[0],
            "watchdog_minutes: 15 is not longer than the 15 minutes that 'judge' may take for an "
            "answer, which would end the run; hint: watchdog_minutes=25");
}

TEST_F(Plans, StagesHoldOutByOneHash) {
  const std::string stages =
      "data: {jsonl: {path: x.jsonl}}\nstages:\n  - {trainer: sft}\n"
      "  - {trainer: grpo, rewards: [{name: numeric}], data: {split_by: question}}\n";
  expect_refused(stages, "stages.1.data.split_by: differs from that of an earlier stage");
  const RunPlan plan = load(
      "data: {split_by: question, jsonl: {path: x.jsonl}}\nstages:\n"
      "  - {trainer: sft}\n  - {trainer: sft}\n");
  EXPECT_EQ(plan.stages[1].data.jsonl.split_by, std::vector<std::string>{"question"});
  EXPECT_EQ(plan.stages[1].stage, 1);
  expect_refused("trainer: sft\ndata: {task: addition, split_by: [a]}\n", "data.split_by: names");
}

// Suitable values for pretraining, fine-tuning and GRPO differ by orders of magnitude.
TEST_F(Plans, EachTrainerHasItsDefaults) {
  const RunPlan plan = load(
      "data: {task: addition}\nadam_beta1: 0.8\nsteps: 110\nstages:\n"
      "  - {trainer: sft}\n"
      "  - {trainer: grpo, rewards: [{name: task}]}\n"
      "  - {trainer: sft, warmup_steps: 0, weight_decay: 0.2, learning_rate: 1e-3}\n"
      "  - {trainer: pretrain, data: {task: null, text: a.txt}}\n");
  const auto& sft = plan.stages[0].optimizer;
  EXPECT_EQ(sft.learning_rate, 2e-5);
  EXPECT_EQ(sft.weight_decay, 0);
  EXPECT_EQ(sft.lr_schedule, Schedule::kCosine);
  EXPECT_EQ(sft.warmup_steps, 4);  // 3 %, rounded up
  EXPECT_EQ(sft.adam_beta2, 0.999);
  const auto& grpo = plan.stages[1].optimizer;
  EXPECT_EQ(grpo.learning_rate, 1e-6);
  const OptimizerConfig dpo = default_config(TrainerType::kDpo, 100, false).optimizer;
  EXPECT_EQ(dpo.learning_rate, 1e-6);
  EXPECT_EQ(dpo.lr_schedule, Schedule::kLinear);
  EXPECT_EQ(dpo.warmup_steps, 0);
  EXPECT_EQ(dpo.weight_decay, 0);
  EXPECT_EQ(dpo.adam_beta2, 0.999);
  EXPECT_DOUBLE_EQ(default_config(TrainerType::kDpo, 100, true).optimizer.learning_rate, 1e-5);
  EXPECT_EQ(grpo.weight_decay, 0);
  EXPECT_EQ(grpo.lr_schedule, Schedule::kLinear);
  EXPECT_EQ(grpo.warmup_steps, 0);
  EXPECT_EQ(grpo.adam_beta2, 0.999);
  const auto& own = plan.stages[2].optimizer;
  EXPECT_EQ(own.learning_rate, 1e-3);
  EXPECT_EQ(own.weight_decay, 0.2);
  EXPECT_EQ(own.warmup_steps, 0);
  const auto& pretrain = plan.stages[3].optimizer;
  EXPECT_EQ(pretrain.learning_rate, 1e-3);
  EXPECT_EQ(pretrain.weight_decay, 0.1);
  EXPECT_EQ(pretrain.adam_beta2, 0.95);
  for (const TrainConfig& stage : plan.stages) EXPECT_EQ(stage.optimizer.adam_beta1, 0.8);
  // The trainer may come from the command line.
  EXPECT_EQ(
      load("data: {task: addition}\nrewards: [{name: task}]\ntrainer: sft\n", {"trainer=grpo"})
          .stages[0]
          .optimizer.learning_rate,
      1e-6);
}

TEST_F(Plans, RelativePathsStartAtTheFile) {
  fs::create_directory(dir_.path("deep"));
  const RunPlan plan =
      load("output_dir: ../runs/x\ninit_from: deep/model\ndata: {text: deep/../a.txt}\n");
  const fs::path base = fs::weakly_canonical(dir_.path("plan.yaml")).parent_path();
  EXPECT_EQ(plan.output_dir, (base.parent_path() / "runs/x").string());
  EXPECT_EQ(plan.stages[0].init_from, (base / "deep/model").string());
  EXPECT_EQ(plan.stages[0].data.text, Texts{(base / "a.txt").string()});
  const RunPlan absolute = load("data: {text: /some/where.txt}\noutput_dir: /out\n");
  EXPECT_EQ(absolute.stages[0].data.text, Texts{"/some/where.txt"});
  EXPECT_EQ(absolute.output_dir, "/out");
  // Without output_dir: in the current folder.
  EXPECT_EQ(load("data: {text: a.txt}\nname: n\n").output_dir,
            (fs::weakly_canonical(fs::current_path()) / "runs/n").string());
}

TEST_F(Plans, RelativePathsOnTheCommandLineStartAtTheCurrentFolder) {
  const fs::path here = fs::weakly_canonical(fs::current_path());
  const RunPlan plan =
      load("trainer: sft\nstages: [{trainer: sft}, {trainer: sft}]\ninit_from: model\n",
           {"data.jsonl.path=in/a.jsonl", "output_dir=out", "stages.1.init_from=other"});
  const fs::path base = fs::weakly_canonical(dir_.path("plan.yaml")).parent_path();
  EXPECT_EQ(plan.stages[0].data.jsonl.path, Texts{(here / "in/a.jsonl").string()});
  EXPECT_EQ(plan.output_dir, (here / "out").string());
  EXPECT_EQ(plan.stages[0].init_from, (base / "model").string());
  EXPECT_EQ(plan.stages[1].init_from, (here / "other").string());
  EXPECT_EQ(load("data: {text: a.txt}\ninit_from: model\n", {"init_from=null"}).stages[0].init_from,
            "");
}

TEST_F(Plans, PathsOnTheCommandLineMayHaveAnyName) {
  const fs::path here = fs::weakly_canonical(fs::current_path());
  for (const char* name : {"dir #1", "a: b.txt", "[a], {b}", "it's \"x\"", "日本"}) {
    const RunPlan plan =
        load("trainer: pretrain\n", {str("output_dir=", name), str("data.text=/in/", name),
                                     str("init_from=", name), str("name=", name)});
    EXPECT_EQ(plan.output_dir, (here / name).string());
    EXPECT_EQ(plan.stages[0].init_from, (here / name).string());
    EXPECT_EQ(plan.stages[0].data.text, Texts{str("/in/", name)});
    EXPECT_EQ(plan.name, name);
    write_file(dir_.path("again.yaml"), dump_plan(plan));
    EXPECT_EQ(load_plan(dir_.path("again.yaml"), {}).output_dir, plan.output_dir);
  }
  EXPECT_EQ(load("data: {text: a.txt}\n", {"data={text: b c.txt}"}).stages[0].data.text,
            Texts{(here / "b c.txt").string()});
  EXPECT_EQ(load("data: {text: a.txt}\n", {"output_dir=\"x y\""}).output_dir,
            (here / "x y").string());
  EXPECT_EQ(load("data: {text: a.txt}\ninit_from: model\n", {"init_from=\"\""}).stages[0].init_from,
            "");
}

TEST_F(Plans, NameDecidesTheRunDirectory) {
  EXPECT_EQ(load("data: {text: a.txt}\nname: in file\n", {"name=typed #2"}).output_dir,
            (fs::weakly_canonical(fs::current_path()) / "runs/typed #2").string());
  EXPECT_EQ(load("data: {text: a.txt}\n").output_dir,
            (fs::weakly_canonical(fs::current_path()) / "runs/plan").string());
}

TEST_F(Plans, MissingRelativePathsNameTheirBaseFolder) {
  const std::string base = fs::weakly_canonical(dir_.path("x")).parent_path().string(),
                    here = fs::weakly_canonical(fs::current_path()).string();
  RunPlan plan = load("data: {text: no.txt}\ninit_from: start\n", {"init_from=begin"});
  const auto missing = [](const std::string& path, const char* given, const std::string& folder) {
    return str(path, ": No such file or directory; the relative path '", given,
               "' was counted from ", folder, "; hint: check the path");
  };
  EXPECT_EQ(plan.missing,
            (std::vector<std::string>{
                missing("data.text: " + base + "/no.txt", "no.txt",
                        base + ", the folder of " + dir_.path("plan.yaml")),
                missing("init_from: " + here + "/begin", "begin", here + ", the current folder")}));
  plan = load("trainer: sft\ndata: {jsonl: {path: plan.yaml, eval_path: no.jsonl}}\n");
  EXPECT_EQ(
      plan.missing,
      (std::vector<std::string>{missing("data.jsonl.eval_path: " + base + "/no.jsonl", "no.jsonl",
                                        base + ", the folder of " + dir_.path("plan.yaml"))}));
  plan = load("data: {text: plan.yaml}\ninit_from: /nowhere\noutput_dir: none\n");
  EXPECT_TRUE(plan.missing.empty());
}

TEST_F(Plans, ImpossibleNumbersAreRefused) {
  for (const char* key :
       {"steps", "batch_size", "prompts_per_step", "num_generations", "micro_batch_tokens",
        "max_completion_length", "max_concurrent", "num_iterations", "num_minibatches"})
    expect_refused("data: {text: a.txt}\n", str("command line: ", key, ": expected a number"),
                   {str(key, "=9000000000000000000")});
  expect_refused("data: {text: a.txt}\n", "eval.size: expected a number",
                 {"eval.size=9000000000000000000"});
}

TEST_F(Plans, CombinationsOfKeysAreChecked) {
  expect_refused("trainer: sft\n",
                 "data: expected exactly one of task, jsonl.path, images.path and text, got 0");
  expect_refused("data: {task: addition, text: a.txt}\n", "exactly one of");
  expect_refused("data: {task: addition}\n", "data.text: trainer pretrain needs a text file");
  expect_refused("trainer: sft\ndata: {text: a.txt}\n", "trainer sft needs problems");
  expect_refused("trainer: grpo\ndata: {task: addition}\n", "at least one reward");
  expect_refused("trainer: grpo\ndata: {task: addition}\nrewards: [{name: task, weight: 0}]\n",
                 "at least one reward, with a weight other than 0");
  for (const char* home : {"'~'", "~/runs/x"})
    expect_refused(str("trainer: pretrain\noutput_dir: ", home, "\ndata: {text: x.txt}\n"),
                   ": ~ is not expanded in ~");
  const std::string grpo = "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n";
  expect_refused(grpo + "temperature: 0\n", "greedy (0) gives equal ones");
  expect_refused(grpo + "num_minibatches: 5\nprompts_per_step: 4\n", "5 updates need as many");
  expect_refused("data: {text: a.txt}\nlearning_rate: 1e-3\nmin_learning_rate: 1\n",
                 "min_learning_rate");
  expect_refused("trainer: sft\ndata: {task: addition}\neval: {num_samples: 4, k: [1, 8]}\n",
                 "pass@8 needs eval.num_samples of at least 8");
  const auto refuse_sets = [&](const std::string& sets, const std::string& message) {
    expect_refused(
        "trainer: sft\ndata: {task: addition}\neval: {num_samples: 4, k: [1, 4], " + sets + "}\n",
        message);
  };
  refuse_sets("sets: [{path: a}]", "eval.sets[0].name: expected a name without / and spaces");
  refuse_sets("sets: [{name: a/b, path: a}]", "and spaces, got 'a/b'");
  refuse_sets("sets: [{name: eval, path: a}]",
              "eval.sets[0].name: metrics of training begin with 'eval/'");
  refuse_sets("sets: [{name: a, path: a}, {name: a, path: b}]",
              "eval.sets[1].name: another set is called 'a'");
  refuse_sets("sets: [{name: a}]", "eval.sets[0].path: expected a file of problems");
  refuse_sets("sets: [{name: a, path: a, num_samples: 2}]",
              "eval.sets[0].k: pass@4 needs eval.sets[0].num_samples of at least 4");
  refuse_sets("sets: [{name: a, path: a, correct: {threshold: 0.5}}]",
              "eval.sets[0].correct.threshold: is that of a reward");
  refuse_sets("sets: [{name: aime, path: a}], best: amie",
              "eval.best: no set is called 'amie'; the sets are aime");
  refuse_sets("best: aime", "eval.best: no set is called 'aime'; there are none");
}

// A run's own config.yaml has all keys in its stages.
TEST_F(Plans, OverridesOfItemsReachTheListsOfStages) {
  const std::string set = "eval: {sets: [{name: a, path: a.jsonl}]}\n",
                    grpo = "trainer: grpo\ndata: {task: addition}\nrewards: [{name: task}]\n" + set;
  const std::vector<std::string> overrides{"eval.sets.0.path=/b.jsonl", "rewards.0.weight=2",
                                           "eval.sets.0.name=c"};
  const std::string dumped = dump_plan(load(grpo)),
                    over_stages =
                        set +
                        "stages:\n  - {trainer: sft, data: {task: addition}}\n"
                        "  - {trainer: grpo, data: {task: addition}, rewards: [{name: task}]}\n";
  for (const std::string& yaml : {grpo, dumped, over_stages}) {
    const RunPlan plan = load(yaml, overrides);
    EXPECT_EQ(plan.stages.back().rewards[0].weight, 2);
    for (const TrainConfig& stage : plan.stages) {
      EXPECT_EQ(stage.eval.sets[0].path, "/b.jsonl");
      EXPECT_EQ(stage.eval.sets[0].name, "c");
    }
  }
  EXPECT_EQ(load(dumped, {"stages.0.rewards.0.weight=3"}).stages[0].rewards[0].weight, 3);
  expect_refused(dumped, "command line: eval.sets.1.path: '1' is no index of a list with 1 items",
                 {"eval.sets.1.path=x"});
  expect_refused("stages: [{trainer: sft, data: {task: addition}}]\n",
                 "command line: eval.sets: expected a list", {"eval.sets.0.path=x"});
}

TEST_F(Plans, DataMayHaveSeveralEntries) {
  const std::string base = fs::weakly_canonical(dir_.path("x")).parent_path().string(),
                    here = fs::weakly_canonical(fs::current_path()).string();
  const DataConfig data =
      load("data: {text: [a.txt, /b, c/*], weights: [1, 2, 0.5]}\n").stages[0].data;
  EXPECT_EQ(data.text, (Texts{base + "/a.txt", "/b", base + "/c/*"}));
  EXPECT_EQ(data.weights, (std::vector<double>{1, 2, 0.5}));
  EXPECT_EQ(load("data: {text: a.txt}\n", {"data.text=[b.txt, c.txt]"}).stages[0].data.text,
            (Texts{here + "/b.txt", here + "/c.txt"}));
  EXPECT_EQ(load("data: {text: [a, no]}\n").missing.size(), 2u);
  expect_refused("data: {text: [a.txt, b.txt], weights: [1]}\n",
                 "data.weights: expected one for each of the 2 entries of data.text, got 1");
  expect_refused("data: {text: [a.txt, [b.txt]]}\n",
                 "data.text: expected a text or a list of texts");
  expect_refused("data: {text: a.txt, weights: [0]}\n", "data.weights: expected a number");
  expect_refused("trainer: sft\ndata: {task: addition, curriculum: length}\n",
                 "data.curriculum: only problems of data.jsonl");
  expect_refused("trainer: sft\ndata: {curriculum: online, jsonl: {path: a.jsonl}}\n",
                 "data.curriculum: online needs the outcomes of trainer grpo; hint: ");
  expect_refused(
      "trainer: grpo\nrewards: [{name: task}]\ndata: {task: addition, "
      "curriculum: online}\n",
      "data.curriculum: only problems of data.jsonl");
}

TEST_F(Plans, HeldOutKeysAreConsistent) {
  const std::string sft = "trainer: sft\ndata: {jsonl: {path: a.jsonl", end = "}}\n";
  const auto held_out = [&](const std::string& more) {
    return load(sft + more + end).stages[0].data.jsonl.held_out();
  };
  EXPECT_EQ(held_out(""), 0.1);
  EXPECT_EQ(held_out(", held_out_fraction: 0.3"), 0.3);
  EXPECT_EQ(held_out(", eval_path: b.jsonl"), 0);
  EXPECT_EQ(held_out(", eval_path: b.jsonl, held_out_fraction: 0"), 0);
  const std::string both = ", eval_path: b.jsonl, held_out_fraction: 0.1";
  expect_refused(sft + both + end,
                 "data.held_out_fraction: 0.1 of data.jsonl.path cannot be held out beside "
                 "data.jsonl.eval_path; hint: data.held_out_fraction=0");
  expect_refused("trainer: sft\ndata: {task: addition, jsonl: {eval_path: b.jsonl}}\n",
                 "data.jsonl.eval_path: ");
  // Nothing of few problems is held out, unless the fraction is given or an evaluation needs some.
  std::string lines;
  for (int i = 0; i < 49; ++i) lines += str("{\"prompt\": \"", i, "\", \"answer\": \"1\"}\n");
  write_file(dir_.path("few.jsonl"), lines);
  write_file(dir_.path("more.jsonl"), lines + "{\"prompt\": \"49\", \"answer\": \"1\"}\n");
  const auto held_out_of = [&](const std::string& yaml) {
    RunPlan plan = load(yaml);
    hold_nothing_out_of_few(plan);
    return plan.stages.back().data.jsonl.held_out();
  };
  const std::string few = "trainer: sft\ndata: {jsonl: {path: few.jsonl}}\n",
                    stage = "{trainer: sft, data: {jsonl: {path: ";
  EXPECT_EQ(held_out_of(few), 0);
  EXPECT_EQ(held_out_of("trainer: sft\ndata: {jsonl: {path: more.jsonl}}\n"), 0.1);
  EXPECT_EQ(held_out_of("trainer: sft\ndata: {jsonl: {path: more.jsonl, limit: 49}}\n"), 0);
  EXPECT_EQ(held_out_of("trainer: sft\ndata: {jsonl: {path: few.jsonl}, held_out_fraction: 0.2}\n"),
            0.2);
  EXPECT_EQ(held_out_of(few + "eval: {every: 3}\n"), 0.1);
  const auto two = [&](const char* fraction) {
    return held_out_of("stages: [" + stage + "few.jsonl}, held_out_fraction: " + fraction + "}}, " +
                       stage + "few.jsonl}}}]\n");
  };
  EXPECT_EQ(two("0.2"), 0.1);
  EXPECT_EQ(two("0"), 0);
  EXPECT_EQ(held_out_of("stages: [" + stage + "more.jsonl}}}, " + stage + "few.jsonl}}}]\n"), 0.1);
  // A dump remembers that no fraction was given.
  write_file(dir_.path("dump.yaml"), dump_plan(load(sft + end)));
  EXPECT_EQ(load_plan(dir_.path("dump.yaml"), std::vector<std::string>{"data.jsonl.eval_path=b"})
                .stages[0]
                .data.jsonl.held_out(),
            0);
  const std::string none = sft + ", held_out_fraction: 0" + end;
  EXPECT_TRUE(load(none).stages[0].data.holds_nothing_out());
  expect_refused(none + "eval: {every: 3}\n", "eval.every: nothing is held out at data.held_out");
  expect_refused(none + "eval: {stop_at: 0.5}\n", "eval.stop_at: nothing is held out");
  expect_refused("data: {text: a.txt, held_out_fraction: 0}\neval: {every: 3}\n", "eval.every: ");
  load(sft + ", eval_path: b.jsonl" + end + "eval: {every: 3, size: 0}\n");
  expect_refused("trainer: sft\ndata: {task: addition}\neval: {size: 0}\n",
                 "eval.size: 0 means all, and generated problems have no end; hint: ");
  expect_refused("trainer: sft\ndata: {task: addition, too_long: skip}\n",
                 "data.too_long: only problems of data.jsonl");
}

// In f32 a root of 0 and an adam_eps of 0 would give 0 / 0 for a weight without gradient.
TEST_F(Plans, AdamEpsIsAboveZero) {
  expect_refused("data: {text: a.txt}\nadam_eps: 0\n", "adam_eps: expected a number");
}

// The configurations that come with the project. Their data need not be there.
TEST(ShippedConfigurations, AllLoad) {
  const auto source = fs::path(__FILE__).parent_path().parent_path().parent_path();
  for (const char* folder : {"configs", "configs/positions", "bench/configs"}) {
    int found = 0;
    for (const auto& entry : fs::directory_iterator(source / folder)) {
      if (entry.path().extension() != ".yaml") continue;
      SCOPED_TRACE(entry.path());
      ++found;
      EXPECT_GE(load_plan(entry.path().string(), {}).stages.size(), 1u);
    }
    EXPECT_GE(found, 2) << folder;
  }
}

}  // namespace
}  // namespace cohort::test
