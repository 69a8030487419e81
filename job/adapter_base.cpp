#include "job/adapter_base.h"

#include <algorithm>
#include <filesystem>

#include "job/checkpoint.h"
#include "nn/families/family.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

std::string canonical(const std::string& path) {
  std::error_code error;
  const fs::path found = fs::canonical(path, error);
  return error ? path : found.string();
}

// The base that a checkpoint has recorded; empty for other folders. If it was a checkpoint of an
// earlier stage, RUN/1-sft/checkpoints/step-N, the run's directory may have moved with it.
AdapterBase recorded_base(const std::string& dir) {
  if (!path_exists(dir + "/manifest.json")) return {};
  AdapterBase base = load_state(dir).base;
  if (base.path.empty() || path_exists(base.path)) return base;
  const fs::path step = base.path, checkpoints = step.parent_path(),
                 stage = checkpoints.parent_path(),
                 run = fs::path(canonical(dir)).parent_path().parent_path().parent_path();
  const std::string moved = run / stage.filename() / checkpoints.filename() / step.filename();
  if (is_model_folder(moved)) base.path = moved;
  return base;
}

std::string no_base(const std::string& dir, const std::string& reason) {
  return str(dir, " is an adapter, and its base model ", reason);
}

// Keys that describe an adapter: "lora.rank=16 lora.alpha=32 lora.targets=[q_proj]".
std::string keys_of(const LoraConfig& lora) {
  const std::string targets = join(lora.targets, ",");
  return str("lora.rank=", lora.rank, " lora.alpha=", lora.alpha,
             lora.rslora ? " lora.rslora=true" : "",
             targets.empty() ? "" : str(" lora.targets=[", targets, "]"));
}

std::vector<std::string> module_names(ModelConfig config, const LoraConfig& lora) {
  config.lora = lora;
  std::vector<std::string> out;
  for (const AdapterTarget& module : AdapterTargets(config).modules) out.push_back(module.name);
  return out;
}

}  // namespace

std::string base_fingerprint(const std::string& dir) {
  const std::string path = dir + "/config.json";
  Json::Object fields = model_fields(parse_json(read_input_file(path), path)).as_object();
  std::ranges::sort(fields, [](const auto& a, const auto& b) { return a.first < b.first; });
  uint64_t sum = checksum(Json(std::move(fields)).dump());
  const SafetensorsFolder weights(dir, "model");
  for (const std::string& file : weights.files())
    sum = checksum(file_checksum(dir + "/" + file), checksum(file, sum));
  return hex(sum);
}

AdapterBase find_base(const std::string& dir, const AdapterConfig& adapter,
                      const std::string& given) {
  AdapterBase base = recorded_base(dir);
  const bool recorded = !base.path.empty();
  const std::string name = !given.empty() ? given : recorded ? base.path : adapter.base;
  // Training has no option for it.
  const std::string edit =
      str(", or write that folder to base_model_name_or_path in ", dir, "/adapter_config.json");
  if (name.empty())
    throw InputError(no_base(
        dir, str("is not named in adapter_config.json; hint: --base DIR", recorded ? "" : edit)));
  if (!path_exists(name)) {
    const std::string quantized = quantized_base_hint(name), hub = hub_hint(name, name);
    if (given.empty() && !recorded && !quantized.empty())
      throw InputError(no_base(dir, str(name, quantized, edit)));
    const std::string hint =
        !hub.empty() ? hub + ": --base DIR"
        : recorded   ? "; hint: restore the folder; commands but train take another: --base DIR"
                     : "; hint: restore the folder, or give it: --base DIR";
    throw InputError(no_base(dir, str(name, " is no folder here", hint, recorded ? "" : edit)));
  }
  base.path = canonical(recorded && given.empty() ? name : find_checkpoint(name));
  if (is_adapter_folder(base.path))
    throw InputError(no_base(dir, str(name,
                                      " is an adapter itself; hint: make a whole model of that "
                                      "one: cohort export --merged ",
                                      name, " DIR")));
  if (!is_model_folder(base.path))
    throw InputError(no_base(dir, str(name, " has no weights", explain_no_model(base.path))));
  return base;
}

void verify_base(AdapterBase& base, const std::string& dir) {
  const std::string found = base_fingerprint(base.path);
  if (!base.fingerprint.empty() && found != base.fingerprint)
    throw InputError(no_base(
        dir, str("in ", base.path,
                 " is not the one that it was trained on: the fingerprint of its "
                 "weights and config.json is ",
                 found, ", and was ", base.fingerprint,
                 "; hint: restore its files; commands but train take another folder: --base DIR")));
  base.fingerprint = found;
}

void apply_adapters(const LoraConfig& wanted, ModelConfig& model, bool is_adapter,
                    const std::string& dir) {
  if (!is_adapter) {
    if (wanted.rank > 0) module_names(model, wanted);  // checks the targets
    model.lora = wanted;
    return;
  }
  const LoraConfig& found = model.lora;
  if (wanted.rank == 0)
    throw InputError(
        str("init_from: ", dir, " is an adapter of rank ", found.rank, "; hint: ", keys_of(found),
            " to train it on, or make a whole model of it: cohort export --merged ", dir, " DIR"));
  const auto require = [&](const char* key, const auto& asked, const auto& has) {
    if (asked != has)
      throw InputError(str("lora.", key, ": ", asked, " was asked for, but the adapter of ", dir,
                           " has ", has, "; hint: lora.", key, "=", has));
  };
  const auto text = [](bool value) { return std::string(value ? "true" : "false"); };
  require("rank", wanted.rank, found.rank);
  require("alpha", wanted.alpha, found.alpha);
  require("rslora", text(wanted.rslora), text(found.rslora));
  if (module_names(model, wanted) != module_names(model, found))
    throw InputError(str("lora.targets: they are not the modules of the adapter of ", dir,
                         "; hint: ", keys_of(found),
                         found.targets.empty() ? ", without lora.targets" : ""));
  model.lora.seed = wanted.seed;
}

}  // namespace cohort
