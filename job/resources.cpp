#include "job/resources.h"

#include <algorithm>
#include <filesystem>

#include "core/allocator.h"
#include "core/sizes.h"
#include "job/checkpoint.h"
#include "job/run_directory.h"
#include "sys/memory.h"
#include "text/utf8.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// Bytes of the files in a folder, links not followed.
int64_t folder_bytes(const fs::path& path) {
  int64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code unreadable;
    if (it->symlink_status(unreadable).type() != fs::file_type::regular) continue;
    const auto size = it->file_size(unreadable);
    if (!unreadable) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

// A word of a shell command.
std::string shell_word(const std::string& text) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+=:,@%";
  if (text.find_first_not_of(kPlain) == text.npos) return text;
  return "'" + replaced(text, "'", "'\\''") + "'";
}

// The folders of other runs beside `run` that no process uses.
std::vector<std::string> idle_runs_beside(const fs::path& run) {
  std::vector<std::string> out;
  const auto is_in_use = [](const std::string& lock_file) {
    if (!path_exists(lock_file)) return false;
    const FileLock lock(lock_file);
    return !lock.is_open() || !lock.try_lock();
  };
  for (const std::string& name : list_directory(run.parent_path())) {
    const std::string other = run.parent_path() / name;
    if (other != run && is_own_directory(other) && path_exists(other + "/config.yaml") &&
        path_exists(other + "/log.txt") && !is_in_use(other + "/.lock"))
      out.push_back(other);
  }
  return out;
}

}  // namespace

int64_t free_memory(Device device) {
  const int64_t free = available_memory(device);
  return device.is_cuda() ? free : std::min(free, free_memory_of_groups());
}

std::string memory_shortage(const TrainConfig& config, const StagePreview& stage, int64_t ranks) {
  const Device device = device_named(config.device, "device");
  if (device.is_cuda() && device.index >= cuda_device_count()) return "";
  const int64_t peak = memory_of(config, stage, ranks, CacheSize::kSequence).peak(),
                usable = device.is_cuda() ? total_memory(device) : free_memory(device);
  if (peak <= usable / config.ranks) return "";
  return str(
      "memory: ", trainer_name(config.batch.trainer), " needs at least about ", mib(peak),
      config.ranks > 1 ? str(" for each of ", config.ranks, " ranks") : "", ", and ",
      device.is_cuda() ? str(device.str(), " of this machine has ") : "this machine has free ",
      mib(usable),
      "; hint: micro_batch_tokens=auto, model.recompute=block, optimizer.place=auto, or a smaller "
      "model");
}

std::vector<std::pair<std::string, std::string>> memory_rows(const MemoryEstimate& memory) {
  std::vector<std::pair<std::string, std::string>> rows = {{"parameters", mib(memory.parameters)},
                                                           {"gradients", mib(memory.gradients)},
                                                           {"optimizer", mib(memory.optimizer)}};
  if (memory.weights > 0)
    rows.emplace_back("weights of blocks",
                      str(mib(memory.weights), " in an update, which uses the ",
                          mib(memory.released), " of the whole ones"));
  if (memory.reference > 0) rows.emplace_back("reference", mib(memory.reference));
  rows.emplace_back("activations", mib(memory.activations));
  rows.emplace_back("workspace", mib(memory.workspace));
  if (memory.rollout > 0) rows.emplace_back("rollouts", mib(memory.cache + memory.rollout));
  if (memory.states > 0)
    rows.emplace_back("states", str(mib(memory.states), " of these, for ", memory.sequences,
                                    " sequences at once"));
  rows.emplace_back("peak per rank", mib(memory.peak()));
  return rows;
}

std::string memory_plan(const RunPlan& plan, const std::vector<StagePreview>& stages,
                        int64_t processes) {
  std::string text;
  for (size_t i = 0; i < stages.size(); ++i) {
    const TrainConfig& config = plan.stages[i];
    text += str("\nmemory plan of ", trainer_name(config.batch.trainer), ":");
    const MemoryEstimate memory = memory_of(config, stages[i], std::max(config.ranks, processes));
    for (const auto& [name, value] : memory_rows(memory)) text += str(" ", name, " ", value, ";");
  }
  return text;
}

int64_t checkpoint_bytes(const TrainConfig& config, const ModelConfig& model) {
  const ModelSize size = model_size(model);
  const bool reference =
      config.batch.trainer == TrainerType::kGrpo && config.grpo.beta > 0 &&
      config.grpo.reference_type() < ReferenceType::kPolicy &&
      (size.adapters == 0 || config.grpo.reference_type() == ReferenceType::kStart);
  const int64_t weights = static_cast<int64_t>(dtype_size(config.dtype)) * size.trained();
  return (reference ? 2 : 1) * weights +
         optimizer_bytes(config.optimizer, model, config.dtype, {}).saved;
}

std::string DiskNeed::shortage() const {
  if (most <= free) return "";
  return str("disk: the checkpoints of this run need up to ", mib(most), ", and ", mib(free),
             " are free; hint: checkpoint.keep_last=1, output_dir=DIR on another file system, or "
             "delete old runs");
}

DiskNeed disk_need(const RunPlan& plan, const std::vector<StagePreview>& stages, int64_t free) {
  DiskNeed out{.free = free};
  for (size_t i = 0; i < stages.size(); ++i) {
    const TrainConfig& config = plan.stages[i];
    const int64_t bytes = checkpoint_bytes(config, stages[i].model),
                  kept = config.checkpoint.keep_last + (stages[i].held_out > 0 ? 1 : 0);
    if (bytes > out.free)
      throw InputError(str("disk: a checkpoint of ", trainer_name(config.batch.trainer), " takes ",
                           mib(bytes), ", and ", mib(out.free), " are free for ", plan.output_dir,
                           "; hint: output_dir=DIR on another file system, or delete old runs"));
    out.checkpoint.push_back(bytes);
    out.most += std::min(kept, config.batch.steps + 1) * bytes;
  }
  // While one is written, those before it still exist.
  out.most += *std::max_element(out.checkpoint.begin(), out.checkpoint.end());
  return out;
}

std::string full_disk_advice(const std::string& checkpoints, int64_t needed,
                             const std::vector<std::string>& unused) {
  constexpr size_t kNamed = 4;
  std::string text = str("; a checkpoint takes about ", mib(needed));
  if (const int64_t free = free_disk_bytes(checkpoints); free != INT64_MAX)
    text += str(", and ", mib(free), " are free");
  const auto config = find_run_config(checkpoint_path(checkpoints, 0));
  const std::string run = config ? fs::path(*config).parent_path().string() : "";
  std::vector<std::pair<int64_t, std::string>> found;  // bytes, path
  for (const std::string& path : unused) found.emplace_back(folder_bytes(path), path);
  if (config)
    for (const std::string& path : idle_runs_beside(run))
      found.emplace_back(folder_bytes(path), path);
  std::sort(found.rbegin(), found.rend());
  text += "; hint: ";
  for (size_t i = 0; i < std::min(found.size(), kNamed); ++i)
    text += str("`rm -r ", shell_word(found[i].second), "` frees ", mib(found[i].first), "; ");
  if (found.empty()) text += "delete other files; ";
  return text + "then cohort train --resume " + shell_word(config ? run : "RUN");
}

}  // namespace cohort
