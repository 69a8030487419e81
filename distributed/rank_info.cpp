#include "distributed/rank_info.h"

#include <algorithm>
#include <charconv>

#include "core/check.h"

namespace cohort {
namespace {

constexpr int kMaxRanks = 1 << 16;
constexpr int kDefaultPort = 29500;

class Reader {
 public:
  Reader(const EnvironmentVariables& environment, const char* source)
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
  const EnvironmentVariables& environment_;
  const char* source_;
};

// Variables of a launcher, and how it tells a rank of several where the others are.
struct LauncherVariables {
  const char *source, *shown_by, *rank, *size, *local_rank;
  void (*locate)(const Reader& in, RankInfo& info);
};

void locate_by_torchrun(const Reader& in, RankInfo& info) {
  if (in.has("LOCAL_WORLD_SIZE"))
    info.local_size = in.number("LOCAL_WORLD_SIZE", info.local_rank + 1, info.size);
  info.master_addr = in.required("MASTER_ADDR");
  info.master_port = in.number("MASTER_PORT", 1, 65534);
  info.run = in.text("TORCHELASTIC_RUN_ID");
  // torchrun's own store listens there.
  if (in.text("TORCHELASTIC_USE_AGENT_STORE") == "True") ++info.master_port;
}

void locate_by_slurm(const Reader& in, RankInfo& info) {
  info.local_size =
      std::clamp(in.leading_number("SLURM_STEP_TASKS_PER_NODE"), info.local_rank + 1, info.size);
  info.master_addr = in.has("MASTER_ADDR") ? in.text("MASTER_ADDR")
                                           : first_host(in.required("SLURM_STEP_NODELIST"));
  info.run = in.text("SLURM_JOB_ID") + "." + in.text("SLURM_STEP_ID");
  // Steps on the same host must not connect to each other: derive a port from job and step, below
  // the ephemeral range. Neighbouring jobs have other ports than the first steps of a job.
  const int64_t step =
      in.leading_number("SLURM_JOB_ID") + int64_t{101} * in.leading_number("SLURM_STEP_ID");
  info.master_port = in.has("MASTER_PORT") ? in.number("MASTER_PORT", 1, 65535)
                                           : 20000 + static_cast<int>(step % 10000);
}

void locate_by_open_mpi(const Reader& in, RankInfo& info) {
  info.local_size = in.number("OMPI_COMM_WORLD_LOCAL_SIZE", info.local_rank + 1, info.size);
  info.run = in.text("PMIX_NAMESPACE");
  if (in.has("MASTER_ADDR"))
    info.master_addr = in.text("MASTER_ADDR");
  else if (info.local_size == info.size)
    info.master_addr = "127.0.0.1";
  else
    throw InputError(
        "MASTER_ADDR: not set, and mpirun does not provide the address of rank 0; hint: mpirun -x "
        "MASTER_ADDR=HOST_OF_RANK_0 ...");
  info.master_port = in.has("MASTER_PORT") ? in.number("MASTER_PORT", 1, 65535) : kDefaultPort;
}

// Open MPI comes before Slurm, because srun may start the daemons of mpirun. Only srun sets the
// step size: a batch script also has a rank and tasks, but is one process.
constexpr LauncherVariables kLaunchers[] = {
    {"torchrun", "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", locate_by_torchrun},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", locate_by_open_mpi},
    {"Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
     locate_by_slurm}};

}  // namespace

RankInfo rank_info(const EnvironmentVariables& environment) {
  for (const auto& [source, shown_by, rank, size, local_rank, locate] : kLaunchers) {
    if (environment(shown_by) == nullptr && environment(size) == nullptr) continue;
    const Reader in(environment, source);
    RankInfo info{.size = in.number(size, 1, kMaxRanks), .source = source};
    info.rank = in.number(rank, 0, info.size - 1);
    if (info.size == 1) return info;
    info.local_rank = in.number(local_rank, 0, info.rank);
    locate(in, info);
    return info;
  }
  return {};
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
