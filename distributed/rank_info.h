// Rank and world size of this process, from the environment set by its launcher: torchrun (and
// `cohort train --gpus N`), Slurm's srun, or Open MPI's mpirun.
#pragma once

#include <cstdlib>
#include <functional>
#include <string>

namespace cohort {

struct RankInfo {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  std::string master_addr;             // address of rank 0
  int master_port = 0;
  std::string source;  // "torchrun", "Slurm" or "Open MPI"; empty without a launcher
  std::string run;     // the launcher's name of the run; empty: it gives none

  // The hosts, if each has as many ranks as this one, which are neighbours; else 1.
  int hosts() const {
    return size % local_size == 0 && rank % local_size == local_rank ? size / local_size : 1;
  }
};

// Returns the value of a variable; nullptr if it is not set.
using EnvironmentVariables = std::function<const char*(const char* name)>;

// Reads the first pair that is set: RANK and WORLD_SIZE; OMPI_COMM_WORLD_RANK and _SIZE;
// SLURM_PROCID and SLURM_STEP_NUM_TASKS, which only srun sets. Several processes also need a local
// rank and the address of rank 0 (MASTER_ADDR, MASTER_PORT, else from Slurm's node list). Throws
// InputError naming the variable that is missing or invalid.
RankInfo rank_info(const EnvironmentVariables& environment = std::getenv);

// The first host of a Slurm node list: "node[07-12,20],other" -> "node07".
std::string first_host(const std::string& node_list);

}  // namespace cohort
