// The configuration of a training run: `cohort train CONFIG.yaml`. Keys that GRPO shares with TRL
// carry its names.
//
// A file may list `stages`: each is a run of its own that starts from the previous one's weights,
// with the file's top-level keys as its defaults.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "data/example.h"
#include "nn/transformer.h"
#include "rl/grpo.h"
#include "rl/reward.h"
#include "rl/rollout.h"

namespace cohort {

enum class TrainerType { kPretrain, kSft, kGrpo };
enum class Schedule { kCosine, kLinear, kConstant };
enum class TokenizerType { kChar, kByte };
// What becomes of problems that are longer than the model's context.
enum class TooLong { kError, kTruncate, kSkip };

struct DataConfig {
  std::string task;                // a generated task (data/tasks/), or
  TaskConfig task_sizes;           // (its sizes)
  JsonlConfig jsonl;               // problems from a file, or
  std::string text;                // plain text for pretraining
  double held_out_fraction = 0.1;  // of the text, from its end
  TooLong too_long = TooLong::kError;
  // Of the file that is meant: file_checksum(), with "+" and that of jsonl.eval_path if there is
  // one; empty: whatever the files are at the first start.
  std::string fingerprint;
  TokenizerType tokenizer = TokenizerType::kChar;
  // Whether there is nothing to evaluate on, as the fractions say.
  bool holds_nothing_out() const;
  void visit(ConfigVisitor& v);
};

struct OptimizerConfig {
  double learning_rate = 1e-3, min_learning_rate = 0;
  Schedule lr_schedule = Schedule::kCosine;
  int64_t warmup_steps = 0;
  double weight_decay = 0.1, adam_beta1 = 0.9, adam_beta2 = 0.95, adam_eps = 1e-8,
         max_grad_norm = 1;
  void visit(ConfigVisitor& v);
};

// Which completions are right in pass@1 and pass@k.
struct CorrectConfig {
  std::string reward;    // one of the rewards, by the name RewardSet gives it; empty: the default
  double threshold = 1;  // right: a reward of at least this
  void visit(ConfigVisitor& v);
};

struct EvalConfig {
  int64_t every = 0;        // steps between evaluations; 0: only where the trainer needs one
  int64_t size = 512;       // held-out problems at most; 0: all there are
  int64_t num_samples = 0;  // samples per problem for pass@k, besides the greedy pass@1; 0: none
  std::vector<int64_t> k;   // for pass@k
  CorrectConfig correct;
  double stop_at = 0;  // end the stage when the greedy pass@1 reaches this; 0: off
  void visit(ConfigVisitor& v);
};

struct CheckpointConfig {
  int64_t every = 0;          // steps between checkpoints; 0: off
  double every_minutes = 10;  // between checkpoints; 0: off
  int64_t keep_last = 2;      // checkpoints kept, besides the best
  void visit(ConfigVisitor& v);
};

// The members' initial values are the defaults of pretraining; default_config() has the others.
struct TrainConfig {
  TrainerType trainer = TrainerType::kPretrain;
  std::string name;        // of the run; empty: the file's name
  std::string output_dir;  // run directories are made from it: DIR, DIR-2, ...; empty: runs/NAME
  // Checkpoint or run directory whose weights and tokenizer the run starts from.
  std::string init_from;
  int64_t seed = 1;
  std::string device = "cpu";
  DType dtype = DType::kF32;
  int64_t num_threads = 0;  // 0: all cores
  int64_t ranks = 1;        // data-parallel ranks, threads of this process
  int64_t steps = 1000;
  int64_t batch_size = 32;  // sequences per step (pretrain, sft)
  // (grpo) The batch is prompts_per_step * num_generations completions.
  int64_t prompts_per_step = 32;
  int64_t num_generations = 8;
  int64_t micro_batch_tokens = 8192;  // tokens per forward and backward; no result depends on it
  int64_t log_every = 1;
  int64_t log_completions = 2;  // (grpo) of each step, in completions.jsonl

  ModelConfig model;
  DataConfig data;
  OptimizerConfig optimizer;
  SamplingConfig sampling;
  GrpoConfig grpo;
  std::vector<RewardConfig> rewards;
  EvalConfig eval;
  CheckpointConfig checkpoint;

  int64_t completions_per_step() const { return prompts_per_step * num_generations; }
  void visit(ConfigVisitor& v);
  // Checks what no single key can tell. Throws InputError naming the keys.
  void validate() const;
};

// The configuration of a trainer in which no key is given. For sft and grpo these keys differ from
// pretraining, as in TRL: the learning rate, its schedule and warm-up, weight decay, AdamW's betas.
TrainConfig default_config(TrainerType trainer, int64_t steps);

// What a configuration file asks for.
struct RunPlan {
  std::string name;
  std::string output_dir;  // of the whole run, absolute
  // At least one; relative paths already resolved against the file.
  std::vector<TrainConfig> stages;
  // Of each relative path of an input at which there is nothing: what is missing, and from which
  // folder the path was counted. preview_plan() refuses them.
  std::vector<std::string> missing;
};

// Reads CONFIG.yaml with key=value overrides; an override reaches every stage ("stages.1.steps=5"
// one only). Relative paths count from the file's directory, those in overrides from the current
// one. Throws InputError for everything that is wrong with the file.
RunPlan load_plan(const std::string& path, std::span<const std::string> overrides);
// YAML from which load_plan() gives the same plan.
std::string dump_plan(const RunPlan& plan);

const char* trainer_name(TrainerType type);

}  // namespace cohort
