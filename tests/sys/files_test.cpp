// Durable writing, appending and locks. Failing disks: tests/apps/disk_test.cpp.
#include "sys/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>

#include <filesystem>
#include <memory>
#include <thread>

#include "sys/input_file.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::read_file;
using test::TempDir;
using test::write_file;

// The entries of a folder whose names contain ".tmp".
size_t temporaries(const std::string& folder) {
  size_t count = 0;
  for (const std::string& name : list_directory(folder)) count += name.find(".tmp") != name.npos;
  return count;
}

// A device node; false for users who may not make one.
bool make_device(const std::string& path, mode_t type, unsigned major, unsigned minor) {
  return ::mknod(path.c_str(), type | 0666, makedev(major, minor)) == 0;
}

TEST(DurableFile, WritesPiecesAndReplacesWhatWasThereWhenItIsComplete) {
  const TempDir dir;
  const std::string path = dir.path("file");
  write_file(path, "a longer text");
  DurableFile file(path);
  file.write("12");
  file.write("");
  file.write("3456");
  file.start_flush();
  file.rewind();
  file.write("AB");
  EXPECT_EQ(read_file(path), "a longer text");
  file.finish();
  EXPECT_EQ(read_file(path), "AB3456");
  DurableFile(path).write("given up");
  EXPECT_EQ(read_file(path), "AB3456");
  EXPECT_EQ(temporaries(dir.path()), 0u);
}

TEST(DurableFile, FollowsLinksToFilesAndKeepsTheirPermissions) {
  const TempDir dir;
  const std::string target = dir.path("target"), link = dir.path("folder/link");
  make_directory(dir.path("folder"));
  write_file(target, "old");
  std::filesystem::permissions(target, std::filesystem::perms(0600));
  std::filesystem::create_symlink("../target", link);
  replace_file(link, "new");
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(read_file(target), "new");
  EXPECT_EQ(std::filesystem::status(target).permissions(), std::filesystem::perms(0600));
}

TEST(DurableFile, CreatesTheFileOfALinkToNothing) {
  const TempDir dir;
  const std::string target = dir.path("target"), link = dir.path("link");
  std::filesystem::create_symlink(target, dir.path("inner"));
  std::filesystem::create_symlink("inner", link);
  replace_file(link, "new");
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(read_file(target), "new");
  std::filesystem::remove(target);
  AppendFile log;
  EXPECT_EQ(log.open(link), "");
  EXPECT_TRUE(std::filesystem::exists(target));
  std::filesystem::create_symlink(dir.path("no/folder"), dir.path("lost"));
  EXPECT_THROW_WITH(replace_file(dir.path("lost"), "x"), Error, "cannot create ");
  EXPECT_TRUE(std::filesystem::is_symlink(dir.path("lost")));
  std::filesystem::create_symlink("loop", dir.path("loop"));
  EXPECT_THROW_WITH(replace_file(dir.path("loop"), "x"), Error, "symbolic links");
}

TEST(DurableFile, WritesToFifosAndDevices) {
  const TempDir dir;
  const std::string fifo = dir.path("fifo"), null = dir.path("null"), full = dir.path("full");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const Descriptor reader(::open(fifo.c_str(), O_RDWR | O_NONBLOCK));
  replace_file(fifo, "through");
  char read[8] = {};
  EXPECT_EQ(::read(reader.get(), read, sizeof read), 7);
  EXPECT_STREQ(read, "through");
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
  if (!make_device(null, S_IFCHR, 1, 3) || !make_device(full, S_IFCHR, 1, 7)) return;
  replace_file(null, "nothing");
  EXPECT_TRUE(std::filesystem::is_character_file(null));
  EXPECT_THROW_WITH(replace_file(full, "text"), Error, full + ": No space left on device");
  AppendFile log;
  EXPECT_EQ(log.open(null), "");
  EXPECT_EQ(log.append("nothing"), "");
}

TEST(DurableFile, RefusesFoldersSocketsAndBlockDevices) {
  const TempDir dir;
  const std::string socket = dir.path("socket"), block = dir.path("block");
  const Descriptor listener(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{.sun_family = AF_UNIX};
  socket.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  std::vector<std::pair<std::string, std::string>> refused{{dir.path(), "a folder"},
                                                           {socket, "a socket"}};
  if (make_device(block, S_IFBLK, 7, 250)) refused.emplace_back(block, "a block device");
  for (const auto& [path, type] : refused) {
    EXPECT_THROW_WITH(replace_file(path, "x"), Error, "cannot create " + path + ": it is " + type);
    EXPECT_EQ(AppendFile().open(path), "it is " + type);
  }
}

TEST(DurableFile, TemporaryNamesCannotBePlanted) {
  const TempDir dir;
  const std::string path = dir.path("file"), victim = dir.path("victim");
  write_file(victim, "precious");
  std::filesystem::create_symlink(victim, path + ".tmp");
  replace_file(path, "new");
  EXPECT_EQ(read_file(victim), "precious");
  EXPECT_EQ(read_file(path), "new");
}

TEST(DurableFile, RemovesWhatAKilledProcessLeft) {
  const TempDir dir;
  const std::string path = dir.path("file");
  write_file(path + ".tmp-0123456789abcdef", "left");
  write_file(path + ".tmp-mine", "no name of a temporary file");
  DurableFile writing(path);
  EXPECT_EQ(temporaries(dir.path()), 2u);
  replace_file(path, "other");
  EXPECT_EQ(temporaries(dir.path()), 2u);
  writing.write("last");
  writing.finish();
  EXPECT_EQ(read_file(path), "last");
  EXPECT_EQ(list_directory(dir.path()), (std::vector<std::string>{"file", "file.tmp-mine"}));
  replace_file(dir.path(std::string(255, 'n')), "a name of the maximum length");
}

TEST(InputFiles, OnlyRegularFilesAreRead) {
  const TempDir dir;
  const std::string fifo = dir.path("fifo"), link = dir.path("link");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", link);
  for (const auto& [path, type] : {std::pair{fifo, "but a FIFO; hint: save"},
                                   {link, "but a character device; hint"},
                                   {dir.path(), "is a folder; hint"}}) {
    SCOPED_TRACE(path);
    EXPECT_THROW_WITH(InputFile{path}, InputError, type);
    EXPECT_THROW_WITH(read_input_file(path), InputError, type);
    EXPECT_THROW_WITH(read_text_file(path), InputError, type);
    EXPECT_THROW_WITH(file_checksum(path), InputError, type);
    EXPECT_THROW_WITH(readable_size(path), InputError, type);
  }
}

TEST(InputFiles, AreRefusedAboveTheLimitBeforeTheyAreRead) {
  const TempDir dir;
  const std::string path = dir.path("file");
  write_file(path, "12345");
  EXPECT_EQ(read_text_file(path, 5), "12345");
  EXPECT_THROW_WITH(read_text_file(path, 4), InputError, path + ": has more than 4 bytes");
  std::filesystem::resize_file(path, int64_t{1} << 40);
  EXPECT_THROW_WITH(read_input_file(path), InputError, path + ": has more than 1073741824 bytes");
  EXPECT_THROW_WITH(InputFile(path).read(0, kMaxText + 1), InputError, "has a line of more than");
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
