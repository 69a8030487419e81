#include "job/run_directory.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "core/log.h"
#include "job/checkpoint.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// True for the name of a stage's directory, such as "2-grpo".
bool is_stage_name(const std::string& name) {
  const int position = std::atoi(name.c_str());
  return position > 0 && std::ranges::any_of(kTrainerNames, [&](const auto& trainer) {
           return name == str(position, "-", trainer.name);
         });
}

[[noreturn]] void fail_to_create(const std::string& wanted, const std::string& reason) {
  throw InputError(str("cannot create the run directory ", wanted, ": ", reason,
                       "; hint: set output_dir to a folder you may write to"));
}

}  // namespace

std::string create_run_directory(const std::string& wanted) {
  std::error_code error;
  fs::create_directories(fs::path(wanted).parent_path(), error);
  for (int i = 1; i < 100000 && !error; ++i) {
    const std::string path = i == 1 ? wanted : str(wanted, "-", i);
    if (fs::create_directory(path, error)) return path;
  }
  fail_to_create(wanted, error.message());
}

std::string make_run_directory(const std::string& wanted) {
  std::error_code error;
  fs::create_directories(wanted, error);
  if (!fs::is_directory(wanted)) fail_to_create(wanted, error.message());
  return wanted;
}

std::string next_run_directory(const std::string& wanted) {
  std::string path = wanted;
  std::error_code error;
  for (int i = 2; fs::is_directory(path, error); ++i) path = str(wanted, "-", i);
  if (path_exists(path)) fail_to_create(wanted, system_reason(EEXIST));
  return path;
}

std::optional<std::string> find_run_config(const std::string& checkpoint) {
  std::error_code error;
  // The path as it is given is tried too, because RUN/checkpoints may be a link.
  for (const fs::path& path : {fs::canonical(checkpoint, error), fs::absolute(checkpoint, error)}) {
    const fs::path checkpoints = path.parent_path();
    if (checkpoint_step(path) < 0 || checkpoints.filename() != "checkpoints") continue;
    fs::path run = checkpoints.parent_path();
    if (!path_exists(run / "config.yaml") && is_stage_name(run.filename())) run = run.parent_path();
    if (path_exists(run / "config.yaml")) return (run / "config.yaml").string();
  }
  return {};
}

void wait_for_run_directory(const std::string& run_dir, std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kPoll{100};
  const std::string path = run_dir + "/.lock";
  for (std::chrono::milliseconds waited{0}; waited < limit; waited += kPoll) {
    if (!path_exists(path)) return;
    const FileLock lock(path);
    if (!lock.is_open() || lock.try_lock()) return;
    if (waited.count() == 0) logging::info("waiting for another process that uses ", run_dir);
    std::this_thread::sleep_for(kPoll);
  }
}

FileLock lock_run_directory(const std::string& run_dir) {
  FileLock lock(run_dir + "/.lock");
  if (!lock.is_open()) throw_errno<InputError>("cannot create ", run_dir, "/.lock");
  if (!lock.try_lock())
    throw InputError(
        str("another process is using the run directory ", run_dir,
            "; hint: wait for it to end, or start a run of your own without --resume and "
            "--continue"));
  return lock;
}

}  // namespace cohort
