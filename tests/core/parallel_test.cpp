// Every index is covered once for any number of threads; the partition into blocks is fixed.
#include "core/parallel.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "core/log.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using test::Threads;
using Blocks = std::set<std::pair<int64_t, int64_t>>;

Blocks blocks_of(int64_t n, int64_t grain) {
  std::mutex mutex;
  Blocks blocks;
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    blocks.emplace(begin, end);
  });
  return blocks;
}

}  // namespace

TEST(ParallelFor, CoversEachIndexOnce) {
  for (const int threads : {1, 2, 3}) {
    const Threads guard(threads);
    for (const int64_t n : {0, 1, 2, 7, 64, 1000})
      for (const int64_t grain : {1, 3, 64, 5000}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(n));
        parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
        });
        for (const auto& h : hits) ASSERT_EQ(h, 1) << n << " " << grain << " " << threads;
      }
  }
}

TEST(ParallelFor, BlocksDoNotDependOnTheThreads) {
  const Blocks expected = {{0, 10}, {10, 20}, {20, 25}};
  for (const int threads : {1, 2, 3, 8}) {
    const Threads guard(threads);
    EXPECT_EQ(blocks_of(25, 10), expected);
    EXPECT_EQ(blocks_of(-3, 10), Blocks{});
    EXPECT_EQ(blocks_of(2, 0), (Blocks{{0, 1}, {1, 2}}));  // a grain below 1 counts as 1
  }
}

TEST(ParallelFor, WorksWithFewerThreadsIfNoMoreCanBeStarted) {
  std::string warning;
  logging::set_observer([&](logging::Level, const std::string& text) { warning += text; });
  pthread_attr_t before, huge;
  pthread_getattr_default_np(&before);
  pthread_attr_init(&huge);
  pthread_attr_setstacksize(&huge, size_t{1} << 50);  // no address space: EAGAIN
  std::thread([&] {                                   // has no pool yet
    set_num_threads(4);
    pthread_setattr_default_np(&huge);
    EXPECT_EQ(blocks_of(25, 10), (Blocks{{0, 10}, {10, 20}, {20, 25}}));
    pthread_setattr_default_np(&before);
    EXPECT_EQ(num_threads(), 1);
  })
      .join();
  logging::set_observer({});
  EXPECT_NE(warning.find("only 1 of 4 threads could be started: Resource temporarily unavailable"),
            std::string::npos)
      << warning;
}

// Recurses through about `bytes` of the stack.
int use_stack(int64_t bytes) {
  volatile char frame[4096] = {};
  return bytes <= 0 ? frame[0] : use_stack(bytes - 4096) + frame[1];
}

TEST(FullStack, HoldsDeepNestingUnderASmallLimit) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer starts no threads after a fork";
#endif
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit small{96 << 10, 96 << 10};
    setrlimit(RLIMIT_STACK, &small);
    int code = 1;
    with_full_stack([&] {
      code = use_stack(6 << 20);
      std::thread([&] { code += use_stack(6 << 20); }).join();
    });
    try {
      with_full_stack([] { throw InputError("passed on"); });
    } catch (const InputError&) {
      _exit(code);
    }
    _exit(2);
  }
  int status = -1;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

TEST(ParallelFor, NestedCallsCoverTheirRangeToo) {
  for (const int threads : {1, 2, 3}) {
    const Threads guard(threads);
    std::vector<std::atomic<int>> hits(6 * 50);
    parallel_for(6, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        parallel_for(50, 7, [&](int64_t b, int64_t e) {
          for (int64_t j = b; j < e; ++j) ++hits[static_cast<size_t>(i * 50 + j)];
        });
    });
    for (const auto& h : hits) ASSERT_EQ(h, 1);
  }
}

TEST(ParallelFor, UsesAllItsThreads) {
  const Threads guard(3);
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::atomic<int> arrived{0};
  // Each block waits until all three run, so that no thread can process two.
  parallel_for(3, 1, [&](int64_t, int64_t) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(ids.size(), 3u);
}

TEST(ParallelFor, ThreadCountIsThreadLocal) {
  const Threads guard(3);
  int other = 0;
  std::thread([&] {
    set_num_threads(1);
    other = num_threads();
  }).join();
  EXPECT_EQ(other, 1);
  EXPECT_EQ(num_threads(), 3);
  EXPECT_THROW_WITH(set_num_threads(0), Error, "at least one thread, got 0");
}

TEST(ParallelFor, RanksOnThreadsRunConcurrently) {
  std::vector<std::vector<int>> hits_of_ranks(4);
  std::vector<std::thread> ranks;
  for (auto& hits : hits_of_ranks)
    ranks.emplace_back([&hits] {
      set_num_threads(2);
      hits.assign(500, 0);
      for (int round = 0; round < 20; ++round)
        parallel_for(500, 16, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
        });
    });
  for (auto& rank : ranks) rank.join();
  for (const auto& hits : hits_of_ranks) EXPECT_EQ(hits, std::vector<int>(500, 20));
}

}  // namespace cohort
