#include "distributed/rank_info.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "core/check.h"

namespace cohort {
namespace {

constexpr int kMaxRanks = 1 << 16;
constexpr int kDefaultPort = 29500;

class Reader {
 public:
  Reader(const Environment& environment, const char* source)
      : environment_(environment), source_(source) {}

  std::string text(const char* name) const {
    const char* value = environment_(name);
    return value == nullptr ? "" : value;
  }
  bool has(const char* name) const { return !text(name).empty(); }

  int number(const char* name, int min, int max) const {
    const std::string value = required(name);
    int out = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
    if (error != std::errc{} || end != value.data() + value.size() || out < min || out > max)
      throw InputError(str(name, ": expected a number from ", min, " to ", max, ", got '", value,
                           "' (environment of a process that ", source_, " started)"));
    return out;
  }
  // Leading number of a list such as "8(x2),4"; 0 if there is none.
  int leading_number(const char* name) const {
    const std::string value = text(name);
    int out = 0;
    std::from_chars(value.data(), value.data() + value.size(), out);
    return out;
  }
  std::string required(const char* name) const {
    if (!has(name))
      throw InputError(str(name, ": not set, and needed to find the other ranks of a run that ",
                           source_, " started"));
    return text(name);
  }

 private:
  const Environment& environment_;
  const char* source_;
};

RankInfo rank_and_size(const Reader& in, const char* rank, const char* size, const char* source) {
  RankInfo info{.size = in.number(size, 1, kMaxRanks), .source = source};
  info.rank = in.number(rank, 0, info.size - 1);
  return info;
}

RankInfo from_torchrun(const Environment& environment) {
  const Reader in(environment, "torchrun");
  RankInfo info = rank_and_size(in, "RANK", "WORLD_SIZE", "torchrun");
  if (info.size == 1) return info;
  info.local_rank = in.number("LOCAL_RANK", 0, info.rank);
  if (in.has("LOCAL_WORLD_SIZE"))
    info.local_size = in.number("LOCAL_WORLD_SIZE", info.local_rank + 1, info.size);
  info.master_addr = in.required("MASTER_ADDR");
  info.master_port = in.number("MASTER_PORT", 1, 65534);
  // torchrun's own store listens there.
  if (in.text("TORCHELASTIC_USE_AGENT_STORE") == "True") ++info.master_port;
  return info;
}

RankInfo from_slurm(const Environment& environment) {
  const Reader in(environment, "Slurm");
  RankInfo info = rank_and_size(in, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "Slurm");
  if (info.size == 1) return info;
  info.local_rank = in.number("SLURM_LOCALID", 0, info.rank);
  info.local_size =
      std::clamp(in.leading_number("SLURM_STEP_TASKS_PER_NODE"), info.local_rank + 1, info.size);
  info.master_addr = in.has("MASTER_ADDR") ? in.text("MASTER_ADDR")
                                           : first_host(in.required("SLURM_STEP_NODELIST"));
  // Jobs on the same host must not connect to each other: derive a port from the job id, below the
  // ephemeral range.
  info.master_port = in.has("MASTER_PORT") ? in.number("MASTER_PORT", 1, 65535)
                                           : 20000 + in.leading_number("SLURM_JOB_ID") % 10000;
  return info;
}

RankInfo from_open_mpi(const Environment& environment) {
  const Reader in(environment, "Open MPI");
  RankInfo info = rank_and_size(in, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI");
  if (info.size == 1) return info;
  info.local_rank = in.number("OMPI_COMM_WORLD_LOCAL_RANK", 0, info.rank);
  info.local_size = in.number("OMPI_COMM_WORLD_LOCAL_SIZE", info.local_rank + 1, info.size);
  if (in.has("MASTER_ADDR"))
    info.master_addr = in.text("MASTER_ADDR");
  else if (info.local_size == info.size)
    info.master_addr = "127.0.0.1";
  else
    throw InputError(
        "MASTER_ADDR: not set, and mpirun does not provide the address of rank 0; hint: mpirun -x "
        "MASTER_ADDR=HOST_OF_RANK_0 ...");
  info.master_port = in.has("MASTER_PORT") ? in.number("MASTER_PORT", 1, 65535) : kDefaultPort;
  return info;
}

}  // namespace

RankInfo rank_info(const Environment& environment) {
  const auto has = [&](const char* name) { return environment(name) != nullptr; };
  if (has("RANK") || has("WORLD_SIZE")) return from_torchrun(environment);
  // Checked before Slurm, because srun may start the daemons of mpirun.
  if (has("OMPI_COMM_WORLD_RANK") || has("OMPI_COMM_WORLD_SIZE")) return from_open_mpi(environment);
  // Only srun sets the step size: a batch script also has a rank and tasks, but is one process.
  if (has("SLURM_STEP_NUM_TASKS")) return from_slurm(environment);
  return {};
}

RankInfo rank_info() {
  return rank_info([](const char* name) -> const char* { return std::getenv(name); });
}

std::string first_host(const std::string& node_list) {
  std::string host;
  for (size_t i = 0; i < node_list.size() && node_list[i] != ','; ++i) {
    if (node_list[i] != '[') {
      host += node_list[i];
      continue;
    }
    const size_t end = node_list.find(']', i);
    if (end == std::string::npos) {
      host += '[';
      break;
    }
    const size_t first = node_list.find_first_of("-,]", i);
    host += node_list.substr(i + 1, first - i - 1);
    i = end;
  }
  if (host.empty() || host.find_first_of("[]") != std::string::npos)
    throw InputError(str("SLURM_STEP_NODELIST: cannot read '", node_list,
                         "'; hint: set MASTER_ADDR to the host of rank 0"));
  return host;
}

}  // namespace cohort
