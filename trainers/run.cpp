#include "trainers/run.h"

#include <filesystem>

#include "core/log.h"
#include "core/parallel.h"
#include "trainers/loops.h"
#include "trainers/preview.h"

namespace cohort {

namespace fs = std::filesystem;

Run::Run(RunPlan plan, std::string dir)
    : plan_(std::move(plan)), dir_(std::move(dir)), lock_(std::make_unique<RunLock>(dir_)) {
  logging::set_file(dir_ + "/log.txt");
}

Run Run::create(const RunPlan& plan) {
  preview_plan(plan);  // bad input is an error before there is a directory
  Run run(plan, create_run_directory(plan.output_dir));
  write_file_durable(run.dir_ + "/config.yaml", dump_plan(plan));
  return run;
}

Run Run::resume(const std::string& run_dir, std::span<const std::string> overrides) {
  const std::string config = run_dir + "/config.yaml";
  if (!fs::exists(config))
    throw InputError(
        str("nothing to resume: ", config,
            " does not exist; hint: give the run directory that `cohort train` printed"));
  const RunPlan plan = load_plan(config, overrides);
  for (const TrainConfig& stage : plan.stages) parse_device(stage.device);
  return Run(plan, fs::absolute(run_dir).lexically_normal().string());
}

std::string Run::stage_dir(size_t index) const {
  if (plan_.stages.size() == 1) return dir_;
  return str(dir_, "/", index + 1, "-", trainer_name(plan_.stages[index].trainer));
}

RunResult Run::execute(Reporter& reporter, const std::atomic<bool>& stop) {
  RunResult result{.run_dir = dir_};
  for (size_t i = 0; i < plan_.stages.size() && result.end == StageEnd::kFinished; ++i) {
    if (i > 0) plan_.stages[i].init_from = stage_dir(i - 1);
    fs::create_directories(stage_dir(i));
    result.end = run_stage(i, reporter, stop);
    result.last_trainer = plan_.stages[i].trainer;
  }
  if (result.end == StageEnd::kFinished) {
    const TrainState state = load_state(find_checkpoint(stage_dir(plan_.stages.size() - 1)));
    if (const Json* first = state.report.find("first"))
      result.before = first->at("score").as_double();
    if (const Json* last = state.report.find("last")) result.after = last->at("score").as_double();
  }
  return result;
}

StageEnd Run::run_stage(size_t index, Reporter& reporter, const std::atomic<bool>& stop) {
  const TrainConfig& config = plan_.stages[index];
  if (config.num_threads > 0) set_num_threads(static_cast<int>(config.num_threads));
  StageEnd end = StageEnd::kFinished;
  run_local_ranks(static_cast<int>(config.ranks), [&](Communicator& comm) {
    Stage stage({config, stage_dir(index), comm, reporter, stop});
    const StageEnd mine =
        config.trainer == TrainerType::kGrpo ? train_grpo(stage) : train_supervised(stage);
    if (comm.rank() == 0) end = mine;
  });
  return end;
}

}  // namespace cohort
