// Shuffled orders are permutations that a position resumes; text splits at a character.
#include "data/loader.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>

#include "data/utf8.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

std::vector<int64_t> take(ShuffledOrder& order, int64_t n) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(order.next());
  return out;
}

TEST(ShuffledOrder, EveryEpochVisitsEveryIndexOnceInAnotherOrder) {
  constexpr int64_t kSize = 101;
  ShuffledOrder order(kSize, 5);
  std::vector<int64_t> ascending(kSize);
  std::iota(ascending.begin(), ascending.end(), 0);
  std::set<std::vector<int64_t>> orders{ascending};
  for (int epoch = 0; epoch < 4; ++epoch) {
    std::vector<int64_t> visited = take(order, kSize);
    orders.insert(visited);
    std::sort(visited.begin(), visited.end());
    EXPECT_EQ(visited, ascending);
  }
  EXPECT_EQ(orders.size(), 5u);
}

TEST(ShuffledOrder, DependsOnTheSeedOnly) {
  ShuffledOrder a(50, 5), b(50, 5), c(50, 6);
  const auto first = take(a, 50);
  EXPECT_EQ(first, take(b, 50));
  EXPECT_NE(first, take(c, 50));
}

TEST(ShuffledOrder, FirstPlaceIsUniform) {
  // 4,000 orders of 8: each index comes first 500 times, standard deviation 21; 5 of those.
  std::vector<int> count(8);
  for (uint64_t seed = 0; seed < 4000; ++seed) ++count[ShuffledOrder(8, seed).next()];
  for (const int n : count) EXPECT_NEAR(n, 500, 105);
}

TEST(ShuffledOrder, SeekContinuesWhereTheOrderStood) {
  for (const int64_t position : {0, 1, 9, 10, 11, 29, 35}) {
    ShuffledOrder whole(10, 3);
    take(whole, position);
    EXPECT_EQ(whole.position(), position);
    const auto expected = take(whole, 25);
    ShuffledOrder resumed(10, 3);
    resumed.seek(position);
    EXPECT_EQ(take(resumed, 25), expected);
    // Also from another epoch, back and forth.
    resumed.seek(0);
    take(resumed, 3);
    resumed.seek(position);
    EXPECT_EQ(take(resumed, 25), expected);
  }
}

TEST(ShuffledOrder, EndlessSetsAscend) {
  ShuffledOrder order(INT64_MAX, 3);
  EXPECT_EQ(take(order, 3), (std::vector<int64_t>{0, 1, 2}));
  order.seek(int64_t{1} << 40);
  EXPECT_EQ(order.next(), int64_t{1} << 40);
}

TEST(ShuffledOrder, RefusesBrokenArguments) {
  EXPECT_THROW_WITH(ShuffledOrder(0, 1), Error, "positive size");
  ShuffledOrder order(3, 1);
  EXPECT_THROW_WITH(order.seek(-1), Error, "-1");
}

// Where there is at most one.
std::string only(const std::vector<std::string>& documents) {
  EXPECT_LE(documents.size(), 1u);
  return documents.empty() ? "" : documents[0];
}

TEST(TextCorpus, HoldsOutTheEnd) {
  const test::TempDir dir;
  test::write_file(dir.path("text"), "0123456789");
  const TextCorpus corpus({dir.path("text")}, 0.25);
  EXPECT_EQ(only(corpus.train()), "0123456");  // floor(7.5) bytes
  EXPECT_EQ(only(corpus.held_out()), "789");
  EXPECT_FALSE(corpus.has_ends());
  const TextCorpus all({dir.path("text")}, 0);
  EXPECT_EQ(only(all.train()), "0123456789");
  EXPECT_EQ(only(all.held_out()), "");
  const TextCorpus none({dir.path("text")}, 1);
  EXPECT_EQ(only(none.train()), "");
  EXPECT_EQ(only(none.held_out()), only(all.train()));
}

TEST(TextCorpus, NeverCutsACharacter) {
  const test::TempDir dir;
  const std::string text = "aé€😀aé€😀";
  test::write_file(dir.path("text"), text);
  for (int percent = 20; percent <= 75; ++percent) {
    const TextCorpus corpus({dir.path("text")}, percent / 100.0);
    EXPECT_EQ(only(corpus.train()) + only(corpus.held_out()), text);
    EXPECT_NE(decode_utf8(only(corpus.held_out()), 0).size, 0u) << percent;
  }
}

TEST(TextCorpus, TakesFoldersPatternsAndLines) {
  namespace fs = std::filesystem;
  const test::TempDir dir;
  fs::create_directories(dir.path("books/more/.git"));
  test::write_file(dir.path("books/b.txt"), "two");
  test::write_file(dir.path("books/more/c.txt"), "");
  test::write_file(dir.path("books/more/.git/x"), "hidden");
  test::write_file(dir.path("books/.hidden"), "hidden");
  test::write_file(dir.path("books/a.jsonl"), "{\"text\": \"one\"}\n{\"text\": \"line\\n\"}\n");
  const auto of = [&](const char* path, double held_out) {
    return TextCorpus(text_files(dir.path(path)), held_out);
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(of("books", 0).train(), (Texts{"one", "line\n", "two"}));
  EXPECT_TRUE(of("books", 0).has_ends());
  EXPECT_EQ(of("books", 0.5).train(), (Texts{"one", "li"}));  // 5 of 11 bytes
  EXPECT_EQ(of("books", 0.5).held_out(), (Texts{"ne\n", "two"}));
  EXPECT_EQ(of("books", 1).held_out().size(), 3u);
  EXPECT_EQ(of("books/*.txt", 0).train(), Texts{"two"});
  EXPECT_EQ(of("books/a.jsonl", 0).train().size(), 2u);
  EXPECT_TRUE(of("books/a.jsonl", 0).has_ends());
  EXPECT_THROW_WITH(text_files(dir.path("*.md")), InputError, "no file matches this pattern");
  EXPECT_THROW_WITH(of("books/more", 0), InputError, "c.txt: is empty");
  fs::create_directory(dir.path("none"));
  EXPECT_THROW_WITH(of("none", 0), InputError, "there is no file in this folder");
  test::write_file(dir.path("bad.jsonl"), "{\"text\": 3}\n");
  EXPECT_THROW_WITH(of("bad.jsonl", 0), InputError, "bad.jsonl:1: expected a text as the field");
}

TEST(TextCorpus, ErrorsNameTheFileAndTheNextStep) {
  const test::TempDir dir;
  EXPECT_THROW_WITH(TextCorpus({dir.path("none")}, 0.1), InputError,
                    "none: cannot be opened: No such file or directory; hint: ");
  EXPECT_THROW_WITH(TextCorpus({dir.path()}, 0.1), InputError, "is a folder; hint: ");
  test::write_file(dir.path("empty"), "");
  EXPECT_THROW_WITH(TextCorpus({dir.path("empty")}, 0.1), InputError, "empty: is empty; hint: ");
  test::write_file(dir.path("short"), "a");
  EXPECT_THROW_WITH(TextCorpus({dir.path("short")}, 0.1), InputError, "too few to hold out");
  test::write_file(dir.path("one"), "é");
  EXPECT_THROW_WITH(TextCorpus({dir.path("one")}, 0.4), InputError, "too few to hold out");
}

TEST(RandomWindow, StaysInsideAndReachesBothEnds) {
  std::set<int64_t> starts;
  for (int64_t i = 0; i < 200; ++i) {
    const int64_t start = random_window(20, 16, 9, i);
    EXPECT_EQ(start, random_window(20, 16, 9, i));
    starts.insert(start);
  }
  EXPECT_EQ(starts, (std::set<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(random_window(16, 16, 9, 3), 0);
  EXPECT_THROW_WITH(random_window(15, 16, 9, 0), InputError,
                    "15 tokens, fewer than a window of 16");
}

}  // namespace
}  // namespace cohort
