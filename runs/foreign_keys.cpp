#include "runs/foreign_keys.h"

#include <algorithm>
#include <string_view>

#include "core/check.h"

namespace cohort {
namespace {

constexpr const char* kFolder = "a folder in Hugging Face format";
constexpr const char* kEpochs = "epochs x problems / batch_size (sft) or prompts_per_step (grpo)";
constexpr const char* kBatch = "over all devices (sft); prompts_per_step (grpo)";
constexpr const char* kBuiltIn = "leave it out: the sampler is built in";
constexpr const char* kEventFiles = "leave it out: TensorBoard's event files are always written";
constexpr const char* kGpus = "cohort train --gpus N, on one machine (data parallel)";
constexpr const char* kNoAdapters = "adapters are not supported: all parameters are trained";
constexpr const char* kNotQuantised = "quantised training is not supported";

// The first that fits counts. A name that ends in _ stands for all names that begin with it.
constexpr ForeignKey kForeignKeys[] = {
    {"actor_rollout_ref.model.path", "model.path", ""},
    {"actor_rollout_ref.rollout.name", "", kBuiltIn},
    {"custom_reward_function.path", "rewards", "{name: command, run: ...}"},
    {"data.train_batch_size", "prompts_per_step", ""},
    {"rollout.n", "num_generations", ""},
    {"trainer.logger", "", kEventFiles},
    {"train_files", "data.jsonl.path", "JSONL"},
    {"val_files", "data.jsonl.eval_path", "JSONL"},
    {"max_response_length", "max_completion_length", ""},
    {"gpu_memory_utilization", "rollout.memory_fraction", ""},
    {"tensor_model_parallel_size", "",
     "models are not split; cohort train --gpus N splits the data"},
    {"ppo_mini_batch_size", "num_minibatches", "how many, not how large"},
    {"ppo_micro_batch_size_per_gpu", "micro_batch_tokens", "in tokens"},
    {"log_prob_micro_batch_size_per_gpu", "micro_batch_tokens", "in tokens"},
    {"ppo_max_token_len_per_gpu", "micro_batch_tokens", ""},
    {"ppo_epochs", "num_iterations", ""},
    {"clip_ratio", "epsilon", ""},
    {"clip_ratio_low", "epsilon", ""},
    {"clip_ratio_high", "epsilon_high", ""},
    {"grad_clip", "max_grad_norm", ""},
    {"lr_warmup_steps", "warmup_steps", ""},
    {"lr_warmup_steps_ratio", "warmup_steps", "ratio x steps"},
    {"use_kl_loss", "beta", "0 is off"},
    {"use_kl_in_reward", "beta", "the KL is in the loss, not in the reward"},
    {"kl_loss_coef", "beta", ""},
    {"kl_coef", "beta", ""},
    {"entropy_coeff", "", "leave it out: there is no entropy bonus"},
    {"loss_agg_mode", "loss_type", "dapo is the mean over tokens"},
    {"adv_estimator", "scale_rewards", "grpo: group, rloo: leave_one_out"},
    {"enable_gradient_checkpointing", "model.recompute", "cheap or block"},
    {"total_training_steps", "steps", ""},
    {"total_epochs", "steps", "epochs x problems / prompts_per_step"},
    {"test_freq", "eval.every", ""},
    {"save_freq", "checkpoint.every", ""},
    {"experiment_name", "name", ""},
    {"project_name", "name", ""},
    {"default_local_dir", "output_dir", ""},
    {"n_gpus_per_node", "", kGpus},
    {"nnodes", "", kGpus},
    {"model", "model.path", kFolder},
    {"model_name_or_path", "model.path", kFolder},
    {"model_name", "model.path", kFolder},
    {"ref_model", "", "the reference is the model at the start of the stage, if beta is above 0"},
    {"tokenizer_name_or_path", "data.tokenizer_path",
     "for a new model; others bring their tokenizer"},
    {"train_dataset", "data.jsonl.path", ""},
    {"dataset_config", "", "leave it out: data.jsonl.path is a file"},
    {"dataset_name", "data.jsonl.path", "a JSONL file; nothing is downloaded"},
    {"eval_dataset", "data.jsonl.eval_path", ""},
    {"reward_funcs", "rewards", "{name: command, run: ...}, or a built-in reward"},
    {"reward_weights", "rewards", "each has a weight"},
    {"max_steps", "steps", ""},
    {"num_train_epochs", "steps", kEpochs},
    {"num_epochs", "steps", kEpochs},
    {"epochs", "steps", kEpochs},
    {"per_device_train_batch_size", "batch_size", kBatch},
    {"train_batch_size", "batch_size", kBatch},
    {"generation_batch_size", "prompts_per_step", "x num_generations completions"},
    {"per_device_eval_batch_size", "", "micro_batch_tokens bounds the memory of evaluations too"},
    {"gradient_accumulation_steps", "",
     "leave it out: micro batches of micro_batch_tokens are accumulated to the batch"},
    {"max_prompt_length", "model.context", "with data.too_long: truncate"},
    {"max_length", "model.context", ""},
    {"max_seq_length", "model.context", ""},
    {"max_new_tokens", "max_completion_length", ""},
    {"lr", "learning_rate", ""},
    {"lr_scheduler_type", "lr_schedule", "constant, linear or cosine"},
    {"warmup_ratio", "warmup_steps", "ratio x steps"},
    {"adam_epsilon", "adam_eps", ""},
    {"disable_dropout", "model.dropout", ""},
    {"max_norm", "max_grad_norm", ""},
    {"gradient_clipping", "max_grad_norm", ""},
    {"clip_range", "epsilon", ""},
    {"cliprange", "epsilon", ""},
    {"steps_per_generation", "num_minibatches", "updates per pass over a step's completions"},
    {"bf16", "dtype", "dtype: bf16, with device: cuda"},
    {"fp16", "dtype", "bf16 instead, with device: cuda"},
    {"tf32", "dtype", "f32 is never TF32"},
    {"torch_dtype", "dtype", "bf16 or f32"},
    {"gradient_checkpointing", "model.recompute", "cheap or block"},
    {"optim", "optimizer.moments", "AdamW always; bf16 halves its moments"},
    {"packing", "", "leave it out: sequences are always packed"},
    {"padding_free", "", "leave it out: nothing is padded"},
    {"assistant_only_loss", "",
     "leave it out: of conversations only the assistant's turns are learned"},
    {"completion_only_loss", "",
     "leave it out: of prompts and completions only the completions are learned"},
    {"chat_template_kwargs", "data.chat_template_kwargs", ""},
    {"dataset_text_field", "data.jsonl.prompt", "or data.text for text without prompts"},
    {"logging_steps", "log_every", ""},
    {"num_completions_to_print", "log_completions", ""},
    {"eval_steps", "eval.every", ""},
    {"eval_strategy", "eval.every", ""},
    {"evaluation_strategy", "eval.every", ""},
    {"save_steps", "checkpoint.every", ""},
    {"save_strategy", "checkpoint.every", ""},
    {"save_total_limit", "checkpoint.keep_last", ""},
    {"resume_from_checkpoint", "", "cohort train --resume RUN"},
    {"run_name", "name", ""},
    {"logging_dir", "output_dir", "the run directory has TensorBoard's event files"},
    {"report_to", "", kEventFiles},
    {"use_vllm", "", kBuiltIn},
    {"vllm_gpu_memory_utilization", "rollout.memory_fraction", ""},
    {"vllm_", "", kBuiltIn},
    {"num_processes", "", kGpus},
    {"use_peft", "", kNoAdapters},
    {"peft_config", "", kNoAdapters},
    {"lora_", "", kNoAdapters},
    {"load_in_", "", kNotQuantised},
    {"bnb_", "", kNotQuantised},
    {"deepspeed", "", kGpus},
    {"fsdp", "", kGpus},
    {"fsdp_", "", kGpus},
    {"dataloader_", "", "leave it out: there are no loader processes"},
    {"attn_implementation", "", "leave it out: attention is built in"},
    {"trust_remote_code", "", "leave it out: models bring no code"},
    {"sync_ref_model", "", "the reference stays the model at the start of the stage"},
    {"importance_sampling_level", "", "ratios are those of tokens"},
    {"load_best_model_at_end", "", "leave it out: the best checkpoint is always kept"},
    {"remove_unused_columns", "", "leave it out: all fields reach the rewards"},
    {"push_to_hub", "", "cohort export RUN DIR writes a folder to upload"},
};

// True if the dotted path is `name` or ends in it; for "vllm_": if its last key begins with it.
bool fits(std::string_view path, std::string_view name) {
  if (name.ends_with('_')) return path.substr(path.rfind('.') + 1).starts_with(name);
  return path.ends_with(name) &&
         (path.size() == name.size() || path[path.size() - name.size() - 1] == '.');
}

}  // namespace

std::span<const ForeignKey> foreign_keys() {
  return kForeignKeys;
}

std::string foreign_key_text(const std::string& path) {
  std::string_view rest = path;
  const auto find = [&](bool is_section) {
    return std::find_if(std::begin(kForeignKeys), std::end(kForeignKeys), [&](const auto& key) {
      return (!is_section || *key.ours == '\0') && fits(rest, key.theirs);
    });
  };
  const ForeignKey* found = find(false);
  // A section without an equivalent explains its keys: peft_config.r.
  while (found == std::end(kForeignKeys) && rest.rfind('.') != rest.npos) {
    rest = rest.substr(0, rest.rfind('.'));
    found = find(true);
  }
  if (found == std::end(kForeignKeys)) return "";
  const std::string remark = found->remark;
  if (*found->ours == '\0') return "; " + remark;
  return str("; it is '", found->ours, "' here", remark.empty() ? "" : ": ", remark);
}

}  // namespace cohort
