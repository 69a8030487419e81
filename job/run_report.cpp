#include "job/run_report.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "config/node.h"
#include "job/checkpoint.h"
#include "nn/adapter_folder.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "sys/input_file.h"
#include "text/utf8.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// Limits of a line: its bytes, those of each text in it, and its keys.
constexpr size_t kMaxLine = 16 << 20, kMaxText = 1500, kMaxKeys = 1000;
// Limits of the completions: steps of evaluations and of training each, lines of a step.
constexpr size_t kMaxSteps = 12, kMaxSamples = 8;
// Limits of the warnings: different ones, bytes of a text.
constexpr size_t kMaxWarnings = 200, kMaxWarning = 4000;

// ---- Lines of the logs. A missing file counts as empty. ----

// `ended` is false for a last line without a line end, which may be incomplete. Only the first
// kMaxLine bytes of a line are used.
void for_each_line(const std::string& path,
                   const std::function<void(const std::string& line, bool ended)>& use) {
  if (!path_exists(path)) return;
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored))
    throw InputError(str(path, ": is not a file; hint: a run's log of that name was expected"));
  std::string line;
  const int error = read_chunks(path, [&](std::string_view chunk) {
    for (size_t at = 0; at < chunk.size();) {
      const size_t end = std::min(chunk.find('\n', at), chunk.size());
      line += chunk.substr(at, std::min(end - at, kMaxLine - line.size()));
      if (end < chunk.size()) use(std::exchange(line, {}), true);
      at = end + 1;
    }
  });
  if (error != 0) throw Error(str("cannot read ", path, ": ", std::strerror(error)));
  if (!line.empty()) use(line, false);
}

// The text, or its beginning and its size.
std::string truncated(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text;
  return str(text.substr(0, next_utf8_boundary(text, limit - 3)), "\n[... truncated: ", text.size(),
             " bytes in all]");
}

// A line, or a value in it: long texts are truncated, and lists and deep objects become texts.
Json shortened(const Json& value, int depth = 0) {
  if (value.is_string()) return truncated(value.as_string(), kMaxText);
  if (value.is_array() || (value.is_object() && depth == 2))
    return truncated(value.dump(), kMaxText);
  if (!value.is_object()) return value;
  Json::Object object;
  for (const auto& [name, item] : value.as_object())
    if (object.size() < kMaxKeys)
      object.emplace_back(truncated(name, kMaxText), shortened(item, depth + 1));
  return object;
}

// Calls use(line, step) for every line that is an object with a step, after shortened(). The number
// of other lines becomes a problem; a last line that is incomplete after a kill is ignored.
void for_each_object(const std::string& path, Json& problems,
                     const std::function<void(Json line, int64_t step)>& use) {
  int64_t damaged = 0;
  for_each_line(path, [&](const std::string& line, bool ended) {
    try {
      const Json object = parse_json(repair_utf8(line), path);
      const int64_t step = object.at("step").as_int();
      use(shortened(object), step);
    } catch (const InputError&) {
      damaged += ended;
    }
  });
  if (damaged > 0) problems.push_back(str(path, ": ", damaged, " damaged lines are left out"));
}

// Thins an interval of lines: each key keeps its first, last, least and greatest value (M4), so
// that no spike is lost. Appends {KEY: [mean, count], ...} to `means`.
void append_extremes(const std::vector<Json>& interval, Json& lines, Json& means) {
  struct Values {
    const Json *first, *last, *least, *greatest;
    double sum = 0;
    int64_t count = 0;
  };
  std::map<std::pair<std::string_view, bool>, Values> keys;  // by name, numbers apart
  for (const Json& line : interval)
    for (const auto& [name, value] : line.as_object()) {
      const std::pair key{std::string_view(name), value.is_number()};
      Values& values = keys.try_emplace(key, Values{&value, &value, &value, &value}).first->second;
      values.last = &value;
      if (!value.is_number()) continue;
      if (value.as_double() < values.least->as_double()) values.least = &value;
      if (value.as_double() > values.greatest->as_double()) values.greatest = &value;
      values.sum += value.as_double();
      ++values.count;
    }
  std::set<const Json*> kept;
  Json::Object mean;
  for (const auto& [key, values] : keys) {
    kept.insert({values.first, values.last, values.least, values.greatest});
    if (key.second)
      mean.emplace_back(key.first,
                        Json::Array{values.sum / static_cast<double>(values.count), values.count});
  }
  means.push_back(std::move(mean));
  for (const Json& line : interval) {
    Json::Object some;
    for (const auto& item : line.as_object())
      if (item.first == "step" || kept.contains(&item.second)) some.push_back(item);
    if (some.size() > 1 || &line == &interval.back()) lines.push_back(std::move(some));
  }
}

// All lines of metrics.jsonl, or about limit / 5 intervals of them, each thinned.
Json metrics_json(const fs::path& path, size_t limit, Json& problems) {
  size_t count = 0;
  for_each_line(path, [&](const std::string&, bool) { ++count; });
  const size_t intervals = limit / 5,
               length = count <= limit ? 1 : (count + intervals - 1) / intervals;
  Json lines = Json(Json::Array{}), means = Json(Json::Array{});
  std::vector<Json> interval;
  for_each_object(path, problems, [&](Json line, int64_t) {
    if (length == 1) return lines.push_back(std::move(line));
    interval.push_back(std::move(line));
    if (interval.size() < length) return;
    append_extremes(interval, lines, means);
    interval.clear();
  });
  if (!interval.empty()) append_extremes(interval, lines, means);
  return Json().set("lines", std::move(lines)).set("means", std::move(means));
}

// The lines of steps that are spread over all of them and include the last one.
class SampledSteps {
 public:
  void add(int64_t step, Json line) {
    if (steps_.empty() || step != steps_.back().first) begin(step);
    Json::Array& lines = steps_.back().second;
    if (lines.size() < kMaxSamples) lines.push_back(std::move(line));
  }
  void append_to(Json& out) {
    const size_t stride = (steps_.size() + kMaxSteps - 1) / kMaxSteps;
    for (size_t i = 0; i < steps_.size(); ++i)
      if (i % stride == 0 || i + 1 == steps_.size())
        for (Json& line : steps_[i].second) out.push_back(std::move(line));
  }

 private:
  // The newest step replaces the one before unless that is the next of the stride, which doubles
  // when the memory is full.
  void begin(int64_t step) {
    if (!steps_.empty() && (begun_ - 1) % stride_ != 0) steps_.pop_back();
    if (steps_.size() == 32 * kMaxSteps) {
      for (size_t i = 1; 2 * i < steps_.size(); ++i) steps_[i] = std::move(steps_[2 * i]);
      steps_.resize(steps_.size() / 2);
      stride_ *= 2;
    }
    steps_.emplace_back(step, Json::Array{});
    ++begun_;
  }

  std::vector<std::pair<int64_t, Json::Array>> steps_;
  size_t begun_ = 0, stride_ = 1;
};

// Some completions of some steps, of evaluations and of training.
Json completions_json(const fs::path& path, Json& problems) {
  SampledSteps evaluations, training;
  for_each_object(path, problems, [&](Json line, int64_t step) {
    (line.find("eval") != nullptr ? evaluations : training).add(step, std::move(line));
  });
  Json samples = Json(Json::Array{});
  evaluations.append_to(samples);
  training.append_to(samples);
  return samples;
}

// The text with numbers replaced by '#', so that warnings that differ only in numbers are equal.
std::string pattern_of(std::string text) {
  for (char& c : text)
    if (c >= '0' && c <= '9') c = '#';
  const auto both = [](char a, char b) { return a == '#' && b == '#'; };
  text.erase(std::unique(text.begin(), text.end(), both), text.end());
  return text;
}

// The warnings and errors of a log.txt, in order of first occurrence. Those that differ only in
// numbers are merged: the text is that of the newest, and the times are local.
Json messages_json(const std::string& path) {
  constexpr size_t kTime = 19, kLevel = 25;  // "[2026-11-22 07:13:48.164 warning] text"
  Json::Array warnings;
  std::map<std::string, size_t> indices;
  std::string time, level, text;  // the newest message; continuation lines may follow
  const auto close = [&] {
    if (text.starts_with("failed: ")) level = "failed";
    if (level != "warning" && level != "error" && level != "failed") return;
    const std::string pattern = pattern_of(text.substr(0, text.find("; hint: ")));
    const auto [index, is_new] = indices.try_emplace(pattern, warnings.size());
    if (is_new && warnings.size() < kMaxWarnings)
      warnings.push_back(Json().set("level", level).set("first", time).set("count", 0));
    if (index->second >= warnings.size()) return;
    Json& warning = warnings[index->second];
    warning.set("text", text).set("last", time).set("count", warning.at("count").as_int() + 1);
  };
  for_each_line(path, [&](const std::string& bytes, bool) {
    const std::string line = truncated(bytes, kMaxWarning);
    const size_t end = line.find("] ");
    if (line.starts_with("[2") && end >= kLevel && end != line.npos) {
      close();
      time = line.substr(1, kTime);
      level = line.substr(kLevel, end - kLevel);
      text = line.substr(end + 2);
    } else if (text.size() < kMaxWarning) {
      text += "\n" + line;
    }
  });
  close();
  return Json().set("warnings", std::move(warnings)).set("last", text);
}

// ---- Directories, configuration and checkpoints ----

bool has_metrics(const fs::path& dir) {
  return path_exists(dir / "metrics.jsonl");
}

// True for a directory such as "2-grpo" that has metrics.
bool is_stage(const fs::path& dir) {
  const std::string name = dir.filename();
  const size_t digits = name.find_first_not_of("0123456789");
  return digits > 0 && digits < 9 && name[digits] == '-' && has_metrics(dir);
}

// Scalars become texts.
Json node_json(const ConfigNode& node) {
  if (node.kind == ConfigNode::Kind::kMap) {
    Json::Object map;
    for (const auto& [name, value] : node.entries) map.emplace_back(name, node_json(value));
    return map;
  }
  if (node.kind != ConfigNode::Kind::kList) return node.scalar;
  Json::Array list;
  for (const ConfigNode& item : node.items) list.push_back(node_json(item));
  return list;
}

// The configuration of a run; null if there is none. One that cannot be read is a problem.
Json config_json(const fs::path& path, Json& problems) {
  try {
    if (path_exists(path)) return node_json(parse_yaml_file(path));
  } catch (const InputError& e) {
    problems.push_back(e.what());
  }
  return Json();
}

// Facts from the newest readable checkpoint; empty if there is none.
Json checkpoint_json(const fs::path& checkpoints, Json& problems) {
  std::vector<std::string> names = list_directory(checkpoints);
  std::sort(names.rbegin(), names.rend());
  for (const std::string& name : names) {
    if (!name.starts_with("step-")) continue;
    const std::string path = checkpoints / name;
    try {
      const TrainState state = load_state(path);
      ModelConfig config = load_config(path);  // a checkpoint's adapter has its base's there
      if (is_adapter_folder(path)) config = with_adapter(config, load_adapter_config(path), path);
      const ModelSize size = model_size(config);
      return Json()
          .set("parameters", size.parameters)
          .set("trained", size.trained())
          .set("step", state.step)
          .set("finished", state.finished)
          .set("seconds", state.seconds);
    } catch (const Error& e) {
      problems.push_back(e.what());
    }
  }
  return Json(Json::Object{});
}

}  // namespace

Json run_report(const std::string& path, size_t limit) {
  fs::path dir = (fs::current_path() / path).lexically_normal();
  if (!dir.has_filename()) dir = dir.parent_path();  // "runs/demo/"
  const auto fail = [&](const char* reason) {
    throw InputError(str(path.empty() ? "''" : path, ": ", reason,
                         "; hint: give the run directory that `cohort train` printed"));
  };
  if (path.empty() || !path_exists(dir)) fail("does not exist");
  if (!path_exists(dir / ".")) fail("is a file, not a run directory");
  const bool has_config = path_exists(dir / "config.yaml"), whole = has_config || !is_stage(dir);
  const fs::path run = whole ? dir : dir.parent_path();
  std::vector<fs::path> stages;
  if (has_metrics(dir)) stages.push_back(dir);
  for (const std::string& name : list_directory(dir))
    if (!has_metrics(dir) && is_stage(dir / name)) stages.push_back(dir / name);
  if (stages.empty() && !has_config)
    fail("is not a run directory: it has neither config.yaml nor metrics.jsonl");

  Json problems = Json(Json::Array{}), logs = Json(Json::Array{});
  Json config = config_json(run / "config.yaml", problems);
  for (const fs::path& stage : stages)
    logs.push_back(Json()
                       .set("name", stage == run ? "" : stage.filename().string())
                       .set("metrics", metrics_json(stage / "metrics.jsonl", limit, problems))
                       .set("completions", completions_json(stage / "completions.jsonl", problems))
                       .set("checkpoint", checkpoint_json(stage / "checkpoints", problems)));
  return Json()
      .set("path", dir.string())
      .set("whole", whole)
      .set("config", std::move(config))
      .set("stages", std::move(logs))
      .set("problems", std::move(problems))
      .set("messages", messages_json(run / "log.txt"));
}

}  // namespace cohort
