#include "sys/memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>

#include "core/check.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

// Names of the files of a version of control groups.
struct GroupFiles {
  const char *limit, *use, *cache;  // cache: a field of memory.stat
};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                  "total_inactive_file"},
                     kVersion2 = {"memory.max", "memory.current", "inactive_file"};

// The number in a file, after `field` if one is given; nullopt for "max" or no such file.
std::optional<int64_t> number_in(const fs::path& path, const std::string& field = "") {
  std::ifstream file(path);
  for (std::string word; !field.empty() && word != field;)
    if (!(file >> word)) return std::nullopt;
  int64_t number = 0;
  if (!(file >> number)) return std::nullopt;
  return number;
}

// Free bytes of the group at `path` below `root` and of its parents.
int64_t free_of(const fs::path& root, const fs::path& path, const GroupFiles& files) {
  int64_t free = INT64_MAX;
  for (fs::path group = path;; group = group.parent_path()) {
    const fs::path dir = root / group;
    const auto limit = number_in(dir / files.limit), use = number_in(dir / files.use);
    if (limit && use) {
      const int64_t cache = number_in(dir / "memory.stat", files.cache).value_or(0);
      free = std::min(free, std::max<int64_t>(0, *limit - std::max<int64_t>(0, *use - cache)));
    }
    if (group.empty()) return free;
  }
}

}  // namespace

int64_t free_memory_of_groups(const std::string& root, const std::string& self) {
  int64_t free = INT64_MAX;
  std::ifstream groups(self);
  // "0::/user.slice" (version 2), "9:cpu,memory:/docker/1f" (version 1).
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = str(",", line.substr(first + 1, second - first - 1), ",");
    const fs::path path = fs::path(line.substr(second + 1)).relative_path();
    if (controllers == ",,")
      free = std::min(free, free_of(root, path, kVersion2));
    else if (controllers.find(",memory,") != controllers.npos)
      free = std::min(free, free_of(fs::path(root) / "memory", path, kVersion1));
  }
  return free;
}

}  // namespace cohort
