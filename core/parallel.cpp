// A small pool of threads for each thread that calls parallel_for. Blocks are claimed one by one.
// Idle workers spin for some microseconds (the next call is usually that near) and then sleep; the
// caller never waits for a worker that has not started, so a busy machine costs little.
#include "core/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/check.h"

namespace cohort {
namespace {

constexpr int kSpins = 1000;  // pauses before sleeping: about 50 microseconds

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

thread_local bool t_inside = false;  // in a block: nested calls run in place

struct Job {
  detail::BlockFn fn;
  void* context;
  int64_t n, grain, blocks;
  std::atomic<int64_t> next{0};

  void work() {
    t_inside = true;
    for (int64_t b = next.fetch_add(1); b < blocks; b = next.fetch_add(1))
      fn(context, b * grain, std::min(n, (b + 1) * grain));
    t_inside = false;
  }
};

class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { serve(); });
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      posted_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int workers() const { return static_cast<int>(threads_.size()); }

  void run(Job& job) {
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      posted_.fetch_add(1);
    }
    wake_.notify_all();
    job.work();
    {
      std::lock_guard lock(mutex_);
      job_ = nullptr;  // nobody starts on it from here on
    }
    for (int i = 0; i < kSpins && running_.load() > 0; ++i) pause();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_.load() == 0; });
  }

 private:
  void serve() {
    int64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (!stop_) {
      if (posted_.load() == seen) {
        lock.unlock();
        for (int i = 0; i < kSpins && posted_.load() == seen; ++i) pause();
        lock.lock();
        wake_.wait(lock, [&] { return posted_.load() != seen; });
      }
      seen = posted_.load();
      if (job_ == nullptr) continue;
      Job& job = *job_;
      running_.fetch_add(1);
      lock.unlock();
      job.work();
      lock.lock();
      if (running_.fetch_sub(1) == 1) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int64_t> posted_{0};  // jobs so far; changed under the mutex
  std::atomic<int> running_{0};     // workers on the job; changed under the mutex
  Job* job_ = nullptr;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

int default_threads() {
  if (const char* text = std::getenv("COHORT_NUM_THREADS")) {
    char* end = nullptr;
    const long n = std::strtol(text, &end, 10);
    if (end == text || *end != '\0' || n < 1 || n > 4096)
      throw InputError(
          str("COHORT_NUM_THREADS: expected a number from 1 to 4096, got '", text, "'"));
    return static_cast<int>(n);
  }
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

thread_local int t_threads = 0;  // 0: not asked yet
thread_local std::unique_ptr<Pool> t_pool;

}  // namespace

int num_threads() {
  if (t_threads == 0) t_threads = default_threads();
  return t_threads;
}

void set_num_threads(int n) {
  COHORT_CHECK(n >= 1, "[parallel] expected at least one thread, got ", n);
  t_threads = n;
}

void detail::parallel_blocks(int64_t n, int64_t grain, BlockFn fn, void* context) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  Job job{.fn = fn, .context = context, .n = n, .grain = grain, .blocks = (n + grain - 1) / grain};
  if (t_inside || job.blocks == 1 || num_threads() == 1) {
    for (int64_t b = 0; b < job.blocks; ++b) fn(context, b * grain, std::min(n, (b + 1) * grain));
    return;
  }
  if (t_pool == nullptr || t_pool->workers() != num_threads() - 1) {
    t_pool.reset();
    t_pool = std::make_unique<Pool>(num_threads() - 1);
  }
  t_pool->run(job);
}

}  // namespace cohort
