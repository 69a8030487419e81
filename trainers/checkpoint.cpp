#include "trainers/checkpoint.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "core/log.h"
#include "core/parallel.h"
#include "trainers/files.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kFormat = 1;
constexpr const char* kPrefix = "step-";

std::string step_name(int64_t step) {
  char text[40];
  std::snprintf(text, sizeof text, "%s%08lld", kPrefix, static_cast<long long>(step));
  return text;
}

// Checkpoint directories, newest first.
std::vector<fs::path> list_checkpoints(const std::string& dir) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(kPrefix, 0) == 0 && !entry.is_symlink() && entry.is_directory())
      found.push_back(entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

NamedTensors weights_of(const Transformer& model) {
  NamedTensors out;
  for (const NamedParameter& p : model.parameters()) out.emplace_back(p.name, p.variable.value());
  return out;
}

void write_manifest(const fs::path& dir) {
  Json files;
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(dir)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  for (const fs::path& path : paths) {
    Json file;
    file.set("bytes", static_cast<int64_t>(fs::file_size(path)))
        .set("xxh3", file_checksum(path.string()));
    files.set(path.filename().string(), std::move(file));
  }
  Json manifest;
  manifest.set("format", kFormat).set("threads", num_threads()).set("files", std::move(files));
  write_file_durable((dir / "manifest.json").string(), manifest.dump(2) + "\n");
}

void point_best_to(const std::string& dir, const std::string& name) {
  const fs::path temporary = fs::path(dir) / ".best.tmp";
  std::error_code ignored;
  fs::remove(temporary, ignored);
  fs::create_directory_symlink(name, temporary);
  fs::rename(temporary, fs::path(dir) / "best");
}

// What a process that was killed while saving left behind.
void remove_unfinished(const std::string& dir) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(".tmp-", 0) == 0 || name.rfind(".old-", 0) == 0) found.push_back(entry.path());
  }
  std::error_code ignored;
  for (const fs::path& path : found) fs::remove_all(path, ignored);
}

void remove_old(const std::string& dir, const TrainState& state, int64_t keep_last) {
  int64_t kept = 0;
  for (const fs::path& path : list_checkpoints(dir)) {
    if (kept++ < keep_last || path.filename() == step_name(state.best_step)) continue;
    std::error_code error;
    fs::remove_all(path, error);
    if (error)
      logging::warn("cannot remove the old checkpoint ", path.string(), ": ", error.message());
  }
}

}  // namespace

Json TrainState::to_json() const {
  Json json;
  json.set("step", step).set("updates", updates).set("data_position", data_position);
  json.set("best_step", best_step)
      .set("best", best)
      .set("seconds", seconds)
      .set("finished", finished);
  json.set("report", report);
  return json;
}

TrainState TrainState::from_json(const Json& json) {
  TrainState s;
  s.step = json.at("step").as_int();
  s.updates = json.at("updates").as_int();
  s.data_position = json.at("data_position").as_int();
  s.best_step = json.at("best_step").as_int();
  s.best = json.at("best").as_double();
  s.seconds = json.at("seconds").as_double();
  s.finished = json.at("finished").as_bool();
  s.report = json.at("report");
  return s;
}

std::string save_checkpoint(const std::string& dir, const CheckpointView& view, int64_t keep_last) {
  fs::create_directories(dir);
  const std::string name = step_name(view.state.step);
  const fs::path target = fs::path(dir) / name, temporary = fs::path(dir) / (".tmp-" + name);
  remove_unfinished(dir);
  fs::create_directory(temporary);
  write_safetensors((temporary / "model.safetensors").string(), weights_of(view.model));
  if (view.reference != nullptr)
    write_safetensors((temporary / "reference.safetensors").string(), weights_of(*view.reference));
  write_safetensors((temporary / "optimizer.safetensors").string(), view.optimizer.state());
  write_file_durable((temporary / "config.json").string(),
                     view.model.config().to_json().dump(2) + "\n");
  write_file_durable((temporary / "tokenizer.json").string(),
                     view.tokenizer.to_json().dump(2) + "\n");
  write_file_durable((temporary / "state.json").string(), view.state.to_json().dump(2) + "\n");
  write_manifest(temporary);
  sync_directory(temporary.string());
  // The same step may be saved twice (an interrupt right after a periodic save): the new one
  // replaces the old.
  const fs::path old = fs::path(dir) / (".old-" + name);
  if (fs::exists(target)) fs::rename(target, old);
  fs::rename(temporary, target);
  sync_directory(dir);
  std::error_code ignored;
  fs::remove_all(old, ignored);
  if (view.state.best_step == view.state.step) point_best_to(dir, name);
  remove_old(dir, view.state, keep_last);
  return target.string();
}

void verify_checkpoint(const std::string& checkpoint) {
  const fs::path dir(checkpoint);
  const std::string path = (dir / "manifest.json").string();
  if (!fs::exists(path))
    throw InputError(str(checkpoint, " is no complete checkpoint: manifest.json is missing"));
  const Json manifest = parse_json(read_text_file(path), path);
  const int64_t format = manifest.at("format").as_int();
  if (format != kFormat)
    throw InputError(str(path, ": checkpoint format ", format, ", this version reads ", kFormat));
  for (const auto& [name, file] : manifest.at("files").as_object()) {
    const std::string member = (dir / name).string();
    std::error_code error;
    const auto size = fs::file_size(member, error);
    if (error) throw InputError(str("damaged checkpoint: ", member, " is missing"));
    if (static_cast<int64_t>(size) != file.at("bytes").as_int())
      throw InputError(str("damaged checkpoint: ", member, " has ", size, " bytes, expected ",
                           file.at("bytes").as_int()));
    if (file_checksum(member) != file.at("xxh3").as_string())
      throw InputError(str("damaged checkpoint: ", member, " does not match its checksum"));
  }
}

std::optional<std::string> newest_checkpoint(const std::string& dir) {
  for (const fs::path& path : list_checkpoints(dir)) {
    try {
      verify_checkpoint(path.string());
      return path.string();
    } catch (const InputError& e) {
      logging::warn(e.what(), "; using the checkpoint before it");
    }
  }
  return std::nullopt;
}

std::string find_checkpoint(const std::string& path) {
  if (!fs::exists(path)) throw InputError(str("no checkpoint at ", path, ": it does not exist"));
  if (fs::exists(fs::path(path) / "manifest.json")) {
    verify_checkpoint(path);
    return path;
  }
  std::vector<fs::path> candidates{path, fs::path(path) / "checkpoints"};
  // Stage directories are numbered "1-sft", "2-grpo": the last one that has a checkpoint is what
  // the run arrived at.
  std::vector<fs::path> stages;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path, error))
    if (entry.is_directory() && fs::exists(entry.path() / "checkpoints"))
      stages.push_back(entry.path() / "checkpoints");
  std::sort(stages.rbegin(), stages.rend());
  candidates.insert(candidates.end(), stages.begin(), stages.end());
  for (const fs::path& candidate : candidates)
    if (const auto found = newest_checkpoint(candidate.string())) return *found;
  throw InputError(str("no usable checkpoint in ", path,
                       "; hint: give a run directory, or a directory step-N inside it"));
}

void load_weights(Transformer& model, const std::string& path) {
  const SafetensorsFile file(path);
  for (const NamedParameter& p : model.parameters()) {
    const Tensor saved = file.read(p.name);
    if (saved.shape() != p.variable.shape())
      throw InputError(str(path, ": ", p.name, ": expected shape ", p.variable.shape().str(),
                           ", found ", saved.shape().str()));
    Tensor value = p.variable.value();
    value.copy_(saved);
  }
}

LoadedModel load_model(const std::string& checkpoint, DType dtype) {
  const auto json = [&](const char* name) {
    const std::string path = (fs::path(checkpoint) / name).string();
    return parse_json(read_text_file(path), path);
  };
  ModelConfig config = ModelConfig::from_json(json("config.json"));
  config.resolve();
  LoadedModel loaded{std::make_unique<Transformer>(config, dtype, 0),
                     make_tokenizer(json("tokenizer.json"))};
  load_weights(*loaded.model, (fs::path(checkpoint) / "model.safetensors").string());
  return loaded;
}

TrainState load_state(const std::string& checkpoint) {
  const std::string path = (fs::path(checkpoint) / "state.json").string();
  return TrainState::from_json(parse_json(read_text_file(path), path));
}

}  // namespace cohort
