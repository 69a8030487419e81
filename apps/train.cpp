// `cohort train`: this process alone, as one rank of several, or (--gpus N) as the one that starts
// them.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>

#include "apps/commands.h"
#include "apps/console.h"
#include "apps/signals.h"
#include "core/allocator.h"
#include "core/log.h"
#include "core/parallel.h"
#include "dist/launcher.h"
#include "trainers/run.h"

namespace cohort::apps {
namespace {

// The overrides, where the argument that looks like the configuration may be one of them.
std::vector<std::string> overrides_of(const TrainOptions& options) {
  std::vector<std::string> out = options.overrides;
  if (!options.resume.empty() && !options.config.empty()) out.insert(out.begin(), options.config);
  if (options.resume.empty() && options.config.empty())
    throw InputError(
        "train: expected CONFIG.yaml, or --resume RUN_DIR; hint: cohort train configs/demo.yaml");
  return out;
}

RunResult execute(Run& run, Reporter& reporter, const TrainOptions& options,
                  const std::atomic<bool>& stop, ProcessGroup* group) {
  try {
    return run.execute(reporter, stop, options.profile);
  } catch (const std::exception& e) {
    if (group != nullptr) group->fail(e.what());  // before this rank takes itself apart
    reporter.end_stage();
    std::string fault = e.what();
    const bool out_of_memory = dynamic_cast<const OutOfMemoryError*>(&e) != nullptr;
    if (out_of_memory)
      fault += "; hint: a smaller micro_batch_tokens, model.recompute: block, or a smaller model" +
               memory_plan(run.plan(), run.preview(), group == nullptr ? 1 : group->size());
    logging::record("failed: " + fault);
    if (out_of_memory) throw OutOfMemoryError(fault);
    throw;
  }
}

// "pass@1 (countdown) 0.05 -> 0.07".
std::string summary(const RunResult& result) {
  const bool text = result.last_trainer == TrainerType::kPretrain;
  if (result.measure.empty() || (text && std::isnan(result.before) && std::isnan(result.after)))
    return str("done, with no held-out ", text ? "text" : "problems", " to score,");
  const double sign = text ? -1 : 1;
  const auto change = [](const std::string& what, double before, double after, int digits) {
    return std::isnan(before) && std::isnan(after)
               ? what + " not measured"
               : str(what, " ", score_text(before, digits), " -> ", score_text(after, digits));
  };
  std::string out = change(result.measure, sign * result.before, sign * result.after, text ? 4 : 2);
  if (!text && !std::isnan(result.loss_after))
    out += change(", validation loss", result.loss_before, result.loss_after, 4);
  return out;
}

int train_rank(const TrainOptions& options, const std::atomic<bool>& stop, ProcessGroup* group) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> overrides = overrides_of(options);
  Run run = options.resume.empty() ? Run::create(load_plan(options.config, overrides), group)
                                   : Run::resume(options.resume, overrides, group);
  if (group != nullptr && group->rank() != 0) {
    Reporter silent;
    return execute(run, silent, options, stop, group).end == StageEnd::kInterrupted ? kInterrupted
                                                                                    : kOk;
  }
  Console console;
  console.message("run directory: " + run.dir());
  const RunResult result = execute(run, console, options, stop, group);
  if (result.end == StageEnd::kInterrupted) {
    console.message(str("interrupted; saved. Go on with: cohort train --resume ", run.dir()));
    return kInterrupted;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  console.message("run directory: " + run.dir());
  console.message(
      str(run.plan().name, ": ", summary(result), " in ", score_text(seconds, 0), " s"));
  return kOk;
}

// This process is one rank of several.
int train_in_group(const TrainOptions& options, const std::atomic<bool>& stop,
                   const RankInfo& info) {
  ProcessGroup::Options limits = ProcessGroup::default_options();
  limits.is_busy = is_saving;
  // A rank that a failure has caught inside a call of the driver may never return from it.
  limits.on_overdue = [&](const std::string& failure, ProcessGroup::Origin origin) {
    std::fprintf(stderr, "cohort: %s; rank %d could not end by itself and was ended\n",
                 failure.c_str(), info.rank);
    _exit(origin == ProcessGroup::Origin::kHere ? kFailed : kPeerFailed);
  };
  ProcessGroup group(info, limits);
  if (info.rank != 0) logging::set_console_level(logging::Level::kWarn);
  set_num_threads(std::max(1, num_threads() / info.local_size));
  try {
    return train_rank(options, stop, &group);
  } catch (const std::exception& e) {
    group.fail(e.what());
    throw;
  }
}

// What --gpus asks for can be had.
void check_gpus(const TrainOptions& options, const RankInfo& info) {
  if (info.size > 1)
    throw InputError(str("--gpus: this process is already rank ", info.rank, " of ", info.size,
                         " that ", info.source, " started; hint: leave --gpus out"));
  const std::string config =
      options.resume.empty() ? options.config : options.resume + "/config.yaml";
  const RunPlan plan = load_plan(config, overrides_of(options));
  expect_cuda(plan);
  if (options.gpus == 1) prepare_programs(plan);  // before this process uses CUDA
  parse_device("cuda", "device");
  if (options.gpus > cuda_device_count())
    throw InputError(
        str("--gpus: ", options.gpus, " were asked for, this machine has ", usable_cuda_devices()));
}

int launch(const TrainOptions& options, const std::atomic<bool>& stop) {
  LaunchOptions what{.count = options.gpus, .echo_code = kPeerFailed};
  what.command = {std::filesystem::read_symlink("/proc/self/exe").string(), "train"};
  if (!options.resume.empty())
    what.command.insert(what.command.end(), {"--resume", options.resume});
  if (options.profile > 0)
    what.command.insert(what.command.end(), {"--profile", std::to_string(options.profile)});
  if (!options.config.empty()) what.command.push_back(options.config);
  what.command.insert(what.command.end(), options.overrides.begin(), options.overrides.end());
  what.on_line = [](int rank, const std::string& line) {
    std::fprintf(stderr, "[rank %d] %s\n", rank, line.c_str());
  };
  const LaunchResult result = launch_ranks(what, stop);
  if (!result.message.empty()) std::fprintf(stderr, "cohort: %s\n", result.message.c_str());
  return result.code;
}

}  // namespace

void expect_cuda(const RunPlan& plan) {
  for (const TrainConfig& stage : plan.stages)
    if (stage.device != "cuda")
      throw InputError(str("--gpus: expected device: cuda, the configuration has device: ",
                           stage.device, "; hint: add device=cuda"));
}

int train(const TrainOptions& options) {
  const RankInfo info = rank_info();
  const std::atomic<bool>& stop = stop_on_signals(options.gpus > 1 ? SignalVoice::kPatience
                                                  : info.rank == 0 ? SignalVoice::kAll
                                                                   : SignalVoice::kNone);
  if (options.gpus > 0) check_gpus(options, info);
  if (options.gpus > 1) return launch(options, stop);
  if (options.gpus == 1) return train_rank(options, stop, nullptr);
  if (info.size > 1) return train_in_group(options, stop, info);
  return train_rank(options, stop, nullptr);
}

}  // namespace cohort::apps
