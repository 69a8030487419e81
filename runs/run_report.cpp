#include "runs/run_report.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <vector>

#include "nn/model_folder.h"
#include "runs/checkpoint.h"
#include "runs/run_logs.h"
#include "text/utf8.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// The position of a stage, from 1, by the name of its directory ("2-grpo"); 0: not such a name.
int64_t position_of(const std::string& name) {
  const size_t digits = name.find_first_not_of("0123456789");
  return digits > 0 && digits < 9 && digits != name.npos && name[digits] == '-'
             ? std::atoll(name.c_str())
             : 0;
}

bool has_metrics(const fs::path& dir) {
  return path_exists(dir / "metrics.jsonl");
}

// Directories of a run and its stages.
struct RunLocation {
  fs::path dir;                     // as given
  fs::path run;                     // has config.yaml and log.txt: `dir`, or its parent
  std::vector<std::string> stages;  // names of directories in `run`; "": `run` itself
};

RunLocation locate_run(const std::string& path) {
  fs::path dir = (fs::current_path() / path).lexically_normal();
  if (!dir.has_filename()) dir = dir.parent_path();  // "runs/demo/"
  const auto fail = [&](const char* reason) {
    throw InputError(str(path.empty() ? "''" : path, ": ", reason,
                         "; hint: give the run directory that `cohort train` printed"));
  };
  if (path.empty() || !path_exists(dir)) fail("does not exist");
  if (!fs::is_directory(dir)) fail("is a file, not a run directory");
  const bool has_config = path_exists(dir / "config.yaml");
  if (!has_config && position_of(dir.filename()) > 0 && has_metrics(dir))
    return {dir, dir.parent_path(), {dir.filename()}};
  if (has_metrics(dir)) return {dir, dir, {""}};
  RunLocation location{dir, dir, {}};
  for (const std::string& name : list_directory(dir))
    if (position_of(name) > 0 && has_metrics(dir / name)) location.stages.push_back(name);
  std::sort(location.stages.begin(), location.stages.end(),
            [](const auto& a, const auto& b) { return position_of(a) < position_of(b); });
  if (location.stages.empty() && !has_config)
    fail("is not a run directory: it has neither config.yaml nor metrics.jsonl");
  return location;
}

// Keys and values of a configuration, as overrides name them: "model.num_layers": "2".
void flatten(const ConfigNode& node, const std::string& key, Json::Object& out) {
  if (node.kind == ConfigNode::Kind::kMap) {
    for (const auto& [name, value] : node.entries)
      flatten(value, key.empty() ? name : key + "." + name, out);
  } else if (node.kind == ConfigNode::Kind::kList && !node.items.empty() &&
             node.items[0].kind != ConfigNode::Kind::kScalar) {
    for (size_t i = 0; i < node.items.size(); ++i) flatten(node.items[i], str(key, ".", i), out);
  } else {
    std::string text = node.scalar;
    for (const ConfigNode& item : node.items) text += (text.empty() ? "" : ", ") + item.scalar;
    out.emplace_back(repair_utf8(key), repair_utf8(text));
  }
}

// The keys of each stage. A configuration that cannot be read is a warning, not an error.
std::vector<Json> read_configs(const fs::path& run, Json& warnings) {
  std::vector<Json> configs;
  if (!path_exists(run / "config.yaml")) return configs;
  try {
    const ConfigNode root = parse_yaml_file(run / "config.yaml");
    const ConfigNode* stages = root.find("stages");
    const std::vector<ConfigNode> one{root};
    for (const ConfigNode& stage : stages == nullptr ? one : stages->items) {
      Json::Object keys;
      flatten(stage, "", keys);
      configs.emplace_back(std::move(keys));
    }
  } catch (const InputError& e) {
    warnings.push_back(e.what());
  }
  return configs;
}

// Adds facts from the newest readable checkpoint of a stage that is at `step`. The checkpoint of a
// finished stage that is being extended is older than `step`.
void add_checkpoint_facts(const fs::path& checkpoints, int64_t step, Json& facts, Json& warnings) {
  std::vector<std::string> names = list_directory(checkpoints);
  std::sort(names.rbegin(), names.rend());
  for (const std::string& name : names) {
    if (!name.starts_with("step-")) continue;
    const std::string path = checkpoints / name;
    try {
      const TrainState state = load_state(path);
      facts.set("parameters", model_size(load_config(path)).parameters)
          .set("finished", state.finished && step <= state.step)
          .set("seconds", state.seconds);
      return;
    } catch (const Error& e) {
      warnings.push_back(e.what());
    }
  }
}

// {"steps": [...], "values": [...]} of the kept points of a curve.
Json points_json(const Curve& curve, const std::vector<size_t>& kept) {
  Json steps = Json(Json::Array{}), values = Json(Json::Array{});
  for (const size_t i : kept) {
    steps.push_back(curve.steps[i]);
    values.push_back(curve.values[i]);
  }
  return Json().set("steps", std::move(steps)).set("values", std::move(values));
}

Json curves_json(const MetricsLog& log, size_t points) {
  Json curves = Json(Json::Array{});
  for (const Curve& curve : log.curves) {
    const Curve trend = trend_of(curve);
    Json json = points_json(curve, downsampled_points(curve.values, points));
    json.set("name", curve.name).set("of", static_cast<int64_t>(curve.values.size()));
    json.set("trend", points_json(trend, downsampled_points(trend.values, points)));
    curves.push_back(std::move(json));
  }
  return curves;
}

void warn_of_unreadable(const fs::path& path, int64_t lines, Json& warnings) {
  if (lines > 0) warnings.push_back(str(path.string(), ": ", lines, " damaged lines are left out"));
}

Json stage_json(const fs::path& dir, const Json& config, size_t points, Json& warnings) {
  const MetricsLog metrics = read_metrics(dir / "metrics.jsonl");
  CompletionsLog completions = read_completions(dir / "completions.jsonl");
  warn_of_unreadable(dir / "metrics.jsonl", metrics.unreadable, warnings);
  warn_of_unreadable(dir / "completions.jsonl", completions.unreadable, warnings);
  Json facts;
  facts.set("step", metrics.last_step).set("begin", metrics.begin).set("end", metrics.end);
  if (!metrics.rule.empty()) facts.set("rule", metrics.rule);
  add_checkpoint_facts(dir / "checkpoints", metrics.last_step, facts, warnings);
  const std::string name = position_of(dir.filename()) > 0 ? dir.filename().string() : "";
  const Json* trainer = config.find("trainer");
  return Json()
      .set("name", repair_utf8(name))
      .set("trainer", trainer != nullptr ? trainer->as_string() : name.substr(name.find('-') + 1))
      .set("facts", std::move(facts))
      .set("curves", curves_json(metrics, points))
      .set("completions", std::move(completions.samples))
      .set("config", config);
}

// "finished", "failed", "interrupted", or "unfinished": in progress, or killed.
std::string status_of(const Json& stages, size_t planned, const std::string& last_message) {
  const auto finished = [](const Json& stage) {
    const Json* done = stage.at("facts").find("finished");
    return done != nullptr && done->as_bool();
  };
  const Json::Array& all = stages.as_array();
  if (!all.empty() && all.size() >= planned && finished(all.back())) return "finished";
  if (last_message.starts_with("failed: ")) return "failed";
  return last_message.starts_with("interrupted") ? "interrupted" : "unfinished";
}

Json warnings_json(const MessageLog& messages, const Json& report_warnings) {
  Json warnings = Json(Json::Array{});
  for (const Json& text : report_warnings.as_array())
    warnings.push_back(Json().set("level", "report").set("text", text).set("count", 1));
  for (const Warning& warning : messages.warnings)
    warnings.push_back(Json()
                           .set("level", warning.level)
                           .set("text", warning.text)
                           .set("hint", warning.hint)
                           .set("first", warning.first)
                           .set("last", warning.last)
                           .set("count", warning.count));
  return warnings;
}

}  // namespace

Json run_report(const std::string& path, size_t points) {
  const RunLocation location = locate_run(path);
  Json warnings = Json(Json::Array{}), stages = Json(Json::Array{});
  const std::vector<Json> configs = read_configs(location.run, warnings);
  for (const std::string& name : location.stages) {
    const auto index = static_cast<size_t>(std::max<int64_t>(position_of(name), 1)) - 1;
    stages.push_back(stage_json(name.empty() ? location.run : location.run / name,
                                index < configs.size() ? configs[index] : Json(Json::Object{}),
                                points, warnings));
  }
  const bool whole = location.dir == location.run;
  const fs::path name =
      whole ? location.dir.filename() : location.run.filename() / location.stages[0];
  const MessageLog messages = read_messages(location.run / "log.txt");
  return Json()
      .set("name", repair_utf8(name.string()))
      .set("path", repair_utf8(location.dir.string()))
      .set("status", status_of(stages, whole ? configs.size() : 1, messages.last))
      .set("stages", std::move(stages))
      .set("warnings", warnings_json(messages, warnings));
}

}  // namespace cohort
