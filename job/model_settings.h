// Settings for asking a trained model: the prompts and the sampling of its run, and what its
// generation_config.json recommends.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "job/checkpoint.h"
#include "rl/engine/rollout.h"

namespace cohort {

struct ModelSettings {
  DataConfig data;  // the last stage of its run has it; else the defaults
  SamplingConfig sampling;
};

// generation_config.json in the model's folder, else that of its base; "" if neither has it.
std::string generation_config_path(const LoadedModel& loaded);

// The settings for a model. `config`: the path of a run's configuration, if there is one. Of
// `sampling` the fields `given`, by their names in generation_config.json, stay. Others are, in
// this order: the temperature of the run, and its other keys of sampling that are not the defaults;
// the values of generation_config_path(); those of `sampling`. The run's stop tokens, stop strings
// and end of turn are added. Throws InputError naming the file for values that cannot be followed.
ModelSettings model_settings(const LoadedModel& loaded, const std::optional<std::string>& config,
                             SamplingConfig sampling, const std::set<std::string>& given = {});

}  // namespace cohort
