// Durable writing, appending and locks. Failing disks: tests/apps/disk_test.cpp.
#include "sys/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <memory>
#include <thread>

#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::read_file;
using test::TempDir;
using test::write_file;

TEST(DurableFile, WritesPiecesAndReplacesWhatWasThere) {
  const TempDir dir;
  const std::string path = dir.path("file");
  write_file(path, "a longer text");
  DurableFile file(path);
  EXPECT_EQ(read_file(path), "");
  file.write("12");
  file.write("");
  file.write("3456");
  file.start_flush();
  file.rewind();
  file.write("AB");
  file.finish();
  EXPECT_FALSE(file.is_open());
  EXPECT_EQ(read_file(path), "AB3456");
}

TEST(DurableFile, AppearsUnderItsNameWhenItIsComplete) {
  const TempDir dir;
  DurableFile file(dir.path("file.tmp"));
  file.write("whole");
  EXPECT_FALSE(std::filesystem::exists(dir.path("file")));
  file.finish(dir.path("file"));
  EXPECT_FALSE(std::filesystem::exists(dir.path("file.tmp")));
  EXPECT_EQ(read_file(dir.path("file")), "whole");
  replace_file(dir.path("file"), "new");
  EXPECT_EQ(read_file(dir.path("file")), "new");
}

TEST(DurableFile, ErrorsNameThePathAndTheReason) {
  const TempDir dir;
  EXPECT_THROW_WITH(DurableFile(dir.path("none/x")), Error,
                    "cannot create " + dir.path("none/x") + ": No such file or directory");
  EXPECT_THROW_WITH(write_file_durable("/dev/full", "text"), Error,
                    "cannot write /dev/full: No space left on device");
  DurableFile full("/dev/full",
                   [](DurableFile::Step step, const std::string& path, const std::string& reason) {
                     return str(path, "|", step == DurableFile::Step::kWrite, "|", reason);
                   });
  EXPECT_THROW_WITH(full.write("text"), Error, "/dev/full|1|No space left on device");
}

TEST(AppendFile, RemovesAPartOfAPieceAgain) {
  const TempDir dir;
  const std::string path = dir.path("log");
  AppendFile file;
  EXPECT_NE(file.open(dir.path("none/log")), "");
  ASSERT_EQ(file.open(path), "");
  EXPECT_EQ(file.append("line 1\n"), "");
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{10, before.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string partly = file.append("line 2\n");
  ::setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(partly, "only 3 of 7 bytes were written");
  EXPECT_EQ(read_file(path), "line 1\n");
  EXPECT_EQ(file.append("line 3\n"), "");
  EXPECT_EQ(read_file(path), "line 1\nline 3\n");
}

TEST(FileLock, ExcludesOthersUntilItIsReleased) {
  const TempDir dir;
  const std::string path = dir.path("lock");
  EXPECT_FALSE(FileLock(dir.path("none/lock")).is_open());
  auto first = std::make_unique<FileLock>(path);
  EXPECT_TRUE(first->try_lock());
  const FileLock second(path);
  EXPECT_FALSE(second.try_lock());
  std::jthread release([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    first.reset();
  });
  EXPECT_TRUE(second.lock());
  EXPECT_FALSE(FileLock(path).try_lock());
}

}  // namespace
}  // namespace cohort
