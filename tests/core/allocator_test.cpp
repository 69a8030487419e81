// Statistics, reuse and limits of the caching allocator.
#include "core/allocator.h"

#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "core/rng.h"
#include "core/tensor.h"
#include "core/with_cuda.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kCaches = false;
#else
constexpr bool kCaches = true;
#endif

Allocator& cpu() {
  return allocator(Device{});
}

// Bytes that the statistics count for a request of `bytes`.
int64_t counted(size_t bytes) {
  const int64_t before = cpu().stats().live_bytes;
  void* p = cpu().allocate(bytes);
  const int64_t after = cpu().stats().live_bytes;
  cpu().deallocate(p, bytes);
  EXPECT_EQ(cpu().stats().live_bytes, before);
  return after - before;
}

}  // namespace

TEST(Allocator, CountsTheSizeClass) {
  for (const size_t bytes : {0u, 1u, 63u, 64u}) EXPECT_EQ(counted(bytes), 64);
  EXPECT_EQ(counted(65), 128);
  EXPECT_EQ(counted(1024), 1024);
  EXPECT_EQ(counted(1025), 1152);
  EXPECT_EQ(counted(2048), 2048);
  EXPECT_EQ(counted(2049), 2304);
  EXPECT_EQ(counted(1 << 20), 1 << 20);
  for (size_t bytes = 1025; bytes < 100000; bytes += 977) {
    EXPECT_GE(counted(bytes), static_cast<int64_t>(bytes));
    EXPECT_LE(static_cast<double>(counted(bytes)), 1.125 * static_cast<double>(bytes));
  }
}

TEST(Allocator, BlocksAreAlignedAndWritable) {
  for (const size_t bytes : {1u, 64u, 100u, 1025u, 65537u}) {
    void* p = cpu().allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0u);
    std::memset(p, 0x5a, bytes);
    cpu().deallocate(p, bytes);
  }
  cpu().deallocate(nullptr, 10);
}

TEST(Allocator, PeakIsTheHighestSinceReset) {
  const size_t size = 1 << 16;
  cpu().reset_peak();
  const AllocatorStats start = cpu().stats();
  EXPECT_EQ(start.peak_bytes, start.live_bytes);
  void* a = cpu().allocate(size);
  void* b = cpu().allocate(size);
  cpu().deallocate(a, size);
  void* c = cpu().allocate(size);
  const AllocatorStats stats = cpu().stats();
  EXPECT_EQ(stats.peak_bytes - start.live_bytes, static_cast<int64_t>(2 * size));
  EXPECT_EQ(stats.live_bytes - start.live_bytes, static_cast<int64_t>(2 * size));
  EXPECT_EQ(stats.allocations - start.allocations, 3);
  cpu().deallocate(b, size);
  cpu().deallocate(c, size);
  EXPECT_EQ(cpu().stats().peak_bytes, stats.peak_bytes);
  cpu().deallocate(cpu().allocate(size), size);  // a new request below the peak
  EXPECT_EQ(cpu().stats().peak_bytes, stats.peak_bytes);
  cpu().reset_peak();
  EXPECT_EQ(cpu().stats().peak_bytes, start.live_bytes);
}

TEST(Allocator, FreedBlockServesTheNextRequestOfItsClass) {
  if (!kCaches) GTEST_SKIP() << "nothing is cached under the address sanitizer";
  void* a = cpu().allocate(5000);
  cpu().deallocate(a, 5000);
  const int64_t reserved = cpu().stats().reserved_bytes;
  void* b = cpu().allocate(5001);  // the same class of 5120 bytes
  EXPECT_EQ(a, b);
  EXPECT_EQ(cpu().stats().reserved_bytes, reserved);
  cpu().deallocate(b, 5001);
}

TEST(Allocator, ReleaseReturnsCachedBlocks) {
  void* p = cpu().allocate(1 << 20);
  cpu().deallocate(p, 1 << 20);
  cpu().release_cached();
  const AllocatorStats stats = cpu().stats();
  EXPECT_EQ(stats.reserved_bytes, stats.live_bytes);
}

TEST(Allocator, CacheSizeIsBounded) {
  cpu().release_cached();
  cpu().reset_peak();
  const int64_t live = cpu().stats().live_bytes;
  // Forty size classes from 4 MiB on, with at most one block live at a time.
  for (size_t i = 0; i < 40; ++i) {
    const size_t bytes = (size_t{4} << 20) + i * (size_t{1} << 19);
    cpu().deallocate(cpu().allocate(bytes), bytes);
  }
  const AllocatorStats stats = cpu().stats();
  EXPECT_LE(stats.reserved_bytes - live, stats.peak_bytes - live + (int64_t{65} << 20));
  cpu().release_cached();
}

TEST(Allocator, StatisticsAreExactWithManyThreads) {
  const int64_t live = cpu().stats().live_bytes, count = cpu().stats().allocations;
  constexpr int kThreads = 8, kRounds = 400;
  std::vector<std::thread> threads;
  std::atomic<int> damaged{0};
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([t, &damaged] {
      Rng rng(static_cast<uint64_t>(t), 0);
      std::vector<std::pair<unsigned char*, size_t>> blocks;
      for (int i = 0; i < kRounds; ++i) {
        const size_t bytes = static_cast<size_t>(rng.between(1, 4000));
        auto* p = static_cast<unsigned char*>(cpu().allocate(bytes));
        std::memset(p, t + 1, bytes);
        blocks.emplace_back(p, bytes);
        if (blocks.size() < 8) continue;
        const auto [q, n] = blocks[static_cast<size_t>(i % 8)];
        for (size_t k = 0; k < n; ++k) damaged += q[k] != t + 1;
        cpu().deallocate(q, n);
        blocks.erase(blocks.begin() + i % 8);
      }
      for (const auto& [p, n] : blocks) cpu().deallocate(p, n);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(damaged, 0);
  EXPECT_EQ(cpu().stats().live_bytes, live);
  EXPECT_EQ(cpu().stats().allocations - count, kThreads * kRounds);
}

TEST(Allocator, ImpossibleRequestsAreErrors) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer aborts the process instead";
#endif
  if (!kCaches) GTEST_SKIP() << "the address sanitizer aborts the process instead";
  const int64_t live = cpu().stats().live_bytes;
  EXPECT_THROW_WITH(cpu().allocate(size_t{1} << 60), Error, "[allocator] out of memory");
  EXPECT_EQ(cpu().stats().live_bytes, live);
}

TEST(Allocator, OverflowingSizesAreErrors) {
  const int64_t huge = int64_t{1} << 40;
  EXPECT_THROW_WITH(Tensor::empty({huge, huge}, DType::kF32), Error, "is too large");
  EXPECT_THROW_WITH(Tensor::empty({int64_t{1} << 61}, DType::kF64), Error, "is too large");
}

TEST(Allocator, AbsentDevicesAreErrors) {
  EXPECT_THROW_WITH(allocator(Device::cuda(63)), Error, "cuda:63");
}

TEST(Allocator, PageLockedMemoryNeedsACudaBuild) {
  if (kWithCuda) GTEST_SKIP() << "this is a CUDA build";
  EXPECT_THROW_WITH(pinned_allocator().allocate(1), Error, "no CUDA support");
}

}  // namespace cohort
