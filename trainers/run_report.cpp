#include "trainers/run_report.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <vector>

#include "data/utf8.h"
#include "nn/model_folder.h"
#include "trainers/checkpoint.h"
#include "trainers/run_logs.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// The place of a stage by the name of its directory ("2-grpo"), from 1; 0: it is no such name.
int64_t position_of(const std::string& name) {
  const size_t digits = name.find_first_not_of("0123456789");
  return digits > 0 && digits < 9 && digits != name.npos && name[digits] == '-'
             ? std::atoll(name.c_str())
             : 0;
}

bool has_metrics(const fs::path& dir) {
  return path_exists(dir / "metrics.jsonl");
}

// Where the parts of a run are.
struct Place {
  fs::path dir;                     // as it was given
  fs::path run;                     // has config.yaml and log.txt: `dir`, or the one above
  std::vector<std::string> stages;  // names of directories in `run`; "": its own
};

Place find_place(const std::string& path) {
  fs::path dir = (fs::current_path() / path).lexically_normal();
  if (!dir.has_filename()) dir = dir.parent_path();  // "runs/demo/"
  const auto fail = [&](const char* what) {
    throw InputError(str(path.empty() ? "''" : path, ": ", what,
                         "; hint: give the run directory that `cohort train` printed"));
  };
  if (path.empty() || !path_exists(dir)) fail("does not exist");
  if (!fs::is_directory(dir)) fail("is a file, not a run directory");
  const bool has_config = path_exists(dir / "config.yaml");
  if (!has_config && position_of(dir.filename()) > 0 && has_metrics(dir))
    return {dir, dir.parent_path(), {dir.filename()}};
  if (has_metrics(dir)) return {dir, dir, {""}};
  Place place{dir, dir, {}};
  for (const std::string& name : list_directory(dir))
    if (position_of(name) > 0 && has_metrics(dir / name)) place.stages.push_back(name);
  std::sort(place.stages.begin(), place.stages.end(),
            [](const auto& a, const auto& b) { return position_of(a) < position_of(b); });
  if (place.stages.empty() && !has_config)
    fail("is no run directory: it has neither config.yaml nor metrics.jsonl");
  return place;
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

// The keys of each stage. A configuration that cannot be read is a doubt, not the end.
std::vector<Json> read_configs(const fs::path& run, Json& doubts) {
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
    doubts.push_back(e.what());
  }
  return configs;
}

// What the newest readable checkpoint of a stage says, which has come to `step`. A finished stage
// that is trained on has left its checkpoint behind.
void add_checkpoint_facts(const fs::path& checkpoints, int64_t step, Json& facts, Json& doubts) {
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
      doubts.push_back(e.what());
    }
  }
}

// {"steps": [...], "values": [...]} of those of a curve's points.
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
    Json json = points_json(curve, kept_points(curve.values, points));
    json.set("name", curve.name).set("of", static_cast<int64_t>(curve.values.size()));
    json.set("trend", points_json(trend, kept_points(trend.values, points)));
    curves.push_back(std::move(json));
  }
  return curves;
}

void note_unreadable(const fs::path& path, int64_t lines, Json& doubts) {
  if (lines > 0) doubts.push_back(str(path.string(), ": ", lines, " damaged lines are left out"));
}

Json stage_json(const fs::path& dir, const Json& config, size_t points, Json& doubts) {
  const MetricsLog metrics = read_metrics(dir / "metrics.jsonl");
  CompletionsLog completions = read_completions(dir / "completions.jsonl");
  note_unreadable(dir / "metrics.jsonl", metrics.unreadable, doubts);
  note_unreadable(dir / "completions.jsonl", completions.unreadable, doubts);
  Json facts;
  facts.set("step", metrics.last_step).set("begin", metrics.begin).set("end", metrics.end);
  if (!metrics.rule.empty()) facts.set("rule", metrics.rule);
  add_checkpoint_facts(dir / "checkpoints", metrics.last_step, facts, doubts);
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

Json warnings_json(const MessageLog& messages, const Json& doubts) {
  Json warnings = Json(Json::Array{});
  for (const Json& doubt : doubts.as_array())
    warnings.push_back(Json().set("level", "report").set("text", doubt).set("count", 1));
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
  const Place place = find_place(path);
  Json doubts = Json(Json::Array{}), stages = Json(Json::Array{});
  const std::vector<Json> configs = read_configs(place.run, doubts);
  for (const std::string& name : place.stages) {
    const auto index = static_cast<size_t>(std::max<int64_t>(position_of(name), 1)) - 1;
    stages.push_back(stage_json(name.empty() ? place.run : place.run / name,
                                index < configs.size() ? configs[index] : Json(Json::Object{}),
                                points, doubts));
  }
  const bool whole = place.dir == place.run;
  const fs::path name = whole ? place.dir.filename() : place.run.filename() / place.stages[0];
  const MessageLog messages = read_messages(place.run / "log.txt");
  return Json()
      .set("name", repair_utf8(name.string()))
      .set("path", repair_utf8(place.dir.string()))
      .set("status", status_of(stages, whole ? configs.size() : 1, messages.last))
      .set("stages", std::move(stages))
      .set("warnings", warnings_json(messages, doubts));
}

}  // namespace cohort
