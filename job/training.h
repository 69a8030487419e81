// Training in one call, as the command line tool and programs that embed the library do it.
#pragma once

#include "job/run.h"

namespace cohort {

struct TrainRequest {
  std::string config;                  // CONFIG.yaml, or a name for `yaml`; unused when resuming
  std::string yaml;                    // a configuration as text (parse_plan()); empty: the file
  std::string resume;                  // a run directory
  bool continues = false;              // resumes the run in output_dir, if there is one
  std::vector<std::string> overrides;  // key=value
  int64_t profile = 0;                 // number of steps to trace
};

// load_plan() or parse_plan() of a request, without callbacks.
RunPlan plan_of(const TrainRequest& request);

// The program that trains. Its callbacks and the reporter are called on the threads of the ranks;
// an exception of theirs ends the run and is rethrown. The last checkpoint stays as it is.
struct RunHost {
  Reporter& reporter;
  // Set to true, from a signal handler, another thread or a reporter, to end the evaluation or the
  // step in progress, save and end.
  const std::atomic<bool>& stop;
  Callbacks callbacks = {};       // that the configuration names
  ProcessGroup* group = nullptr;  // the processes that make this call together
};

// Starts or resumes a run, trains and reports what came of it. Throws InputError for a bad request;
// errors of the run are in its log, and OutOfMemoryError has the plan of its memory.
RunResult run_training(const TrainRequest& request, const RunHost& host);

}  // namespace cohort
