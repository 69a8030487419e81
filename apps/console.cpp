#include "apps/console.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace cohort::apps {
namespace {

constexpr int kBarWidth = 24;
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

// What a glance at a step should show, of whatever the trainer measures.
std::string glance(const Metrics& metrics) {
  std::string text;
  for (const char* wanted :
       {"loss", "reward", "frac_reward_zero_std", "entropy", "tokens_per_second"})
    for (const auto& [name, value] : metrics)
      if (name == wanted && !std::isnan(value) && !(name == "loss" && metrics[0].first == "reward"))
        text += str("  ",
                    name == "tokens_per_second"      ? "tokens/s"
                    : name == "frac_reward_zero_std" ? "no-signal"
                                                     : name,
                    " ", number(value));
  return text;
}

}  // namespace

Console::Console() : terminal_(isatty(STDERR_FILENO) == 1) {}

void Console::begin_stage(const std::string& name, int64_t step, int64_t steps) {
  stage_ = name;
  first_step_ = step;
  steps_ = steps;
  start_ = Clock::now();
  shown_ = {};
}

void Console::step(int64_t step, const Metrics& metrics) {
  const auto now = Clock::now();
  const double since = std::chrono::duration<double>(now - shown_).count();
  if (since < (terminal_ ? kBarSeconds : kLineSeconds) && step != steps_) return;
  shown_ = now;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double left = elapsed / static_cast<double>(std::max<int64_t>(1, step - first_step_)) *
                      static_cast<double>(steps_ - step);
  std::string line = str(stage_, " ", step, "/", steps_);
  if (terminal_) {
    const auto filled = static_cast<size_t>(kBarWidth * step / std::max<int64_t>(1, steps_));
    line += " [" + std::string(filled, '#') + std::string(kBarWidth - filled, '.') + "]";
  }
  line += str(" ", duration(elapsed), " elapsed, ", duration(left), " left", glance(metrics));
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s", line.c_str());
    bar_shown_ = true;
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  std::fflush(stderr);
}

void Console::message(const std::string& text) {
  clear_bar();
  std::printf("%s%s", text.c_str(), text.empty() || text.back() != '\n' ? "\n" : "");
  std::fflush(stdout);
}

void Console::end_stage() {
  clear_bar();
}

void Console::clear_bar() {
  if (!bar_shown_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  bar_shown_ = false;
}

}  // namespace cohort::apps
