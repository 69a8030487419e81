// Console output of a run.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>

#include "apps/commands.h"
#include "core/log.h"
#include "core/text.h"

namespace cohort::apps {
namespace {

constexpr size_t kBarWidth = 24, kBarUnit = 4;         // the width is a multiple of the unit
constexpr int64_t kMinStepsForEta = 3;                 // counted from the start of the process
constexpr double kBarSeconds = 0.1, kLineSeconds = 5;  // between updates

std::string number(double v) {
  char text[32];
  std::snprintf(text, sizeof text, v != 0 && (v < 1e-3 || v >= 1e5) ? "%.2e" : "%.4g", v);
  return text;
}

std::string duration(double seconds) {
  const auto s = static_cast<long>(seconds + 0.5);
  char text[32];
  if (s >= 3600)
    std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
  else
    std::snprintf(text, sizeof text, "%ld:%02ld", s / 60, s % 60);
  return text;
}

// The main metrics of a step as texts, most important first.
std::vector<std::string> metric_texts(const Metrics& metrics) {
  constexpr std::pair<const char*, const char*> kMetrics[] = {{"reward", "reward"},
                                                              {"frac_reward_zero_std", "no-signal"},
                                                              {"entropy", "entropy"},
                                                              {"tokens_per_second", "tokens/s"}};
  std::vector<std::string> out;
  const auto add = [&](const char* name, const char* label) {
    if (const double value = metrics.find(name).value_or(NAN); !std::isnan(value))
      out.push_back(str("  ", label, " ", number(value)));
  };
  if (!metrics.find("reward")) add("loss", "loss");  // the loss of GRPO is not informative
  for (const auto& [name, label] : kMetrics) add(name, label);
  return out;
}

// Columns of a terminal that a line may fill. Excludes the last one, where some terminals wrap.
size_t usable_columns(int terminal) {
  winsize size{};
  const bool known = ioctl(terminal, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return (known ? size.ws_col : 80u) - 1u;
}

// Concatenates as many parts as fit, in order, with the widest bar that fits after the first.
std::string fit(const std::vector<std::string>& parts, double done, size_t columns) {
  std::string rest;
  if (parts[0].size() > columns) return "";
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[0].size() + rest.size() + parts[i].size() > columns) break;
    rest += parts[i];
  }
  const size_t free = columns - parts[0].size() - rest.size(), frame = 3;
  if (free < kBarUnit + frame) return parts[0] + rest;
  const size_t width = std::min(kBarWidth, (free - frame) / kBarUnit * kBarUnit);
  const auto filled = static_cast<size_t>(static_cast<double>(width) * done);
  return parts[0] + " [" + std::string(filled, '#') + std::string(width - filled, '.') + "]" + rest;
}

// Wraps a line of help at spaces. Further lines begin below the text's column, which two spaces
// precede. A column in the right half leaves too little room: its text begins on a line of its own.
std::string wrapped(const std::string& line, size_t columns) {
  constexpr size_t kIndent = 6;
  const size_t begin = line.find_first_not_of(' ');
  if (line.size() <= columns || begin == line.npos) return line;
  const size_t gap = line.find("  ", begin);
  const size_t column = gap == line.npos ? begin : line.find_first_not_of(' ', gap);
  const bool below = column > columns / 2;
  const size_t indent = below ? kIndent : column;
  std::string out = line.substr(0, below ? std::min(gap, column) : column);
  if (below) out = str(gap == line.npos ? "" : out + "\n", std::string(indent, ' '));
  for (size_t at = column, used = indent; at < line.size();) {
    const size_t end = std::min(line.find(' ', at), line.size());
    if (used > indent) {
      const bool full = used + 1 + end - at > columns;
      out += full ? str("\n", std::string(indent, ' ')) : " ";
      used = full ? indent : used + 1;
    }
    out.append(line, at, end - at);
    used += end - at;
    at = end + 1;
  }
  return out;
}

class Console final : public Reporter {
 public:
  void begin_stage(const std::string& name, int64_t step, int64_t steps) override {
    stage_ = name;
    first_step_ = step;
    steps_ = steps;
    start_ = Clock::now();
    last_update_ = {};
  }
  void step(int64_t step, const Metrics& metrics) override {
    const auto now = Clock::now();
    const double since = std::chrono::duration<double>(now - last_update_).count();
    if (since < (is_terminal_ ? kBarSeconds : kLineSeconds) && step != steps_) return;
    last_update_ = now;
    const double elapsed = std::chrono::duration<double>(now - start_).count();
    const std::string text = line(step, elapsed, metrics);
    std::fprintf(stderr, is_terminal_ ? "\r\033[K%s" : "%s\n", text.c_str());
    bar_visible_ = is_terminal_;
    std::fflush(stderr);
  }
  void message(const std::string& text) override {
    logging::record(text);
    clear_bar();
    print(stdout, text.ends_with('\n') ? text : text + "\n");
    std::fflush(stdout);
  }
  void end_stage() override { clear_bar(); }

 private:
  using Clock = std::chrono::steady_clock;
  std::string line(int64_t step, double elapsed, const Metrics& metrics) const {
    std::vector<std::string> parts{str(stage_, " ", step, "/", steps_),
                                   str(" ", duration(elapsed), " elapsed")};
    if (const int64_t trained = step - first_step_; trained >= kMinStepsForEta)
      parts.push_back(
          str(", ",
              duration(elapsed / static_cast<double>(trained) * static_cast<double>(steps_ - step)),
              " left"));
    for (std::string& text : metric_texts(metrics)) parts.push_back(std::move(text));
    const double done =
        static_cast<double>(step) / static_cast<double>(std::max<int64_t>(1, steps_));
    if (is_terminal_) return fit(parts, done, usable_columns(STDERR_FILENO));
    std::string whole;
    for (const std::string& part : parts) whole += part;
    return whole;
  }
  void clear_bar() {
    if (!bar_visible_) return;
    std::fprintf(stderr, "\r\033[K");
    std::fflush(stderr);
    bar_visible_ = false;
  }

  const bool is_terminal_ = isatty(STDERR_FILENO) == 1;
  bool bar_visible_ = false;
  std::string stage_;
  int64_t first_step_ = 0, steps_ = 0;
  Clock::time_point start_, last_update_;
};

}  // namespace

void print(std::FILE* stream, std::string_view text, bool raw) {
  const bool escaped = !raw && isatty(fileno(stream)) == 1;
  const std::string shown = escaped ? escape_controls(text) : std::string(text);
  std::fwrite(shown.data(), 1, shown.size(), stream);
}

void print_now(std::string_view text, bool raw) {
  print(stdout, text, raw);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw Error(str("cannot write to standard output: ", std::strerror(errno)));
}

bool read_line(std::string& line) {
  if (std::getline(std::cin, line)) return true;
  const int error = errno;
  if (std::ferror(stdin) == 0 && !std::cin.bad()) return false;
  throw InputError(str("cannot read standard input: ", std::strerror(error),
                       "; hint: give lines through a pipe or a file"));
}

void print_help(const std::string& text) {
  constexpr size_t kFewest = 40;
  if (isatty(STDOUT_FILENO) != 1) return print(stdout, text);
  const size_t columns = std::max(kFewest, usable_columns(STDOUT_FILENO));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) print(stdout, wrapped(line, columns) + "\n");
}

void print_error(const std::string& message) {
  print(stderr, str("cohort: ", omit_middle(message), "\n"));
}

void print_row(const std::string& name, const std::string& value) {
  constexpr size_t kWidth = 28;
  const std::string padding(kWidth - std::min(kWidth, name.size()), ' ');
  print(stdout, str("  ", name, padding, " ", value, "\n"));
}

std::unique_ptr<Reporter> make_console() {
  return std::make_unique<Console>();
}

}  // namespace cohort::apps
