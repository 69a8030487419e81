#include "job/stage.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "core/allocator.h"
#include "core/log.h"
#include "core/progress.h"
#include "core/sizes.h"
#include "data/data_check.h"
#include "job/journal.h"
#include "job/preview.h"
#include "job/resources.h"
#include "job/trace_file.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"
#include "trainers/sampling.h"

namespace cohort {

namespace fs = std::filesystem;

namespace {

// Every so many steps the change of the weights is measured, which synchronizes with the device.
constexpr int64_t kMeasuredSteps = 10;

// Reason why a stage that was saved as finished has nothing left to do under `config`: its steps
// are done, or its last score reached eval.stop_at. "" if it has steps left.
std::string why_finished(const TrainConfig& config, const TrainState& state) {
  if (!state.finished) return "";
  if (state.step >= config.batch.steps)
    return str("step ", state.step, " of ", config.batch.steps, " is done");
  if (config.eval.stop_at <= 0 || config.batch.trainer == TrainerType::kPretrain) return "";
  const double score = last_score(state.report);
  if (!(score >= config.eval.stop_at)) return "";
  return str("its last score, ", score, ", reached eval.stop_at: ", config.eval.stop_at);
}

// Says that the base of new adapters must stay, if it is a checkpoint.
void note_base(const AdapterBase& base) {
  if (base.path.empty() || !path_exists(base.path + "/manifest.json")) return;
  logging::info("lora: the base model is the checkpoint ", base.path,
                ", which must stay; a run that trains on removes its old ones");
}

// Checksum over tensor names and contents.
uint64_t checksum_of(const std::vector<TensorSource>& sources) {
  uint64_t sum = 0;
  for (const TensorSource& source : sources) {
    const Tensor host = source.make().contiguous().to(Device{});  // one at a time
    sum = checksum(source.name, sum);
    sum = checksum({static_cast<const char*>(host.raw()), static_cast<size_t>(host.nbytes())}, sum);
  }
  return sum;
}

std::atomic<RunProgress> g_progress{RunProgress::kNothingToSave};
static_assert(std::atomic<RunProgress>::is_always_lock_free);
std::atomic<int64_t> g_watchdog{600000};  // milliseconds

// Ranks that are threads make the same change, at about the same time.
void change_progress(RunProgress from, RunProgress to) {
  g_progress.compare_exchange_strong(from, to);
}

}  // namespace

RunProgress run_progress() {
  return g_progress;
}

std::chrono::milliseconds watchdog_limit() {
  return std::chrono::milliseconds(g_watchdog);
}
void set_watchdog(const TrainConfig& config) {
  g_watchdog = static_cast<int64_t>(std::ceil(config.watchdog_minutes * 60000));
}

Stage::~Stage() {
  if (g_progress != RunProgress::kSaved) g_progress = RunProgress::kNothingToSave;  // it has failed
}

Stage::Stage(const StageSetup& setup) : setup_(setup) {
  g_progress = RunProgress::kNothingToSave;
  set_watchdog(config_);
  begin_activity("loading data and model");
  build_model();
  if (config_.batch.trainer != TrainerType::kPretrain) load_problems();
  check_equal_starts();
  if (setup.replay != nullptr) return;
  if (is_main()) remove_abandoned_steps(dir_ + "/journal", state_.step);
  if (config_.batch.trainer == TrainerType::kGrpo && config_.journal_mb > 0 && !state_.finished)
    journal_ = std::make_unique<Journal>(dir_ + "/journal", config_.journal_mb, comm_, setup.plan);
  if (!is_main()) return;
  if (setup.profile_steps > 0) {
    Trace attempt(device_);  // throws now, not after two steps
    // The first steps are not representative: memory is allocated, algorithms are chosen.
    const int64_t left = config_.batch.steps - state_.step;
    trace_begin_ = state_.step + std::clamp<int64_t>(left - setup.profile_steps, 0, 2);
    trace_end_ = std::min(trace_begin_ + setup.profile_steps, config_.batch.steps);
  }
  // Both are read before either is truncated.
  metrics_.emplace(dir_ + "/metrics.jsonl");
  completions_.emplace(dir_ + "/completions.jsonl");
  const int64_t kept = is_new() ? -1 : state_.step;
  for (auto* log : {&metrics_, &completions_}) (*log)->start(kept, state_.evaluated_step == kept);
  events_.emplace(dir_, kept + 1);
  // The process may have been killed after writing a checkpoint but before updating its link or
  // removing old ones. The one before stays until the next save: the first update may fail.
  const std::string checkpoints = dir_ + "/checkpoints";
  if (!resumed_from_.empty()) link_best(checkpoints, state_);
  if (resumed_from_ == checkpoint_path(checkpoints, state_.step) && setup.before.empty())
    remove_old_checkpoints(
        checkpoints, state_,
        std::max<int64_t>(config_.checkpoint.keep_last, state_.finished ? 1 : 2));
  reporter_.begin_stage(trainer_name(config_.batch.trainer), state_.step, config_.batch.steps);
}

// Sets the environment and the criterion, and loads eval.sets, of the files of the stage's start.
void Stage::load_problems() {
  environment_ = environment_of(config_.environment, config_.data, *data_.tokenizer);
  const std::string changed = changed_turns(config_.environment, config_.data, *data_.tokenizer);
  if (is_main() && !changed.empty())
    logging::info("environment: ", changed, "; such turns stay as they were sampled");
  EvalConfig eval = config_.eval;
  for (EvalSetConfig& set : eval.sets)
    if (const std::string* sum = state_.set_fingerprints.find_text(set.name);
        sum != nullptr && set.fingerprint.empty())
      set.fingerprint = *sum;
  correct_ = correctness_of(config_.eval.correct, config_.rewards, data_.task);
  sets_ =
      load_eval_sets({eval, config_, config_.rewards, correct_}, data_, model().config().context);
  state_.set_fingerprints = {};
  for (const EvalSet& set : sets_) state_.set_fingerprints.set(set.name, set.fingerprint);
  for (const EvalSet& set : sets_)
    if (is_main() && !set.too_long.empty())
      logging::info("data.too_long: eval.sets, ", set.name, ": ", set.too_long);
}

void Stage::build_model() {
  // Rank 0 names the checkpoint for all: the other hosts may see an older directory.
  const std::string checkpoints = dir_ + "/checkpoints";
  std::string resumed;
  if (is_main())
    resumed = fs::path(newest_checkpoint(checkpoints, setup_.before).value_or("")).filename();
  resumed = first_text(comm_, resumed);
  if (!resumed.empty()) {
    resumed = str(checkpoints, "/", resumed);
    if (!path_exists(resumed))
      throw InputError(str(resumed, ", from which rank 0 resumes, is not visible to rank ",
                           comm_.rank(),
                           "; hint: the run directory must be on a file system that "
                           "all hosts share"));
    state_ = load_state(resumed);
    saved_step_ = state_.step;
    resume_from(resumed);
  }
  first_step_ = state_.step;
  state_.steps = config_.batch.steps;
  if (state_.planned_steps.empty() || state_.planned_steps.back() < config_.batch.steps)
    state_.planned_steps.push_back(config_.batch.steps);
  LoadedModel loaded;
  if (!resumed.empty())
    loaded = load(resumed);
  else if (!config_.init_from.empty())
    loaded = load_start();
  state_.base = loaded.base;
  if (is_main() && resumed.empty()) note_base(state_.base);
  TrainConfig config = config_;
  if (config.data.fingerprint.empty()) config.data.fingerprint = state_.data_fingerprint;
  data_ = load_dataset(config, std::move(loaded.tokenizer));
  state_.data_fingerprint = data_.fingerprint;
  if (loaded.model == nullptr) {
    ModelConfig model = config_.model;
    model.vocab_size = data_.tokenizer->vocab_size();
    model.resolve();
    loaded.model = std::make_unique<Transformer>(model, config_.dtype,
                                                 static_cast<uint64_t>(config_.seed), device_);
  }
  const int64_t context = loaded.model->config().context;
  const DataLengths lengths = check_data(config_, data_, context);
  check_sampling(config_.sampling, config_.batch.trainer, *data_.tokenizer, lengths.shortest_prompt,
                 context);
  if (is_main()) {
    log_data_usage(config_, data_, lengths);
    if (!state_.finished) {
      if (const std::string leak = held_out_leak(data_, setup_.earlier); !leak.empty())
        logging::warn(leak);
      for (const std::string& warning : config_.warnings()) logging::warn(warning);
    }
  }
  if (config_.batch.trainer == TrainerType::kGrpo && config_.grpo.beta > 0) load_reference(loaded);
  make_learner(std::move(loaded.model));
  engine_ = std::make_unique<Engine>(learner_->model(), config_.rollout);
  set_memory_callbacks();
  if (!resumed.empty())
    learner_->optimizer().load(SafetensorsFile(training_folder(resumed) + "/optimizer.safetensors"),
                               state_.updates);
}

StepJournal* Stage::journal() {
  return setup_.replay != nullptr ? setup_.replay : journal_.get();
}

void Stage::make_learner(std::unique_ptr<Transformer> model) {
  if (device_.is_cuda())
    pinned_ = optimizer_bytes(config_.optimizer, model->config(), config_.dtype, device_).pinned;
  if (const int64_t free = free_memory(Device{}); pinned_ > free)
    throw InputError(str("optimizer.place: host needs ", mib(pinned_),
                         " of page-locked memory, and ", mib(free),
                         " are free; hint: optimizer.place=device, optimizer.moments=bf16, or a "
                         "smaller optimizer.host_units"));
  Stopwatch clock;
  learner_ = std::make_unique<Learner>(std::move(model), config_.optimizer, comm_,
                                       static_cast<uint64_t>(config_.seed));
  if (pinned_ > 0 && is_main())
    logging::info("optimizer.place: host: ", mib(pinned_), " of page-locked memory, locked in ",
                  score_text(clock.lap(), 1), " s");
}

// Tells once if updates are so small that they mostly wait for optimizer state.
void Stage::watch_streaming(const Metrics& metrics) {
  if (pinned_ == 0 || state_.step != first_step_ + 3) return;
  const double streaming = streaming_seconds(pinned_),
               update = metrics.at("time/update") / static_cast<double>(updates_per_step(config_));
  if (const std::string note = slow_streaming(streaming, update - streaming); !note.empty())
    logging::info(note);
}

void Stage::set_memory_callbacks() {
  learner_->set_memory_callbacks(
      {.release = [this] { engine_->release_cache(); },
       .shrunk =
           [this](int64_t before, int64_t now, const std::string& error) {
             if (!is_main()) return;
             logging::warn("step ", state_.step + 1,
                           ": out of memory; micro_batch_tokens: ", before, " -> ", now,
                           ", and the update starts again (", error, ")");
             setup_.record_micro_batch(now);
           }});
}

LoadedModel Stage::load(const std::string& checkpoint) const {
  return load_model(checkpoint, config_.model, config_.data, config_.dtype, device_);
}

// The model of init_from.
LoadedModel Stage::load_start() const {
  return load_found(config_.init_from, [&](const std::string& from) { return load(from); });
}

// The reference is the model at the start of the stage, moved by ref_sync_every. A checkpoint has
// it if beta was above 0.
void Stage::load_reference(const LoadedModel& loaded) {
  if (loaded.model->config().lora.rank > 0) return load_reference_adapters(*loaded.model);
  std::string origin;  // empty: the reference comes from the checkpoint or the stage's start
  const auto make = [&](std::optional<uint64_t> seed) {
    reference_ =
        std::make_unique<Transformer>(loaded.model->config(), config_.dtype, seed, device_);
  };
  const std::string training = resumed_from_.empty() ? "" : training_folder(resumed_from_);
  if (resumed_from_.empty()) {
    make(std::nullopt);
    reference_->copy_from(*loaded.model);
  } else if (SafetensorsFolder::exists(training, "reference")) {
    make(std::nullopt);
    load_weights(*reference_, training, "reference");
  } else if (config_.init_from.empty()) {
    make(static_cast<uint64_t>(config_.seed));
    origin = str("the new model of seed ", config_.seed);
  } else {
    try {
      reference_ = load_start().model;
    } catch (const InputError& e) {
      throw InputError(str("beta: ", resumed_from_,
                           " has no reference, as the stage had beta 0 when it began, and the "
                           "weights it began with cannot be read (",
                           e.what(), "); hint: resume with beta=0, or restore ",
                           config_.init_from));
    }
    origin = str("read from ", config_.init_from, ", with which the stage began");
  }
  if (is_main() && !origin.empty())
    logging::info("beta: ", resumed_from_, " has no reference; it is ", origin);
}

// The reference of adapters is their base, or the adapters of the stage's start, which a checkpoint
// has if that was so when it was saved.
void Stage::load_reference_adapters(const Transformer& model) {
  if (config_.grpo.reference == ReferenceType::kBase) return;
  if (resumed_from_.empty()) {
    start_adapters_ = model.adapters();
    return;
  }
  const std::string saved = training_folder(resumed_from_) + "/reference.safetensors";
  start_adapters_ =
      path_exists(saved) ? load_adapter_tensors(model, saved) : load_start().model->adapters();
}

ReferencePolicy Stage::reference() {
  if (config_.batch.trainer != TrainerType::kGrpo || config_.grpo.beta == 0) return {};
  if (reference_ != nullptr) return {reference_.get()};
  if (start_adapters_.empty()) return {&model(), Adapters::kOff};
  return {&model(), Adapters::kOn, &start_adapters_};
}

// Moves the reference towards the policy if it is due at the end of a step.
void Stage::move_reference() {
  const int64_t every = config_.grpo.ref_sync_every;
  if (every == 0 || (state_.step + 1) % every != 0 || reference().model == nullptr) return;
  const auto weights_of = [](const Transformer& model) {
    std::vector<Tensor> out;
    for (const NamedParameter& p : model.parameters()) out.push_back(p.value);
    return out;
  };
  const double alpha = config_.grpo.ref_sync_alpha;
  if (reference_ != nullptr)
    mix_weights(weights_of(*reference_), weights_of(model()), alpha);
  else
    mix_weights(start_adapters_, model().adapters(), alpha);
}

// Determines if a saved stage has anything left to do.
void Stage::resume_from(const std::string& checkpoint) {
  resumed_from_ = checkpoint;
  resumed_updates_ = state_.updates;
  const char* name = trainer_name(config_.batch.trainer);
  const std::string done = why_finished(config_, state_);
  if (!done.empty()) {
    const std::string hint = str("; to train on, resume with ", setup_.steps_key,
                                 "=N or another eval.stop_at, or start a run with init_from");
    if (is_main())
      logging::info(name, " is finished, at step ", state_.step, ": ", done,
                    setup_.fixed.empty() ? hint : "");
    return;
  }
  // The planned steps of the saved stage if they are known and differ from those now planned; else
  // 0. Earlier versions did not save them.
  int64_t planned = state_.steps == 0 && state_.finished ? state_.step : state_.steps;
  if (planned == config_.batch.steps) planned = 0;
  if (!setup_.fixed.empty() && (state_.finished || planned > 0))
    throw InputError(
        str(name, " has ended at step ", state_.step, " and cannot train on: ", setup_.fixed));
  state_.finished = false;
  if (!is_main()) return;
  if (planned > 0)
    logging::info("steps: ", planned, " -> ", config_.batch.steps, "; from step ", state_.step,
                  " on the learning rate follows the schedule of ", config_.batch.steps, " steps");
  logging::info("resuming ", name, " at step ", state_.step, " from ", checkpoint);
}

// Throws InputError on every rank, naming the first rank and part that differ from those of rank 0.
void Stage::check_equal_starts() {
  if (comm_.size() == 1) return;
  // Frozen weights have a fingerprint.
  const auto weights = [](const Transformer& model) {
    std::vector<TensorSource> out;
    for (const NamedParameter& p : model.parameters())
      if (p.trained()) out.push_back({.name = p.name, .make = [&p] { return p.value; }});
    return checksum_of(out);
  };
  std::string data = data_.fingerprint;
  for (const EvalSet& set : sets_) data += set.fingerprint;
  for (const auto& [name, content] : data_.tokenizer->files()) data += name + content;
  std::vector<std::pair<const char*, uint64_t>> parts{
      {"weights", weights(model())},
      {"optimizer state", checksum_of(learner_->optimizer().state_sources())},
      {"data", checksum(data)}};
  if (reference_ != nullptr) parts.emplace_back("reference weights", weights(*reference_));
  const auto ranks = static_cast<size_t>(comm_.size()), count = parts.size();
  std::vector<std::string> all(ranks * count);
  for (size_t i = 0; i < count; ++i)
    all[static_cast<size_t>(comm_.rank()) * count + i] = str(parts[i].second);
  all = gather_texts(comm_, all);
  for (size_t rank = 1; rank < ranks; ++rank)
    for (size_t i = 0; i < count; ++i)
      if (all[rank * count + i] != all[i])
        throw InputError(str("the ranks do not start alike: rank ", rank, " has other ",
                             parts[i].first,
                             " than rank 0; hint: all hosts must see the same files and run the "
                             "same build on the same kind of processor"));
}

void Stage::log_metrics(const Json& line) {
  if (!metrics_) return;
  metrics_->write(line.dump());
  events_->write(line);
}

bool Stage::stop_requested() {
  double stop = setup_.stop.load();
  reduce_in_place(comm_, {&stop}, Reduce::kMax);
  return stop > 0;
}

bool Stage::more() {
  const bool missed = state_.step > 0 && evaluation_due() && state_.evaluated_step != state_.step &&
                      !interrupted_ && !state_.finished;
  if ((missed || (is_new() && config_.eval.at_start)) && evaluate() &&
      state_.best_step == state_.step && !reached_)
    save(false);
  const std::chrono::duration<double, std::ratio<60>> since =
      std::chrono::steady_clock::now() - saved_at_;
  const double minutes = config_.checkpoint.every_minutes;
  // A checkpoint is due by the clock of rank 0.
  double stop = setup_.stop.load(), due = is_main() && minutes > 0 && since.count() >= minutes;
  if (comm_.size() > 1) reduce_in_place(comm_, {&stop, &due}, Reduce::kMax);
  interrupted_ = interrupted_ || stop > 0;
  const bool continues =
      state_.step < config_.batch.steps && !interrupted_ && !reached_ && !state_.finished;
  if (continues && due > 0 && saved_step_ != state_.step) save(false);
  if (continues && state_.step == trace_begin_) trace_.emplace(device_);
  if (continues && is_main() && (state_.step + 1) % kMeasuredSteps == 0)
    weights_ = learner_->optimizer().sample_weights();
  if (continues) g_progress = RunProgress::kStep;
  begin_activity(continues ? "training" : "ending the stage");
  step_watch_.lap();
  return continues;
}

// Passes over the training data so far, which may be a fraction; NaN: the data are endless.
double Stage::epoch() const {
  const auto seen = static_cast<double>(state_.data_position);
  if (data_.task != nullptr) return std::nan("");
  if (data_.train != nullptr) return seen / static_cast<double>(data_.train->size());
  double tokens = 0;
  for (const TokenStream& text : data_.train_text) tokens += static_cast<double>(text.size());
  return seen * static_cast<double>(learner_->model().config().context) / tokens;
}

// Adds |dw| and |dw| / |w| of the step that has ended; NaN: it is not measured. Warns if steps at
// more than a small learning rate hardly change the weights.
void Stage::add_update_size(Metrics& metrics, double rate) {
  constexpr int64_t kSteps = 50;
  constexpr double kTiny = 1e-6, kPeakFraction = 0.1;
  Moments change, weights;
  if (!weights_.empty()) {
    const std::vector<double> now = learner_->optimizer().sample_weights();
    for (size_t i = 0; i < now.size(); ++i) {
      change.add(now[i] - weights_[i]);
      weights.add(weights_[i]);
    }
    weights_.clear();
  }
  const bool measured = change.count > 0;
  const double norm = measured ? std::sqrt(change.squares) : std::nan(""),
               ratio = norm / std::sqrt(weights.squares);
  metrics.add("update/norm", norm);
  metrics.add("update/relative", ratio);
  if (!measured || tiny_updates_ < 0 || metrics.find("num_updates") == 0.0 ||
      rate < kPeakFraction * config_.optimizer.learning_rate)
    return;
  tiny_updates_ = ratio < kTiny ? tiny_updates_ + kMeasuredSteps : 0;
  if (tiny_updates_ < kSteps) return;
  warn(str("step ", state_.step, ": the last ", tiny_updates_,
           " steps have each changed the weights by less than 1e-6 of their norm (", ratio,
           " in this one, measured every ", kMeasuredSteps, "); hint: a higher learning_rate"));
  tiny_updates_ = -1;
}

void Stage::end_step(const Metrics& metrics) {
  const double rate = learning_rate();
  move_reference();  // first: a failure leaves the state of the step before
  const double seconds = step_watch_.lap("step");
  state_.seconds += seconds;
  state_.total_tokens += metrics.at("num_tokens");
  state_.step += 1;
  state_.updates = learner_->optimizer().updates();
  if (is_main()) {
    watch_streaming(metrics);
    if (const auto reward = metrics.find("reward")) state_.report["curve"].push_back(*reward);
    Metrics all = metrics;
    add_update_size(all, rate);
    all.add("epoch", epoch());
    all.add("total_tokens", state_.total_tokens);
    all.add("step_time", seconds);
    all.add("tokens_per_second", metrics.at("num_tokens") / seconds);
    if (state_.step % config_.log_every == 0 || state_.step == config_.batch.steps) {
      Json line;
      line.set("step", state_.step).set("time", utc_now());
      for (const auto& [name, value] : all) line.set(name, value);
      log_metrics(line);
    }
    reporter_.step(state_.step, all);
    if (state_.step == trace_end_) write_trace();
  }
  if (state_.step == config_.batch.steps) return;  // finish() evaluates and saves
  if (evaluation_due()) evaluate();
  if (reached_ || interrupted_) return;  // finish() saves
  const int64_t every = config_.checkpoint.every;
  if (state_.best_step == state_.step || (every > 0 && state_.step % every == 0)) save(false);
}

Evaluation Stage::evaluation() {
  Evaluation out{.step = state_.step, .score = std::nan("")};
  Stopwatch clock;
  // Before the first step a signal has nothing to save, and ends the process.
  const std::atomic<bool>* stop = is_new() ? nullptr : &setup_.stop;
  if (config_.batch.trainer == TrainerType::kPretrain) {
    out.measure = "validation loss";
    if (data_.held_out_text.size() < 2) return out;
    const double loss =
        evaluate_text(model(), data_.held_out_text, config_.eval.tokens,
                      learner_->micro_batch_tokens(config_.batch.micro_batch()), comm_, stop);
    out.metrics = {{"val_loss", loss}};
    out.score = -loss;
  } else {
    out.measure = correct_.measure();
    out.rule = correct_.rule();
    ProblemEvaluation problems{engine(), data_, correct_, config_, state_.step, stop};
    problems.dialogue = dialogue();
    if (!data_.held_out.empty()) {
      ProblemScores scores = evaluate_problems(problems, comm_);
      out.metrics = std::move(scores.metrics);
      out.samples = std::move(scores.samples);
      out.score = out.metrics.front().second;
    }
    for (const EvalSet& set : sets_) {
      if (set.name == config_.eval.best) out.best_set = std::ssize(out.sets);
      ProblemScores scores = evaluate_set(set, problems, comm_);
      out.sets.push_back({set.name, str(set.name, "/", set.correct.measure()),
                          std::move(scores.metrics), std::move(scores.samples)});
    }
    if (out.empty()) return out;
  }
  out.seconds = clock.lap("evaluation");
  return out;
}

// Every rank takes part and has the score; rank 0 writes. Returns false if it was stopped.
bool Stage::evaluate() {
  if (setup_.replay != nullptr) return true;
  begin_activity("evaluating");
  learner_->check_weights();
  change_progress(RunProgress::kStep, RunProgress::kEvaluation);
  std::optional<Evaluation> result;
  try {
    result = evaluation();
  } catch (const EvaluationStopped&) {
    interrupted_ = true;
  }
  change_progress(RunProgress::kEvaluation, RunProgress::kStep);
  if (!result) return false;
  record_score(*result);
  report_score(*result);
  return true;
}

void Stage::report_score(const Evaluation& result) {
  if (!is_main() || result.empty()) return;
  log_metrics(evaluation_json(result));
  for (const Json& line : sample_lines(result)) log_completion(line.dump());
  if (!result.metrics.empty()) reporter_.message(evaluation_text(result));
  for (const SetScores& set : result.sets) reporter_.message(set_text(result, set));
  if (warned_ || !std::isnan(result.score) || result.metrics.empty() || result.rule.empty()) return;
  if (result.failed() > 0) return;
  warned_ = true;
  logging::warn(result.measure, " is not measured: ", correct_.name, " applies to none of the ",
                data_.held_out.size(), " held-out problems; hint: another eval.correct.reward");
}

// Warns of a drop to less than half of the best score that is larger than sampling noise.
void Stage::warn_of_collapse(const Evaluation& evaluation) {
  const double best = state_.best, score = evaluation.best_score();
  if (evaluation.rule.empty() || state_.best_step < 0 || std::isnan(score) || std::isnan(best))
    return;
  const double problems = evaluation.best_metrics().at("problems");
  const double error = std::sqrt((best * (1 - best) + score * (1 - score)) / problems);
  const bool collapsed = score < best / 2 && best - score > 2 * error;
  if (collapsed && !collapsed_)
    warn(str("step ", state_.step, ": ", evaluation.best_measure(), " has collapsed to ",
             score_text(score, 4), "; hint: a lower learning_rate"));
  collapsed_ = collapsed;
}

// Ties in the score are broken by the lower loss; an unmeasured score ranks below all others.
bool Stage::is_best(double score, double loss) const {
  if (std::isnan(score) && std::isnan(loss)) return false;
  if (state_.best_step < 0) return true;
  const auto rank = [](double value) { return std::isnan(value) ? -HUGE_VAL : value; };
  if (rank(score) != rank(state_.best)) return rank(score) > rank(state_.best);
  return !std::isnan(loss) && !(loss >= state_.best_loss);
}

void Stage::record_score(const Evaluation& evaluation) {
  state_.evaluated_step = state_.step;
  if (evaluation.empty()) return;  // nothing is held out
  // Scores of another measure are not comparable.
  const Json& last = state_.report.get_or_null("last");
  if (const Json& measure =
          last.get_or_null(last.find("best_measure") != nullptr ? "best_measure" : "measure");
      !measure.is_null() && measure.as_string() != evaluation.best_measure())
    state_.best_step = -1;
  const bool is_whole = evaluation.failed() == 0;
  if (is_whole) warn_of_collapse(evaluation);
  const double score = evaluation.best_score();
  const double loss = evaluation.metrics.find("val_loss").value_or(std::nan(""));
  if (is_whole && is_best(score, loss)) {
    state_.best = score;
    state_.best_loss = loss;
    state_.best_step = state_.step;
  }
  reached_ = is_whole && config_.eval.stop_at > 0 && evaluation.score >= config_.eval.stop_at &&
             config_.batch.trainer != TrainerType::kPretrain;
  if (state_.report.find("first") == nullptr) state_.report.set("first", score_json(evaluation));
  state_.report.set("last", score_json(evaluation));
}

void Stage::write_trace() {
  const std::string path = dir_ + "/trace.json";
  replace_file(path, chrome_trace(trace_->finish()));
  trace_.reset();
  reporter_.message(str("trace of steps ", trace_begin_ + 1, " to ", state_.step, ": ", path,
                        " (for https://ui.perfetto.dev or chrome://tracing)"));
}

void Stage::save(bool finished) {
  if (setup_.replay != nullptr) return;
  Stopwatch clock;
  begin_activity("saving a checkpoint");
  if (journal_) journal_->flush();
  learner_->check_weights();  // checkpoints hold finite numbers only
  if (is_main() && !path_exists(dir_))
    throw Error(str("the run directory ", dir_,
                    " is gone: it was removed or renamed during training, and nothing can be "
                    "saved; hint: start again"));
  state_.finished = finished;
  write_files(dir_);
  saved_at_ = std::chrono::steady_clock::now();
  comm_.barrier();
  clock.lap("checkpoint");
}

void Stage::write_files(const std::string& dir) {
  saved_step_ = state_.step;
  if (is_main())
    save_checkpoint(dir + "/checkpoints",
                    {learner_->model(), reference_.get(), *data_.tokenizer, learner_->optimizer(),
                     state_, start_adapters_.empty() ? nullptr : &start_adapters_, &config_.data},
                    config_.checkpoint.keep_last);
}

std::string Stage::save_after_failure() {
  if (!is_main() || is_new() || saved_step_ == state_.step) return "";
  if (learner_->optimizer().updates() != state_.updates)
    return str("; the updates that step ", state_.step + 1, " has made are lost");
  try {
    learner_->check_weights();
    write_files(dir_);
  } catch (const Error& e) {
    return str("; step ", state_.step, " could not be saved: ", e.what());
  }
  return str("; step ", state_.step, " is saved");
}

void Stage::warn(const std::string& warning) const {
  if (!is_main() || setup_.replay != nullptr) return;
  std::string best;
  // A score of 0 makes no step better than another.
  if (state_.best_step >= 0 && state_.best != 0) {
    const std::string checkpoint = checkpoint_path(dir_ + "/checkpoints", state_.best_step);
    std::error_code ignored;
    best = str("; best so far: step ", state_.best_step, " (",
               std::isnan(state_.best) ? "validation loss " + score_text(state_.best_loss, 4)
                                       : score_text(state_.best, 4),
               "), ", fs::exists(checkpoint, ignored) ? checkpoint : "which is not saved");
  }
  logging::warn(warning, best);
}

StageEnd Stage::finish() {
  if (setup_.replay != nullptr) return StageEnd::kFinished;
  if (trace_) write_trace();  // the stage ends before the steps that were to be traced
  bool interrupted =
      interrupted_ && state_.step < config_.batch.steps && !reached_ && !state_.finished;
  if (!interrupted && !state_.finished &&
      (state_.evaluated_step != state_.step || state_.report.find("last") == nullptr))
    interrupted = !evaluate();
  if (interrupted) {
    if (saved_step_ != state_.step) save(false);
  } else if (!state_.finished) {
    save(true);
    if (is_main() && config_.batch.trainer == TrainerType::kGrpo)
      reporter_.message(final_report(state_.report));
  }
  if (is_main()) {
    const AllocatorStats memory = allocator(device_).stats();
    logging::record(str("memory of ", device_.str(), ": at most ", mib(memory.peak_bytes),
                        " in use, ", mib(memory.reserved_bytes), " held from the system"));
    reporter_.end_stage();
    for (auto* log : {&metrics_, &completions_}) (*log)->finish();
  }
  g_progress = RunProgress::kSaved;
  return interrupted ? StageEnd::kInterrupted : StageEnd::kFinished;
}

}  // namespace cohort
