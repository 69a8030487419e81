// Checkpoints: one directory each, DIR/step-00000100, which is a Hugging Face folder, with:
//
//   model.safetensors      the model, under Hugging Face's names,
//   config.json            its configuration
//   tokenizer.json         and its tokenizer
//   manifest.json          format, and size and checksum of every other file
//   training/              what only a resume needs:
//     reference.safetensors  the present reference policy, where there is one
//     optimizer.safetensors  the optimizer's state, for a bit-exact resume; of sharded state in
//                            files of several ranks, with their index (job/sharded_state.h)
//     state.json
//
// A model with adapters has adapter_model.safetensors and adapter_config.json (PEFT's format) in
// place of model.safetensors; state.json says where its base model is, and its fingerprint.
//
// Without manifest.json and training/ it is a folder of Hugging Face's, and programs that read one
// ignore both. In format 1, that of version 0.1.0, the files of training/ are beside the others.
// Other names are not Cohort's, and are left alone. A directory is written under a temporary name,
// flushed, and appears by rename: a crash at any moment leaves the previous checkpoints untouched
// and no half-written one. `best` is a symbolic link to the best one.
//
// All functions throw Error if a file cannot be read for any reason other than that it does not
// exist: its state is unknown then.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/data_config.h"
#include "job/adapter_base.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "text/json.h"
#include "text/tokenizer.h"
#include "trainers/optimizer.h"

namespace cohort {

// State of a run besides its tensors. Randomness needs no state: it is addressed by step.
struct TrainState {
  int64_t step = 0;           // steps done
  int64_t steps = 0;          // planned steps of the run; 0: not known
  int64_t updates = 0;        // optimiser updates done
  int64_t data_position = 0;  // position in the data order
  // Planned steps of each start so far, ascending: a curriculum sorts the steps that each one adds
  // separately, so that a longer run continues where it was.
  std::vector<int64_t> planned_steps;
  int64_t evaluated_step = -1;  // step of the last evaluation; -1: none yet
  int64_t best_step = -1;       // -1: no evaluation has measured anything
  double best = 0;              // evaluation at best_step; NaN: only the loss was measured
  double best_loss = 0;         // on held-out data at best_step; NaN: not measured
  double seconds = 0;           // training time so far
  double total_tokens = 0;      // sum of num_tokens so far; NaN: not known
  bool finished = false;
  int64_t unrewarded_steps = 0;  // (grpo) latest steps in a row without a reward
  int64_t unanswered_steps = 0;  // (grpo) the same of steps that the environment has failed
  Json monitor;                  // (grpo) GrpoMonitor::state()
  Json curriculum;               // (grpo) OnlineOrder::state()
  double beta = 0;               // (grpo, kl_target) the present beta; 0: that of the configuration
  double start_beta = 0;         // what the configuration said when `beta` began to change
  // (grpo, entropy_target) The metric of the last step, none before the first one, and the
  // coefficient of the next step if the bonus acts in it.
  std::optional<double> entropy;
  double entropy_coef = 0;
  std::string teacher;           // (grpo) fingerprint of the folder `reference`; empty: none
  std::string data_fingerprint;  // checksum of the data file; empty: none, or not known
  Json set_fingerprints;         // the same of each set of eval.sets, by its name
  AdapterBase base;              // empty unless the model has adapters
  Json report;                   // history for the final report (an object)
  // True if neither a step nor an evaluation has been made.
  bool is_new() const { return step == 0 && evaluated_step < 0; }
  Json to_json() const;
  static TrainState from_json(const Json& json);
};

struct CheckpointView {
  const Transformer& model;
  const Transformer* reference;  // nullptr: none
  const Tokenizer& tokenizer;
  Optimizer& optimizer;
  const TrainState& state;  // with its `base` if the model has adapters
  // Transformer::adapters() of the reference of a model with adapters, whose `reference` is
  // nullptr; nullptr: none.
  const std::vector<Tensor>* reference_adapters = nullptr;
  // The data that was trained on. generation_config.json names the token that ends a turn of
  // conversations beside the end of sequence. nullptr: not known.
  const DataConfig* data = nullptr;
  // The ranks over which the optimizer's state is sharded; nullptr: it is not.
  Communicator* comm = nullptr;
};

// With a `comm` every rank calls this, and rank 0 does what follows; the others write their part of
// the optimizer's state, and throw if rank 0 or another of them does before it is written.
//
// Saves DIR/step-N, then removes all checkpoints but the last `keep_last` and the best, leftovers
// of a killed process, and, if the run is finished, checkpoints of later steps, which it discarded.
// A failure leaves no part of the new one; the error of a full disk says what may be deleted.
void save_checkpoint(const std::string& dir, const CheckpointView& view, int64_t keep_last);

// Removes what save_checkpoint() removes after saving `state`, which DIR has under its final name.
// A failure is a warning.
void remove_old_checkpoints(const std::string& dir, const TrainState& state, int64_t keep_last);

// Makes DIR/best the link to the best checkpoint if that one is saved. A failure is a warning.
void link_best(const std::string& dir, const TrainState& state);

// Path of the checkpoint that save_checkpoint() writes for a step.
std::string checkpoint_path(const std::string& dir, int64_t step);
// The step of a checkpoint, which may be a replaced one, by its name; -1 for any other name.
int64_t checkpoint_step(const std::filesystem::path& checkpoint);

// True while a thread of this process is in save_checkpoint().
bool is_saving();

// The folder of the files that only a resume needs, in a checkpoint of any format. Throws
// InputError if there is no valid manifest.json.
std::string training_folder(const std::string& checkpoint);

// Throws InputError naming the damaged or missing file.
void verify_checkpoint(const std::string& checkpoint);

// True if DIR holds a checkpoint, sound or damaged.
bool has_checkpoint(const std::string& dir);
// The newest checkpoint in DIR that verifies, of those before the checkpoint `before` if one is
// given; damaged ones are skipped with a warning. nullopt if there is none. Throws InputError
// if all are damaged.
std::optional<std::string> newest_checkpoint(const std::string& dir,
                                             const std::string& before = "");

// Resolves `path`, which may be a checkpoint, a directory of checkpoints, a run directory (its last
// stage) or a folder with a model or an adapter from elsewhere. Throws InputError if there is no
// usable checkpoint.
std::string find_checkpoint(const std::string& path);

// load(checkpoint) for find_checkpoint(path); retried if a run in progress, which keeps only its
// newest checkpoints, has removed this one meanwhile.
template <class Load>
auto load_found(const std::string& path, const Load& load) {
  for (;;) {
    const std::string checkpoint = find_checkpoint(path);
    try {
      return load(checkpoint);
    } catch (const Error&) {
      if (path_exists(checkpoint)) throw;
    }
  }
}

// True if the folder has a tokenizer.
bool has_tokenizer(const std::string& dir);

struct LoadedModel {
  std::unique_ptr<Transformer> model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::string checkpoint;  // its folder
  AdapterBase base;        // empty unless the model has adapters
  bool has_new_head = false;
};
// The folder may be an adapter's: `base` is then the folder of its base model, and empty for the
// one that find_base() finds. Its tokenizer is the adapter's if it has one, else the base's. Throws
// InputError where find_base() and verify_base() do. `context`: of the model in this process, as
// apply_run_options() says, or more than a model with rotary positions was made for, with a
// warning; 0: its own. `format`: of the weights of linear layers; nullopt: as precision.json or the
// weights' folder has them.
LoadedModel load_model(const std::string& checkpoint, DType dtype, Device device = {},
                       const std::string& base = "", int64_t context = 0,
                       std::optional<kernels::WeightFormat> format = {});
// A checksum by which another model in its folder is recognised: base_fingerprint(), with that of
// the adapter's weights.
std::string model_fingerprint(const LoadedModel& model);
// For training: dropout, precision, recompute and a context that the model allows are those of
// `wanted`, everything else is the checkpoint's. An encoder has the head of `wanted`, which is a
// new one where the checkpoint has another. With wanted.lora the model has adapters: new ones if
// the checkpoint is a whole model, which is then their base. Throws InputError where
// check_compatible() and apply_adapters() do.
LoadedModel load_model(const std::string& checkpoint, const ModelConfig& wanted,
                       const DataConfig& data, DType dtype, Device device = {});
// Configuration and tokenizer of such a model, without its weights.
struct ModelDescription {
  ModelConfig config;  // resolved
  std::unique_ptr<Tokenizer> tokenizer;
  // Empty unless the model has adapters; the fingerprint is the recorded one.
  AdapterBase base;
  // Seed of the initial values of a head that the checkpoint does not have; none: it has it.
  std::optional<uint64_t> head_seed = {};
};
// A model as load_model(checkpoint, dtype, device, base) would load it.
ModelDescription describe_model(const std::string& checkpoint, const std::string& base = "");
// Likewise for training.
ModelDescription describe_model(const std::string& checkpoint, const ModelConfig& wanted,
                                const DataConfig& data);
// Applies the options that a run may change of a model that passes check_compatible(): dropout,
// precision, recompute, and a context that is shorter, or longer where ModelConfig::may_extend().
void apply_run_options(const ModelConfig& wanted, ModelConfig& model);
// Gives an encoder the head of `wanted`. Returns true if it is a new one. The classes of a model
// stay if they have all labels of `wanted`. Throws InputError if only one of the two is an encoder,
// if the model's classes have some of the labels, and for a new head beside adapters.
bool apply_head(const ModelConfig& wanted, ModelConfig& model, const std::string& source);
// Throws InputError if `wanted` or data.tokenizer differs from `model` or `tokenizer`; keys with
// their default value are not compared. `source` names their origin in the message.
void check_compatible(const ModelConfig& wanted, const DataConfig& data, const ModelConfig& model,
                      const Tokenizer& tokenizer, const std::string& source);
TrainState load_state(const std::string& checkpoint);

}  // namespace cohort
