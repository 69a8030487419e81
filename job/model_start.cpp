#include "job/model_start.h"

#include <filesystem>

#include "core/log.h"
#include "core/sizes.h"
#include "data/data_check.h"
#include "job/preview.h"
#include "job/resources.h"
#include "trainers/across_ranks.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

// Path of the checkpoint to resume from; "" if there is none. Rank 0 names it for all: the other
// hosts may see an older directory.
std::string checkpoint_of(const StageSetup& setup) {
  const std::string checkpoints = setup.dir + "/checkpoints";
  std::string name;
  if (setup.is_main())
    name =
        std::filesystem::path(newest_checkpoint(checkpoints, setup.before).value_or("")).filename();
  name = first_text(setup.comm, name);
  if (name.empty()) return "";
  const std::string path = str(checkpoints, "/", name);
  if (path_exists(path)) return path;
  throw InputError(str(path, ", from which rank 0 resumes, is not visible to rank ",
                       setup.comm.rank(),
                       "; hint: the run directory must be on a file system that "
                       "all hosts share"));
}

// Reason why a stage that was saved as finished has nothing left to do under `config`: its steps
// are done, or its last score reached eval.stop_at. "" if it has steps left.
std::string why_finished(const TrainConfig& config, const TrainState& state) {
  if (!state.finished) return "";
  if (state.step >= config.batch.steps)
    return str("step ", state.step, " of ", config.batch.steps, " is done");
  if (config.eval.stop_at <= 0 || reads_text(config.batch.trainer)) return "";
  const double score = last_score(state.report);
  if (!(score >= config.eval.stop_at)) return "";
  return str("its last score, ", score, ", reached eval.stop_at: ", config.eval.stop_at);
}

// Determines if a saved stage has anything left to do.
void resume(const StageSetup& setup, const std::string& checkpoint, TrainState& state) {
  const TrainConfig& config = setup.config;
  const char* name = trainer_name(config.batch.trainer);
  const std::string done = why_finished(config, state);
  if (!done.empty()) {
    const std::string hint = str("; to train on, resume with ", setup.steps_key,
                                 "=N or another eval.stop_at, or start a run with init_from");
    if (setup.is_main())
      logging::info(name, " is finished, at step ", state.step, ": ", done,
                    setup.fixed.empty() ? hint : "");
    return;
  }
  // The planned steps of the saved stage if they are known and differ from those now planned; else
  // 0. Version 0.1.0 did not save them.
  int64_t planned = state.steps == 0 && state.finished ? state.step : state.steps;
  if (planned == config.batch.steps) planned = 0;
  if (!setup.fixed.empty() && (state.finished || planned > 0))
    throw InputError(
        str(name, " has ended at step ", state.step, " and cannot train on: ", setup.fixed));
  state.finished = false;
  if (!setup.is_main()) return;
  if (planned > 0)
    logging::info("steps: ", planned, " -> ", config.batch.steps, "; from step ", state.step,
                  " on the learning rate follows the schedule of ", config.batch.steps, " steps");
  logging::info("resuming ", name, " at step ", state.step, " from ", checkpoint);
}

LoadedModel load(const StageSetup& setup, const std::string& checkpoint) {
  const TrainConfig& config = setup.config;
  return load_model(checkpoint, model_with_head(config), config.data, config.dtype, setup.device);
}

// load_found() of the checkpoint that rank 0 finds, by its name in `path`. Every rank calls it.
LoadedModel load_for_ranks(const StageSetup& setup, const std::string& path,
                           const std::function<LoadedModel(const std::string& from)>& load) {
  for (;;) {
    std::string name;
    if (setup.is_main()) name = find_checkpoint(path).substr(path.size());
    const std::string checkpoint = path + first_text(setup.comm, name);
    LoadedModel out;
    double is_missing = 0, has_main = 0;
    try {
      out = load(checkpoint);
    } catch (const Error&) {
      if (path_exists(checkpoint)) throw;
      is_missing = 1;
    }
    if (setup.is_main()) has_main = path_exists(checkpoint);
    reduce_in_place(setup.comm, {&is_missing, &has_main}, Reduce::kMax);
    if (is_missing == 0) return out;
    if (has_main > 0)
      throw InputError(str(checkpoint, ", which rank 0 reads, is not visible to every rank",
                           "; hint: it must be on a file system that all hosts share"));
  }
}

// The model of init_from; an empty one without it.
LoadedModel load_start(const StageSetup& setup) {
  if (setup.config.init_from.empty()) return {};
  return load_for_ranks(setup, setup.config.init_from,
                        [&](const std::string& from) { return load(setup, from); });
}

std::unique_ptr<Transformer> new_model(const StageSetup& setup, const ModelConfig& config) {
  return std::make_unique<Transformer>(config, setup.config.dtype,
                                       static_cast<uint64_t>(setup.config.seed), setup.device);
}

// Says that the base of new adapters must stay, if it is a checkpoint.
void note_base(const AdapterBase& base) {
  if (base.path.empty() || !path_exists(base.path + "/manifest.json")) return;
  logging::info("lora: the base model is the checkpoint ", base.path,
                ", which must stay; a run that trains on removes its old ones");
}

// Says that the model of `start`, the folder of init_from, was trained with another precision.
void note_precision(const PrecisionConfig& asked, const std::string& start) {
  PrecisionConfig saved = start.empty() ? asked : load_precision(start);
  if (!start.empty() && !is_adapter_folder(start)) saved.base = asked.base;  // it has no base
  const std::string change = precision_change(asked, saved, start);
  if (change.empty()) return;
  // More rounding is what the run asks for; less may be a key that was forgotten.
  if (saved.rounds_queries() && !asked.rounds_queries())
    logging::warn(change + "; hint: precision.attention=fp8");
  else if (saved.is_quantized() && asked.base != saved.base)
    logging::warn(str(change, "; hint: precision.base=", entry_of(kBaseNames, saved.base).name));
  else if (saved.rounds_keys() && !asked.rounds_keys())
    logging::warn(change + "; hint: precision.cache=fp8");
  else
    logging::info(change);
}

// Loads the data, and makes the model if none is loaded.
void load_data(const StageSetup& setup, ModelStart& start, LoadedModel& loaded) {
  const TrainConfig& config = setup.config;
  TrainConfig recorded = config;
  if (recorded.data.fingerprint.empty()) recorded.data.fingerprint = start.state.data_fingerprint;
  start.data = load_dataset(recorded, std::move(loaded.tokenizer));
  start.state.data_fingerprint = start.data.fingerprint;
  if (loaded.model == nullptr) {
    ModelConfig model = model_with_head(config);
    model.vocab_size = start.data.tokenizer->vocab_size();
    model.resolve();
    loaded.model = new_model(setup, model);
  }
  const int64_t context = loaded.model->config().context;
  const ContextLimit limit = context_limit(config, loaded.model->config());
  const DataLengths lengths = check_data(config, start.data, context, limit);
  check_sampling(config.sampling, config.batch.trainer, *start.data.tokenizer,
                 lengths.shortest_prompt, context, limit);
  if (!setup.is_main()) return;
  log_data_usage(config, start.data, lengths);
  if (start.state.finished) return;
  if (const std::string leak =
          held_out_leak(start.data, {setup.earlier.begin(), setup.earlier.end()});
      !leak.empty())
    logging::warn(leak);
  for (const std::string& warning : config.warnings()) logging::warn(warning);
}

void make_learner(const StageSetup& setup, ModelStart& start, std::unique_ptr<Transformer> model) {
  const TrainConfig& config = setup.config;
  if (setup.device.is_cuda())
    start.pinned = optimizer_bytes(config.optimizer, model->config(), config.dtype, setup.device,
                                   setup.comm.size())
                       .pinned;
  if (const int64_t free = free_memory(Device{}); start.pinned > free)
    throw InputError(str("optimizer.place: host needs ", mib(start.pinned),
                         " of page-locked memory, and ", mib(free),
                         " are free; hint: optimizer.place=device, optimizer.moments=bf16, or a "
                         "smaller optimizer.host_units"));
  Stopwatch clock;
  start.learner = std::make_unique<Learner>(std::move(model), config.optimizer, setup.comm,
                                            static_cast<uint64_t>(config.seed));
  if (start.pinned > 0 && setup.is_main())
    logging::info("optimizer.place: host: ", mib(start.pinned),
                  " of page-locked memory, locked in ", score_text(clock.lap(), 1), " s");
}

// Loads the state of the start's checkpoint, and with it the masters of the weights.
void load_optimizer(const StageSetup& setup, ModelStart& start) {
  Optimizer& optimizer = start.learner->optimizer();
  optimizer.load(SafetensorsFolder(training_folder(start.checkpoint), "optimizer"),
                 start.state.updates);
  optimizer.gather_weights(setup.comm);
}

// Sets the environment and the criterion, and loads eval.sets, of the files of the stage's start.
void load_problems(const StageSetup& setup, ModelStart& start) {
  const TrainConfig& config = setup.config;
  Dataset& data = start.data;
  start.environment = environment_of(config.environment, config.data, *data.tokenizer);
  const std::string changed = changed_turns(config.environment, config.data, *data.tokenizer);
  if (setup.is_main() && !changed.empty())
    logging::info("environment: ", changed, "; such turns stay as they were sampled");
  EvalConfig eval = config.eval;
  for (EvalSetConfig& set : eval.sets)
    if (const std::string* sum = start.state.set_fingerprints.find_text(set.name);
        sum != nullptr && set.fingerprint.empty())
      set.fingerprint = *sum;
  start.correct = correctness_of(config.eval.correct, config.rewards, data.task,
                                 data.held_out_set->size() > 0 || !eval.sets.empty());
  const ModelConfig& model = start.learner->model().config();
  start.sets = load_eval_sets({eval, config, config.rewards, start.correct}, data, model.context,
                              context_limit(config, model));
  start.state.set_fingerprints = {};
  for (const EvalSet& set : start.sets) {
    start.state.set_fingerprints.set(set.name, set.fingerprint);
    if (setup.is_main() && !set.too_long.empty())
      logging::info("data.too_long: eval.sets, ", set.name, ": ", set.too_long);
  }
}

// Throws InputError on every rank, naming the first part that is not that of rank 0, and its ranks.
void check_equal_starts(Communicator& comm, const ModelStart& start) {
  if (comm.size() == 1) return;
  std::vector<Fingerprint> all;
  const auto add = [&](const char* what, const std::vector<Fingerprint>& parts) {
    for (const auto& [name, sum] : parts) all.push_back({str(what, " (", name, ")"), sum});
  };
  const Transformer &model = start.learner->model(), *reference = start.reference->policy().model;
  const Optimizer& optimizer = start.learner->optimizer();
  std::string data = start.data.fingerprint;
  for (const EvalSet& set : start.sets) data += set.fingerprint;
  for (const auto& [name, content] : start.data.tokenizer->files()) data += name + content;
  add("weights", weight_fingerprints(model.parameters()));
  // Each rank has read its own part of a sharded one.
  if (!optimizer.is_sharded()) add("optimizer state", optimizer.fingerprints());
  all.push_back({"data", static_cast<int64_t>(checksum(data))});
  if (reference != nullptr && reference != &model)
    add("reference weights", weight_fingerprints(reference->parameters()));
  std::string names;
  for (const Fingerprint& part : all) names += part.name + "\n";
  std::string difference =
      first_difference(comm, {{"parameters", static_cast<int64_t>(checksum(names))}});
  if (difference.empty()) difference = first_difference(comm, all);
  if (!difference.empty())
    throw InputError(str("the ranks do not start alike: ", difference,
                         "; hint: all hosts must see the same files and run the same build on the "
                         "same kind of processor"));
}

// The model that a stage with a checkpoint has begun with.
std::unique_ptr<Transformer> start_model(const StageSetup& setup, const ModelConfig& config) {
  std::unique_ptr<Transformer> out = load_start(setup).model;
  return out != nullptr ? std::move(out) : new_model(setup, config);
}

}  // namespace

Reference::Reference(const StageSetup& setup, const Transformer& model,
                     const std::string& checkpoint, const Dataset& data, TrainState& state)
    : config_(setup.config), trained_(model) {
  const ReferenceType type = config_.grpo.reference_type();
  if (config_.batch.trainer != TrainerType::kGrpo || config_.grpo.beta == 0) return;
  if (is_teacher() && state.finished) return;  // nothing is left to learn from it
  if (!is_teacher()) state.teacher.clear();
  if (is_teacher())
    load_teacher(setup, data, state);
  else if (type == ReferenceType::kStart ||
           (type == ReferenceType::kBase && model.config().lora.rank == 0))
    load_own(setup, checkpoint);
  if (!config_.grpo.reference_prompt.empty())
    prompt_ =
        reference_prompt(config_, data, model.config().context, policy().model->config().context);
}

void Reference::load_teacher(const StageSetup& setup, const Dataset& data, TrainState& state) {
  const std::string& folder = config_.grpo.reference;
  check_teacher(config_, trained_.config(), *data.tokenizer);
  LoadedModel loaded = load_for_ranks(setup, folder, [&](const std::string& from) {
    return load_model(from, config_.dtype, setup.device);
  });
  const std::string found = model_fingerprint(loaded);
  if (!state.teacher.empty() && state.teacher != found)
    throw InputError(str("reference: ", folder,
                         " is not the model that the stage has learned from: "
                         "its fingerprint is ",
                         found, ", and was ", state.teacher,
                         "; hint: restore its files, or start a run with init_from"));
  if (setup.is_main() && state.teacher.empty() && state.step > 0)
    logging::info("reference: ", folder, " is the teacher from step ", state.step, " on");
  state.teacher = found;
  model_ = std::move(loaded.model);
}

void Reference::load_own(const StageSetup& setup, const std::string& checkpoint) {
  const Transformer& model = trained_;
  const bool has_adapters = model.config().lora.rank > 0;
  const std::string training = checkpoint.empty() ? "" : training_folder(checkpoint);
  if (has_adapters) {
    const std::string saved = training + "/reference.safetensors";
    adapters_ = checkpoint.empty()   ? model.adapters()
                : path_exists(saved) ? load_adapter_tensors(model, saved)
                                     : load_start(setup).model->adapters();
    return;
  }
  if (checkpoint.empty() || SafetensorsFolder::exists(training, "reference")) {
    model_ =
        std::make_unique<Transformer>(model.config(), config_.dtype, std::nullopt, setup.device);
    if (checkpoint.empty())
      model_->copy_from(model);
    else
      load_weights(*model_, training, "reference");
    return;
  }
  try {
    model_ = load_start(setup).model;
  } catch (const InputError& e) {
    throw InputError(str("beta: ", checkpoint,
                         " has no reference, as the stage had beta 0 when it began, and the "
                         "weights it began with cannot be read (",
                         e.what(), "); hint: resume with beta=0, or restore ", config_.init_from));
  }
  const bool is_new = model_ == nullptr;
  if (is_new) model_ = new_model(setup, model.config());
  if (setup.is_main())
    logging::info("beta: ", checkpoint, " has no reference; it is ",
                  is_new ? str("the new model of seed ", config_.seed)
                         : str("read from ", config_.init_from, ", with which the stage began"));
}

ReferencePolicy Reference::policy() const {
  if (config_.batch.trainer != TrainerType::kGrpo || config_.grpo.beta == 0) return {};
  if (model_ != nullptr) return {.model = model_.get(), .prompt = prompt_};
  if (!adapters_.empty()) return {&trained_, Adapters::kOn, &adapters_, prompt_};
  const bool is_policy = config_.grpo.reference_type() == ReferenceType::kPolicy;
  return {&trained_, is_policy ? Adapters::kOn : Adapters::kOff, nullptr, prompt_};
}

void Reference::follow(int64_t step) {
  const int64_t every = config_.grpo.ref_sync_every;
  if (every == 0 || step % every != 0 || policy().model == nullptr) return;
  const auto weights_of = [](const Transformer& model) {
    std::vector<Tensor> out;
    for (const NamedParameter& p : model.parameters()) out.push_back(p.value);
    return out;
  };
  const double alpha = config_.grpo.ref_sync_alpha;
  if (model_ == nullptr) return mix_weights(adapters_, trained_.adapters(), alpha);
  mix_weights(weights_of(*model_), weights_of(trained_), alpha);
  model_->update_derived();
}

ModelStart::ModelStart(const StageSetup& setup) : checkpoint(checkpoint_of(setup)) {
  const int64_t steps = setup.config.batch.steps;
  if (!checkpoint.empty()) {
    state = load_state(checkpoint);
    resume(setup, checkpoint, state);
    const std::string change =
        precision_change(setup.config.model.precision, load_precision(checkpoint), checkpoint);
    if (!change.empty())
      throw InputError(change +
                       "; hint: leave it out, or start a new run with init_from=" + checkpoint);
  }
  state.steps = steps;
  if (state.planned_steps.empty() || state.planned_steps.back() < steps)
    state.planned_steps.push_back(steps);
  LoadedModel loaded = checkpoint.empty() ? load_start(setup) : load(setup, checkpoint);
  if (!checkpoint.empty() && loaded.has_new_head)
    throw InputError(str(checkpoint,
                         ": the labels of the data are not those that it was trained on; "
                         "hint: restore the data, or start a run with init_from=",
                         checkpoint));
  state.base = loaded.base;
  if (setup.is_main() && checkpoint.empty()) {
    note_base(state.base);
    note_precision(setup.config.model.precision, loaded.checkpoint);
  }
  load_data(setup, *this, loaded);
  reference.emplace(setup, *loaded.model, checkpoint, data, state);
  make_learner(setup, *this, std::move(loaded.model));
  if (!checkpoint.empty()) load_optimizer(setup, *this);
  if (has_completions(setup.config.batch.trainer)) load_problems(setup, *this);
  check_equal_starts(setup.comm, *this);
  learner->place_weights();
  if (setup.config.batch.trainer == TrainerType::kDpo && !state.finished)
    pair_references = cohort::pair_references(
        setup, *this, [&] { return start_model(setup, learner->model().config()); });
}

}  // namespace cohort
