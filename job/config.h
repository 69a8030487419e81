// The configuration of a training run: `cohort train CONFIG.yaml`. Keys that GRPO shares with TRL
// carry its names.
//
// A file may list `stages`: each is a run of its own that starts from the previous one's weights,
// with the file's top-level keys as its defaults.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "data/dataset.h"
#include "nn/transformer.h"
#include "rl/environment.h"
#include "rl/preference.h"
#include "trainers/evaluate.h"
#include "trainers/grpo_metrics.h"
#include "trainers/optimizer.h"

namespace cohort {

inline constexpr EnumName<DType> kDTypeNames[] = {
    {DType::kF32, "f32"}, {DType::kBF16, "bf16"}, {DType::kF64, "f64"}};

struct CheckpointConfig {
  int64_t every = 0;          // steps between checkpoints; 0: off
  double every_minutes = 10;  // between checkpoints; 0: off
  int64_t keep_last = 2;      // checkpoints kept, besides the best
  void visit(ConfigVisitor& v) {
    v.field("every", every,
            "steps between checkpoints; 0: off; the best and the last are saved anyway",
            {.min = 0});
    v.field("every_minutes", every_minutes, "minutes between checkpoints; 0: off", {.min = 0});
    v.field("keep_last", keep_last, "checkpoints kept, besides the best", {.min = 1});
  }
};

// The members' initial values are the defaults of pretraining; default_config() has the others.
struct TrainConfig {
  std::string name;        // run name; empty: the file's name
  std::string output_dir;  // run directories are made from it: DIR, DIR-2, ...; empty: runs/NAME
  // Checkpoint or run directory whose weights and tokenizer the run starts from.
  std::string init_from;
  int64_t seed = 1;
  std::string device = "cpu";
  DType dtype = DType::kF32;
  int64_t num_threads = 0;  // 0: all cores
  int64_t ranks = 1;        // data-parallel ranks, threads of this process
  int64_t log_every = 1;
  int64_t log_completions = 2;   // (grpo) of each step, in completions.jsonl
  int64_t journal_mb = 1024;     // (grpo) MiB per stage and rank, for replays; 0: no journal
  double watchdog_minutes = 10;  // without progress until the run fails; 0: off
  // Position among the stages of the plan, which load_plan() sets: it is no key.
  int64_t stage = 0;
  // (first stage) Warnings of load_plan() about keys of `data` that no stage reads. It is no key.
  std::vector<std::string> unread;

  BatchConfig batch;
  ModelConfig model;
  DataConfig data;
  OptimizerConfig optimizer;
  SamplingConfig sampling;
  EngineConfig rollout;
  GrpoConfig grpo;
  std::vector<RewardConfig> rewards;
  PreferenceConfig preference;
  MaskingConfig masking;
  EnvironmentConfig environment;
  EvalConfig eval;
  CheckpointConfig checkpoint;

  // Seeds the order of the data and generated problems: each stage has its own, and the first that
  // of `seed` itself.
  uint64_t data_seed() const {
    return static_cast<uint64_t>(seed) ^ static_cast<uint64_t>(stage) * 0x9e3779b97f4a7c15u;
  }
  // The sections that a part of a run reads; they refer to this configuration.
  operator DataSections() const {
    return {.data = data,
            .batch = batch,
            .seed = data_seed(),
            .max_completion_length = sampling.max_completion_length,
            .eval_size = eval.size,
            .eval_tokens = eval.tokens,
            .image_size = model.image_size};
  }
  operator EvalSections() const {
    return {eval, batch, data, sampling, static_cast<uint64_t>(seed)};
  }
  // The message that a loss or advantages by a function of a Python program are named, and not
  // bound; empty: none is missing.
  std::string missing_function() const;
  bool has_rewards() const {
    return std::ranges::any_of(rewards, [](const RewardConfig& r) { return r.weight != 0; });
  }
  operator GrpoSections() const { return {grpo, batch, sampling, static_cast<uint64_t>(seed)}; }
  void visit(ConfigVisitor& v) {
    v.choice("trainer", batch.trainer, kTrainerNames,
             "what to do: next-token training, supervised fine-tuning, GRPO; of encoders: masked "
             "language modelling, classes; dpo: preference pairs");
    v.field("name", name, "name of the run; empty: the file's name");
    v.field("output_dir", output_dir,
            "run directory: DIR, or DIR-2, ... if it exists; empty: runs/NAME");
    v.field("init_from", init_from, "checkpoint or run directory to start from");
    v.field("seed", seed, "seed of initialisation, data order, sampling and dropout", {.min = 0});
    v.field("device", device, "cpu, cuda or cuda:N");
    v.choice("dtype", dtype, kDTypeNames,
             "weights and activations: f32; bf16 (CUDA only, with f32 masters); f64 (CPU only)");
    v.field("num_threads", num_threads, "CPU threads; 0: all cores", {.min = 0, .max = 4096});
    v.field(
        "ranks", ranks,
        "data-parallel ranks in this process, on the CPU; an update depends on it by rounding only",
        {.min = 1, .max = 256});
    batch.visit(v);
    v.field("log_every", log_every, "steps between lines of metrics.jsonl", {.min = 1});
    v.field("log_completions", log_completions,
            "completions of each step that go to completions.jsonl (grpo)", {.min = 0});
    v.field("journal_mb", journal_mb,
            "MiB of the journal of a stage for each rank, by which `cohort replay` repeats steps; "
            "the oldest are removed; 0: none (grpo)",
            {.min = 0, .max = 1 << 30});
    v.field("watchdog_minutes", watchdog_minutes,
            "minutes without progress after which the run ends and names the rank; 0: off",
            {.min = 0, .max = 1e6});
    optimizer.visit(v);
    sampling.visit(v);
    v.field("max_concurrent", rollout.max_concurrent,
            "sequences sampled at once; 0: as many as fit in memory; no result depends on it",
            {.min = 0, .max = 1 << 20});
    grpo.visit(v);
    v.section("precision", model.precision, "numbers in eight bits, in rollouts and in training");
    v.section("lora", model.lora, "low-rank adapters, trained in place of the model's parameters");
    v.list("rewards", rewards, "weighted rewards (grpo)");
    v.section("preference", preference, "the loss of preference pairs (dpo)");
    v.section("mlm", masking, "masked tokens (mlm)");
    v.section("environment", environment, "what follows a turn: tools, or a program");
    v.section("model", model, "the transformer (taken from init_from where that is given)");
    v.section("data", data, "what to train on: exactly one of task, jsonl, text");
    v.section("rollout", rollout, "the rollout engine");
    v.section("eval", eval, "evaluation on held-out data");
    v.section("checkpoint", checkpoint, "when to save");
  }
  // Checks combinations of keys. Throws InputError naming the keys.
  void validate() const;
  // Warnings about valid keys that have no or an unexpected effect, each with a hint.
  std::vector<std::string> warnings() const;
};

// The configuration of a trainer in which no key is given. For sft, grpo and dpo these keys differ
// from pretraining, as in TRL: the learning rate, its schedule and warm-up, weight decay, AdamW's
// betas. With adapters the learning rate is ten times as high.
TrainConfig default_config(TrainerType trainer, int64_t steps, bool adapters);

// Contents of a configuration file.
struct RunPlan {
  std::string name;
  std::string output_dir;  // directory of the whole run, absolute
  // At least one; relative paths already resolved against the file.
  std::vector<TrainConfig> stages;
  void visit(ConfigVisitor& v) { v.list("stages", stages, "the stages"); }
  // Error message for each relative input path that does not exist, with the folder it was resolved
  // against. preview_plan() rejects them.
  std::vector<std::string> missing;
};

// Reads CONFIG.yaml with key=value overrides; an override reaches every stage ("stages.1.steps=5"
// one only), one of a list's item ("rewards.0.weight=2") every such list. Relative paths count from
// the file's directory, those in overrides from the current one. Throws InputError if the file is
// invalid.
RunPlan load_plan(const std::string& path, std::span<const std::string> overrides);
// load_plan() of a file `name` in the current directory that has the text `yaml`.
RunPlan parse_plan(const std::string& yaml, const std::string& name,
                   std::span<const std::string> overrides);
// Callbacks by name.
struct Callbacks {
  std::map<std::string, Callback> rewards, environments, advantages;
  std::map<std::string, HostLoss> losses;
};
// Sets the callbacks of the rewards and environments that are named after one. Throws InputError
// naming the reward for one that is neither a callback nor built in, and for a callback that has
// the name of a built-in one or that no stage uses. A loss or an advantage is that of all stages
// with grpo, whose keys get its name; they must not have another.
void bind_callbacks(RunPlan& plan, const Callbacks& callbacks);
// YAML from which load_plan() gives the same plan.
std::string dump_plan(const RunPlan& plan);

}  // namespace cohort
