// `cohort train`.
#include <cstdio>

#include "apps/commands.h"
#include "apps/console.h"
#include "trainers/run.h"

namespace cohort::apps {

int train(const TrainOptions& options, const std::atomic<bool>& stop) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::string> overrides = options.overrides;
  if (!options.resume.empty() && !options.config.empty())
    overrides.insert(overrides.begin(), options.config);
  if (options.resume.empty() && options.config.empty())
    throw InputError(
        "train: expected CONFIG.yaml, or --resume RUN_DIR; hint: cohort train configs/demo.yaml");
  Run run = options.resume.empty() ? Run::create(load_plan(options.config, overrides))
                                   : Run::resume(options.resume, overrides);
  Console console;
  console.message("run directory: " + run.dir());
  RunResult result;
  try {
    result = run.execute(console, stop);
  } catch (...) {
    console.end_stage();
    throw;
  }
  if (result.end == StageEnd::kInterrupted) {
    console.message(str("interrupted; saved. Go on with: cohort train --resume ", run.dir()));
    return kInterrupted;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  char line[160];
  if (result.last_trainer == TrainerType::kPretrain)
    std::snprintf(line, sizeof line, "validation loss %.4f -> %.4f in %.0f s", -result.before,
                  -result.after, seconds);
  else
    std::snprintf(line, sizeof line, "pass@1 %.2f -> %.2f in %.0f s", result.before, result.after,
                  seconds);
  console.message("run directory: " + run.dir());
  console.message(run.plan().name + ": " + line);
  return kOk;
}

}  // namespace cohort::apps
