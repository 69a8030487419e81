#include "core/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <memory>
#include <mutex>

namespace cohort::logging {
namespace {

struct Logger {
  std::mutex mutex;
  std::shared_ptr<spdlog::sinks::stderr_color_sink_mt> console =
      std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  std::shared_ptr<spdlog::logger> logger = std::make_shared<spdlog::logger>("cohort", console);
  std::shared_ptr<spdlog::logger> record;  // writes to the log file only; nullptr without one
  std::function<void(Level, const std::string&)> observer;
  Logger() {
    logger->set_level(spdlog::level::debug);
    logger->flush_on(spdlog::level::info);
    console->set_level(spdlog::level::info);
    // On a terminal a message replaces the progress line.
    const std::string clear = isatty(STDERR_FILENO) == 1 ? "\r\033[K" : "";
    logger->set_pattern(clear + "%^[%H:%M:%S %L]%$ %v");
  }
};

Logger& instance() {
  static Logger* logger = new Logger;  // never destroyed: other destructors may log
  return *logger;
}

spdlog::level::level_enum to_spdlog(Level level) {
  constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                   spdlog::level::warn, spdlog::level::err};
  return kLevels[static_cast<int>(level)];
}

}  // namespace

void write(Level level, const std::string& message) {
  Logger& log = instance();
  std::lock_guard lock(log.mutex);
  if (log.observer) log.observer(level, message);
  log.logger->log(to_spdlog(level), "{}", message);
}

void set_console_level(Level level) {
  instance().console->set_level(to_spdlog(level));
}

void set_file(const std::string& path) {
  Logger& log = instance();
  std::lock_guard lock(log.mutex);
  auto& sinks = log.logger->sinks();
  sinks.resize(1);
  log.record.reset();
  if (path.empty()) return;
  try {
    auto file = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path, false);
    file->set_pattern("[%Y-%m-%d %H:%M:%S.%e %l] %v");
    log.record = std::make_shared<spdlog::logger>("record", file);
    log.record->flush_on(spdlog::level::info);
    sinks.push_back(std::move(file));
  } catch (const spdlog::spdlog_ex& e) {
    throw InputError(str("cannot write the log file ", path, ": ", e.what()));
  }
}

void record(const std::string& text) {
  Logger& log = instance();
  std::lock_guard lock(log.mutex);
  if (log.record == nullptr) return;
  log.record->info("{}", std::string_view(text).substr(0, text.find_last_not_of('\n') + 1));
}

void set_observer(std::function<void(Level, const std::string&)> observer) {
  Logger& log = instance();
  std::lock_guard lock(log.mutex);
  log.observer = std::move(observer);
}

}  // namespace cohort::logging
