// Files that a command continues after a kill: whatever a kill leaves, and what is refused.
#include "job/resumable_file.h"

#include <filesystem>

#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class ResumableFiles : public testing::Test {
 protected:
  // The pieces of a command: one is empty, and one has several lines.
  const std::vector<std::string> pieces_ = {"one\n", "", "two\nthree\n", "four\n"};
  const ConfigFields settings_ = {{"seed", "1"}, {"temperature", "0.7"}};

  // Continues the file by the pieces that it does not have, at most `count`. Returns how many it
  // had.
  size_t write(size_t count = 9) const {
    ResumableFile file(path_, settings_);
    const size_t begin = file.state().is_null() ? 0 : static_cast<size_t>(file.state().as_int());
    for (size_t i = begin; i < std::min(pieces_.size(), begin + count); ++i)
      file.append(pieces_[i], Json(static_cast<int64_t>(i) + 1));
    return begin;
  }
  void expect_whole() const { EXPECT_EQ(read_file(path_), "one\ntwo\nthree\nfour\n"); }

  const TempDir dir_;
  const std::string path_ = dir_.path("lines.jsonl"), state_ = dir_.path(".lines.jsonl.state");
};

TEST_F(ResumableFiles, ContinueAfterTheLastPiece) {
  EXPECT_EQ(write(1), 0u);
  EXPECT_EQ(write(1), 1u);
  EXPECT_EQ(write(1), 2u);
  EXPECT_EQ(read_file(path_), "one\ntwo\nthree\n");
  EXPECT_EQ(write(), 3u);
  expect_whole();
  EXPECT_EQ(write(), 4u) << "a finished file";
  expect_whole();
}

// A kill leaves a part of a piece, whose end the state has, or none of it.
TEST_F(ResumableFiles, ContinueFromTheLastWholePieceWhereverTheyWereCut) {
  write();
  const std::string whole = read_file(path_), state = read_file(state_);
  const size_t had[] = {0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4};
  ASSERT_EQ(std::size(had), whole.size() + 1);
  for (size_t bytes = 0; bytes <= whole.size(); ++bytes) {
    write_file(path_, whole.substr(0, bytes));
    write_file(state_, state);
    EXPECT_EQ(write(), had[bytes]) << bytes;
    expect_whole();
  }
  // A line of the state that was written in part: its piece had not been begun.
  const size_t last = state.rfind('\n', state.size() - 2) + 1;
  for (size_t bytes = last; bytes < state.size(); ++bytes) {
    write_file(path_, "one\ntwo\nthree\n");
    write_file(state_, state.substr(0, bytes));
    EXPECT_EQ(write(), 3u) << bytes;
    expect_whole();
    EXPECT_EQ(read_file(state_), state);
  }
}

TEST_F(ResumableFiles, BeginAgainWhereTheFileIsGone) {
  write(2);
  fs::remove(path_);
  EXPECT_EQ(write(), 0u);
  expect_whole();
  // Without a byte there is nothing that other settings would spoil.
  fs::remove(path_);
  { ResumableFile(path_, {{"seed", "2"}}); }
  EXPECT_EQ(write(), 0u);
  expect_whole();
}

TEST_F(ResumableFiles, RefuseWhatTheyHaveNotWritten) {
  write_file(path_, "my own\n");
  EXPECT_THROW_WITH(write(), InputError, "lines.jsonl exists, and ");
  EXPECT_FALSE(fs::exists(state_));
  fs::remove(path_);
  write(3);
  const std::string lines = read_file(path_), state = read_file(state_);
  const auto refuses = [&](const std::string& file, const std::string& record,
                           const std::string& why) {
    write_file(path_, file);
    write_file(state_, record);
    EXPECT_THROW_WITH(write(), InputError, why);
    EXPECT_EQ(read_file(path_), file);
    EXPECT_EQ(read_file(state_), record);
  };
  const auto other = [](int byte) {
    return str("has other bytes than this command has written, at byte ", byte, " or after it");
  };
  refuses(lines + "more\n", state, other(14));
  refuses("One" + lines.substr(3), state, other(0));
  refuses("one\ntwo\nThree\n", state, other(4));
  refuses(lines, "", other(0));
  refuses(lines, "x" + state, ".lines.jsonl.state");
  std::string bad = state;
  bad[bad.find("\"checksum\":\"") + 12] ^= 1;
  refuses(lines, bad, other(0));
}

TEST_F(ResumableFiles, RefuseOtherSettingsByName) {
  write(1);
  EXPECT_THROW_WITH(ResumableFile(path_, {{"seed", "1"}, {"temperature", "1"}}), InputError,
                    "lines.jsonl was written with another setting: temperature was '0.7', and is "
                    "'1'; hint: ");
  write();
  expect_whole();
}

TEST_F(ResumableFiles, RefuseASecondWriterAndWhatIsNoRegularFile) {
  const ResumableFile first(path_, settings_);
  EXPECT_THROW_WITH(write(), InputError, "another process writes ");
  EXPECT_THROW_WITH(ResumableFile(dir_.path(), settings_), InputError, "is a folder");
  EXPECT_THROW_WITH(ResumableFile("/dev/null", settings_), InputError, "/dev/null");
  EXPECT_THROW_WITH(ResumableFile(dir_.path("none/lines"), settings_), InputError, "cannot write ");
  fs::create_symlink(dir_.path("elsewhere"), dir_.path(".linked.state"));
  EXPECT_THROW_WITH(ResumableFile(dir_.path("linked"), settings_), InputError, "cannot write ");
  EXPECT_FALSE(fs::exists(dir_.path("elsewhere")));
}

}  // namespace
}  // namespace cohort::test
