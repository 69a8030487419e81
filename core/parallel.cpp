// A thread pool per thread that calls parallel_for. Workers claim blocks one at a time. Idle
// workers spin for some microseconds, since the next call usually follows soon, and then sleep. The
// caller never waits for a worker that has not started, so a busy machine costs little.
#include "core/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/log.h"
#include "core/sizes.h"

namespace cohort {
namespace {

constexpr int kSpins = 2000;  // pauses before sleeping: about 100 us

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

struct Job {
  detail::BlockFn fn;
  void* context;
  int64_t n, grain, blocks;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t b = next.fetch_add(1); b < blocks; b = next.fetch_add(1))
      fn(context, b * grain, std::min(n, (b + 1) * grain));
  }
};

class ThreadPool {
 public:
  explicit ThreadPool(int workers) {
    try {
      for (int i = 0; i < workers; ++i)
        threads_.emplace_back([this] {
          set_num_threads(1);  // nested calls run inline
          serve();
        });
    } catch (const std::system_error& error) {
      logging::warn(str("only ", threads_.size() + 1, " of ", workers + 1,
                        " threads could be started: ", error.code().message(),
                        "; hint: raise `ulimit -u`, or set num_threads or COHORT_NUM_THREADS"));
    }
  }
  ~ThreadPool() {
    stop_.store(true);
    post();
    for (std::thread& thread : threads_) thread.join();
  }
  int workers() const { return static_cast<int>(threads_.size()); }

  void run(Job& job) {
    job_.store(&job);
    post();
    job.work();
    job_.store(nullptr);  // workers that start after this line find no job
    for (int busy = running_.load(); busy > 0; busy = running_.load()) {
      for (int i = 0; i < kSpins && running_.load() > 0; ++i) pause();
      if (running_.load() == busy) running_.wait(busy);
    }
  }

 private:
  void post() {
    posted_.fetch_add(1);
    posted_.notify_all();
  }
  void serve() {
    for (int seen = 0; !stop_.load(); seen = posted_.load()) {
      // Incremented before the job is read: the caller either sees the worker or has cleared the
      // job.
      running_.fetch_add(1);
      if (Job* job = job_.load()) job->work();
      running_.fetch_sub(1);
      running_.notify_all();
      for (int i = 0; i < kSpins && posted_.load() == seen; ++i) pause();
      posted_.wait(seen);
    }
  }

  std::atomic<int> posted_{0};   // number of jobs; idle workers wait on it
  std::atomic<int> running_{0};  // workers that may be executing the job
  std::atomic<Job*> job_{nullptr};
  std::atomic<bool> stop_{false};
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

struct Threads {
  int count = 0;  // 0: not initialised
  std::unique_ptr<ThreadPool> pool;
};
thread_local Threads t_threads;

// A forked child has none of the workers: it must neither use nor join them.
void forget_pool_in_children() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { (void)t_threads.pool.release(); });
}

}  // namespace

int num_threads() {
  if (t_threads.count == 0) t_threads.count = default_threads();
  return t_threads.count;
}

void set_num_threads(int n) {
  COHORT_CHECK(n >= 1, "[parallel] expected at least one thread, got ", n);
  t_threads.count = n;
}

void with_full_stack(const std::function<void()>& fn) {
  constexpr rlim_t kBytes = 8 << 20;
  rlimit limit{};
  if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= kBytes) return fn();
  std::exception_ptr error;
  pthread_attr_t attributes;
  sigset_t all, before;
  sigfillset(&all);
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kBytes);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
  try {
    std::thread thread([&] {
      try {
        fn();
      } catch (...) {
        error = std::current_exception();
      }
    });
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread.join();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  } catch (const std::system_error& e) {
    throw Error(str("cannot start a thread with a stack of 8 MiB: ", e.code().message(),
                    "; hint: raise `ulimit -s` to 8192, or `ulimit -u` and `ulimit -v`"));
  }
  if (error) std::rethrow_exception(error);
}

void detail::parallel_blocks(int64_t n, int64_t grain, BlockFn fn, void* context) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  Job job{.fn = fn, .context = context, .n = n, .grain = grain, .blocks = ceil_div(n, grain)};
  if (job.blocks == 1 || num_threads() == 1) {
    for (int64_t b = 0; b < job.blocks; ++b) fn(context, b * grain, std::min(n, (b + 1) * grain));
    return;
  }
  auto& [count, pool] = t_threads;
  if (pool == nullptr || pool->workers() != count - 1) {
    pool.reset();
    forget_pool_in_children();
    pool = std::make_unique<ThreadPool>(count - 1);
    count = pool->workers() + 1;
  }
  const int threads = std::exchange(count, 1);  // nested calls run inline
  pool->run(job);
  count = threads;
}

}  // namespace cohort
