// Configurations of runs small enough to be repeated many times: one layer, a task with few
// characters, a few steps; and readers for the files of such runs.
#pragma once

#include <algorithm>
#include <filesystem>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "core/rng.h"
#include "data/safetensors.h"
#include "job/checkpoint.h"
#include "tests/support/tensor_files.h"
#include "tests/support/test_util.h"
#include "text/json.h"

namespace cohort::test {

// Keys that all small configurations share.
inline constexpr const char* kSmallModel =
    "model: {num_layers: 1, d_model: 16, num_heads: 2, context: 16, init_std: 0.1}\n"
    "num_threads: 1\n"
    "learning_rate: 1e-2\n"
    "eval: {size: 8}\n"
    "max_completion_length: 4\n";
inline constexpr const char* kSmallData = "data: {task: addition, task_sizes: {max_size: 2}}\n";
// An override: delta layers, and completions past a chunk of them.
inline const std::vector<std::string> kSmallDelta = {
    "model.num_layers=2", "model.context=96", "max_completion_length=80",
    "model.delta={full_every: 2, key_heads: 1, value_heads: 2, key_dim: 4, value_dim: 4}"};
inline const std::string kSmallCommon = std::string(kSmallModel) + kSmallData;
inline constexpr const char* kSmallSft = "trainer: sft\nsteps: 6\nbatch_size: 8\nwarmup_steps: 2\n";
// Rewards that most groups disagree about from the first step on.
inline constexpr const char* kSmallGrpo =
    "trainer: grpo\nsteps: 4\nprompts_per_step: 4\nnum_generations: 6\n"
    "lr_schedule: constant\n"
    "rewards:\n  - {name: format, pattern: '.*1.*'}\n  - {name: task}\n";
inline constexpr const char* kSmallPretrain =
    "trainer: pretrain\nsteps: 6\nbatch_size: 4\nwarmup_steps: 2\n"
    "data: {text: text.txt, held_out_fraction: 0.2}\n";

inline constexpr const char* kSmallPairs =
    "data: {jsonl: {path: pairs.jsonl}, held_out_fraction: 0.2}\n";
inline const std::string kSmallDpo =
    std::string("trainer: dpo\nsteps: 6\nbatch_size: 4\n") + kSmallPairs;

// The pairs, with answers of several lengths.
inline std::string small_pairs() {
  std::string text;
  for (int i = 0; i < 40; ++i) {
    const int a = i % 9, b = i % 7 + 1;
    text += str("{\"prompt\": \"", a, "+", b, std::string(static_cast<size_t>(i % 3), ' '),
                "=\", \"chosen\": \"", a + b, "\", \"rejected\": \"", a + b + i % 5 + 1,
                std::string(static_cast<size_t>(i % 4), '0'), "\"}\n");
  }
  return text;
}

// A text for kSmallPretrain.
inline std::string small_text() {
  std::string text;
  Rng rng(5, rng_stream(kTestPurpose));
  const char* words[] = {"one ", "two ", "three ", "four ", "five ", "and\n"};
  while (text.size() < 1500) text += words[rng.below(6)];
  return text;
}

// The lines of a text that holds one JSON value in each.
inline std::vector<Json> json_lines_of(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(parse_json(line, "JSON line"));
  return lines;
}
inline std::vector<Json> json_lines(const std::string& path) {
  return json_lines_of(read_file(path));
}

// One number of a line of metrics.jsonl.
inline double metric(const Json& line, const std::string& name) {
  return line.at(name).as_double();
}

// The bytes of a file of the newest checkpoint of a run.
inline std::string checkpoint_bytes(const std::string& run_dir,
                                    const std::string& file = "model.safetensors") {
  return read_file(find_checkpoint(run_dir) + "/" + file);
}
// All weights of that checkpoint, one after the other.
inline Tensor final_weights(const std::string& run_dir) {
  const SafetensorsFile file(find_checkpoint(run_dir) + "/model.safetensors");
  std::vector<double> all;
  for (const std::string& name : file.names()) {
    const auto values = file.read(name).to_vector<double>();
    all.insert(all.end(), values.begin(), values.end());
  }
  return Tensor::from(all);
}

// Changes a checkpoint to format 1: no folder training/, whose files are beside the others.
inline void to_format_1(const std::string& checkpoint) {
  const std::string manifest = checkpoint + "/manifest.json";
  Json files, before = parse_json(read_file(manifest), manifest);
  for (const auto& [name, file] : before.at("files").as_object()) {
    const std::string base = name.substr(name.find('/') + 1);
    std::filesystem::rename(checkpoint + "/" + name, checkpoint + "/" + base);
    files.set(base, file);
  }
  std::filesystem::remove(checkpoint + "/training");
  write_file(manifest, before.set("format", 1).set("files", files).dump());
}

// Names of the tensors that vLLM and SGLang load from a folder, sorted. Both read the files
// *.safetensors of the folder itself, not of folders inside it. If there is a
// model.safetensors.index.json, they keep the files that it names. Of a file they take every
// tensor. Files *.bin and *.pt are read only where there is no *.safetensors.
inline std::vector<std::string> served_tensors(const std::string& folder) {
  namespace fs = std::filesystem;
  const std::string index = folder + "/model.safetensors.index.json";
  std::vector<std::string> named, all;
  if (fs::exists(index)) {
    const Json map = parse_json(read_file(index), index);
    for (const auto& [tensor, file] : map.at("weight_map").as_object())
      named.push_back(file.as_string());
  }
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".safetensors")) continue;
    if (fs::exists(index) && std::find(named.begin(), named.end(), name) == named.end()) continue;
    const SafetensorsFile file(entry.path().string());
    all.insert(all.end(), file.names().begin(), file.names().end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

// Saves the checkpoint again with finite weights whose logits are not.
inline void poison(const std::string& run, const std::string& checkpoint) {
  const LoadedModel loaded = load_model(checkpoint, DType::kF32);
  const TrainState state = load_state(checkpoint);
  const auto optimizer = std::make_unique<Optimizer>(loaded.model->parameters(), OptimizerConfig{});
  optimizer->load(safetensors_at(training_folder(checkpoint) + "/optimizer.safetensors"),
                  state.updates);
  Tensor head = loaded.model->head().weight.value();
  head.fill_(std::numeric_limits<float>::max());
  save_checkpoint(run + "/checkpoints",
                  {*loaded.model, nullptr, *loaded.tokenizer, *optimizer, state}, 9);
}

}  // namespace cohort::test
