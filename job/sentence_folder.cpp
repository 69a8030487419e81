#include "job/sentence_folder.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "sys/files.h"
#include "sys/input_file.h"
#include "text/json.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Calls read(json) with the content of a file, or null if it may be missing and is; errors name the
// file.
template <class Read>
void read_json_file(const std::string& path, bool may_be_missing, const Read& read) {
  const bool is_missing = may_be_missing && !path_exists(path);
  const Json json = is_missing ? Json() : parse_json(read_input_file(path), path);
  with_location(json, path, [&] { read(json); });
}

void expect_option(const Json& json, const std::string& path, const char* key, const Json& value) {
  if (const Json& found = json.get_or_null(key); !found.is_null() && found.dump() != value.dump())
    throw InputError(str(path, ": ", key, " ", excerpt(found.dump()),
                         " is not supported; hint: ", value.dump(), " is"));
}

// The options of the module Transformer.
void expect_transformer(const Json& config, const std::string& path) {
  expect_option(config, path, "do_lower_case", false);
  expect_option(config, path, "transformer_task", "feature-extraction");
  expect_option(config, path, "processing_kwargs", Json::Object{});
  // Beside text there is "message" if texts are put into a chat template.
  const Json text = Json().set("method", "forward").set("method_output_name", "last_hidden_state");
  expect_option(config, path, "modality_config", Json().set("text", text));
}

// The folders of the modules, in their order.
std::vector<std::string> module_folders(const std::string& root) {
  static constexpr const char* kModules[] = {".Transformer", ".Pooling", ".Normalize"};
  const std::string path = root + "/modules.json";
  std::vector<std::string> out;
  read_json_file(path, false, [&](const Json& modules) {
    for (const Json& module : modules.as_array()) {
      const std::string &type = module.at("type").as_string(),
                        &name = module.at("path").as_string();
      if (out.size() == std::size(kModules) || !type.starts_with("sentence_transformers.") ||
          !type.ends_with(kModules[out.size()]))
        throw InputError(str(path, ": module ", out.size(), " is ", excerpt(type),
                             "; hint: Transformer, Pooling and then Normalize are supported"));
      const std::filesystem::path inside(name);
      if (inside.is_absolute() || std::ranges::find(inside, "..") != inside.end())
        throw InputError(str(path, ": the path ", excerpt(name), " leads out of the folder"));
      out.push_back(name.empty() ? root : str(root, "/", name));
    }
    if (out.size() < 2) throw InputError(str(path, ": has no module ", kModules[out.size()] + 1));
  });
  return out;
}

void read_pooling(const std::string& path, SentenceFolder& out) {
  using enum Pooling;
  const std::map<std::string, Pooling> kModes{{"mean", kMean},
                                              {"mean_tokens", kMean},
                                              {"cls", kCls},
                                              {"cls_token", kCls},
                                              {"lasttoken", kLast}};
  read_json_file(path, false, [&](const Json& config) {
    std::vector<std::string> modes;
    for (const auto& [key, value] : config.as_object())
      if (key == "pooling_mode" || (key.starts_with("pooling_mode_") && value.as_bool()))
        modes.push_back(key == "pooling_mode" ? value.as_string() : key.substr(13));
    const auto mode = kModes.find(join(modes, " + "));
    if (mode == kModes.end())
      throw InputError(str(path, ": pooling_mode ", excerpt(join(modes, " + ")),
                           " is not supported; hint: mean, cls and lasttoken are"));
    out.pooling = mode->second;
    expect_option(config, path, "include_prompt", true);
  });
}

SentenceFolder read_folder(const std::string& path, const std::string& prompt) {
  SentenceFolder out{.model = path};
  const std::string file = path + "/config_sentence_transformers.json";
  read_json_file(file, true, [&](const Json& config) {
    expect_option(config, file, "truncate_dim", Json());
    const Json& otherwise = config.get_or_null("default_prompt_name");
    if (prompt.empty() && otherwise.is_null()) return;
    const std::string& name = prompt.empty() ? otherwise.as_string() : prompt;
    const Json& prompts = config.get_or_null("prompts");
    if (prompts.find(name) == nullptr)
      throw InputError(str("prompt: ", file, " has no prompt ", excerpt(name),
                           "; hint: its prompts are ", prompts.dump()));
    out.prompt = prompts.at(name).as_string();
  });
  std::error_code ignored;
  if (const std::string modules = path + "/modules.json";  // a link to nothing is an error
      !path_exists(modules) && !std::filesystem::is_symlink(modules, ignored))
    return out;
  const std::vector<std::string> folders = module_folders(path);
  out.model = folders[0];
  out.normalize = folders.size() > 2;
  read_pooling(folders[1] + "/config.json", out);
  for (const char* name :
       {"sentence_bert_config.json", "sentence_roberta_config.json", "tokenizer_config.json"})
    read_json_file(str(out.model, "/", name), true, [&](const Json& config) {
      const bool own = name[0] == 's';
      const char* const key = own ? "max_seq_length" : "model_max_length";
      if (own) expect_transformer(config, str(out.model, "/", name));
      // Tokenizers without a limit have a number of more than 64 bits.
      const Json& limit = config.get_or_null(key);
      if (!limit.is_null() && !(own ? limit.is_int() || limit.is_big() : limit.is_number()))
        throw InputError(str(out.model, "/", name, ": ", key, ": expected a whole number, found ",
                             excerpt(limit.dump()), "; hint: null has no limit"));
      if (out.max_tokens == INT64_MAX && limit.is_int() && limit.as_int() > 0)
        out.max_tokens = limit.as_int();
    });
  return out;
}

}  // namespace

SentenceFolder read_sentence_folder(const std::string& path, const std::string& prompt,
                                    const std::string& pooling) {
  const std::map<std::string, Pooling> kNames{
      {"mean", Pooling::kMean}, {"cls", Pooling::kCls}, {"last", Pooling::kLast}};
  const auto asked = kNames.find(pooling);
  if (!pooling.empty() && asked == kNames.end())
    throw InputError(str("pooling: expected mean, cls or last, got ", excerpt(pooling)));
  SentenceFolder out = read_folder(path, prompt);
  if (!pooling.empty()) out.pooling = asked->second;
  return out;
}

}  // namespace cohort
