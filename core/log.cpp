#include "core/log.h"

#include <spdlog/details/null_mutex.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <mutex>

#include "core/text.h"

namespace cohort::logging {
namespace {

// Reports that a message could not be written. The default of spdlog prints paths unescaped.
void print_failure(const std::string& reason) {
  std::fprintf(stderr, "cohort: log: %s\n", escape_controls(reason).c_str());
}

// Used under Logger::mutex.
class FileSink : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit FileSink(std::function<void(const std::string&)> write) : write_(std::move(write)) {
    set_pattern("[%Y-%m-%d %H:%M:%S.%e %l] %v");
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    write_({line.data(), line.size()});
  }
  void flush_() override {}
  const std::function<void(const std::string&)> write_;
};

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
    logger->set_error_handler(print_failure);
    // On a terminal a message replaces the progress line.
    const std::string clear = isatty(STDERR_FILENO) == 1 ? "\r\033[K" : "";
    logger->set_pattern(clear + "%^[%H:%M:%S %L]%$ %v");
  }
};

Logger& instance() {
  static Logger* logger = new Logger;  // never destroyed: other destructors may log
  return *logger;
}

constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                 spdlog::level::warn, spdlog::level::err,
                                                 spdlog::level::off};

// The text of a message in a log: escaped, and without further lines that look like messages of
// their own, which begin with '['.
std::string log_text(std::string_view message) {
  std::string text = escape_controls(message);
  for (size_t at = 0; (at = text.find("\n[", at)) != text.npos; ++at) text.insert(at + 1, "    ");
  return text;
}

}  // namespace

void write(Level level, const std::string& message) {
  Logger& log = instance();
  const auto observer = [&] {
    std::lock_guard lock(log.mutex);
    return log.observer;
  }();
  if (observer) observer(level, message);  // it may wait for a thread that logs
  std::lock_guard lock(log.mutex);
  log.logger->log(kLevels[static_cast<int>(level)], "{}", log_text(message));
}

void set_console_level(Level level) {
  instance().console->set_level(kLevels[static_cast<int>(level)]);
}

void set_file(std::function<void(const std::string& line)> write) {
  Logger& log = instance();
  std::lock_guard lock(log.mutex);
  auto& sinks = log.logger->sinks();
  sinks.resize(1);
  log.record.reset();
  if (!write) return;
  sinks.push_back(std::make_shared<FileSink>(std::move(write)));
  log.record = std::make_shared<spdlog::logger>("record", sinks.back());
  log.record->set_error_handler(print_failure);
}

void record(const std::string& text) {
  Logger& log = instance();
  std::lock_guard lock(log.mutex);
  if (log.record == nullptr) return;
  log.record->info("{}",
                   log_text(std::string_view(text).substr(0, text.find_last_not_of('\n') + 1)));
}

void set_observer(std::function<void(Level, const std::string&)> observer) {
  Logger& log = instance();
  std::lock_guard lock(log.mutex);
  log.observer = std::move(observer);
}

}  // namespace cohort::logging
