// The configuration of a training run: `cohort train CONFIG.yaml`. Keys that GRPO shares with TRL
// carry its names.
//
// A file may list `stages`: each is a run of its own that starts from the previous one's weights,
// with the file's top-level keys as its defaults.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "data/example.h"
#include "nn/transformer.h"
#include "rl/engine/rollout.h"
#include "rl/grpo.h"
#include "rl/reward.h"

namespace cohort {

enum class TrainerType { kPretrain, kSft, kGrpo };
inline constexpr EnumName<TrainerType> kTrainerNames[] = {
    {TrainerType::kPretrain, "pretrain"}, {TrainerType::kSft, "sft"}, {TrainerType::kGrpo, "grpo"}};
enum class Schedule { kCosine, kLinear, kConstant };
inline constexpr EnumName<Schedule> kScheduleNames[] = {{Schedule::kCosine, "cosine"},
                                                        {Schedule::kLinear, "linear"},
                                                        {Schedule::kConstant, "constant"}};
enum class TokenizerType { kChar, kByte };
inline constexpr EnumName<TokenizerType> kTokenizerNames[] = {{TokenizerType::kChar, "char"},
                                                              {TokenizerType::kByte, "byte"}};
// Treatment of problems that are longer than the model's context.
enum class TooLong { kError, kTruncate, kSkip };
// Sort key of the problems.
enum class Curriculum { kNone, kLength, kPassRate };
inline constexpr EnumName<Curriculum> kCurriculumNames[] = {{Curriculum::kNone, "none"},
                                                            {Curriculum::kLength, "length"},
                                                            {Curriculum::kPassRate, "pass_rate"}};
inline constexpr EnumName<DType> kDTypeNames[] = {
    {DType::kF32, "f32"}, {DType::kBF16, "bf16"}, {DType::kF64, "f64"}};
inline constexpr EnumName<TooLong> kTooLongNames[] = {
    {TooLong::kError, "error"}, {TooLong::kTruncate, "truncate"}, {TooLong::kSkip, "skip"}};

struct DataConfig {
  std::string task;       // a generated task (data/tasks/), or
  TaskConfig task_sizes;  // (its sizes)
  JsonlConfig jsonl;      // problems from a file, or
  // Plain text for pretraining: files, folders and patterns.
  std::vector<std::string> text;
  std::vector<std::string> eval_text;  // held-out text, likewise; empty: a part of `text`
  double held_out_fraction = 0.1;      // fraction of the text, from its end
  std::vector<double> weights;         // one per entry of `text` or `jsonl.path`; empty: none
  std::string cache_dir;               // cache of the tokens of text, see load_tokens()
  Curriculum curriculum = Curriculum::kNone;
  TooLong too_long = TooLong::kError;
  // Expected checksums of the files, as in Dataset::fingerprint; empty: those of the first start.
  std::string fingerprint;
  TokenizerType tokenizer = TokenizerType::kChar;
  std::string tokenizer_path;        // folder of a tokenizer; empty: as `tokenizer` says
  bool chat = false;                 // prompts and solutions become conversations
  std::string system;                // the first message of conversations that have none
  std::string chat_template_kwargs;  // a JSON object; empty: none
  // True if problems are rendered by the model's chat template.
  bool is_chat() const { return chat || !jsonl.messages.empty(); }
  // True if the configured fractions leave nothing to evaluate on.
  bool holds_nothing_out() const;
  void visit(ConfigVisitor& v) {
    v.field("task", task, "generated problems: see `cohort train --help`");
    v.section("task_sizes", task_sizes, "sizes of the generated problems");
    v.section("jsonl", jsonl, "problems from a JSONL file");
    v.field("split_by", jsonl.split_by,
            "fields of data.jsonl's lines whose hash decides what is held out, the same for all "
            "stages, such as question; {one|other} of a template is one|other here; empty: the "
            "prompt, or the messages before the assistant's last. Lists count without their order");
    v.field("text", text,
            "text to pretrain on, one or a list of these: a file, all files of a folder, those of "
            "a pattern such as books/*.txt; of .jsonl files the field text of each line. Where "
            "there are several documents, each ends with the end of sequence");
    v.field("eval_text", eval_text, "held-out text, as text; empty: a part of text");
    v.field("held_out_fraction", held_out_fraction,
            "fraction of the text, from its end, for validation, if there is no eval_text",
            {.min = 0, .max = 1});
    v.field("weights", weights,
            "sampling weights of the entries of text or jsonl.path, such as [3, 1]; empty: "
            "proportional to their sizes",
            {.min = 1e-9, .max = 1e9});
    v.field(
        "cache_dir", cache_dir,
        "folder that caches the tokens of text; empty: ~/.cache/cohort for text over 64 MB, none "
        "for shorter text");
    v.choice("curriculum", curriculum, kCurriculumNames,
             "order of the problems: none: shuffled; length: from those with few tokens to those "
             "with many; pass_rate: from easy to hard, by the field pass_rate (1 to 0) of each "
             "line");
    v.choice(
        "too_long", too_long, kTooLongNames,
        "problems longer than model.context: an error; truncated (prompts at their start, leaving "
        "max_completion_length tokens; of conversations the earliest messages, keeping the "
        "last answer; solutions at their end); or skipped");
    v.field(
        "fingerprint", fingerprint,
        "checksum of the data file; another file is refused; empty: the file of the first start");
    v.choice("tokenizer", tokenizer, kTokenizerNames,
             "char: one token per character of the data; byte: any text");
    v.field(
        "tokenizer_path", tokenizer_path,
        "folder with the tokenizer of a new model, such as cohort tokenizer train makes; empty: "
        "as tokenizer says");
    v.field("chat", chat,
            "prompts are messages of a user, solutions the assistant's, rendered by the model's "
            "chat template; so are data.jsonl.messages");
    v.field("system", system, "system message of conversations that have none; empty: none");
    v.field(
        "chat_template_kwargs", chat_template_kwargs,
        "further variables of the chat template, a JSON object: '{\"enable_thinking\": false}'");
  }
};

// Storage of the f32 masters of bf16 weights: only the 16 bits that complete a weight to its
// master, or whole masters. No bit of a run depends on it.
enum class MasterKind { kSplit, kF32 };
inline constexpr EnumName<MasterKind> kMasterKindNames[] = {{MasterKind::kSplit, "split"},
                                                            {MasterKind::kF32, "f32"}};
// The dtype of AdamW's moments: the accumulation dtype, or bf16, stochastically rounded.
enum class MomentKind { kF32, kBF16 };
inline constexpr EnumName<MomentKind> kMomentKindNames[] = {{MomentKind::kF32, "f32"},
                                                            {MomentKind::kBF16, "bf16"}};
struct OptimizerStorage {
  MasterKind master = MasterKind::kSplit;
  MomentKind moments = MomentKind::kF32;
  void visit(ConfigVisitor& v) {
    v.choice("master", master, kMasterKindNames,
             "f32 masters of bf16 weights: as 16 bits beside the weight, or whole (2 bytes more a "
             "parameter); the same bits");
    v.choice("moments", moments, kMomentKindNames,
             "AdamW's moments: f32 (f64 beside dtype f64), or bf16 with stochastic rounding, 4 "
             "bytes less a parameter");
  }
};

struct OptimizerConfig {
  double learning_rate = 1e-3, min_learning_rate = 0;
  Schedule lr_schedule = Schedule::kCosine;
  int64_t warmup_steps = 0;
  double weight_decay = 0.1, adam_beta1 = 0.9, adam_beta2 = 0.95, adam_eps = 1e-8,
         max_grad_norm = 1;
  OptimizerStorage storage;
  void visit(ConfigVisitor& v) {
    v.field("learning_rate", learning_rate, "peak learning rate; sft: 2e-5, grpo: 1e-6",
            {.min = 0, .max = 1e3});
    v.field("min_learning_rate", min_learning_rate, "where the schedule ends",
            {.min = 0, .max = 1e3});
    v.choice("lr_schedule", lr_schedule, kScheduleNames,
             "from the peak to the minimum over the steps; grpo: linear");
    v.field("warmup_steps", warmup_steps, "steps of linear warm-up from 0; sft: 3 % of the steps",
            {.min = 0});
    v.field("weight_decay", weight_decay, "decoupled, on matrices only; sft, grpo: 0",
            {.min = 0, .max = 10});
    v.field("adam_beta1", adam_beta1, "decay of the first moment", {.min = 0, .max = 0.9999999});
    v.field("adam_beta2", adam_beta2, "decay of the second moment; sft, grpo: 0.999",
            {.min = 0, .max = 0.9999999});
    v.field("adam_eps", adam_eps, "added to the root of the second moment",
            {.min = 1e-30, .max = 1});
    v.field("max_grad_norm", max_grad_norm, "global gradient clipping; 0: off", {.min = 0});
    v.section("optimizer", storage, "storage of the optimizer's state");
  }
};

// Criterion by which completions are correct in pass@1 and pass@k.
struct CorrectConfig {
  std::string reward;    // one of the rewards, by the name RewardSet gives it; empty: the default
  double threshold = 1;  // correct: a reward of at least this
  void visit(ConfigVisitor& v) {
    v.field("reward", reward,
            "name of one of the rewards; empty: the task's checker, or the only reward");
    v.field("threshold", threshold, "a completion is right if that reward is at least this",
            {.min = -1e9, .max = 1e9});
  }
};

struct EvalConfig {
  int64_t every = 0;           // steps between evaluations; 0: only where the trainer needs one
  bool at_start = true;        // before the first step
  int64_t size = 512;          // held-out problems at most; 0: all there are
  int64_t tokens = 1'000'000;  // held-out tokens of text at most; 0: all there are
  int64_t num_samples = 0;     // samples per problem for pass@k, besides the greedy pass@1; 0: none
  std::vector<int64_t> k;      // for pass@k
  CorrectConfig correct;
  double stop_at = 0;  // end the stage when the greedy pass@1 reaches this; 0: off
  void visit(ConfigVisitor& v) {
    v.field("every", every, "steps between evaluations; 0: first and last only", {.min = 0});
    v.field("at_start", at_start, "also before the first step");
    v.field("size", size, "held-out problems at most; 0: all of a file",
            {.min = 0, .max = 1 << 24});
    v.field("tokens", tokens,
            "held-out tokens of text at most, in windows spread over all of it; 0: all",
            {.min = 0});
    v.field("num_samples", num_samples, "samples per problem for pass@k; 0: greedy pass@1 only",
            {.min = 0, .max = 4096});
    v.field("k", k, "the k of pass@k, each at most num_samples", {.min = 1});
    v.section("correct", correct, "criterion of correct completions");
    v.field("stop_at", stop_at, "end when the held-out pass@1 reaches this; 0: off",
            {.min = 0, .max = 1});
  }
};

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

inline constexpr int64_t kMicroBatchTokens = 8192;

// The members' initial values are the defaults of pretraining; default_config() has the others.
struct TrainConfig {
  TrainerType trainer = TrainerType::kPretrain;
  std::string name;        // run name; empty: the file's name
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
  // Tokens per forward and backward; no result depends on it. None: choose_micro_batch() decides.
  std::optional<int64_t> micro_batch_tokens = kMicroBatchTokens;
  int64_t log_every = 1;
  int64_t log_completions = 2;  // (grpo) of each step, in completions.jsonl
  // Position among the stages of the plan, which load_plan() sets: it is no key.
  int64_t stage = 0;

  ModelConfig model;
  DataConfig data;
  OptimizerConfig optimizer;
  SamplingConfig sampling;
  EngineConfig rollout;
  GrpoConfig grpo;
  std::vector<RewardConfig> rewards;
  EvalConfig eval;
  CheckpointConfig checkpoint;

  // The default if micro_batch_tokens is "auto" and not yet chosen.
  int64_t micro_batch() const { return micro_batch_tokens.value_or(kMicroBatchTokens); }
  int64_t completions_per_step() const { return prompts_per_step * num_generations; }
  // Examples or prompts of a step.
  int64_t examples_per_step() const {
    return trainer == TrainerType::kGrpo ? prompts_per_step : batch_size;
  }
  // Seeds the order of the data: each stage has its own, and the first that of `seed` itself.
  uint64_t data_seed() const {
    return static_cast<uint64_t>(seed) ^ static_cast<uint64_t>(stage) * 0x9e3779b97f4a7c15u;
  }
  void visit(ConfigVisitor& v) {
    v.choice("trainer", trainer, kTrainerNames,
             "what to do: next-token training, supervised fine-tuning, or GRPO");
    v.field("name", name, "of the run; empty: the file's name");
    v.field("output_dir", output_dir,
            "run directory: DIR, or DIR-2, ... if it exists; empty: runs/NAME");
    v.field("init_from", init_from, "checkpoint or run directory to start from");
    v.field("seed", seed, "of initialisation, data order, sampling and dropout", {.min = 0});
    v.field("device", device, "cpu, cuda or cuda:N");
    v.choice("dtype", dtype, kDTypeNames,
             "of weights and activations: f32; bf16 (CUDA only, with f32 masters); f64 (CPU only)");
    v.field("num_threads", num_threads, "CPU threads; 0: all cores", {.min = 0, .max = 4096});
    v.field("ranks", ranks,
            "data-parallel ranks in this process; an update depends on it by rounding only",
            {.min = 1, .max = 256});
    v.field("steps", steps, "optimiser steps (grpo: rollout steps)", {.min = 1, .max = 1e9});
    v.field("batch_size", batch_size, "sequences per step (pretrain, sft)",
            {.min = 1, .max = 1 << 20});
    v.field("prompts_per_step", prompts_per_step, "prompts per step (grpo)",
            {.min = 1, .max = 1 << 20});
    v.field("num_generations", num_generations, "completions per prompt (grpo)",
            {.min = 2, .max = 65536});
    v.field("micro_batch_tokens", micro_batch_tokens,
            "tokens per forward and backward, at least a sequence; an update depends on it by "
            "rounding only; auto: as many as fit in memory when the run starts, with more of "
            "model.recompute if needed",
            {.min = 1, .max = 1 << 30});
    v.field("log_every", log_every, "steps between lines of metrics.jsonl", {.min = 1});
    v.field("log_completions", log_completions,
            "completions of each step that go to completions.jsonl (grpo)", {.min = 0});
    optimizer.visit(v);
    sampling.visit(v);
    v.field("max_concurrent", rollout.max_concurrent,
            "sequences sampled at once; 0: as many as fit in memory; no result depends on it",
            {.min = 0, .max = 1 << 20});
    grpo.visit(v);
    v.list("rewards", rewards, "weighted rewards (grpo)");
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

// The configuration of a trainer in which no key is given. For sft and grpo these keys differ from
// pretraining, as in TRL: the learning rate, its schedule and warm-up, weight decay, AdamW's betas.
TrainConfig default_config(TrainerType trainer, int64_t steps);

// Contents of a configuration file.
struct RunPlan {
  std::string name;
  std::string output_dir;  // directory of the whole run, absolute
  // At least one; relative paths already resolved against the file.
  std::vector<TrainConfig> stages;
  // Error message for each relative input path that does not exist, with the folder it was resolved
  // against. preview_plan() rejects them.
  std::vector<std::string> missing;
};

// Reads CONFIG.yaml with key=value overrides; an override reaches every stage ("stages.1.steps=5"
// one only). Relative paths count from the file's directory, those in overrides from the current
// one. Throws InputError if the file is invalid.
RunPlan load_plan(const std::string& path, std::span<const std::string> overrides);
// YAML from which load_plan() gives the same plan.
std::string dump_plan(const RunPlan& plan);

const char* trainer_name(TrainerType type);

}  // namespace cohort
