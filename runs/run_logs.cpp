#include "runs/run_logs.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "sys/files.h"
#include "sys/input_file.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr size_t kMaxLine = 16 << 20;  // bytes; the rest of a longer line is ignored
constexpr size_t kMaxCurves = 1000;
constexpr size_t kMaxText = 1500;  // bytes of a prompt or completion
constexpr size_t kMaxGroups = 12;  // steps whose completions are kept
constexpr size_t kMaxSamples = 8;  // completions of a step
constexpr size_t kMaxWarnings = 200, kMaxWarning = 4000;

enum class Line { kWhole, kLast };  // kLast: without line end, may be incomplete

void for_each_line(const std::string& path,
                   const std::function<void(const std::string&, Line)>& use) {
  if (!path_exists(path)) return;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored))
    throw InputError(str(path, ": is not a file; hint: a run's log of that name was expected"));
  std::string line;
  const int error = read_chunks(path, [&](std::string_view chunk) {
    for (size_t at = 0; at < chunk.size();) {
      const size_t end = std::min(chunk.find('\n', at), chunk.size());
      line += chunk.substr(at, std::min(end - at, kMaxLine - line.size()));
      if (end < chunk.size()) use(std::exchange(line, {}), Line::kWhole);
      at = end + 1;
    }
  });
  if (error != 0) throw Error(str("cannot read ", path, ": ", std::strerror(error)));
  if (!line.empty()) use(line, Line::kLast);
}

// Calls use(object, step) for every line that is an object with a step. Returns the number of
// complete lines that are not.
int64_t for_each_object(const std::string& path,
                        const std::function<void(const Json&, int64_t)>& use) {
  int64_t unreadable = 0;
  for_each_line(path, [&](const std::string& line, Line kind) {
    try {
      const Json object = parse_json(is_utf8(line) ? line : repair_utf8(line), path);
      const int64_t step = object.at("step").as_int();
      use(object, step);
    } catch (const InputError&) {
      unreadable += kind == Line::kWhole;
    }
  });
  return unreadable;
}

// The text, or its beginning and its size.
std::string truncated(const std::string& text, size_t limit) {
  if (text.size() <= limit) return text;
  return str(text.substr(0, next_utf8_boundary(text, limit - 3)), "\n[... truncated: ", text.size(),
             " bytes in all]");
}

Json short_text(const Json& value) {
  return value.is_string()                       ? Json(truncated(value.as_string(), kMaxText))
         : value.is_object() || value.is_array() ? Json(truncated(value.dump(), kMaxText))
                                                 : value;
}

// The fields of a line of completions.jsonl that are shown.
Json sample_of(const Json& line) {
  constexpr size_t kMaxRewards = 30;
  Json sample;
  for (const char* key : {"step", "eval", "prompt", "completion", "answer", "correct", "reward",
                          "advantage", "truncated"})
    if (const Json* value = line.find(key)) sample.set(key, short_text(*value));
  const Json* rewards = line.find("rewards");
  if (rewards == nullptr || !rewards->is_object()) return sample;
  Json each = Json(Json::Object{});
  for (const auto& [name, value] : rewards->as_object())
    if (each.as_object().size() < kMaxRewards) each.set(truncated(name, 100), short_text(value));
  return sample.set("rewards", std::move(each));
}

// Groups of completions of equal steps: at most kMaxGroups, spread over all of them. Their number
// is not known in advance, so every second one is dropped whenever there are too many.
class SampledSteps {
 public:
  void add(int64_t step, Json sample) {
    if (last_.has_value() && last_->step != step) close();
    if (!last_.has_value()) last_ = Group{step, {}};
    if (last_->samples.size() < kMaxSamples) last_->samples.push_back(std::move(sample));
  }
  std::vector<Json> samples() {
    std::vector<Json> out;
    for (const Group& group : kept_)
      out.insert(out.end(), group.samples.begin(), group.samples.end());
    if (last_.has_value()) out.insert(out.end(), last_->samples.begin(), last_->samples.end());
    return out;
  }

 private:
  struct Group {
    int64_t step;
    std::vector<Json> samples;
  };
  // Keeps the first group, then each `stride_`th.
  void close() {
    if (seen_++ % stride_ == 0) kept_.push_back(std::move(*last_));
    last_.reset();
    if (kept_.size() < kMaxGroups) return;
    stride_ *= 2;
    for (size_t i = 1; 2 * i < kept_.size(); ++i) kept_[i] = std::move(kept_[2 * i]);
    kept_.resize((kept_.size() + 1) / 2);
  }

  std::vector<Group> kept_;
  std::optional<Group> last_;
  size_t seen_ = 0, stride_ = 1;
};

// The text with numbers replaced by '#', so that warnings that differ only in numbers are equal.
std::string pattern_of(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit)
      out += c;
    else if (out.empty() || out.back() != '#')
      out += '#';
  }
  return out;
}

// "[2026-11-22 07:13:48.164 warning] text"
struct Message {
  std::string time, level, text;
};
std::optional<Message> message_of(const std::string& line) {
  constexpr size_t kTime = 23;
  const size_t end = line.find("] ");
  if (!line.starts_with("[2") || end == line.npos || end < kTime + 2) return std::nullopt;
  return Message{line.substr(1, kTime - 4), line.substr(kTime + 2, end - kTime - 2),
                 line.substr(end + 2)};
}

}  // namespace

MetricsLog read_metrics(const std::string& path) {
  MetricsLog log;
  std::unordered_map<std::string, size_t> curve_indices;
  log.unreadable = for_each_object(path, [&](const Json& line, int64_t step) {
    log.last_step = std::max(log.last_step, step);
    for (const auto& [name, value] : line.as_object()) {
      if (name == "time" && value.is_string()) {
        log.end = truncated(value.as_string(), 40);
        if (log.begin.empty()) log.begin = log.end;
      }
      if (name == "correct" && value.is_string()) log.rule = truncated(value.as_string(), 200);
      if (name == "step" || !value.is_number()) continue;
      const auto [index, is_new] = curve_indices.try_emplace(name, log.curves.size());
      if (is_new && log.curves.size() < kMaxCurves) log.curves.push_back({.name = name});
      if (index->second >= log.curves.size()) continue;
      log.curves[index->second].steps.push_back(step);
      log.curves[index->second].values.push_back(value.as_double());
    }
  });
  return log;
}

std::vector<size_t> downsampled_points(const std::vector<double>& values, size_t limit) {
  std::vector<size_t> kept;
  const size_t n = values.size(), intervals = n <= limit ? n : (limit - 2) / 2;
  for (size_t s = 0; s < intervals; ++s) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(n * s / intervals),
               end = values.begin() + static_cast<std::ptrdiff_t>(n * (s + 1) / intervals);
    const auto [least, greatest] = std::minmax_element(begin, end);
    kept.push_back(static_cast<size_t>(least - values.begin()));
    kept.push_back(static_cast<size_t>(greatest - values.begin()));
  }
  if (n > 0) kept.insert(kept.end(), {0, n - 1});
  std::sort(kept.begin(), kept.end());
  kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
  return kept;
}

Curve trend_of(const Curve& curve) {
  constexpr size_t kIntervals = 100;
  Curve trend;
  const size_t n = curve.values.size();
  for (size_t s = 0; s < kIntervals && n > 2 * kIntervals; ++s) {
    const size_t begin = n * s / kIntervals, end = n * (s + 1) / kIntervals;
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += curve.values[i];
    trend.steps.push_back(curve.steps[(begin + end) / 2]);
    trend.values.push_back(sum / static_cast<double>(end - begin));
  }
  return trend;
}

CompletionsLog read_completions(const std::string& path) {
  CompletionsLog log;
  SampledSteps training, evaluations;
  log.unreadable = for_each_object(path, [&](const Json& line, int64_t step) {
    (line.find("eval") != nullptr ? evaluations : training).add(step, sample_of(line));
  });
  for (SampledSteps* steps : {&evaluations, &training})
    for (Json& sample : steps->samples()) log.samples.push_back(std::move(sample));
  return log;
}

MessageLog read_messages(const std::string& path) {
  MessageLog log;
  std::map<std::string, size_t> warning_indices;
  std::optional<Message> open;  // a warning whose continuation lines may follow
  const auto close = [&] {
    if (!open.has_value()) return;
    const size_t hint = open->text.find("; hint: ");
    const std::string text = open->text.substr(0, hint);
    const auto [index, is_new] = warning_indices.try_emplace(pattern_of(text), log.warnings.size());
    if (is_new && log.warnings.size() < kMaxWarnings)
      log.warnings.push_back({.level = open->level, .first = open->time});
    if (index->second < log.warnings.size()) {
      Warning& warning = log.warnings[index->second];
      warning.text = text;
      warning.hint = hint == open->text.npos ? "" : open->text.substr(hint + 8);
      warning.last = open->time;
      ++warning.count;
    }
    open.reset();
  };
  for_each_line(path, [&](const std::string& bytes, Line) {
    const std::string line = truncated(repair_utf8(bytes), kMaxWarning);
    auto message = message_of(line);
    if (!message.has_value()) {
      if (open.has_value() && open->text.size() < kMaxWarning) open->text += "\n" + line;
      return;
    }
    close();
    log.last = message->text;
    const bool failed = message->text.starts_with("failed: ");
    if (failed) message->level = "failed";
    if (message->level == "warning" || message->level == "error" || failed)
      open = std::move(message);
  });
  close();
  return log;
}

}  // namespace cohort
