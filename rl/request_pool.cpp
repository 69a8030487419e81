#include "rl/request_pool.h"

#include <signal.h>

#include "core/progress.h"

namespace cohort {

void RequestPool::submit(std::string line, Key key) {
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    is_first = submitted_.empty();
    submitted_.push_back({num_begun_++, key, std::move(line)});
    ++num_unanswered_;
  }
  if (is_first) wake();
}

std::vector<RequestPool::Answer> RequestPool::take(Wait wait) {
  std::unique_lock lock(mutex_);
  answered_.wait(lock, [&] {
    return num_unanswered_ == 0 || failure_ || wait == Wait::kNone ||
           (wait == Wait::kOne && !answers_.empty());
  });
  if (failure_) std::rethrow_exception(failure_);
  std::vector<Answer> out;
  for (auto& [number, answer] : std::exchange(answers_, {})) out.push_back(std::move(answer));
  return out;
}

void RequestPool::cancel() {
  {
    const std::lock_guard lock(mutex_);
    submitted_.clear();
    answers_.clear();
    num_unanswered_ = 0;
    num_cancelled_ = num_begun_;
  }
  wake();
}

void RequestPool::start() {
  thread_ = std::thread([this] { run(); });
}

void RequestPool::end() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  wake();
  thread_.join();
}

void RequestPool::finish(const Request& request, Answer answer) {
  const std::lock_guard lock(mutex_);
  if (request.number < num_cancelled_) return;
  answer.key = request.key;
  answers_[request.number] = std::move(answer);
  note_progress();
  --num_unanswered_;
  answered_.notify_all();
}

void RequestPool::run() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock lock(mutex_);
  try {
    while (!ended_) {
      std::vector<Request> submitted = std::exchange(submitted_, {});
      const int64_t first = num_cancelled_;
      lock.unlock();
      serve(std::move(submitted), first);
      lock.lock();
    }
  } catch (...) {
    lock.lock();
    failure_ = std::current_exception();
    answered_.notify_all();
  }
}

}  // namespace cohort
