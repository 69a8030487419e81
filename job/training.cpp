#include "job/training.h"

#include <chrono>
#include <cmath>

#include "core/allocator.h"
#include "core/log.h"
#include "core/text.h"
#include "job/report.h"
#include "job/resources.h"

namespace cohort {
namespace {

Run begin(const TrainRequest& request, const RunHost& host) {
  if (!request.resume.empty())
    return Run::resume(request.resume, request.overrides, host.group, host.callbacks);
  RunPlan plan = plan_of(request);
  bind_callbacks(plan, host.callbacks);
  const auto start = request.continues ? Run::continue_or_create : Run::create;
  return start(std::move(plan), host.group);
}

RunResult execute(Run& run, const RunHost& host, int64_t profile) {
  ProcessGroup* const group = host.group;
  try {
    return run.execute(host.reporter, host.stop, profile);
  } catch (const std::exception& e) {
    if (group != nullptr) group->fail(e.what());  // before this rank cleans up
    host.reporter.end_stage();
    std::string message = e.what();
    const bool out_of_memory = dynamic_cast<const OutOfMemoryError*>(&e) != nullptr;
    if (out_of_memory)
      message +=
          "; hint: micro_batch_tokens=auto, model.recompute=block or, on a GPU, "
          "optimizer.place=host; or a smaller model" +
          memory_plan(run.plan(), run.preview(), group == nullptr ? 1 : group->size());
    logging::record("failed: " + omit_middle(message));
    if (group != nullptr && dynamic_cast<const PeerError*>(&e) != nullptr)
      logging::record(group->history());
    if (out_of_memory) throw OutOfMemoryError(message);
    throw;
  }
}

// "pass@1 (countdown) 0.05 -> 0.07".
std::string summary(const RunResult& result) {
  const bool text = reads_text(result.last_trainer);
  if (result.measure.empty() || (text && std::isnan(result.before) && std::isnan(result.after)))
    return str("done, with no held-out ", text ? "text" : "problems", " to score,");
  const bool is_loss = text || result.measure == kValidationLoss;
  const double sign = is_loss ? -1 : 1;
  const auto change = [](const std::string& measure, double before, double after, int digits) {
    return std::isnan(before) && std::isnan(after)
               ? measure + " not measured"
               : str(measure, " ", score_text(before, digits), " -> ", score_text(after, digits));
  };
  std::string out =
      change(result.measure, sign * result.before, sign * result.after, is_loss ? 4 : 2);
  if (!is_loss && !std::isnan(result.loss_after))
    out += change(", validation loss", result.loss_before, result.loss_after, 4);
  return out;
}

}  // namespace

RunPlan plan_of(const TrainRequest& request) {
  if (!request.resume.empty()) return load_plan(request.resume + "/config.yaml", request.overrides);
  return request.yaml.empty() ? load_plan(request.config, request.overrides)
                              : parse_plan(request.yaml, request.config, request.overrides);
}

RunResult run_training(const TrainRequest& request, const RunHost& host) {
  const auto start = std::chrono::steady_clock::now();
  Run run = begin(request, host);
  const auto say = [&](const std::string& text) { host.reporter.message(text); };
  say("run directory: " + run.dir());
  const RunResult result = execute(run, host, request.profile);
  if (result.end == StageEnd::kInterrupted) {
    say(str("interrupted; saved. Resume with: cohort train --resume ", run.dir()));
  } else {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    say("run directory: " + run.dir());
    say(str(run.plan().name, ": ", summary(result), " in ", score_text(seconds.count(), 0), " s"));
  }
  run.finish_log();
  return result;
}

}  // namespace cohort
