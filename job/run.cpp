#include "job/run.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/allocator.h"
#include "core/log.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "job/journal.h"
#include "job/resources.h"
#include "rl/process_spawner.h"
#include "trainers/across_ranks.h"

namespace cohort {

namespace fs = std::filesystem;

namespace {

// The device of this process.
Device device_of(const TrainConfig& config, const ProcessGroup* group) {
  if (group == nullptr || config.device == "cpu") return parse_device(config.device, "device");
  const RankInfo& info = group->info();
  parse_device("cuda", "device");  // throws if there is none at all
  const int count = cuda_device_count();
  // A launcher may have hidden the other ranks' GPUs from this one.
  const int index = count == 1 ? 0 : info.local_rank;
  if (index >= count)
    throw InputError(str("rank ", info.rank, " is number ", index, " of its host, which has ",
                         count, " usable CUDA devices; hint: one rank per GPU"));
  return Device::cuda(index);
}

// All keys with their values, as overrides name them.
Json fields_of(const RunPlan& plan) {
  Json out;
  for (const auto& [key, value] :
       plan.stages.size() == 1 ? config_fields(plan.stages[0]) : config_fields(plan))
    out.set(key, value);
  return out;
}

// "'steps: 4'" and "'steps: 5'" for the first key in which they differ.
std::optional<std::pair<std::string, std::string>> find_difference(
    const Json& a, const Json& b, bool (*ignores)(std::string_view key) = nullptr) {
  const auto shown = [](const Json& fields, const std::string& key) {
    const Json* value = fields.find(key);
    return value == nullptr ? "no " + key : str("'", key, ": ", value->as_string(), "'");
  };
  for (const Json* fields : {&a, &b})
    for (const auto& [key, value] : fields->as_object())
      if (auto in_a = shown(a, key), in_b = shown(b, key);
          in_a != in_b && (ignores == nullptr || !ignores(key)))
        return std::pair(std::move(in_a), std::move(in_b));
  return std::nullopt;
}

// Ranks with different keys would diverge, or silently train a mixture.
void check_equal_plans(const RunPlan& plan, ProcessGroup& group) {
  const Json own = fields_of(plan);
  const Json first = parse_json(group.broadcast("configuration", own.dump()), "configuration");
  const auto keys = find_difference(first, own);
  const std::string problem =
      group.combine("different configuration",
                    keys ? str("the ranks have different configurations: rank 0 has ", keys->first,
                               ", rank ", group.rank(), " has ", keys->second)
                         : "",
                    [](const std::vector<std::string>& all) {
                      const auto first = std::ranges::find_if_not(all, &std::string::empty);
                      return first == all.end() ? "" : *first;
                    });
  if (!problem.empty()) throw InputError(problem);
}

// True for a key that may differ between the starts of one run with --continue, of any stage.
bool changes_no_update(std::string_view key) {
  constexpr std::string_view kKeys[] = {"name",
                                        "output_dir",
                                        "steps",
                                        "device",
                                        "num_threads",
                                        "ranks",
                                        "log_",
                                        "journal_mb",
                                        "rollout.",
                                        "watchdog_minutes",
                                        "kl_check_every",
                                        "max_concurrent",
                                        "checkpoint.",
                                        "eval.",
                                        "data.cache_dir",
                                        "data.fingerprint",
                                        "micro_batch_tokens",
                                        "model.recompute",
                                        "sharding",
                                        "optimizer.place",
                                        "optimizer.host_units"};
  if (key.starts_with("stages.")) key.remove_prefix(key.find('.', 7) + 1);
  return std::ranges::any_of(kKeys, [&](std::string_view known) { return key.starts_with(known); });
}

// True if there is a run in `dir`; false if there is nothing, or what is left of a run that ended
// before it had a configuration. Throws InputError if there is anything else.
bool holds_run(const std::string& dir) {
  if (path_exists(dir + "/config.yaml")) return true;
  for (const std::string& name : list_directory(dir))
    if (name != ".lock" && name != "log.txt" && name != "workers.log" &&
        name != "rewards.log" &&                         // its name in earlier versions
        name != "data.jsonl" && name != "eval.jsonl" &&  // data in memory
        !name.starts_with("config.yaml.tmp-"))
      throw InputError(str("output_dir: ", dir, " holds no run, but ", name,
                           "; hint: set it to a folder of its own"));
  return false;
}

// Starts the watchdog and the programs of a plan. Throws InputError if `group` cannot run it.
void prepare(const RunPlan& plan, ProcessGroup* group) {
  for (const TrainConfig& stage : plan.stages)
    if (const std::string missing = stage.missing_function(); !missing.empty())
      throw InputError(missing);
  set_watchdog(plan.stages[0]);
  begin_activity("preparing the run");
  prepare_programs(plan);
  for (const TrainConfig& config : plan.stages) {
    const int64_t lanes = config.optimizer.reduction_lanes,
                  ranks = group == nullptr ? config.ranks : group->size();
    if (lanes % ranks != 0)
      throw InputError(str("reduction_lanes: ", lanes, " lanes cannot be divided by ", ranks,
                           " ranks; hint: reduction_lanes=0, or a power of two of ranks"));
  }
  if (group == nullptr) return;
  for (const TrainConfig& config : plan.stages) {
    if (config.ranks != 1)
      throw InputError(str("ranks: ", config.ranks, " threads were asked for, in a run of ",
                           group->size(), " processes; hint: ranks: 1"));
    if (config.device != "cpu" && config.device != "cuda")
      throw InputError(
          str("device: expected cuda (every process takes the GPU of its local rank) "
              "or cpu, got '",
              config.device, "' in a run of ", group->size(), " processes"));
  }
  check_equal_plans(plan, *group);
}

// True if memory decides about a stage: micro_batch_tokens: auto, or optimizer.place: auto on a
// GPU.
bool has_auto(const RunPlan& plan) {
  return std::ranges::any_of(plan.stages, [](const TrainConfig& config) {
    return !config.batch.micro_batch_tokens ||
           (config.device != "cpu" && (config.optimizer.storage.place == StatePlace::kAuto ||
                                       config.optimizer.sharding == Sharding::kAuto));
  });
}

// Chooses what is `auto` for the rank with the least memory. Rank 0, which has a preview, decides;
// every rank calls it. Returns the choices, human-readable.
std::string choose_for_ranks(RunPlan& plan, const std::vector<StagePreview>& preview,
                             ProcessGroup* group) {
  for (TrainConfig& config : plan.stages) {
    if (config.device != "cpu") continue;
    OptimizerConfig& optimizer = config.optimizer;
    if (optimizer.storage.place == StatePlace::kAuto) optimizer.storage.place = StatePlace::kDevice;
    if (optimizer.sharding == Sharding::kAuto) optimizer.sharding = Sharding::kNone;
  }
  if (!has_auto(plan)) return "";
  const auto comm =
      group == nullptr ? make_single_communicator() : make_communicator(*group, Device{});
  const double host_ranks = group == nullptr ? 1 : group->info().local_size;
  std::string chosen;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    TrainConfig& config = plan.stages[i];
    const auto ranks = static_cast<double>(config.ranks);
    const Device gpu = device_of(config, group);
    const int64_t nccl = gpu.is_cuda() ? nccl_bytes(comm->size()) : 0;
    // Minus the free bytes.
    double device = -static_cast<double>(free_memory(gpu) - nccl) / ranks,
           host = -static_cast<double>(free_memory(Device{})) / ranks / host_ranks;
    reduce_in_place(*comm, {&device, &host}, Reduce::kMax);
    OptimizerStorage& storage = config.optimizer.storage;
    double tokens = 0, recompute = 0, sharding = 0, place = 0, units = 0;
    if (!preview.empty()) {
      const MemoryChoice choice = choose_by_memory(
          config, preview[i], std::max<int64_t>(config.ranks, comm->size()),
          {.device = static_cast<int64_t>(-device), .host = static_cast<int64_t>(-host)});
      for (const auto& [key, line] : {std::pair("sharding", choice.sharding),
                                      {"optimizer.place", choice.place},
                                      {"micro_batch_tokens", choice.micro_batch}})
        if (!line.empty())
          chosen += str(chosen.empty() ? "" : "\n", trainer_name(config.batch.trainer), ": ", key,
                        ": auto: ", line);
      tokens = static_cast<double>(config.batch.micro_batch());
      recompute = static_cast<double>(config.model.recompute);
      sharding = static_cast<double>(config.optimizer.sharding);
      place = static_cast<double>(storage.place);
      units = static_cast<double>(storage.host_units);
    }
    reduce_in_place(*comm, {&tokens, &recompute, &sharding, &place, &units});
    config.batch.micro_batch_tokens = static_cast<int64_t>(tokens);
    config.model.recompute = static_cast<Recompute>(static_cast<int>(recompute));
    config.optimizer.sharding = static_cast<Sharding>(static_cast<int>(sharding));
    storage.place = static_cast<StatePlace>(static_cast<int>(place));
    storage.host_units = static_cast<int64_t>(units);
  }
  return chosen;
}

// The first update after a resume is not finite: the checkpoint may be bad even if undamaged.
class BadStart : public NonFiniteError {
 public:
  BadStart(const std::string& message, std::string path)
      : NonFiniteError(message), checkpoint(std::move(path)) {}
  const std::string checkpoint;
};

// Throws for errors that would stop a stage at its start and need no loaded data or model.
void check_stages(const RunPlan& plan) {
  for (const TrainConfig& stage : plan.stages) {
    parse_device(stage.device, "device");
    if (has_completions(stage.batch.trainer))
      correctness_of(stage.eval.correct, stage.rewards,
                     stage.data.task.empty() ? nullptr : &find_task(stage.data.task), false);
  }
}

}  // namespace

bool prepare_programs(const RunPlan& plan) {
  bool any = false;
  for (const TrainConfig& stage : plan.stages) {
    any = any || std::ranges::any_of(stage.rewards, is_program) || stage.environment.has_program();
    // Before any program of an earlier stage is started.
    ProcessSpawner::hide_variables(stage.environment.server.variables());
    for (const RewardConfig& reward : stage.rewards)
      ProcessSpawner::hide_variables(reward.server.variables());
  }
  if (any) process_spawner();
  return any;
}

Run::Run(RunPlan plan, std::string dir, ProcessGroup* group)
    : plan_(std::move(plan)),
      recorded_plan_(plan_),
      journal_plan_(journal_plan(plan_)),
      dir_(std::move(dir)),
      group_(group) {
  if (!path_exists(dir_))
    throw InputError(str("the run directory ", dir_,
                         " is not visible from this host; hint: set output_dir to a file system "
                         "that all hosts share"));
  for (TrainConfig& stage : plan_.stages)
    for (RewardConfig& reward : stage.rewards)
      reward.answers =
          dir_ + (is_main() ? "/judge.jsonl" : str("/judge.rank-", group_->rank(), ".jsonl"));
  if (prepare_programs(plan_)) process_spawner().set_log(dir_ + "/workers.log");
  if (!is_main()) return;
  lock_ = lock_run_directory(dir_);
  const std::string path = dir_ + "/log.txt";
  log_ = std::make_shared<KeptLines>(path);
  if (const std::string why = log_->open(); !why.empty())
    throw InputError(str("cannot write the log file ", path, ": ", why));
  logging::set_file([log = log_](const std::string& line) {
    if (const std::string warning = log->write(line); !warning.empty()) throw Error(warning);
  });
}

Run Run::create(RunPlan plan, ProcessGroup* group) {
  return start(std::move(plan), group, create_run_directory);
}

Run Run::start(RunPlan plan, ProcessGroup* group,
               std::string (*make_directory)(const std::string& wanted)) {
  hold_nothing_out_of_few(plan);
  prepare(plan, group);
  if (group != nullptr && group->rank() != 0) {
    choose_for_ranks(plan, {}, group);
    return Run(plan, group->broadcast("run directory", {}), group);
  }
  // Bad input is an error before the directory is created.
  check_adapters_have_model(plan);
  for (const TrainConfig& stage : plan.stages) parse_device(stage.device, "device");
  std::vector<StagePreview> preview = preview_plan(plan);
  const std::string chosen = choose_for_ranks(plan, preview, group);
  Run run(plan, make_directory(plan.output_dir), group);
  if (!chosen.empty()) logging::info(chosen);
  for (const StagePreview& stage : preview) {
    if (!stage.random_start.empty())
      logging::write(stage.is_new_model_meant ? logging::Level::kInfo : logging::Level::kWarn,
                     stage.random_start);
    for (const std::string& warning :
         {stage.stop_warning, stage.template_warning, stage.rate_warning})
      if (!warning.empty()) logging::warn(warning);
    if (!stage.reward_warning.empty()) logging::info(stage.reward_warning);
  }
  run.preview_ = std::move(preview);
  replace_file(run.dir_ + "/config.yaml", dump_plan(run.recorded_plan_));
  if (group != nullptr) group->broadcast("run directory", run.dir_);
  return run;
}

Run Run::continue_or_create(RunPlan plan, ProcessGroup* group) {
  const std::string dir = plan.output_dir;
  // Rank 0 decides: the others may not see yet what an earlier start has written.
  std::string found;
  if (group == nullptr || group->rank() == 0) {
    wait_for_run_directory(dir, std::chrono::seconds(30));
    found = holds_run(dir) ? "resume" : "start";
  }
  if (group != nullptr) found = group->broadcast("resume or start", found);
  if (found == "start") return start(std::move(plan), group, make_run_directory);
  const RunPlan recorded = load_plan(dir + "/config.yaml", {});
  for (size_t i = 0; i < std::min(plan.stages.size(), recorded.stages.size()); ++i) {
    std::optional<double>& fraction = plan.stages[i].data.jsonl.held_out_fraction;
    if (!fraction) fraction = recorded.stages[i].data.jsonl.held_out_fraction;
  }
  if (const auto keys = find_difference(fields_of(recorded), fields_of(plan), changes_no_update))
    throw InputError(str("--continue: ", dir, " holds a run of another configuration: it has ",
                         keys->first, ", this one ", keys->second,
                         "; hint: another output_dir, or --resume with the key"));
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    TrainConfig& config = plan.stages[i];
    const TrainConfig& before = recorded.stages[i];
    if (config.data.fingerprint.empty()) config.data.fingerprint = before.data.fingerprint;
    if (config.optimizer.sharding == Sharding::kAuto)
      config.optimizer.sharding = before.optimizer.sharding;
    OptimizerStorage& storage = config.optimizer.storage;
    if (storage.place == StatePlace::kAuto) {
      storage.place = before.optimizer.storage.place;
      storage.host_units = before.optimizer.storage.host_units;
    }
    if (config.batch.micro_batch_tokens) continue;
    config.batch.micro_batch_tokens = before.batch.micro_batch_tokens;
    config.model.recompute = before.model.recompute;
  }
  return resume_plan(std::move(plan), dir, "continued", group);
}

Run Run::resume(const std::string& run_dir, std::span<const std::string> overrides,
                ProcessGroup* group, const Callbacks& callbacks) {
  const std::string config = run_dir + "/config.yaml";
  if (!path_exists(config))
    throw InputError(
        str("nothing to resume: ", config,
            " does not exist; hint: give the run directory that `cohort train` printed"));
  std::string start = "resumed";
  for (const std::string& o : overrides) start += " " + o;
  RunPlan plan = load_plan(config, overrides);
  bind_callbacks(plan, callbacks);
  return resume_plan(std::move(plan), fs::absolute(run_dir).lexically_normal().string(), start,
                     group);
}

Run Run::resume_plan(RunPlan plan, const std::string& dir, const std::string& start,
                     ProcessGroup* group) {
  prepare(plan, group);
  check_stages(plan);
  // The configuration of a run has numbers; an override may set them to auto again.
  std::vector<StagePreview> preview;
  if (has_auto(plan) && (group == nullptr || group->rank() == 0)) preview = preview_plan(plan);
  const std::string chosen = choose_for_ranks(plan, preview, group);
  Run run(plan, dir, group);
  if (!chosen.empty()) logging::info(chosen);
  run.start_ = start;
  if (group != nullptr) group->broadcast("run directory", run.dir_);  // rank 0 has the lock
  return run;
}

std::string stage_directory(const RunPlan& plan, const std::string& run_dir, size_t index) {
  if (plan.stages.size() == 1) return run_dir;
  return str(run_dir, "/", index + 1, "-", trainer_name(plan.stages[index].batch.trainer));
}

RunResult Run::execute(Reporter& reporter, const std::atomic<bool>& stop, int64_t profile_steps) {
  for (TrainConfig& stage : plan_.stages) {
    stage.environment.server.stop = &stop;
    for (RewardConfig& reward : stage.rewards) reward.server.stop = &stop;
  }
  profile_steps_ = profile_steps;
  RunResult result{.run_dir = dir_};
  for (size_t i = 0; i < plan_.stages.size() && result.end == StageEnd::kFinished; ++i) {
    if (i > 0) plan_.stages[i].init_from = stage_dir(i - 1);
    if (is_main()) make_directory(stage_dir(i));
    result.end = run_stage(i, reporter, stop);
    result.last_trainer = plan_.stages[i].batch.trainer;
  }
  if (result.end == StageEnd::kFinished && is_main()) {
    const Json &first = report_.get_or_null("first"), &last = report_.get_or_null("last");
    result.before = number_or_nan(first.get_or_null("score"));
    result.after = number_or_nan(last.get_or_null("score"));
    result.loss_before = number_or_nan(first.get_or_null("val_loss"));
    result.loss_after = number_or_nan(last.get_or_null("val_loss"));
    if (const Json* measure = last.find("measure"))
      result.measure = measure->as_string();
    else if (!last.is_null())
      result.measure = reads_text(result.last_trainer) ? "validation loss" : "pass@1";
  }
  return result;
}

Communicator& Run::communicator(Device device) {
  if (comm_ == nullptr || comm_device_ != device) {
    comm_.reset();
    comm_ = make_communicator(*group_, device);
    comm_device_ = device;
  }
  return *comm_;
}

// The next stage has started from the final weights of this one, which must not change.
std::string Run::why_fixed(size_t index) const {
  if (index + 1 == plan_.stages.size() || !has_checkpoint(stage_dir(index + 1) + "/checkpoints"))
    return "";
  const size_t last = plan_.stages.size() - 1;
  return str(fs::path(stage_dir(index + 1)).filename().string(),
             " has started from its weights; hint: a key such as steps reaches every stage; "
             "stages.",
             last, ".steps=", plan_.stages[last].batch.steps,
             " is for the last one alone; or start a new run with init_from");
}

// Stores the configuration, which is known to work, as that of the run.
void Run::record_start() {
  if (recorded_) return;
  recorded_ = true;
  std::string note = start_;
  std::ranges::replace(note, '\n', ' ');
  make_directory(dir_ + "/starts");
  int number = 1;
  const auto path = [&] { return str(dir_, "/starts/", number, ".yaml"); };
  while (path_exists(path())) ++number;
  const std::string config = dump_plan(recorded_plan_);
  replace_file(path(), str("# ", utc_now(), ": ", note, "\n", config));
  replace_file(dir_ + "/config.yaml", config);
}

// Ranks that are threads read plan_ meanwhile.
void Run::record_micro_batch(size_t index, int64_t tokens) {
  recorded_plan_.stages[index].batch.micro_batch_tokens = tokens;
  journal_plan_ = journal_plan(recorded_plan_);
  replace_file(dir_ + "/config.yaml", dump_plan(recorded_plan_));
}

StageEnd Run::train_stage(size_t index, const std::string& before, Reporter& reporter,
                          const std::atomic<bool>& stop) {
  const TrainConfig& config = plan_.stages[index];
  const Device device = device_of(config, group_);
  if (config.num_threads > 0) set_num_threads(static_cast<int>(config.num_threads));
  StageEnd end = StageEnd::kFinished;
  const auto train = [&](Communicator& comm) {
    Stage stage({config, stage_dir(index), comm, reporter, stop, device, before, why_fixed(index),
                 plan_.stages.size() == 1 ? "steps" : str("stages.", index, ".steps"),
                 profile_steps_, std::span(plan_.stages).first(index),
                 [&](int64_t tokens) { record_micro_batch(index, tokens); }, nullptr,
                 &journal_plan_});
    if (comm.rank() == 0 && !stage.finished()) record_start();
    try {
      const StageEnd how =
          config.batch.trainer == TrainerType::kGrpo ? train_grpo(stage) : train_supervised(stage);
      if (comm.rank() == 0) report_ = stage.state().report;
      // A request while the stage was ending does not start the next one.
      if (index + 1 < plan_.stages.size() && stage.stop_requested()) return StageEnd::kInterrupted;
      return how;
    } catch (const NonFiniteError& e) {
      const std::string checkpoint = stage.untried_checkpoint();
      if (checkpoint.empty()) throw;
      throw BadStart(e.what(), checkpoint);
    } catch (const OutOfMemoryError& e) {
      throw OutOfMemoryError(e.what() + stage.save_after_failure());
    } catch (const std::exception& e) {
      // Wrong answers and exceptions of functions, or another thread's: the last step is complete.
      const bool is_internal = dynamic_cast<const Error*>(&e) != nullptr &&
                               dynamic_cast<const InputError*>(&e) == nullptr,
                 is_peer = dynamic_cast<const PeerError*>(&e) != nullptr;
      if (is_internal && !(is_peer && group_ == nullptr)) throw;
      const std::string saved = stage.save_after_failure();
      if (!saved.empty())
        logging::info("the run has failed", saved, "; cohort train --resume ", dir_, " continues");
      throw;
    }
  };
  if (group_ != nullptr) return train(communicator(device));
  run_local_ranks(static_cast<int>(config.ranks), [&](Communicator& comm) {
    const StageEnd result = train(comm);
    if (comm.rank() == 0) end = result;
  });
  return end;
}

StageEnd Run::run_stage(size_t index, Reporter& reporter, const std::atomic<bool>& stop) {
  const std::string checkpoints = stage_dir(index) + "/checkpoints";
  for (std::string before;;) {
    try {
      return train_stage(index, before, reporter, stop);
    } catch (const BadStart& e) {
      // Rank 0 names it for all. Processes fall back together or not at all: a rank that does not
      // get here makes another call, which ends the run.
      std::string older;
      if (is_main()) older = newest_checkpoint(checkpoints, e.checkpoint).value_or("");
      const std::string bad = fs::path(e.checkpoint).filename();
      if (group_ != nullptr) older = group_->broadcast("back from " + bad, older);
      if (older.empty())
        throw NonFiniteError(str(e.what(), "; this was the first update after resuming from ",
                                 e.checkpoint,
                                 ", and there is no checkpoint before it; hint: start a new run"));
      if (is_main()) {
        reporter.end_stage();
        logging::warn("the first update after resuming from ", e.checkpoint, " failed (", e.what(),
                      "); going back to ", older);
      }
      before = e.checkpoint;
    }
  }
}

}  // namespace cohort
