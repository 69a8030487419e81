// Stages of the shapes in bench/configs, for plans beside measured figures.
#pragma once

#include <string>

#include "job/memory_plan.h"

namespace cohort::test {

// A stage of a shape of bench/configs, as `cohort check` would describe it.
inline StagePreview described(const TrainConfig& config, int64_t vocab, int64_t prompt,
                              int64_t completion) {
  StagePreview stage{.model = config.model};
  stage.model.vocab_size = vocab;
  stage.model.resolve();
  stage.lengths = {.longest_prompt = prompt, .longest_sequence = prompt + completion};
  stage.lengths.mean_sequence = static_cast<double>(prompt + completion);
  return stage;
}

inline TrainConfig bench_config(const char* shape, const std::vector<std::string>& overrides) {
  return load_plan(std::string(COHORT_TESTS) + "/../bench/configs/" + shape + ".yaml", overrides)
      .stages[0];
}

// GRPO steps of 64 prompts of 128 tokens x 8 completions of 256 (cohort_bench_grpo).
inline TrainConfig bench_grpo(const char* shape, const std::vector<std::string>& overrides) {
  TrainConfig config = bench_config(shape, overrides);
  config.batch.trainer = TrainerType::kGrpo;
  config.batch.prompts_per_step = 64;
  config.batch.num_generations = 8;
  config.sampling.max_completion_length = 256;
  return config;
}

}  // namespace cohort::test
