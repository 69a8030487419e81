// The workloads of cohort_bench_grpo: how long prompts and completions are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cohort::bench {

// A prompt and how many tokens follow it, in each of so many completions.
struct Work {
  int64_t prompt = 0, completion = 0, completions = 1;
};

struct Workload {
  std::string name;
  std::vector<Work> work;
  int64_t max_concurrent = 0;
  int repeats = 5;

  int64_t sequences() const;
  int64_t prompt_tokens() const;
  int64_t drawn_tokens() const;
};

std::vector<Workload> rollout_workloads();

}  // namespace cohort::bench
