// What ranks share out and put together again.
#include "trainers/across_ranks.h"

#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

TEST(RankShares, CoverEveryItemOnceInTheOrderOfTheRanks) {
  for (const int64_t count : {0, 1, 3, 7, 8, 32})
    for (const int size : {1, 2, 3, 8})
      for (int64_t turn = 0; turn < 9; ++turn) {
        int64_t next = 0;
        for (int rank = 0; rank < size; ++rank) {
          const RankShare share = share_of(count, rank, size, turn);
          EXPECT_EQ(share.begin, next);
          EXPECT_GE(share.end - share.begin, count / size);
          EXPECT_LE(share.end - share.begin, count / size + 1);
          next = share.end;
        }
        EXPECT_EQ(next, count);
      }
}

// Four prompts a minibatch on eight ranks: nobody is left out for ever.
TEST(RankShares, WhatDoesNotDivideGoesRoundTheRanks) {
  for (const int64_t count : {1, 3, 4, 5, 7})
    for (const int size : {2, 3, 8}) {
      std::vector<int64_t> items(static_cast<size_t>(size));
      for (int64_t turn = 0; turn < size; ++turn)
        for (int rank = 0; rank < size; ++rank) {
          const RankShare share = share_of(count, rank, size, turn);
          items[static_cast<size_t>(rank)] += share.end - share.begin;
        }
      EXPECT_EQ(items, std::vector<int64_t>(static_cast<size_t>(size), count)) << size;
    }
}

TEST(GatherTexts, GivesEveryRankAllTexts) {
  const std::vector<std::string> all{"none", "", std::string("\0\xff\n", 3), "of rank 2"};
  run_local_ranks(3, [&](Communicator& comm) {
    std::vector<std::string> mine(all.size());
    for (size_t i = 0; i < all.size(); ++i)
      if (static_cast<int>(i) % comm.size() == comm.rank()) mine[i] = all[i];
    EXPECT_EQ(gather_texts(comm, mine), all);
  });
}

}  // namespace
}  // namespace cohort::test
