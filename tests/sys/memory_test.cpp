// Limits of control groups, of both versions, from folders like those of the system.
#include "sys/memory.h"

#include <filesystem>

#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

TEST(ControlGroups, TheTightestLimitOfAGroupAndItsParentsCounts) {
  const TempDir dir;
  const auto free = [&] { return free_memory_of_groups(dir.path(), dir.path("self")); };
  const auto group = [&](const std::string& name, const std::string& limit, int64_t use,
                         int64_t cache) {
    std::filesystem::create_directories(dir.path(name));
    write_file(dir.path(name + "/memory.max"), limit + "\n");
    write_file(dir.path(name + "/memory.current"), std::to_string(use) + "\n");
    write_file(dir.path(name + "/memory.stat"),
               "anon 5\ninactive_file " + std::to_string(cache) + "\n");
  };
  EXPECT_EQ(free(), INT64_MAX);  // no groups at all
  write_file(dir.path("self"), "1:cpu:/other\nnot a group\n0::/a/b\n");
  EXPECT_EQ(free(), INT64_MAX);
  group("a/b", "max", 10, 0);
  EXPECT_EQ(free(), INT64_MAX);
  group("a", "1000", 700, 200);
  EXPECT_EQ(free(), 500);
  group("a/b", "400", 300, 0);
  EXPECT_EQ(free(), 100);
  group(".", "50", 70, 0);
  EXPECT_EQ(free(), 0);
}

TEST(ControlGroups, OfVersionOneAreFoundAtTheRootOfAContainer) {
  const TempDir dir;
  write_file(dir.path("self"), "4:cpuset,memory:/docker/1f\n0::/\n");
  std::filesystem::create_directories(dir.path("memory"));
  write_file(dir.path("memory/memory.limit_in_bytes"), "1000\n");
  write_file(dir.path("memory/memory.usage_in_bytes"), "300\n");
  EXPECT_EQ(free_memory_of_groups(dir.path(), dir.path("self")), 700);
}

}  // namespace
}  // namespace cohort::test
