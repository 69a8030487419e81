// The workloads of cohort_bench_grpo: lengths of prompts and completions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cohort::bench {

// Tokens of a prompt, tokens of each of its completions, and the number of completions.
struct RequestSize {
  int64_t prompt = 0, completion = 0, completions = 1;
};

struct Workload {
  std::string name;
  std::vector<RequestSize> requests;
  int64_t max_concurrent = 0;
  int repeats = 5;

  int64_t sequences() const;
  int64_t prompt_tokens() const;
  int64_t sampled_tokens() const;
};

std::vector<Workload> rollout_workloads();

}  // namespace cohort::bench
