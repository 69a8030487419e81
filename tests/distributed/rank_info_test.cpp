// Ranks from the environments of torchrun, Slurm and Open MPI.
#include "distributed/rank_info.h"

#include <map>

#include "tests/support/test_util.h"

namespace cohort {
namespace {

using Variables = std::map<std::string, std::string>;

RankInfo info_of(const Variables& variables) {
  return rank_info([&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}
Variables without(Variables base, const std::string& name) {
  base.erase(name);
  return base;
}

const Variables kTorchrun = {{"RANK", "5"},           {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "gpu1"}, {"MASTER_PORT", "29400"}};
// A batch script of `sbatch --ntasks=16` without srun: one process.
const Variables kBatch = {{"SLURM_PROCID", "0"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_NTASKS", "16"},
                          {"SLURM_NPROCS", "16"},
                          {"SLURM_TASKS_PER_NODE", "8(x2)"},
                          {"SLURM_JOB_NODELIST", "node[07-08]"},
                          {"SLURM_JOB_ID", "123456"}};
// One of eight tasks that srun started in that job.
const Variables kSlurm = with(kBatch, {{"SLURM_PROCID", "3"},
                                       {"SLURM_LOCALID", "3"},
                                       {"SLURM_STEP_NUM_TASKS", "8"},
                                       {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                                       {"SLURM_STEP_NODELIST", "node[08-09]"}});
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};

struct ValidCase {
  const char* name;
  Variables variables;
  RankInfo expected;
};

TEST(RankInfo, FollowsTheLaunchersVariables) {
  const ValidCase rows[] = {
      {"nothing", {}, {}},
      {"torchrun", kTorchrun, {5, 8, 1, 4, "gpu1", 29400, "torchrun"}},
      {"torchrun with its own store on the port",
       with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
       {5, 8, 1, 4, "gpu1", 29401, "torchrun"}},
      {"no local size",
       without(kTorchrun, "LOCAL_WORLD_SIZE"),
       {5, 8, 1, 1, "gpu1", 29400, "torchrun"}},
      {"one process of torchrun",
       {{"RANK", "0"}, {"WORLD_SIZE", "1"}},
       {0, 1, 0, 1, "", 0, "torchrun"}},
      {"torchrun within Slurm", with(kSlurm, kTorchrun), {5, 8, 1, 4, "gpu1", 29400, "torchrun"}},
      {"srun", kSlurm, {3, 8, 3, 4, "node08", 23456, "Slurm"}},
      {"srun with the user's MASTER_ADDR",
       with(kSlurm, {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "4000"}}),
       {3, 8, 3, 4, "10.0.0.1", 4000, "Slurm"}},
      {"another step of the job",
       with(kSlurm, {{"SLURM_STEP_ID", "2"}}),
       {3, 8, 3, 4, "node08", 23658, "Slurm"}},
      {"a batch script without srun", kBatch, {}},
      {"one process of srun",
       with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}),
       {0, 1, 0, 1, "", 0, "Slurm"}},
      {"mpirun within Slurm", with(kSlurm, kOpenMpi), {1, 2, 1, 2, "127.0.0.1", 29500, "Open MPI"}},
      {"mpirun on one host", kOpenMpi, {1, 2, 1, 2, "127.0.0.1", 29500, "Open MPI"}},
      {"mpirun on several",
       with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"MASTER_ADDR", "gpu1"}}),
       {1, 4, 1, 2, "gpu1", 29500, "Open MPI"}},
  };
  for (const ValidCase& row : rows) {
    SCOPED_TRACE(row.name);
    const RankInfo info = info_of(row.variables);
    EXPECT_EQ(info.rank, row.expected.rank);
    EXPECT_EQ(info.size, row.expected.size);
    EXPECT_EQ(info.local_rank, row.expected.local_rank);
    EXPECT_EQ(info.local_size, row.expected.local_size);
    EXPECT_EQ(info.master_addr, row.expected.master_addr);
    EXPECT_EQ(info.master_port, row.expected.master_port);
    EXPECT_EQ(info.source, row.expected.source);
  }
}

TEST(RankInfo, NamesTheRun) {
  EXPECT_EQ(info_of(kTorchrun).run, "");
  EXPECT_EQ(info_of(with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "a7"}})).run, "a7");
  EXPECT_EQ(info_of(with(kSlurm, {{"SLURM_STEP_ID", "2"}})).run, "123456.2");
  EXPECT_EQ(info_of(with(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-node7-4242@1"}})).run,
            "prterun-node7-4242@1");
}

TEST(RankInfo, NamesTheVariableThatIsMissingOrInvalid) {
  const std::tuple<Variables, const char*> rows[] = {
      {without(kTorchrun, "RANK"), "RANK: not set"},
      {without(kTorchrun, "WORLD_SIZE"), "WORLD_SIZE: not set"},
      {without(kTorchrun, "LOCAL_RANK"), "LOCAL_RANK: not set"},
      {without(kTorchrun, "MASTER_ADDR"), "MASTER_ADDR: not set"},
      {without(kTorchrun, "MASTER_PORT"), "MASTER_PORT: not set"},
      {with(kTorchrun, {{"RANK", "8"}}), "RANK: expected a number from 0 to 7, got '8'"},
      {with(kTorchrun, {{"RANK", "-1"}}), "RANK: expected a number"},
      {with(kTorchrun, {{"RANK", "1x"}}), "got '1x'"},
      {with(kTorchrun, {{"WORLD_SIZE", "0"}}), "WORLD_SIZE: expected a number from 1"},
      {with(kTorchrun, {{"LOCAL_RANK", "6"}}), "LOCAL_RANK: expected a number from 0 to 5"},
      {with(kTorchrun, {{"LOCAL_WORLD_SIZE", "1"}}), "LOCAL_WORLD_SIZE: expected a number from 2"},
      {with(kTorchrun, {{"MASTER_PORT", "70000"}}), "MASTER_PORT: expected"},
      {with(kTorchrun, {{"MASTER_ADDR", ""}}), "MASTER_ADDR: not set"},
      {without(kSlurm, "SLURM_PROCID"), "SLURM_PROCID: not set"},
      {without(kSlurm, "SLURM_LOCALID"), "SLURM_LOCALID: not set"},
      {without(kSlurm, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST: not set"},
      {with(kSlurm, {{"SLURM_STEP_NODELIST", "node[1"}}), "cannot read 'node[1'"},
      {without(kOpenMpi, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE: not set"},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}}), "MASTER_ADDR: not set"},
  };
  for (const auto& [variables, message] : rows)
    EXPECT_THROW_WITH(info_of(variables), InputError, message);
}

TEST(RankInfo, FirstHostOfASlurmList) {
  const std::pair<const char*, const char*> rows[] = {
      {"gpu1", "gpu1"},
      {"gpu1,gpu2", "gpu1"},
      {"node[07-12,20],other", "node07"},
      {"node[3]", "node3"},
      {"node[3,5-6]", "node3"},
      {"a-b[001-100]", "a-b001"},
      {"rack[1-2]node[3-4],x", "rack1node3"},
      {"node[1-4]-ib,x", "node1-ib"},
  };
  for (const auto& [list, host] : rows) EXPECT_EQ(first_host(list), host) << list;
  for (const char* list : {"", ",a", "node[1-2", "node]1"})
    EXPECT_THROW_WITH(first_host(list), InputError, "cannot read");
}

}  // namespace
}  // namespace cohort
