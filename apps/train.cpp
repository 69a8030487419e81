// `cohort train`: this process trains alone, is one rank of several, or launches the ranks
// (--gpus).
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <future>
#include <optional>
#include <system_error>
#include <thread>

#include "apps/commands.h"
#include "apps/signals.h"
#include "core/log.h"
#include "core/parallel.h"
#include "distributed/launcher.h"
#include "job/run.h"

namespace cohort::apps {
namespace {

// The overrides. With --resume the argument `config` is the first of them.
std::vector<std::string> overrides_of(const TrainOptions& options) {
  std::vector<std::string> out = options.overrides;
  if (!options.resume.empty() && !options.config.empty()) out.insert(out.begin(), options.config);
  if (options.resume.empty() && options.config.empty())
    throw InputError(
        "train: expected CONFIG.yaml, or --resume RUN_DIR; hint: cohort train configs/demo.yaml");
  return out;
}

int train_rank(const TrainOptions& options, const std::atomic<bool>& stop, ProcessGroup* group) {
  TrainRequest request = options;
  request.overrides = overrides_of(options);
  const auto console =
      group == nullptr || group->rank() == 0 ? make_console() : std::make_unique<Reporter>();
  const RunResult result =
      run_training(request, {.reporter = *console, .stop = stop, .group = group});
  return result.end == StageEnd::kInterrupted ? kInterrupted : kOk;
}

// Prints and logs why this process ends, on another thread for at most some seconds: a terminal or
// a disk that hangs may be the reason.
void print_last_words(const std::string& message, const std::string& history) {
  constexpr std::chrono::seconds kLimit{3};
  const auto done = std::make_shared<std::promise<void>>();
  try {
    std::thread([=] {
      print_error(message);
      logging::record("failed: " + message);
      logging::record(history);
      done->set_value();
    }).detach();
    done->get_future().wait_for(kLimit);
  } catch (const std::system_error&) {  // no thread is left
  }
}

// This process is the only rank, or one of several.
int train_watched(const TrainOptions& options, const std::atomic<bool>& stop,
                  const RankInfo& info) {
  std::optional<ProcessGroup> group;
  ProcessGroup::Options limits = ProcessGroup::default_options();
  limits.is_busy = is_saving;
  limits.watchdog = watchdog_limit;
  // A rank that is inside a driver call at a failure may never return from it.
  limits.on_overdue = [&](const std::string& failure, ProcessGroup::Origin origin) {
    using Origin = ProcessGroup::Origin;
    const std::string who = info.size == 1 ? "it" : str("rank ", info.rank);
    print_last_words(str(failure, "; ", who, " did not exit in time and was ended"),
                     group->history());
    _exit(origin == Origin::kLocal ? kFailed : origin == Origin::kHang ? kHung : kPeerFailed);
  };
  group.emplace(info, limits);
  if (info.size == 1) return train_rank(options, stop, nullptr);
  if (info.rank != 0) logging::set_console_level(logging::Level::kWarn);
  set_num_threads(std::max(1, num_threads() / info.local_size));
  try {
    return train_rank(options, stop, &*group);
  } catch (const std::exception& e) {
    group->fail(e.what());
    throw;
  }
}

int launch(TrainOptions options, const RunPlan& plan, const std::atomic<bool>& stop) {
  LaunchOptions launch_options{
      .count = options.gpus, .exit_code_of_peer = kPeerFailed, .restarts = options.restarts};
  launch_options.final_codes = {kBadInput, kInterrupted};
  // Every start has the same command: a new run gets its directory here, and is continued there.
  std::string directory;
  if (options.restarts > 0 && options.resume.empty() && !options.continues) {
    directory = create_run_directory(plan.output_dir);
    options.continues = true;
    options.overrides.push_back("output_dir=" + directory);
  }
  std::vector<std::string>& command = launch_options.command;
  command = own_program();
  command.emplace_back("train");
  if (!options.resume.empty()) command.insert(command.end(), {"--resume", options.resume});
  if (options.continues) command.emplace_back("--continue");
  if (options.profile > 0)
    command.insert(command.end(), {"--profile", std::to_string(options.profile)});
  if (!options.config.empty()) command.push_back(options.config);
  command.insert(command.end(), options.overrides.begin(), options.overrides.end());
  launch_options.on_line = [](int rank, const std::string& line) {
    print(stderr, str("[rank ", rank, "] ", line, "\n"));
  };
  launch_options.on_restart = [](const LaunchResult& failed) {
    if (!failed.message.empty()) print_error(failed.message);
    logging::warn("a rank has failed (exit code ", failed.code,
                  "); all start again from the newest checkpoint");
  };
  const LaunchResult result = launch_ranks(launch_options, stop);
  std::error_code error;
  std::filesystem::remove(directory, error);  // if bad input has left it empty
  if (!result.message.empty()) print_error(result.message);
  return result.code;
}

}  // namespace

std::vector<std::string>& own_program() {
  static std::vector<std::string> program;
  return program;
}

void expect_cuda(const RunPlan& plan, const std::string& name) {
  for (const TrainConfig& stage : plan.stages)
    if (stage.device != "cuda")
      throw InputError(str(name, ": expected device: cuda, the configuration has device: ",
                           stage.device, "; hint: add device=cuda"));
}

void expect_gpus(const RunPlan& plan, int count, const std::string& name) {
  if (const RankInfo info = rank_info(); info.size > 1)
    throw InputError(str(name, ": this process is already rank ", info.rank, " of ", info.size,
                         " that ", info.source, " started; hint: omit ", name));
  expect_cuda(plan, name);
  if (count == 1) prepare_programs(plan);  // before this process uses CUDA
  parse_device("cuda", "device");
  if (count > cuda_device_count())
    throw InputError(
        str(name, ": ", count, " GPUs requested, this machine has ", usable_cuda_devices()));
}

int train(const TrainOptions& options) {
  const RankInfo info = rank_info();
  RunPlan plan;
  if (options.gpus > 0) {
    TrainRequest request = options;
    request.overrides = overrides_of(options);
    plan = plan_of(request);
    expect_gpus(plan, options.gpus);
  }
  const bool launches = options.gpus > 1 || options.restarts > 0;
  const std::atomic<bool>& stop = stop_on_signals(launches         ? SignalVerbosity::kWaitNotice
                                                  : info.rank == 0 ? SignalVerbosity::kAll
                                                                   : SignalVerbosity::kNone);
  if (launches) return launch(options, plan, stop);
  return train_watched(options, stop, info);
}

}  // namespace cohort::apps
