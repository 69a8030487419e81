#include "job/model_settings.h"

#include <utility>

#include "job/config.h"
#include "sys/files.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

// Takes the sampling of a run, but for the fields that are given.
void follow_run(SamplingConfig& sampling, const SamplingConfig& run, const std::string& path,
                const std::set<std::string>& given) {
  const auto is_given = [&](const std::string& key) {
    return given.contains(key == "max_completion_length" ? "max_new_tokens" : key);
  };
  const ConfigFields values = config_fields(run), defaults = config_fields(SamplingConfig());
  std::string keys;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& [key, value] = values[i];
    const bool is_default = key != "temperature" && value == defaults[i].second;
    if (key.starts_with("stop_") || is_given(key) || is_default) continue;
    keys += str(key, ": ", value, "\n");
    if (key == "max_completion_length") sampling.max_total_length = 0;
  }
  read_config(sampling, parse_yaml(keys, path));
  for (const int64_t token : run.stop_tokens) sampling.stop_tokens.push_back(token);
  for (const std::string& text : run.stop_strings) sampling.stop_strings.push_back(text);
}

}  // namespace

std::string generation_config_path(const LoadedModel& loaded) {
  for (const std::string& folder : {loaded.checkpoint, loaded.base.path})
    if (const std::string path = folder + "/generation_config.json";
        !folder.empty() && path_exists(path))
      return path;
  return "";
}

ModelSettings model_settings(const LoadedModel& loaded, const std::optional<std::string>& config,
                             SamplingConfig sampling, const std::set<std::string>& given) {
  ModelSettings out{.data = {}, .sampling = std::move(sampling)};
  if (const std::string path = generation_config_path(loaded); !path.empty())
    out.sampling = recommended_sampling(out.sampling, given, path, *loaded.tokenizer,
                                        loaded.model->config().vocab_size);
  if (!config) return out;
  const TrainConfig run = load_plan(*config, {}).stages.back();
  out.data = run.data;
  follow_run(out.sampling, sampling_for(run.sampling, run.data, *loaded.tokenizer), *config, given);
  return out;
}

}  // namespace cohort
