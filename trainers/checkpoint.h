// Checkpoints: directories DIR/step-00000100 with
//
//   model.safetensors      the model, under Hugging Face's names,
//   config.json            its configuration
//   tokenizer.json         and its tokenizer
//   reference.safetensors  the frozen reference policy, where there is one
//   optimizer.safetensors  what resuming bit-exactly needs
//   state.json
//   manifest.json          format, and size and checksum of every other file
//
// Other names are not Cohort's, and are left alone. A directory is written under a temporary name,
// flushed, and appears by rename: a crash at any moment leaves the previous checkpoints untouched
// and no half-written one. `best` is a symbolic link to the best one.
//
// What cannot be read, for any other reason than that it does not exist, is an Error everywhere
// here: nobody can know then what is there.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/json.h"
#include "data/tokenizer.h"
#include "nn/model_folder.h"
#include "trainers/config.h"
#include "trainers/files.h"
#include "trainers/optimizer.h"

namespace cohort {

// Everything of a run that is not a tensor. Randomness needs no state: it is addressed by step.
struct TrainState {
  int64_t step = 0;           // steps done
  int64_t steps = 0;          // the run was planned for; 0: not known
  int64_t updates = 0;        // optimiser updates done
  int64_t data_position = 0;  // of the data order
  // The steps of each plan so far, ascending: a curriculum sorts what each adds on its own, so that
  // a longer run continues where it was.
  std::vector<int64_t> planned_steps;
  int64_t evaluated_step = -1;  // of the last evaluation; -1: none yet
  int64_t best_step = -1;       // -1: no evaluation has measured anything
  double best = 0;              // evaluation at best_step; NaN: only the loss was measured
  double best_loss = 0;         // on held-out data at best_step; NaN: not measured
  double seconds = 0;           // training time so far
  bool finished = false;
  int64_t unrewarded_steps = 0;  // (grpo) in a row, up to now
  Json monitor;                  // (grpo) GrpoMonitor::state()
  std::string data_fingerprint;  // of the data file; empty: none, or not known
  Json report;                   // what the final report needs from the past (an object)
  Json to_json() const;
  static TrainState from_json(const Json& json);
};

// A saved number; NaN for null, which stands for one that was not measured.
double number_or_nan(const Json& json);

struct CheckpointView {
  const Transformer& model;
  const Transformer* reference;  // nullptr: none
  const Tokenizer& tokenizer;
  const AdamW& optimizer;
  const TrainState& state;
};

// Saves DIR/step-N, then removes all but the last `keep_last` and the best, what a killed process
// left, and, where the run is finished, checkpoints of later steps, which it went back behind.
void save_checkpoint(const std::string& dir, const CheckpointView& view, int64_t keep_last);

// Removes what a killed process left in DIR, and what save_checkpoint() replaced: for a DIR that
// has a good checkpoint under its own name.
void remove_leftovers(const std::string& dir);

// Makes DIR/best the link to the best checkpoint, where that one is saved. What keeps it from that
// is a warning.
void link_best(const std::string& dir, const TrainState& state);

// Where save_checkpoint() puts the checkpoint of a step.
std::string checkpoint_path(const std::string& dir, int64_t step);

// True while a thread of this process is in save_checkpoint().
bool is_saving();

// Throws InputError naming the damaged or missing file.
void verify_checkpoint(const std::string& checkpoint);

// True if DIR holds a checkpoint, sound or damaged.
bool has_checkpoint(const std::string& dir);
// The newest checkpoint in DIR that verifies, of those before the checkpoint `before` if one is
// given; damaged ones are passed over with a warning. nullopt if there is none. Throws InputError
// if all are damaged.
std::optional<std::string> newest_checkpoint(const std::string& dir,
                                             const std::string& before = "");

// What the user may mean by `path`: a checkpoint, a directory of checkpoints, a run directory (its
// last stage), a folder with a model from Hugging Face. Throws InputError if there is no usable
// checkpoint.
std::string find_checkpoint(const std::string& path);

// load(checkpoint) for find_checkpoint(path); once more where a run in progress, which keeps only
// its newest, has removed the checkpoint meanwhile.
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

struct LoadedModel {
  std::unique_ptr<Transformer> model;
  std::unique_ptr<Tokenizer> tokenizer;
};
LoadedModel load_model(const std::string& checkpoint, DType dtype, Device device = {});
// For training: dropout, recompute, dtype and a shorter context are those of `config`, everything
// else is the checkpoint's. Throws InputError where check_compatible() does.
LoadedModel load_model(const std::string& checkpoint, const TrainConfig& config,
                       Device device = {});
// What such a model will be, without its weights.
struct ModelDescription {
  ModelConfig config;  // resolved
  std::unique_ptr<Tokenizer> tokenizer;
};
ModelDescription describe_model(const std::string& checkpoint, const TrainConfig& config);
// What a run may change of a model that passes check_compatible(): dropout, recompute, and the
// context, which it may shorten.
void take_run_options(const TrainConfig& config, ModelConfig& model);
// Throws InputError if config.model or config.data.tokenizer asks for something else than `model`
// and `tokenizer` are; a key with its default value asks for nothing. `source`: where they are
// from.
void check_compatible(const TrainConfig& config, const ModelConfig& model,
                      const Tokenizer& tokenizer, const std::string& source);
TrainState load_state(const std::string& checkpoint);

}  // namespace cohort
