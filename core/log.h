// Logging facade; core/log.cpp is the only file that knows spdlog. Library code logs, it never
// prints.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "core/check.h"

namespace cohort::logging {

enum class Level { kDebug, kInfo, kWarn, kError };

void write(Level level, const std::string& message);

template <class... Args>
void debug(Args&&... args) {
  write(Level::kDebug, str(std::forward<Args>(args)...));
}
template <class... Args>
void info(Args&&... args) {
  write(Level::kInfo, str(std::forward<Args>(args)...));
}
template <class... Args>
void warn(Args&&... args) {
  write(Level::kWarn, str(std::forward<Args>(args)...));
}
template <class... Args>
void error(Args&&... args) {
  write(Level::kError, str(std::forward<Args>(args)...));
}

// Lowest level that reaches the console (stderr); a log file gets everything.
void set_console_level(Level level);
// Also appends every message to `path`, until the next call; "" stops. Throws InputError if it
// cannot be opened.
void set_file(const std::string& path);
// Appends to the log file alone what reaches the terminal by another way.
void record(const std::string& text);
// Sees every message before the sinks; used by tests to count warnings. An empty function removes
// it.
void set_observer(std::function<void(Level, const std::string&)> observer);

}  // namespace cohort::logging
