// Logging facade; only core/log.cpp depends on spdlog. Library code logs and never prints. All text
// is escaped by escape_controls(), on the console and in the file.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "core/check.h"

namespace cohort::logging {

enum class Level { kDebug, kInfo, kWarn, kError, kNone };

void write(Level level, const std::string& message);

template <class... Args>
void info(Args&&... args) {
  write(Level::kInfo, str(std::forward<Args>(args)...));
}
template <class... Args>
void warn(Args&&... args) {
  write(Level::kWarn, str(std::forward<Args>(args)...));
}

// Lowest level shown on the console (stderr), kNone: none; the log file receives all levels.
void set_console_level(Level level);
// Also passes every message to `write`, which appends it to the log file: one call per message,
// with its line break. An exception's text is printed. An empty function ends it.
void set_file(std::function<void(const std::string& line)> write);
// Appends to the log file only, for text that is printed on the terminal separately.
void record(const std::string& text);
// Called with every message before the sinks, for programs that have their own log, and tests that
// count warnings. It must not throw. An empty function removes it, while a call may still run.
void set_observer(std::function<void(Level, const std::string&)> observer);

}  // namespace cohort::logging
