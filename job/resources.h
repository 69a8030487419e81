// Compares the memory and the disk space that a plan needs with those of this machine.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "job/memory_plan.h"

namespace cohort {

// available_memory(), of the host within the limits of this process's control groups.
int64_t free_memory(Device device);

// Explains that `ranks` ranks of the stage on one device of this machine need more memory than it
// has, with a hint; empty if they fit, or if the device is not on this machine. The cache of the
// rollouts counts with its smallest size.
std::string memory_shortage(const TrainConfig& config, const StagePreview& stage, int64_t ranks);

// An estimate as names and human-readable sizes, the peak last.
std::vector<std::pair<std::string, std::string>> memory_rows(const MemoryEstimate& memory);
// Memory plan of each stage for each of `processes` processes: one line per stage, each preceded by
// a line break.
std::string memory_plan(const RunPlan& plan, const std::vector<StagePreview>& stages,
                        int64_t processes);

// Bytes of the tensors in a checkpoint.
int64_t checkpoint_bytes(const TrainConfig& config, const ModelConfig& model);

// Disk space of the checkpoints of a plan.
struct DiskNeed {
  std::vector<int64_t> checkpoint;  // bytes of one, for each stage
  int64_t most = 0;                 // bytes of all that exist at once, one being written
  int64_t free = 0;                 // bytes on the file system; INT64_MAX: unknown
  // Explains that not all checkpoints fit, with a hint; empty if they do.
  std::string shortage() const;
};
// With `free` bytes of disk space. Throws InputError if a single checkpoint does not fit.
DiskNeed disk_need(const RunPlan& plan, const std::vector<StagePreview>& stages, int64_t free);

// Completes the error of a checkpoint of `needed` bytes that the full disk did not take into the
// folder `checkpoints`: the bytes needed and free, and a hint that names the largest of what may be
// deleted, `unused` checkpoints and runs beside this one that no process uses.
std::string full_disk_advice(const std::string& checkpoints, int64_t needed,
                             const std::vector<std::string>& unused);

}  // namespace cohort
