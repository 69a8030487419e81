// Sharding of work over ranks and gathering of results.
#include "trainers/across_ranks.h"

#include "core/allocator.h"
#include "tests/distributed/process_ranks.h"

namespace cohort::test {
namespace {

TEST(RankShards, CoverEveryItemOnceInRankOrder) {
  for (const int64_t count : {0, 1, 3, 7, 8, 32})
    for (const int size : {1, 2, 3, 8})
      for (int64_t rotation = 0; rotation < 9; ++rotation) {
        int64_t next = 0;
        for (int rank = 0; rank < size; ++rank) {
          const RankShard shard = shard_of(count, rank, size, rotation);
          EXPECT_EQ(shard.begin, next);
          EXPECT_GE(shard.end - shard.begin, count / size);
          EXPECT_LE(shard.end - shard.begin, count / size + 1);
          next = shard.end;
        }
        EXPECT_EQ(next, count);
      }
}

// With four prompts per minibatch on eight ranks, every rank gets some over time.
TEST(RankShards, TheRemainderRotatesOverTheRanks) {
  for (const int64_t count : {1, 3, 4, 5, 7})
    for (const int size : {2, 3, 8}) {
      std::vector<int64_t> items(static_cast<size_t>(size));
      for (int64_t rotation = 0; rotation < size; ++rotation)
        for (int rank = 0; rank < size; ++rank) {
          const RankShard shard = shard_of(count, rank, size, rotation);
          items[static_cast<size_t>(rank)] += shard.end - shard.begin;
        }
      EXPECT_EQ(items, std::vector<int64_t>(static_cast<size_t>(size), count)) << size;
    }
}

TEST(GatherTexts, GivesEveryRankAllTexts) {
  const std::vector<std::string> all{"none", "", std::string("\0\xff\n", 3), "of rank 2"};
  run_local_ranks(3, [&](Communicator& comm) {
    std::vector<std::string> texts(all.size());
    for (size_t i = 0; i < all.size(); ++i)
      if (static_cast<int>(i) % comm.size() == comm.rank()) texts[i] = all[i];
    EXPECT_EQ(gather_texts(comm, texts), all);
  });
}

TEST(GatherTexts, SendsAByteForAByte) {
  const std::vector<std::string> all{std::string(300, '\xff'), "", std::string(99, 'x')};
  expect_no_errors(run_process_ranks(3, [&](ProcessGroup& group) {
    const auto comm = make_communicator(group, Device{});
    std::vector<std::string> texts(3);
    texts[static_cast<size_t>(group.rank())] = all[static_cast<size_t>(group.rank())];
    EXPECT_EQ(gather_texts(*comm, texts), all);
    comm->barrier();
    if (group.rank() > 0) return;
    const std::string calls = group.history();
    EXPECT_NE(
        calls.find("call 1 (all_reduce of f64[3])\n  call 2 (all_reduce of i64[50])\n  call 3 "
                   "(barrier)"),
        std::string::npos)
        << calls;
  }));
}

TEST(FirstText, IsThatOfTheFirstRankWithOne) {
  run_local_ranks(3, [](Communicator& comm) {
    EXPECT_EQ(first_text(comm, comm.rank() == 0 ? "" : str(comm.rank())), "1");
    EXPECT_EQ(first_text(comm, comm.rank() == 2 ? "last" : ""), "last");
    EXPECT_EQ(first_text(comm, str(comm.rank())), "0");
    EXPECT_EQ(first_text(comm, ""), "");
  });
}

TEST(GatherNumbers, LongListsComeInPieces) {
  const size_t size = (size_t{1} << 22) - 1;
  run_local_ranks(2, [&](Communicator& comm) {
    std::vector<std::vector<double>> lists(3);
    for (const size_t i : {0u, 2u})
      if (static_cast<int>(i) / 2 == comm.rank())
        for (size_t k = 0; k < size; ++k) lists[i].push_back(static_cast<double>(k) + 0.5);
    const auto all = gather_numbers(comm, lists);
    ASSERT_EQ(all.size(), 3u);
    EXPECT_TRUE(all[1].empty());
    EXPECT_EQ(all[0].size(), size);
    EXPECT_EQ(all[0], all[2]);
    EXPECT_EQ(all[0].back(), static_cast<double>(size) - 0.5);
  });
}

// An error of one rank is that of all; a number that is not finite comes before a lack of memory.
TEST(OnAllRanks, AllThrowTheKindThatOneHasThrown) {
  run_local_ranks(3, [](Communicator& comm) {
    const auto run = [&](const std::function<void()>& second, const std::function<void()>& third) {
      on_all_ranks(comm, [&] {
        if (comm.rank() == 1) second();
        if (comm.rank() == 2) third();
      });
    };
    const auto nothing = [] {};
    const auto full = [] { throw OutOfMemoryError("full"); };
    const auto bad = [] { throw NonFiniteError("bad"); };
    EXPECT_NO_THROW(run(nothing, nothing));
    EXPECT_THROW_WITH(run(nothing, full), OutOfMemoryError,
                      comm.rank() == 2 ? "full" : "another rank is out of memory");
    EXPECT_THROW_WITH(run(bad, full), NonFiniteError,
                      comm.rank() == 1 ? "bad" : "another rank's logits hold NaN or infinity");
  });
}

}  // namespace
}  // namespace cohort::test
