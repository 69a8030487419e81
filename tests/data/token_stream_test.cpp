// Token files: written once, verified, rewritten if damaged.
#include "data/token_stream.h"

#include <filesystem>
#include <fstream>
#include <thread>

#include "core/log.h"
#include "sys/input_file.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class TokenStreams : public testing::Test {
 protected:
  TokenStreams() {
    for (int64_t i = 0; text_.size() < 2'500'000; ++i) text_ += std::to_string(i * i) + "\n";
    write_file(dir_.path("text"), text_);
  }
  TokenStream load(const std::string& cache, const std::string& checksum = "1",
                   std::optional<int32_t> end = std::nullopt) const {
    return load_tokens(TextCorpus({dir_.path("text")}, 0).train(), *tokenizer_, end,
                       {cache.empty() ? "" : dir_.path(cache), checksum});
  }
  std::vector<std::string> shards(const std::string& cache) const {
    std::vector<std::string> out;
    for (const auto& entry : fs::recursive_directory_iterator(dir_.path(cache)))
      if (entry.path().extension() == ".tokens") out.push_back(entry.path());
    return out;
  }
  TempDir dir_;
  std::string text_;
  std::unique_ptr<Tokenizer> tokenizer_ = make_char_tokenizer("0123456789\n");
};

TEST_F(TokenStreams, AreTheSameInMemoryAndInFiles) {
  const std::vector<int32_t> all = tokenizer_->encode(text_);
  const auto size = static_cast<int64_t>(all.size());
  const TokenStream memory = load(""), made = load("cache"), again = load("cache");
  EXPECT_EQ(shards("cache").size(), 1u);
  EXPECT_EQ(fs::file_size(shards("cache")[0]), 32 + 2 * all.size());
  for (const TokenStream* stream : {&memory, &made, &again}) {
    ASSERT_EQ(stream->size(), size);
    EXPECT_EQ(stream->read(0, size), all);
    stream->will_read(17, 4);
    EXPECT_EQ(stream->read(17, 4), std::vector<int32_t>(all.begin() + 17, all.begin() + 21));
    EXPECT_TRUE(stream->read(size, 0).empty());
    EXPECT_THROW_WITH(stream->read(size - 1, 2), Error, "expected a part of");
  }
  TokenStream both = load("");
  both.append(load("cache"));
  EXPECT_EQ(both.size(), 2 * size);
  EXPECT_EQ(both.read(size - 1, 2), (std::vector<int32_t>{all.back(), all[0]}));
}

TEST_F(TokenStreams, AreRewrittenForOtherTextOrAnotherTokenizer) {
  load("cache");
  load("cache");
  EXPECT_EQ(shards("cache").size(), 1u);
  load("cache", "2");
  EXPECT_EQ(shards("cache").size(), 2u);
  load("cache", "1", 11);
  EXPECT_EQ(shards("cache").size(), 3u);
  tokenizer_ = make_char_tokenizer("0123456789\n ");
  load("cache");
  EXPECT_EQ(shards("cache").size(), 4u);
}

TEST_F(TokenStreams, DamageIsFoundAndRepaired) {
  const std::vector<int32_t> all = load("cache").read(0, 1000);
  const std::string shard = shards("cache").at(0), good = read_input_file(shard);
  const auto damage = [&](size_t at, char by) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ by);
    return bytes;
  };
  for (const std::string& bytes :
       {damage(0, 1), damage(9, 1), damage(17, 1), damage(25, 1), damage(32, 1),
        damage(good.size() - 1, 64), std::string(), good.substr(0, 20),
        good.substr(0, good.size() - 2), good + "xy"}) {
    write_file(shard, bytes);
    const ExpectLog warning(bytes.size() < 32 ? "it is written again"
                                              : "is damaged and is written again");
    EXPECT_EQ(load("cache").read(0, 1000), all);
    EXPECT_EQ(read_input_file(shard), good);
  }
}

TEST_F(TokenStreams, DamageWhileTheyAreReadIsAnError) {
  const TokenStream stream = load("cache");
  const std::string shard = shards("cache").at(0);
  std::fstream(shard, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(32)
      .write("\xff\xff", 2);
  EXPECT_THROW_WITH(stream.read(0, 5), InputError,
                    "is damaged: it has the token 65535 of 12; hint: ");
  fs::resize_file(shard, 40);
  EXPECT_THROW_WITH(stream.read(2, 5), InputError, "it has become shorter");
}

TEST_F(TokenStreams, SeveralProcessesWriteThemOnce) {
  const auto expected = load("").read(0, 5000);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] { EXPECT_EQ(load("cache").read(0, 5000), expected); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(shards("cache").size(), 1u);
  for (const auto& entry : fs::recursive_directory_iterator(dir_.path("cache")))
    EXPECT_NE(entry.path().extension(), ".tmp");
}

TEST_F(TokenStreams, AreMadeAgainIfTheirFolderIsRemovedMeanwhile) {
  const std::vector<int32_t> all = load("").read(0, 5000);
  int removed = 0;
  logging::set_observer([&](logging::Level, const std::string& message) {
    if (removed < 2 && message.starts_with("the tokens of the text are cached"))
      removed += fs::remove_all(dir_.path("cache")) > 0;
  });
  const TokenStream stream = load("cache");
  logging::set_observer({});
  EXPECT_EQ(removed, 2);
  EXPECT_EQ(stream.read(0, 5000), all);
  EXPECT_EQ(shards("cache").size(), 1u);
}

TEST_F(TokenStreams, CompleteOnesNeedNoLock) {
  const std::vector<int32_t> all = load("cache").read(0, 5000);
  const fs::path folder = fs::path(shards("cache").at(0)).parent_path();
  fs::remove(folder / ".lock");
  fs::create_directory(folder / ".lock");  // cannot be locked, not even by root
  EXPECT_EQ(load("cache").read(0, 5000), all);
}

TEST_F(TokenStreams, LinksInTheirFolderAreNotFollowed) {
  load("cache");
  const std::string shard = shards("cache").at(0), victim = dir_.path("victim");
  write_file(victim, "precious");
  fs::remove(shard);
  fs::create_symlink(victim, shard);
  const ExpectLog warning("it is written again");
  load("cache");
  EXPECT_EQ(read_file(victim), "precious");
}

TEST_F(TokenStreams, FolderThatCannotBeWrittenIsNamed) {
  write_file(dir_.path("file"), "");
  EXPECT_THROW_WITH(load("file"), Error, "cannot create the directory");
}

}  // namespace
}  // namespace cohort::test
