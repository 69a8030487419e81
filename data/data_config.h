// The sections of a configuration that data depend on: their source, and the size of a step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "data/example.h"

namespace cohort {

// kMlm: masked language models; kClassify: classes of texts. Both train encoders. kDpo: preference
// pairs.
enum class TrainerType { kPretrain, kSft, kGrpo, kMlm, kClassify, kDpo };
inline constexpr EnumName<TrainerType> kTrainerNames[] = {
    {TrainerType::kPretrain, "pretrain"}, {TrainerType::kSft, "sft"},
    {TrainerType::kGrpo, "grpo"},         {TrainerType::kMlm, "mlm"},
    {TrainerType::kClassify, "classify"}, {TrainerType::kDpo, "dpo"}};
inline bool reads_text(TrainerType type) {
  return type == TrainerType::kPretrain || type == TrainerType::kMlm;
}
inline bool trains_encoder(TrainerType type) {
  return type == TrainerType::kMlm || type == TrainerType::kClassify;
}
// True if completions of problems are trained or sampled.
inline bool has_completions(TrainerType type) {
  return type == TrainerType::kSft || type == TrainerType::kGrpo;
}
inline const char* trainer_name(TrainerType type) {
  return kTrainerNames[static_cast<int>(type)].name;
}
enum class TokenizerType { kChar, kByte };
inline constexpr EnumName<TokenizerType> kTokenizerNames[] = {{TokenizerType::kChar, "char"},
                                                              {TokenizerType::kByte, "byte"}};
// Treatment of problems that are longer than the model's context.
enum class TooLong { kError, kTruncate, kSkip };
// Sort key of the problems; kOnline: shuffled, without those that teach nothing (OnlineOrder).
enum class Curriculum { kNone, kLength, kPassRate, kOnline };
inline constexpr EnumName<Curriculum> kCurriculumNames[] = {{Curriculum::kNone, "none"},
                                                            {Curriculum::kLength, "length"},
                                                            {Curriculum::kPassRate, "pass_rate"},
                                                            {Curriculum::kOnline, "online"}};
inline constexpr EnumName<TooLong> kTooLongNames[] = {
    {TooLong::kError, "error"}, {TooLong::kTruncate, "truncate"}, {TooLong::kSkip, "skip"}};

// kCropFlip: augmented() of data/resize.h.
enum class Augment { kNone, kCropFlip };
inline constexpr EnumName<Augment> kAugmentNames[] = {{Augment::kNone, "none"},
                                                      {Augment::kCropFlip, "crop_flip"}};
// Images with labels (ImageSet).
struct ImagesConfig {
  std::string path, eval_path;  // eval_path: held-out images; empty: a part of `path`
  std::string field = "image", label = "label";
  Augment augment = Augment::kNone;
  void visit(ConfigVisitor& v) {
    v.field("path", path, "a folder of class folders, or JSONL with an image and a label per line");
    v.field("eval_path", eval_path, "held-out images, likewise; empty: a part of path");
    v.field("field", field, "field of JSONL with an image: a path or a data URI");
    v.field("label", label, "field of JSONL with the label");
    v.choice("augment", augment, kAugmentNames,
             "crop_flip: trains on random crops (0.08 to 1 of the area), half of them mirrored");
  }
};

struct DataConfig {
  std::string task;       // a generated task (data/tasks/), or
  TaskConfig task_sizes;  // (its sizes)
  JsonlConfig jsonl;      // problems from a file, or
  ImagesConfig images;    // images with labels, or
  // Plain text (pretrain, mlm): files, folders and patterns.
  std::vector<std::string> text;
  std::vector<std::string> eval_text;  // held-out text, likewise; empty: a part of `text`
  std::vector<double> weights;         // one per entry of `text` or `jsonl.path`; empty: none
  std::string cache_dir;               // cache of the tokens of text, see load_tokens()
  Curriculum curriculum = Curriculum::kNone;
  int64_t curriculum_patience = 2;  // equal outcomes in a row (online)
  TooLong too_long = TooLong::kError;
  // Expected checksums of the files, as in Dataset::fingerprint; empty: those of the first start.
  std::string fingerprint;
  TokenizerType tokenizer = TokenizerType::kChar;
  std::string tokenizer_path;        // folder of a tokenizer; empty: as `tokenizer` says
  bool chat = false;                 // prompts and solutions become conversations
  std::string system;                // the first message of conversations that have none
  std::string chat_template_kwargs;  // a JSON object; empty: none
  Json tools;  // the template's variable of that name; null: none. It is no key
  // True if problems are rendered by the model's chat template.
  bool is_chat() const { return images.path.empty() && (chat || !jsonl.messages.empty()); }
  // True if the curriculum sorts the problems of the whole run.
  bool is_sorted() const {
    return curriculum == Curriculum::kLength || curriculum == Curriculum::kPassRate;
  }
  // True if the configured fractions leave nothing to evaluate on.
  bool holds_nothing_out() const {
    const std::vector<std::string>& separate = text.empty() ? jsonl.eval_path : eval_text;
    if (!images.path.empty()) return images.eval_path.empty() && jsonl.held_out() == 0;
    return task.empty() && separate.empty() && jsonl.held_out() == 0;
  }
  void visit(ConfigVisitor& v) {
    v.field("task", task, "generated problems: see `cohort train --help`");
    v.section("task_sizes", task_sizes, "sizes of the generated problems");
    v.section("jsonl", jsonl, "problems from a JSONL file");
    v.section("images", images, "images with labels (classify)");
    v.field("split_by", jsonl.split_by,
            "fields of data.jsonl's lines whose hash decides what is held out, the same for all "
            "stages, such as question; {one|other} of a template is one|other here; empty: the "
            "prompt, or the messages before the assistant's last. Lists count without their order");
    v.field("text", text,
            "text to train on (pretrain, mlm), one or a list of these: a file, all files of a "
            "folder, those of "
            "a pattern such as books/*.txt; of .jsonl files the field text of each line. Where "
            "there are several documents, each ends with the end of sequence");
    v.field("eval_text", eval_text, "held-out text, as text; empty: a part of text");
    v.field("held_out_fraction", jsonl.held_out_fraction,
            "fraction of text, from its end, or of jsonl.path's problems, by the hash of split_by, "
            "that is held out; none: 0.1, or 0 with eval_text or "
            "jsonl.eval_path, and where no stage has 50 problems",
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
             "line; online (grpo): shuffled, without those that are always solved or never");
    v.field("curriculum_patience", curriculum_patience,
            "(online) times in a row that all completions of a problem are solved, or all failed, "
            "after which the next epoch passes over it; each further time twice as many epochs do",
            {.min = 1, .max = 1000});
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

inline constexpr int64_t kMicroBatchTokens = 8192;

// The training steps of a stage. Its keys are top-level.
struct BatchConfig {
  TrainerType trainer = TrainerType::kPretrain;
  int64_t steps = 1000;
  int64_t batch_size = 32;  // sequences (dpo: pairs) per step (all but grpo)
  // (grpo) A step has prompts_per_step * num_generations completions.
  int64_t prompts_per_step = 32;
  int64_t num_generations = 8;
  // Tokens per forward and backward; no result depends on it. None: choose_by_memory() decides.
  std::optional<int64_t> micro_batch_tokens = kMicroBatchTokens;

  // The default if micro_batch_tokens is "auto" and not yet chosen.
  int64_t micro_batch() const { return micro_batch_tokens.value_or(kMicroBatchTokens); }
  int64_t completions_per_step() const { return prompts_per_step * num_generations; }
  // Examples or prompts of a step.
  int64_t examples_per_step() const {
    return trainer == TrainerType::kGrpo ? prompts_per_step : batch_size;
  }
  // All keys but `trainer`, which TrainConfig::visit() has first.
  void visit(ConfigVisitor& v) {
    v.field("steps", steps, "optimiser steps (grpo: rollout steps)", {.min = 1, .max = 1e9});
    v.field("batch_size", batch_size, "sequences per step (dpo: pairs; all but grpo)",
            {.min = 1, .max = 1 << 20});
    v.field("prompts_per_step", prompts_per_step, "prompts per step (grpo)",
            {.min = 1, .max = 1 << 20});
    v.field("num_generations", num_generations, "completions per prompt (grpo)",
            {.min = 1, .max = 65536});
    v.field("micro_batch_tokens", micro_batch_tokens,
            "tokens per forward and backward, at least a sequence; an update depends on it by "
            "rounding only; auto: as many as fit in memory when the run starts, with more of "
            "model.recompute if needed",
            {.min = 1, .max = 1 << 30});
  }
};

}  // namespace cohort
