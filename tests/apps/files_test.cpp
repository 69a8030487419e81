// Files that a command is given or writes: FIFOs, devices, damaged disks, planted folders.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <filesystem>
#include <thread>

#include "sys/descriptor.h"
#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class CommandFiles : public testing::Test {
 protected:
  CommandFiles() {
    write_file(dir_.path("run.yaml"), std::string(kSmallModel) + kSmallData + kSmallSft +
                                          "output_dir: run\nlog_every: 1\n");
    write_file(dir_.path("text.txt"), small_text());
    write_file(dir_.path("text.yaml"), std::string(kSmallModel) + kSmallPretrain);
    EXPECT_EQ(::mkfifo(fifo_.c_str(), 0600), 0);
  }
  Output train() const { return run_cohort({"train", dir_.path("run.yaml")}); }
  // The output of a command that must end within some seconds.
  static Output run_bounded(const std::vector<std::string>& arguments) {
    Process process(arguments);
    for (int i = 0; i < 1000 && process.running(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_FALSE(process.running()) << arguments[0] << " does not end";
    if (process.running()) process.signal(SIGKILL);
    return process.wait();
  }
  // Runs a line of bash in which $COHORT is the binary. Returns the exit code.
  int bash(const std::string& line) const {
    const std::string command =
        str("cd '", dir_.path(), "' && COHORT='", COHORT_BINARY, "' bash -c '", line, "' 2> err");
    return WEXITSTATUS(std::system(command.c_str()));
  }

  TempDir dir_;
  const std::string fifo_ = dir_.path("fifo"), run_ = dir_.path("run");
};

TEST_F(CommandFiles, OutputsGoToFifosDevicesAndTheFilesOfLinks) {
  ASSERT_EQ(train().code, 0);
  const auto report = [&](const std::string& output) {
    return run_cohort({"report", run_, "--output=" + output});
  };
  const Descriptor reader(::open(fifo_.c_str(), O_RDWR | O_NONBLOCK));
  ASSERT_GT(::fcntl(reader.get(), F_SETPIPE_SZ, 1 << 20), 0);  // for the whole page
  EXPECT_EQ(report(fifo_).code, 0);
  EXPECT_TRUE(fs::is_fifo(fifo_));
  std::string page(1 << 20, '\0');
  page.resize(
      static_cast<size_t>(std::max<ssize_t>(0, ::read(reader.get(), page.data(), 1 << 20))));
  EXPECT_NE(page.find("</html>"), page.npos);
  write_file(dir_.path("page"), "old");
  fs::create_symlink("page", dir_.path("link"));
  EXPECT_EQ(report(dir_.path("link")).code, 0);
  EXPECT_TRUE(fs::is_symlink(dir_.path("link")));
  EXPECT_NE(read_file(dir_.path("page")).find("</html>"), page.npos);
  const std::string null = dir_.path("null");
  if (::mknod(null.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0) return;  // not root
  EXPECT_EQ(report(null).code, 0);
  EXPECT_TRUE(fs::is_character_file(null));
}

TEST_F(CommandFiles, FifosAndDevicesAreRefusedWithoutWaiting) {
  ASSERT_EQ(train().code, 0);
  const std::string newest = run_ + "/checkpoints/step-00000006";
  fs::copy(newest, dir_.path("model"), fs::copy_options::recursive);
  for (const char* file : {"manifest.json", "training"}) fs::remove_all(dir_.path("model/") + file);
  for (const std::string file : {"tokenizer.json", "model.safetensors", "config.json"}) {
    const std::string path = dir_.path("model/" + file);
    for (const auto& [target, type] :
         {std::pair<std::string, const char*>{"/dev/zero", "a char"}, {fifo_, "a FIFO"}}) {
      fs::remove(path);
      fs::create_symlink(target, path);
      expect_bad_input(run_bounded({"generate", dir_.path("model"), "1+1="}),
                       {file, str("is not a regular file but ", type)});
    }
    fs::remove(path);
    fs::copy(newest + "/" + file, path);
  }
  write_file(dir_.path("lines.yaml"), str(kSmallModel, kSmallSft, "data: {jsonl: {path: fifo}}\n"));
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"train", dir_.path("text.yaml"), "data.text=" + fifo_},
        {"train", dir_.path("lines.yaml")}})
    expect_bad_input(run_bounded(command), {fifo_, "is not a regular file but a FIFO; hint: save"});
}

// The pipe of `<(command)` can be read once.
TEST_F(CommandFiles, SubstitutedCommandsAreReadWhereOnceIsEnough) {
  EXPECT_EQ(bash("$COHORT tokenizer train --vocab-size 280 --output t <(cat text.txt)"), 0)
      << read_file(dir_.path("err"));
  EXPECT_EQ(bash("$COHORT train text.yaml data.text=<(cat text.txt)"), 2);
  EXPECT_NE(read_file(dir_.path("err")).find(": is not a regular file but a FIFO; hint: save what"),
            std::string::npos)
      << read_file(dir_.path("err"));
}

TEST_F(CommandFiles, AnUnreadableTokenizerIsNotAMissingOne) {
  ASSERT_EQ(train().code, 0);
  const Output output = run_cohort_with({.call = "stat", .path = "/tokenizer.json", .error = EIO},
                                        {"generate", run_, "1+1="});
  EXPECT_EQ(output.code, 1);
  EXPECT_NE(output.err.find("tokenizer.json: Input/output error"), std::string::npos) << output.err;
}

TEST_F(CommandFiles, ATokenizerThatDoesNotFitOnTheDiskLeavesNothing) {
  for (const char* call : {"write", "fsync", "close"}) {
    const Output output = run_cohort_with(
        {.call = call, .path = "tokenizer.json", .error = ENOSPC},
        {"tokenizer", "train", "--output=" + dir_.path("a/b"), dir_.path("text.txt")});
    EXPECT_EQ(output.code, 1);
    EXPECT_NE(output.err.find("tokenizer.json: cannot be written: No space left on device"),
              std::string::npos)
        << output.err;
    EXPECT_FALSE(fs::exists(dir_.path("a")));
  }
}

}  // namespace
}  // namespace cohort::test
