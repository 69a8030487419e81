// The `cohort` program.
#include <algorithm>
#include <filesystem>
#include <system_error>

#include "apps/commands.h"

int main(int argc, char** argv) {
  std::error_code error;  // without /proc, only `train --gpus` fails
  const std::string self = std::filesystem::read_symlink("/proc/self/exe", error).string();
  const std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  return cohort::apps::run_command({self}, arguments);
}
