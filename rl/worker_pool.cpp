// One thread serves the pipes of all programs. Each program has one request at a time.
#include "rl/worker_pool.h"

#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "core/progress.h"
#include "sys/polling.h"

namespace cohort {
namespace {

constexpr size_t kMaxAnswer = 1 << 20;  // bytes beyond those of the request
// If so many first answers have timed out and no program has ever answered, none is expected to.
constexpr int kMaxUnanswered = 3;
// Time for a program that has closed a pipe to end by itself, with its own exit code.
constexpr std::chrono::milliseconds kEndPatience{1000};
constexpr const char* kFlushHint = "; does it flush its output after each line?";
constexpr size_t kNone = static_cast<size_t>(-1);

Clock::duration seconds(double count) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

struct Worker {
  WorkerHost::Started program;
  bool has_answered = false;  // since it was started
  size_t request = kNone;     // index of its current request
  std::string text, answer;   // the request as sent, and the bytes received
  size_t sent_bytes = 0;      // prefix of `text`
  Clock::time_point deadline;
};

}  // namespace

class WorkerPool::Loop {
 public:
  Loop(WorkerHost& host, WorkerPoolOptions options)
      : host_(host), options_(std::move(options)), workers_(static_cast<size_t>(options_.workers)) {
    for (Worker& worker : workers_) worker.program = host_.start(options_.program);
    thread_ = std::thread([this] { run(); });
  }

  ~Loop() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wake_.signal();
    thread_.join();
    try {
      for (Worker& worker : workers_)
        if (worker.program.id > 0) end(worker);
    } catch (const Error&) {  // the host has ended, and all programs with it
    }
  }

  void submit(std::string request) {
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(std::move(request));
      answers_.emplace_back();
    }
    wake_.signal();
  }

  std::vector<Answer> collect() {
    std::unique_lock lock(mutex_);
    all_answered_.wait(lock, [&] { return answered_ == answers_.size() || failure_; });
    if (failure_) std::rethrow_exception(failure_);
    requests_.clear();
    next_ = answered_ = 0;
    return std::exchange(answers_, {});
  }

 private:
  void run() {
    // Signals are for other threads. Without SIGPIPE, write() to an ended program fails with EPIPE.
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
    try {
      while (serve()) {
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
      all_answered_.notify_all();
    }
  }

  // Waits for the next event and handles it. Returns false when the loop has to end.
  bool serve() {
    {
      const std::lock_guard lock(mutex_);
      if (ended_) return false;
      for (Worker& worker : workers_)
        while (worker.request == kNone && next_ < requests_.size()) assign(worker, next_++);
    }
    std::vector<pollfd> fds{{wake_.fd(), POLLIN, 0}};
    Clock::time_point deadline = Clock::now() + seconds(3600);
    for (const Worker& worker : workers_) {
      fds.push_back({worker.program.output.get(), POLLIN, 0});
      if (worker.sent_bytes < worker.text.size())
        fds.push_back({worker.program.input.get(), POLLOUT, 0});
      if (worker.request != kNone) deadline = std::min(deadline, worker.deadline);
    }
    poll_until(deadline, std::move(fds));
    wake_.clear();
    for (Worker& worker : workers_) {
      send(worker);
      receive(worker);
      if (worker.request == kNone || Clock::now() < worker.deadline) continue;
      num_unanswered_ += !worker.has_answered && !any_answered_;
      fail(worker, worker.has_answered ? str("no answer in ", options_.timeout, " s")
                                       : str("no answer in ", options_.start_timeout,
                                             " s to its first request", kFlushHint));
    }
    return true;
  }

  // Requires mutex_.
  void assign(Worker& worker, size_t request) {
    if (num_unanswered_ >= kMaxUnanswered)
      return set_answer(request, {"", str("no program has ever answered", kFlushHint)});
    try {
      if (worker.program.id < 0) worker.program = host_.start(options_.program);
    } catch (const InputError& e) {  // possibly temporary, since others were started
      return set_answer(request, {"", e.what()});
    }
    worker.request = request;
    worker.text = requests_[request] + '\n';
    worker.sent_bytes = 0;
    worker.answer.clear();
    worker.deadline =
        Clock::now() + seconds(worker.has_answered ? options_.timeout : options_.start_timeout);
  }

  void send(Worker& worker) {
    if (worker.sent_bytes == worker.text.size()) return;
    const ssize_t n = ::write(worker.program.input.get(), worker.text.data() + worker.sent_bytes,
                              worker.text.size() - worker.sent_bytes);
    if (n > 0) worker.sent_bytes += static_cast<size_t>(n);
    if (n < 0 && errno == EPIPE) fail(worker, "it has ended, or closed its input", kEndPatience);
  }

  void receive(Worker& worker) {
    while (worker.program.output.is_open()) {
      const size_t before = worker.answer.size();
      const ssize_t n = read_available(worker.program.output.get(), worker.answer);
      if (n == 0) return;
      if (n < 0) return fail(worker, "it has ended, or closed its output", kEndPatience);
      if (worker.answer.size() > kMaxAnswer + worker.text.size())
        return fail(worker, "its answer is over 1 MB");
      const size_t line = worker.answer.find('\n', before);
      if (line == std::string::npos) continue;
      if (line + 1 < worker.answer.size()) return fail(worker, "it wrote more than one line");
      if (worker.request == kNone || worker.sent_bytes < worker.text.size())
        return fail(worker, "it wrote a line without a request");
      worker.answer.pop_back();
      std::unique_lock lock(mutex_);
      const std::string request = requests_[worker.request];
      lock.unlock();
      const std::string error = options_.validate(request, worker.answer);
      if (!error.empty()) return fail(worker, error);
      worker.has_answered = any_answered_ = true;
      num_unanswered_ = 0;
      finish_request(worker, {std::move(worker.answer), ""});
      return;
    }
  }

  void finish_request(Worker& worker, Answer answer) {
    const std::lock_guard lock(mutex_);
    set_answer(std::exchange(worker.request, kNone), std::move(answer));
    worker.answer.clear();
  }

  // Requires mutex_.
  void set_answer(size_t request, Answer answer) {
    answers_[request] = std::move(answer);
    note_progress();
    if (++answered_ == answers_.size()) all_answered_.notify_all();
  }

  // Kills the program and fails its request. The next request starts a new program.
  void fail(Worker& worker, const std::string& error, std::chrono::milliseconds patience = {}) {
    const std::string how = end(worker, patience);
    if (worker.request != kNone) finish_request(worker, {"", str(error, " ", how)});
    worker = Worker();
  }

  std::string end(Worker& worker, std::chrono::milliseconds patience = {}) {
    worker.program.input.close();
    worker.program.output.close();
    return host_.end(std::exchange(worker.program.id, -1), patience);
  }

  WorkerHost& host_;
  const WorkerPoolOptions options_;
  // Used by the thread only.
  std::vector<Worker> workers_;
  bool any_answered_ = false;
  int num_unanswered_ = 0;  // timeouts of first answers while no program has answered
  WakeEvent wake_;

  std::mutex mutex_;
  std::condition_variable all_answered_;
  std::deque<std::string> requests_;
  std::vector<Answer> answers_;
  size_t next_ = 0, answered_ = 0;
  bool ended_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

WorkerPool::WorkerPool(WorkerHost& host, WorkerPoolOptions options)
    : loop_(std::make_unique<Loop>(host, std::move(options))) {}
WorkerPool::~WorkerPool() = default;

void WorkerPool::submit(std::string request) {
  loop_->submit(std::move(request));
}

std::vector<WorkerPool::Answer> WorkerPool::collect() {
  return loop_->collect();
}

}  // namespace cohort
