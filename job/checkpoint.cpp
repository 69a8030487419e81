#include "job/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "core/log.h"
#include "core/on_exit.h"
#include "core/parallel.h"
#include "data/chat_examples.h"
#include "data/class_examples.h"
#include "job/resources.h"
#include "job/sharded_state.h"
#include "nn/quantized_folder.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kFormat = 2, kFlatFormat = 1;
constexpr const char* kTraining = "training/";
constexpr const char* kPrefix = "step-";
constexpr const char* kTemporary = ".tmp-";
constexpr const char* kReplaced = ".old-";
constexpr const char* kGeneration = "generation_config.json";
// The tokenizer's files without generation_config.json, into which runs write the end of a turn.
NamedFiles text_files(const Tokenizer& tokenizer) {
  NamedFiles files = tokenizer.files();
  std::erase_if(files, [](const auto& file) { return file.first == kGeneration; });
  return files;
}
// Files of every checkpoint besides the manifest, the weights, the tokenizer's files and the
// optimizer's state.
constexpr const char* kMembers[] = {"config.json", "training/state.json"};
constexpr const char* kState[] = {"training/optimizer.safetensors",
                                  "training/optimizer.safetensors.index.json"};
// Weights in one file, in shards, or those of an adapter; a tokenizer of one file or of several.
constexpr const char* kAdapter[] = {"adapter_model.safetensors", "adapter_config.json"};
const std::vector<std::string> kAlternatives[] = {
    {"model.safetensors", "model.safetensors.index.json", kAdapter[0]},
    {std::begin(kTokenizerFiles), std::end(kTokenizerFiles)}};

std::atomic<int> g_saving{0};

std::string step_name(int64_t step) {
  return kPrefix + padded(step, 8);
}

// The step in a name that save_checkpoint() gives, after `prefix`; -1 for any other name.
int64_t step_in(const std::string& name, const std::string& prefix) {
  if (name.rfind(prefix + kPrefix, 0) != 0) return -1;
  const int64_t step = std::atoll(name.c_str() + prefix.size() + std::strlen(kPrefix));
  return name == prefix + step_name(step) ? step : -1;
}

std::vector<fs::path> last_first(std::vector<std::pair<int64_t, fs::path>> found) {
  std::sort(found.rbegin(), found.rend());
  std::vector<fs::path> out;
  for (auto& [position, path] : found) out.push_back(std::move(path));
  return out;
}

// Checkpoint directories, or with `prefix` other entries that save_checkpoint() makes; newest
// first.
std::vector<fs::path> list_checkpoints(const std::string& dir, const std::string& prefix = "") {
  std::vector<std::pair<int64_t, fs::path>> found;
  for (const std::string& name : list_directory(dir))
    if (const int64_t step = step_in(name, prefix); step >= 0 && is_own_directory(dir + "/" + name))
      found.emplace_back(step, fs::path(dir) / name);
  return last_first(std::move(found));
}

// The `checkpoints` directories of a run's stages, the last stage first: "2-grpo", "1-sft".
std::vector<fs::path> list_stages(const std::string& run_dir) {
  std::vector<std::pair<int64_t, fs::path>> found;
  for (const std::string& name : list_directory(run_dir)) {
    const int64_t position = std::atoll(name.c_str());
    const fs::path checkpoints = fs::path(run_dir) / name / "checkpoints";
    if (position > 0 && path_exists(checkpoints)) found.emplace_back(position, checkpoints);
  }
  return last_first(std::move(found));
}

// Lists the files that have just been written, not leftovers that could not be removed.
// `state`: those with the optimizer's state, in `training`.
void write_manifest(const fs::path& dir, const std::vector<std::string>& names,
                    const std::vector<WrittenFile>& state) {
  std::map<std::string, std::pair<int64_t, std::string>> sums;  // bytes, checksum
  const auto add = [&](const std::string& name) {
    const std::string path = dir / name;
    sums[name] = {readable_size(path), file_checksum(path)};
  };
  for (const std::string& name : names) add(name);
  for (const char* name : kMembers) add(name);
  for (const auto& [name, bytes, sum] : state) sums[kTraining + name] = {bytes, sum};
  if (path_exists(dir / kState[1])) add(kState[1]);
  Json files;
  for (const auto& [name, sum] : sums)
    files.set(name, Json().set("bytes", sum.first).set("xxh3", sum.second));
  Json manifest;
  manifest.set("format", kFormat).set("threads", num_threads()).set("files", std::move(files));
  write_file_durable((dir / "manifest.json").string(), manifest.dump(2) + "\n");
}

// Removes the entry at `path`; of a link, not its target.
void remove_entry(const fs::path& path) {
  std::error_code error;
  int attempts = 0;
  do {  // another rank may have just removed its file in it
    fs::remove_all(path, error);
  } while (error == std::errc::no_such_file_or_directory && ++attempts < 100);
  if (error) logging::warn("cannot remove ", path.string(), ": ", error.message());
}

// Removes it atomically for readers: it has a temporary name while its files are deleted.
void remove_checkpoint(const fs::path& path) {
  const fs::path temporary = path.parent_path() / (kTemporary + path.filename().string());
  remove_entry(temporary);
  std::error_code error;
  fs::rename(path, temporary, error);
  remove_entry(error ? path : temporary);
}

// Checkpoints beyond the current step are bad ones that the run discarded: they do not count as
// kept, and further training overwrites them. A finished run removes them.
void remove_old(const std::string& dir, const TrainState& state, int64_t keep_last) {
  int64_t kept = 0;
  for (const fs::path& path : list_checkpoints(dir)) {
    const int64_t step = checkpoint_step(path);
    if (step > state.step) {
      if (state.finished) remove_checkpoint(path);
      continue;
    }
    if (kept++ >= keep_last && step != state.best_step) remove_checkpoint(path);
  }
  // Only now that a valid one exists: the run may have resumed from a replaced one.
  for (const std::string& name : list_directory(dir))
    if (step_in(name, kTemporary) >= 0 || step_in(name, kReplaced) >= 0)
      remove_entry(fs::path(dir) / name);
}

// Calls read(json) with the content of a file of a folder; errors name the file.
template <class Read>
auto read_json(const std::string& folder, const char* name, const Read& read) {
  const std::string path = (fs::path(folder) / name).string();
  const Json json = parse_json(read_text_file(path, kMaxText), path);
  return with_location(json, path, [&] { return read(json); });
}

// The name of a member in a manifest of a format.
std::string member_name(const std::string& member, int64_t format) {
  const bool moved = format == kFlatFormat && member.starts_with(kTraining);
  return moved ? member.substr(std::strlen(kTraining)) : member;
}

// True for the name of a file, which in the present format may be in training/.
bool is_member_name(std::string name, int64_t format) {
  if (format != kFlatFormat && name.starts_with(kTraining)) name.erase(0, std::strlen(kTraining));
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos;
}

// The tokenizer of an adapter's folder, which may lack what generation_config.json and config.json
// of its base say of the end of a text.
std::unique_ptr<Tokenizer> with_ends(std::unique_ptr<Tokenizer> tokenizer, const std::string& base,
                                     const std::string& where) {
  constexpr const char* kEnds[] = {kGeneration, "config.json"};
  NamedFiles files = tokenizer->files();
  if (find_file(files, kGeneration) != nullptr) return tokenizer;
  for (NamedFiles::value_type& file : read_files(base, kEnds)) files.push_back(std::move(file));
  return make_tokenizer(std::move(files), where + " with the stop tokens of " + base);
}

LoadedModel load_saved(const std::string& checkpoint, ModelDescription saved, DType dtype,
                       Device device) {
  const bool is_adapter = is_adapter_folder(checkpoint);
  const std::string weights = is_adapter ? saved.base.path : checkpoint;
  LoadedModel loaded{std::make_unique<Transformer>(saved.config, dtype, saved.head_seed, device),
                     std::move(saved.tokenizer), checkpoint, std::move(saved.base),
                     saved.head_seed.has_value()};
  if (is_adapter) load_adapter(*loaded.model, checkpoint);
  load_weights(*loaded.model, weights, "model", NewHead{saved.head_seed.has_value()});
  return loaded;
}

double positive(const Json& json) {
  const double value = json.as_double();
  if (value > 0 && std::isfinite(value)) return value;
  throw JsonError(str("expected a number above 0, got ", value), &json);
}

}  // namespace

Json TrainState::to_json() const {
  Json json;
  json.set("step", step).set("steps", steps).set("updates", updates);
  json.set("data_position", data_position).set("evaluated_step", evaluated_step);
  json.set("best_step", best_step).set("best", best).set("best_loss", best_loss);
  json.set("seconds", seconds).set("finished", finished).set("total_tokens", total_tokens);
  json.set("unrewarded_steps", unrewarded_steps).set("unanswered_steps", unanswered_steps);
  json.set("monitor", monitor);
  json.set("curriculum", curriculum).set("set_fingerprints", set_fingerprints);
  json.set("planned_steps", Json::Array(planned_steps.begin(), planned_steps.end()));
  json.set("data_fingerprint", data_fingerprint).set("report", report);
  if (beta > 0) json.set("beta", beta).set("start_beta", start_beta);
  if (!teacher.empty()) json.set("teacher", teacher);
  if (entropy) json.set("entropy", *entropy).set("entropy_coef", entropy_coef);
  if (!base.path.empty())
    json.set("base", Json().set("path", base.path).set("fingerprint", base.fingerprint));
  return json;
}

TrainState TrainState::from_json(const Json& json) {
  TrainState s;
  s.step = json.at("step").as_int();
  s.updates = json.at("updates").as_int();
  s.data_position = json.at("data_position").as_int();
  s.best_step = json.at("best_step").as_int();
  s.best = number_or_nan(json.at("best"));
  s.seconds = json.at("seconds").as_double();
  s.finished = json.at("finished").as_bool();
  // Not in checkpoints of version 0.1.0.
  const auto int_or = [&](const char* key, int64_t otherwise) {
    const Json* found = json.find(key);
    return found == nullptr ? otherwise : found->as_int();
  };
  s.unrewarded_steps = int_or("unrewarded_steps", 0);
  s.unanswered_steps = int_or("unanswered_steps", 0);
  s.monitor = json.get_or_null("monitor");
  s.curriculum = json.get_or_null("curriculum");
  s.set_fingerprints = json.get_or_null("set_fingerprints");
  if (json.find("beta") != nullptr) {
    s.beta = positive(json.at("beta"));
    s.start_beta = positive(json.at("start_beta"));
  }
  s.report = json.at("report");
  // Read later, where an error could not name the file.
  for (const char* evaluation : {"first", "last"}) {
    const Json& scores = json.at("report").get_or_null(evaluation);
    for (const char* score : {"score", "val_loss"}) number_or_nan(scores.get_or_null(score));
    for (const char* key : {"measure", "best_measure"})
      if (const Json* measure = scores.find(key)) measure->as_string();
    if (const Json* sets = scores.find("sets"))
      for (const auto& [name, score] : sets->as_object()) number_or_nan(score);
  }
  if (const Json* planned = json.find("planned_steps"))
    for (const Json& number : planned->as_array()) s.planned_steps.push_back(number.as_int());
  s.best_loss = number_or_nan(json.get_or_null("best_loss"));
  if (const Json* sum = json.find("teacher")) s.teacher = sum->as_string();
  if (const Json* entropy = json.find("entropy")) {
    s.entropy = number_or_nan(*entropy);
    s.entropy_coef = json.at("entropy_coef").as_double();
  }
  if (const Json* base = json.find("base"))
    s.base = {base->at("path").as_string(), base->at("fingerprint").as_string()};
  // Version 0.1.0 wrote none of these, and had a best step from the first evaluation on.
  s.total_tokens = number_or_nan(json.get_or_null("total_tokens"));
  s.steps = int_or("steps", 0);
  s.evaluated_step = int_or("evaluated_step", s.best_step);
  if (const Json* sum = json.find("data_fingerprint")) s.data_fingerprint = sum->as_string();
  return s;
}

std::string checkpoint_path(const std::string& dir, int64_t step) {
  return (fs::path(dir) / step_name(step)).string();
}

int64_t checkpoint_step(const fs::path& checkpoint) {
  const std::string name = checkpoint.filename().string();
  return std::max(step_in(name, ""), step_in(name, kReplaced));
}

bool is_saving() {
  return g_saving > 0;
}

namespace {

// The model's files, or its adapter's.
std::vector<std::string> write_weights(const CheckpointView& view, const std::string& dir) {
  if (view.model.config().lora.rank == 0) return save_weights(view.model, dir);
  const std::string& base = view.state.base.path;
  COHORT_CHECK(!base.empty(), "[checkpoint] the base model of an adapter is not known");
  return save_adapter(view.model, dir, base);
}

// The tokenizer's files, in which generation_config.json lists the end of a turn after the
// tokenizer's end of sequence if conversations were trained on: programs that serve the model stop
// at both.
NamedFiles served_files(const CheckpointView& view) {
  const NamedFiles as_read = view.tokenizer.files();
  if (view.data == nullptr || !view.data->is_chat()) return as_read;
  const auto end = chat_format(*view.data, view.tokenizer).end_of_turn(view.tokenizer).token;
  if (!end) return as_read;
  std::vector<int32_t> ids = stop_ids_of(view.tokenizer);
  if (std::ranges::find(ids, *end) == ids.end()) ids.push_back(*end);
  const std::string* text = find_file(as_read, kGeneration);
  Json generation = text == nullptr ? Json(Json::Object{}) : parse_json(*text, kGeneration);
  generation.set("eos_token_id", Json::Array(ids.begin(), ids.end()));
  NamedFiles files = text_files(view.tokenizer);
  files.emplace_back(kGeneration, generation.dump(2) + "\n");
  return files;
}

std::vector<WrittenFile> write_state(const CheckpointView& view, const std::string& training) {
  if (view.comm != nullptr)
    return write_sharded_state(view.optimizer, view.model.parameters(), *view.comm, training);
  const std::string name = "optimizer.safetensors", path = training + "/" + name;
  write_sources(path, view.optimizer.state_sources());
  return {{name, readable_size(path), file_checksum(path)}};
}

void write_checkpoint(const std::string& dir, const CheckpointView& view, int64_t keep_last) {
  make_directory(dir);
  const std::string name = step_name(view.state.step);
  const fs::path target = fs::path(dir) / name, temporary = fs::path(dir) / (kTemporary + name);
  remove_entry(temporary);
  const fs::path training = temporary / "training";
  for (const fs::path& folder : {temporary, training}) make_directory(folder);
  const auto write_json = [&](const char* file, const Json& json) {
    write_file_durable(temporary / file, json.dump(2) + "\n");
  };
  std::vector<std::string> files = write_weights(view, temporary);
  if (view.reference != nullptr)
    for (const std::string& file : save_weights(*view.reference, training, "reference"))
      files.push_back(kTraining + file);
  if (view.reference_adapters != nullptr) {
    save_adapter_tensors(view.model, *view.reference_adapters, training / "reference.safetensors");
    files.push_back("training/reference.safetensors");
  }
  const std::vector<WrittenFile> state = write_state(view, training);
  write_json("config.json", saved_config(view.model, &view.tokenizer));
  if (save_precision(view.model.config().precision, temporary)) files.emplace_back(kPrecisionFile);
  for (const auto& [file, content] : served_files(view)) {
    write_file_durable(temporary / file, content);
    files.push_back(file);
  }
  write_json("training/state.json", view.state.to_json());
  sync_directory(training.string());
  write_manifest(temporary, files, state);
  sync_directory(temporary.string());
  // The step may exist already: a damaged one that the run discarded. newest_checkpoint() knows the
  // temporary name of the old one.
  const fs::path old = fs::path(dir) / (kReplaced + name);
  if (path_exists(target)) {
    remove_entry(old);
    rename_entry(target, old);
  }
  rename_entry(temporary, target);
  sync_directory(dir);
  link_best(dir, view.state);
  remove_old_checkpoints(dir, view.state, keep_last);
}

int64_t tensor_bytes(const CheckpointView& view) {
  int64_t bytes = 0;
  const bool twice = view.reference != nullptr || view.reference_adapters != nullptr;
  for (const NamedParameter& p : view.model.parameters())
    if (p.trained()) bytes += (twice ? 2 : 1) * p.value.nbytes();
  for (const TensorSource& source : view.optimizer.state_sources()) bytes += source.bytes();
  return bytes;
}

// The checkpoints before the one of `state` that neither a resume nor its best step needs.
std::vector<std::string> unused_checkpoints(const std::string& dir, const TrainState& state) {
  std::vector<std::string> out;
  bool newest = true;
  for (const fs::path& path : list_checkpoints(dir)) {
    const int64_t step = checkpoint_step(path);
    if (step < state.step && !std::exchange(newest, false) && step != state.best_step)
      out.push_back(path);
  }
  return out;
}

bool is_full(const std::string& reason) {
  return reason.find(system_reason(ENOSPC)) != reason.npos ||
         reason.find(system_reason(EDQUOT)) != reason.npos;
}

}  // namespace

void save_checkpoint(const std::string& dir, const CheckpointView& view, int64_t keep_last) {
  ++g_saving;
  const OnExit end([] { --g_saving; });
  if (view.comm != nullptr && view.comm->rank() != 0) {
    write_state(view, (fs::path(dir) / (kTemporary + step_name(view.state.step)) / "training"));
    return;
  }
  try {
    write_checkpoint(dir, view, keep_last);
  } catch (const Error& e) {
    remove_entry(fs::path(dir) / (kTemporary + step_name(view.state.step)));
    if (!is_full(e.what())) throw;
    throw Error(e.what() +
                full_disk_advice(dir, tensor_bytes(view), unused_checkpoints(dir, view.state)));
  }
}

void remove_old_checkpoints(const std::string& dir, const TrainState& state, int64_t keep_last) {
  try {
    remove_old(dir, state, keep_last);
  } catch (const Error& e) {
    logging::warn("old checkpoints are not removed: ", e.what());
  }
}

void link_best(const std::string& dir, const TrainState& state) {
  const fs::path best = fs::path(dir) / "best", temporary = fs::path(dir) / ".best.tmp";
  const std::string name = step_name(state.best_step);
  std::error_code error;
  if (!path_exists(dir + "/" + name) || fs::read_symlink(best, error) == name) return;
  remove_entry(temporary);
  fs::create_directory_symlink(name, temporary, error);
  if (!error) fs::rename(temporary, best, error);
  if (error) logging::warn("cannot link ", best.string(), " to ", name, ": ", error.message());
}

bool has_tokenizer(const std::string& dir) {
  return std::ranges::any_of(kTokenizerFiles,
                             [&](const char* name) { return path_exists(dir + "/" + name); });
}

namespace {

// Throws InputError for a manifest, read from `path`, that does not match the checkpoint's files.
void verify_files(const Json& manifest, const std::string& path) {
  const fs::path dir = fs::path(path).parent_path();
  const int64_t format = manifest.at("format").as_int();
  if (format != kFormat && format != kFlatFormat)
    throw InputError(str(path, ": checkpoint format ", format, ", this version reads ", kFlatFormat,
                         " and ", kFormat));
  const Json& files = manifest.at("files");
  const auto lists = [&](const std::string& name) { return files.find(name) != nullptr; };
  const auto require = [&](const std::vector<std::string>& names) {
    if (std::ranges::none_of(names, lists))
      throw InputError(str("damaged checkpoint: ", path, " does not list ", names[0]));
  };
  for (const std::vector<std::string>& names : kAlternatives) require(names);
  require({member_name(kState[0], format), kState[1]});
  // A single file would be read in place of those of the index.
  if (const std::string single = member_name(kState[0], format);
      !lists(single) && path_exists(dir / single))
    throw InputError(str("damaged checkpoint: ", (dir / single).string(),
                         " is of another one: manifest.json lists optimizer.safetensors.index.json",
                         "; hint: remove it"));
  for (const char* member : kMembers) require({member_name(member, format)});
  if (lists(kAdapter[0])) require({kAdapter[1]});
  for (const auto& [name, file] : files.as_object()) {
    if (!is_member_name(name, format))
      throw InputError(str("damaged checkpoint: ", path, ": '", name, "' is not a file name"));
    const std::string member = (dir / name).string();
    const int64_t size = readable_size(member);
    if (size < 0)
      throw InputError(str("damaged checkpoint: ", member, " is missing",
                           name.starts_with(kTraining)
                               ? "; hint: copy the whole folder, or use `cohort export`"
                               : ""));
    if (size != file.at("bytes").as_int())
      throw InputError(str("damaged checkpoint: ", member, " has ", size, " bytes, expected ",
                           file.at("bytes").as_int()));
    if (file_checksum(member) != file.at("xxh3").as_string())
      throw InputError(str("damaged checkpoint: ", member, " does not match its checksum"));
  }
}

}  // namespace

std::string training_folder(const std::string& checkpoint) {
  const bool flat = read_json(checkpoint, "manifest.json", [](const Json& manifest) {
    return manifest.at("format").as_int() == kFlatFormat;
  });
  return flat ? checkpoint : (fs::path(checkpoint) / "training").string();
}

void verify_checkpoint(const std::string& checkpoint) {
  const std::string path = (fs::path(checkpoint) / "manifest.json").string();
  if (!path_exists(path))
    throw InputError(str(checkpoint, " is no complete checkpoint: manifest.json is missing"));
  read_json(checkpoint, "manifest.json", [&](const Json& m) { verify_files(m, path); });
}

bool has_checkpoint(const std::string& dir) {
  return !list_checkpoints(dir).empty() || !list_checkpoints(dir, kReplaced).empty();
}

std::optional<std::string> newest_checkpoint(const std::string& dir, const std::string& before) {
  std::vector<fs::path> candidates = list_checkpoints(dir);
  const std::vector<fs::path> replaced = list_checkpoints(dir, kReplaced);
  candidates.insert(candidates.end(), replaced.begin(), replaced.end());
  if (!before.empty())
    std::erase_if(candidates,
                  [&](const fs::path& c) { return checkpoint_step(c) >= checkpoint_step(before); });
  std::string error;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (i > 0) logging::warn(error, "; using the checkpoint before it");
    try {  // read errors other than damage propagate to the caller
      verify_checkpoint(candidates[i].string());
      return candidates[i].string();
    } catch (const InputError& e) {
      error = e.what();
    }
    // Not damaged, but removed by the run that makes newer ones.
    if (!path_exists(candidates[i].string())) return newest_checkpoint(dir, before);
  }
  if (candidates.empty()) return std::nullopt;
  throw InputError(str(error, "; no other checkpoint in ", dir,
                       " can be used; hint: restore one from a copy, or start a new run"));
}

std::string find_checkpoint(const std::string& path) {
  if (!path_exists(path))
    throw InputError(str("no checkpoint at ", path, ": it does not exist", explain_no_model(path)));
  if (path_exists(path + "/manifest.json")) {
    verify_checkpoint(path);
    return path;
  }
  // A folder from elsewhere, which has no checksums.
  if ((is_model_folder(path) || is_adapter_folder(path)) && !path_exists(path + "/state.json") &&
      !path_exists(path + "/training/state.json"))
    return path;
  std::vector<fs::path> candidates{path, fs::path(path) / "checkpoints"};
  // The last stage that has a checkpoint holds the run's current weights.
  const std::vector<fs::path> stages = list_stages(path);
  candidates.insert(candidates.end(), stages.begin(), stages.end());
  for (const fs::path& candidate : candidates)
    if (const auto found = newest_checkpoint(candidate.string())) return *found;
  const std::string reason = explain_no_model(path);
  throw InputError(
      str("no usable checkpoint in ", path, reason,
          reason.empty() ? "; hint: give a run directory, or a directory step-N in it" : ""));
}

ModelDescription describe_model(const std::string& checkpoint, const std::string& base) {
  const bool is_adapter = is_adapter_folder(checkpoint);
  if (is_adapter && is_model_folder(checkpoint))
    throw InputError(str(checkpoint,
                         " has both a whole model and an adapter (adapter_config.json); hint: move "
                         "one of them to a folder of its own"));
  if (!is_adapter && !base.empty())
    throw InputError(
        str("--base: ", checkpoint, " is a whole model, which has no base; hint: omit it"));
  ModelDescription saved;
  AdapterConfig adapter;
  if (is_adapter) {
    adapter = load_adapter_config(checkpoint);
    saved.base = find_base(checkpoint, adapter, base);
  }
  const std::string weights = is_adapter ? saved.base.path : checkpoint;
  saved.config = load_config(weights);
  saved.config.precision = load_precision(checkpoint);
  if (!saved.config.precision.is_quantized())
    saved.config.precision.base = whole_format(weights, saved.config);
  saved.tokenizer = saved.config.has_images() && !has_tokenizer(checkpoint)
                        ? make_tokenizer(new_image_files(saved.config.image_size), checkpoint)
                        : load_tokenizer(has_tokenizer(checkpoint) ? checkpoint : weights);
  if (is_adapter) saved.tokenizer = with_ends(std::move(saved.tokenizer), weights, checkpoint);
  const int64_t rows = saved.config.vocab_size, ids = saved.tokenizer->vocab_size();
  // Models from elsewhere may have rows that no token uses, but not as the end of a text.
  const Json& eos = saved.config.file.get_or_null("eos_token_id");
  const bool all_used = saved.config.file.is_null() || (eos.is_int() && eos.as_int() == rows - 1);
  if (all_used ? ids != rows : ids > rows)
    throw InputError(str(checkpoint, ": config.json has a vocabulary of ", rows,
                         ", tokenizer.json one of ", ids,
                         "; hint: both must come from the same model"));
  if (is_adapter) saved.config = with_adapter(std::move(saved.config), adapter, checkpoint);
  return saved;
}

LoadedModel load_model(const std::string& checkpoint, DType dtype, Device device,
                       const std::string& base, int64_t context,
                       std::optional<kernels::WeightFormat> format) {
  ModelDescription saved = describe_model(checkpoint, base);
  if (format) {
    const PrecisionConfig trained = load_precision(checkpoint);
    saved.config.precision.base = *format;
    if (trained.is_quantized() && *format != trained.base)
      logging::warn(precision_change(saved.config.precision, trained, checkpoint));
  }
  ModelConfig wanted;
  wanted.context = context;
  wanted.dropout = saved.config.dropout;
  wanted.precision = saved.config.precision;
  wanted.recompute = saved.config.recompute;
  if (saved.config.position == PositionType::kRope && context > saved.config.context)
    logging::warn("model.context: ", context, " is more than the ", saved.config.context,
                  " positions for which the model of ", checkpoint, " was made");
  else
    check_compatible(wanted, {}, saved.config, *saved.tokenizer, checkpoint);
  apply_run_options(wanted, saved.config);
  check_precision(saved.config, dtype, format ? "--weights" : checkpoint + "/" + kPrecisionFile);
  if (!saved.base.fingerprint.empty()) verify_base(saved.base, checkpoint);
  return load_saved(checkpoint, std::move(saved), dtype, device);
}

std::string model_fingerprint(const LoadedModel& model) {
  if (model.base.path.empty()) return base_fingerprint(model.checkpoint);
  return model.base.fingerprint + file_checksum(model.checkpoint + "/adapter_model.safetensors");
}

ModelDescription describe_model(const std::string& checkpoint, const ModelConfig& wanted,
                                const DataConfig& data) {
  ModelDescription saved = describe_model(checkpoint);
  if (saved.config.has_images() == data.images.path.empty())
    throw InputError(str("data: the model of ", checkpoint, " reads ",
                         saved.config.has_images() ? "images; hint: data.images"
                                                   : "texts, and data.images are given"));
  check_compatible(wanted, data, saved.config, *saved.tokenizer, checkpoint);
  apply_run_options(wanted, saved.config);
  if (apply_head(wanted, saved.config, checkpoint)) saved.head_seed = wanted.lora.seed;
  apply_adapters(wanted.lora, saved.config, !saved.base.path.empty(), checkpoint);
  if (wanted.lora.rank > 0 && saved.base.path.empty())
    saved.base.path = fs::canonical(checkpoint).string();
  return saved;
}

LoadedModel load_model(const std::string& checkpoint, const ModelConfig& wanted,
                       const DataConfig& data, DType dtype, Device device) {
  ModelDescription saved = describe_model(checkpoint, wanted, data);
  if (!saved.base.path.empty()) verify_base(saved.base, checkpoint);
  return load_saved(checkpoint, std::move(saved), dtype, device);
}

void apply_run_options(const ModelConfig& wanted, ModelConfig& model) {
  model.dropout = wanted.dropout;
  model.precision = wanted.precision;
  model.recompute = wanted.recompute;
  if (wanted.context == 0) return;
  model.position_rows = std::max(model.position_rows, model.context);
  model.context = wanted.context;
}

bool apply_head(const ModelConfig& wanted, ModelConfig& model, const std::string& source) {
  const bool trains_encoder = wanted.head != HeadType::kNextToken;
  if (trains_encoder != model.is_encoder())
    throw InputError(str("trainer: the model of ", source,
                         model.is_encoder()
                             ? " is an encoder, which trainers mlm and classify train"
                             : " has a causal mask, and mlm and classify train encoders"));
  if (!trains_encoder) return false;
  if (model.head == wanted.head) {
    const auto is_known = [&](const std::string& label) {
      return std::ranges::find(model.labels, label) != model.labels.end();
    };
    const auto unknown = std::ranges::find_if_not(wanted.labels, is_known);
    if (unknown == wanted.labels.end()) return false;
    if (std::ranges::any_of(wanted.labels, is_known))
      throw InputError(str("data: the label '", *unknown, "' is none of the model's in ", source,
                           ": ", join(model.labels, ", "), did_you_mean(*unknown, model.labels)));
  }
  if (wanted.lora.rank > 0)
    throw InputError(str("lora.rank: the model of ", source,
                         " gets a new head, which adapters do not train; hint: lora.rank=0"));
  model.set_head(wanted.head, wanted.labels);
  return true;
}

void check_compatible(const ModelConfig& wanted, const DataConfig& data, const ModelConfig& model,
                      const Tokenizer& tokenizer, const std::string& source) {
  const ConfigFields asked = config_fields(wanted), found = config_fields(model),
                     defaults = config_fields(ModelConfig{});
  // A run may use the first positions of a model's table, which its files keep, and more of them
  // where no table ends.
  const bool may_differ = wanted.context < model.context || model.may_extend();
  for (size_t i = 0; i < asked.size(); ++i) {
    const auto& [key, value] = asked[i];
    // Training options, initialization of new models, and the model's location.
    if (key == "dropout" || key == "recompute" || key == "init_std" || key == "path") continue;
    if (key == "context" && may_differ) continue;
    if (value != defaults[i].second && value != found[i].second)
      throw InputError(str("model.", key, ": ", value, " was asked for, but the model of ", source,
                           " has ", key, ": ", found[i].second,
                           "; hint: leave the key out, or start without init_from"));
  }
  const auto require_tokenizer = [&](const char* key, const std::string& value,
                                     const Tokenizer& other) {
    if (text_files(tokenizer) != text_files(other))
      throw InputError(str(key, ": ", value, " was asked for, but the model of ", source,
                           " has another tokenizer; hint: leave the key out"));
  };
  // The folder is not needed once a model exists.
  if (const std::string& path = data.tokenizer_path; !path.empty()) {
    if (path_exists(path)) require_tokenizer("data.tokenizer_path", path, *load_tokenizer(path));
  } else if (data.tokenizer == TokenizerType::kByte) {
    require_tokenizer("data.tokenizer", "byte", *make_byte_tokenizer());
  }
}

TrainState load_state(const std::string& checkpoint) {
  return read_json(training_folder(checkpoint), "state.json", TrainState::from_json);
}

}  // namespace cohort
